//! Files that are there whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::error::{Error, Result};

/// Writes a file beside its place, to the disk, and renames it into its place. What a process that died left beside it
/// is written over.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    replace_with(path, |file| file.write_all(bytes).map_err(Error::io(path, "write")))
}

/// [`replace`] with what `write` puts into the file.
pub(crate) fn replace_with(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let Some(name) = path.file_name() else { return Err(Error::file(path, "is not the name of a file")) };
    let mut partial = OsString::from(".");
    partial.push(name);
    partial.push(".partial");
    let partial = path.with_file_name(partial);
    let attempt = || {
        let mut file = File::create(&partial).map_err(Error::io(&partial, "create"))?;
        write(&mut file)?;
        file.sync_all().map_err(Error::io(&partial, "write to the disk"))?;
        fs::rename(&partial, path).map_err(Error::io(path, "replace"))
    };
    let renamed = attempt();
    if renamed.is_err() {
        // The error is the one to report.
        let _ = fs::remove_file(&partial);
    }
    renamed?;
    sync_folder(parent(path))
}

/// The folder that holds a file or folder.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Waits until a folder's list of names is on the disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        // Some network file systems cannot do this.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            Ok(())
        }
        result => result.map_err(Error::io(folder, "write to the disk")),
    }
}

/// Removes a file, if there is one.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(path, "remove")(error)),
        _ => Ok(()),
    }
}

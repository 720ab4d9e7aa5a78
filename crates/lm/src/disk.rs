//! Atomic file writes, locks against a second process, JSON with a checksum, memory-mapped files, and the files inside
//! the program.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

mod built_in;
pub(crate) mod header;
mod mapped;
mod seal;

pub use built_in::{BUILT_IN, EXAMPLE, QUESTION, built_in, is_built_in};
pub use mapped::{Mapped, file_bytes};
pub use seal::{Seal, read_sealed, seal, unseal};

/// Writes a file atomically: to a temporary file next to it, synced to the disk, then renamed. An existing file keeps
/// its mode, and a symbolic link stays one: the file that it points to is replaced. A temporary file left by a dead
/// process is overwritten.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    replace_with(path, |file| file.write_all(bytes).map_err(Error::io(path, "write")))
}

/// Same as [`replace`], with contents produced by `write`.
pub(crate) fn replace_with(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    // Renaming over a link would replace the link itself.
    let target = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() => {
            fs::canonicalize(path).map_err(Error::io(path, "follow the link to"))?
        }
        _ => path.to_path_buf(),
    };
    let path = target.as_path();
    let Some(name) = path.file_name() else { return Err(Error::file(path, "does not name a file")) };
    let mut partial = OsString::from(".");
    partial.push(name);
    partial.push(".partial");
    let partial = path.with_file_name(partial);
    let attempt = || {
        let mut file = File::create(&partial).map_err(Error::io(&partial, "create"))?;
        if let Ok(before) = fs::metadata(path) {
            file.set_permissions(before.permissions()).map_err(Error::io(&partial, "set the mode of"))?;
        }
        write(&mut file)?;
        file.sync_all().map_err(Error::io(&partial, "write to the disk"))?;
        fs::rename(&partial, path).map_err(Error::io(path, "replace"))
    };
    let renamed = attempt();
    if renamed.is_err() {
        // Report the original error instead.
        let _ = fs::remove_file(&partial);
    }
    renamed?;
    sync_folder(parent(path))
}

/// The folder that holds a file or folder.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Waits until a folder's entries are on the disk.
pub fn sync_folder(folder: &Path) -> Result<()> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        // Some network file systems do not support this.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            Ok(())
        }
        result => result.map_err(Error::io(folder, "write to the disk")),
    }
}

/// The contents of a file; `None` if there is none.
pub(crate) fn read_if_present(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some).map_err(Error::io(path, "read")),
    }
}

/// Fills `bytes` from a file, beginning at a byte of it, for any number of threads.
pub(crate) fn read_exact_at(file: &File, bytes: &mut [u8], start: u64) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, bytes, start);
    #[cfg(not(unix))]
    {
        use std::io::{Read, Seek};
        /// Serialises reads, because reading moves the file's position.
        static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut file = file;
        file.seek(io::SeekFrom::Start(start))?;
        file.read_exact(bytes)
    }
}

/// Whether a name is that of a file in a folder, not a path that leads elsewhere.
pub(crate) fn is_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(std::path::Component::Normal(_)), None))
}

/// Removes a file, if there is one.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(path, "remove")(error)),
        _ => Ok(()),
    }
}

/// A lock file that one process at a time can hold. It is removed when it is released.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    /// Takes the lock; returns `None` if another process holds it. On a file system without locks, it always succeeds.
    pub fn take(path: &Path) -> Result<Option<Self>> {
        loop {
            let file = File::options().create(true).append(true).open(path);
            let file = file.map_err(Error::io(path, "create"))?;
            if let Err(TryLockError::WouldBlock) = file.try_lock() {
                return Ok(None);
            }
            // The previous holder may have removed the file after it was opened here; then the lock is on a file that
            // nobody else will find.
            if is_at(&file, path) {
                return Ok(Some(Self { path: path.into(), _file: file }));
            }
        }
    }
}

/// Whether an open file is still the one at its path.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        match (fs::metadata(path), file.metadata()) {
            (Ok(there), Ok(own)) => (there.dev(), there.ino()) == (own.dev(), own.ino()),
            _ => false,
        }
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // If it cannot be removed, that is harmless.
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether two paths lead to the same file, also through links.
pub fn same_file(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        if let (Ok(a), Ok(b)) = (fs::metadata(a), fs::metadata(b)) {
            return (a.dev(), a.ino()) == (b.dev(), b.ino());
        }
    }
    match (fs::canonicalize(a), fs::canonicalize(b)) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    }
}

//! The checksum next to a `tokenizer.json`: `tokenizer.json.sha256`, in the format of `sha256sum`. It cannot be inside
//! the file, because other tools reject unknown keys.

use std::path::{Path, PathBuf};

use super::sha256;
use crate::disk;
use crate::error::{Error, Result};

/// The path of a file's checksum.
pub(super) fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".sha256");
    name.into()
}

/// Writes the checksum of a file with these contents.
pub(super) fn write(path: &Path, contents: &[u8]) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    disk::replace(&beside(path), format!("{}  {name}\n", sha256(contents)).as_bytes())
}

/// Verifies a file's contents against the checksum next to it, if there is one. The file name in it is ignored, because
/// both files may have been renamed.
pub(crate) fn compare(path: &Path, contents: &[u8]) -> Result<()> {
    let beside = beside(path);
    let Some(bytes) = disk::read_if_present(&beside)? else { return Ok(()) };
    let text = String::from_utf8(bytes).unwrap_or_default();
    let sum = text.split_whitespace().next().unwrap_or_default();
    if sum.len() != 64 || !sum.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        let message = format!(
            "is not a SHA-256 sum as `sha256sum` writes it; delete it to load `{}` without a check",
            path.display()
        );
        return Err(Error::damaged(&beside, message));
    }
    if !sum.eq_ignore_ascii_case(&sha256(contents)) {
        let message = format!(
            "does not have the checksum in `{}`; restore it from a copy, or delete that file if you \
             changed it on purpose",
            beside.display()
        );
        return Err(Error::damaged(path, message));
    }
    Ok(())
}

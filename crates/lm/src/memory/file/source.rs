//! The file of a bank, read by position: if it is truncated while in use, that is an ordinary error.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use march_engine::{checksum, ops::anchor_read};

use crate::disk::read_exact_at;
use crate::error::{Error, Result};

/// An open file, with its length at the time it was opened.
#[derive(Debug)]
pub(super) struct Source {
    pub path: PathBuf,
    pub length: usize,
    file: File,
}

impl Source {
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(path, File::open(path).map_err(Error::io(path, "open"))?)
    }

    pub fn new(path: &Path, file: File) -> Result<Self> {
        let metadata = file.metadata().map_err(Error::io(path, "open"))?;
        if metadata.is_dir() {
            return Err(Error::io(path, "open")(io::ErrorKind::IsADirectory.into()));
        }
        let length = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        Ok(Self { path: path.into(), length, file })
    }

    /// Reads the bytes of a range.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<u8>> {
        if range.end > self.length {
            return Err(self.cut_short(range));
        }
        let mut bytes = vec![0; range.len()];
        self.fill(range.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `bytes` from the file, beginning at `start`.
    pub fn fill(&self, start: usize, bytes: &mut [u8]) -> Result<()> {
        read_exact_at(&self.file, bytes, start as u64).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.cut_short(start..start + bytes.len()),
            _ => Error::io(&self.path, "read")(error),
        })
    }

    fn cut_short(&self, range: Range<usize>) -> Error {
        let message =
            format!("is damaged: it was cut short before byte {}; restore the file from a copy", range.end);
        Error::damaged(&self.path, message)
    }
}

/// Loads an anchor's state or tails when they are first read.
impl anchor_read::Source for Source {
    fn fetch(&self, start: usize, sum: u64, bytes: &mut [u8]) -> std::result::Result<(), String> {
        self.fill(start, bytes).map_err(|error| error.to_string())?;
        if checksum(bytes) == sum {
            return Ok(());
        }
        let message = format!(
            "is damaged: bytes {start} to {}, which hold an anchor, do not match the checksum written with \
             them; restore the file from a copy",
            start + bytes.len()
        );
        Err(Error::damaged(&self.path, message).to_string())
    }
}

//! The file of a bank, read by position: if it is truncated while in use, that is an ordinary error.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use march_engine::{checksum, ops::anchor_read};

use crate::error::{Error, Result};

/// An open file, with its length at the time it was opened.
#[derive(Debug)]
pub(super) struct Source {
    pub path: PathBuf,
    pub length: usize,
    #[cfg(unix)]
    file: File,
    /// Serialises reads, because reading moves the file's position.
    #[cfg(not(unix))]
    file: std::sync::Mutex<File>,
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
        #[cfg(not(unix))]
        let file = std::sync::Mutex::new(file);
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
        self.read_exact(start as u64, bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.cut_short(start..start + bytes.len()),
            _ => Error::io(&self.path, "read")(error),
        })
    }

    #[cfg(unix)]
    fn read_exact(&self, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, bytes, start)
    }

    #[cfg(not(unix))]
    fn read_exact(&self, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(bytes)
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

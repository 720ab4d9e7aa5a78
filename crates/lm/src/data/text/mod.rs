//! The documents of text files: `.txt`, `.jsonl`, `.jsonl.gz`, `.jsonl.zst`, `.parquet`. The last two need the features
//! `zstd` and `parquet`.

mod json_lines;
#[cfg(feature = "parquet")]
mod table;

use std::fs;
use std::path::{Path, PathBuf};

use self::json_lines::JsonLines;
pub use self::json_lines::{Compression, kind, lines};
#[cfg(feature = "parquet")]
pub use self::table::guarded;
use crate::error::{Error, Result};

/// The format of a file, determined by its extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The file is one document.
    Text,
    /// One JSON object per line.
    JsonLines(Compression),
    /// Parquet: a table with a text column.
    Parquet,
}

impl Format {
    /// The format of a file. Rejects other extensions, and formats that need a feature which is off.
    pub fn of(path: &Path) -> Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let known = [
            (".txt", Self::Text),
            (".jsonl", Self::JsonLines(Compression::None)),
            (".jsonl.gz", Self::JsonLines(Compression::Gzip)),
            (".jsonl.zst", Self::JsonLines(Compression::Zstd)),
            (".parquet", Self::Parquet),
        ];
        if let Some((_, format)) = known.iter().find(|(extension, _)| name.ends_with(extension)) {
            return match format {
                Self::Parquet if !cfg!(feature = "parquet") => Err(missing(path, "parquet")),
                Self::JsonLines(Compression::Zstd) if !cfg!(feature = "zstd") => Err(missing(path, "zstd")),
                format => Ok(*format),
            };
        }
        let list = known.map(|(extension, _)| extension).join(", ");
        Err(Error::file(path, format!("has an unknown extension; the extensions of text files are {list}")))
    }
}

/// One record of a file.
#[derive(Debug)]
pub enum Record {
    /// A document.
    Document(String),
    /// An invalid record; the error says where and why. The records after it can still be read.
    Broken(Error),
}

/// The documents of one file, in order. A position in it is the number of lines or rows before it.
pub trait Documents: Send {
    /// Returns the next record. After an error nothing more can be read.
    fn read(&mut self) -> Result<Option<Record>>;
    /// Moves to a position that [`Documents::place`] returned; only valid before anything is read.
    fn skip_to(&mut self, place: u64) -> Result<()>;
    /// Number of lines or rows read.
    fn place(&self) -> u64;
    /// Approximate number of the file's bytes read.
    fn bytes(&self) -> u64;
}

/// Opens a file; `text_column` is the key or column that holds the text.
pub fn open(path: &Path, text_column: &str) -> Result<Box<dyn Documents>> {
    check(path)?;
    Ok(match Format::of(path)? {
        Format::Text => Box::new(WholeFile { path: path.into(), place: 0, bytes: 0 }),
        Format::JsonLines(compression) => Box::new(JsonLines::open(path, compression, text_column)?),
        #[cfg(feature = "parquet")]
        Format::Parquet => Box::new(table::Table::open(path, text_column)?),
        #[cfg(not(feature = "parquet"))]
        Format::Parquet => return Err(missing(path, "parquet")),
    })
}

/// The size of a text file in bytes. Rejects missing files, folders, and unknown formats.
pub fn check(path: &Path) -> Result<u64> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(Error::file(
            path,
            format!("is a folder; name the files in it, as in {}/*.jsonl", path.display()),
        )),
        Ok(metadata) => Format::of(path).map(|_| metadata.len()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(Error::file(path, "does not exist; check the name"))
        }
        Err(error) => Err(Error::io(path, "read")(error)),
    }
}

/// A file that is one document.
struct WholeFile {
    path: PathBuf,
    place: u64,
    bytes: u64,
}

impl Documents for WholeFile {
    fn read(&mut self) -> Result<Option<Record>> {
        if self.place > 0 {
            return Ok(None);
        }
        let bytes = fs::read(&self.path).map_err(Error::io(&self.path, "read"))?;
        self.place = 1;
        self.bytes = bytes.len() as u64;
        Ok(Some(match String::from_utf8(bytes) {
            Ok(text) => Record::Document(text),
            Err(error) => {
                let valid = error.utf8_error().valid_up_to();
                let before = error.as_bytes().get(..valid).unwrap_or_default();
                let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
                let message =
                    format!("line {line}: is not UTF-8 (byte {valid} of the file); convert it first");
                Record::Broken(Error::file(&self.path, message))
            }
        }))
    }

    fn skip_to(&mut self, place: u64) -> Result<()> {
        self.place = place;
        Ok(())
    }

    fn place(&self) -> u64 {
        self.place
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The error for a file whose format this build does not read.
fn missing(path: &Path, feature: &str) -> Error {
    let message = format!("cannot be read: march-lm was built without its feature `{feature}`; switch it on");
    Error::file(path, message)
}

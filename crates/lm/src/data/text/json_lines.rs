//! One JSON object per line, with the text under one key.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::{Documents, Record};
use crate::error::{Error, Result};

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// `.gz`
    Gzip,
    /// `.zst`
    Zstd,
}

/// Bytes per read.
const BUFFER: usize = 1 << 18;

/// Support zstd windows up to 2 GiB, as produced by `zstd --long=31`.
#[cfg(feature = "zstd")]
const ZSTD_WINDOW_LOG: u32 = 31;

pub(super) struct JsonLines {
    path: PathBuf,
    key: String,
    input: Box<dyn BufRead + Send>,
    line: u64,
    /// Number of bytes read from the file, as stored (compressed or not).
    read: Arc<AtomicU64>,
    buffer: Vec<u8>,
}

impl JsonLines {
    pub fn open(path: &Path, compression: Compression, key: &str) -> Result<Self> {
        let read = Arc::new(AtomicU64::new(0));
        let file = CountingReader { inner: open(path)?, read: read.clone() };
        let input = decompressed(path, file, compression)?;
        Ok(Self { path: path.into(), key: key.into(), input, line: 0, read, buffer: Vec::new() })
    }

    /// Reads one line into the buffer; returns whether there was one.
    fn read_line(&mut self) -> Result<bool> {
        self.buffer.clear();
        let count = self.input.read_until(b'\n', &mut self.buffer).map_err(|error| {
            let message =
                format!("line {}: could not read further: {error}; the file may be truncated", self.line + 1);
            Error::file(&self.path, message)
        })?;
        if count > 0 {
            self.line += 1;
        }
        Ok(count > 0)
    }
}

/// The lines of a file, compressed or not.
pub fn lines(path: &Path, compression: Compression) -> Result<Box<dyn BufRead + Send>> {
    decompressed(path, open(path)?, compression)
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(Error::io(path, "open"))
}

fn decompressed(
    path: &Path,
    file: impl Read + Send + 'static,
    compression: Compression,
) -> Result<Box<dyn BufRead + Send>> {
    Ok(match compression {
        Compression::None => Box::new(BufReader::with_capacity(BUFFER, file)),
        Compression::Gzip => {
            let file = BufReader::with_capacity(BUFFER, file);
            Box::new(BufReader::with_capacity(BUFFER, flate2::bufread::MultiGzDecoder::new(file)))
        }
        Compression::Zstd => zstandard(path, file)?,
    })
}

#[cfg(feature = "zstd")]
fn zstandard(path: &Path, file: impl Read + Send + 'static) -> Result<Box<dyn BufRead + Send>> {
    let decoder = zstd::Decoder::new(file).and_then(|mut decoder| {
        decoder.window_log_max(ZSTD_WINDOW_LOG)?;
        Ok(decoder)
    });
    let decoder = decoder.map_err(Error::io(path, "read"))?;
    Ok(Box::new(BufReader::with_capacity(BUFFER, decoder)))
}

#[cfg(not(feature = "zstd"))]
fn zstandard(path: &Path, _file: impl Read) -> Result<Box<dyn BufRead + Send>> {
    Err(super::missing(path, "zstd"))
}

impl Documents for JsonLines {
    fn read(&mut self) -> Result<Option<Record>> {
        while self.read_line()? {
            let mut line = self.buffer.as_slice();
            if self.line == 1 {
                // Skip a byte order mark, which some editors write.
                line = line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line);
            }
            let line = line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            return Ok(Some(match text_of(line, &self.key) {
                Ok(text) => Record::Document(text),
                Err(message) => {
                    Record::Broken(Error::file(&self.path, format!("line {}: {message}", self.line)))
                }
            }));
        }
        Ok(None)
    }

    fn skip_to(&mut self, lines: u64) -> Result<()> {
        while self.line < lines {
            if !self.read_line()? {
                let message =
                    format!("has {} lines, but {lines} were read before; it has changed", self.line);
                return Err(Error::file(&self.path, message));
            }
        }
        Ok(())
    }

    fn place(&self) -> u64 {
        self.line
    }

    fn bytes(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }
}

/// The text of a line, or an error message.
fn text_of(line: &[u8], key: &str) -> std::result::Result<String, String> {
    let line = std::str::from_utf8(line)
        .map_err(|error| format!("is not UTF-8 (byte {} of the line)", error.valid_up_to()))?;
    let mut deserializer = serde_json::Deserializer::from_str(line);
    let value = Key(key).deserialize(&mut deserializer).and_then(|value| {
        deserializer.end()?;
        Ok(value)
    });
    match value {
        Ok(Some(Value::String(text))) => Ok(text),
        Ok(Some(other)) => Err(format!("`{key}` is {}, not a text", kind(&other))),
        Ok(None) => Err(format!("has no `{key}`{}", keys(line))),
        Err(error) => {
            let message = error.to_string();
            let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(message, _)| message);
            Err(format!("is not a JSON object: {message} (column {})", error.column()))
        }
    }
}

/// What a value is, for an error message.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The keys of a line that lacks the text, for an error message.
fn keys(line: &str) -> String {
    const NAMED: usize = 5;
    let Ok(Value::Object(object)) = serde_json::from_str(line) else { return String::new() };
    let named: Vec<String> = object.keys().take(NAMED).map(|key| format!("`{key}`")).collect();
    if named.is_empty() {
        return "; it is empty".into();
    }
    let others = if object.len() > NAMED { ", …" } else { "" };
    format!("; it has {}{others}: name the one with the text with --text-column", named.join(", "))
}

/// Extracts the value of one key from an object and skips the others. If there are several, the last counts.
struct Key<'k>(&'k str);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = Option<Value>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Key<'_> {
    type Value = Option<Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut value = None;
        while let Some(found) = map.next_key_seed(StringEquals(self.0))? {
            if found {
                value = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(value)
    }
}

/// Tests whether a string is the expected one.
struct StringEquals<'k>(&'k str);

impl<'de> DeserializeSeed<'de> for StringEquals<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for StringEquals<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, text: &str) -> std::result::Result<bool, E> {
        Ok(text == self.0)
    }
}

/// Counts the bytes that are read.
struct CountingReader<R> {
    inner: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

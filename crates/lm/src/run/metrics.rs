//! The lines of a run's `metrics.jsonl`, each a JSON object with its checksum.

use std::path::Path;

use serde_json::Value;

use crate::disk::{Seal, unseal};
use crate::error::{Error, Result};

/// Reads a run's `metrics.jsonl`: one value per line, without its checksum.
///
/// A last line without a line break is an interrupted write; it is omitted unless its checksum shows that it is
/// complete. Any other line must be a JSON object with a correct checksum. All lines may lack a checksum, as in earlier
/// versions, but not only some of them.
pub fn read_metrics(path: &Path) -> Result<Vec<Value>> {
    let bytes = std::fs::read(path).map_err(Error::io(path, "read"))?;
    let mut lines = Lines::default();
    let (mut values, taken) = lines.read(path, &bytes)?;
    values.extend(lines.read_last(path, &bytes[taken..])?);
    Ok(values)
}

/// The lines of a `metrics.jsonl` that is still being written: the state between one read and the next.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lines {
    count: u64,
    /// Whether lines have checksums; `None` before the first.
    sealed: Option<bool>,
}

impl Lines {
    /// Reads the complete lines of the bytes that follow; returns them and their number of bytes. After an error
    /// nothing was consumed.
    pub fn read(&mut self, path: &Path, bytes: &[u8]) -> Result<(Vec<Value>, usize)> {
        let mut after = *self;
        let mut values = Vec::new();
        let mut taken = 0;
        for line in bytes.split_inclusive(|&byte| byte == b'\n') {
            if let Some(line) = line.strip_suffix(b"\n") {
                values.push(after.value(path, line)?);
                taken += line.len() + 1;
            }
        }
        *self = after;
        Ok((values, taken))
    }

    fn value(&mut self, path: &Path, line: &[u8]) -> Result<Value> {
        self.count += 1;
        let damaged = |what: &str| self.damaged(path, what);
        let text = std::str::from_utf8(line).map_err(|_| damaged("it is not UTF-8"))?;
        let mut value = match serde_json::from_str(text) {
            Ok(Value::Object(value)) => value,
            Ok(_) => return Err(damaged("it is not a JSON object")),
            Err(error) => return Err(damaged(&error.to_string())),
        };
        let sealed = match unseal(text) {
            Seal::Sealed => true,
            Seal::Missing => false,
            Seal::Broken => return Err(damaged("its checksum is wrong")),
        };
        match (self.sealed, sealed) {
            (Some(true), false) => return Err(damaged("it has no checksum, but the lines before it have")),
            (Some(false), true) => {
                return Err(damaged("it has a checksum, but the lines before it have none"));
            }
            _ => self.sealed = Some(sealed),
        }
        if sealed {
            value.shift_remove("checksum");
        }
        Ok(Value::Object(value))
    }

    /// The value of a last line without a line break, if it is complete. Rejects one with more than a complete line,
    /// which no interrupted write leaves.
    fn read_last(&mut self, path: &Path, rest: &[u8]) -> Result<Option<Value>> {
        let text = String::from_utf8_lossy(rest);
        let mut ends = text.rmatch_indices('}').take(2).map(|(brace, _)| brace + 1);
        match ends.find(|&end| unseal(&text[..end]) == Seal::Sealed) {
            Some(end) if end == text.len() => self.value(path, rest).map(Some),
            Some(_) => {
                self.count += 1;
                Err(self.damaged(path, "it has extra bytes after its end"))
            }
            None => Ok(None),
        }
    }

    fn damaged(&self, path: &Path, what: &str) -> Error {
        let message = format!(
            "line {} is damaged: {what}; restore the file from a copy, or move it away to continue the run without the \
             lines so far",
            self.count
        );
        Error::damaged(path, message)
    }
}

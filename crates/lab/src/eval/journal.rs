//! The answers of an evaluation as they come, so that an interrupted run resumes without asking anything twice.
//!
//! A journal is a file of lines: a header that identifies what was asked of which model, then one line per finished
//! document. Every line ends with its own checksum. A line that was cut short, by a kill or a full disk, can only be
//! the last one; it is removed when the file is opened again.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::request::{Answer, Request};
use march_lm::disk;
use march_lm::{Error, Result};

/// Raised when the meaning of a line changes.
const FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Header {
    march_eval_journal: u32,
    /// Identifies the model, its tokenizer and the memory policy.
    asked_of: String,
}

/// One finished document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The task, with its length if it has one.
    pub task: String,
    /// The number of the document.
    pub index: usize,
    /// Identifies the document's requests.
    pub requests: String,
    /// The answers to the requests.
    pub answers: Vec<Answer>,
}

impl Entry {
    /// A document with its answers.
    pub fn new(task: &str, index: usize, requests: &[Request], answers: Vec<Answer>) -> Self {
        Self { task: task.into(), index, requests: identity(requests), answers }
    }
}

/// Identifies requests: a checksum of their text.
fn identity(requests: &[Request]) -> String {
    let text = serde_json::to_vec(requests).unwrap_or_default();
    format!("{:016x}", march_engine::checksum(&text))
}

/// An open journal.
pub struct Journal {
    path: PathBuf,
    file: File,
    entries: HashMap<(String, usize), Entry>,
}

impl Journal {
    /// The journal of a results file.
    pub fn path_of(output: &Path) -> PathBuf {
        let mut name = output.file_name().unwrap_or_default().to_os_string();
        name.push(".journal");
        output.with_file_name(name)
    }

    /// Opens a journal, or creates it. Rejects the journal of another model, tokenizer or policy.
    pub fn open(path: &Path, asked_of: &str) -> Result<Self> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(Error::io(path, "open"))?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(Error::file(path, "is in use: another process runs this evaluation"));
        }
        let bytes = std::fs::read(path).map_err(Error::io(path, "read"))?;
        let (whole, entries) = read(path, &bytes, asked_of)?;
        file.set_len(whole as u64).map_err(Error::io(path, "shorten"))?;
        file.seek(SeekFrom::End(0)).map_err(Error::io(path, "read"))?;
        let mut journal = Self { path: path.into(), file, entries };
        if whole == 0 {
            journal.line(&Header { march_eval_journal: FORMAT, asked_of: asked_of.into() })?;
        }
        Ok(journal)
    }

    /// Number of finished documents.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no document is finished.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The answers that an earlier run got for a document. Rejects a document that has changed since.
    pub fn answers(&self, task: &str, index: usize, requests: &[Request]) -> Result<Option<&[Answer]>> {
        let Some(entry) = self.entries.get(&(task.to_string(), index)) else { return Ok(None) };
        if entry.requests == identity(requests) {
            return Ok(Some(&entry.answers));
        }
        let message = format!(
            "has answers to document {index} of {task}, but the document has changed since; remove the file to start \
             over"
        );
        Err(Error::file(&self.path, message))
    }

    /// Records a finished document.
    pub fn record(&mut self, entry: Entry) -> Result<()> {
        self.line(&entry)?;
        self.entries.insert((entry.task.clone(), entry.index), entry);
        Ok(())
    }

    /// Deletes the file, once the results are written.
    pub fn remove(self) -> Result<()> {
        std::fs::remove_file(&self.path).map_err(Error::io(&self.path, "remove"))
    }

    fn line(&mut self, value: &impl Serialize) -> Result<()> {
        let text =
            serde_json::to_string(value).map_err(|error| Error::file(&self.path, error.to_string()))?;
        let line = disk::seal(&text) + "\n";
        self.file.write_all(line.as_bytes()).map_err(Error::io(&self.path, "write"))
    }
}

/// The bytes of all whole lines, and the entries.
fn read(path: &Path, bytes: &[u8], asked_of: &str) -> Result<(usize, HashMap<(String, usize), Entry>)> {
    let damaged = |line: usize, what: &str| {
        Error::damaged(path, format!("line {line} {what}; remove the file to start over"))
    };
    let mut entries = HashMap::new();
    let mut whole = 0;
    for (number, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let last = whole + line.len() == bytes.len();
        let text = str::from_utf8(line).ok().filter(|text| text.ends_with('\n'));
        let Some(text) = text.map(str::trim_end).filter(|text| disk::unseal(text) == disk::Seal::Sealed)
        else {
            if last {
                break;
            }
            return Err(damaged(number + 1, "is damaged: it does not have the checksum at its end"));
        };
        if number == 0 {
            let header: Header = serde_json::from_str(text).map_err(|_| {
                Error::file(path, "is not the journal of an evaluation; choose another --output")
            })?;
            if header.march_eval_journal != FORMAT {
                let message =
                    format!("has format {}; this program reads {FORMAT}", header.march_eval_journal);
                return Err(Error::file(path, message));
            }
            if header.asked_of != asked_of {
                let message = format!(
                    "belongs to an interrupted evaluation of something else ({}; now {asked_of}); finish that with \
                     its own command, remove the file, or choose another --output",
                    header.asked_of
                );
                return Err(Error::file(path, message));
            }
        } else {
            let entry: Entry =
                serde_json::from_str(text).map_err(|_| damaged(number + 1, "is not a finished document"))?;
            entries.insert((entry.task.clone(), entry.index), entry);
        }
        whole += line.len();
    }
    Ok((whole, entries))
}

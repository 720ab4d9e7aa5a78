//! `checksums.json`: the size and checksum of every file in a checkpoint folder, so that a changed byte is detected.
//!
//! A file's checksum is computed from the checksums of its 1 MiB blocks, so blocks can be summed while they are written
//! and verified in any order. The list carries its own checksum. A folder without a list, such as one made by another
//! tool, loads without these checks.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use march_engine::checksum;
use serde::{Deserialize, Serialize};

use crate::disk::{Seal, read_if_present, seal, unseal};
use crate::error::{Error, Result};

/// The name of the file with the checksums.
pub const CHECKSUMS_FILE: &str = "checksums.json";
/// Files that are needed only to resume a run. A copy of a checkpoint may lack them.
const TRAINING_FILES: [&str; 2] = ["optimizer.safetensors", "progress.json"];
/// Bytes per checksum.
pub(super) const BLOCK: usize = 1 << 20;
const FORMAT: &str = "march checksums";
const VERSION: u32 = 1;

/// The contents of `checksums.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Checksums {
    format: String,
    version: u32,
    files: BTreeMap<String, FileSum>,
}

/// The size and checksum of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileSum {
    pub bytes: u64,
    /// The checksum as 16 hexadecimal digits.
    pub checksum: String,
}

impl Checksums {
    pub fn new(files: BTreeMap<String, FileSum>) -> Self {
        Self { format: FORMAT.into(), version: VERSION, files }
    }

    /// The list in its written form.
    pub fn to_json(&self) -> String {
        seal(&(serde_json::to_string_pretty(self).unwrap_or_default() + "\n"))
    }

    /// Reads the list of a folder; `None` if there is no such file.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(CHECKSUMS_FILE);
        let Some(bytes) = read_if_present(&path)? else { return Ok(None) };
        let damaged = |what: &str| {
            let remedy = "restore the folder from a copy, or delete this file to load the folder unchecked";
            Error::damaged(&path, format!("{what}; {remedy}"))
        };
        let text = String::from_utf8(bytes).map_err(|_| damaged("is damaged: it is not text"))?;
        if unseal(&text) != Seal::Sealed {
            return Err(damaged("is damaged: it does not have the checksum that was written with it"));
        }
        let list: Self = serde_json::from_str(&text)
            .map_err(|error| damaged(&format!("is not a list of checksums: {error}")))?;
        if list.format != FORMAT || list.version != VERSION {
            let found = format!("has format `{}` version {}", list.format, list.version);
            return Err(Error::file(
                &path,
                format!("{found}; this program reads `{FORMAT}` version {VERSION}"),
            ));
        }
        Ok(Some(list))
    }

    /// Rejects a folder in which a listed file is missing or has another size, or in which a file other than a tensor
    /// file has changed; with `tensors`, also in which a tensor file has changed, which loading finds as well. Files
    /// that only training needs are checked only if the folder is opened for `training`.
    pub fn check(&self, folder: &Path, tensors: bool, training: bool) -> Result<()> {
        for (name, sum) in &self.files {
            if !training && TRAINING_FILES.contains(&name.as_str()) {
                continue;
            }
            let path = folder.join(name);
            let found = match fs::metadata(&path) {
                Ok(metadata) => metadata.len(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let message = format!("is missing; `{CHECKSUMS_FILE}` lists it: copy the folder again");
                    return Err(Error::damaged(&path, message));
                }
                Err(error) => return Err(Error::io(&path, "read")(error)),
            };
            if found != sum.bytes {
                let message = format!(
                    "has {found} bytes, but `{CHECKSUMS_FILE}` says {}: it was changed or damaged; {REMEDY}",
                    sum.bytes
                );
                return Err(Error::damaged(&path, message));
            }
            if tensors || !name.ends_with(".safetensors") {
                let bytes = fs::read(&path).map_err(Error::io(&path, "read"))?;
                self.compare(&path, &sum.checksum, file_checksum(&block_checksums(&bytes)))?;
            }
        }
        Ok(())
    }

    /// The recorded checksum of a tensor file. Rejects a file that is not listed.
    pub fn of(&self, path: &Path) -> Result<&str> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        match self.files.get(name) {
            Some(sum) => Ok(&sum.checksum),
            None => {
                let message = format!("is not listed in the folder's `{CHECKSUMS_FILE}`; {REMEDY}");
                Err(Error::damaged(path, message))
            }
        }
    }

    /// Rejects a file whose checksum differs from the recorded one.
    pub fn compare(&self, path: &Path, listed: &str, found: u64) -> Result<()> {
        if *listed == hexadecimal(found) {
            return Ok(());
        }
        let message =
            format!("does not have the checksum in `{CHECKSUMS_FILE}`: it was changed or damaged; {REMEDY}");
        Err(Error::damaged(path, message))
    }
}

/// Verifies every file of a folder against its list of checksums, if it has one.
pub fn verify_folder(folder: &Path) -> Result<()> {
    Checksums::read(folder)?.map_or(Ok(()), |list| list.check(folder, true, true))
}

const REMEDY: &str = "restore the folder from a copy, or delete that list if the change is intended";

fn hexadecimal(sum: u64) -> String {
    format!("{sum:016x}")
}

fn block_checksums(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(BLOCK).map(checksum).collect()
}

/// The checksum of a file, computed from those of its blocks.
pub(super) fn file_checksum(blocks: &[u64]) -> u64 {
    let bytes: Vec<u8> = blocks.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    checksum(&bytes)
}

/// Forwards bytes to a writer and computes their checksum.
pub(super) struct ChecksumWriter<W> {
    inner: W,
    block: Vec<u8>,
    blocks: Vec<u64>,
    bytes: u64,
}

impl<W: Write> ChecksumWriter<W> {
    pub fn new(inner: W) -> Self {
        Self { inner, block: Vec::with_capacity(BLOCK), blocks: Vec::new(), bytes: 0 }
    }

    /// Returns the writer, and the size and checksum of what was written.
    pub fn finish(mut self) -> io::Result<(W, FileSum)> {
        if !self.block.is_empty() {
            self.inner.write_all(&self.block)?;
            self.blocks.push(checksum(&self.block));
        }
        let sum = FileSum { bytes: self.bytes, checksum: hexadecimal(file_checksum(&self.blocks)) };
        Ok((self.inner, sum))
    }
}

impl<W: Write> Write for ChecksumWriter<W> {
    /// Writes whole blocks to the file, so that no other buffer is needed.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(BLOCK - self.block.len());
        self.block.extend_from_slice(&bytes[..taken]);
        self.bytes += taken as u64;
        if self.block.len() == BLOCK {
            self.inner.write_all(&self.block)?;
            self.blocks.push(checksum(&self.block));
            self.block.clear();
        }
        Ok(taken)
    }

    /// Does nothing: a partial block is written at the end.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

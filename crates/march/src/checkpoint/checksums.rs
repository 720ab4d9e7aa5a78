//! `checksums.json`: the size and checksum of every file of a checkpoint folder, so that a changed byte is noticed.
//!
//! A file's checksum is taken over the checksums of its blocks of 1 MiB. Blocks can be written as they come and compared
//! in any order. The list is sealed with a checksum of its own. A folder without a list, such as one made by another
//! tool, loads without these checks.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use march_engine::checksum;
use serde::{Deserialize, Serialize};

use crate::disk::{Seal, seal, unseal};
use crate::error::{Error, Result};

/// The name of the list.
pub const CHECKSUMS_FILE: &str = "checksums.json";
/// Files that only going on with a run needs. A copy of a checkpoint may lack them.
const TRAINING_FILES: [&str; 2] = ["optimizer.safetensors", "progress.json"];
/// Bytes under one checksum.
pub(super) const BLOCK: usize = 1 << 20;
const FORMAT: &str = "march checksums";
const VERSION: u32 = 1;

/// The list.
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
    /// 16 hexadecimal digits.
    pub checksum: String,
}

impl Checksums {
    pub fn new(files: BTreeMap<String, FileSum>) -> Self {
        Self { format: FORMAT.into(), version: VERSION, files }
    }

    /// The list as it is written.
    pub fn to_json(&self) -> String {
        seal(&(serde_json::to_string_pretty(self).unwrap_or_default() + "\n"))
    }

    /// The list of a folder; none where there is no such file.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(CHECKSUMS_FILE);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(&path, "read")(error)),
        };
        let damaged = |what: &str| {
            let remedy = "take another copy of the folder, or delete this file to load the folder unchecked";
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

    /// Refuses a folder in which a file of the list is missing or has another size, or in which one of those that
    /// hold no tensors has changed. Files of tensors are compared while they are loaded. Files that only training needs
    /// are looked at where the folder is to be trained on (`training`).
    pub fn check_folder(&self, folder: &Path, training: bool) -> Result<()> {
        self.check(folder, false, training)
    }

    fn check(&self, folder: &Path, tensors: bool, training: bool) -> Result<()> {
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

    /// The checksum of a file of tensors. Refuses a file that is not listed.
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

    /// Refuses a file whose checksum is another than the listed one.
    pub fn compare(&self, path: &Path, listed: &str, found: u64) -> Result<()> {
        if *listed == hexadecimal(found) {
            return Ok(());
        }
        let message =
            format!("does not have the checksum in `{CHECKSUMS_FILE}`: it was changed or damaged; {REMEDY}");
        Err(Error::damaged(path, message))
    }
}

/// Compares every file of a folder with its list of checksums, if it has one.
pub fn verify_folder(folder: &Path) -> Result<()> {
    Checksums::read(folder)?.map_or(Ok(()), |list| list.check(folder, true, true))
}

const REMEDY: &str = "take another copy of the folder, or delete that list if the change is on purpose";

fn hexadecimal(sum: u64) -> String {
    format!("{sum:016x}")
}

fn block_checksums(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(BLOCK).map(checksum).collect()
}

/// The checksum of a file by those of its blocks.
pub(super) fn file_checksum(blocks: &[u64]) -> u64 {
    let bytes: Vec<u8> = blocks.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    checksum(&bytes)
}

/// Passes bytes on to a writer and sums them up.
pub(super) struct Summing<W> {
    inner: W,
    block: Vec<u8>,
    blocks: Vec<u64>,
    bytes: u64,
}

impl<W: Write> Summing<W> {
    pub fn new(inner: W) -> Self {
        Self { inner, block: Vec::with_capacity(BLOCK), blocks: Vec::new(), bytes: 0 }
    }

    /// The writer, and the size and checksum of what was written.
    pub fn finish(mut self) -> io::Result<(W, FileSum)> {
        if !self.block.is_empty() {
            self.inner.write_all(&self.block)?;
            self.blocks.push(checksum(&self.block));
        }
        let sum = FileSum { bytes: self.bytes, checksum: hexadecimal(file_checksum(&self.blocks)) };
        Ok((self.inner, sum))
    }
}

impl<W: Write> Write for Summing<W> {
    /// Blocks go to the file whole, so that no other buffer is needed.
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

    /// Does nothing: the part of a block is written at the end.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

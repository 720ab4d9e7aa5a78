//! The checksums of a shard: one per 1 MiB block of its file; the last block may be shorter.
//!
//! In `meta.json` and `progress.json` they are one string, with 16 hexadecimal digits per block.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use march_engine::checksum;

use crate::disk::read_exact_at;
use crate::error::{Error, Result};

/// Bytes per block; a whole number of tokens.
pub(super) const BLOCK: u64 = 1 << 20;

/// Hexadecimal digits of a block's checksum.
pub(super) const DIGITS: usize = 16;

/// The checksum of a block in its written form.
pub(super) fn digits(block: &[u8]) -> String {
    format!("{:016x}", checksum(block))
}

/// Parses the checksums of a file of `bytes` bytes; `None` if there is not exactly one per block.
pub(super) fn parse(text: &str, bytes: u64) -> Option<Vec<u64>> {
    let digits = bytes.div_ceil(BLOCK).checked_mul(DIGITS as u64)?;
    if text.len() as u64 != digits || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let number = |digits| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
    text.as_bytes().chunks(DIGITS).map(number).collect()
}

/// Verifies the first `bytes` bytes of a file against their checksums, which are in the file `named`. Returns the last
/// block.
pub(super) fn compare(
    path: &Path,
    bytes: u64,
    checksums: &[u64],
    named: &str,
    advice: &str,
) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(Error::io(path, "open"))?;
    let mut block = Vec::new();
    for (number, &expected) in (0..).zip(checksums) {
        read(&file, path, range(number, bytes), &mut block)?;
        if checksum(&block) != expected {
            return Err(differs(path, range(number, bytes), named, advice));
        }
    }
    Ok(block)
}

/// The checksums of the first `bytes` bytes of a file, in their written form.
pub(super) fn of_file(path: &Path, bytes: u64) -> Result<String> {
    let file = File::open(path).map_err(Error::io(path, "open"))?;
    let mut block = Vec::new();
    let mut text = String::new();
    for number in 0..bytes.div_ceil(BLOCK) {
        read(&file, path, range(number, bytes), &mut block)?;
        text += &digits(&block);
    }
    Ok(text)
}

/// A file in which each block is verified against its checksum before it is first used. It is read without a memory
/// map, so a file that is truncated while in use causes an error instead of ending the process.
#[derive(Debug)]
pub(super) struct CheckedFile {
    file: File,
    /// One bit for each verified block.
    compared: Vec<AtomicU64>,
}

impl CheckedFile {
    pub fn open(path: &Path, bytes: u64) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(path, "open"))?;
        let words = bytes.div_ceil(BLOCK).div_ceil(u64::BITS.into());
        Ok(Self { file, compared: (0..words).map(|_| AtomicU64::new(0)).collect() })
    }

    /// Replaces the contents of `out` with a range of the file, which has `bytes` bytes.
    pub fn read(
        &self,
        path: &Path,
        within: Range<u64>,
        bytes: u64,
        checksums: Option<&[u64]>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        for number in within.start / BLOCK..within.end.div_ceil(BLOCK) {
            let Some(expected) = checksums.and_then(|sums| sums.get(number as usize)) else { continue };
            let (word, bit) = (&self.compared[number as usize / 64], 1 << (number % 64));
            // Two threads may verify the same block; nothing else depends on the bit.
            if word.load(Ordering::Relaxed) & bit == 0 {
                read(&self.file, path, range(number, bytes), out)?;
                if checksum(out) != *expected {
                    let advice = "copy it again, or prepare the data again";
                    return Err(differs(path, range(number, bytes), super::shards::META_FILE, advice));
                }
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
        read(&self.file, path, within, out)
    }
}

/// The byte range of a block in a file of `bytes` bytes.
fn range(number: u64, bytes: u64) -> Range<u64> {
    let start = number * BLOCK;
    start..(start + BLOCK).min(bytes)
}

fn differs(path: &Path, range: Range<u64>, named: &str, advice: &str) -> Error {
    let Range { start, end } = range;
    let message = format!("is damaged: bytes {start} to {end} do not match their checksum in `{named}`;");
    Error::damaged(path, format!("{message} {advice}"))
}

/// Replaces the contents of `out` with a range of a file.
fn read(file: &File, path: &Path, range: Range<u64>, out: &mut Vec<u8>) -> Result<()> {
    let length = usize::try_from(range.end.saturating_sub(range.start));
    out.clear();
    out.resize(length.map_err(|_| Error::Request("the range does not fit into memory".into()))?, 0);
    read_exact_at(file, out, range.start).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            let message = format!("is damaged: it ends before byte {}; copy it again", range.end);
            Error::damaged(path, message)
        }
        _ => Error::io(path, "read")(error),
    })
}

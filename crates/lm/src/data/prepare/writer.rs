//! Writes tokens into shards of equal length, with the checksums of their blocks.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::progress::PROGRESS_FILE;
use super::{shard_file, shard_number, shards_in};
use crate::data::blocks::{self, BLOCK, DIGITS};
use crate::data::shards::{ShardMeta, TokenType};
use crate::disk;
use crate::error::{Error, Result};

/// Advice for a folder that cannot be resumed.
const ADVICE: &str = "start over with --force";

pub(super) struct Writer<'a> {
    folder: &'a Path,
    token_type: TokenType,
    shard_tokens: u64,
    /// Number of tokens in all shards.
    tokens: u64,
    /// The shard that is not full yet; `None` at a shard boundary.
    file: Option<(PathBuf, File)>,
    /// The bytes of its block that is not full yet.
    block: Vec<u8>,
    /// How many of these bytes are in the file.
    written: usize,
    /// For each shard, the checksums of its finished blocks.
    checksums: Vec<String>,
    /// Whether a write failed, so that the contents of the files are unknown.
    failed: bool,
}

impl<'a> Writer<'a> {
    /// Resumes after `tokens` tokens that an earlier run wrote, which must match these checksums. Anything written
    /// after them is truncated.
    pub fn new(
        folder: &'a Path,
        token_type: TokenType,
        shard_tokens: u64,
        tokens: u64,
        mut checksums: Vec<String>,
    ) -> Result<Self> {
        let (full, rest) = (tokens / shard_tokens, tokens % shard_tokens);
        let kept = full + u64::from(rest > 0);
        let expected = |number: u64| if number < full { shard_tokens } else { rest } * token_type.bytes();
        for number in 0..kept {
            let path = folder.join(shard_file(number));
            let size = fs::metadata(&path).map_err(Error::io(&path, "read"))?.len();
            let expected = expected(number);
            let whole = if number < full { size == expected } else { size >= expected };
            if !whole {
                let message = format!("has {size} bytes instead of {expected}; {ADVICE}");
                return Err(Error::damaged(&path, message));
            }
        }
        let mut block = Vec::new();
        for number in 0..kept {
            let bytes = expected(number);
            let sums = checksums.get(number as usize).and_then(|text| blocks::parse(text, bytes));
            let Some(sums) = sums else {
                let message = format!("lacks the checksums of `{}`; {ADVICE}", shard_file(number));
                return Err(Error::damaged(&folder.join(PROGRESS_FILE), message));
            };
            let path = folder.join(shard_file(number));
            block = blocks::compare(&path, bytes, &sums, PROGRESS_FILE, ADVICE)?;
        }
        checksums.truncate(kept as usize);
        for name in shards_in(folder)? {
            if shard_number(&name).is_none_or(|number| number >= kept) {
                disk::remove(&folder.join(name))?;
            }
        }
        let mut file = None;
        if rest > 0 {
            let path = folder.join(shard_file(full));
            let open = OpenOptions::new().append(true).open(&path).map_err(Error::io(&path, "open"))?;
            open.set_len(expected(full)).map_err(Error::io(&path, "cut"))?;
            file = Some((path, open));
        }
        match (&file, checksums.last_mut()) {
            // The checksum of an unfinished block is computed again when it is finished.
            (Some(_), Some(last)) if (block.len() as u64) < BLOCK => last.truncate(last.len() - DIGITS),
            _ => block.clear(),
        }
        let written = block.len();
        Ok(Self { folder, token_type, shard_tokens, tokens, file, block, written, checksums, failed: false })
    }

    /// Appends tokens; returns whether a shard became full.
    pub fn push(&mut self, tokens: &[u32]) -> Result<bool> {
        self.failed = true;
        let full = self.push_parts(tokens)?;
        self.failed = false;
        Ok(full)
    }

    fn push_parts(&mut self, mut tokens: &[u32]) -> Result<bool> {
        let mut full = false;
        while !tokens.is_empty() {
            if self.file.is_none() {
                let path = self.folder.join(shard_file(self.tokens / self.shard_tokens));
                let file = File::create(&path).map_err(Error::io(&path, "create"))?;
                self.file = Some((path, file));
                self.checksums.push(String::new());
            }
            let shard = self.shard_tokens - self.tokens % self.shard_tokens;
            let block = (BLOCK - self.block.len() as u64) / self.token_type.bytes();
            let count = usize::try_from(shard.min(block)).map_or(tokens.len(), |room| room.min(tokens.len()));
            let (now, later) = tokens.split_at(count);
            match self.token_type {
                // The ids fit: the type was chosen by the vocabulary.
                TokenType::U16 => self.block.extend(now.iter().flat_map(|&id| (id as u16).to_le_bytes())),
                TokenType::U32 => self.block.extend(now.iter().flat_map(|id| id.to_le_bytes())),
            }
            self.tokens += count as u64;
            tokens = later;
            let ends = self.tokens.is_multiple_of(self.shard_tokens);
            if ends || self.block.len() as u64 == BLOCK {
                self.end_block()?;
            }
            if ends {
                self.to_disk()?;
                self.file = None;
                full = true;
            }
        }
        Ok(full)
    }

    /// Writes the rest of a block, and adds its checksum.
    fn end_block(&mut self) -> Result<()> {
        self.write()?;
        if let Some(last) = self.checksums.last_mut()
            && !self.block.is_empty()
        {
            *last += &blocks::digits(&self.block);
        }
        self.block.clear();
        self.written = 0;
        Ok(())
    }

    /// Writes what is not in the file yet.
    fn write(&mut self) -> Result<()> {
        if let Some((path, file)) = &mut self.file {
            file.write_all(&self.block[self.written..]).map_err(Error::io(path, "write"))?;
            self.written = self.block.len();
        }
        Ok(())
    }

    fn to_disk(&mut self) -> Result<()> {
        self.write()?;
        match &self.file {
            Some((path, file)) => file.sync_all().map_err(Error::io(path, "write to the disk")),
            None => Ok(()),
        }
    }

    /// Waits until everything written is on the disk. Fails if an earlier write failed.
    pub fn sync(&mut self) -> Result<()> {
        if self.failed {
            return Err(Error::file(self.folder, "could not be written"));
        }
        self.failed = true;
        self.to_disk()?;
        self.failed = false;
        Ok(())
    }

    /// The checksums of everything written so far: for each shard, of its blocks, including the unfinished last one.
    pub fn checksums(&self) -> Vec<String> {
        let mut checksums = self.checksums.clone();
        if let Some(last) = checksums.last_mut()
            && !self.block.is_empty()
        {
            *last += &blocks::digits(&self.block);
        }
        checksums
    }

    /// Finishes the last shard; returns a description of all shards.
    pub fn finish(mut self) -> Result<Vec<ShardMeta>> {
        self.sync()?;
        disk::sync_folder(self.folder)?;
        let tokens = |number: u64| self.shard_tokens.min(self.tokens - number * self.shard_tokens);
        let shard = |(number, checksums)| ShardMeta {
            file: shard_file(number),
            tokens: tokens(number),
            checksums: Some(checksums),
        };
        Ok((0..).zip(self.checksums()).map(shard).collect())
    }
}

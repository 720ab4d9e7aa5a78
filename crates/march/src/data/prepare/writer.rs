//! Writes tokens into shards of equal length.

use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::{shard_file, shard_number, shards_in};
use crate::data::shards::{ShardMeta, TokenType};
use crate::disk;
use crate::error::{Error, Result};

pub(super) struct Writer<'a> {
    folder: &'a Path,
    token_type: TokenType,
    shard_tokens: u64,
    /// Tokens in all shards.
    tokens: u64,
    /// The shard that is not full yet; none at a border.
    file: Option<(PathBuf, BufWriter<File>)>,
    /// Tokens as bytes.
    bytes: Vec<u8>,
}

impl<'a> Writer<'a> {
    /// Goes on after `tokens` tokens that an earlier run wrote. What it wrote after them is cut off.
    pub fn new(folder: &'a Path, token_type: TokenType, shard_tokens: u64, tokens: u64) -> Result<Self> {
        let (full, rest) = (tokens / shard_tokens, tokens % shard_tokens);
        let kept = full + u64::from(rest > 0);
        for number in 0..kept {
            let path = folder.join(shard_file(number));
            let size = fs::metadata(&path).map_err(Error::io(&path, "read"))?.len();
            let expected = if number < full { shard_tokens } else { rest } * token_type.bytes();
            let whole = if number < full { size == expected } else { size >= expected };
            if !whole {
                let message = format!("has {size} bytes instead of {expected}; begin anew with --force");
                return Err(Error::file(&path, message));
            }
        }
        for name in shards_in(folder)? {
            if shard_number(&name).is_none_or(|number| number >= kept) {
                disk::remove(&folder.join(name))?;
            }
        }
        let mut writer = Self { folder, token_type, shard_tokens, tokens, file: None, bytes: Vec::new() };
        if rest > 0 {
            let path = folder.join(shard_file(full));
            let file = OpenOptions::new().append(true).open(&path).map_err(Error::io(&path, "open"))?;
            file.set_len(rest * token_type.bytes()).map_err(Error::io(&path, "cut"))?;
            writer.file = Some((path, buffered(file)));
        }
        Ok(writer)
    }

    /// Appends tokens; whether a shard became full.
    pub fn push(&mut self, mut tokens: &[u32]) -> Result<bool> {
        let mut full = false;
        while !tokens.is_empty() {
            let room = self.shard_tokens - self.tokens % self.shard_tokens;
            let count = usize::try_from(room).map_or(tokens.len(), |room| room.min(tokens.len()));
            let (now, later) = tokens.split_at(count);
            self.write(now)?;
            self.tokens += count as u64;
            tokens = later;
            if self.tokens.is_multiple_of(self.shard_tokens) {
                self.sync()?;
                self.file = None;
                full = true;
            }
        }
        Ok(full)
    }

    /// Writes tokens to the open shard, or to a new one.
    fn write(&mut self, tokens: &[u32]) -> Result<()> {
        self.bytes.clear();
        match self.token_type {
            // Ids fit: the type was chosen by the vocabulary.
            TokenType::U16 => self.bytes.extend(tokens.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            TokenType::U32 => self.bytes.extend(tokens.iter().flat_map(|id| id.to_le_bytes())),
        }
        let (path, file) = match &mut self.file {
            Some(open) => open,
            none => {
                let path = self.folder.join(shard_file(self.tokens / self.shard_tokens));
                let file = File::create(&path).map_err(Error::io(&path, "create"))?;
                none.insert((path, buffered(file)))
            }
        };
        file.write_all(&self.bytes).map_err(Error::io(path, "write"))
    }

    /// Waits until all that was written is on the disk.
    pub fn sync(&mut self) -> Result<()> {
        if let Some((path, file)) = &mut self.file {
            file.flush()
                .and_then(|()| file.get_ref().sync_all())
                .map_err(Error::io(path, "write to the disk"))?;
        }
        Ok(())
    }

    /// Ends the last shard; gives what there is.
    pub fn finish(mut self) -> Result<Vec<ShardMeta>> {
        self.sync()?;
        disk::sync_folder(self.folder)?;
        let count = self.tokens.div_ceil(self.shard_tokens);
        let tokens = |number: u64| self.shard_tokens.min(self.tokens - number * self.shard_tokens);
        Ok((0..count).map(|number| ShardMeta { file: shard_file(number), tokens: tokens(number) }).collect())
    }
}

fn buffered(file: File) -> BufWriter<File> {
    BufWriter::with_capacity(1 << 20, file)
}

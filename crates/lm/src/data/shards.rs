//! Folders of tokens: `tokens-00000.bin`, `tokens-00001.bin`, …, `meta.json`, `tokenizer.json`.
//!
//! A shard contains only tokens, as little-endian u16, or u32 if the vocabulary has more than 65,536 ids. All shards
//! concatenated are one long text; `meta.json` records the length of each shard, its checksums and its origin.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt::Write;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use super::blocks::{self, CheckedFile};
use super::prepare::PROGRESS_FILE;
use crate::disk;
use crate::error::{Error, Result};
use crate::tokenizer::{Tokenizer, sha256};

/// The version of the folder format that this program writes: `meta.json` has its own checksum and those of all shards.
pub const FORMAT_VERSION: u32 = 2;

/// The previous version, without checksums, which is still readable.
const WITHOUT_CHECKSUMS: u64 = 1;

/// Maximum number of open shards: enough for a folder of billions of tokens, and below the limit of a process.
const MOST_OPEN: usize = 256;

/// The file that describes a folder of shards.
pub const META_FILE: &str = "meta.json";

/// The folder's copy of its tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// How a token is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenType {
    /// Two bytes, little-endian.
    U16,
    /// Four bytes, little-endian.
    U32,
}

impl TokenType {
    /// The number of ids that fit into two bytes.
    const U16_VOCABULARY: u64 = 1 << 16;

    /// The smallest type that holds every id of a vocabulary.
    pub fn of(vocabulary: u64) -> Self {
        if vocabulary <= Self::U16_VOCABULARY { Self::U16 } else { Self::U32 }
    }

    /// Bytes of a token.
    pub fn bytes(self) -> u64 {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }
}

/// `meta.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// [`FORMAT_VERSION`], or an earlier one.
    pub format_version: u32,
    /// How tokens are stored.
    #[serde(rename = "type")]
    pub token_type: TokenType,
    /// Ids are below this number.
    pub vocabulary: u64,
    /// The name of the tokenizer.
    pub tokenizer: String,
    /// The tokenizer's [`Tokenizer::hash`].
    pub tokenizer_hash: String,
    /// The token that ends each document, if the tokenizer has one.
    pub end_of_text: Option<u32>,
    /// Number of tokens in all shards, including those that end documents.
    pub tokens: u64,
    /// Number of documents in all shards.
    pub documents: u64,
    /// The files, in order.
    pub shards: Vec<ShardMeta>,
    /// Where the documents came from, in order.
    pub sources: Vec<SourceMeta>,
}

/// A shard in `meta.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardMeta {
    /// Its name in the folder.
    pub file: String,
    /// How many tokens it holds.
    pub tokens: u64,
    /// A checksum of 16 hexadecimal digits per MiB of the file; `None` in folders of version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksums: Option<String>,
}

/// A text file in `meta.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceMeta {
    /// Its path, as given by the user.
    pub file: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Number of documents taken from it.
    pub documents: u64,
    /// Number of lines or rows that were skipped because they were invalid.
    pub skipped: u64,
    /// Number of tokens of its documents.
    pub tokens: u64,
}

/// The name of a shard.
pub(super) fn shard_file(number: u64) -> String {
    format!("tokens-{number:05}.bin")
}

/// The number of a shard, given its file name; `None` for other files.
pub(super) fn shard_number(name: &str) -> Option<u64> {
    let number = name.strip_prefix("tokens-")?.strip_suffix(".bin")?.parse().ok()?;
    (shard_file(number) == name).then_some(number)
}

/// A folder of tokens. Each MiB is verified against its checksum before it is first used.
#[derive(Debug)]
pub struct Shards {
    folder: PathBuf,
    meta: Meta,
    shards: Vec<Shard>,
    /// The open shards by index, the most recently used last.
    open: Mutex<VecDeque<(usize, Arc<CheckedFile>)>>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    /// The position of its first token among all tokens.
    start: u64,
    bytes: u64,
    checksums: Option<Vec<u64>>,
}

impl Shards {
    /// Reads `meta.json` and checks that the shards have the recorded lengths.
    pub fn open(folder: &Path) -> Result<Self> {
        let meta = read_meta(folder)?;
        let path = folder.join(META_FILE);
        let wrong = |message: String| Err(Error::file(&path, message));
        let mut shards = Vec::with_capacity(meta.shards.len());
        let mut start = 0u64;
        for ShardMeta { file, tokens, checksums } in &meta.shards {
            if !disk::is_file_name(file) {
                return wrong(format!("names the shard `{file}`, which is not a file name in the folder"));
            }
            let path = folder.join(file);
            if !path.is_file() {
                return Err(Error::file(&path, format!("is missing; `{META_FILE}` names it")));
            }
            let bytes = fs::metadata(&path).map_err(Error::io(&path, "read"))?.len();
            if tokens.checked_mul(meta.token_type.bytes()) != Some(bytes) {
                let message = format!(
                    "has {bytes} bytes, but `{META_FILE}` says {tokens} tokens of {} bytes; copy or prepare it again",
                    meta.token_type.bytes()
                );
                return Err(Error::damaged(&path, message));
            }
            let numbers = checksums.as_ref().map(|text| blocks::parse(text, bytes));
            if numbers == Some(None)
                || numbers.is_some() != (u64::from(meta.format_version) > WITHOUT_CHECKSUMS)
            {
                return wrong(format!(
                    "lacks the checksums of `{file}` that format version {} requires; prepare the data again",
                    meta.format_version
                ));
            }
            shards.push(Shard { path, start, bytes, checksums: numbers.flatten() });
            // This cannot overflow: the file sizes have just been checked.
            start = start.saturating_add(*tokens);
        }
        if start != meta.tokens {
            return wrong(format!("says {} tokens, but its shards have {start}", meta.tokens));
        }
        Ok(Self { folder: folder.into(), meta, shards, open: Mutex::default() })
    }

    /// Number of tokens in all shards.
    pub fn tokens(&self) -> u64 {
        self.meta.tokens
    }

    /// The contents of `meta.json`.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The tokenizer that encoded the folder's tokens, from the folder's copy.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let path = self.folder.join(TOKENIZER_FILE);
        let tokenizer = Tokenizer::load(&path.to_string_lossy())?;
        if tokenizer.hash() != self.meta.tokenizer_hash {
            let message = format!("is not the tokenizer that `{META_FILE}` names, {}", self.meta.tokenizer);
            return Err(Error::file(&path, message));
        }
        Ok(tokenizer)
    }

    /// A hexadecimal string that is equal for the same tokens in the same shards, by the same tokenizer. It is computed
    /// from `meta.json`; only if that has no checksums are all shards read.
    pub fn fingerprint(&self) -> Result<String> {
        let Meta { token_type, tokens, vocabulary, tokenizer_hash, .. } = &self.meta;
        let width = token_type.bytes();
        let mut text = format!("march tokens\n{width} {tokens} {vocabulary} {tokenizer_hash}\n");
        for (shard, meta) in self.shards.iter().zip(&self.meta.shards) {
            let checksums = match &meta.checksums {
                Some(text) => Cow::Borrowed(text),
                None => Cow::Owned(blocks::of_file(&shard.path, shard.bytes)?),
            };
            let _ = writeln!(text, "{} {checksums}", meta.tokens);
        }
        Ok(sha256(text.as_bytes()))
    }

    /// The open file of a shard. If it has to be reopened, it is verified again, because it may have been replaced.
    fn opened(&self, number: usize, shard: &Shard) -> Result<Arc<CheckedFile>> {
        let mut open = self.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let place = open.iter().rposition(|(other, _)| *other == number);
        let file = match place.and_then(|place| open.remove(place)) {
            Some((_, file)) => file,
            None => Arc::new(CheckedFile::open(&shard.path, shard.bytes)?),
        };
        if open.len() >= MOST_OPEN {
            open.pop_front();
        }
        open.push_back((number, Arc::clone(&file)));
        Ok(file)
    }

    /// Appends the tokens of a range.
    pub fn read(&self, range: Range<u64>, out: &mut Vec<u32>) -> Result<()> {
        if range.start > range.end || range.end > self.tokens() {
            let message = format!("tokens {}..{} are out of range; there are", range.start, range.end);
            return Err(Error::file(&self.folder, format!("{message} {}", self.tokens())));
        }
        let kept = out.len();
        let result = self.read_parts(range, out);
        if result.is_err() {
            out.truncate(kept);
        }
        result
    }

    fn read_parts(&self, range: Range<u64>, out: &mut Vec<u32>) -> Result<()> {
        let width = self.meta.token_type.bytes();
        let first = self.shards.partition_point(|shard| shard.start <= range.start).saturating_sub(1);
        let mut bytes = Vec::new();
        for (number, shard) in self.shards.iter().enumerate().skip(first) {
            if shard.start >= range.end {
                break;
            }
            let from = (range.start.saturating_sub(shard.start) * width).min(shard.bytes);
            let to = ((range.end - shard.start) * width).min(shard.bytes);
            let file = self.opened(number, shard)?;
            file.read(&shard.path, from..to, shard.bytes, shard.checksums.as_deref(), &mut bytes)?;
            let begin = out.len();
            match self.meta.token_type {
                TokenType::U16 => {
                    out.extend(bytes.as_chunks().0.iter().map(|&token| u32::from(u16::from_le_bytes(token))));
                }
                TokenType::U32 => {
                    out.extend(bytes.as_chunks().0.iter().map(|&token| u32::from_le_bytes(token)))
                }
            }
            let new = out.get(begin..).unwrap_or_default();
            if let Some(place) = new.iter().position(|&id| u64::from(id) >= self.meta.vocabulary) {
                let message = format!(
                    "token {} is {}, but the vocabulary has {} ids; the file is damaged",
                    from / width + place as u64,
                    new[place],
                    self.meta.vocabulary
                );
                return Err(Error::damaged(&shard.path, message));
            }
        }
        Ok(())
    }
}

/// Advice for a damaged `meta.json`.
const ADVICE: &str = "copy it again, or prepare the data again";

/// Reads and checks `meta.json`.
fn read_meta(folder: &Path) -> Result<Meta> {
    let path = folder.join(META_FILE);
    if !folder.is_dir() {
        let wrong = if folder.exists() { "is not a folder" } else { "does not exist" };
        return Err(Error::file(folder, format!("{wrong}; `march data prepare` makes folders of tokens")));
    }
    if !path.exists() {
        let message = if folder.join(PROGRESS_FILE).exists() {
            "is not finished; run the same `march data prepare` again, and it continues".into()
        } else {
            format!("has no `{META_FILE}`; `march data prepare` makes folders of tokens")
        };
        return Err(Error::file(folder, message));
    }
    let (text, sealed) = disk::read_sealed(&path, ADVICE)?;
    let wrong = |message: String| Err(Error::file(&path, message));
    // Check the version first: other versions may have other keys.
    #[derive(Deserialize)]
    struct Version {
        format_version: u64,
    }
    let version = match serde_json::from_str::<Version>(&text) {
        Ok(version) => version.format_version,
        Err(error) => return wrong(format!("does not describe token shards: {error}")),
    };
    if !(WITHOUT_CHECKSUMS..=FORMAT_VERSION.into()).contains(&version) {
        let message = format!("has format version {version}, but this program reads {WITHOUT_CHECKSUMS} and");
        return wrong(format!("{message} {FORMAT_VERSION}; prepare the data again"));
    }
    if version > WITHOUT_CHECKSUMS && !sealed {
        let message = format!("has format version {version} but no checksum: it is damaged; {ADVICE}");
        return Err(Error::damaged(&path, message));
    }
    let meta: Meta = match serde_json::from_str(&text) {
        Ok(meta) => meta,
        Err(error) => return wrong(format!("does not describe token shards: {error}")),
    };
    let largest = if meta.token_type == TokenType::U16 { TokenType::U16_VOCABULARY } else { 1 << 32 };
    if meta.vocabulary == 0 || meta.vocabulary > largest {
        let name = if meta.token_type == TokenType::U16 { "u16" } else { "u32" };
        return wrong(format!("says a vocabulary of {}, which {name} cannot hold", meta.vocabulary));
    }
    Ok(meta)
}

//! `progress.json`: the command that started a folder, and its progress.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::pipeline::BATCH_BYTES;
use super::{Options, Status};
use crate::data::shards::FORMAT_VERSION;
use crate::disk;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// The file that records the progress of an unfinished folder.
pub const PROGRESS_FILE: &str = "progress.json";

/// Larger counts indicate damage.
const LARGEST: u64 = 1 << 60;

/// Everything that determines the bytes of the shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Command {
    pub tokenizer: String,
    pub tokenizer_hash: String,
    pub text_column: String,
    pub skip_bad: bool,
    pub shard_tokens: u64,
    pub files: Vec<SourceFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SourceFile {
    pub file: String,
    pub bytes: u64,
}

impl Command {
    pub fn new(tokenizer: &Tokenizer, files: &[PathBuf], sizes: &[u64], options: &Options) -> Self {
        let file = |(path, &bytes): (&PathBuf, &u64)| SourceFile { file: path.display().to_string(), bytes };
        Self {
            tokenizer: tokenizer.name().into(),
            tokenizer_hash: tokenizer.hash(),
            text_column: options.text_column.clone(),
            skip_bad: options.skip_bad,
            shard_tokens: options.shard_tokens,
            files: files.iter().zip(sizes).map(file).collect(),
        }
    }

    /// Describes why the command `now` cannot resume what this one started; `None` if it can.
    fn difference(&self, now: &Self, skipped: u64) -> Option<String> {
        let changed = |what: &str, then: &dyn std::fmt::Display, now: &dyn std::fmt::Display| {
            Some(format!("was started with {what} {then}, not {now}"))
        };
        if self.tokenizer_hash != now.tokenizer_hash {
            let same = if self.tokenizer == now.tokenizer { " with other contents" } else { "" };
            return changed("--tokenizer", &self.tokenizer, &format!("{}{same}", now.tokenizer));
        }
        if self.text_column != now.text_column {
            return changed("--text-column", &self.text_column, &now.text_column);
        }
        if self.shard_tokens != now.shard_tokens {
            return changed("--shard-tokens", &self.shard_tokens, &now.shard_tokens);
        }
        // If no record was invalid so far, the flag has made no difference yet.
        if self.skip_bad && !now.skip_bad && skipped > 0 {
            return Some(format!("was started with --skip-bad and has skipped {skipped} invalid lines"));
        }
        for (place, (then, now)) in self.files.iter().zip(&now.files).enumerate() {
            if then.file != now.file {
                return changed(&format!("file {}", place + 1), &then.file, &now.file);
            }
            if then.bytes != now.bytes {
                let (file, then, now) = (&then.file, then.bytes, now.bytes);
                return Some(format!("was started when {file} had {then} bytes; now it has {now}"));
            }
        }
        let (then, now) = (self.files.len(), now.files.len());
        (then != now).then(|| format!("was started with {then} files, not {now}"))
    }
}

/// `progress.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Progress {
    format_version: u32,
    /// [`BATCH_BYTES`]: where long documents are split.
    part_bytes: usize,
    pub command: Command,
    pub sources: Vec<SourceProgress>,
    /// For each shard, the checksums of its blocks; for a partial last block, of its current contents.
    pub checksums: Vec<String>,
    /// Totals over all sources.
    #[serde(skip)]
    pub sum: Status,
}

/// How much of a source is in the shards.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct SourceProgress {
    /// Number of lines or rows.
    pub records: u64,
    /// Number of parts of the document after them.
    pub parts: u64,
    pub documents: u64,
    pub skipped: u64,
    pub tokens: u64,
    pub finished: bool,
}

impl Progress {
    pub fn new(command: Command) -> Self {
        let sources = vec![SourceProgress::default(); command.files.len()];
        Self {
            format_version: FORMAT_VERSION,
            part_bytes: BATCH_BYTES,
            command,
            sources,
            checksums: Vec::new(),
            sum: Status::default(),
        }
        .summed()
    }

    /// Returns this progress with its totals computed.
    fn summed(mut self) -> Self {
        let sum = |of: fn(&SourceProgress) -> u64| self.sources.iter().map(of).fold(0, u64::saturating_add);
        self.sum = Status {
            documents: sum(|source| source.documents),
            skipped: sum(|source| source.skipped),
            tokens: sum(|source| source.tokens),
            total_bytes: self.command.files.iter().map(|file| file.bytes).sum(),
            ..Status::default()
        };
        self
    }

    /// Reads the progress of a folder; `None` if none was started.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(PROGRESS_FILE);
        if !path.exists() {
            return Ok(None);
        }
        let wrong = |what: String| Error::damaged(&path, format!("{what}; start over with --force"));
        let (text, sealed) = disk::read_sealed(&path, "start over with --force")?;
        let progress: Self =
            serde_json::from_str(&text).map_err(|error| wrong(format!("cannot be understood: {error}")))?;
        let progress = progress.summed();
        if !sealed
            || progress.format_version != FORMAT_VERSION
            || progress.part_bytes != BATCH_BYTES
            || progress.sources.len() != progress.command.files.len()
            || progress.command.shard_tokens == 0
            || [progress.sum.tokens, progress.sum.documents, progress.sum.skipped]
                .iter()
                .any(|&sum| sum > LARGEST)
        {
            return Err(wrong("is of another version or damaged".into()));
        }
        Ok(Some(progress))
    }

    /// Returns the progress for a command that resumes it. Rejects a different command.
    pub fn taken_up(self, now: Command, folder: &Path) -> Result<Self> {
        if let Some(difference) = self.command.difference(&now, self.sum.skipped) {
            let message =
                format!("{difference}; run that command again, choose another folder, or start over");
            return Err(Error::file(folder, format!("{message} with --force")));
        }
        Ok(Self { command: now, ..self }.summed())
    }

    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(PROGRESS_FILE);
        let text =
            serde_json::to_string_pretty(self).map_err(|error| Error::file(&path, error.to_string()))?;
        disk::replace(&path, disk::seal(&text).as_bytes())
    }

    pub fn finished(&self) -> bool {
        self.sources.iter().all(|source| source.finished)
    }

    /// Replaces the progress of a source by its progress after a batch of `tokens` tokens.
    pub fn advance(&mut self, source: usize, after: SourceProgress, tokens: u64) {
        if let Some(source) = self.sources.get_mut(source) {
            self.sum.documents += after.documents - source.documents;
            self.sum.skipped += after.skipped - source.skipped;
            self.sum.tokens += tokens;
            *source = SourceProgress { tokens: source.tokens + tokens, ..after };
        }
    }
}

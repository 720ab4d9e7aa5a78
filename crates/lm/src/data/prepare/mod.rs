//! Converts text files to a folder of token shards: documents are read in order, encoded on all threads, and written in
//! order, so the result does not depend on the number of threads.
//!
//! `progress.json` records up to which document the shards are written; it is replaced every few seconds and whenever a
//! shard is full. If the process ends for any reason, the same command resumes from there and writes exactly what an
//! uninterrupted run would have written. The file also has the checksums of the shards, so that damage is detected
//! before they are extended. `meta.json` is written last and marks the folder as complete.

mod foreign;
mod pipeline;
mod progress;
mod writer;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::pipeline::{Encoded, Pipeline};
pub use self::progress::PROGRESS_FILE;
use self::progress::{Command, Progress};
use self::writer::Writer;
use super::shards::{
    FORMAT_VERSION, META_FILE, Meta, SourceMeta, TOKENIZER_FILE, TokenType, shard_file, shard_number,
};
use super::text;
use crate::disk;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// Prevents a second process from using the folder.
const LOCK_FILE: &str = "prepare.lock";

/// The interval between updates of `progress.json`: short enough that little work is lost, long enough that waiting for
/// the disk costs nothing.
const PAUSE: Duration = Duration::from_secs(2);

/// Settings of [`prepare`].
#[derive(Clone, Debug)]
pub struct Options {
    /// The key of JSON lines, or the column of tables, that holds the text.
    pub text_column: String,
    /// Skip invalid lines, and files without documents, instead of stopping at them.
    pub skip_bad: bool,
    /// Tokens per shard; the last one may have fewer.
    pub shard_tokens: u64,
    /// Number of encoding threads; 0 uses all cores.
    pub threads: usize,
    /// Start over if the folder already holds tokens.
    pub force: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            text_column: "text".into(),
            skip_bad: false,
            shard_tokens: 100_000_000,
            threads: 0,
            force: false,
        }
    }
}

/// The progress of [`prepare`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Documents written.
    pub documents: u64,
    /// Invalid lines and rows skipped.
    pub skipped: u64,
    /// Tokens written.
    pub tokens: u64,
    /// Tokens that were already there when an interrupted run was resumed.
    pub resumed_tokens: u64,
    /// Approximate number of source bytes done.
    pub bytes: u64,
    /// Total bytes of all sources.
    pub total_bytes: u64,
}

/// How [`prepare`] ended.
#[derive(Clone, Debug)]
pub enum PrepareOutcome {
    /// The folder is complete.
    Finished(Meta, Status),
    /// It was asked to stop; the same call resumes.
    Stopped(Status),
}

/// Writes the tokens of `files` to the folder `output`, which must be new or empty or have tokens. `watch` is called after every batch of documents and can stop
/// the work.
pub fn prepare(
    tokenizer: &Tokenizer,
    files: &[PathBuf],
    output: &Path,
    options: &Options,
    watch: &mut dyn FnMut(&Status) -> ControlFlow<()>,
) -> Result<PrepareOutcome> {
    if files.is_empty() {
        return Err(Error::Request("no input files; name at least one text file".into()));
    }
    if options.shard_tokens == 0 {
        return Err(Error::Request("a shard cannot have 0 tokens; at least 1 is needed".into()));
    }
    let sizes = files.iter().map(|file| text::check(file)).collect::<Result<Vec<u64>>>()?;
    let command = Command::new(tokenizer, files, &sizes, options);
    foreign::refuse(output)?;
    fs::create_dir_all(output).map_err(Error::io(output, "create the folder"))?;
    let Some(_lock) = disk::Lock::take(&output.join(LOCK_FILE))? else {
        let message = "is being written by another `march data prepare`; wait until it ends";
        return Err(Error::file(output, message));
    };
    let progress = begin(output, command, tokenizer, options)?;
    let run = Run { tokenizer, files, output, options };
    run.run(progress, watch)
}

/// Inspects the folder: resumes from its `progress.json`, or starts from the beginning.
fn begin(output: &Path, command: Command, tokenizer: &Tokenizer, options: &Options) -> Result<Progress> {
    if options.force {
        clear(output)?;
    } else if output.join(META_FILE).exists() {
        let message = "is already complete; choose another folder, or replace its tokens with --force";
        return Err(Error::file(output, message));
    } else if let Some(progress) = Progress::read(output)? {
        let progress = progress.taken_up(command, output)?;
        let copy = output.join(TOKENIZER_FILE);
        if !is(&copy, tokenizer) {
            tokenizer.save_alone(&copy)?;
        }
        return Ok(progress);
    } else if let Some(name) = shards_in(output)?.first() {
        let message =
            format!("has `{name}` but neither `{META_FILE}` nor `{PROGRESS_FILE}`; choose another folder,");
        return Err(Error::file(output, format!("{message} or replace it with --force")));
    }
    let progress = Progress::new(command);
    let copy = output.join(TOKENIZER_FILE);
    if !options.force && copy.exists() && !is(&copy, tokenizer) {
        let message =
            "is another tokenizer, which would be replaced; choose another folder, or confirm with --force";
        return Err(Error::file(&copy, message));
    }
    tokenizer.save_alone(&copy)?;
    progress.write(output)?;
    Ok(progress)
}

/// Whether a file holds the given tokenizer.
fn is(path: &Path, tokenizer: &Tokenizer) -> bool {
    Tokenizer::load(&path.to_string_lossy()).is_ok_and(|other| other.hash() == tokenizer.hash())
}

/// Removes only what an earlier run wrote; `meta.json` first, so that an incomplete folder is never marked complete.
fn clear(output: &Path) -> Result<()> {
    disk::remove(&output.join(META_FILE))?;
    for name in shards_in(output)? {
        disk::remove(&output.join(name))?;
    }
    disk::remove(&output.join(PROGRESS_FILE))
}

/// The names of the shards in a folder.
fn shards_in(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "read"))? {
        let name = entry.map_err(Error::io(folder, "read"))?.file_name();
        if let Some(name) = name.to_str().filter(|name| shard_number(name).is_some()) {
            names.push(name.into());
        }
    }
    names.sort();
    Ok(names)
}

/// The state of one call of [`prepare`].
struct Run<'a> {
    tokenizer: &'a Tokenizer,
    files: &'a [PathBuf],
    output: &'a Path,
    options: &'a Options,
}

impl Run<'_> {
    fn run(
        &self,
        mut progress: Progress,
        watch: &mut dyn FnMut(&Status) -> ControlFlow<()>,
    ) -> Result<PrepareOutcome> {
        let token_type = TokenType::of(self.tokenizer.vocabulary() as u64);
        progress.sum.resumed_tokens = progress.sum.tokens;
        let checksums = std::mem::take(&mut progress.checksums);
        let shard_tokens = self.options.shard_tokens;
        let mut writer = Writer::new(self.output, token_type, shard_tokens, progress.sum.tokens, checksums)?;
        let mut saved = Instant::now();
        let pipeline = Pipeline {
            tokenizer: self.tokenizer,
            files: self.files,
            options: self.options,
            sources: progress.sources.clone(),
        };
        let mut stopped = false;
        let result = pipeline.run(|encoded: Encoded| {
            let full = writer.push(&encoded.tokens)?;
            if let Some(after) = encoded.progress {
                progress.advance(encoded.source, after, encoded.tokens.len() as u64);
                if full || saved.elapsed() > PAUSE {
                    self.save(&mut progress, &mut writer)?;
                    saved = Instant::now();
                }
            }
            if let Some(error) = encoded.failed {
                return Err(error);
            }
            progress.sum.bytes = encoded.bytes;
            stopped = watch(&progress.sum).is_break();
            Ok(if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        });
        let saved = self.save(&mut progress, &mut writer);
        result.and(saved)?;
        if stopped && !progress.finished() {
            return Ok(PrepareOutcome::Stopped(progress.sum));
        }
        let meta = self.finish(&progress, writer, token_type)?;
        Ok(PrepareOutcome::Finished(meta, progress.sum))
    }

    /// Writes `progress.json` once the shards are on the disk.
    fn save(&self, progress: &mut Progress, writer: &mut Writer<'_>) -> Result<()> {
        writer.sync()?;
        progress.checksums = writer.checksums();
        progress.write(self.output)
    }

    /// Writes `meta.json`.
    fn finish(&self, progress: &Progress, writer: Writer<'_>, token_type: TokenType) -> Result<Meta> {
        let shards = writer.finish()?;
        if progress.sum.tokens == 0 {
            clear(self.output)?;
            return Err(Error::Request("the files contain no documents; there is nothing to write".into()));
        }
        let sources = progress.command.files.iter().zip(&progress.sources).map(|(file, done)| SourceMeta {
            file: file.file.clone(),
            bytes: file.bytes,
            documents: done.documents,
            skipped: done.skipped,
            tokens: done.tokens,
        });
        let meta = Meta {
            format_version: FORMAT_VERSION,
            token_type,
            vocabulary: self.tokenizer.vocabulary() as u64,
            tokenizer: self.tokenizer.name().into(),
            tokenizer_hash: self.tokenizer.hash(),
            end_of_text: self.tokenizer.end_of_text(),
            tokens: progress.sum.tokens,
            documents: progress.sum.documents,
            shards,
            sources: sources.collect(),
        };
        let path = self.output.join(META_FILE);
        let text =
            serde_json::to_string_pretty(&meta).map_err(|error| Error::file(&path, error.to_string()))?;
        disk::replace(&path, disk::seal(&format!("{text}\n")).as_bytes())?;
        disk::remove(&self.output.join(PROGRESS_FILE))?;
        Ok(meta)
    }
}

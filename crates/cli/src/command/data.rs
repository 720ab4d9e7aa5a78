//! `march data`: from text files to tokens.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use march_lab::corpus;
use march_lm::data::{Meta, Options, PrepareOutcome, Status, prepare, train_tokenizer};
use march_lm::tokenizer::Tokenizer;

use crate::display::out::{note, say};
use crate::display::{Progress, bytes, left, thousands};
use crate::output::{Kind, Output, check_tokens_folder};
use crate::{interrupt, number};

/// Convert text files to tokens.
#[derive(Args)]
pub struct Data {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Subcommand)]
enum DataCommand {
    Prepare(Prepare),
    TrainTokenizer(TrainTokenizer),
    Corpus(Corpus),
}

const FORMATS: &str = "Files end in .txt (one document), .jsonl, .jsonl.gz, .jsonl.zst (one document per line), or \
.parquet (one document per row).";

/// Encode text files into a folder of tokens for training.
#[derive(Args)]
#[command(after_help = format!("Examples:
  march data prepare --tokenizer bytes --output data/play play.txt
  march data prepare --tokenizer tokenizer.json --output data/web web-*.jsonl.zst

{FORMATS}
If interrupted, by Ctrl-C or otherwise, the same command resumes where it stopped and writes the same bytes."))]
struct Prepare {
    /// `bytes`, or a Hugging Face tokenizer.json
    #[arg(long, value_name = "bytes|FILE")]
    tokenizer: String,
    /// The folder to write
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// The key or column that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    text_column: String,
    /// Skip invalid lines and files without text instead of stopping at them
    #[arg(long)]
    skip_bad: bool,
    /// Tokens per shard
    #[arg(long, value_name = "N", default_value_t = Options::default().shard_tokens, value_parser = number::count::<u64>)]
    shard_tokens: u64,
    /// Replace the tokens in an existing folder
    #[arg(long)]
    force: bool,
    /// Number of threads; 0 uses all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Text files, in the order of their tokens
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

/// Train a byte-level BPE tokenizer on text files.
#[derive(Args)]
#[command(after_help = format!("Example:
  march data train-tokenizer --vocab-size 8192 --output tokenizer.json web-*.jsonl.zst

{FORMATS}
The same files give the same tokenizer."))]
struct TrainTokenizer {
    /// Number of ids: 256 bytes, <|endoftext|>, and the learned tokens
    #[arg(long, value_name = "N", value_parser = number::whole::<usize>)]
    vocab_size: usize,
    /// The tokenizer.json to write
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// The key or column that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    text_column: String,
    /// Skip invalid lines instead of stopping at them
    #[arg(long)]
    skip_bad: bool,
    /// Text files
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

/// Fetch and prepare the corpus of `march reproduce text`: sources of Rust crates, and three books.
#[derive(Args)]
#[command(after_help = "Example:
  march data corpus --output data/corpus

`cargo vendor` fetches some 800 packages from the registry, in the versions of a lock file and with its
checksums: 290 MB, about 1 GB on the disk. Their sources become one document per package, without generated files
and copies; some whole packages are held out. A tokenizer of 4,096 ids is trained on the rest. The folder then has
train/, held-out/ and books/, which `march train --set data.kind=shards --set data.path=DIR/train` reads, the texts
as .jsonl, tokenizer.json, and corpus.json, which says how much there is. If interrupted, the same command resumes.")]
struct Corpus {
    /// The folder to write
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Keep the fetched packages instead of deleting them at the end
    #[arg(long)]
    keep_packages: bool,
}

impl Data {
    /// Runs the subcommand.
    pub fn run(self) -> anyhow::Result<()> {
        match self.command {
            DataCommand::Prepare(prepare) => prepare.run(),
            DataCommand::TrainTokenizer(train) => train.run(),
            DataCommand::Corpus(corpus) => corpus.run(),
        }
    }
}

impl Prepare {
    fn run(self) -> anyhow::Result<()> {
        check_tokens_folder(&self.output, &self.files)?;
        let tokenizer = Tokenizer::load(&self.tokenizer)?;
        let options = Options {
            text_column: self.text_column,
            skip_bad: self.skip_bad,
            shard_tokens: self.shard_tokens,
            threads: self.threads,
            force: self.force,
        };
        interrupt::listen("finishing the documents in progress")?;
        let mut progress = Progress::new("preparing", "bytes", 0);
        let mut watch = |status: &Status| {
            progress.show(|seconds| progress_line(status, seconds));
            if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let result = prepare(&tokenizer, &self.files, &self.output, &options, &mut watch);
        let seconds = progress.finish().as_secs_f64();
        let folder = self.output.display();
        match result? {
            PrepareOutcome::Finished(meta, status) => {
                say!("{folder}: {}", summary(&meta, &status, seconds));
                Ok(())
            }
            PrepareOutcome::Stopped(status) => {
                note!(
                    "{folder}: stopped after {} documents, {} tokens; run the same command again{} to resume",
                    thousands(status.documents as usize),
                    thousands(status.tokens as usize),
                    if self.force { " without --force" } else { "" }
                );
                interrupt::leave();
            }
        }
    }
}

/// Tokens per second in this run.
fn rate(status: &Status, seconds: f64) -> String {
    let new = status.tokens.saturating_sub(status.resumed_tokens);
    format!("{} tokens per second", thousands((new as f64 / seconds.max(1e-9)) as usize))
}

/// How much is done, how fast, and how long it will take.
pub fn progress_line(status: &Status, seconds: f64) -> String {
    format!(
        "{} documents, {} tokens, {}, {}",
        thousands(status.documents as usize),
        thousands(status.tokens as usize),
        rate(status, seconds),
        left(status.bytes as f64 / status.total_bytes.max(1) as f64, seconds)
    )
}

fn summary(meta: &Meta, status: &Status, seconds: f64) -> String {
    let count = |count: usize, one: &str| {
        let plural = if count == 1 { "" } else { "s" };
        format!("{} {one}{plural}", thousands(count))
    };
    let skipped = match status.skipped {
        0 => String::new(),
        skipped => format!(", {} skipped", count(skipped as usize, "invalid record")),
    };
    format!(
        "{} in {}, {}, {}{skipped}; {seconds:.1} s, {}",
        count(meta.tokens as usize, "token"),
        count(meta.documents as usize, "document"),
        count(meta.shards.len(), "shard"),
        bytes((meta.tokens * meta.token_type.bytes()) as usize),
        rate(status, seconds)
    )
}

impl TrainTokenizer {
    fn run(self) -> anyhow::Result<()> {
        let inputs: Vec<&Path> = self.files.iter().map(PathBuf::as_path).collect();
        Output::check(&self.output, Kind::Tokenizer, &inputs)?;
        Output::check(&self.output.with_added_extension("sha256"), Kind::Checksum, &inputs)?;
        let mut progress = Progress::new("learning", "tokens", 0);
        let mut watch = |what: &str, done: u64, of: u64| {
            progress.show(|_| format!("{what} {} of {}", thousands(done as usize), thousands(of as usize)));
        };
        let tokenizer =
            train_tokenizer(&self.files, &self.text_column, self.vocab_size, self.skip_bad, &mut watch)?;
        let seconds = progress.finish().as_secs_f64();
        tokenizer.save(&self.output)?;
        let learnt = tokenizer.vocabulary();
        say!("{}: {} ids; {seconds:.1} s", self.output.display(), thousands(learnt));
        if learnt < self.vocab_size {
            note!(
                "warning: the tokenizer has {} ids, not {}: no other pair occurs twice in the text, and learning more \
                 needs more text. For a model with this tokenizer, set in [model] of its configuration:\n  \
                 vocab_size = {learnt}",
                thousands(learnt),
                thousands(self.vocab_size)
            );
        }
        Ok(())
    }
}

impl Corpus {
    fn run(self) -> anyhow::Result<()> {
        interrupt::listen("finishing the documents in progress")?;
        let mut progress = Progress::new("reading", "packages", 0);
        let mut watch = |found: corpus::Progress<'_>| {
            match found {
                corpus::Progress::Step(step) => say!("{step}"),
                corpus::Progress::Packages(done, of) => progress.show(|_| format!("package {done} of {of}")),
                corpus::Progress::Tokenizer(phase, done, of) => progress
                    .show(|_| format!("{phase} {} of {}", thousands(done as usize), thousands(of as usize))),
                corpus::Progress::Encoding(_, status) => {
                    progress.show(|seconds| progress_line(status, seconds))
                }
            }
            if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let result = corpus::build(&self.output, self.keep_packages, &mut watch);
        progress.finish();
        let folder = self.output.display();
        let Some(summary) = result? else {
            note!("{folder}: stopped; the same command resumes");
            interrupt::leave();
        };
        for (name, part) in &summary.parts {
            say!(
                "{name:<8}  {} documents, {}, {} tokens",
                thousands(part.documents as usize),
                bytes(part.bytes as usize),
                thousands(part.tokens as usize)
            );
        }
        let corpus::FileCounts { used, generated, copied } = summary.files;
        let [used, generated, copied] = [used, generated, copied].map(thousands);
        say!("files     {used} used; left out: {generated} generated or data, {copied} copies");
        if let Some((name, _)) = summary.parts.iter().find(|(_, part)| !part.expected) {
            note!("warning: {name} differs from the corpus that docs/results/text.md is about");
        }
        Ok(())
    }
}

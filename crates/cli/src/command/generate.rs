//! `march generate`: continues a prompt.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use march_lm::generate::{Generator, StopReason};
use march_lm::memory::BankFile;
use march_lm::tokenizer::Tokenizer;

use super::bank::{self, Advice, Place};
use super::open::ModelArgs;
use super::prompt::{Next, Prompt};
use super::writing::{WritingArgs, reason, show};
use crate::display::out::{note, say};
use crate::display::{Progress, left, thousands};
use crate::{interrupt, number};

/// Continue a prompt.
#[derive(Args)]
#[command(after_help = "Examples:
  march generate --model models/tiny-march --prompt 'Alice was' --max-tokens 100
  march generate --model models/tiny-march --prompt-file book.txt --interval 128 --retention fenwick
  march generate --model models/tiny-march --prompt-file book.txt --max-tokens 1 --save-bank book.safetensors
  march generate --model models/tiny-march --bank book.safetensors --prompt 'And then'
  march generate --model models/tiny-march --bank book.safetensors --prompt ''
  march generate --model models/tiny-march --bank book.safetensors --rollback 4096 --prompt 'Instead,'
  cat book.txt | march generate --model models/tiny-march --temperature 0

The text is written to standard output, without the prompt; the time and the size of the memory are reported
on standard error. An empty prompt continues the text of --bank, or starts a new one. Ctrl-C ends the text.")]
pub struct Generate {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt [default: read from standard input]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// A file with the prompt
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Continue the text whose memory (bank) is in this file
    #[arg(long, value_name = "FILE")]
    bank: Option<PathBuf>,
    /// First roll back to the last kept anchor at or before token N of that text
    #[arg(
        long, value_name = "N", requires = "bank", value_parser = number::whole::<usize>
    )]
    rollback: Option<usize>,
    /// Write the memory (bank) of the whole text to this file; if it already holds the beginning, append only what is
    /// new
    #[arg(long, value_name = "FILE")]
    save_bank: Option<PathBuf>,
    /// Let --save-bank replace the bank of another text
    #[arg(long, requires = "save_bank")]
    force: bool,
    #[command(flatten)]
    writing: WritingArgs,
}

const ADVICE: Advice = Advice { continue_with: "continue it with --bank", replace: "pass --force" };

impl Generate {
    /// Generates until something ends the text.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.model.choose()?;
        let sampling = self.writing.sampling();
        sampling.check()?;
        let prompt = Prompt::open(self.prompt.as_deref(), self.prompt_file.as_deref(), self.bank.is_some())?;
        let (file, place) = self.files()?;
        let opened = self.model.open()?;
        let mut generator = opened.generator(bank::empty(&opened)?, sampling)?;
        let mut lines = Vec::new();
        if let Some(file) = &file {
            generator.set_text(bank::load(&opened, file)?);
            if let Some(tokens) = self.rollback {
                let said = bank::rollback(&mut generator, tokens);
                lines.push(format!("rollback {}", said.with_context(|| file.path().display().to_string())?));
            }
        }
        interrupt::listen("ending the text")?;

        let vocabulary = opened.model().config().vocab_size;
        let beginning = || self.beginning(opened.tokenizer(), vocabulary, file.as_ref());
        let (read, whole) = read(&mut generator, opened.tokenizer(), &prompt, &mut lines, beginning)?;
        let mut ended = StopReason::Requested;
        if whole {
            let started = Instant::now();
            let written = generator.write(opened.tokenizer(), &self.writing.limits(), &mut show)?;
            ended = written.ended;
            let seconds = started.elapsed().as_secs_f64();
            lines.push(format!("written  {}; {}", rate(written.tokens, seconds), reason(ended)));
        }
        if std::io::stdout().is_terminal() {
            say!();
        }
        lines.push(format!("memory   {}", bank::line(generator.bank()?)));
        if let Some(place) = &place {
            // If interrupted before the first token, there is nothing to save.
            if whole || read > 0 {
                place.save(&opened, &mut generator)?;
                lines.push(format!("saved    {}", place.path().display()));
            } else {
                lines.push(format!("saved    nothing to {}: nothing was read", place.path().display()));
            }
        }
        lines.iter().for_each(|line| note!("{line}"));
        drop(place);
        if ended == StopReason::Requested && interrupt::asked() {
            std::process::exit(interrupt::EXIT);
        }
        Ok(())
    }

    /// The bank to continue from, and the place to save to. The latter is taken first, so that no other process writes
    /// to it from then on.
    fn files(&self) -> anyhow::Result<(Option<BankFile>, Option<Place>)> {
        let place = self.save_bank.as_deref().map(Place::take).transpose()?;
        let file = self.bank.as_deref().map(BankFile::open).transpose()?;
        if let Some(place) = &place {
            let own: Vec<String> = file.iter().map(|file| file.identity().into()).collect();
            place.check(&own, self.force, &ADVICE)?;
        }
        Ok((file, place))
    }

    /// The tokens that replace an empty prompt: none if the text of a bank continues, otherwise the end-of-text
    /// token, after which a new text starts.
    fn beginning(
        &self,
        tokenizer: &Tokenizer,
        vocabulary: usize,
        file: Option<&BankFile>,
    ) -> anyhow::Result<Vec<u32>> {
        if let Some(file) = file.filter(|file| file.timeline().position > 0) {
            bail!(
                "{}: the prompt is empty, and {}; give a prompt of at least one token",
                file.path().display(),
                match self.rollback {
                    Some(_) => "a bank has no logits after a rollback",
                    None =>
                        "the bank has no stored logits to continue from: it was written by an earlier version of this \
                         program",
                }
            );
        }
        match tokenizer.end_of_text() {
            Some(id) if (id as usize) < vocabulary => Ok(vec![id]),
            _ => bail!("the prompt is empty, and the model has no end-of-text token; give a prompt"),
        }
    }
}

/// Reads a prompt as it arrives; returns the number of tokens read, and whether that is all of it. An empty prompt is
/// replaced by `beginning` if the text cannot continue by itself.
fn read(
    generator: &mut Generator,
    tokenizer: &Tokenizer,
    prompt: &Prompt,
    lines: &mut Vec<String>,
    beginning: impl Fn() -> anyhow::Result<Vec<u32>>,
) -> anyhow::Result<(usize, bool)> {
    let before = generator.text().tokens();
    let mut progress = Progress::new("read", "tokens", 0);
    let (mut pieces, mut ids, mut bytes) = (Some(tokenizer.pieces()), Vec::new(), 0);
    let mut whole = true;
    while let Some(encoder) = &mut pieces {
        match prompt.next()? {
            Next::Piece(piece) => {
                bytes += piece.len();
                encoder.push(&piece, &mut ids).with_context(|| prompt.name().to_string())?;
            }
            Next::End => {
                if let Some(encoder) = pieces.take() {
                    encoder.finish(&mut ids).with_context(|| prompt.name().to_string())?;
                }
                if ids.is_empty() && generator.text().tokens() == before && !generator.text().can_continue() {
                    ids = beginning()?;
                }
            }
            Next::Interrupted => {
                whole = false;
                break;
            }
        }
        // Before the end, read only whole calls, so that the calls do not depend on how the pieces arrive.
        let count = if pieces.is_some() { generator.whole_calls(ids.len()) } else { ids.len() };
        let start = generator.text().tokens() - before;
        whole = generator.read(&ids[..count], &mut |left| {
            let done = start + count - left;
            progress.show(|seconds| progress_line(done, seconds, bytes as u64, prompt.total()));
            if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        // If interrupted after the last call, there is nothing left to interrupt.
        if !whole {
            break;
        }
        ids.drain(..count);
    }
    let read = generator.text().tokens() - before;
    let interrupted = if whole { "" } else { "; interrupted before the end of the prompt" };
    lines.push(format!("read     {}{interrupted}", rate(read, progress.finish().as_secs_f64())));
    Ok((read, whole))
}

/// How much of a prompt was read; if the total is known, also how much is left.
fn progress_line(tokens: usize, seconds: f64, bytes: u64, total: Option<u64>) -> String {
    let left = match total {
        Some(total) if total > bytes => {
            format!(" ({})", left(bytes as f64 / total as f64, seconds))
        }
        _ => String::new(),
    };
    let rate = tokens as f64 / seconds.max(1e-9);
    format!("read {} tokens{left}, {} per second", thousands(tokens), thousands(rate as usize))
}

fn rate(tokens: usize, seconds: f64) -> String {
    let rate = tokens as f64 / seconds.max(1e-9);
    format!("{} tokens in {seconds:.2} s, {} tokens/s", thousands(tokens), thousands(rate as usize))
}

//! `march generate`: a prompt, continued.

use std::io::{IsTerminal, Read};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use march::generate::Ended;
use march::tokenizer::Tokenizer;

use super::bank;
use super::open::ModelArgs;
use super::writing::{WritingArgs, reason, show};
use crate::display::{Progress, thousands};
use crate::interrupt;

/// Continue a prompt, as the model would.
#[derive(Args)]
#[command(after_help = "Examples:
  march generate --model models/tiny-march --prompt 'Alice was' --max-tokens 100
  march generate --model models/tiny-march --prompt-file book.txt --interval 128 --retention fenwick
  march generate --model models/tiny-march --prompt-file book.txt --max-tokens 1 --save-bank book.safetensors
  march generate --model models/tiny-march --bank book.safetensors --prompt 'And then'
  cat book.txt | march generate --model models/tiny-march --temperature 0

The text goes to the standard output, without the prompt; how long it took and what is kept of the text to the standard
error. An empty prompt begins a new text. Ctrl-C ends the text where it is.")]
pub struct Generate {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt [default: what comes on the standard input]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// A file with the prompt
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Go on after the text that this file is the memory of
    #[arg(long, value_name = "FILE")]
    bank: Option<PathBuf>,
    /// Write the memory of all the text to this file; only what is new, where it holds the beginning
    #[arg(long, value_name = "FILE")]
    save_bank: Option<PathBuf>,
    #[command(flatten)]
    writing: WritingArgs,
}

impl Generate {
    /// Writes until something ends the text.
    pub fn run(self) -> anyhow::Result<()> {
        let sampling = self.writing.sampling();
        sampling.check()?;
        let prompt = self.prompt()?;
        self.save_bank.as_deref().map_or(Ok(()), bank::check_place)?;
        let opened = self.model.open()?;
        let bank = match &self.bank {
            Some(_) if prompt.is_empty() => bail!("the prompt is empty; a bank goes on with new text"),
            Some(path) => bank::load(&opened, path)?,
            None => bank::empty(&opened)?,
        };
        let ids = beginning(&opened.tokenizer, opened.model.config().vocab_size, &prompt)?;
        interrupt::listen("ending the text")?;
        let mut generator = opened.generator(bank, sampling)?;

        let before = generator.text().bank().timeline().position;
        let mut progress = Progress::new("read", "tokens", ids.len());
        let whole = generator.read(&ids, &mut |left| {
            progress.at(ids.len() - left);
            if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let reading = progress.finish().as_secs_f64();
        let read = generator.text().bank().timeline().position - before;
        let mut lines = vec![format!("read     {}", rate(read, reading))];
        let mut ended = Ended::Asked;
        if whole {
            let started = Instant::now();
            let written = generator.write(&opened.tokenizer, &self.writing.limits(), &mut show)?;
            ended = written.ended;
            let seconds = started.elapsed().as_secs_f64();
            lines.push(format!("written  {}; {}", rate(written.tokens, seconds), reason(ended)));
        }
        if std::io::stdout().is_terminal() {
            println!();
        }
        lines.push(format!("memory   {}", bank::line(&opened, generator.bank()?)));
        if let Some(path) = &self.save_bank {
            bank::save(&opened, generator.bank()?, path)?;
            lines.push(format!("saved    {}", path.display()));
        }
        lines.iter().for_each(|line| eprintln!("{line}"));
        if ended == Ended::Asked && interrupt::asked() {
            std::process::exit(interrupt::EXIT);
        }
        Ok(())
    }

    fn prompt(&self) -> anyhow::Result<String> {
        if let Some(prompt) = &self.prompt {
            return Ok(prompt.clone());
        }
        if let Some(path) = &self.prompt_file {
            let bytes = std::fs::read(path).with_context(|| format!("{}: could not read", path.display()))?;
            return String::from_utf8(bytes).with_context(|| format!("{}: not UTF-8", path.display()));
        }
        let mut stdin = std::io::stdin().lock();
        if stdin.is_terminal() {
            bail!("there is no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in");
        }
        let mut bytes = Vec::new();
        stdin.read_to_end(&mut bytes).context("the standard input could not be read")?;
        String::from_utf8(bytes).context("the standard input is not UTF-8")
    }
}

/// The tokens of a prompt. An empty one is what stands before a text: the end of another.
fn beginning(tokenizer: &Tokenizer, vocabulary: usize, prompt: &str) -> anyhow::Result<Vec<u32>> {
    let ids = tokenizer.encode(prompt)?;
    if !ids.is_empty() {
        return Ok(ids);
    }
    match tokenizer.end_of_text() {
        Some(id) if (id as usize) < vocabulary => Ok(vec![id]),
        _ => bail!("the prompt is empty, and the model's vocabulary has no end of text to begin after"),
    }
}

fn rate(tokens: usize, seconds: f64) -> String {
    let rate = tokens as f64 / seconds.max(1e-9);
    format!("{} tokens in {seconds:.2} s, {} tokens/s", thousands(tokens), thousands(rate as usize))
}

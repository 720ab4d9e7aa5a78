//! Flags for sampling and for the end of a text, and printing text to the terminal.

use std::borrow::Cow;
use std::fmt::Write;
use std::io::IsTerminal;
use std::ops::ControlFlow;

use clap::Args;
use march_lm::generate::{Limits, Sampling, StopReason};

use crate::display::out;
use crate::{interrupt, number};

/// How text is sampled, and what ends it.
#[derive(Args, Clone)]
pub struct WritingArgs {
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = number::whole::<usize>)]
    max_tokens: usize,
    /// Stop before this text; may be repeated; \n, \t and \\ are understood
    #[arg(long = "stop", value_name = "TEXT", value_parser = unescape)]
    stop: Vec<String>,
    /// Sampling temperature: logits are divided by this; 0 always takes the most probable token
    #[arg(long, value_name = "X", default_value_t = 0.8, value_parser = number::any)]
    temperature: f64,
    /// Sample only from the K most probable tokens
    #[arg(long, value_name = "K", value_parser = number::whole::<usize>)]
    top_k: Option<usize>,
    /// Sample only from the most probable tokens that together reach this probability
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = number::any)]
    top_p: f64,
    /// Above 1, tokens that occurred recently become less probable
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = number::any)]
    repetition_penalty: f64,
    /// How many of the last tokens the repetition penalty looks at
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = number::whole::<usize>)]
    penalty_window: usize,
    /// Random seed: the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl WritingArgs {
    /// The sampling settings.
    pub fn sampling(&self) -> Sampling {
        let Self { temperature, top_k, top_p, repetition_penalty, penalty_window, seed, .. } = *self;
        Sampling { temperature, top_k, top_p, repetition_penalty, penalty_window, seed }
    }

    /// The limits of the text.
    pub fn limits(&self) -> Limits {
        Limits { max_tokens: self.max_tokens, stop: self.stop.clone() }
    }
}

/// Replaces the escapes \n, \t and \\, which stand for characters that are hard to type in a shell.
pub fn unescape(text: &str) -> Result<String, String> {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        plain.push(match character {
            '\\' => match characters.next() {
                Some('n') => '\n',
                Some('t') => '\t',
                Some('\\') => '\\',
                _ => return Err("a backslash must be followed by n, t or another backslash".into()),
            },
            other => other,
        });
    }
    Ok(plain)
}

/// Prints a piece immediately. Breaks if Ctrl-C was pressed or standard output no longer accepts text.
pub fn show(piece: &str) -> ControlFlow<()> {
    match std::io::stdout().is_terminal() {
        true => out::piece(&visible(piece)),
        false => out::piece(piece),
    }
    if out::is_open() && !interrupt::asked() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
}

/// Text for a terminal: control characters except line breaks and tabs are escaped, so that a model's text cannot move
/// the cursor, change the title or send keys.
pub fn visible(text: &str) -> Cow<'_, str> {
    let acts = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let mut spelt = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        match acts(character) {
            // Writing to a string cannot fail.
            true => _ = write!(spelt, "\\x{:02x}", u32::from(character)),
            false => spelt.push(character),
        }
    }
    Cow::Owned(spelt)
}

/// A description of why a text ended.
pub fn reason(ended: StopReason) -> &'static str {
    match ended {
        StopReason::EndOfText => "end of text",
        StopReason::Stop => "stop string",
        StopReason::MaxTokens => "--max-tokens",
        StopReason::Requested if out::is_closed() => "the output was closed",
        StopReason::Requested if !out::is_open() => "the output could not be written",
        StopReason::Requested => "stopped",
    }
}

//! Text, written until something ends it.

use std::ops::ControlFlow;

use march_engine::Engine;

use super::{Generator, Stops, Text, TextStream};
use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// What ends a text that is written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// At most so many tokens.
    pub max_tokens: usize,
    /// The text ends before the first of these.
    pub stop: Vec<String>,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The tokenizer's end of a text was drawn.
    EndOfText,
    /// A stop string was found.
    Stop,
    /// The number of tokens was reached.
    MaxTokens,
    /// Whoever watched broke off.
    Asked,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Tokens drawn, those of a stop string among them.
    pub tokens: usize,
    /// Why it ended.
    pub ended: Ended,
}

impl<E: Engine> Generator<'_, E> {
    /// Goes on with the text. For each token `show` is given the text that has become certain, which may be none, and
    /// may break off. Afterwards the text is exactly what was there before and what was shown: a stop string, or
    /// the token that ends a text, is not part of it.
    pub fn write(
        &mut self,
        tokenizer: &Tokenizer,
        limits: &Limits,
        show: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Written> {
        let context: Vec<u32> = self.text.recent.iter().copied().collect();
        let context = &context[context.len().saturating_sub(super::CONTEXT_TOKENS)..];
        let mut stream = TextStream::new(tokenizer, context)?;
        let mut stops = Stops::new(&limits.stop);
        // Where a stop string may have begun: the text before that token, and what was shown from there on.
        let mut fork: Option<(Text<E>, String)> = None;
        let mut tokens = 0;
        let ended = loop {
            if tokens == limits.max_tokens {
                break Ended::MaxTokens;
            }
            let token = self.draw()?;
            tokens += 1;
            if tokenizer.end_of_text() == Some(token) {
                break Ended::EndOfText;
            }
            let (shown, stopped) = stops.push(&stream.push(token)?);
            if stopped {
                let (text, mut since) = fork.take().unwrap_or_else(|| (self.text.clone(), String::new()));
                since += &shown;
                self.text = text;
                self.append(&tokenizer.encode(&since)?);
                let _ = show(&shown);
                return Ok(Written { tokens, ended: Ended::Stop });
            }
            if !stream.holds() && !stops.holds() {
                fork = None;
            } else if !limits.stop.is_empty() {
                fork.get_or_insert_with(|| (self.text.clone(), String::new())).1 += &shown;
            }
            self.append(&[token]);
            if show(&shown).is_break() {
                break Ended::Asked;
            }
        };
        let (shown, _) = stops.push(&stream.finish()?);
        let _ = show(&(shown + &stops.finish()));
        Ok(Written { tokens, ended })
    }
}

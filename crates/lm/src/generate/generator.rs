//! A model that continues one text.

use std::ops::ControlFlow;
use std::path::Path;

use march_engine::Tensor;

use super::{GeneratedPiece, GenerationSummary, Inference, Limits, Sampling, Session, StopReason, Text};
use crate::anchors::Anchor;
use crate::error::{Error, Result};
use crate::memory::{BankTag, Rollback, StateBank};
use crate::model::{Model, TraceCell};
use crate::tokenizer::Tokenizer;

/// A model with one session.
pub struct Generator {
    inference: Inference,
    session: Session,
}

impl Generator {
    /// Creates a generator that continues after what `bank` has read.
    pub fn new(model: &Model, parameters: &[Tensor], bank: StateBank, sampling: Sampling) -> Result<Self> {
        Self::with_text(&Inference::new(model, parameters), Text::new(bank), sampling)
    }

    /// Creates a generator that continues a text.
    pub fn with_text(inference: &Inference, text: Text, sampling: Sampling) -> Result<Self> {
        Ok(Self { inference: inference.clone(), session: Session::new(text, sampling)? })
    }

    /// From now on, records in `trace` which anchors the tokens read.
    pub fn with_trace(mut self, trace: &TraceCell) -> Self {
        self.session.set_trace(Some(trace.clone()));
        self
    }

    /// The session, to run it in one call with others ([`Inference::step`]).
    pub fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }

    /// The text so far.
    pub fn text(&self) -> &Text {
        self.session.text()
    }

    /// Switches to another text, or to a fork of this one. The random number generator keeps its state.
    pub fn set_text(&mut self, text: Text) {
        self.session.set_text(text);
    }

    /// Reads the rest of the text and returns the bank.
    pub fn bank(&mut self) -> Result<&StateBank> {
        self.read_rest()?;
        Ok(self.session.text.bank())
    }

    /// Reads the rest of the text and writes it to a file, as [`Text::save`] does.
    pub fn save(&mut self, path: &Path, tag: &BankTag) -> Result<()> {
        self.read_rest()?;
        self.text().save(path, tag)
    }

    /// Rolls back to the last kept anchor that is at most `tokens` tokens into the text, as [`StateBank::rollback`]
    /// does, and returns that anchor. If `tokens` is the end of the text, the text is unchanged and the result is
    /// `None`.
    pub fn rollback(&mut self, tokens: usize) -> Result<Option<(Anchor, Rollback)>> {
        self.read_rest()?;
        let all = self.text().tokens();
        if tokens > all {
            let message = format!("cannot roll back to {tokens} tokens: the text has {all}");
            return Err(Error::Request(message));
        }
        if tokens == all {
            return Ok(None);
        }
        let mut bank = self.text().bank().clone();
        let back = bank.rollback_to(tokens)?;
        self.set_text(Text::new(bank));
        Ok(Some(back))
    }

    /// Appends tokens to the text and reads them, at most [`super::call_tokens`] per call of the model. After each call
    /// `watch` receives the number of tokens left and may stop; tokens that were not read are then not part of the
    /// text. Returns whether all were read.
    pub fn read(&mut self, ids: &[u32], watch: &mut dyn FnMut(usize) -> ControlFlow<()>) -> Result<bool> {
        self.read_rest()?;
        let mut left = ids;
        while !left.is_empty() {
            let room = self.inference.room(&self.session);
            let (now, later) = left.split_at(room.min(left.len()));
            left = later;
            self.session.push(now);
            self.inference.step(&mut [&mut self.session])?;
            if watch(left.len()).is_break() {
                break;
            }
        }
        Ok(left.is_empty())
    }

    /// How many of `count` tokens after the text fill whole calls. If a text arrives in pieces, reading only that many
    /// at a time makes the calls the same as for the whole text.
    pub fn whole_calls(&self, count: usize) -> usize {
        let end = self.text().tokens() + count;
        count.saturating_sub(end % self.inference.call_tokens())
    }

    /// Samples the next token and appends it to the text.
    pub fn next_token(&mut self) -> Result<u32> {
        self.read_rest()?;
        let token = self.session.draw()?;
        self.session.push(&[token]);
        Ok(token)
    }

    /// Begins to continue the text within limits, one token with each [`Generator::advance`].
    pub fn begin(&mut self, tokenizer: &Tokenizer, limits: &Limits) -> Result<()> {
        self.session.begin(tokenizer, limits.clone())
    }

    /// Reads what is unread, then samples a token, as [`Session::advance`] does.
    pub fn advance(&mut self, tokenizer: &Tokenizer) -> Result<GeneratedPiece> {
        if !self.session.is_full() {
            self.read_rest()?;
        }
        self.session.advance(tokenizer)
    }

    /// Ends at the caller's request; returns the text that was held back.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        self.session.finish(tokenizer)
    }

    /// Continues the text. For each token, `show` receives the text that has become final, which may be empty, and may
    /// stop. Afterwards the text consists of exactly what was there before and what was shown: a stop string or
    /// end-of-text token is not part of it.
    pub fn write(
        &mut self,
        tokenizer: &Tokenizer,
        limits: &Limits,
        show: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<GenerationSummary> {
        self.begin(tokenizer, limits)?;
        loop {
            let piece = self.advance(tokenizer)?;
            let asked = show(&piece.text).is_break();
            let ended = match piece.ended {
                None if asked => {
                    let _ = show(&self.session.finish(tokenizer)?);
                    StopReason::Requested
                }
                None => continue,
                Some(ended) => ended,
            };
            return Ok(GenerationSummary { tokens: self.session.written(), ended });
        }
    }

    /// Reads all unread tokens.
    fn read_rest(&mut self) -> Result<()> {
        while self.session.unread() > 0 {
            self.inference.step(&mut [&mut self.session])?;
        }
        Ok(())
    }
}

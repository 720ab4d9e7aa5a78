//! Text from a model: one token after the other, each drawn from the model's probabilities.
//!
//! A [`Generator`] reads tokens into a bank and draws new ones; [`Generator::write`] turns them into text as they
//! come and ends at a stop string.

mod sampling;
mod stream;
mod write;

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;

use march_engine::{Engine, Tape, Var};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::anchors::{Anchor, Policy};
use crate::error::{Error, Result};
use crate::memory::{BankFile, BankTag, Ending, Rollback, StateBank};
use crate::model::{Batch, Model, TraceCell, Weights};

pub use sampling::Sampling;
pub use stream::{Stops, TextStream};
pub use write::{Ended, Limits, Written};

/// The most tokens of a prompt that one call of the model reads.
pub const PIECE_TOKENS: usize = 2048;

/// Calls end on multiples of this, where the mixers' chunks end.
const GRID: usize = 64;

/// Tokens of a prompt that one call of a model with so many parameters reads: few enough that a call of a large model
/// takes about a second. It depends on the model alone, so that the same text is always read in the same calls.
pub fn call_tokens(parameters: usize) -> usize {
    const PRODUCTS: f64 = 1e11;
    let tokens = (PRODUCTS / parameters.max(1) as f64) as usize;
    tokens.clamp(GRID, PIECE_TOKENS) / GRID * GRID
}

/// The last tokens of a text that decoding the next one may depend on.
const CONTEXT_TOKENS: usize = 8;

/// The last tokens of a text that are remembered whatever the penalty's window: a text that is saved may go on with
/// another one.
const REMEMBERED_TOKENS: usize = 256;

/// A text so far. Cloning it is cheap and forks the text.
pub struct Text<E: Engine> {
    bank: StateBank<E>,
    /// The text's last tokens, which the bank has not read yet.
    unread: Vec<u32>,
    /// The logits that follow what the bank has read; none where it has read nothing here.
    logits: Option<Vec<f32>>,
    /// The last tokens, unread ones among them.
    recent: VecDeque<u32>,
}

impl<E: Engine> Clone for Text<E> {
    fn clone(&self) -> Self {
        let Self { bank, unread, logits, recent } = self;
        Self { bank: bank.clone(), unread: unread.clone(), logits: logits.clone(), recent: recent.clone() }
    }
}

impl<E: Engine> Text<E> {
    /// A text of which a bank has read all.
    pub fn new(bank: StateBank<E>) -> Self {
        Self { bank, unread: Vec::new(), logits: None, recent: VecDeque::new() }
    }

    /// The text of a file that [`Generator::save`] wrote for the same model and tokenizer. A `policy` takes the place of
    /// the file's; it may differ in top-K and retention only.
    pub fn load(
        engine: &E,
        model: &Model<E>,
        file: &BankFile,
        tag: &BankTag,
        policy: Option<&Policy>,
    ) -> Result<Self> {
        let mut text = Self::new(file.load(engine, model, tag, policy)?);
        if let Some(Ending { logits, recent }) = file.ending(model)? {
            (text.logits, text.recent) = (Some(logits), recent.into());
        }
        Ok(text)
    }

    /// Whether the next token can be drawn before another one is read.
    pub fn can_continue(&self) -> bool {
        self.logits.is_some() || !self.unread.is_empty()
    }

    /// Tokens of the text.
    pub fn tokens(&self) -> usize {
        self.bank.timeline().position + self.unread.len()
    }

    /// What is kept of the text, but for the few tokens that were not read yet; see [`Generator::bank`].
    pub fn bank(&self) -> &StateBank<E> {
        &self.bank
    }

    fn append(&mut self, ids: &[u32], remember: usize) {
        self.unread.extend_from_slice(ids);
        self.recent.extend(&ids[ids.len().saturating_sub(remember)..]);
        self.recent.drain(..self.recent.len().saturating_sub(remember));
    }
}

/// A model that goes on with a text.
pub struct Generator<'e, E: Engine> {
    model: &'e Model<E>,
    tape: Tape<'e, E>,
    weights: Weights<E::Tensor>,
    sampling: Sampling,
    random: ChaCha8Rng,
    text: Text<E>,
    call_tokens: usize,
    trace: Option<TraceCell<E>>,
}

impl<'e, E: Engine> Generator<'e, E> {
    /// Goes on after what `bank` has read.
    pub fn new(
        engine: &'e E,
        model: &'e Model<E>,
        parameters: &[E::Tensor],
        bank: StateBank<E>,
        sampling: Sampling,
    ) -> Result<Self> {
        sampling.check()?;
        let tape = Tape::inference(engine);
        let weights = model.bind(&tape, parameters);
        let random = ChaCha8Rng::seed_from_u64(sampling.seed);
        let (text, call_tokens) = (Text::new(bank), call_tokens(model.parameter_count()));
        Ok(Self { model, tape, weights, sampling, random, text, call_tokens, trace: None })
    }

    /// Notes in `trace` which anchors the tokens read from now on.
    pub fn with_trace(mut self, trace: &TraceCell<E>) -> Self {
        self.trace = Some(trace.clone());
        self
    }

    /// The text so far.
    pub fn text(&self) -> &Text<E> {
        &self.text
    }

    /// Goes on with another text, or with a fork of this one. Random numbers go on from where they are.
    pub fn set_text(&mut self, text: Text<E>) {
        self.text = text;
    }

    /// The bank, once it has read all of the text.
    pub fn bank(&mut self) -> Result<&StateBank<E>> {
        self.settle()?;
        Ok(&self.text.bank)
    }

    /// Writes the text's bank to a file, as [`StateBank::append`] does, with what it takes to go on from there without a
    /// new token.
    pub fn save(&mut self, path: &Path, tag: &BankTag) -> Result<()> {
        self.settle()?;
        let (engine, Text { bank, logits, recent, .. }) = (self.tape.engine(), &self.text);
        match logits {
            Some(logits) => {
                let recent = recent.iter().copied().collect();
                bank.append_with(&Ending { logits: logits.clone(), recent }, engine, path, tag)
            }
            None => bank.append(engine, path, tag),
        }
    }

    /// Goes back to the last kept anchor that is at most `tokens` tokens into the text, as [`StateBank::rollback`] does.
    /// Gives that anchor; none, and the text stays as it is, where `tokens` is its end.
    pub fn rollback(&mut self, tokens: usize) -> Result<Option<(Anchor, Rollback)>> {
        self.settle()?;
        let all = self.text.tokens();
        if tokens > all {
            let message = format!("the text has {all} tokens; there is no going back to {tokens}");
            return Err(Error::Request(message));
        }
        if tokens == all {
            return Ok(None);
        }
        let mut bank = self.text.bank.clone();
        let back = bank.rollback_to(self.tape.engine(), tokens)?;
        self.text = Text::new(bank);
        Ok(Some(back))
    }

    /// Appends tokens to the text and reads them, at most [`call_tokens`] in a call of the model. After each call
    /// `watch` is told how many are left, and may break off: what was not read is then not part of the text. Says
    /// whether all were read.
    pub fn read(&mut self, ids: &[u32], watch: &mut dyn FnMut(usize) -> ControlFlow<()>) -> Result<bool> {
        self.settle()?;
        let mut left = ids;
        while !left.is_empty() {
            let (now, later) = left.split_at(self.room().min(left.len()));
            left = later;
            self.append(now);
            let last = self.extend(now.len())?;
            let stop = watch(left.len()).is_break();
            if stop || left.is_empty() {
                self.predict(&last)?;
            }
            if stop {
                break;
            }
        }
        Ok(left.is_empty())
    }

    /// How many of `count` tokens that follow the text fill whole calls. Where a text comes bit by bit, reading only so
    /// many makes the calls those of the whole text.
    pub fn whole_calls(&self, count: usize) -> usize {
        let end = self.text.tokens() + count;
        count.saturating_sub(end % self.call_tokens)
    }

    /// Draws the next token and appends it to the text.
    pub fn next_token(&mut self) -> Result<u32> {
        let token = self.draw()?;
        self.append(&[token]);
        Ok(token)
    }

    /// Draws the next token.
    fn draw(&mut self) -> Result<u32> {
        self.settle()?;
        let Text { logits, recent, bank, .. } = &self.text;
        let Some(logits) = logits else {
            let message = "there is nothing to go on from: at least one token must be read first";
            return Err(Error::Request(message.into()));
        };
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(Error::Diverged(format!(
                "the model's logits after {} tokens are not finite: its training diverged, or its weights are damaged",
                bank.timeline().position
            )));
        }
        Ok(self.sampling.draw(logits, recent, &mut self.random))
    }

    fn append(&mut self, ids: &[u32]) {
        self.text.append(ids, self.sampling.remembered().max(REMEMBERED_TOKENS));
    }

    /// Reads what is unread.
    fn settle(&mut self) -> Result<()> {
        while !self.text.unread.is_empty() {
            let last = self.extend(self.room().min(self.text.unread.len()))?;
            if self.text.unread.is_empty() {
                self.predict(&last)?;
            }
        }
        Ok(())
    }

    /// How many tokens the next call may read: calls end on a grid, so that no chunk is computed twice.
    fn room(&self) -> usize {
        self.call_tokens - self.text.bank.timeline().position % self.call_tokens
    }

    /// Reads the first `count` of the unread tokens; gives the last layer of the last of them.
    fn extend(&mut self, count: usize) -> Result<Var<E::Tensor>> {
        let text = &mut self.text;
        let (batch, banks) = (Batch::one(&text.unread[..count]), &mut [&mut text.bank]);
        let hidden = self.model.extend(&self.tape, &self.weights, batch, banks, self.trace.as_ref())?;
        text.unread.drain(..count);
        text.logits = None;
        Ok(self.tape.slice(&hidden, 1, count - 1..count)?)
    }

    /// Computes the logits that follow the last token.
    fn predict(&mut self, last: &Var<E::Tensor>) -> Result<()> {
        let logits = self.model.logits(&self.tape, &self.weights, last)?;
        self.text.logits = Some(self.tape.engine().to_f32(logits.value()));
        Ok(())
    }
}

/// The `count` tokens that follow a prompt of at least one token.
pub fn continue_text<E: Engine>(
    engine: &E,
    model: &Model<E>,
    parameters: &[E::Tensor],
    policy: &Policy,
    prompt: &[u32],
    count: usize,
    sampling: Sampling,
) -> Result<Vec<u32>> {
    let mut generator = Generator::new(engine, model, parameters, model.bank(policy.clone())?, sampling)?;
    generator.append(prompt);
    (0..count).map(|_| generator.next_token()).collect()
}

//! Text from a model: one token after the other, each drawn from the model's probabilities.
//!
//! A [`Generator`] reads tokens into a bank and draws new ones; [`Generator::write`] turns them into text as they
//! come and ends at a stop string.

mod sampling;
mod stream;
mod write;

use std::collections::VecDeque;
use std::ops::ControlFlow;

use march_engine::{Engine, Tape};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::anchors::Policy;
use crate::error::{Error, Result};
use crate::memory::StateBank;
use crate::model::{Batch, Model, TraceCell, Weights};

pub use sampling::Sampling;
pub use stream::{Stops, TextStream};
pub use write::{Ended, Limits, Written};

/// Tokens of a prompt that one call of the model reads.
pub const PIECE_TOKENS: usize = 2048;

/// The last tokens of a text that are remembered whatever the penalty's window: decoding the next one may depend on
/// them.
const CONTEXT_TOKENS: usize = 8;

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
        Ok(Self { model, tape, weights, sampling, random, text: Text::new(bank), trace: None })
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

    /// Appends tokens to the text and reads them, at most [`PIECE_TOKENS`] in a call of the model. After each call
    /// `watch` is told how many of the text's tokens are still to be read, and may break off; the next call of any
    /// kind goes on from there. Says whether all were read.
    pub fn read(&mut self, ids: &[u32], watch: &mut dyn FnMut(usize) -> ControlFlow<()>) -> Result<bool> {
        self.append(ids);
        while !self.text.unread.is_empty() {
            // Calls end on the grid of pieces, so that no chunk is computed twice.
            let text = &mut self.text;
            let count = PIECE_TOKENS - text.bank.timeline().position % PIECE_TOKENS;
            let count = count.min(text.unread.len());
            let batch = Batch::one(&text.unread[..count]);
            let trace = self.trace.as_ref();
            let banks = &mut [&mut text.bank];
            let hidden = self.model.extend(&self.tape, &self.weights, batch, banks, trace)?;
            text.unread.drain(..count);
            text.logits = None;
            if text.unread.is_empty() {
                let last = self.tape.slice(&hidden, 1, count - 1..count)?;
                let logits = self.model.logits(&self.tape, &self.weights, &last)?;
                text.logits = Some(self.tape.engine().to_f32(logits.value()));
            }
            if watch(text.unread.len()).is_break() {
                break;
            }
        }
        Ok(self.text.unread.is_empty())
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
        if logits.iter().any(|logit| logit.is_nan()) {
            return Err(Error::Diverged(format!(
                "the model's logits after {} tokens are not numbers: its training diverged, or its weights are damaged",
                bank.timeline().position
            )));
        }
        Ok(self.sampling.draw(logits, recent, &mut self.random))
    }

    fn append(&mut self, ids: &[u32]) {
        self.text.append(ids, self.sampling.remembered().max(CONTEXT_TOKENS));
    }

    /// Reads what is unread.
    fn settle(&mut self) -> Result<()> {
        self.read(&[], &mut |_| ControlFlow::Continue(())).map(|_| ())
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

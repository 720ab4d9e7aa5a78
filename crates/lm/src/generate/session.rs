//! One text that a model continues: its bank, its sampling settings, and its pending output.

use std::collections::VecDeque;
use std::path::Path;

use march_engine::Device;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use super::{CONTEXT_TOKENS, REMEMBERED_TOKENS, Sampling, Stops, TextStream};
use crate::anchors::Policy;
use crate::error::{Error, Result};
use crate::memory::{BankFile, BankTag, Ending, StateBank};
use crate::model::{Model, TraceCell};
use crate::tokenizer::Tokenizer;

/// A text so far. Cloning it is cheap and forks the text.
#[derive(Clone, Debug)]
pub struct Text {
    pub(super) bank: StateBank,
    /// The last tokens of the text, which the bank has not read yet.
    pub(super) unread: Vec<u32>,
    /// The logits after what the bank has read; `None` if it has read nothing since it was created or loaded.
    pub(super) logits: Option<Vec<f32>>,
    /// The last tokens, including unread ones.
    pub(super) recent: VecDeque<u32>,
}

impl Text {
    /// A text that a bank has read completely.
    pub fn new(bank: StateBank) -> Self {
        Self { bank, unread: Vec::new(), logits: None, recent: VecDeque::new() }
    }

    /// Loads the text of a file that [`super::Generator::save`] wrote for the same model and tokenizer. A `policy`
    /// replaces the file's; it may differ only in top-K and retention.
    pub fn load(
        device: &Device,
        model: &Model,
        file: &BankFile,
        tag: &BankTag,
        policy: Option<&Policy>,
    ) -> Result<Self> {
        let mut text = Self::new(model.load_bank(device, file, tag, policy)?);
        if let Some(Ending { logits, recent }) = file.ending(model.config().vocab_size)? {
            (text.logits, text.recent) = (Some(logits), recent.into());
        }
        Ok(text)
    }

    /// The same text, of which `ids` are the last tokens.
    pub fn with_recent(mut self, ids: &[u32]) -> Self {
        self.recent = ids[ids.len().saturating_sub(REMEMBERED_TOKENS)..].iter().copied().collect();
        self
    }

    /// Whether the next token can be sampled without reading another one first.
    pub fn can_continue(&self) -> bool {
        self.logits.is_some() || !self.unread.is_empty()
    }

    /// Bytes of the logits after the text, if it has them.
    pub fn logit_bytes(&self) -> usize {
        self.logits.as_ref().map_or(0, |logits| size_of_val(&logits[..]))
    }

    /// The same text without the logits after it: another token has to be read before one can be sampled.
    pub fn without_logits(&self) -> Self {
        Self { logits: None, ..self.clone() }
    }

    /// Number of tokens in the text.
    pub fn tokens(&self) -> usize {
        self.bank.timeline().position + self.unread.len()
    }

    /// What is kept of the text, except for the few tokens that are still unread; see [`super::Generator::bank`].
    pub fn bank(&self) -> &StateBank {
        &self.bank
    }

    /// The last tokens of the text, which the bank has not read yet.
    pub fn unread(&self) -> &[u32] {
        &self.unread
    }

    /// Writes what the bank has read to a file, as [`StateBank::append`] does, together with what is needed to continue
    /// from there without a new token. Unread tokens are not saved: the caller must append them again after loading.
    pub fn save(&self, path: &Path, tag: &BankTag) -> Result<()> {
        let recent = || self.recent.iter().copied().collect();
        let ending = self.next_logits().map(|logits| Ending { logits: logits.to_vec(), recent: recent() });
        self.bank.append(ending.as_ref(), path, tag)
    }

    /// The logits of the next token, once the bank has read the whole text.
    fn next_logits(&self) -> Option<&[f32]> {
        self.logits.as_deref().filter(|_| self.unread.is_empty())
    }

    pub(super) fn append(&mut self, ids: &[u32], remember: usize) {
        self.unread.extend_from_slice(ids);
        self.recent.extend(&ids[ids.len().saturating_sub(remember)..]);
        self.recent.drain(..self.recent.len().saturating_sub(remember));
    }
}

/// The limits of a generated text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The maximum number of tokens.
    pub max_tokens: usize,
    /// Stop strings; the text ends before the first of them.
    pub stop: Vec<String>,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The tokenizer's end-of-text token was sampled.
    EndOfText,
    /// A stop string was found.
    Stop,
    /// The maximum number of tokens was reached.
    MaxTokens,
    /// The caller requested it.
    Requested,
}

/// A summary of what was generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenerationSummary {
    /// Number of tokens sampled, including those of a stop string.
    pub tokens: usize,
    /// Why it ended.
    pub ended: StopReason,
}

/// The result of one generation step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedPiece {
    /// The sampled token; `None` if generation ended before one was sampled.
    pub token: Option<u32>,
    /// The text that has become final, which may be empty.
    pub text: String,
    /// The reason, if generation has ended.
    pub ended: Option<StopReason>,
}

/// The state of a text being generated.
struct GenerationState {
    limits: Limits,
    stream: TextStream,
    stops: Stops,
    tokens: usize,
    /// Where a stop string may have begun: the text before that token, and what was shown since.
    fork: Option<(Text, String)>,
}

/// One text that a model continues.
pub struct Session {
    pub(super) text: Text,
    sampling: Sampling,
    random: ChaCha8Rng,
    writing: Option<GenerationState>,
    pub(super) trace: Option<TraceCell>,
}

impl Session {
    /// Creates a session that continues after what the text's bank has read.
    pub fn new(text: Text, sampling: Sampling) -> Result<Self> {
        sampling.check()?;
        let random = ChaCha8Rng::seed_from_u64(sampling.seed);
        Ok(Self { text, sampling, random, writing: None, trace: None })
    }

    /// Where it is recorded which anchors the tokens read, if anywhere.
    pub fn trace(&self) -> Option<&TraceCell> {
        self.trace.as_ref()
    }

    /// From now on, records in `trace` which anchors the tokens read.
    pub fn set_trace(&mut self, trace: Option<TraceCell>) {
        self.trace = trace;
    }

    /// The text so far.
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// Switches to another text, or to a fork of this one. The random number generator keeps its state.
    pub fn set_text(&mut self, text: Text) {
        self.text = text;
        self.writing = None;
    }

    /// Returns a copy that continues independently, with the same future random numbers. Pending output is not copied.
    pub fn fork(&self) -> Self {
        let Self { text, sampling, random, trace, .. } = self;
        Self {
            text: text.clone(),
            sampling: *sampling,
            random: random.clone(),
            writing: None,
            trace: trace.clone(),
        }
    }

    /// Appends tokens to the text. The model reads them in the next steps.
    pub fn push(&mut self, ids: &[u32]) {
        self.text.append(ids, self.sampling.remembered().max(REMEMBERED_TOKENS));
    }

    /// Number of tokens that the model has not read yet.
    pub fn unread(&self) -> usize {
        self.text.unread.len()
    }

    /// Whether the model has read the whole text, so that the next token can be sampled.
    pub fn is_ready(&self) -> bool {
        self.logits().is_some()
    }

    /// The logits of the next token, once the model has read the whole text.
    pub fn logits(&self) -> Option<&[f32]> {
        self.text.next_logits()
    }

    /// Samples the next token without changing the text.
    pub fn draw(&mut self) -> Result<u32> {
        let Text { recent, bank, .. } = &self.text;
        let Some(logits) = self.text.next_logits() else {
            let message = "there are no logits to sample from: the model must first read at least one token";
            return Err(Error::Request(message.into()));
        };
        if let Some(logit) = logits.iter().find(|logit| !logit.is_finite()) {
            return Err(Error::Diverged(format!(
                "the model's logits after {} tokens are not finite ({logit}): its training diverged, or its weights are \
                 damaged; use an earlier checkpoint",
                bank.timeline().position
            )));
        }
        Ok(self.sampling.draw(logits, recent, &mut self.random))
    }

    /// Begins generation. From now on [`Session::advance`] samples a token each time the model has read the previous
    /// one.
    pub fn begin(&mut self, tokenizer: &Tokenizer, limits: Limits) -> Result<()> {
        let context: Vec<u32> = self.text.recent.iter().copied().collect();
        let context = &context[context.len().saturating_sub(CONTEXT_TOKENS)..];
        let (stream, stops) = (TextStream::new(tokenizer, context)?, Stops::new(limits.stop.clone()));
        self.writing = Some(GenerationState { limits, stream, stops, tokens: 0, fork: None });
        Ok(())
    }

    /// Number of tokens sampled since [`Session::begin`], including those of a stop string.
    pub fn written(&self) -> usize {
        self.writing.as_ref().map_or(0, |writing| writing.tokens)
    }

    /// Whether the maximum number of tokens has been sampled since [`Session::begin`].
    pub(super) fn is_full(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| writing.tokens == writing.limits.max_tokens)
    }

    /// Samples the next token and appends it to the text, unless it ends generation. At the end, the text is exactly
    /// what was there before plus what was returned: a stop string or end-of-text token is not part of it.
    pub fn advance(&mut self, tokenizer: &Tokenizer) -> Result<GeneratedPiece> {
        let Some(writing) = &self.writing else {
            return Err(Error::Request("generation has not begun: call `begin` first".into()));
        };
        if writing.tokens == writing.limits.max_tokens {
            return self.end(tokenizer, None, StopReason::MaxTokens);
        }
        let token = self.draw()?;
        let Some(writing) = &mut self.writing else { unreachable!("it was there above") };
        writing.tokens += 1;
        if tokenizer.is_end(token) {
            return self.end(tokenizer, Some(token), StopReason::EndOfText);
        }
        let (text, stopped) = writing.stops.push(&writing.stream.push(tokenizer, token)?);
        if stopped {
            let fork = writing.fork.take();
            let (before, mut since) = fork.unwrap_or_else(|| (self.text.clone(), String::new()));
            since += &text;
            self.text = before;
            self.push(&tokenizer.encode(&since)?);
            return Ok(GeneratedPiece { token: Some(token), text, ended: Some(StopReason::Stop) });
        }
        if !writing.stream.holds() && !writing.stops.holds() {
            writing.fork = None;
        } else if !writing.limits.stop.is_empty() {
            writing.fork.get_or_insert_with(|| (self.text.clone(), String::new())).1 += &text;
        }
        self.push(&[token]);
        Ok(GeneratedPiece { token: Some(token), text, ended: None })
    }

    /// Ends generation at the caller's request; returns the text that was held back.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        Ok(self.end(tokenizer, None, StopReason::Requested)?.text)
    }

    fn end(
        &mut self,
        tokenizer: &Tokenizer,
        token: Option<u32>,
        ended: StopReason,
    ) -> Result<GeneratedPiece> {
        let mut text = String::new();
        if let Some(writing) = &mut self.writing {
            let (shown, _) = writing.stops.push(&writing.stream.clone().finish(tokenizer)?);
            text = shown + &writing.stops.clone().finish();
        }
        Ok(GeneratedPiece { token, text, ended: Some(ended) })
    }
}

//! Running a model on any number of texts in one call.

use march_engine::ops::cross_entropy::TokenLosses;
use march_engine::{Device, Tensor};

use super::{Session, call_tokens};
use crate::error::Result;
use crate::model::{Model, Part, Weights};

/// How probable tokens are, one entry per token with a target.
#[derive(Clone, Debug)]
pub struct Scores {
    /// −ln p of the target.
    pub nll: Vec<f32>,
    /// The most probable tokens, the most probable one first, each with its −ln p, which is exactly `nll` for the
    /// target. In case of a tie, the first token is taken.
    pub top: Vec<Vec<(u32, f32)>>,
}

/// Positions whose logits are in memory at once while the most probable tokens are found.
const LOGIT_ROWS: usize = 64;

/// A model with its weights, ready to run. Cloning copies a handle; several threads can use one at the same time.
#[derive(Clone)]
pub struct Inference {
    model: Model,
    weights: Weights,
    call_tokens: usize,
}

impl Inference {
    /// Creates it from a model and its parameters, which may be packed ([`Model::quantize`]).
    pub fn new(model: &Model, parameters: &[Tensor]) -> Self {
        Self {
            model: model.clone(),
            weights: parameters.into(),
            call_tokens: call_tokens(model.parameter_count()),
        }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The parameters, in the order of [`Model::layout`].
    pub fn parameters(&self) -> &[Tensor] {
        &self.weights
    }

    /// The device that runs the model.
    pub fn device(&self) -> &Device {
        self.weights[0].device()
    }

    /// The maximum number of tokens of one text per call.
    pub fn call_tokens(&self) -> usize {
        self.call_tokens
    }

    /// Limits calls to `tokens` tokens of one text: a multiple of 64, or a power of 2 below. Short calls reduce the time
    /// that texts being generated wait for a prompt that is read at the same time. Below 64, the chunks of the recurrence
    /// are computed more than once, and the bits of a Log-Linear model change (`has_same_bits_in_any_calls`).
    pub fn with_call_tokens(mut self, tokens: usize) -> Self {
        self.call_tokens = match tokens {
            0..super::GRID => tokens.next_power_of_two(),
            _ => tokens.next_multiple_of(super::GRID),
        };
        self
    }

    /// The number of a session's tokens that the next step reads: all unread ones, except that calls end on a grid, so
    /// that no chunk of the recurrence is computed twice.
    pub fn next_tokens(&self, session: &Session) -> usize {
        self.room(session).min(session.unread())
    }

    /// Number of tokens up to the next point of the grid of calls.
    pub(super) fn room(&self, session: &Session) -> usize {
        self.call_tokens - session.text.bank.timeline().position % self.call_tokens
    }

    /// Reads the next unread tokens of each session in one call of the model; sessions without unread tokens are
    /// unchanged. Sessions with no unread tokens left can then sample their next one. A session's text does not depend
    /// on what else is in the call.
    pub fn step(&self, sessions: &mut [&mut Session]) -> Result<()> {
        let counts: Vec<usize> = sessions.iter().map(|session| self.next_tokens(session)).collect();
        let mut parts: Vec<Part<'_>> = std::iter::zip(sessions.iter_mut(), &counts)
            .filter(|(_, count)| **count > 0)
            .map(|(session, &count)| {
                let Session { text, trace, .. } = &mut **session;
                Part { ids: &text.unread[..count], bank: &mut text.bank, trace: trace.as_ref() }
            })
            .collect();
        if parts.is_empty() {
            return Ok(());
        }
        let hidden = self.model.step(&self.weights, &mut parts)?;
        let (mut at, mut last, mut owners) = (0, Vec::new(), Vec::new());
        for (i, (session, &count)) in
            sessions.iter_mut().zip(&counts).enumerate().filter(|(_, (_, n))| **n > 0)
        {
            session.text.unread.drain(..count);
            session.text.logits = None;
            at += count;
            if session.text.unread.is_empty() {
                last.push(hidden.slice(1, at - 1..at)?);
                owners.push(i);
            }
        }
        for (owner, logits) in owners.into_iter().zip(self.logits(&last)?) {
            sessions[owner].text.logits = Some(logits);
        }
        Ok(())
    }

    /// The logits after each of the given positions of the last layer, [1, 1, hidden_size].
    fn logits(&self, last: &[Tensor]) -> Result<Vec<Vec<f32>>> {
        if last.is_empty() {
            return Ok(Vec::new());
        }
        let rows = Tensor::concat(&last.iter().collect::<Vec<_>>(), 1)?;
        let logits = self.model.logits(&self.weights, &rows)?;
        let numbers = logits.to_f32();
        logits.device().check()?;
        Ok(numbers.chunks(self.model.config().vocab_size).map(<[f32]>::to_vec).collect())
    }

    /// Reads the next tokens of any number of texts in one call, without logits.
    pub fn read(&self, parts: &mut [Part<'_>]) -> Result<()> {
        self.model.step(&self.weights, parts)?;
        Ok(())
    }

    /// The logits after each of the next tokens of any number of texts in one call, [1, tokens of all, vocab_size].
    pub fn token_logits(&self, parts: &mut [Part<'_>]) -> Result<Tensor> {
        let hidden = self.model.step(&self.weights, parts)?;
        self.model.logits(&self.weights, &hidden)
    }

    /// −ln p of each token's target and the most probable token at each position, for the next tokens of any number of
    /// texts in one call. `targets` has one entry per token, with the texts concatenated.
    pub fn losses(&self, parts: &mut [Part<'_>], targets: &[u32]) -> Result<TokenLosses> {
        let hidden = self.model.step(&self.weights, parts)?;
        self.model.token_losses(&self.weights, &hidden, targets)
    }

    /// As [`Inference::losses`], with the `top` most probable tokens, at least one.
    pub fn scores(&self, parts: &mut [Part<'_>], targets: &[u32], top: usize) -> Result<Scores> {
        let hidden = self.model.step(&self.weights, parts)?;
        let TokenLosses { nll, greedy } = self.model.token_losses(&self.weights, &hidden, targets)?;
        if top <= 1 {
            let best = self.model.token_losses(&self.weights, &hidden, &greedy)?;
            let top = std::iter::zip(greedy, best.nll).map(|best| vec![best]).collect();
            return Ok(Scores { nll, top });
        }
        let mut found = Vec::with_capacity(targets.len());
        for start in (0..targets.len()).step_by(LOGIT_ROWS) {
            let end = targets.len().min(start + LOGIT_ROWS);
            let rows = self.logits(&[hidden.slice(1, start..end)?])?;
            for (logits, i) in rows.iter().zip(start..end) {
                let own = logits[targets[i] as usize];
                found.push(
                    most_probable(logits, top).map(|id| (id, nll[i] + (own - logits[id as usize]))).collect(),
                );
            }
        }
        Ok(Scores { nll, top: found })
    }
}

/// The `count` tokens with the largest logits, at least one, the largest first.
pub fn most_probable(logits: &[f32], count: usize) -> impl Iterator<Item = u32> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let count = count.clamp(1, order.len());
    let by = |&a: &u32, &b: &u32| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b));
    order.select_nth_unstable_by(count - 1, by);
    order.truncate(count);
    order.sort_unstable_by(by);
    order.into_iter()
}

//! The cost and benefit of a policy on a text: bank size, loss, speed.

use std::hint::black_box;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use march_engine::Tensor;
use serde::Serialize;

use march_lm::anchors::Policy;
use march_lm::generate::PIECE_TOKENS;
use march_lm::model::{Batch, Model, Weights};
use march_lm::{Error, Result};

/// How policies are measured.
#[derive(Clone, Copy, Debug)]
pub struct Measure<'a> {
    /// The text.
    pub ids: &'a [u32],
    /// The token counts after which the bank's size is recorded.
    pub lengths: &'a [usize],
    /// How many of the last tokens are read one at a time, as in decoding; the others are read in long calls.
    pub decode: usize,
}

/// The measurements of a policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Bank size in bytes after each of the lengths.
    pub bank_bytes: Vec<usize>,
    /// Mean −ln p(token) over the last quarter of the text; `None` if that is only the first token.
    pub loss: Option<f64>,
    /// Tokens per second in long calls, without logits; `None` if there were none.
    pub read_speed: Option<f64>,
    /// Tokens per second one at a time, with logits; `None` if there were none.
    pub decode_speed: Option<f64>,
}

impl Measure<'_> {
    /// Measures a policy. After each call of the model `watch` receives the number of tokens done, and may stop; then
    /// there is no result.
    pub fn run(
        &self,
        model: &Model,
        parameters: &[Tensor],
        policy: &Policy,
        watch: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Option<Measured>> {
        let Self { ids, lengths, decode } = *self;
        self.check()?;
        let weights: Weights = parameters.into();
        let mut bank = model.bank(policy.clone())?;
        let decode_from = ids.len().saturating_sub(decode);
        // The first token is not a target, because nothing precedes it.
        let scored_from = (ids.len() - ids.len().div_ceil(4)).max(1);
        let (mut reading, mut decoding) = (Duration::ZERO, Duration::ZERO);
        let (mut bank_bytes, mut loss, mut at) = (vec![0; lengths.len()], 0.0, 0);
        while at < ids.len() {
            let end = if at < decode_from { self.call_end(at, decode_from) } else { at + 1 };
            let started = Instant::now();
            let hidden = model.extend(&weights, Batch::one(&ids[at..end]), &mut [&mut bank], None)?;
            if at < decode_from {
                reading += started.elapsed();
            } else {
                black_box(model.logits(&weights, &hidden)?);
                decoding += started.elapsed();
            }
            // The token at t predicts that at t + 1.
            let targets = scored_from.max(at + 1)..ids.len().min(end + 1);
            if !targets.is_empty() {
                let before = hidden.slice(1, targets.start - 1 - at..targets.end - 1 - at)?;
                let sum = model.loss(&weights, &before, &ids[targets], Some(1.0))?;
                loss += sum.to_f64()[0];
                sum.device().check()?;
            }
            at = end;
            for (bytes, _) in bank_bytes.iter_mut().zip(lengths).filter(|(_, length)| **length == at) {
                *bytes = bank.bytes();
            }
            if watch(at).is_break() {
                return Ok(None);
            }
        }
        let speed = |tokens: usize, time: Duration| (tokens > 0).then(|| tokens as f64 / time.as_secs_f64());
        let scored = ids.len() - scored_from.min(ids.len());
        Ok(Some(Measured {
            bank_bytes,
            loss: (scored > 0).then(|| loss / scored as f64),
            read_speed: speed(decode_from, reading),
            decode_speed: speed(ids.len() - decode_from, decoding),
        }))
    }

    fn check(&self) -> Result<()> {
        let tokens = self.ids.len();
        match self.lengths.iter().find(|&&length| length == 0 || length > tokens) {
            Some(length) => {
                let message = format!("memory cannot be measured after {length} tokens of {tokens}");
                Err(Error::Request(format!("{message}; use a length from 1 to {tokens}")))
            }
            None if tokens == 0 => Err(Error::Request("a text without tokens cannot be measured".into())),
            None => Ok(()),
        }
    }

    /// Where a call from `at` ends: at a point of the call grid, at one of the lengths, or where decoding begins.
    fn call_end(&self, at: usize, decode_from: usize) -> usize {
        let piece = (at / PIECE_TOKENS + 1) * PIECE_TOKENS;
        let lengths = self.lengths.iter().copied().filter(|&length| length > at);
        lengths.fold(piece.min(decode_from), usize::min)
    }
}

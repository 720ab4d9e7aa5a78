//! Sampling a token from logits.
//!
//! In this order: repetition penalty, temperature, top-k, top-p, one random number.

use std::collections::VecDeque;

use rand_chacha::rand_core::Rng;

use super::most_probable;
use crate::config::Contradiction;
use crate::error::{Error, Result};

/// How tokens are sampled. By default from the model's unmodified probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The divisor of the logits; 0 always takes the most probable token.
    pub temperature: f64,
    /// Sample only from the k most probable tokens; `None` for all.
    pub top_k: Option<usize>,
    /// Sample only from the smallest set of most probable tokens whose probabilities together reach this value.
    pub top_p: f64,
    /// Positive logits of recent tokens are divided by this, others multiplied; 1 has no effect.
    pub repetition_penalty: f64,
    /// How many of the last tokens count as recent.
    pub penalty_window: usize,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            repetition_penalty: 1.0,
            penalty_window: 64,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Always takes the most probable token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Rejects invalid values.
    pub fn check(&self) -> Result<()> {
        self.check_keys().map_err(|(_, message)| Error::Request(message))
    }

    /// Rejects invalid values as [`Sampling::check`] does, with the name of the field that is invalid.
    pub fn check_keys(&self) -> std::result::Result<(), Contradiction> {
        let Self { temperature, top_k, top_p, repetition_penalty, .. } = *self;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(("temperature", format!("the temperature is {temperature}; it must be 0 or more")));
        }
        if top_k == Some(0) {
            return Err(("top_k", "top-k is 0; it must be at least 1, or not set".into()));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(("top_p", format!("top-p is {top_p}; it must be above 0 and at most 1")));
        }
        if !(repetition_penalty.is_finite() && repetition_penalty > 0.0) {
            let message = format!("the repetition penalty is {repetition_penalty}; it must be above 0");
            return Err(("repetition_penalty", message));
        }
        Ok(())
    }

    /// How many of the last tokens the penalty needs.
    pub(super) fn remembered(&self) -> usize {
        if self.repetition_penalty == 1.0 { 0 } else { self.penalty_window }
    }

    /// Samples a token. If the most probable token is taken, ties go to the lowest id.
    #[doc(hidden)]
    pub fn draw(&self, logits: &[f32], recent: &VecDeque<u32>, random: &mut impl Rng) -> u32 {
        let penalised;
        let logits = if self.remembered() == 0 {
            logits
        } else {
            penalised = self.penalise(logits, recent);
            &penalised
        };
        let mut best = 0;
        for (i, &logit) in logits.iter().enumerate() {
            if logit > logits[best] {
                best = i;
            }
        }
        if self.temperature == 0.0 {
            return best as u32;
        }
        let largest = f64::from(logits.get(best).copied().unwrap_or(0.0));
        // Proportional to the probability.
        let weight = |id: u32| ((f64::from(logits[id as usize]) - largest) / self.temperature).exp();
        let ids = self.candidates(logits, weight);
        let total: f64 = ids.iter().map(|&id| weight(id)).sum();
        let mut left = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
        for &id in &ids {
            left -= weight(id);
            if left < 0.0 {
                return id;
            }
        }
        best as u32
    }

    /// The tokens that top-k and top-p allow; if they exclude none, in the order of their ids.
    fn candidates(&self, logits: &[f32], weight: impl Fn(u32) -> f64) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        if let Some(k) = self.top_k.filter(|&k| k < ids.len()) {
            ids = most_probable(logits, k).collect();
        } else if self.top_p < 1.0 {
            ids = most_probable(logits, ids.len()).collect();
        }
        if self.top_p < 1.0 {
            let enough = self.top_p * ids.iter().map(|&id| weight(id)).sum::<f64>();
            let mut sum = 0.0;
            let reaches = |&id: &u32| {
                sum += weight(id);
                sum >= enough
            };
            let count = ids.iter().position(reaches).map_or(ids.len(), |last| last + 1);
            ids.truncate(count);
        }
        ids
    }

    fn penalise(&self, logits: &[f32], recent: &VecDeque<u32>) -> Vec<f32> {
        let mut penalised = logits.to_vec();
        let penalty = self.repetition_penalty as f32;
        for &id in recent.iter().rev().take(self.penalty_window) {
            let Some(&logit) = logits.get(id as usize) else { continue };
            // Use the original logit, so that a token that occurs twice is penalised once.
            penalised[id as usize] = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        penalised
    }
}

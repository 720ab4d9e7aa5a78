//! Sampling a token from logits.
//!
//! In this order: repetition penalty, temperature, top-k, top-p, one random number.

use std::collections::VecDeque;

use rand_chacha::rand_core::Rng;

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
    pub(super) fn draw(&self, logits: &[f32], recent: &VecDeque<u32>, random: &mut impl Rng) -> u32 {
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
        let order = |&a: &u32, &b: &u32| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b));
        if let Some(k) = self.top_k.filter(|&k| k < ids.len()) {
            ids.select_nth_unstable_by(k, order);
            ids.truncate(k);
            ids.sort_unstable_by(order);
        }
        if self.top_p < 1.0 {
            ids.sort_unstable_by(order);
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

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    /// How often each token occurs in 10,000 draws.
    fn counts(sampling: Sampling, logits: &[f32], recent: &[u32]) -> Vec<usize> {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let recent = recent.iter().copied().collect();
        let mut counts = vec![0; logits.len()];
        (0..10_000).for_each(|_| counts[sampling.draw(logits, &recent, &mut random) as usize] += 1);
        counts
    }

    fn assert_share(counts: &[usize], token: usize, share: f64) {
        assert!((counts[token] as f64 / 10_000.0 - share).abs() < 0.03, "{token}, {share}: {counts:?}");
    }

    /// Probabilities 0.1, 0.4, 0, 0.2, 0.3.
    fn logits() -> [f32; 5] {
        [0.1f32, 0.4, 0.0, 0.2, 0.3].map(f32::ln)
    }

    #[test]
    fn tokens_come_as_often_as_they_are_probable() {
        let all = counts(Sampling::default(), &logits(), &[]);
        for (token, share) in [0.1, 0.4, 0.0, 0.2, 0.3].into_iter().enumerate() {
            assert_share(&all, token, share);
        }
        assert_eq!(all[2], 0);
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(counts(greedy, &[1.0, 3.0, 3.0], &[]), [0, 10_000, 0]);
        // The probabilities squared.
        let cold = counts(Sampling { temperature: 0.5, ..Sampling::default() }, &logits(), &[]);
        assert_share(&cold, 1, 0.16 / 0.30);
    }

    #[test]
    fn top_k_and_top_p_leave_the_most_probable() {
        let top_k = |k| counts(Sampling { top_k: Some(k), ..Sampling::default() }, &logits(), &[]);
        assert_eq!(top_k(1)[1], 10_000);
        assert_share(&top_k(2), 1, 0.4 / 0.7);
        assert_share(&top_k(2), 4, 0.3 / 0.7);
        assert_eq!(top_k(2)[0] + top_k(2)[3], 0);
        assert_eq!(top_k(5), top_k(100));
        assert_eq!(top_k(5), counts(Sampling::default(), &logits(), &[]));
        let top_p = |p| counts(Sampling { top_p: p, ..Sampling::default() }, &logits(), &[]);
        assert_eq!(top_p(1e-9)[1], 10_000);
        assert_eq!(top_p(0.39)[1], 10_000);
        let two = top_p(0.5);
        assert_eq!(two[0] + two[2] + two[3], 0);
        assert_share(&two, 1, 0.4 / 0.7);
        assert_eq!(top_p(0.8)[0], 0);
        assert_share(&top_p(0.8), 3, 0.2 / 0.9);
        // Ties go to the lowest ids, in both cases.
        let both = Sampling { top_k: Some(3), top_p: 0.6, ..Sampling::default() };
        assert_eq!(counts(both, &[0.0; 6], &[])[2..], [0; 4]);
    }

    #[test]
    fn the_penalty_is_for_recent_tokens_once() {
        let greedy = Sampling { temperature: 0.0, repetition_penalty: 2.0, ..Sampling::default() };
        let first = |sampling: Sampling, logits: &[f32], recent: &[u32]| {
            counts(sampling, logits, recent).iter().position(|&count| count > 0)
        };
        assert_eq!(first(greedy, &[3.0, 2.0, -1.0], &[]), Some(0));
        assert_eq!(first(greedy, &[3.0, 2.0, -1.0], &[0]), Some(1));
        assert_eq!(first(greedy, &[3.0, 1.0, -1.0], &[0, 0, 0]), Some(0), "1.5, not less");
        assert_eq!(first(greedy, &[-1.0, -1.5], &[0]), Some(1));
        let short = Sampling { penalty_window: 1, ..greedy };
        assert_eq!(first(short, &[3.0, 2.0, -1.0], &[0, 2]), Some(0));
        // Ids that are outside the model's vocabulary.
        assert_eq!(first(greedy, &[3.0, 2.0], &[7]), Some(0));
    }

    #[test]
    fn what_has_no_meaning_is_refused() {
        let fine = Sampling::default();
        assert!(fine.check().is_ok());
        for (bad, word, key) in [
            (Sampling { temperature: -1.0, ..fine }, "temperature", "temperature"),
            (Sampling { temperature: f64::NAN, ..fine }, "temperature", "temperature"),
            (Sampling { top_k: Some(0), ..fine }, "top-k", "top_k"),
            (Sampling { top_p: 0.0, ..fine }, "top-p", "top_p"),
            (Sampling { top_p: 1.5, ..fine }, "top-p", "top_p"),
            (Sampling { repetition_penalty: 0.0, ..fine }, "penalty", "repetition_penalty"),
        ] {
            assert!(bad.check().unwrap_err().to_string().contains(word), "{bad:?}");
            assert_eq!(bad.check_keys().unwrap_err().0, key, "{bad:?}");
        }
    }
}

//! `[train]`: how a model is trained.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::{Contradiction, keys_of, within};
use crate::data::LONGEST_SEQUENCE;

/// Larger values are mistakes: no machine has the memory or the time.
const MOST_TOKENS: u64 = 1 << 32;
const MOST_SEQUENCES: u64 = 1 << 24;
const MOST_STEPS: u64 = 1 << 40;

/// The learning rate after the warmup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Warmup, stable, decay: constant, then a linear decay in the last steps.
    #[default]
    Wsd,
    /// Decays along half a cosine.
    Cosine,
    /// Stays constant.
    Constant,
}

/// Whether to keep only the inputs of each block for the backward pass and recompute the rest: less memory for about a
/// third more work, with bit-identical results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Only if a step would otherwise take most of the available memory.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Recompute {
    /// Resolves `auto` for a step that needs `needed` bytes without recomputation. If the available memory is unknown,
    /// it is assumed to be enough.
    pub fn resolve(self, needed: usize, available: Option<usize>) -> bool {
        /// The fraction of the available memory that a step may take; the rest is for what the estimate leaves out.
        const SHARE: f64 = 0.7;
        match self {
            Self::Auto => available.is_some_and(|available| needed as f64 > SHARE * available as f64),
            Self::On => true,
            Self::Off => false,
        }
    }
}

/// Which parameters are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Only {
    /// All of them.
    #[default]
    All,
    /// Those that routing adds to the recurrence. The others have no gradients and no moments, and stay as they are.
    Routing,
}

/// `[train]`: how a model is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TrainConfig {
    /// Number of weight updates.
    pub steps: u64,
    /// Tokens per update: a multiple of `sequence_length`.
    pub tokens_per_step: usize,
    /// Sequences computed at a time; the gradients of several such calls are accumulated for one update.
    pub micro_batch: usize,
    /// The peak learning rate.
    pub learning_rate: f64,
    /// The schedule of the rate after the warmup: `wsd`, `cosine` or `constant`.
    pub schedule: Schedule,
    /// Fraction of the steps in which the rate rises.
    pub warmup: f64,
    /// Fraction of the steps in which the rate falls, with `wsd`.
    pub decay: f64,
    /// The final rate, as a fraction of the peak.
    pub final_rate: f64,
    /// Factor on the rate of the parameters that routing adds to the recurrence.
    pub routing_rate: f64,
    /// Which parameters are trained: `all`, or `routing`.
    pub only: Only,
    /// β₁ and β₂ of AdamW.
    pub betas: [f64; 2],
    /// Added to the root of AdamW's second moment.
    pub eps: f64,
    /// Weight decay of tensors with two or more dimensions.
    pub weight_decay: f64,
    /// Maximum global norm of the gradient; larger gradients are clipped.
    pub clip_norm: f64,
    /// Seed of the initial weights, the order of sequences, and samples.
    pub seed: u64,
    /// Steps between validations; 0 validates only at the end.
    pub validate_every: u64,
    /// Maximum number of sequences to validate on.
    pub validation_sequences: usize,
    /// Steps between samples; 0 samples only at the end.
    pub sample_every: u64,
    /// Number of tokens in a sample.
    pub sample_tokens: usize,
    /// Prompts of the samples; empty for no samples.
    pub prompts: Vec<String>,
    /// Steps between checkpoints; 0 saves only at the end.
    pub save_every: u64,
    /// Number of checkpoints to keep.
    pub keep: usize,
    /// Recompute the activations of blocks in the backward pass: `auto` (if memory is short), `on` or `off`.
    pub recompute: Recompute,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 300,
            tokens_per_step: 16_384,
            micro_batch: 8,
            learning_rate: 3e-3,
            schedule: Schedule::Wsd,
            warmup: 0.02,
            decay: 0.2,
            final_rate: 0.0,
            routing_rate: 1.0,
            only: Only::All,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            clip_norm: 1.0,
            seed: 0,
            validate_every: 50,
            validation_sequences: 16,
            sample_every: 100,
            sample_tokens: 200,
            prompts: vec!["The ".into()],
            save_every: 100,
            keep: 3,
            recompute: Recompute::Auto,
        }
    }
}

impl TrainConfig {
    /// Rejects invalid values.
    pub fn check(&self, sequence_length: usize) -> std::result::Result<(), Contradiction> {
        for (key, value, range) in [
            ("steps", self.steps, 1..=MOST_STEPS),
            ("tokens_per_step", self.tokens_per_step as u64, 1..=MOST_TOKENS),
            ("micro_batch", self.micro_batch as u64, 1..=MOST_SEQUENCES),
            ("keep", self.keep as u64, 1..=u64::MAX),
            ("validation_sequences", self.validation_sequences as u64, 0..=MOST_SEQUENCES),
            ("sample_tokens", self.sample_tokens as u64, 0..=LONGEST_SEQUENCE),
        ] {
            within(key, value, range)?;
        }
        if !self.tokens_per_step.is_multiple_of(sequence_length.max(1)) {
            let message = format!(
                "is {}, which must be a multiple of `sequence_length` ({sequence_length}); use {}",
                self.tokens_per_step,
                self.tokens_per_step.div_ceil(sequence_length) * sequence_length
            );
            return Err(("tokens_per_step", message));
        }
        for (key, value) in [("warmup", self.warmup), ("decay", self.decay), ("final_rate", self.final_rate)]
        {
            if !(0.0..=1.0).contains(&value) {
                return Err((key, format!("is {value}; it must be a fraction from 0 to 1")));
            }
        }
        if self.warmup + self.decay > 1.0 {
            let message =
                format!("is {}; with `warmup` ({}) that is more than all the steps", self.decay, self.warmup);
            return Err(("decay", message));
        }
        for (key, value) in [
            ("learning_rate", self.learning_rate),
            ("routing_rate", self.routing_rate),
            ("clip_norm", self.clip_norm),
            ("eps", self.eps),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return Err((key, format!("is {value}; it must be a number above 0")));
            }
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            return Err(("weight_decay", format!("is {}; it must be 0 or above", self.weight_decay)));
        }
        if let Some(beta) = self.betas.iter().find(|beta| !(0.0..1.0).contains(*beta)) {
            return Err(("betas", format!("has {beta}; each must be at least 0 and below 1")));
        }
        Ok(())
    }

    /// The keys and their values. `only` is left out if it is `all`, so that a configuration is written as by earlier
    /// versions.
    pub(crate) fn keys(&self) -> Map<String, Value> {
        let mut keys = keys_of(self);
        if self.only == Only::All {
            keys.remove("only");
        }
        keys
    }

    /// The learning rate of a step, counted from 0.
    pub fn rate(&self, step: u64) -> f64 {
        let steps = self.steps as f64;
        let warmup = (self.warmup * steps).round();
        let at = step as f64;
        if at < warmup {
            return self.learning_rate * (at + 1.0) / warmup;
        }
        let fall = |from: f64, shape: fn(f64) -> f64| {
            // 0 at the first falling step, 1 one step after the last.
            let along = ((at - from) / (steps - from).max(1.0)).clamp(0.0, 1.0);
            self.learning_rate * (self.final_rate + (1.0 - self.final_rate) * shape(along))
        };
        match self.schedule {
            Schedule::Cosine => fall(warmup, |x| 0.5 * (1.0 + (std::f64::consts::PI * x).cos())),
            Schedule::Wsd => {
                let from = steps - (self.decay * steps).round();
                if at < from { self.learning_rate } else { fall(from, |x| 1.0 - x) }
            }
            Schedule::Constant => self.learning_rate,
        }
    }
}

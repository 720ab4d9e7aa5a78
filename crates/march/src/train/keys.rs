//! `[data]` and `[train]`: what a run learns from and how.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::data::recall::Task;
use crate::error::{Error, Result};
use crate::model::mixer::Contradiction;
use crate::tokenizer::BYTES;

/// Beyond these, values are mistakes: no machine has the memory or the time.
const LONGEST_SEQUENCE: u64 = 1 << 24;
const MOST_TOKENS: u64 = 1 << 32;
const MOST_SEQUENCES: u64 = 1 << 24;
const MOST_STEPS: u64 = 1 << 40;

/// Refuses a number outside of its range.
fn within(
    key: &'static str,
    value: u64,
    range: RangeInclusive<u64>,
) -> std::result::Result<(), Contradiction> {
    let (least, most) = (range.start(), range.end());
    match value {
        _ if range.contains(&value) => Ok(()),
        _ if *most == u64::MAX => Err((key, format!("is {value}; it must be at least {least}"))),
        _ => Err((key, format!("is {value}; it must be from {least} to {most}"))),
    }
}

/// `[data]`: where tokens come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DataConfig {
    /// `builtin` (the text in the program), `shards` (a folder of `march data prepare`), `recall` (a task) or
    /// `batches` (a JSON file of explicit batches).
    pub kind: String,
    /// The task and its sizes, such as `mqar:pairs=24`, for `recall`.
    pub task: Option<String>,
    /// The folder or file.
    pub path: Option<String>,
    /// A folder of shards to validate on; without one the last part of the training text is held back.
    pub validation: Option<String>,
    /// How much of the text that is.
    pub validation_fraction: f64,
    /// `bytes`, or a tokenizer.json: for the built-in text, for samples, and to go with the checkpoint.
    pub tokenizer: String,
    /// T, tokens of a sequence.
    pub sequence_length: usize,
    /// Sequences in a random order, another one in each epoch; else in the order of the text.
    pub shuffle: bool,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            kind: "builtin".into(),
            task: None,
            path: None,
            validation: None,
            validation_fraction: 0.1,
            tokenizer: "bytes".into(),
            sequence_length: 2048,
            shuffle: true,
        }
    }
}

impl DataConfig {
    /// Makes the paths independent of the working directory.
    pub fn make_absolute(&mut self) -> Result<()> {
        let tokenizer = (self.tokenizer != BYTES).then_some(&mut self.tokenizer);
        for path in self.path.iter_mut().chain(&mut self.validation).chain(tokenizer) {
            let absolute = std::path::absolute(&path).map_err(Error::io(path.as_ref(), "find"))?;
            *path = absolute.to_string_lossy().into_owned();
        }
        Ok(())
    }

    /// Refuses what cannot be.
    pub fn check(&self) -> std::result::Result<(), Contradiction> {
        within("sequence_length", self.sequence_length as u64, 1..=LONGEST_SEQUENCE)?;
        match self.kind.as_str() {
            "builtin" if self.path.is_some() => {
                return Err((
                    "path",
                    "is set, but the built-in text needs none; remove it or set `kind`".into(),
                ));
            }
            "shards" | "batches" if self.path.is_none() => {
                return Err(("path", format!("is missing; `kind = \"{}\"` needs it", self.kind)));
            }
            "recall" => match &self.task {
                None => {
                    return Err(("task", "is missing; `kind = \"recall\"` needs it, such as `mqar`".into()));
                }
                Some(_) if self.path.is_some() => {
                    return Err(("path", "is set, but a task makes its own sequences; remove it".into()));
                }
                Some(task) => {
                    let opened = Task::open(task, Some(self.sequence_length));
                    opened.map_err(|error| ("task", format!("cannot be: {error}")))?;
                }
            },
            "builtin" | "shards" | "batches" => {}
            other => {
                let message = format!("is `{other}`; it must be `builtin`, `shards`, `recall` or `batches`");
                return Err(("kind", message));
            }
        }
        if self.task.is_some() && self.kind != "recall" {
            return Err((
                "task",
                "is set, but only `kind = \"recall\"` has one; remove it or set `kind`".into(),
            ));
        }
        if !(0.0..1.0).contains(&self.validation_fraction) {
            let message = format!("is {}; it must be at least 0 and below 1", self.validation_fraction);
            return Err(("validation_fraction", message));
        }
        Ok(())
    }
}

/// `[train]`: how a model learns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TrainConfig {
    /// Updates of the weights.
    pub steps: u64,
    /// Tokens that one update learns from: a multiple of `sequence_length`.
    pub tokens_per_step: usize,
    /// Sequences that are computed at once; gradients of several such calls add up to one update.
    pub micro_batch: usize,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// `wsd` (warmup, stable, decay), `cosine` or `constant`.
    pub schedule: String,
    /// Share of the steps in which the rate rises.
    pub warmup: f64,
    /// Share of the steps in which it falls, with `wsd`.
    pub decay: f64,
    /// Where it ends, as a share of the highest.
    pub final_rate: f64,
    /// β₁ and β₂ of AdamW.
    pub betas: [f64; 2],
    /// Added to the root of AdamW's second moment.
    pub eps: f64,
    /// Weight decay of tensors with two or more dimensions.
    pub weight_decay: f64,
    /// Limit of the gradient's global norm.
    pub clip_norm: f64,
    /// Of first weights, order of sequences, and samples.
    pub seed: u64,
    /// Steps from one validation to the next; 0 only at the end.
    pub validate_every: u64,
    /// Sequences to validate on, at most.
    pub validation_sequences: usize,
    /// Steps from one set of samples to the next; 0 only at the end.
    pub sample_every: u64,
    /// Tokens of a sample.
    pub sample_tokens: usize,
    /// What samples begin with; none for no samples.
    pub prompts: Vec<String>,
    /// Steps from one checkpoint to the next; 0 only at the end.
    pub save_every: u64,
    /// Checkpoints that are kept.
    pub keep: usize,
    /// Compute blocks again in the backward pass: `auto` (when memory asks for it), `on` or `off`.
    pub recompute: String,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 300,
            tokens_per_step: 16_384,
            micro_batch: 8,
            learning_rate: 3e-3,
            schedule: "wsd".into(),
            warmup: 0.02,
            decay: 0.2,
            final_rate: 0.0,
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
            recompute: "auto".into(),
        }
    }
}

impl TrainConfig {
    /// Refuses what cannot be.
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
                "is {}, which must be a multiple of `sequence_length` ({sequence_length}); take {}",
                self.tokens_per_step,
                self.tokens_per_step.div_ceil(sequence_length) * sequence_length
            );
            return Err(("tokens_per_step", message));
        }
        for (key, value) in [("warmup", self.warmup), ("decay", self.decay), ("final_rate", self.final_rate)]
        {
            if !(0.0..=1.0).contains(&value) {
                return Err((key, format!("is {value}; it is a share, from 0 to 1")));
            }
        }
        if self.warmup + self.decay > 1.0 {
            let message =
                format!("is {}; with `warmup` ({}) that is more than all the steps", self.decay, self.warmup);
            return Err(("decay", message));
        }
        for (key, value) in
            [("learning_rate", self.learning_rate), ("clip_norm", self.clip_norm), ("eps", self.eps)]
        {
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
        let one_of = |key, value: &str, names: [&str; 3]| match names.contains(&value) {
            true => Ok(()),
            false => {
                let [a, b, c] = names;
                Err((key, format!("is `{value}`; it must be `{a}`, `{b}` or `{c}`")))
            }
        };
        one_of("schedule", &self.schedule, ["wsd", "cosine", "constant"])?;
        one_of("recompute", &self.recompute, ["auto", "on", "off"])
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
        match self.schedule.as_str() {
            "cosine" => fall(warmup, |x| 0.5 * (1.0 + (std::f64::consts::PI * x).cos())),
            "wsd" => {
                let from = steps - (self.decay * steps).round();
                if at < from { self.learning_rate } else { fall(from, |x| 1.0 - x) }
            }
            _ => self.learning_rate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_rise_stay_and_fall() {
        let keys =
            TrainConfig { steps: 100, learning_rate: 1.0, warmup: 0.1, decay: 0.2, ..TrainConfig::default() };
        assert!((keys.rate(0) - 0.1).abs() < 1e-12 && (keys.rate(9) - 1.0).abs() < 1e-12);
        assert!((keys.rate(50) - 1.0).abs() < 1e-12 && (keys.rate(80) - 1.0).abs() < 1e-12);
        assert!((keys.rate(90) - 0.5).abs() < 1e-12 && keys.rate(99) > 0.0 && keys.rate(99) < 0.06);
        let cosine = TrainConfig { schedule: "cosine".into(), final_rate: 0.1, ..keys };
        assert!((cosine.rate(55) - 0.55).abs() < 1e-12 && cosine.rate(99) > 0.1);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let good = TrainConfig::default();
        assert!(good.check(2048).is_ok());
        let bad = |keys: TrainConfig| keys.check(2048).unwrap_err().0;
        assert_eq!(bad(TrainConfig { steps: 0, ..good.clone() }), "steps");
        assert_eq!(bad(TrainConfig { steps: 1 << 41, ..good.clone() }), "steps");
        assert_eq!(bad(TrainConfig { keep: 0, ..good.clone() }), "keep");
        assert_eq!(bad(TrainConfig { micro_batch: 1 << 40, ..good.clone() }), "micro_batch");
        let error = TrainConfig { tokens_per_step: 2048 << 26, ..good.clone() }.check(2048).unwrap_err();
        assert_eq!(error, ("tokens_per_step", "is 137438953472; it must be from 1 to 4294967296".into()));
        assert_eq!(bad(TrainConfig { tokens_per_step: 1000, ..good.clone() }), "tokens_per_step");
        assert_eq!(bad(TrainConfig { decay: 0.99, ..good.clone() }), "decay");
        assert_eq!(bad(TrainConfig { betas: [0.9, 1.0], ..good.clone() }), "betas");
        assert_eq!(bad(TrainConfig { learning_rate: f64::NAN, ..good.clone() }), "learning_rate");
        assert_eq!(bad(TrainConfig { schedule: "linear".into(), ..good.clone() }), "schedule");
        assert_eq!(bad(TrainConfig { recompute: "yes".into(), ..good }), "recompute");
        let data = DataConfig { kind: "shards".into(), ..DataConfig::default() };
        assert_eq!(data.check().unwrap_err().0, "path");
        for sequence_length in [0, (1 << 24) + 1, usize::MAX] {
            let task = Some("mqar".to_string());
            let data = DataConfig { kind: "recall".into(), task, sequence_length, ..DataConfig::default() };
            assert_eq!(data.check().unwrap_err().0, "sequence_length");
        }
    }
}

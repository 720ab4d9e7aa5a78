//! Measures a trained model under a memory policy: recall, needles, or loss by position in a text.

use std::ops::ControlFlow;

use march_engine::Tensor;

use super::experiment::Evaluation;
use super::job::Measured;
use super::plan::Scale;
use crate::eval::suite::suites;
use crate::eval::{Outcome, Reader, RecallOptions, Scheduler, Sources, documents, evaluate, evaluate_recall};
use march_lm::anchors::Policy;
use march_lm::data::recall::{REPORT_SEED, Task};
use march_lm::data::{DataConfig, DataKind, Shards, builtin, split};
use march_lm::generate::Inference;
use march_lm::model::{Model, Part};
use march_lm::tokenizer::Tokenizer;
use march_lm::{Error, Result};

/// Sequences of text read in parallel.
const ROWS: usize = 4;

/// A trained model.
pub struct Subject<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its parameters.
    pub parameters: &'a [Tensor],
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// What it was trained on last.
    pub data: Option<&'a DataConfig>,
    /// The scale of the experiment.
    pub scale: &'a Scale,
}

impl Subject<'_> {
    /// Measures one thing; `None` if `keep_going` said to stop.
    pub fn measure(
        &self,
        evaluation: &Evaluation,
        policy: &Policy,
        key: String,
        keep_going: &dyn Fn() -> ControlFlow<()>,
    ) -> Result<Option<Measured>> {
        match (&evaluation.task, &evaluation.needles, &evaluation.text) {
            (Some(task), ..) => self.recall(task, evaluation, policy, key, keep_going),
            (_, Some(task), _) => self.needles(task, evaluation, policy, key, keep_going),
            _ => self.loss(evaluation, policy, key, keep_going),
        }
    }

    fn flop_per_token(&self, length: usize, policy: &Policy) -> f64 {
        self.model.work(length, policy) / length.max(1) as f64
    }

    fn recall(
        &self,
        task: &str,
        what: &Evaluation,
        policy: &Policy,
        key: String,
        keep_going: &dyn Fn() -> ControlFlow<()>,
    ) -> Result<Option<Measured>> {
        let task = Task::open(task, what.length)?;
        let Self { model, parameters, tokenizer, .. } = *self;
        let reader = Reader { model, parameters, tokenizer, policy };
        let options =
            RecallOptions { samples: self.scale.samples(what.samples), decode: false, seed: REPORT_SEED };
        let answers = evaluate_recall(&reader, &task, options, &mut |_| keep_going())?;
        if (answers.samples.len() as u64) < options.samples {
            return Ok(None);
        }
        Ok(Some(Measured {
            key,
            value: answers.accuracy().value(),
            memory_bytes: answers.memory_bytes,
            rollback_bytes: Some(answers.rollback_bytes),
            flop_per_token: self.flop_per_token(task.length(), policy),
            positions: Vec::new(),
        }))
    }

    /// The mean score of some needle tasks at one length.
    fn needles(
        &self,
        tasks: &str,
        evaluation: &Evaluation,
        policy: &Policy,
        key: String,
        keep_going: &dyn Fn() -> ControlFlow<()>,
    ) -> Result<Option<Measured>> {
        let length = self.scale.length(evaluation.length.unwrap_or(1024));
        let limit = Some(self.scale.samples(evaluation.samples) as usize);
        let sources = Sources { limit, ..Sources::default() };
        let inference = Inference::new(self.model, self.parameters);
        let scheduler = Scheduler::new(inference, self.tokenizer, policy);
        let (mut sum, mut count) = (0.0, 0);
        for task in tasks.split(',') {
            let Some(suite) = suites().find(|suite| suite.name == task) else {
                return Err(Error::Request(format!("`{task}` is not a needle task")));
            };
            let job = documents(suite, Some(length), &sources, self.tokenizer)?;
            let outcome = evaluate(&scheduler, job, &sources, None, false, &mut |_, _| keep_going())?;
            let Outcome::Done(result) = outcome else { return Ok(None) };
            sum += result.metrics.first().map_or(0.0, |metric| metric.value);
            count += 1;
        }
        Ok(Some(Measured {
            key,
            value: sum / f64::from(count),
            memory_bytes: self.model.memory_bytes(length, policy),
            rollback_bytes: Some(self.model.rollback_bytes(length, policy)),
            flop_per_token: self.flop_per_token(length, policy),
            positions: Vec::new(),
        }))
    }

    /// The loss on the last half of the held-out text; validation during training uses the beginning of its first half.
    fn loss(
        &self,
        evaluation: &Evaluation,
        policy: &Policy,
        key: String,
        keep_going: &dyn Fn() -> ControlFlow<()>,
    ) -> Result<Option<Measured>> {
        let ids = self.held_out()?;
        let ids = &ids[ids.len() / 2..];
        let wanted = self.scale.length(evaluation.length.unwrap_or(1024));
        let length = wanted.min(ids.len().saturating_sub(1));
        if length == 0 {
            return Err(Error::Request("the held-out text is too short to measure a loss on".into()));
        }
        let most = (ids.len() - 1) / length;
        let count = most.min(self.scale.samples(evaluation.samples) as usize);
        let inference = Inference::new(self.model, self.parameters);
        let (mut sums, mut bytes, mut rollback) = (vec![0.0f64; length], 0, None);
        for first in (0..count).step_by(ROWS) {
            let rows: Vec<usize> = (first..count.min(first + ROWS)).map(|row| row * length).collect();
            let mut banks =
                rows.iter().map(|_| self.model.bank(policy.clone())).collect::<Result<Vec<_>>>()?;
            let targets: Vec<u32> =
                rows.iter().flat_map(|&at| ids[at + 1..at + 1 + length].iter().copied()).collect();
            let mut parts: Vec<_> = rows
                .iter()
                .zip(&mut banks)
                .map(|(&at, bank)| Part::new(&ids[at..at + length], bank))
                .collect();
            let losses = inference.losses(&mut parts, &targets)?;
            for (i, &loss) in losses.nll.iter().enumerate() {
                sums[i % length] += f64::from(loss);
            }
            bytes = banks.first().map_or(0, |bank| bank.bytes());
            rollback = banks.first().map(|bank| bank.rollback_bytes());
            if keep_going().is_break() {
                return Ok(None);
            }
        }
        let mean = |from: usize, to: usize| sums[from..to].iter().sum::<f64>() / ((to - from) * count) as f64;
        let mut positions = Vec::new();
        let mut from = 0;
        while from < length {
            let to = (2 * from).max(64).min(length);
            positions.push((to, mean(from, to)));
            from = to;
        }
        let value = mean(0, length);
        if !value.is_finite() {
            return Err(Error::Diverged(format!("{key}: the loss is not finite; training diverged")));
        }
        let flop_per_token = self.flop_per_token(length, policy);
        let rollback_bytes = rollback;
        Ok(Some(Measured { key, value, memory_bytes: bytes, rollback_bytes, flop_per_token, positions }))
    }

    /// The part of the text that the model was not trained on.
    fn held_out(&self) -> Result<Vec<u32>> {
        let data = self.data.cloned().unwrap_or_default();
        if data.kind == DataKind::Shards {
            let shards = Shards::open(data.path.clone().unwrap_or_default().as_ref())?;
            let (_, held_out) = split(shards.tokens(), data.validation_fraction)?;
            let mut ids = Vec::new();
            shards.read(held_out, &mut ids)?;
            return Ok(ids);
        }
        let mut ids = self.tokenizer.encode(builtin())?;
        let (training, _) = split(ids.len() as u64, data.validation_fraction)?;
        Ok(ids.split_off(training.end as usize))
    }
}

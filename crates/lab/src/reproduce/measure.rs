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

/// How an evaluation is carried out.
struct Conditions<'a> {
    evaluation: &'a Evaluation,
    policy: &'a Policy,
    keep_going: &'a dyn Fn() -> ControlFlow<()>,
}

/// What was found.
struct Found {
    value: f64,
    /// Tokens of a sequence.
    length: usize,
    memory_bytes: usize,
    rollback_bytes: usize,
    /// Losses by position.
    positions: Vec<(usize, f64)>,
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
        let conditions = &Conditions { evaluation, policy, keep_going };
        let found = match (&evaluation.task, &evaluation.needles) {
            (Some(task), _) => self.recall(task, conditions)?,
            (_, Some(tasks)) => self.needles(tasks, conditions)?,
            _ => self.loss(conditions)?,
        };
        let Some(found) = found else { return Ok(None) };
        let Found { value, length, memory_bytes, rollback_bytes, positions } = found;
        if !value.is_finite() && !positions.is_empty() {
            return Err(Error::Diverged(format!("{key}: the loss is not finite; training diverged")));
        }
        let flop_per_token = self.model.work(length, policy) / length.max(1) as f64;
        let rollback_bytes = Some(rollback_bytes);
        Ok(Some(Measured { key, value, memory_bytes, rollback_bytes, flop_per_token, positions }))
    }

    fn recall(&self, task: &str, conditions: &Conditions<'_>) -> Result<Option<Found>> {
        let task = Task::open(task, conditions.evaluation.length)?;
        let Self { model, parameters, tokenizer, .. } = *self;
        let reader = Reader { model, parameters, tokenizer, policy: conditions.policy };
        let samples = self.scale.samples(conditions.evaluation.samples);
        let options = RecallOptions { samples, decode: false, seed: REPORT_SEED };
        let answers = evaluate_recall(&reader, &task, options, &mut |_| (conditions.keep_going)())?;
        let found = Found {
            value: answers.accuracy().value(),
            length: task.length(),
            memory_bytes: answers.memory_bytes,
            rollback_bytes: answers.rollback_bytes,
            positions: Vec::new(),
        };
        Ok((answers.samples.len() as u64 >= samples).then_some(found))
    }

    /// The mean score of some needle tasks at one length.
    fn needles(&self, tasks: &str, conditions: &Conditions<'_>) -> Result<Option<Found>> {
        let length = self.scale.length(conditions.evaluation.length.unwrap_or(1024));
        let limit = Some(self.scale.samples(conditions.evaluation.samples) as usize);
        let sources = Sources { limit, ..Sources::default() };
        let inference = Inference::new(self.model, self.parameters);
        let scheduler = Scheduler::new(inference, self.tokenizer, conditions.policy);
        let (mut sum, mut count) = (0.0, 0);
        for task in tasks.split(',') {
            let Some(suite) = suites().find(|suite| suite.name == task) else {
                return Err(Error::Request(format!("`{task}` is not a needle task")));
            };
            let job = documents(suite, Some(length), &sources, self.tokenizer)?;
            let watch = &mut |_: usize, _: usize| (conditions.keep_going)();
            let Outcome::Done(result) = evaluate(&scheduler, job, &sources, None, false, watch)? else {
                return Ok(None);
            };
            sum += result.metrics.first().map_or(0.0, |metric| metric.value);
            count += 1;
        }
        let of = |bytes: fn(&Model, usize, &Policy) -> usize| bytes(self.model, length, conditions.policy);
        let (memory_bytes, rollback_bytes) = (of(Model::memory_bytes), of(Model::rollback_bytes));
        let value = sum / f64::from(count);
        Ok(Some(Found { value, length, memory_bytes, rollback_bytes, positions: Vec::new() }))
    }

    /// The loss on the last half of the held-out text; validation during training uses the beginning of its first half.
    fn loss(&self, conditions: &Conditions<'_>) -> Result<Option<Found>> {
        let ids = self.held_out()?;
        let ids = &ids[ids.len() / 2..];
        let wanted = self.scale.length(conditions.evaluation.length.unwrap_or(1024));
        let length = wanted.min(ids.len().saturating_sub(1));
        if length == 0 {
            return Err(Error::Request("the held-out text is too short to measure a loss on".into()));
        }
        let most = (ids.len() - 1) / length;
        let count = most.min(self.scale.samples(conditions.evaluation.samples) as usize);
        let inference = Inference::new(self.model, self.parameters);
        let mut sums = vec![0.0f64; length];
        let (mut memory_bytes, mut rollback_bytes) = (0, 0);
        for first in (0..count).step_by(ROWS) {
            let rows: Vec<usize> = (first..count.min(first + ROWS)).map(|row| row * length).collect();
            let mut banks =
                rows.iter().map(|_| self.model.bank(conditions.policy.clone())).collect::<Result<Vec<_>>>()?;
            let targets: Vec<u32> =
                rows.iter().flat_map(|&at| &ids[at + 1..at + 1 + length]).copied().collect();
            let parts = rows.iter().zip(&mut banks);
            let mut parts: Vec<_> = parts.map(|(&at, bank)| Part::new(&ids[at..at + length], bank)).collect();
            let losses = inference.losses(&mut parts, &targets)?;
            for (i, &loss) in losses.nll.iter().enumerate() {
                sums[i % length] += f64::from(loss);
            }
            (memory_bytes, rollback_bytes) = (banks[0].bytes(), banks[0].rollback_bytes());
            if (conditions.keep_going)().is_break() {
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
        Ok(Some(Found { value: mean(0, length), length, memory_bytes, rollback_bytes, positions }))
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

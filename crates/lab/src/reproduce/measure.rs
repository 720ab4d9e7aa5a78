//! Measures a trained model under a memory policy: recall, needles, loss on held-out documents, or copying.

use std::ops::ControlFlow;
use std::path::Path;

use march_engine::Tensor;

use super::experiment::Evaluation;
use super::job::{Group, Measured};
use super::passages::{Copy, GROUPS, Grouping, Passage, REPETITIONS, copies, passages};
use super::plan::Scale;
use crate::eval::suite::suites;
use crate::eval::{Outcome, Reader, RecallOptions, Scheduler, Sources, documents, evaluate, evaluate_recall};
use march_lm::anchors::Policy;
use march_lm::data::recall::{REPORT_SEED, Random, Task};
use march_lm::data::{DataConfig, Shards};
use march_lm::generate::Inference;
use march_lm::memory::StateBank;
use march_lm::model::{Model, Part};
use march_lm::tokenizer::Tokenizer;
use march_lm::{Error, Result};

/// Passages read side by side.
const ROWS: usize = 4;
/// Tokens of a passage that are read in one call.
const CALL_TOKENS: usize = 4096;
/// The first tokens of a repetition, by which a reader recognises it; they do not count.
const RECOGNISED: usize = 8;

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
    /// Whether each anchor gets the routing key of another at every boundary.
    permuted: bool,
    keep_going: &'a dyn Fn() -> ControlFlow<()>,
}

/// What was found.
#[derive(Default)]
struct Found {
    value: f64,
    /// Tokens of a sequence.
    length: usize,
    memory_bytes: usize,
    rollback_bytes: usize,
    /// Losses by position.
    positions: Vec<(usize, f64)>,
    groups: Vec<Group>,
}

impl Subject<'_> {
    /// Measures one thing; `None` if `keep_going` said to stop.
    pub fn measure(
        &self,
        evaluation: &Evaluation,
        (policy, permuted): (&Policy, bool),
        key: String,
        keep_going: &dyn Fn() -> ControlFlow<()>,
    ) -> Result<Option<Measured>> {
        let conditions = &Conditions { evaluation, policy, permuted, keep_going };
        let found = match (&evaluation.task, &evaluation.needles, &evaluation.text) {
            (Some(task), ..) => self.recall(task, conditions)?,
            (_, Some(tasks), _) => self.needles(tasks, conditions)?,
            (.., Some(part)) => self.text(part, conditions)?,
            _ => None,
        };
        let Some(found) = found else { return Ok(None) };
        let Found { value, length, memory_bytes, rollback_bytes, positions, groups } = found;
        if !value.is_finite() && !groups.is_empty() {
            return Err(Error::Diverged(format!("{key}: the loss is not finite; training diverged")));
        }
        let flop_per_token = self.model.work(length, policy) / length.max(1) as f64;
        let rollback_bytes = Some(rollback_bytes);
        Ok(Some(Measured { key, value, memory_bytes, rollback_bytes, flop_per_token, positions, groups }))
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
            ..Found::default()
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
        Ok(Some(Found { value, length, memory_bytes, rollback_bytes, ..Found::default() }))
    }

    /// The loss on a part of the corpus that the model was trained on: by position and by group of tokens, or on
    /// repetitions.
    fn text(&self, part: &str, conditions: &Conditions<'_>) -> Result<Option<Found>> {
        let Some(training) = self.data.and_then(|data| data.path.as_ref()).map(Path::new) else {
            return Err(Error::Request("`text` measures models that were trained on a corpus".into()));
        };
        let shards = Shards::open(&training.with_file_name(part))?;
        let count = self.scale.samples(conditions.evaluation.samples) as usize;
        if let Some(distance) = conditions.evaluation.copy {
            let distance = self.scale.length(distance);
            let copies = copies(&shards, self.tokenizer, distance, count)?;
            if copies.is_empty() {
                return Err(Error::Request(format!(
                    "the texts of `{part}` have no function of 48 to 160 tokens beside a document of more than {} \
                     tokens, so that copies at a distance of {distance} cannot be measured; use a larger corpus",
                    2 * distance + 64
                )));
            }
            return self.repetitions(&copies, conditions);
        }
        let length = self.scale.length(conditions.evaluation.length.unwrap_or(4096));
        let mut passages = passages(&shards, length, count)?;
        if !self.scale.is_full() {
            passages.truncate(ROWS);
        }
        self.loss(&passages, length, &Grouping::new(training)?, conditions)
    }

    /// The loss on passages of equal length.
    fn loss(
        &self,
        passages: &[Passage],
        length: usize,
        grouping: &Grouping,
        conditions: &Conditions<'_>,
    ) -> Result<Option<Found>> {
        let mut found = Found { length, ..Found::default() };
        let mut sums = vec![0.0f64; length];
        let mut groups = GROUPS.map(Group::new);
        for some in passages.chunks(ROWS) {
            let texts: Vec<&[u32]> = some.iter().map(|passage| &passage.ids[..]).collect();
            let Some(losses) = self.losses(&texts, &mut found, conditions)? else { return Ok(None) };
            for (passage, losses) in some.iter().zip(&losses) {
                for (at, (&loss, belongs)) in losses.iter().zip(grouping.groups(&passage.ids)).enumerate() {
                    sums[at] += f64::from(loss);
                    for (group, belongs) in groups.iter_mut().zip(belongs) {
                        if belongs {
                            group.add(passage.document, loss);
                        }
                    }
                }
            }
        }
        let mean = |from: usize, to: usize| {
            sums[from..to].iter().sum::<f64>() / ((to - from) * passages.len()) as f64
        };
        let mut from = 0;
        while from < length {
            let to = (2 * from).max(64).min(length);
            found.positions.push((to, mean(from, to)));
            from = to;
        }
        found.value = groups[0].mean().unwrap_or(f64::NAN);
        found.groups = groups.into();
        Ok(Some(found))
    }

    /// The loss on repeated definitions.
    fn repetitions(&self, copies: &[Copy], conditions: &Conditions<'_>) -> Result<Option<Found>> {
        let mut found = Found::default();
        let mut group = Group::new(REPETITIONS);
        for some in copies.chunks(ROWS) {
            let texts: Vec<&[u32]> = some.iter().map(|copy| &copy.ids[..]).collect();
            let Some(losses) = self.losses(&texts, &mut found, conditions)? else { return Ok(None) };
            for (copy, losses) in some.iter().zip(&losses) {
                found.length = found.length.max(copy.ids.len());
                // The loss of token i is that of the target of position i − 1.
                for &loss in &losses[copy.repetition.start + RECOGNISED - 1..copy.repetition.end - 1] {
                    group.add(copy.document, loss);
                }
            }
        }
        found.value = group.mean().unwrap_or(f64::NAN);
        found.groups.push(group);
        Ok(Some(found))
    }

    /// −ln p of all tokens but the first of each text; `None` if `keep_going` said to stop.
    fn losses(
        &self,
        texts: &[&[u32]],
        found: &mut Found,
        conditions: &Conditions<'_>,
    ) -> Result<Option<Vec<Vec<f32>>>> {
        let inference = Inference::new(self.model, self.parameters);
        let mut banks = texts
            .iter()
            .map(|_| self.model.bank(conditions.policy.clone()))
            .collect::<Result<Vec<StateBank>>>()?;
        let call = match (conditions.permuted, conditions.policy.interval) {
            (true, Some(interval)) => interval,
            _ => CALL_TOKENS,
        };
        let mut losses = vec![Vec::new(); texts.len()];
        let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0).saturating_sub(1);
        for start in (0..longest).step_by(call) {
            let mut targets = Vec::new();
            let mut parts = Vec::new();
            let mut rows = Vec::new();
            for (row, (text, bank)) in texts.iter().zip(&mut banks).enumerate() {
                let end = (start + call).min(text.len() - 1);
                if start < end {
                    if conditions.permuted {
                        let mut random = Random::new(REPORT_SEED, (start + row) as u64);
                        bank.permute_keys(&mut |count| {
                            random.distinct(count, count).into_iter().map(|number| number as u32).collect()
                        })?;
                    }
                    targets.extend(&text[start + 1..end + 1]);
                    parts.push(Part::new(&text[start..end], bank));
                    rows.push((row, end - start));
                }
            }
            let scored = inference.losses(&mut parts, &targets)?;
            let mut rest = &scored.nll[..];
            for (row, count) in rows {
                let (own, others) = rest.split_at(count);
                losses[row].extend_from_slice(own);
                rest = others;
            }
            if (conditions.keep_going)().is_break() {
                return Ok(None);
            }
        }
        found.memory_bytes = banks.iter().map(StateBank::bytes).max().unwrap_or(0);
        found.rollback_bytes = banks.iter().map(StateBank::rollback_bytes).max().unwrap_or(0);
        Ok(Some(losses))
    }
}

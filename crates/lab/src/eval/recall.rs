//! Recall: asks a model the tasks of [`march_lm::data::recall`] under a memory policy.
//!
//! [`evaluate_recall`] reads every sequence into a bank, whole or token by token, and records which questions were answered
//! correctly; [`Answers`] are summarised by [`Answers::accuracy`] and by age of the fact, with standard errors;
//! [`super::compare`] pairs two models' answers to the same questions.

use std::time::Instant;

use march_engine::Tensor;
use march_engine::ops::cross_entropy::IGNORE;

use march_lm::anchors::Policy;
use march_lm::data::recall::Task;
use march_lm::generate::Inference;
use march_lm::memory::StateBank;
use march_lm::model::{Model, Part};
use march_lm::tokenizer::Tokenizer;
use march_lm::train::machine_memory;
use march_lm::{Error, Result};

/// Number of sequences read in parallel.
const ROWS: usize = 32;

/// How a task is evaluated.
#[derive(Clone, Copy, Debug)]
pub struct RecallOptions {
    /// Number of sequences.
    pub samples: u64,
    /// Whether to read one token at a time, as generation does, instead of the whole sequence at once.
    pub decode: bool,
    /// The seed of the questions.
    pub seed: u64,
}

/// A model and everything needed to run it.
pub struct Reader<'a> {
    /// The model.
    pub model: &'a Model,
    /// The model's parameters.
    pub parameters: &'a [Tensor],
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The memory policy.
    pub policy: &'a Policy,
}

/// One answer: the fact's age in tokens, and whether it was correct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Tokens from the fact to the question.
    pub age: usize,
    /// Whether the most probable token was the answer.
    pub right: bool,
}

/// The answers of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Answers {
    /// Answers by sequence, then by question.
    pub samples: Vec<Vec<Answer>>,
    /// Average size of a sequence's bank after the sequence, in bytes.
    pub memory_bytes: usize,
    /// Of these bytes, those that only a rollback uses.
    pub rollback_bytes: usize,
    /// Tokens per second, over all sequences in parallel.
    pub tokens_per_second: f64,
}

/// A fraction of correct answers and its standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Share {
    /// Number of questions.
    pub asked: u64,
    /// Number of correct answers.
    pub right: u64,
    /// The standard error of right / asked, with sequences as independent draws; `None` for a single sequence.
    pub error: Option<f64>,
}

impl Share {
    /// Right / asked; 0 if nothing was asked.
    pub fn value(&self) -> f64 {
        if self.asked == 0 { 0.0 } else { self.right as f64 / self.asked as f64 }
    }
}

/// The fraction of correct answers among those of an age from `from` up to, not including, `to`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Age {
    /// The lowest age.
    pub from: usize,
    /// The end of the range (exclusive).
    pub to: usize,
    /// The fraction of correct answers.
    pub share: Share,
}

impl Answers {
    /// The accuracy over all answers.
    pub fn accuracy(&self) -> Share {
        self.among(|_| true)
    }

    /// The answers by age, in at most six ranges for sequences of `length` tokens; ranges without a question are
    /// omitted.
    pub fn by_age(&self, length: usize) -> Vec<Age> {
        let width = length.div_ceil(6).next_power_of_two();
        let bins = (0..length.div_ceil(width)).map(|i| {
            let (from, to) = (i * width, ((i + 1) * width).min(length));
            Age { from, to, share: self.among(|answer| (from..to).contains(&answer.age)) }
        });
        bins.filter(|age| age.share.asked > 0).collect()
    }

    /// The accuracy over some of the answers. The error is that of a ratio of two sums over independent sequences:
    /// √(n/(n−1) · Σᵢ (rᵢ − p·aᵢ)²) / Σᵢ aᵢ for rᵢ right of aᵢ asked, p = Σr / Σa.
    fn among(&self, counts: impl Fn(&Answer) -> bool) -> Share {
        let sums: Vec<(u64, u64)> = self
            .samples
            .iter()
            .map(|answers| {
                let counted = answers.iter().filter(|answer| counts(answer));
                counted.fold((0, 0), |(asked, right), answer| (asked + 1, right + u64::from(answer.right)))
            })
            .filter(|sums| sums.0 > 0)
            .collect();
        let (asked, right) = sums.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let mut share = Share { asked, right, error: None };
        if sums.len() > 1 {
            let (p, n) = (share.value(), sums.len() as f64);
            let squares: f64 = sums.iter().map(|&(a, r)| (r as f64 - p * a as f64).powi(2)).sum();
            share.error = Some((n / (n - 1.0) * squares).sqrt() / asked as f64);
        }
        share
    }
}

/// Asks a model the questions of a task; `watch` receives the number of sequences done and may stop.
pub fn evaluate_recall(
    reader: &Reader<'_>,
    task: &Task,
    options: RecallOptions,
    watch: &mut dyn FnMut(u64) -> std::ops::ControlFlow<()>,
) -> Result<Answers> {
    let ids = own_ids(reader, task)?;
    check_memory(reader, task, options)?;
    let inference = Inference::new(reader.model, reader.parameters);
    let length = task.length();
    let (mut samples, mut bytes, mut rollback, mut seconds) = (Vec::new(), 0, 0, 0.0);
    let mut done = 0;
    while done < options.samples {
        let rows = ROWS.min((options.samples - done) as usize);
        let examples: Vec<_> = (0..rows as u64).map(|i| task.asked(options.seed, done + i)).collect();
        let mut targets = vec![IGNORE; rows * length];
        for (row, example) in examples.iter().enumerate() {
            for question in &example.questions {
                targets[row * length + question.position] = ids[question.answer as usize];
            }
        }
        let mut banks = (0..rows)
            .map(|_| reader.model.bank(reader.policy.clone()))
            .collect::<Result<Vec<StateBank>>>()?;
        let mut greedy = vec![IGNORE; rows * length];
        let piece = if options.decode { 1 } else { length };
        let began = Instant::now();
        for start in (0..length).step_by(piece) {
            let span = start..start + piece;
            let inputs: Vec<Vec<u32>> = examples
                .iter()
                .map(|example| {
                    example.tokens[span.clone()].iter().map(|&token| ids[token as usize]).collect()
                })
                .collect();
            let wanted: Vec<u32> =
                (0..rows).flat_map(|row| targets[row * length..][span.clone()].to_vec()).collect();
            let mut parts: Vec<_> =
                inputs.iter().zip(&mut banks).map(|(ids, bank)| Part::new(ids, bank)).collect();
            let losses = inference.losses(&mut parts, &wanted)?;
            check_finite(task, done, start, piece, &losses.nll)?;
            for (row, said) in losses.greedy.chunks(piece).enumerate() {
                greedy[row * length..][span.clone()].copy_from_slice(said);
            }
        }
        seconds += began.elapsed().as_secs_f64();
        bytes += banks.iter().map(|bank| bank.bytes()).sum::<usize>();
        rollback += banks.iter().map(|bank| bank.rollback_bytes()).sum::<usize>();
        for (row, example) in examples.iter().enumerate() {
            let answer = |question: &march_lm::data::recall::Question| Answer {
                age: question.age(),
                right: greedy[row * length + question.position] == ids[question.answer as usize],
            };
            samples.push(example.questions.iter().map(answer).collect());
        }
        done += rows as u64;
        if watch(done).is_break() {
            break;
        }
    }
    let count = samples.len().max(1);
    let tokens_per_second = (samples.len() * length) as f64 / seconds.max(1e-9);
    Ok(Answers { samples, memory_bytes: bytes / count, rollback_bytes: rollback / count, tokens_per_second })
}

/// Rejects sequences that take more memory than the machine has, because the system would kill the process.
fn check_memory(reader: &Reader<'_>, task: &Task, options: RecallOptions) -> Result<()> {
    let Some([machine, _]) = machine_memory() else { return Ok(()) };
    let (rows, length) = (ROWS.min(options.samples as usize), task.length());
    // Approximate number of values per token in one layer, as measured: its input, what the mixer computes from it, and
    // the feed-forward part.
    let config = reader.model.config();
    let token = size_of::<f32>() * (8 * config.hidden_size + 4 * config.intermediate_size);
    let tokens = rows.saturating_mul(if options.decode { 1 } else { length });
    let banks = reader.model.memory_bytes(length, reader.policy).saturating_mul(rows);
    let needed = tokens.saturating_mul(token).saturating_add(banks);
    if needed <= machine {
        return Ok(());
    }
    let samples = if rows > 1 { format!(", or --samples below {rows}") } else { String::new() };
    let decode = if options.decode || banks > machine { "" } else { ", or decode token by token (--decode)" };
    Err(Error::Request(format!(
        "task `{}` at {length} tokens: a batch of {rows} sequences would take about {:.0} GiB of memory, but \
         the machine has {:.0} GiB; lower --lengths{samples}{decode}",
        task.text(),
        needed as f64 / 2f64.powi(30),
        machine as f64 / 2f64.powi(30)
    )))
}

/// Rejects a model whose losses, `piece` per sequence, are not finite: the most probable token would be meaningless.
fn check_finite(task: &Task, done: u64, start: usize, piece: usize, losses: &[f32]) -> Result<()> {
    let Some(at) = losses.iter().position(|loss| !loss.is_finite()) else { return Ok(()) };
    Err(Error::Diverged(format!(
        "task `{}`, sequence {}, token {}: the model's logits are not finite: its weights are damaged, or their training \
         diverged; use an earlier checkpoint",
        task.text(),
        done + (at / piece) as u64 + 1,
        start + at % piece + 1
    )))
}

/// The model's ids of the task's tokens; fails if the model lacks one.
fn own_ids(reader: &Reader<'_>, task: &Task) -> Result<Vec<u32>> {
    let size = reader.model.config().vocab_size;
    let one = |name: &String| {
        let ids = reader.tokenizer.encode(name).unwrap_or_default();
        match ids[..] {
            [id] if (id as usize) < size => Ok(id),
            _ => Err(Error::Request(format!(
                "the task `{}` writes `{name}`, which is not one token of the model's tokenizer (`{}`); ask a model \
                 that was trained on such a task, with sizes that its vocabulary covers",
                task.text(),
                reader.tokenizer.name()
            ))),
        }
    };
    task.vocabulary().iter().map(one).collect()
}

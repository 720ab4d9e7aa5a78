//! Results as a JSON file, and the paired difference of two results.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::recall::{Age, Answer, Answers};
use super::results::{self, ADVICE};
use march_lm::anchors::Policy;
use march_lm::data::recall::Task;
use march_lm::disk;
use march_lm::{Error, Result};

/// Raised when a file's meaning changes. Since 2 a file ends with its own checksum.
const FORMAT: u32 = 2;

/// The format without a checksum, which is still readable.
const WITHOUT_CHECKSUM: u32 = 1;

/// The results of a model, as a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    format: u32,
    /// The checkpoint, as named by the user.
    pub model: String,
    /// The model's type.
    pub model_type: String,
    /// The number of parameters.
    pub parameters: usize,
    /// The precision of its weights.
    pub weights: String,
    /// The memory policy.
    pub policy: Policy,
    /// `whole`, or `decode` for one token at a time.
    pub read: String,
    /// Results by task and length.
    pub results: Vec<TaskReport>,
}

/// The results of one task at one length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// The task with its sizes.
    pub task: String,
    /// Tokens per sequence.
    pub length: usize,
    /// Number of sequences.
    pub samples: usize,
    /// Questions per sequence.
    pub questions: usize,
    /// The fraction of correct answers.
    pub accuracy: f64,
    /// The standard error; `None` if only one sequence has such questions.
    pub standard_error: Option<f64>,
    /// The accuracy of guessing.
    pub chance: f64,
    /// Accuracy by age of the fact.
    pub by_age: Vec<AgeReport>,
    /// Average size of a sequence's bank after the sequence, in bytes.
    pub memory_bytes: usize,
    /// Of these bytes, those that only a rollback uses; `None` in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback_bytes: Option<usize>,
    /// Tokens per second, over all sequences in parallel.
    pub tokens_per_second: f64,
    /// One string per sequence: `1` for a correct answer, `0` for a wrong one, in the order of the questions.
    pub answers: Vec<String>,
}

/// The accuracy for a range of ages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgeReport {
    /// The lowest age, in tokens.
    pub from: usize,
    /// The end of the range (exclusive).
    pub to: usize,
    /// Number of questions.
    pub asked: u64,
    /// The fraction of correct answers.
    pub accuracy: f64,
    /// The standard error; `None` if only one sequence has such questions.
    pub standard_error: Option<f64>,
}

impl TaskReport {
    /// Summarises the answers.
    pub fn new(task: &Task, answers: &Answers) -> Self {
        let total = answers.accuracy();
        let one = |Age { from, to, share }: Age| AgeReport {
            from,
            to,
            asked: share.asked,
            accuracy: share.value(),
            standard_error: share.error,
        };
        let digits =
            |sample: &Vec<Answer>| sample.iter().map(|answer| if answer.right { '1' } else { '0' }).collect();
        Self {
            task: task.text(),
            length: task.length(),
            samples: answers.samples.len(),
            questions: task.questions(),
            accuracy: total.value(),
            standard_error: total.error,
            chance: 1.0 / task.answers() as f64,
            by_age: answers.by_age(task.length()).into_iter().map(one).collect(),
            memory_bytes: answers.memory_bytes,
            rollback_bytes: Some(answers.rollback_bytes),
            tokens_per_second: answers.tokens_per_second,
            answers: answers.samples.iter().map(digits).collect(),
        }
    }

    /// Describes an inconsistency in the report, if there is one.
    fn contradiction(&self) -> Option<String> {
        let Self { samples, questions, accuracy, standard_error, .. } = self;
        if self.answers.len() != *samples {
            return Some(format!("`samples` is {samples}, but there are {} sequences", self.answers.len()));
        }
        let whole = |answers: &String| {
            answers.len() == *questions && answers.bytes().all(|answer| matches!(answer, b'0' | b'1'))
        };
        if let Some(number) = self.answers.iter().position(|answers| !whole(answers)) {
            return Some(format!("sequence {number} does not have {questions} answers of 0 or 1"));
        }
        let right: usize = self.answers.iter().map(|answers| answers.matches('1').count()).sum();
        let asked = samples * questions;
        let close = |right: f64, asked: f64, share: f64| (right - share * asked).abs() <= 1e-6 * asked;
        if !close(right as f64, asked as f64, *accuracy) {
            return Some(format!(
                "it gives an accuracy of {accuracy}, but {right} of {asked} answers are right"
            ));
        }
        let ages = || self.by_age.iter();
        let (by_age, by_age_right) = ages().fold((0, 0.0), |(asked, right): (u64, f64), age| {
            (asked.saturating_add(age.asked), right + age.accuracy * age.asked as f64)
        });
        let outside = |age: &AgeReport| age.from >= age.to || age.to > self.length || age.asked == 0;
        if by_age != asked as u64 || !close(by_age_right, asked as f64, *accuracy) || ages().any(outside) {
            return Some("the counts by age do not add up to the totals".into());
        }
        let errors = ages().map(|age| age.standard_error).chain([*standard_error]);
        let share = |share: f64| (0.0..=1.0).contains(&share);
        let fine = |error: Option<f64>| error.is_none_or(|error| error >= 0.0);
        (!errors.into_iter().all(fine) || !ages().all(|age| share(age.accuracy)) || !share(self.chance))
            .then(|| "an accuracy or a standard error is out of range".into())
    }

    /// The fraction of correct answers in each sequence.
    fn shares(&self) -> Vec<f64> {
        let one = |answers: &String| answers.matches('1').count() as f64 / answers.len().max(1) as f64;
        self.answers.iter().map(one).collect()
    }
}

impl Report {
    /// A report without results.
    pub fn new(
        model: String,
        model_type: &str,
        parameters: usize,
        weights: String,
        policy: Policy,
        decode: bool,
    ) -> Self {
        let read = if decode { "decode" } else { "whole" }.into();
        let (format, results) = (FORMAT, Vec::new());
        Self { format, model, model_type: model_type.into(), parameters, weights, policy, read, results }
    }

    /// Writes the file, atomically replacing an existing one.
    pub fn write(&self, path: &Path) -> Result<()> {
        results::write(path, self)
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let (text, sealed) = disk::read_sealed(path, ADVICE)?;
        let foreign = |why: String| {
            Error::file(path, format!("is not a file of results (`march eval --output` writes them): {why}"))
        };
        let value: Value = serde_json::from_str(&text).map_err(|error| foreign(error.to_string()))?;
        if !value.is_object() {
            return Err(foreign("it is not a JSON object".into()));
        }
        let report: Self = serde_json::from_str(&text).map_err(|error| foreign(error.to_string()))?;
        let damaged = |message: String| Err(Error::damaged(path, format!("is damaged: {message}; {ADVICE}")));
        match report.format {
            WITHOUT_CHECKSUM => {}
            FORMAT if sealed => {}
            FORMAT => return damaged(format!("it has format {FORMAT} but no checksum")),
            other => {
                let message =
                    format!("has format {other}; this program reads {WITHOUT_CHECKSUM} and {FORMAT}");
                return Err(Error::file(path, message));
            }
        }
        match report.results.iter().find_map(|result| Some((result, result.contradiction()?))) {
            Some((result, message)) => {
                damaged(format!("task {} at {} tokens: {message}", result.task, result.length))
            }
            None => Ok(report),
        }
    }
}

/// Whether a text was written by [`Report::write`], of this version or of the one without a checksum.
pub fn is_report(text: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
    let of_results = value["model_type"].is_string() && value["results"].is_array();
    match value["format"].as_u64() {
        Some(format) if format == u64::from(WITHOUT_CHECKSUM) => of_results,
        Some(_) => of_results && disk::unseal(text) == disk::Seal::Sealed,
        None => false,
    }
}

/// A paired difference, B − A, on the same sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct PairedComparison {
    /// The task with its sizes.
    pub task: String,
    /// Tokens per sequence.
    pub length: usize,
    /// Number of sequences that both answered.
    pub samples: usize,
    /// The accuracies of A and B on them.
    pub accuracy: [f64; 2],
    /// B − A.
    pub difference: f64,
    /// The standard error, by sequence.
    pub error: f64,
    /// The 95 % confidence interval.
    pub interval: [f64; 2],
}

/// The paired differences for all tasks and lengths that two reports share. Rejects reports that share none.
pub fn compare(a: &Report, b: &Report) -> Result<Vec<PairedComparison>> {
    let mut list = Vec::new();
    for one in &a.results {
        let Some(other) = b.results.iter().find(|r| r.task == one.task && r.length == one.length) else {
            continue;
        };
        let (before, after) = (one.shares(), other.shares());
        let samples = before.len().min(after.len());
        if samples < 2 {
            continue;
        }
        let pairs = || before.iter().zip(&after).take(samples);
        let n = samples as f64;
        let mean = |values: &[f64]| values[..samples].iter().sum::<f64>() / n;
        let difference = pairs().map(|(a, b)| b - a).sum::<f64>() / n;
        let squares: f64 = pairs().map(|(a, b)| (b - a - difference).powi(2)).sum();
        let error = (squares / (n - 1.0) / n).sqrt();
        let reach = student(samples - 1) * error;
        list.push(PairedComparison {
            task: one.task.clone(),
            length: one.length,
            samples,
            accuracy: [mean(&before), mean(&after)],
            difference,
            error,
            interval: [difference - reach, difference + reach],
        });
    }
    if list.is_empty() {
        let names = |report: &Report| {
            let all = report.results.iter().map(|r| format!("{} at {} tokens", r.task, r.length));
            all.collect::<Vec<_>>().join(", ")
        };
        return Err(Error::Request(format!(
            "the two files have no task in common with the same sizes, the same length and at least two \
             sequences: one has {}, the other {}",
            names(a),
            names(b)
        )));
    }
    Ok(list)
}

/// The 97.5 % quantile of Student's distribution with this many degrees of freedom: that of the normal distribution
/// plus the first terms of its expansion in 1/ν, or a table where these terms are not enough.
fn student(freedom: usize) -> f64 {
    const SMALL: [f64; 8] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306];
    match SMALL.get(freedom.saturating_sub(1)) {
        Some(&point) => point,
        None => {
            let (z, v) = (1.959_964_f64, freedom as f64);
            let first = (z.powi(3) + z) / 4.0;
            let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
            let third = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
            z + first / v + second / (v * v) + third / v.powi(3)
        }
    }
}

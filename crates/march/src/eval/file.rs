//! Results as a JSON file, and the paired difference of two of them.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Age, Answers, Share};
use crate::anchors::Policy;
use crate::data::recall::Task;
use crate::disk;
use crate::error::{Error, Result};

/// Raised when a file's meaning changes.
const FORMAT: u32 = 1;

/// What a model answered, as a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    format: u32,
    /// The checkpoint, as it was named.
    pub model: String,
    /// Its kind.
    pub model_type: String,
    /// Numbers in its parameters.
    pub parameters: usize,
    /// The precision of its weights.
    pub weights: String,
    /// Its memory.
    pub policy: Policy,
    /// `whole`, or `decode`: one token at a time.
    pub read: String,
    /// By task and length.
    pub results: Vec<TaskReport>,
}

/// The answers to one task at one length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// The task with its sizes.
    pub task: String,
    /// Tokens of a sequence.
    pub length: usize,
    /// Sequences.
    pub samples: usize,
    /// Questions of a sequence.
    pub questions: usize,
    /// The share of right answers.
    pub accuracy: f64,
    /// Its standard error; none of a single sequence.
    pub standard_error: Option<f64>,
    /// What guessing gives.
    pub chance: f64,
    /// The same by age of the fact.
    pub by_age: Vec<AgeReport>,
    /// Bytes that one sequence's bank holds after it, on average.
    pub memory_bytes: usize,
    /// Tokens of a second, all sequences side by side.
    pub tokens_per_second: f64,
    /// A text for each sequence: `1` for a right answer, `0` for a wrong one, in the order of the questions.
    pub answers: Vec<String>,
}

/// The share of right answers of an age.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgeReport {
    /// The least age in tokens.
    pub from: usize,
    /// The first age beyond.
    pub to: usize,
    /// How many were asked.
    pub asked: u64,
    /// The share of right ones.
    pub accuracy: f64,
    /// Its standard error; none of a single sequence.
    pub standard_error: Option<f64>,
}

impl TaskReport {
    /// What the answers come to.
    pub fn new(task: &Task, answers: &Answers) -> Self {
        let Share { error, .. } = answers.accuracy();
        let one = |Age { from, to, share }: Age| AgeReport {
            from,
            to,
            asked: share.asked,
            accuracy: share.value(),
            standard_error: share.error,
        };
        let digit = |right| if right { '1' } else { '0' };
        Self {
            task: task.text(),
            length: task.length(),
            samples: answers.samples.len(),
            questions: task.questions(),
            accuracy: answers.accuracy().value(),
            standard_error: error,
            chance: 1.0 / task.answers() as f64,
            by_age: answers.by_age(task.length()).into_iter().map(one).collect(),
            memory_bytes: answers.memory_bytes,
            tokens_per_second: answers.tokens_per_second,
            answers: answers
                .samples
                .iter()
                .map(|sample| sample.iter().map(|answer| digit(answer.right)).collect())
                .collect(),
        }
    }

    /// The share of right answers of each sequence.
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

    /// Writes the file; one that is there is replaced as a whole.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        disk::replace(path, (text + "\n").as_bytes())
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io(path, "read the results"))?;
        let report: Self = serde_json::from_str(&text).map_err(|error| {
            Error::file(
                path,
                format!("is not a file of results (`march eval --output` writes them): {error}"),
            )
        })?;
        match report.format {
            FORMAT => Ok(report),
            other => Err(Error::file(path, format!("has format {other}; this program reads {FORMAT}"))),
        }
    }
}

/// A paired difference, B − A, on the same sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// The task with its sizes.
    pub task: String,
    /// Tokens of a sequence.
    pub length: usize,
    /// Sequences that both answered.
    pub samples: usize,
    /// The accuracies of A and B on them.
    pub accuracy: [f64; 2],
    /// B − A.
    pub difference: f64,
    /// Its standard error, by sequence.
    pub error: f64,
    /// Its 95 % interval.
    pub interval: [f64; 2],
}

/// The paired differences of all tasks and lengths that two reports share. Refuses reports that share none.
pub fn compare(a: &Report, b: &Report) -> Result<Vec<Compared>> {
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
        list.push(Compared {
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
            "the two files share no task of the same sizes and length with two sequences or more: one has {}, the \
             other {}",
            names(a),
            names(b)
        )));
    }
    Ok(list)
}

/// The 97.5 % point of Student's distribution with so many degrees of freedom: that of the normal distribution and
/// the first terms of its expansion in 1/ν; from a table where these are too few.
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

#[cfg(test)]
mod tests {
    use super::super::Answer;
    use super::*;

    fn report(rights: &[&str]) -> Report {
        let task = Task::open("mqar:pairs=4:vocabulary=16", None).unwrap();
        let sample = |text: &&str| text.chars().map(|c| Answer { age: 1, right: c == '1' }).collect();
        let samples = rights.iter().map(sample).collect();
        let answers = Answers { samples, memory_bytes: 10, tokens_per_second: 1.0 };
        let mut report = Report::new("m".into(), "march", 1, "f32".into(), Policy::default(), false);
        report.results.push(TaskReport::new(&task, &answers));
        report
    }

    #[test]
    fn differences_are_paired() {
        let (a, b) = (report(&["0000", "1100", "1111"]), report(&["1100", "1111", "1111"]));
        let got = &compare(&a, &b).unwrap()[0];
        assert_eq!(got.samples, 3);
        assert!((got.accuracy[0] - 0.5).abs() < 1e-12 && (got.difference - 1.0 / 3.0).abs() < 1e-12);
        // Differences 0.5, 0.5, 0: their deviation is √(1/12), over √3.
        assert!((got.error - (1.0f64 / 36.0).sqrt()).abs() < 1e-12);
        assert!((got.interval[1] - got.difference - 4.303 * got.error).abs() < 1e-9);
        let same = &compare(&a, &a).unwrap()[0];
        assert_eq!((same.difference, same.error), (0.0, 0.0));
        let mut other = b.clone();
        other.results[0].length = 17;
        assert!(compare(&a, &other).unwrap_err().to_string().contains("17 tokens"));
    }

    #[test]
    fn files_are_written_and_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let a = report(&["0110", "1111"]);
        a.write(&path).unwrap();
        assert_eq!(Report::read(&path).unwrap(), a);
        std::fs::write(&path, "{\"format\": 1}").unwrap();
        assert!(Report::read(&path).unwrap_err().to_string().contains("march eval"));
        let text = serde_json::to_string(&a).unwrap().replace("\"format\":1", "\"format\":9");
        std::fs::write(&path, text).unwrap();
        assert!(Report::read(&path).unwrap_err().to_string().contains("format 9"));
    }

    #[test]
    fn student_is_between_its_table_and_the_normal() {
        assert!((student(9) - 2.262).abs() < 2e-3 && (student(30) - 2.042).abs() < 1e-3);
        assert!((student(100_000) - 1.96).abs() < 1e-3);
    }
}

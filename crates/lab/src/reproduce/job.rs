//! One training run of an experiment and what its model is measured on.
//!
//! Each stage is an ordinary run folder (`march train --resume` and all other commands accept it). The measurements are
//! in one file per run, with its checksum; a measurement that exists is not repeated.

use std::collections::BTreeSet;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use march_engine::{CpuOptions, Device, Precision, Products};
use serde::{Deserialize, Serialize};

use super::experiment::Evaluation;
use super::measure::Subject;
use super::plan::{Job, Scale};
use march_lm::anchors::Policy;
use march_lm::checkpoint::Checkpoint;
use march_lm::disk;
use march_lm::model::Model;
use march_lm::run::{Event, Run, RunOptions, read_metrics};
use march_lm::tokenizer::Tokenizer;
use march_lm::train::ranks::SingleProcess;
use march_lm::{Error, Result};

/// What to do about a damaged file of measurements.
const ADVICE: &str = "delete it; the measurements will be repeated";

/// The variant in which each anchor has the routing key of another.
pub const PERMUTED: &str = "permuted keys";

/// A measurement of a trained model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// What was measured, under which policy.
    pub key: String,
    /// The fraction of correct answers, or the mean loss in nats.
    pub value: f64,
    /// Bytes of memory after a sequence.
    pub memory_bytes: usize,
    /// Of these bytes, those that only a rollback uses; `None` in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback_bytes: Option<usize>,
    /// FLOP per token of the forward pass.
    pub flop_per_token: f64,
    /// For losses: the end of each range of positions, and the mean loss there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<(usize, f64)>,
    /// For losses: groups of tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
}

/// The losses of some tokens, by document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// What the tokens have in common.
    pub name: String,
    /// The sum of the losses of each document, in nats.
    pub sums: Vec<f64>,
    /// The number of tokens of each document.
    pub counts: Vec<u64>,
}

impl Group {
    /// A group without tokens.
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.into(), sums: Vec::new(), counts: Vec::new() }
    }

    /// Adds a token of a document.
    pub(super) fn add(&mut self, document: usize, loss: f32) {
        if self.sums.len() <= document {
            self.sums.resize(document + 1, 0.0);
            self.counts.resize(document + 1, 0);
        }
        self.sums[document] += f64::from(loss);
        self.counts[document] += 1;
    }

    /// The mean loss per token; `None` without tokens.
    pub fn mean(&self) -> Option<f64> {
        let count: u64 = self.counts.iter().sum();
        (count > 0).then(|| self.sums.iter().sum::<f64>() / count as f64)
    }
}

/// What is known of a finished run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Number of parameters.
    pub parameters: usize,
    /// The last loss on validation questions, in nats.
    pub validation_loss: f64,
    /// The last fraction of right answers to validation questions.
    pub validation_accuracy: f64,
    /// Median training speed of the last stage, on one thread.
    pub tokens_per_second: f64,
    /// Accuracy on validation questions by step of the last stage.
    pub curve: Vec<(u64, f64)>,
    /// The measurements.
    pub measured: Vec<Measured>,
}

/// A row to measure: the model's own policy, or another.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// Changes to the policy, or `none` to remove all anchors.
    pub policy: &'a str,
    /// What is measured.
    pub evaluations: Vec<&'a Evaluation>,
}

impl Outcome {
    /// The outcome of a run that diverged: no rate is worse.
    pub(super) fn diverged() -> Self {
        Self { validation_loss: f64::MAX, ..Self::default() }
    }

    /// A measurement.
    pub fn find(&self, key: &str) -> Option<&Measured> {
        self.measured.iter().find(|measured| measured.key == key)
    }
}

/// Identifies a measurement by everything that determines it.
pub fn key(evaluation: &Evaluation, scale: &Scale, policy: &str) -> String {
    let what = match (&evaluation.task, &evaluation.needles, &evaluation.text) {
        (Some(task), ..) => format!("recall {task}"),
        (_, Some(task), _) => format!("needles {task}"),
        (_, _, Some(text)) => match evaluation.copy {
            Some(distance) => format!("copy {text} distance={}", scale.length(distance)),
            None => format!("loss {text}"),
        },
        _ => String::new(),
    };
    let length = evaluation.length.map_or("least".into(), |length| {
        if evaluation.task.is_some() { length } else { scale.length(length) }.to_string()
    });
    let stage = evaluation.stage.map_or(String::new(), |stage| format!(" stage={stage}"));
    format!("{what} length={length} samples={} policy={policy}{stage}", scale.samples(evaluation.samples))
}

/// The file of a run's measurements.
fn file(job: &Job, output: &Path) -> PathBuf {
    let folder = job.folder(&output.join("runs"), job.stages.len() - 1);
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    output.join("measured").join(name + ".json")
}

/// Trains a model, unless that was done before, and measures what has not been measured. Also returns whether anything was
/// trained or measured now. `None` if `stop` was set in the meantime; the state so far is saved.
pub fn carry_out(
    job: &Job,
    rows: &[Row<'_>],
    scale: &Scale,
    output: &Path,
    stop: &AtomicBool,
) -> Result<Option<(Outcome, bool)>> {
    let path = file(job, output);
    let fresh = !path.exists();
    let mut outcome = if fresh {
        let Some(outcome) = train(job, output, stop)? else { return Ok(None) };
        write(&path, &outcome)?;
        outcome
    } else {
        read(&path)?
    };
    let all = rows.iter().flat_map(|row| row.evaluations.iter().map(|evaluation| (row.policy, *evaluation)));
    let all: Vec<(&str, &Evaluation)> = all.collect();
    let is_missing = |&&(policy, evaluation): &&(&str, &Evaluation)| {
        outcome.find(&key(evaluation, scale, policy)).is_none()
    };
    let mut missing: Vec<(&str, &Evaluation)> = all.iter().filter(is_missing).copied().collect();
    if missing.is_empty() {
        return Ok(Some((outcome, fresh)));
    }
    // The measurements may have come without the weights, as those of docs/results do. The same run again has the same
    // bits on a machine with the same instructions; on another, nothing that came is mixed with what is measured now.
    let stage_of = |evaluation: &Evaluation| evaluation.stage.unwrap_or(job.stages.len());
    if missing.iter().any(|(_, evaluation)| !checkpoint(job, stage_of(evaluation) - 1, output).is_dir()) {
        let Some(again) = train(job, output, stop)? else { return Ok(None) };
        if again.validation_loss != outcome.validation_loss {
            (outcome, missing) = (again, all);
        }
    }
    // As in `march eval`: decoding is bit-identical to reading the whole sequence.
    let options = CpuOptions { threads: 1, products: Products::BatchInvariant, ..Default::default() };
    let device = Device::cpu(options)?;
    for stage in 0..job.stages.len() {
        let mut wanted =
            missing.iter().filter(|(_, evaluation)| stage_of(evaluation) == stage + 1).peekable();
        if wanted.peek().is_none() {
            continue;
        }
        let folder = checkpoint(job, stage, output);
        let (model, parameters) = Model::load_in(&device, &Checkpoint::open(&folder)?, Precision::F32)?;
        let tokenizer = Tokenizer::of_checkpoint(&folder, model.config().vocab_size, None)?;
        let subject = Subject {
            model: &model,
            parameters: &parameters,
            tokenizer: &tokenizer,
            data: Some(&job.stages[stage].data),
            scale,
        };
        for (changes, evaluation) in wanted {
            let permuted = *changes == PERMUTED;
            let policy = policy(&model.policy(), changes)?;
            model.check_policy(&policy)?;
            let key = key(evaluation, scale, changes);
            let keep_going = || {
                if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            let Some(measured) = subject.measure(evaluation, (&policy, permuted), key, &keep_going)? else {
                return Ok(None);
            };
            outcome.measured.push(measured);
            write(&path, &outcome)?;
        }
    }
    Ok(Some((outcome, true)))
}

/// A policy with the changes of a variant.
pub fn policy(own: &Policy, changes: &str) -> Result<Policy> {
    match changes {
        "none" => Ok(Policy { interval: None, ..Policy::default() }),
        PERMUTED => Ok(own.clone()),
        changes => own.with(changes),
    }
}

/// The folder of the checkpoint at the end of a stage, counted from 0.
pub fn checkpoint(job: &Job, stage: usize, output: &Path) -> PathBuf {
    let steps = job.stages[stage].train.steps;
    job.folder(&output.join("runs"), stage).join("checkpoints").join(format!("step-{steps}"))
}

/// The folders that a thread of this process is training in.
static HELD: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// A folder that no other thread trains in.
struct FolderClaim(PathBuf);

impl FolderClaim {
    /// Waits until no other thread has the folder.
    fn take(folder: &Path) -> Self {
        loop {
            if HELD.lock().is_ok_and(|mut held| held.insert(folder.into())) {
                return Self(folder.into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for FolderClaim {
    fn drop(&mut self) {
        if let Ok(mut held) = HELD.lock() {
            held.remove(&self.0);
        }
    }
}

/// Trains the stages, each from the weights of the one before.
fn train(job: &Job, output: &Path, stop: &AtomicBool) -> Result<Option<Outcome>> {
    let device = Device::cpu(CpuOptions { threads: 1, ..Default::default() })?;
    let runs = output.join("runs");
    let mut before: Option<PathBuf> = None;
    let mut parameters = 0;
    for (number, config) in job.stages.iter().enumerate() {
        let folder = job.folder(&runs, number);
        // Runs that share their first stages may be carried out side by side.
        let _held = FolderClaim::take(&folder);
        let end = folder.join("checkpoints").join(format!("step-{}", config.train.steps));
        // The last step's checkpoint is written after everything else.
        if !end.is_dir() || number + 1 == job.stages.len() {
            let alone = Box::<SingleProcess>::default();
            let mut run = if folder.join("run.json").exists() {
                Run::resume(&device, &folder, RunOptions::default(), alone, &mut |_: Event| {})?
            } else {
                // The stage at which a model is continued as another.
                let upcycle_null_bias = job.upcycle_null_bias.filter(|_| number == 1);
                let init_from = before.clone();
                let options = RunOptions { init_from, upcycle_null_bias, ..RunOptions::default() };
                Run::create(&device, config.clone(), &folder, options, alone)?
            };
            parameters = run.trainer().model().parameter_count();
            if !run.train(stop, &mut |_| {})? {
                return Ok(None);
            }
        }
        before = Some(end);
    }
    let folder = job.folder(&runs, job.stages.len() - 1);
    let mut outcome = Outcome { parameters, ..Outcome::default() };
    let mut speeds = Vec::new();
    for line in read_metrics(&folder.join("metrics.jsonl"))? {
        let number = |key: &str| line[key].as_f64();
        if let (Some(loss), Some(accuracy)) = (number("validation_loss"), number("validation_accuracy")) {
            (outcome.validation_loss, outcome.validation_accuracy) = (loss, accuracy);
            outcome.curve.push((line["step"].as_u64().unwrap_or(0), accuracy));
        }
        speeds.extend(number("tokens_per_second"));
    }
    speeds.sort_by(f64::total_cmp);
    outcome.tokens_per_second = speeds.get(speeds.len() / 2).copied().unwrap_or(0.0);
    Ok(Some(outcome))
}

fn read(path: &Path) -> Result<Outcome> {
    let (text, sealed) = disk::read_sealed(path, ADVICE)?;
    let damaged = |what: String| Error::damaged(path, format!("is damaged: {what}; {ADVICE}"));
    if !sealed {
        return Err(damaged("it has no checksum".into()));
    }
    serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))
}

fn write(path: &Path, outcome: &Outcome) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
    }
    let text = serde_json::to_string(outcome)
        .map_err(|error| Error::file(path, format!("could not be written: {error}")))?;
    disk::replace(path, disk::seal(&(text + "\n")).as_bytes())
}

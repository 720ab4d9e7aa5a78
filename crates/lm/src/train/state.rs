//! A trainer on disk: everything needed to resume, in one checkpoint folder.
//!
//! Besides the model's own files there are `optimizer.safetensors`, with both moments of every parameter that is trained
//! (`first.<name>`, `second.<name>`), and `progress.json`. Nothing in them depends on the clock or the machine. The
//! checkpoint of step 0, which holds the initial weights of a run that starts from another checkpoint, has no moments:
//! they are zero.

use std::fs;
use std::path::Path;

use march_engine::{Precision, Tensor};
use serde::{Deserialize, Serialize};

use super::{Optimizer, Trainer};
use crate::checkpoint::{Checkpoint, NewFolder, SHARD_BYTES};
use crate::error::{Error, Result};
use crate::model::{Model, ModelConfig, ParameterSpec};

const OPTIMIZER_FILE: &str = "optimizer.safetensors";
const PROGRESS_FILE: &str = "progress.json";
const TOKENIZER_FILE: &str = "tokenizer.json";
/// Raised when a file's meaning changes.
const FORMAT: u32 = 1;

/// Progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    format: u32,
    /// Number of completed steps.
    pub step: u64,
    /// Number of sequences taken from the loader.
    pub cursor: u64,
    /// Number of tokens trained on.
    pub tokens: u64,
    /// The lowest validation loss so far and its step.
    pub best: Option<(u64, f64)>,
    /// Number of lines in the run's metrics; `None` in checkpoints of earlier versions.
    #[serde(default)]
    pub metric_lines: Option<u64>,
    /// Whether the run was interrupted while validating or sampling at this step, so that both are still due.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pending: bool,
}

/// The layout of both moments of every parameter that is trained.
fn moments(layout: &[ParameterSpec], trained: &[bool]) -> Vec<ParameterSpec> {
    let of = |moment: &str| {
        let moment = moment.to_string();
        let specs = layout.iter().zip(trained).filter(|(_, trained)| **trained);
        specs.map(move |(spec, _)| ParameterSpec { name: format!("{moment}.{}", spec.name), ..spec.clone() })
    };
    of("first").chain(of("second")).collect()
}

impl Trainer {
    /// Writes a new checkpoint folder. `progress.step` is replaced by the trainer's step.
    pub fn save(&self, folder: &Path, progress: &Progress, tokenizer: Option<&[u8]>) -> Result<()> {
        let layout = self.model.layout();
        let moments = moments(layout, &self.trained);
        let new = NewFolder::create(folder)?;
        let numbers = |i: usize| Ok(self.parameters[i].to_f32());
        new.model(self.model.config(), layout, SHARD_BYTES, Precision::F32, numbers)?;
        if self.step > 0 {
            let both: Vec<&Tensor> =
                self.optimizer.first.iter().chain(&self.optimizer.second).flatten().collect();
            new.tensors(OPTIMIZER_FILE, &moments, |i| Ok(both[i].to_f32()))?;
        }
        if let Some(tokenizer) = tokenizer {
            new.file(TOKENIZER_FILE, tokenizer)?;
        }
        let progress = Progress { format: FORMAT, step: self.step, ..progress.clone() };
        let text = serde_json::to_string_pretty(&progress).unwrap_or_default();
        new.file(PROGRESS_FILE, (text + "\n").as_bytes())?;
        // Numbers read from a device that was lost in the meantime must not become a checkpoint.
        self.device().check()?;
        new.finish()
    }

    /// Restores weights, moments and step from a checkpoint folder that [`Trainer::save`] wrote; with `step`, it must
    /// be that step. Nothing is changed if the folder is incomplete, damaged or of another model.
    pub fn restore(&mut self, folder: &Path, step: Option<u64>) -> Result<Progress> {
        let checkpoint = Checkpoint::open_for_training(folder)?;
        let path = folder.join(PROGRESS_FILE);
        let bytes = fs::read(&path).map_err(Error::io(&path, "read"))?;
        let progress: Progress = serde_json::from_slice(&bytes)
            .map_err(|error| Error::damaged(&path, format!("is not a run's progress: {error}")))?;
        if progress.format != FORMAT {
            let message = format!("has format {}; this program reads {FORMAT}", progress.format);
            return Err(Error::file(&path, message));
        }
        if let Some(step) = step.filter(|step| *step != progress.step) {
            let message = format!("says step {}, but the folder is that of step {step}", progress.step);
            return Err(Error::damaged(&path, message));
        }
        // The policy may differ: older checkpoints do not record it, and a run keeps it in its configuration.
        let (found, own) = (checkpoint.config(), self.model.config());
        if (ModelConfig { memory: own.memory, ..found.clone() }) != *own {
            let message = "is a checkpoint of another model than the run's config.toml describes";
            return Err(Error::file(folder, message));
        }
        let (_, parameters) = Model::load(self.device(), &checkpoint)?;
        let optimizer = match progress.step {
            0 => Optimizer::new(&parameters, &self.trained)?,
            _ => {
                let specs = moments(self.model.layout(), &self.trained);
                let file = checkpoint.open_beside(folder, OPTIMIZER_FILE)?;
                file.check(&specs)?;
                let mut both = Vec::with_capacity(specs.len());
                file.read_all(&specs, |i, numbers| {
                    both.push(Tensor::from_slice(numbers, &specs[i].shape, self.device())?);
                    Ok(())
                })?;
                let mut both = both.into_iter();
                let mut next =
                    || self.trained.iter().map(|&trained| if trained { both.next() } else { None }).collect();
                Optimizer { first: next(), second: next() }
            }
        };
        self.optimizer = optimizer;
        self.parameters = parameters;
        self.step = progress.step;
        Ok(progress)
    }
}

//! A trainer on disk: all that going on needs, in one checkpoint folder.
//!
//! Besides the model's own files: `optimizer.safetensors` with both moments of every parameter (`first.<name>`,
//! `second.<name>`) and `progress.json`. Nothing in them depends on the clock or the machine.

use std::fs;
use std::path::Path;

use march_engine::Engine;
use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::checkpoint::{Checkpoint, NewFolder, SHARD_BYTES};
use crate::error::{Error, Result};
use crate::model::{Model, ParameterSpec};

const OPTIMIZER_FILE: &str = "optimizer.safetensors";
const PROGRESS_FILE: &str = "progress.json";
const TOKENIZER_FILE: &str = "tokenizer.json";
/// Raised when a file's meaning changes.
const FORMAT: u32 = 1;

/// How far a run has come.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    format: u32,
    /// Steps made.
    pub step: u64,
    /// Sequences taken from the loader.
    pub cursor: u64,
    /// Tokens learned from.
    pub tokens: u64,
    /// The lowest validation loss so far and its step.
    pub best: Option<(u64, f64)>,
}

/// Both moments of every parameter.
fn moments(layout: &[ParameterSpec]) -> Vec<ParameterSpec> {
    let of = |moment: &str| {
        let moment = moment.to_string();
        layout
            .iter()
            .map(move |spec| ParameterSpec { name: format!("{moment}.{}", spec.name), ..spec.clone() })
    };
    of("first").chain(of("second")).collect()
}

impl<E: Engine> Trainer<'_, E> {
    /// Writes a new checkpoint folder. `progress.step` is set to the trainer's.
    pub fn save(&self, folder: &Path, progress: &Progress, tokenizer: Option<&[u8]>) -> Result<()> {
        let layout = self.model.layout();
        let moments = moments(layout);
        let new = NewFolder::create(folder)?;
        new.model(self.model.config(), layout, SHARD_BYTES, |i| Ok(self.engine.to_f32(&self.parameters[i])))?;
        new.tensors(OPTIMIZER_FILE, &moments, |i| {
            let count = layout.len();
            let moment = if i < count { &self.optimizer.first[i] } else { &self.optimizer.second[i - count] };
            Ok(self.engine.to_f32(moment))
        })?;
        if let Some(tokenizer) = tokenizer {
            new.file(TOKENIZER_FILE, tokenizer)?;
        }
        let progress = Progress { format: FORMAT, step: self.step, ..progress.clone() };
        let text = serde_json::to_string_pretty(&progress).unwrap_or_default();
        new.file(PROGRESS_FILE, (text + "\n").as_bytes())?;
        new.finish()
    }

    /// Takes weights, moments and step from a checkpoint folder that [`Trainer::save`] wrote. Nothing is taken from
    /// a folder that is incomplete or of another model.
    pub fn restore(&mut self, folder: &Path) -> Result<Progress> {
        let path = folder.join(PROGRESS_FILE);
        let text = fs::read_to_string(&path).map_err(Error::io(&path, "read"))?;
        let progress: Progress = serde_json::from_str(&text)
            .map_err(|error| Error::file(&path, format!("is not a run's progress: {error}")))?;
        if progress.format != FORMAT {
            let message = format!("has format {}; this program reads {FORMAT}", progress.format);
            return Err(Error::file(&path, message));
        }
        let checkpoint = Checkpoint::open(folder)?;
        if checkpoint.config() != self.model.config() {
            let message = "is a checkpoint of another model than the run's config.toml describes";
            return Err(Error::file(folder, message));
        }
        let (_, parameters) = Model::load(self.engine, &checkpoint)?;
        let specs = moments(self.model.layout());
        let file = checkpoint.open_beside(folder, OPTIMIZER_FILE)?;
        file.check(&specs)?;
        let mut tensors = Vec::with_capacity(specs.len());
        for spec in &specs {
            tensors.push(self.engine.from_f32(&file.tensor(spec)?, &spec.shape)?);
            file.release(spec);
        }
        self.optimizer.second = tensors.split_off(self.model.layout().len());
        self.optimizer.first = tensors;
        self.parameters = parameters;
        self.step = progress.step;
        Ok(progress)
    }
}

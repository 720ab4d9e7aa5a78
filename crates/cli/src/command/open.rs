//! Opening a model with its tokenizer, shared by several commands.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use march_lm::Pipeline;
pub use march_lm::checkpoint::newest;
use march_lm::disk::BUILT_IN;
use march_lm::engine::{Device, Precision, Products};
use march_lm::generate::{Generator, Sampling, Text};
use march_lm::memory::StateBank;
use march_lm::pipeline::OpenOptions;

use super::policy::PolicyArgs;
use crate::device::DeviceArgs;
use crate::display::out::note;

/// Where `march train` and `march demo` write; as the model, the newest run there.
pub const RUNS: &str = "runs";

/// The model, and how to run it.
#[derive(Args, Clone)]
pub struct ModelArgs {
    /// A checkpoint folder, or the folder of a run, whose newest checkpoint is used; `diary` is the model inside the
    /// program [default: the newest run in runs/, or the demo's model, or `diary`]
    #[arg(long, value_name = "DIR", default_value = RUNS, hide_default_value = true)]
    pub model: PathBuf,
    /// `bytes`, or a `tokenizer.json` [default: the checkpoint folder's; bytes for a vocabulary of 256 or 257]
    #[arg(long, value_name = "bytes|FILE")]
    tokenizer: Option<String>,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Precision of the weights: f32, bf16, int8 with one scale per row, or q8 and q4 with one per 32 numbers of a row,
    /// which are multiplied in integers [default: as they are stored: q8 or q4 if the checkpoint is in one of them,
    /// q8 for the blocks of a GGUF file, bf16 if it is in bf16, else f32]
    #[arg(long, value_name = "f32|bf16|int8|q8|q4")]
    pub weights: Option<Precision>,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// A model that is ready to run.
pub struct OpenedModel {
    pub pipeline: Pipeline,
    /// The flags, to be applied to another policy.
    pub flags: PolicyArgs,
}

impl Deref for OpenedModel {
    type Target = Pipeline;

    fn deref(&self) -> &Pipeline {
        &self.pipeline
    }
}

impl ModelArgs {
    /// Chooses the newest run if no model was given.
    pub fn choose(&mut self) -> anyhow::Result<()> {
        self.model = chosen(&self.model)?;
        Ok(())
    }

    /// These arguments for another checkpoint.
    pub fn of(&self, model: &Path) -> Self {
        Self { model: model.into(), ..self.clone() }
    }

    /// The input files and folders.
    pub fn inputs(&self) -> Vec<&Path> {
        let tokenizer = self.tokenizer.as_deref().map(Path::new);
        [self.model.as_path()].into_iter().chain(tokenizer).collect()
    }

    /// Opens the device and the checkpoint.
    pub fn open(&self) -> anyhow::Result<OpenedModel> {
        // With batch-invariant products, decoding is bit-identical to reading in long calls.
        self.open_on(self.device.open(Products::BatchInvariant)?)
    }

    /// Opens the checkpoint on a device whose products are batch-invariant.
    pub fn open_on(&self, device: Device) -> anyhow::Result<OpenedModel> {
        let (weights, tokenizer) = (self.weights, self.tokenizer.clone());
        let options = OpenOptions { device: Some(device), weights, tokenizer };
        let pipeline = Pipeline::open_with(&self.model, options)?;
        let policy = self.policy.over(pipeline.policy().clone());
        Ok(OpenedModel { pipeline: pipeline.with_policy(policy)?, flags: self.policy.clone() })
    }
}

/// The folder of a model: as given, or, if none was given, the newest run.
pub fn chosen(model: &Path) -> anyhow::Result<PathBuf> {
    let is_model = newest(model) != model || model.join("config.json").exists();
    if model != Path::new(RUNS) || is_model {
        return Ok(model.into());
    }
    let Some(run) = newest_run(model) else {
        note!("no --model was given, and {RUNS}/ has none: using the model inside the program, `{BUILT_IN}`");
        return Ok(BUILT_IN.into());
    };
    note!("no --model was given: using {}", run.display());
    Ok(run)
}

/// The run with the newest checkpoint; the demo's model only if there is no other.
fn newest_run(runs: &Path) -> Option<PathBuf> {
    let written = |run: &PathBuf| {
        let checkpoint = Some(newest(run)).filter(|checkpoint| checkpoint != run)?;
        checkpoint.metadata().and_then(|metadata| metadata.modified()).ok()
    };
    let latest = |runs: Vec<PathBuf>| runs.into_iter().filter_map(|run| Some((written(&run)?, run))).max();
    let own = entries(runs);
    let demos = own.iter().map(|folder| folder.join("march")).collect();
    latest(own).or_else(|| latest(demos)).map(|(_, run)| run)
}

/// The runs in a folder, by name.
pub fn runs_in(folder: &Path) -> Vec<PathBuf> {
    let mut runs = entries(folder);
    runs.retain(|run| is_run(run));
    runs.sort();
    runs
}

/// Whether a folder has the files of a run.
pub fn is_run(folder: &Path) -> bool {
    ["config.toml", "run.json"].iter().any(|name| folder.join(name).is_file())
}

/// The paths in a folder; none if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect()
}

impl OpenedModel {
    /// Creates a generator that continues after what `bank` has read.
    pub fn generator(&self, bank: StateBank, sampling: Sampling) -> anyhow::Result<Generator> {
        Ok(Generator::with_text(self.inference(), Text::new(bank), sampling)?)
    }
}

/// Rejects logits, `vocabulary` per token, that are not finite, because they are meaningless.
pub fn check_finite(logits: &[f32], vocabulary: usize) -> anyhow::Result<()> {
    if let Some(at) = logits.iter().position(|logit| !logit.is_finite()) {
        bail!(
            "the logits after token {} are not finite ({}): the weights are damaged, or their training diverged; use \
             an earlier checkpoint",
            at / vocabulary + 1,
            logits[at]
        );
    }
    Ok(())
}

/// Reads a text file.
pub fn text(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read(path).with_context(|| format!("{}: could not read", path.display()))?;
    String::from_utf8(text).with_context(|| format!("{}: not UTF-8", path.display()))
}

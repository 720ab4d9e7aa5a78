//! Opening a model with its tokenizer, shared by several commands.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use march::anchors::Policy;
use march::checkpoint::Checkpoint;
use march::engine::{Engine, Precision};
use march::generate::{Generator, Sampling};
use march::memory::StateBank;
use march::model::{InferenceParameters, Model};
use march::tokenizer::Tokenizer;

use super::policy::PolicyArgs;
use crate::device::EngineArgs;

/// The model, and how to run it.
#[derive(Args, Clone)]
pub struct ModelArgs {
    /// A checkpoint folder, or the folder of a run, whose newest checkpoint is used
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// `bytes`, or a `tokenizer.json` [default: the checkpoint folder's; bytes for a vocabulary of 256 or 257]
    #[arg(long, value_name = "bytes|FILE")]
    tokenizer: Option<String>,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Precision of the weights: f32, bf16, or int8 with one scale per row
    #[arg(long, default_value_t)]
    pub weights: Precision,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// A model that is ready to run.
pub struct Opened<'e, E: Engine> {
    pub engine: &'e E,
    pub model: Model<E>,
    pub parameters: InferenceParameters<E>,
    pub tokenizer: Tokenizer,
    pub policy: Policy,
    /// The flags, to be applied to another policy.
    pub flags: PolicyArgs,
    checkpoint: Checkpoint,
    weights: Precision,
}

impl ModelArgs {
    /// These arguments for another checkpoint.
    pub fn of(&self, model: &Path) -> Self {
        Self { model: model.into(), ..self.clone() }
    }

    /// The input files and folders.
    pub fn inputs(&self) -> Vec<&Path> {
        let tokenizer = self.tokenizer.as_deref().map(Path::new);
        [self.model.as_path()].into_iter().chain(tokenizer).collect()
    }

    /// Opens the checkpoint. The engine's products must be batch-invariant, so that decoding is bit-identical to reading
    /// in long calls.
    pub fn open<'e, E: Engine>(&self, engine: &'e E) -> anyhow::Result<Opened<'e, E>> {
        let folder = newest(&self.model);
        let checkpoint = Checkpoint::open(&folder)?;
        let vocabulary = checkpoint.config().vocab_size;
        let tokenizer = Tokenizer::of_checkpoint(&folder, vocabulary, self.tokenizer.as_deref())?;
        let (model, parameters) = Model::load_in(engine, &checkpoint, self.weights)?;
        let policy = self.policy.over(model.policy());
        model.check_policy(&policy)?;
        let (flags, weights) = (self.policy.clone(), self.weights);
        Ok(Opened { engine, model, parameters, tokenizer, policy, flags, checkpoint, weights })
    }
}

/// The newest checkpoint of a run's folder; any other folder is returned unchanged.
pub fn newest(folder: &Path) -> PathBuf {
    let Ok(entries) = std::fs::read_dir(folder.join("checkpoints")) else { return folder.into() };
    let steps = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        let step: u64 = path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()?;
        Some((step, path))
    });
    steps.max().map_or(folder.into(), |(_, path)| path)
}

impl<E: Engine> Opened<'_, E> {
    /// Identifies the model, including the precision of its weights.
    pub fn fingerprint(&self) -> anyhow::Result<String> {
        let own = self.model.checkpoint_fingerprint(&self.checkpoint)?;
        Ok(match self.weights {
            Precision::F32 => own,
            other => format!("{own}-{other}"),
        })
    }

    /// Creates a generator that continues after what `bank` has read.
    pub fn generator(&self, bank: StateBank<E>, sampling: Sampling) -> anyhow::Result<Generator<'_, E>> {
        Ok(Generator::new(self.engine, &self.model, &self.parameters, bank, sampling)?)
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

//! `march inspect precision`: the effect of weights and anchors in fewer bits.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use march_lm::anchors::{Policy, Storage};
use march_lm::checkpoint::Checkpoint;
use march_lm::engine::{CpuOptions, Device, Precision, Products};
use march_lm::generate::PIECE_TOKENS;
use march_lm::model::{Batch, Model, Weights};

use super::open;
use super::policy::PolicyArgs;
use crate::display::out::say;
use crate::display::{bytes, thousands};
use crate::number;

/// The effect of weights and anchor states in fewer bits on the loss and the logits of a text, compared with f32.
#[derive(Args)]
#[command(after_help = "Example:
  march inspect precision --model models/tiny-march --text book.txt

The largest logit error is the largest difference of any logit of any token from its f32 value; the next
column is the largest f32 logit. Bytes are those of all weights, and of the whole bank after the text.")]
pub struct InspectPrecision {
    /// A checkpoint folder, or the folder of a run, whose newest checkpoint is used [default: the newest run in runs/, or
    /// the demo's model]
    #[arg(long, value_name = "DIR", default_value = open::RUNS, hide_default_value = true)]
    model: PathBuf,
    /// `bytes`, or a `tokenizer.json` [default: the checkpoint folder's; bytes for a vocabulary of 256 or 257]
    #[arg(long, value_name = "bytes|FILE")]
    tokenizer: Option<String>,
    /// A text file
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Number of tokens to read, from its beginning
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = number::count::<usize>)]
    tokens: usize,
    /// Number of threads; 0 uses all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// Parses a flag's value.
pub fn precision(text: &str) -> Result<Precision, String> {
    text.parse().map_err(|_| "it must be `f32`, `bf16`, `int8`, `q8` or `q4`".to_string())
}

/// The results of a model on a text.
struct PrecisionResult {
    logits: Vec<f32>,
    loss: f64,
    tokens_per_second: f64,
    bank_bytes: usize,
}

impl InspectPrecision {
    /// Prints a table of weights, and one of anchors if there are any.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.model = open::chosen(&self.model)?;
        let folder = open::newest(&self.model);
        let checkpoint = Checkpoint::open(&folder)?;
        let model = Model::new(checkpoint.config());
        model.check_policy(&self.policy.over(model.policy()))?;
        let tokenizer = checkpoint.tokenizer(&folder, self.tokenizer.as_deref())?;
        let mut ids = tokenizer.encode(&open::text(&self.text)?)?;
        ids.truncate(self.tokens);
        if ids.len() < 2 {
            bail!("{}: {} tokens; a loss needs at least two", self.text.display(), ids.len());
        }
        let options =
            CpuOptions { threads: self.threads, products: Products::BatchInvariant, ..Default::default() };
        let device = Device::cpu(options).context("the engine could not start; try `--threads 1`")?;
        say!("{}: {} tokens of {}", self.model.display(), thousands(ids.len()), self.text.display());
        let mut table = Table::new("weights");
        for weights in Precision::ALL {
            let (model, parameters) = Model::load_in(&device, &checkpoint, weights)?;
            device.trim();
            let policy = self.policy.over(model.policy());
            let result = evaluate(&model, &parameters.into(), &ids, policy)?;
            table.row(weights, model.parameter_bytes(weights), result);
        }
        let (model, parameters) = Model::load_in(&device, &checkpoint, Precision::F32)?;
        device.trim();
        let policy = self.policy.over(model.policy());
        let Some(interval) = policy.interval else { return Ok(()) };
        if ids.len() <= interval {
            say!("\nthe text is too short for an anchor that a token could read; use a smaller --interval");
            return Ok(());
        }
        say!();
        let (mut table, parameters) = (Table::new("anchors"), parameters.into());
        for storage in Storage::ALL {
            let result = evaluate(&model, &parameters, &ids, Policy { storage, ..policy.clone() })?;
            table.row(storage.into(), result.bank_bytes, result);
        }
        Ok(())
    }
}

/// Reads the text into a bank, because only a bank keeps anchors in the policy's storage.
fn evaluate(
    model: &Model,
    weights: &Weights,
    ids: &[u32],
    policy: Policy,
) -> anyhow::Result<PrecisionResult> {
    let mut bank = model.bank(policy)?;
    let targets = ids.len() - 1;
    let mut result = PrecisionResult { logits: Vec::new(), loss: 0.0, tokens_per_second: 0.0, bank_bytes: 0 };
    let mut time = Duration::ZERO;
    for (piece, at) in ids.chunks(PIECE_TOKENS).zip((0..).step_by(PIECE_TOKENS)) {
        let started = Instant::now();
        let hidden = model.extend(weights, Batch::one(piece), &mut [&mut bank], None)?;
        let logits = model.logits(weights, &hidden)?;
        time += started.elapsed();
        result.logits.extend(logits.to_f32());
        // The token at t predicts the one at t + 1; the last has nothing to predict.
        let count = piece.len().min(targets - at);
        if count > 0 {
            let before = hidden.slice(1, 0..count)?;
            let next = &ids[at + 1..at + 1 + count];
            let loss = model.loss(weights, &before, next, Some(targets as f64))?;
            result.loss += loss.to_f64()[0];
        }
    }
    open::check_finite(&result.logits, model.config().vocab_size)?;
    result.tokens_per_second = ids.len() as f64 / time.as_secs_f64();
    result.bank_bytes = bank.bytes();
    Ok(result)
}

/// Rows, each compared with the first.
struct Table {
    exact: Option<PrecisionResult>,
}

impl Table {
    fn new(what: &str) -> Self {
        say!(
            "{what:<8} {:>10} {:>10} {:>11} {:>11} {:>20} {:>15} {:>10}",
            "bytes",
            "loss",
            "change",
            "perplexity",
            "largest logit error",
            "largest logit",
            "tokens/s"
        );
        Self { exact: None }
    }

    fn row(&mut self, precision: Precision, size: usize, result: PrecisionResult) {
        let exact = self.exact.as_ref().unwrap_or(&result);
        let pairs = result.logits.iter().zip(&exact.logits);
        say!(
            "{:<8} {:>10} {:>10.5} {:>+11.5} {:>11.4} {:>20.5} {:>15.3} {:>10.0}",
            precision.to_string(),
            bytes(size),
            result.loss,
            result.loss - exact.loss,
            result.loss.exp(),
            pairs.fold(0.0f32, |m, (a, b)| m.max((a - b).abs())),
            exact.logits.iter().fold(0.0f32, |m, v| m.max(v.abs())),
            result.tokens_per_second
        );
        self.exact.get_or_insert(result);
    }
}

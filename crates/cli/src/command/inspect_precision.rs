//! `march inspect precision`: what weights in fewer bits change.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use march::checkpoint::Checkpoint;
use march::engine::{Cpu, CpuOptions, Engine, Precision, Products, Tape};
use march::model::{Batch, Model, Settings};
use march::tokenizer::Tokenizer;

use super::policy::PolicyArgs;
use crate::display::{bytes, thousands};

/// What weights in fewer bits change: the loss and the logits of a text, beside those of f32.
#[derive(Args)]
#[command(after_help = "Example:
  march inspect precision --model models/tiny-march --text book.txt

The largest logit error is the largest difference of any logit of any token from its f32 value; beside it stands the
largest f32 logit.")]
pub struct InspectPrecision {
    /// A checkpoint folder
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A text file
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// How many of its tokens to read, from its beginning
    #[arg(long, value_name = "N", default_value_t = 2048)]
    tokens: usize,
    /// Threads; 0 takes all of the machine's
    #[arg(long, default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// A flag's value.
pub fn precision(text: &str) -> Result<Precision, String> {
    text.parse().map_err(|_| "it must be `f32`, `bf16` or `int8`".to_string())
}

/// What a model says of a text.
struct Said {
    loss: f64,
    logits: Vec<f32>,
    seconds: f64,
}

impl InspectPrecision {
    /// Prints the table.
    pub fn run(self) -> anyhow::Result<()> {
        let options =
            CpuOptions { threads: self.threads, products: Products::BatchInvariant, ..Default::default() };
        let engine = Cpu::new(options).context("the engine could not start; try `--threads 1`")?;
        let checkpoint = Checkpoint::open(&self.model)?;
        let ids = self.ids(checkpoint.config().vocab_size)?;
        let exact = self.say(&engine, &checkpoint, &ids, Precision::F32)?;
        let model = Model::<Cpu>::new(checkpoint.config());
        println!("{}: {} tokens of {}", self.model.display(), thousands(ids.len()), self.text.display());
        println!(
            "{:<8} {:>10} {:>10} {:>11} {:>20} {:>15} {:>10}",
            "weights", "bytes", "loss", "change", "largest logit error", "largest logit", "tokens/s"
        );
        for weights in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let said = match weights {
                Precision::F32 => None,
                _ => Some(self.say(&engine, &checkpoint, &ids, weights)?),
            };
            let said = said.as_ref().unwrap_or(&exact);
            let pairs = said.logits.iter().zip(&exact.logits);
            println!(
                "{:<8} {:>10} {:>10.5} {:>+11.5} {:>20.5} {:>15.3} {:>10.0}",
                weights.to_string(),
                bytes(model.parameter_bytes(weights)),
                said.loss,
                said.loss - exact.loss,
                pairs.fold(0.0f32, |m, (a, b)| m.max((a - b).abs())),
                exact.logits.iter().fold(0.0f32, |m, v| m.max(v.abs())),
                ids.len() as f64 / said.seconds
            );
        }
        Ok(())
    }

    /// The first tokens of the text.
    fn ids(&self, vocabulary: usize) -> anyhow::Result<Vec<u32>> {
        let text = std::fs::read(&self.text)
            .with_context(|| format!("{}: could not read the text", self.text.display()))?;
        let mut ids = tokenizer(&self.model)?.encode(&String::from_utf8_lossy(&text))?;
        ids.truncate(self.tokens);
        if ids.len() < 2 {
            bail!("{}: {} tokens; a loss needs at least two", self.text.display(), ids.len());
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            bail!("{}: token {id} is not in the model's vocabulary of {vocabulary}", self.text.display());
        }
        Ok(ids)
    }

    fn say(
        &self,
        engine: &Cpu,
        checkpoint: &Checkpoint,
        ids: &[u32],
        weights: Precision,
    ) -> anyhow::Result<Said> {
        let (model, parameters) = Model::load_in(engine, checkpoint, weights)?;
        engine.trim();
        let policy = self.policy.over(model.policy());
        let tape = Tape::inference(engine);
        let weights = model.bind(&tape, &parameters);
        let settings = Settings { policy, recompute: false };
        let started = Instant::now();
        let hidden = model.forward(&tape, &weights, Batch::one(ids), &settings, None)?;
        let logits = engine.to_f32(model.logits(&tape, &weights, &hidden)?.value());
        let seconds = started.elapsed().as_secs_f64();
        let before = tape.slice(&hidden, 1, 0..ids.len() - 1)?;
        let loss = model.loss(&tape, &weights, &before, &ids[1..], None)?;
        Ok(Said { loss: engine.to_f64(loss.value())[0], logits, seconds })
    }
}

/// The tokenizer beside a checkpoint, or bytes.
fn tokenizer(model: &Path) -> anyhow::Result<Tokenizer> {
    let path = model.join("tokenizer.json");
    if !path.is_file() {
        return Ok(Tokenizer::bytes());
    }
    let Some(path) = path.to_str() else { bail!("{}: a name that is not Unicode", path.display()) };
    Ok(Tokenizer::load(path)?)
}

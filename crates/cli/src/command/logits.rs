//! `march logits`: the logits of a checkpoint for given tokens, to compare with another implementation.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use march_lm::anchors::{Placement, Policy, Retention, Storage};
use march_lm::checkpoint::Checkpoint;
use march_lm::engine::{Precision, Products};
use march_lm::model::{Batch, Model, Settings, Trace, TraceCell, Weights};
use safetensors::tensor::{Dtype, TensorView};

use super::inspect_precision::precision;
use super::open;
use super::policy::PolicyArgs;
use crate::device::DeviceArgs;
use crate::display::out::say;
use crate::display::{Progress, thousands};
use crate::output::{Kind, Output};

/// Write the logits of given tokens to a file.
#[derive(Args)]
#[command(after_help = "Example:
  echo '[72, 101, 108, 108, 111]' > tokens.json
  march logits --model models/tiny-march --tokens tokens.json --output logits.safetensors

The file contains `logits` [tokens, vocabulary]. With --trace it also contains `boundaries` [anchors], the
number of text tokens before each anchor, and `routing_weights.<layer>` [tokens, heads, anchors], without the
null route; a weight is 0 if the anchor was not visible or not selected.")]
pub struct Logits {
    /// A checkpoint folder, or the folder of a run, whose newest checkpoint is used [default: the newest run in runs/, or
    /// the demo's model]
    #[arg(long, value_name = "DIR", default_value = open::RUNS, hide_default_value = true)]
    model: PathBuf,
    /// A JSON file with a list of token ids
    #[arg(long, value_name = "FILE.json")]
    tokens: PathBuf,
    /// The safetensors file to write
    #[arg(long, value_name = "FILE.safetensors")]
    output: PathBuf,
    /// Read one token at a time through the memory, as generation does
    #[arg(long)]
    decode: bool,
    /// Also write which anchors each token read
    #[arg(long)]
    trace: bool,
    /// Precision of the weights: f32, bf16, int8 with one scale per row, or q8 and q4 with one per 32 numbers of a row
    #[arg(long, value_name = "f32|bf16|int8|q8|q4", default_value = "f32", value_parser = precision)]
    weights: Precision,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    policy: PolicyArgs,
}

impl Logits {
    /// Computes and writes the logits.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.model = open::chosen(&self.model)?;
        let device = self.device.open(Products::BatchInvariant)?;
        let ids = read_tokens(&self.tokens)?;
        let output = Output::check(&self.output, Kind::Logits, &[&self.model, &self.tokens])?;
        let started = Instant::now();
        let checkpoint = Checkpoint::open(&open::newest(&self.model))?;
        let (model, parameters) = Model::load_in(&device, &checkpoint, self.weights)?;
        device.trim();
        let loaded = started.elapsed().as_secs_f64();
        let policy = self.policy.over(model.policy());
        model.check_policy(&policy)?;
        if self.trace && policy.interval.is_none() {
            bail!("--trace: a model of type `{}` does not route", model.config().mixer.model_type());
        }
        let trace = self.trace.then(TraceCell::default);
        let started = Instant::now();
        let run = Run { model: &model, weights: parameters.into(), ids: &ids, policy: &policy };
        let (logits, boundaries) = run.compute(self.decode, trace.as_ref())?;
        let seconds = started.elapsed().as_secs_f64();
        device.check()?;
        open::check_finite(&logits, model.config().vocab_size)?;
        let mut tensors = vec![floats("logits".into(), &[ids.len(), model.config().vocab_size], &logits)];
        if let Some(trace) = &trace {
            tensors.extend(run.traced(&trace.lock().unwrap(), &boundaries));
        }
        output.write(&file(&tensors)?)?;
        say!(
            "{}: {} tokens × {} logits; loaded in {loaded:.2} s, computed in {seconds:.2} s ({:.0} tokens/s)",
            output.path().display(),
            thousands(ids.len()),
            thousands(model.config().vocab_size),
            ids.len() as f64 / seconds
        );
        Ok(())
    }
}

/// Reads the ids of a JSON list.
fn read_tokens(path: &Path) -> anyhow::Result<Vec<u32>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("{}: could not read", path.display()))?;
    let what = "a list of token ids is expected, such as [72, 101, 108]";
    let value: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("{}: not JSON; {what}", path.display()))?;
    let Some(list) = value.as_array() else { bail!("{}: not a list; {what}", path.display()) };
    let mut ids = Vec::with_capacity(list.len());
    for (i, id) in list.iter().enumerate() {
        match id.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => ids.push(id),
            None => bail!("{}: entry {i} is {id}; {what}", path.display()),
        }
    }
    if ids.is_empty() {
        bail!("{}: the list is empty; {what}", path.display());
    }
    Ok(ids)
}

struct Run<'a> {
    model: &'a Model,
    weights: Weights,
    ids: &'a [u32],
    policy: &'a Policy,
}

/// A tensor to write: name, type, shape, bytes.
type Out = (String, Dtype, Vec<usize>, Vec<u8>);

impl Run<'_> {
    /// The logits, and the number of text tokens before each anchor. Without --decode all tokens are read at once: as
    /// in training, or through a bank if the policy requires one.
    fn compute(&self, decode: bool, trace: Option<&TraceCell>) -> anyhow::Result<(Vec<f32>, Vec<usize>)> {
        let Policy { interval, retention, placement, storage, .. } = *self.policy;
        let of_a_bank = matches!(retention, Retention::Budget(_))
            || placement != Placement::default()
            || storage != Storage::default();
        if decode || of_a_bank {
            return self.extend(if decode { 1 } else { self.ids.len() }, trace);
        }
        let settings = Settings { policy: self.policy.clone(), ..Default::default() };
        let hidden = self.model.forward(&self.weights, Batch::one(self.ids), &settings, trace)?;
        let logits = self.model.logits(&self.weights, &hidden)?;
        let anchors = interval.map_or(0, |interval| self.ids.len() / interval);
        let boundaries = (1..=anchors).map(|m| m * interval.unwrap_or_default()).collect();
        Ok((logits.to_f32(), boundaries))
    }

    /// The logits and anchor positions computed through a bank, `size` tokens at a time.
    fn extend(&self, size: usize, trace: Option<&TraceCell>) -> anyhow::Result<(Vec<f32>, Vec<usize>)> {
        let mut bank = self.model.bank(self.policy.clone())?;
        bank.record(true)?;
        let mut all = Vec::with_capacity(self.ids.len() * self.model.config().vocab_size);
        let mut progress = Progress::new("decoded", "tokens", self.ids.len());
        for ids in self.ids.chunks(size) {
            let hidden = self.model.extend(&self.weights, Batch::one(ids), &mut [&mut bank], trace)?;
            all.extend(self.model.logits(&self.weights, &hidden)?.to_f32());
            progress.at(bank.timeline().position);
        }
        progress.finish();
        Ok((all, bank.recording().unwrap_or_default().boundaries))
    }

    /// The routing weights and boundaries.
    fn traced(&self, trace: &Trace, boundaries: &[usize]) -> Vec<Out> {
        let (tokens, anchors) = (self.ids.len(), boundaries.len());
        let layers = self.model.config().num_hidden_layers;
        let mut list: Vec<Out> = (0..layers)
            .map(|layer| {
                let (heads, weights) = trace.weights(layer, tokens, anchors);
                floats(format!("routing_weights.{layer}"), &[tokens, heads, anchors], &weights)
            })
            .collect();
        let bytes = boundaries.iter().flat_map(|&b| (b as i64).to_le_bytes()).collect();
        list.push(("boundaries".into(), Dtype::I64, vec![anchors], bytes));
        list
    }
}

fn floats(name: String, shape: &[usize], numbers: &[f32]) -> Out {
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    (name, Dtype::F32, shape.to_vec(), bytes)
}

/// The bytes of a safetensors file.
fn file(tensors: &[Out]) -> anyhow::Result<Vec<u8>> {
    let mut views = Vec::with_capacity(tensors.len());
    for (name, dtype, shape, bytes) in tensors {
        views.push((name.clone(), TensorView::new(*dtype, shape.clone(), bytes)?));
    }
    Ok(safetensors::serialize(views, None)?)
}

//! `march bench`: the speed of a model on this machine, and its share of what the machine can do.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use march_lm::Config;
use march_lm::checkpoint::Checkpoint;
use march_lm::engine::{Cpu, CpuOptions, Device, Precision, Products, Tensor};
use march_lm::generate::Inference;
use march_lm::memory::StateBank;
use march_lm::model::{Model, Parameters, Part, Weights};
use serde_json::{Value, json};

use super::inspect_precision::precision;
use super::{doctor, open};
use crate::display::out::{note, say};
use crate::display::{Progress, bytes, thousands};
use crate::{interrupt, machine, number};

/// Measure how fast a model reads and writes on this machine, as shares of what the machine can do.
#[derive(Args)]
#[command(after_help = "Examples:
  march bench --model models/tiny-march
  march bench --model qwen3_5/0_8b --weights q8 --threads 2
  march bench --model SmolLM2-135M-Instruct.Q4_1.gguf --weights q4 --json

A preset has random weights, on which no speed depends. Token ids are random too. Every figure is the best of several
runs; end other programs first. Prefill is compared with the most operations that the processor can do from registers:
on integers for q8 and q4, else on f32. Decoding is compared with reading the weights from memory once for each token,
or once for all texts together; where the weights stay in the caches, the share may be above 100 %. The peak memory
includes a mapped file, and for a preset the making of its weights.")]
pub struct Bench {
    /// A checkpoint folder, the folder of a run, whose newest checkpoint is used, a GGUF file, or the name of a preset
    /// [default: the newest run in runs/, or the demo's model, or `diary`]
    #[arg(long, value_name = "DIR|FILE|PRESET", default_value = open::RUNS, hide_default_value = true)]
    model: PathBuf,
    /// Precision of the weights: f32, bf16, int8 with one scale per row, or q8 and q4 with one per 32 numbers of a row,
    /// which are multiplied in integers [default: as they are stored; f32 for a preset]
    #[arg(long, value_name = "f32|bf16|int8|q8|q4", value_parser = precision)]
    weights: Option<Precision>,
    /// Lengths of the prompts, in tokens
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', default_value = "512,2048", value_parser = number::length)]
    lengths: Vec<usize>,
    /// Number of texts that are decoded together
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = streams)]
    streams: usize,
    /// Time for each measurement, in seconds; at least one run is measured
    #[arg(long, value_name = "N", default_value_t = 5.0, value_parser = number::positive)]
    seconds: f64,
    /// Number of threads; 0 uses all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

/// Tokens read before each measurement of decoding, and before everything else, to warm up.
const BEGINNING: usize = 64;

/// Tokens that a text decodes in one run.
const RUN: usize = 32;

/// The most runs of a measurement: more of them do not change the best.
const MOST_RUNS: usize = 50;

/// The number of texts in one step.
fn streams(text: &str) -> Result<usize, String> {
    number::within(text, 1, 256)
}

/// Random ids, the same in every run.
fn random(count: usize, vocabulary: usize) -> Vec<u32> {
    let number = |i: usize| (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    (0..count).map(|i| (number(i) % vocabulary as u64) as u32).collect()
}

impl Bench {
    /// Measures, then prints a table or JSON.
    pub fn run(mut self) -> anyhow::Result<()> {
        let preset = Config::presets().any(|preset| self.model.to_str() == Some(preset));
        if !preset {
            self.model = open::chosen(&self.model)?;
        }
        let products = Products::BatchInvariant;
        let device = Device::cpu(CpuOptions { threads: self.threads, products, ..Default::default() })
            .context("the engine could not start; try `--threads 1`")?;
        interrupt::listen("stopping after this measurement")?;
        let (model, parameters, weights) = if preset { self.random(&device)? } else { self.load(&device)? };
        device.trim();
        let runner = Runner {
            call: Inference::new(&model, &parameters).call_tokens(),
            weights: parameters.into(),
            progress: Progress::new("measuring", "", 0),
            seconds: self.seconds,
            model,
        };
        self.measure(runner, &device, weights)
    }

    /// The model of a checkpoint.
    fn load(&self, device: &Device) -> anyhow::Result<(Model, Parameters, Precision)> {
        let checkpoint = Checkpoint::open(&open::newest(&self.model))?;
        let weights = self.weights.unwrap_or_else(|| checkpoint.precision(device));
        let (model, parameters) = Model::load_in(device, &checkpoint, weights)?;
        Ok((model, parameters, weights))
    }

    /// The model of a preset with random weights, which are made one tensor at a time.
    fn random(&self, device: &Device) -> anyhow::Result<(Model, Parameters, Precision)> {
        let name = self.model.to_str().unwrap_or_default();
        let model = Model::new(&Config::load(name)?.model);
        let weights = self.weights.unwrap_or(Precision::F32);
        let mut parameters = Vec::with_capacity(model.layout().len());
        let mut progress = Progress::new("making", "weights", model.parameter_count());
        let mut done = 0;
        for (i, spec) in model.layout().iter().enumerate() {
            let tensor = Tensor::from_slice(&model.initial(i, 0), &spec.shape, device)?;
            let plain = weights == Precision::F32 || !spec.is_matrix();
            parameters.push(if plain { tensor } else { tensor.pack(weights)? });
            device.trim();
            done += spec.count();
            progress.at(done);
            stop_if_asked(&progress);
        }
        progress.finish();
        Ok((model, parameters, weights))
    }

    fn measure(&self, mut runner: Runner, device: &Device, weights: Precision) -> anyhow::Result<()> {
        let cpu: &Cpu = device.backend().context("bench measures the processor")?;
        let beginning = runner.prefill(BEGINNING)?.0;
        let mut prefill = Vec::with_capacity(self.lengths.len());
        for &tokens in &self.lengths {
            let seconds = runner
                .best(&format!("prefill of {}", thousands(tokens)), |runner| Ok(runner.prefill(tokens)?.1))?;
            prefill.push((tokens, tokens as f64 / seconds, runner.operations(tokens) / seconds / 1e9));
        }
        let step = runner.decode(&beginning, 1)?;
        let peak_one = machine::peak();
        let steps = runner.decode(&beginning, self.streams)?;
        let peak_all = machine::peak();
        runner.progress.clear();

        // The machine last, because its arrays count in the peak memory.
        device.trim();
        let (limits, scatter) = doctor::measure(cpu);
        let integers = matches!(weights, Precision::Q8 | Precision::Q4);
        let (peak, instructions, kind) = match integers.then(|| cpu.path().peak_gops(cpu)).flatten() {
            Some(peak) => (peak, cpu.path().name(), "integers"),
            None => (limits.peak_gflops, limits.instructions.name(), "f32"),
        };
        let (model, size) = (&runner.model, runner.bytes_of_a_step(weights) as f64 / 1e9);
        let decoding = |streams: usize, step: f64| (streams as f64 / step, size / step);
        let (one, all) = (decoding(1, step), decoding(self.streams, steps));
        if self.json {
            let part = |(rate, read): (f64, f64)| json!({ "tokens_per_second": rate, "read_gbs": read, "share": read / limits.read_gbs });
            let prefill: Vec<Value> = prefill
                .iter()
                .map(|(tokens, rate, gops)| {
                    json!({ "tokens": tokens, "tokens_per_second": rate, "gops": gops, "share": gops / peak })
                })
                .collect();
            let report = json!({
                "march": format!("{} ({})", env!("CARGO_PKG_VERSION"), machine::profile()),
                "model": self.model.display().to_string(),
                "parameters": model.parameter_count(),
                "weights": weights.to_string(),
                "weights_bytes": model.parameter_bytes(weights),
                "threads": cpu.threads(),
                "machine": {
                    "peak_gops": peak, "numbers": kind, "instructions": instructions, "read_gbs": limits.read_gbs,
                    "busy": scatter > doctor::STEADY,
                },
                "prefill": prefill,
                "decode": part(one),
                "streams": { "texts": self.streams, "sum": part(all), "times_one": all.0 / one.0 },
                "peak_bytes": { "one": peak_one, "streams": peak_all },
            });
            say!("{}", serde_json::to_string_pretty(&report)?);
            return Ok(());
        }
        say!(
            "{}: {} parameters, {} in {weights}; {} threads",
            self.model.display(),
            thousands(model.parameter_count()),
            bytes(model.parameter_bytes(weights)),
            cpu.threads()
        );
        say!(
            "machine: {peak:.0} G operations/s on {kind} ({instructions}), {:.1} GB/s read",
            limits.read_gbs
        );
        say!("\n{:<20} {:>10} {:>18} {:>8}", "", "tokens/s", "", "share");
        let row = |name: &str, rate: f64, used: String, share: f64| {
            say!("{name:<20} {rate:>10.1} {used:>18} {:>6.0} %", 100.0 * share);
        };
        for (tokens, rate, gops) in prefill {
            row(&format!("prefill of {}", thousands(tokens)), rate, format!("{gops:.0} G/s"), gops / peak);
        }
        let read = |(rate, read): (f64, f64), name: &str| {
            row(name, rate, format!("{read:.1} GB/s"), read / limits.read_gbs);
        };
        read(one, "decoding");
        read(all, &format!("{} texts, sum", self.streams));
        let memory = |peak: Option<usize>| peak.map_or("unknown on this system".into(), bytes);
        say!("\npeak memory {} with one text, {} with {}", memory(peak_one), memory(peak_all), self.streams);
        if scatter > doctor::STEADY {
            note!(
                "the machine is busy: its limits differ by {:.0} % from one measurement to the next; end other programs, \
                 then measure again",
                100.0 * scatter
            );
        }
        Ok(())
    }
}

/// Ends the program if Ctrl-C was pressed.
fn stop_if_asked(progress: &Progress) {
    if interrupt::asked() {
        progress.clear();
        interrupt::leave();
    }
}

/// A model whose speed is measured.
struct Runner {
    model: Model,
    weights: Weights,
    /// Tokens of a prompt in one call.
    call: usize,
    progress: Progress,
    seconds: f64,
}

impl Runner {
    /// Reads a prompt, and computes the logits after it; also the seconds that it took.
    fn prefill(&self, tokens: usize) -> anyhow::Result<(StateBank, f64)> {
        let ids = random(tokens, self.model.config().vocab_size);
        let mut bank = self.model.bank(self.model.policy())?;
        let started = Instant::now();
        let mut last = None;
        for ids in ids.chunks(self.call) {
            let hidden = self.model.step(&self.weights, &mut [Part::new(ids, &mut bank)])?;
            last = Some(hidden.slice(1, ids.len() - 1..ids.len())?);
            stop_if_asked(&self.progress);
        }
        if let Some(last) = last {
            std::hint::black_box(self.model.logits(&self.weights, &last)?);
        }
        Ok((bank, started.elapsed().as_secs_f64()))
    }

    /// Seconds of a step in which `streams` texts decode one token each: the mean of a run, the best of all runs.
    fn decode(&mut self, beginning: &StateBank, streams: usize) -> anyhow::Result<f64> {
        let ids = random(RUN, self.model.config().vocab_size);
        let name = if streams == 1 { "decoding".into() } else { format!("decoding {streams} texts") };
        self.best(&name, |runner| {
            let mut banks = vec![beginning.clone(); streams];
            let started = Instant::now();
            for id in ids.chunks(1) {
                let mut parts: Vec<_> = banks.iter_mut().map(|bank| Part::new(id, bank)).collect();
                let hidden = runner.model.step(&runner.weights, &mut parts)?;
                std::hint::black_box(runner.model.logits(&runner.weights, &hidden)?);
                stop_if_asked(&runner.progress);
            }
            Ok(started.elapsed().as_secs_f64() / RUN as f64)
        })
    }

    /// The fewest seconds that `run` says, of runs until the time is over.
    fn best(
        &mut self,
        name: &str,
        mut run: impl FnMut(&mut Self) -> anyhow::Result<f64>,
    ) -> anyhow::Result<f64> {
        let (started, mut shortest) = (Instant::now(), f64::INFINITY);
        for runs in 0..MOST_RUNS {
            if runs > 0 && started.elapsed().as_secs_f64() >= self.seconds {
                break;
            }
            self.progress.show(|_| format!("measuring {name}, run {}", runs + 1));
            shortest = shortest.min(run(self)?);
        }
        Ok(shortest)
    }

    /// Operations of a prompt, whose logits are computed only after its last token.
    fn operations(&self, tokens: usize) -> f64 {
        let config = self.model.config();
        let head = 2.0 * config.vocab_size as f64 * config.hidden_size as f64;
        self.model.work(tokens, &self.model.policy()) - head * (tokens - 1) as f64
    }

    /// Bytes of the weights that a step reads: all but an embedding table that is not also the head.
    fn bytes_of_a_step(&self, weights: Precision) -> usize {
        let tied = self.model.config().tie_word_embeddings;
        let table = if tied { 0 } else { self.model.layout()[0].bytes(weights) };
        self.model.parameter_bytes(weights) - table
    }
}

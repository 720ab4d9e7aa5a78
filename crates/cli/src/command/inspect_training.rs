//! `march inspect training`: the resources that a run needs, before it starts.

use clap::Args;
use march_lm::Config;
use march_lm::engine::{CpuOptions, Device};
use march_lm::model::{Model, Settings};
use march_lm::train::{Only, StepMemory};
use serde_json::{Value, json};

use crate::display::out::say;
use crate::display::{bytes, figure, flops, thousands};
use crate::number;

/// The work of a run, and the memory and speed that it needs per process.
#[derive(Args)]
#[command(after_help = "Examples:
  march inspect training paper/march
  march inspect training paper/march --processes 64,256 --days 14
  march inspect training paper/march --json

Memory is measured: a few layers run forward on a short text, and what they keep is scaled to the whole model.
Work counts the matrix products of a step: the forward pass, and twice as much for the backward pass;
activation recomputation adds another forward pass.")]
pub struct InspectTraining {
    /// The name of a preset, or a TOML file
    #[arg(value_name = "PRESET|FILE")]
    config: String,
    /// Override a key; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    settings: Vec<String>,
    /// Numbers of processes to compare
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [1, 16, 64, 256],
        value_parser = number::count::<usize>)]
    processes: Vec<usize>,
    /// Maximum duration of the run in days
    #[arg(long, value_name = "N", default_value_t = 30.0, value_parser = number::positive)]
    days: f64,
    /// Print the same as JSON, in FLOP and bytes; numbers of processes that a step is too small for are left out
    #[arg(long)]
    json: bool,
}

/// What one of several processes needs.
struct Share {
    processes: usize,
    sequences: usize,
    tokens_per_second: f64,
    /// Bytes without and with activation recomputation.
    memory: [usize; 2],
}

impl InspectTraining {
    /// Prints the tables.
    pub fn run(self) -> anyhow::Result<()> {
        let Config { model: config, data, train } = Config::load_with(&self.config, &self.settings)?;
        let cpu = Device::cpu(CpuOptions::default())?;
        let model = Model::new(&config);
        let policy = config.policy().unwrap_or_default();
        let length = data.sequence_length;
        let rows = train.tokens_per_step / length;
        let tokens = train.steps as f64 * train.tokens_per_step as f64;
        let forward = model.work(length, &policy) / length as f64;
        let seconds = self.days * 86_400.0;
        let settings = Settings { policy, ..Default::default() };
        let memory = StepMemory::measure(&cpu, &config, &settings, length, Only::All)?;
        // Nothing for more processes than a step has sequences.
        let share = |&processes: &usize| {
            let sequences = (processes <= rows).then(|| rows.div_ceil(processes))?;
            let memory = memory.of(sequences.min(train.micro_batch), processes);
            Some(Share {
                processes,
                sequences,
                tokens_per_second: tokens / seconds * sequences as f64 / rows as f64,
                memory: [memory.activations, memory.recomputed].map(|more| memory.parameters + more),
            })
        };
        if self.json {
            let shares = self.processes.iter().filter_map(share).map(|share| {
                json!({
                    "processes": share.processes,
                    "sequences_per_step": share.sequences,
                    "tokens_per_second": share.tokens_per_second,
                    "flop_per_second": 3.0 * forward * share.tokens_per_second,
                    "bytes": share.memory[0],
                    "bytes_with_recomputation": share.memory[1],
                })
            });
            let report = json!({
                "config": self.config,
                "model_type": config.mixer.model_type(),
                "parameters": model.parameter_count(),
                "steps": train.steps,
                "tokens_per_step": train.tokens_per_step,
                "sequence_length": length,
                "tokens": tokens,
                "flop_per_token": { "forward": forward, "training": 3.0 * forward },
                "flop": 3.0 * forward * tokens,
                "days": self.days,
                "tokens_per_second": tokens / seconds,
                "per_process": shares.collect::<Value>(),
            });
            say!("{}", serde_json::to_string_pretty(&report)?);
            return Ok(());
        }
        say!(
            "{}: {}, {} parameters",
            self.config,
            config.mixer.model_type(),
            thousands(model.parameter_count())
        );
        say!(
            "  {} steps of {} tokens (sequences of {}): {:.3e} tokens",
            thousands(train.steps as usize),
            thousands(train.tokens_per_step),
            thousands(length),
            tokens
        );
        say!(
            "  per token: {} MFLOP forward, {} MFLOP in training; whole run: {:.3e} FLOP",
            figure(forward / 1e6),
            figure(3.0 * forward / 1e6),
            3.0 * forward * tokens
        );
        say!(
            "  in {} days: {} tokens/s, {} ({} with recomputation)\n",
            self.days,
            figure(tokens / seconds),
            flops(3.0 * forward * tokens / seconds),
            flops(4.0 * forward * tokens / seconds)
        );
        say!("                                   -------------------- per process ---------------------");
        say!("  processes   sequences per step   tokens/s          work    memory     with recomputation");
        for processes in &self.processes {
            let Some(share) = share(processes) else {
                say!("  {processes:>9}  a step has only {rows} sequences");
                continue;
            };
            say!(
                "  {processes:>9}  {:>19}  {:>9}  {:>12}  {:>8}  {:>21}",
                share.sequences,
                figure(share.tokens_per_second),
                flops(3.0 * forward * share.tokens_per_second),
                bytes(share.memory[0]),
                bytes(share.memory[1]),
            );
        }
        Ok(())
    }
}

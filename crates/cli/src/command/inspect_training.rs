//! `march inspect training`: the resources that a run needs, before it starts.

use clap::Args;
use march::Config;
use march::engine::{Cpu, CpuOptions};
use march::model::{Model, Settings};
use march::train::StepMemory;

use crate::display::out::say;
use crate::display::{bytes, figure, flops, thousands};
use crate::number;

/// The work of a run, and the memory and speed that it needs per process.
#[derive(Args)]
#[command(after_help = "Examples:
  march inspect training paper/march
  march inspect training paper/march --processes 64,256 --days 14

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
}

impl InspectTraining {
    /// Prints the tables.
    pub fn run(self) -> anyhow::Result<()> {
        let Config { model: config, data, train } = Config::load_with(&self.config, &self.settings)?;
        let engine = Cpu::new(CpuOptions::default())?;
        let model: Model<Cpu> = Model::new(&config);
        let policy = config.policy().unwrap_or_default();
        let length = data.sequence_length;
        let rows = train.tokens_per_step / length;
        let tokens = train.steps as f64 * train.tokens_per_step as f64;
        let forward = model.work(length, &policy) / length as f64;
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
        let seconds = self.days * 86_400.0;
        say!(
            "  in {} days: {} tokens/s, {} ({} with recomputation)\n",
            self.days,
            figure(tokens / seconds),
            flops(3.0 * forward * tokens / seconds),
            flops(4.0 * forward * tokens / seconds)
        );
        say!("                                   -------------------- per process ---------------------");
        say!("  processes   sequences per step   tokens/s          work    memory     with recomputation");
        let settings = Settings { policy: policy.clone(), recompute: false };
        let memory = StepMemory::measure(&engine, &config, &settings, length)?;
        for &processes in &self.processes {
            if processes > rows {
                say!("  {processes:>9}  a step has only {rows} sequences");
                continue;
            }
            let share = rows.div_ceil(processes);
            let memory = memory.of(share.min(train.micro_batch), processes);
            let speed = tokens / seconds * share as f64 / rows as f64;
            say!(
                "  {processes:>9}  {share:>19}  {:>9}  {:>12}  {:>8}  {:>21}",
                figure(speed),
                flops(3.0 * forward * speed),
                bytes(memory.parameters + memory.activations),
                bytes(memory.parameters + memory.recomputed),
            );
        }
        Ok(())
    }
}

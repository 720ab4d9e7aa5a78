//! `march init`: a checkpoint with random initial weights.

use std::path::PathBuf;

use clap::Args;
use march_lm::Config;
use march_lm::checkpoint::{NewFolder, SHARD_BYTES, Values};
use march_lm::engine::{CpuOptions, Device, Precision, Tensor};
use march_lm::model::Model;

use super::convert::stored;
use crate::display::out::say;
use crate::display::{Progress, bytes, thousands};

/// Write a checkpoint with random initial weights, determined by the seed.
#[derive(Args)]
#[command(after_help = "Examples:
  march init --config tiny/march --output models/tiny-march
  march init --config my-model.toml --seed 7 --output models/mine

A configuration is a TOML file or the name of a preset; `march inspect model --list` shows the presets.")]
pub struct Init {
    /// A TOML file, or the name of a preset
    #[arg(long, value_name = "FILE|PRESET")]
    config: String,
    /// The checkpoint folder to create; it must not exist yet
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Precision of the matrices in the file: f32, bf16, or q8 and q4 with one scale per 32 numbers of a row
    #[arg(long, value_name = "f32|bf16|q8|q4", default_value_t, value_parser = stored)]
    weights: Precision,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl Init {
    /// Draws the weights, one tensor at a time, and writes them.
    pub fn run(self) -> anyhow::Result<()> {
        let config = Config::load(&self.config)?.model;
        let model = Model::new(&config);
        let count = model.parameter_count();
        let mut progress = Progress::new("writing", "weights", count);
        let mut done = 0;
        let device = Device::cpu(CpuOptions::default())?;
        let new = NewFolder::create(&self.output)?;
        new.model(&config, model.layout(), SHARD_BYTES, self.weights, |i| {
            let values = model.initial(i, self.seed);
            done += values.len();
            progress.at(done);
            match (self.weights, &model.layout()[i].shape[..]) {
                (Precision::Q8 | Precision::Q4, &[rows, width]) if model.layout()[i].is_matrix() => {
                    device.trim();
                    let read = |r: usize, to: &mut [f32]| to.copy_from_slice(&values[r * width..][..width]);
                    Ok(Values::Tensor(Tensor::pack_rows([rows, width], self.weights, &device, &read)?))
                }
                _ => Ok(Values::Numbers(values)),
            }
        })?;
        new.finish()?;
        let time = progress.finish();
        say!(
            "{}: {} parameters, {}, in {:.1} s",
            self.output.display(),
            thousands(count),
            bytes(model.parameter_bytes(self.weights)),
            time.as_secs_f64()
        );
        Ok(())
    }
}

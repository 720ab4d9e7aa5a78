//! `march init`: a checkpoint with random initial weights.

use std::path::PathBuf;

use clap::Args;
use march_lm::Config;
use march_lm::checkpoint::{SHARD_BYTES, save};
use march_lm::model::Model;

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
        save(&self.output, &config, model.layout(), SHARD_BYTES, |i| {
            let values = model.initial(i, self.seed);
            done += values.len();
            progress.at(done);
            Ok(values)
        })?;
        let time = progress.finish();
        say!(
            "{}: {} parameters, {}, in {:.1} s",
            self.output.display(),
            thousands(count),
            bytes(4 * count),
            time.as_secs_f64()
        );
        Ok(())
    }
}

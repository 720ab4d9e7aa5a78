//! `march upcycle`: a Gated DeltaNet, or a model with layers of it, becomes a MARCH.

use std::path::PathBuf;

use clap::Args;
use march_lm::anchors::{Policy, Storage};
use march_lm::checkpoint::{Checkpoint, newest};
use march_lm::model::Model;
use march_lm::run::Upcycle;

use crate::display::out::say;
use crate::display::{Progress, bytes, thousands};
use crate::number;

/// Give a trained model with layers of Gated DeltaNet anchors and routing, ready to be trained.
#[derive(Args)]
#[command(after_help = "Examples:
  march upcycle --model Qwen3.5-0.8B --output qwen-march
  march upcycle --model Qwen3.5-0.8B --output qwen-march --layers 'every gated_delta_net' --top-k 4
  march upcycle --model runs/gdn --output gdn-march --layers 1,3 --anchor-interval 256
  march train --init-from qwen-march --data texts --only routing

The new model has the old weights, and a null route that takes nearly all of the routing weight at first, so it computes
nearly what the old one did. `march train --only routing` trains the new parameters alone; without the option, everything
is trained. Every state that is kept is as large as the layer's state: the command prints what that costs. `--storage`
and the interval can be changed later, when the model is used (`--policy` of other commands).")]
pub struct UpcycleModel {
    /// A checkpoint folder, a GGUF file, or the folder of a run, whose newest checkpoint is used
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// The checkpoint folder to create; it must not exist yet
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// The layers of Gated DeltaNet that get anchors: `every 2nd gated_delta_net`, `every gated_delta_net`, or numbers with
    /// commas between them, counted from 0
    #[arg(long, value_name = "LAYERS", default_value_t = Upcycle::default().layers)]
    layers: String,
    /// Text tokens between two anchors
    #[arg(long, value_name = "C", default_value_t = Upcycle::default().interval, value_parser = number::count::<usize>)]
    anchor_interval: usize,
    /// Width of routing queries and keys
    #[arg(long, value_name = "D", default_value_t = Upcycle::default().routing_dim, value_parser = number::count::<usize>)]
    routing_dim: usize,
    /// Anchors that a token reads [default: all]
    #[arg(long, value_name = "K", value_parser = number::count::<usize>)]
    top_k: Option<usize>,
    /// Initial bias of the null route [default: 5 + ln 32, or 5 + ln K]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    null_bias: Option<f64>,
    /// Precision of kept states: f32, bf16 or int8
    #[arg(long, default_value_t = Upcycle::default().storage)]
    storage: Storage,
    /// Seed of the new parameters
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl UpcycleModel {
    /// Writes the new model and prints what its anchors cost.
    pub fn run(self) -> anyhow::Result<()> {
        let upcycle = Upcycle {
            layers: self.layers,
            interval: self.anchor_interval,
            routing_dim: self.routing_dim,
            top_k: self.top_k,
            null_bias: self.null_bias,
            storage: self.storage,
            seed: self.seed,
        };
        let folder = newest(&self.model);
        let checkpoint = Checkpoint::open(&folder)?;
        let (config, layers) = upcycle.config(checkpoint.config())?;
        let (old, new) = (Model::new(checkpoint.config()), Model::new(&config));
        let count = new.parameter_count();
        let mut progress = Progress::new("writing", "weights", count);
        upcycle.write(&checkpoint, &folder, &self.output, &mut |done| progress.at(done))?;
        progress.finish();
        say!(
            "{}: {} parameters, {} more than before; anchors in {} of {} layers: {}",
            self.output.display(),
            thousands(count),
            thousands(count - old.parameter_count()),
            layers.len(),
            config.num_hidden_layers,
            layers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
        );
        say!("\none anchor every {} tokens, in all layers together", thousands(upcycle.interval));
        say!("{:<10}{:>14}{:>28}", "storage", "one anchor", "per 1,000 tokens of text");
        for storage in [Storage::F32, Storage::Bf16, Storage::Int8] {
            let policy = Policy { storage, ..new.policy() };
            let anchor = new.anchor_bytes(&policy);
            let share = (anchor as f64 * 1000.0 / upcycle.interval as f64) as usize;
            let chosen = if storage == upcycle.storage { "  (chosen)" } else { "" };
            say!("{:<10}{:>14}{:>28}{chosen}", storage.to_string(), bytes(anchor), bytes(share));
        }
        say!("\nnext: march train --init-from {} --data TEXT --only routing", self.output.display());
        Ok(())
    }
}

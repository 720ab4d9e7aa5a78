//! Upcycling: a trained model whose layers of Gated DeltaNet become layers of MARCH.
//!
//! The new model has the old weights and new routing parameters, with a null that takes nearly all of the routing weight
//! at first, so it computes nearly what the old one did. Training, of the routing alone or of everything, goes on from
//! there.

use std::path::Path;

use march_engine::{Device, Precision};

use super::start::MARGIN;
use crate::anchors::{MemoryConfig, Storage};
use crate::checkpoint::{Checkpoint, NewFolder, SHARD_BYTES};
use crate::error::{Error, Result};
use crate::model::mixer::hybrid::HybridConfig;
use crate::model::mixer::march::RoutingConfig;
use crate::model::{Model, ModelConfig};

/// How a model gets anchors.
#[derive(Clone, Debug, PartialEq)]
pub struct Upcycle {
    /// The layers: `every 2nd gated_delta_net`, `every gated_delta_net`, or numbers with commas between them, from 0.
    pub layers: String,
    /// C, the number of text tokens between two anchors.
    pub interval: usize,
    /// d_r, the width of routing queries and keys.
    pub routing_dim: usize,
    /// K, the number of anchors that a token reads; `None` for all.
    pub top_k: Option<usize>,
    /// The initial bias of the null; `None` for one with which 32 anchors, or the K best, take 0.7 % of the weight.
    pub null_bias: Option<f64>,
    /// The precision of kept states.
    pub storage: Storage,
    /// Seed of the new parameters.
    pub seed: u64,
}

/// An interval and a precision with which the anchors of large states stay affordable.
impl Default for Upcycle {
    fn default() -> Self {
        Self {
            layers: "every 2nd gated_delta_net".into(),
            interval: 1024,
            routing_dim: 64,
            top_k: None,
            null_bias: None,
            storage: Storage::Int8,
            seed: 0,
        }
    }
}

/// The anchors that are visible when the null's usual bias takes nearly all of the weight.
const VISIBLE: usize = 32;

impl Upcycle {
    /// The configuration of the new model, and its layers with anchors.
    pub fn config(&self, from: &ModelConfig) -> Result<(ModelConfig, Vec<usize>)> {
        let visible = self.top_k.unwrap_or(VISIBLE).max(1) as f64;
        let usual = (100.0 * (MARGIN + visible.ln())).round() / 100.0;
        let routing = RoutingConfig {
            anchor_interval: self.interval,
            routing_dim: self.routing_dim,
            routing_top_k: self.top_k,
            null_route: true,
            routing_scale: 1.0,
            null_bias_init: self.null_bias.unwrap_or(usual),
        };
        let found = HybridConfig::with_anchors(&from.mixer, from.num_hidden_layers, &self.layers, &routing);
        let (mixer, layers) =
            found.map_err(|message| Error::Request(format!("layers `{}`: {message}", self.layers)))?;
        let memory = MemoryConfig { storage: self.storage, ..MemoryConfig::default() };
        // Keys of the tool that wrote the checkpoint say nothing about this one.
        let config = ModelConfig { mixer, memory, other: Default::default(), ..from.clone() };
        config.check("the new model")?;
        Ok((config, layers))
    }

    /// Writes the new model to a folder that must not exist yet. Matrices keep their precision if that is bf16. `watch`
    /// is called with the number of parameters written so far.
    pub fn write(
        &self,
        from: &Checkpoint,
        folder: &Path,
        to: &Path,
        watch: &mut dyn FnMut(usize),
    ) -> Result<Model> {
        let (config, _) = self.config(from.config())?;
        let (old, new) = (Model::new(from.config()), Model::new(&config));
        from.check(old.layout())?;
        from.verify()?;
        let small = from.precision(&Device::reference()) != Precision::F32;
        let weights = if small { Precision::Bf16 } else { Precision::F32 };
        let out = NewFolder::create(to)?;
        let mut done = 0;
        out.model(&config, new.layout(), SHARD_BYTES, weights, |i| {
            let spec = &new.layout()[i];
            let numbers = match old.layout().iter().find(|other| other.name == spec.name) {
                Some(own) => {
                    let numbers = from.tensor(own)?.into_owned();
                    from.release(own);
                    numbers
                }
                None => new.initial(i, self.seed),
            };
            done += numbers.len();
            watch(done);
            Ok(numbers)
        })?;
        out.files_of(from, folder)?;
        out.finish()?;
        Ok(new)
    }
}

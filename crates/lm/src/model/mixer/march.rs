//! MARCH: Gated DeltaNet that can also read the states it had at earlier boundaries.
//!
//! ```text
//! A_m = S at boundary m                                       state anchor, of the same layer
//! anchor m, u_m its normalised input:  κ_m = W_κ u_m;   q_m = SiLU(W_q u_m);   o_m = A_mᵀ q_m
//! token t:  ρ_t = W_R x_t;   π_t = softmax([ρ_t·κ_m …, w_∅·x_t + b_∅])   over the anchors that it sees and the null
//! o_t = S_tᵀ q_t + Σ_m π_tm A_mᵀ q_t                          then norm, gate and W_o as for Gated DeltaNet
//! ```
//! In the first layer all anchors still have the same embedding, so their key is computed once and routing there is
//! uniform; top-K there takes the newest. Nothing reads the anchor stream after the keys of the last layer. Memory:
//! that of Gated DeltaNet, and for each kept anchor its state, its routing key and the convolution tails.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::anchored::{self, AnchoredMemory, NewAnchors, Reader, Routing};
use super::gated_delta_net::{GatedDeltaNet, GatedDeltaNetConfig};
use super::{Contradiction, Extension, Layer, Mixer, MixerConfig, MixerSpec, Streams};
use crate::anchors::{Policy, Storage};
use crate::config::{Document, keys_of};
use crate::error::Result;
use crate::memory::Memory;
use crate::model::pass::{repeat_rows, slice_rows};
use crate::model::{Builder, MixerOutput, Pass, Projection};

/// Configuration of MARCH.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MarchConfig {
    /// The recurrence.
    #[serde(flatten)]
    pub base: GatedDeltaNetConfig,
    /// The routing, which MARCH adds.
    #[serde(flatten)]
    pub routing: RoutingConfig,
}

/// The keys that MARCH adds to the configuration of Gated DeltaNet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoutingConfig {
    /// C, the number of text tokens between two anchors.
    pub anchor_interval: usize,
    /// d_r, the width of routing queries and keys.
    pub routing_dim: usize,
    /// K, the number of anchors that a token reads; `None` reads all visible anchors.
    #[serde(default)]
    pub routing_top_k: Option<usize>,
    /// Whether a token can choose to read no anchor.
    #[serde(default = "yes")]
    pub null_route: bool,
    /// Factor on every score except the null score.
    #[serde(default = "one")]
    pub routing_scale: f64,
    /// Initial value of b_∅.
    #[serde(default)]
    pub null_bias_init: f64,
}

fn yes() -> bool {
    true
}

fn one() -> f64 {
    1.0
}

impl MixerSpec for MarchConfig {
    const MODEL_TYPE: &'static str = "march";

    fn has_anchor_stream(&self) -> bool {
        true
    }

    fn read(document: &mut Document) -> Result<Self> {
        Ok(Self { base: document.keys()?, routing: document.keys()? })
    }

    fn write(&self) -> Map<String, Value> {
        let mut keys = self.base.write();
        keys.extend(keys_of(&self.routing));
        keys
    }

    fn check(&self, hidden_size: usize) -> std::result::Result<(), Contradiction> {
        let routing = &self.routing;
        if routing.anchor_interval == 0 {
            return Err(("anchor_interval", "is 0; it must be at least 1 token (the paper's is 512)".into()));
        }
        if routing.routing_dim == 0 {
            return Err(("routing_dim", "is 0; it must be at least 1 (the paper's is 64)".into()));
        }
        if routing.routing_top_k == Some(0) {
            let message = "is 0; it must be at least 1, or not be set for dense routing".into();
            return Err(("routing_top_k", message));
        }
        for (key, value) in
            [("routing_scale", routing.routing_scale), ("null_bias_init", routing.null_bias_init)]
        {
            if !value.is_finite() {
                return Err((key, format!("is {value}; it must be a finite number")));
            }
        }
        self.base.check(hidden_size)
    }

    fn policy(&self) -> Option<Policy> {
        Some(Policy {
            interval: Some(self.routing.anchor_interval),
            top_k: self.routing.routing_top_k,
            ..Policy::default()
        })
    }

    fn extension(&self) -> Option<Extension> {
        Some(Extension {
            base: MixerConfig::GatedDeltaNet(self.base.clone()),
            parameters: &[
                "model.anchor_embedding",
                "null_proj.weight",
                "null_proj.bias",
                "routing_query_proj.weight",
                "routing_key_proj.weight",
            ],
        })
    }

    /// Only the null's bias differs from a model that starts from the beginning: it takes nearly all of the routing
    /// weight, while the routing projections have their normal initial values. With projections of 0 no score would
    /// have a gradient, because that of each one contains the other as a factor.
    fn start_as_base(&mut self, null_bias: f64) -> std::result::Result<(), Contradiction> {
        if !self.routing.null_route {
            let message = "is false; a Gated DeltaNet continues as MARCH only with a null route, which at first takes \
                           nearly all of the routing weight. Set it to true";
            return Err(("null_route", message.into()));
        }
        if !null_bias.is_finite() {
            return Err(("null_bias_init", format!("is {null_bias}; it must be a finite number")));
        }
        self.routing.null_bias_init = null_bias;
        Ok(())
    }

    fn build(&self, hidden_size: usize, layer: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer> {
        let base = GatedDeltaNet::new(&self.base, hidden_size, builder);
        let RoutingConfig { routing_dim, null_route, routing_scale, null_bias_init, .. } = self.routing;
        let heads = base.value_heads;
        let null_proj =
            null_route.then(|| builder.linear_bias("null_proj", heads, hidden_size, null_bias_init));
        Box::new(March {
            base,
            layer,
            routing_dim,
            routing_scale,
            routing_query_proj: builder.linear("routing_query_proj", heads * routing_dim, hidden_size),
            routing_key_proj: builder.linear("routing_key_proj", heads * routing_dim, hidden_size),
            null_proj,
        })
    }
}

pub(super) struct March {
    pub base: GatedDeltaNet,
    layer: Layer,
    routing_dim: usize,
    routing_scale: f64,
    routing_query_proj: Projection,
    routing_key_proj: Projection,
    null_proj: Option<Projection>,
}

impl Mixer for March {
    fn memory(&self) -> Box<dyn Memory> {
        Box::new(AnchoredMemory::default())
    }

    fn output(&self) -> Projection {
        self.base.o_proj
    }

    fn forward(&self, pass: &Pass, input: &Streams, memory: &mut [&mut dyn Memory]) -> Result<Streams> {
        let base = &self.base;
        // Text: q, k, v, α and β before convolutions and activations; ρ_t = W_R x_t; n_t = w_∅·x_t + b_∅; the gate.
        let layers = (base.projections(), self.routing_query_proj, self.null_proj, base.g_proj);
        let (inputs, routing_query, null_score, gate) = pass.project(&input.text, layers)?;
        // Anchors: κ_m = W_κ u_m and, unless nothing reads the anchors after this layer, W_q u_m and the gate.
        let own = (!self.layer.ends_anchors).then_some((base.q_proj, base.g_proj));
        let anchors = input.anchors.as_ref().map(|u| pass.project(u, (self.routing_key_proj, own)));
        let (keys, own) = anchors.transpose()?.unzip();
        let keys = keys.map(|keys| repeat_rows(&keys, pass.new_anchors())).transpose()?;

        let inputs = (inputs, routing_query, null_score);
        let mixed =
            pass.each_row(inputs, memory, |(inputs, routing_query, null_score), row, mut memory| {
                // S_tᵀ q_t, and A_m = S at each boundary.
                let (query, out) = anchored::recur(base, pass, inputs, row, memory.as_deref_mut())?;
                // Σ_m π_tm A_mᵀ q_t with π_t = softmax([ρ_t·κ_m …, n_t]).
                let (routing_query, null_score) = (&routing_query, null_score.as_ref());
                let routing = Routing { query: &query, routing_query, null_score };
                let keys = keys.as_ref().map(|keys| slice_rows(keys, row.anchors.new.clone())).transpose()?;
                let new = NewAnchors { states: &out.boundary_states, keys: keys.as_ref() };
                let readout = match self.reader().historical_readout(pass, routing, new, row, memory)? {
                    Some(history) => (&out.readout + &history.readout)?,
                    None => out.readout,
                };
                Ok(MixerOutput { readout, states: Some(out.boundary_states) })
            })?;

        match (own.flatten(), &mixed.states) {
            (Some(own), Some(states)) => {
                base.gated_with_anchors(pass, (&mixed.readout, gate.as_ref()), own, states)
            }
            _ => base.gated(pass, &[&mixed.readout], &[gate.as_ref()]),
        }
    }

    /// Operations of the recurrence, and of reading anchors.
    fn work(&self, tokens: usize, policy: &Policy) -> f64 {
        self.base.recurrence_work(tokens) + anchored::read_work(&self.base, self.routing_dim, tokens, policy)
    }

    fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        anchored::memory_bytes(&self.base, self.layer, self.routing_dim, tokens, policy)
    }

    fn rollback_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        anchored::rollback_bytes(&self.base, self.layer, self.routing_dim, tokens, policy)
    }

    fn anchor_bytes(&self, storage: Storage) -> usize {
        anchored::anchor_bytes(&self.base, self.routing_dim, storage)
    }
}

impl March {
    fn reader(&self) -> Reader<'_> {
        Reader {
            base: &self.base,
            layer: self.layer,
            routing_scale: self.routing_scale,
            equal_scores: self.layer.equal_anchors,
            want_mass: false,
        }
    }
}

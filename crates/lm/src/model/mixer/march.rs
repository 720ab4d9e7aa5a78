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

use march_engine::ops::linear::Product;
use march_engine::ops::state_read::StateRead;
use march_engine::{Engine, Var};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::anchored::{self, AnchoredMemory, Reader, Routing};
use super::gated_delta_net::{GatedDeltaNet, GatedDeltaNetConfig};
use super::{AnyMixer, Contradiction, Extension, FirstInput, Layer, Mixer, MixerConfig, MixerSpec, Streams};
use crate::anchors::{Policy, Storage, Timeline};
use crate::config::{Document, keys_of};
use crate::error::Result;
use crate::model::{Builder, Init, MixerOutput, Parameter, Pass};

/// Configuration of MARCH.
#[derive(Clone, Debug, PartialEq)]
pub struct MarchConfig {
    /// The recurrence.
    pub base: GatedDeltaNetConfig,
    /// The routing, which MARCH adds.
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
    const ANCHOR_STREAM: bool = true;

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

    fn build<E: Engine>(
        &self,
        hidden_size: usize,
        layer: Layer,
        builder: &mut Builder<'_>,
    ) -> Box<dyn AnyMixer<E>> {
        let base = GatedDeltaNet::new(&self.base, hidden_size, builder);
        let RoutingConfig { routing_dim, null_route, routing_scale, null_bias_init, .. } = self.routing;
        let heads = base.value_heads;
        let null_proj = null_route.then(|| {
            let weight = builder.linear("null_proj", heads, hidden_size);
            [weight, builder.add("null_proj.bias", &[heads], Init::Constant(null_bias_init))]
        });
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

struct March {
    base: GatedDeltaNet,
    layer: Layer,
    routing_dim: usize,
    routing_scale: f64,
    routing_query_proj: Parameter,
    routing_key_proj: Parameter,
    /// Weight and bias.
    null_proj: Option<[Parameter; 2]>,
}

/// The projections of a layer.
struct LayerProjections<T> {
    /// Queries, keys, values, retention and write inputs of the text, before the convolutions.
    recurrence: [Var<T>; 5],
    routing_query: Var<T>,
    null_score: Option<Var<T>>,
    gate: Var<T>,
    /// The anchors' routing keys, if there are anchors.
    keys: Option<Var<T>>,
    /// The anchors' queries before SiLU and gates, if a later layer reads the anchors.
    anchors: Option<[Var<T>; 2]>,
}

impl March {
    /// Computes all projections as one operation.
    fn project<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        input: &Streams<E::Tensor>,
    ) -> Result<LayerProjections<E::Tensor>> {
        let mut weights = self.base.projections().to_vec();
        weights.push(self.routing_query_proj);
        let mut products: Vec<_> = (0..weights.len()).map(|i| Product::new(0, i)).collect();
        if let Some([weight, bias]) = self.null_proj {
            let bias = Some(pass.weight(bias));
            products.push(Product { bias, ..Product::new(0, weights.len()) });
            weights.push(weight);
        }
        let gate = weights.len();
        weights.push(self.base.g_proj);
        products.push(Product::new(0, gate));
        let (has_keys, goes_on) = (input.anchors.is_some(), input.anchors.is_some() && !self.layer.last());
        if has_keys {
            products.push(Product::new(1, weights.len()));
            weights.push(self.routing_key_proj);
        }
        if goes_on {
            products.extend([Product::new(1, 0), Product::new(1, gate)]);
        }
        let mut found = pass.linear_list(&input.list(), &weights, &products)?.into_iter();
        let mut next = || {
            let Some(product) = found.next() else { unreachable!("one for each product") };
            product
        };
        Ok(LayerProjections {
            recurrence: std::array::from_fn(|_| next()),
            routing_query: next(),
            null_score: self.null_proj.map(|_| next()),
            gate: next(),
            keys: has_keys.then(&mut next),
            anchors: goes_on.then(|| [next(), next()]),
        })
    }
}

impl<E: Engine> Mixer<E> for March {
    type Memory = AnchoredMemory<E>;

    fn memory(&self) -> AnchoredMemory<E> {
        AnchoredMemory::default()
    }

    fn output(&self) -> Parameter {
        self.base.o_proj
    }

    fn forward(
        &self,
        pass: &Pass<'_, '_, E>,
        input: &Streams<E::Tensor>,
        memory: &mut [&mut AnchoredMemory<E>],
    ) -> Result<Streams<E::Tensor>> {
        let base = &self.base;
        let p = self.project(pass, input)?;
        let count = pass.new_anchors();
        let keys = match &p.keys {
            Some(keys) => Some(pass.repeat_rows(keys, count)?),
            None => None,
        };
        let reader = Reader {
            base,
            layer: self.layer,
            routing_scale: self.routing_scale,
            equal_scores: self.layer.first(),
            want_mass: false,
        };
        let [q, k, v, a, b] = p.recurrence.each_ref();
        // A model without a null passes the routing query in its place, where it is ignored.
        let inputs = [q, k, v, a, b, &p.routing_query, p.null_score.as_ref().unwrap_or(&p.routing_query)];
        let has_null = p.null_score.is_some();
        let mixed = pass.each_row(inputs, memory, |pass, inputs, row, mut memory| {
            let [q, k, v, a, b, routing_query, null] = inputs;
            let boundaries = row.anchors.boundaries.first().map_or(&[][..], Vec::as_slice);
            let base_memory = memory.as_deref_mut().map(|memory| &mut memory.base);
            let (qkv, tails) = base.convolve(pass, [q, k, v], boundaries, base_memory)?;
            let [q, k, v] = qkv.each_ref();
            let recurrence = memory.as_deref_mut().map(|memory| &mut memory.base.recurrence);
            let out = base.recur(pass, [q, k, v, a, b], row, recurrence)?;
            let keys = match &keys {
                Some(keys) if !row.anchors.new.is_empty() => {
                    Some(pass.slice_rows(keys, row.anchors.new.clone())?)
                }
                _ => None,
            };
            let mut anchors = memory.map(|memory| &mut memory.anchors);
            if let Some(anchors) = &mut anchors {
                anchors.push_tails(pass.engine(), tails)?;
            }
            let routing = Routing { query: q, routing_query, null_score: has_null.then_some(null) };
            let states = &out.boundary_states;
            let readout =
                match reader.historical_readout(pass, routing, states, keys.as_ref(), row, anchors)? {
                    Some(history) => pass.tape.add(&out.readout, &history.readout)?,
                    None => out.readout,
                };
            Ok(MixerOutput { readout, states: Some(out.boundary_states) })
        })?;
        let (Some([query, gate]), Some(states)) = (&p.anchors, &mixed.states) else {
            return base.gated(pass, &[&mixed.readout], &[&p.gate]);
        };
        let query = pass.repeat_rows(&pass.tape.silu(query)?, count)?;
        let own_readout = pass.tape.state_read(StateRead { query: &query, states }, base.key_heads)?;
        let gate = pass.repeat_rows(gate, count)?;
        base.gated(pass, &[&mixed.readout, &own_readout], &[&p.gate, &gate])
    }

    /// Operations of the recurrence, and of reading anchors.
    fn work(&self, tokens: usize, policy: &Policy) -> f64 {
        self.base.recurrence_work(tokens) + anchored::read_work(&self.base, self.routing_dim, tokens, policy)
    }

    fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        anchored::memory_bytes::<E>(&self.base, self.layer, self.routing_dim, tokens, policy)
    }

    fn rollback_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        anchored::rollback_bytes(&self.base, self.layer, self.routing_dim, tokens, policy)
    }

    fn anchor_bytes(&self, storage: Storage) -> usize {
        anchored::anchor_bytes(&self.base, self.routing_dim, storage)
    }

    fn place(
        &self,
        pass: &Pass<'_, '_, E>,
        tokens: usize,
        input: FirstInput<'_, E::Tensor>,
        policy: &Policy,
        timeline: &mut Timeline,
        memory: &mut AnchoredMemory<E>,
    ) -> Result<Vec<usize>> {
        anchored::place(&self.base, pass, tokens, input, policy, timeline, memory)
    }
}

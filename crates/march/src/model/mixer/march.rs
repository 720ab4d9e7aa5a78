//! MARCH: Gated DeltaNet, and beside its state the states that it had at earlier boundaries.
//!
//! ```text
//! A_m = S at boundary m                                       state anchor, of the same layer
//! anchor m, u_m its normalised input:  κ_m = W_κ u_m;   q_m = SiLU(W_q u_m);   o_m = A_mᵀ q_m
//! token t:  ρ_t = W_R x_t;   π_t = softmax([ρ_t·κ_m …, w_∅·x_t + b_∅])   over the anchors that it sees and the null
//! o_t = S_tᵀ q_t + Σ_m π_tm A_mᵀ q_t                          then norm, gate and W_o as for Gated DeltaNet
//! ```
//! In the first layer every anchor still is the same embedding, so its key is computed once and routing there is
//! uniform; top-K there keeps the newest. After the last layer's keys nothing reads the anchor stream.
//! Memory: Gated DeltaNet's, and for each kept anchor its state, its routing key and the convolutions' last inputs.

use std::sync::Arc;

use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions};
use march_engine::ops::gated_delta::CHUNK_TOKENS;
use march_engine::ops::linear::Linear;
use march_engine::ops::state_read::StateRead;
use march_engine::{Engine, Var};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::gated_delta_net::{GatedDeltaNet, GatedDeltaNetConfig};
use super::{Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::{AnchorPlan, Placement, Policy, Storage};
use crate::config::{Document, keys_of};
use crate::error::Result;
use crate::memory::LayerMemory;
use crate::model::{Builder, Init, Parameter, Pass};

/// Configuration of MARCH.
#[derive(Clone, Debug, PartialEq)]
pub struct MarchConfig {
    /// The recurrence.
    pub base: GatedDeltaNetConfig,
    /// What MARCH adds.
    pub routing: RoutingConfig,
}

/// What MARCH adds to the configuration of Gated DeltaNet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoutingConfig {
    /// C, text tokens between two anchors.
    pub anchor_interval: usize,
    /// d_r, the width of routing queries and keys.
    pub routing_dim: usize,
    /// K, how many anchors a token reads; none is all that it sees.
    #[serde(default)]
    pub routing_top_k: Option<usize>,
    /// Whether a token can choose none of them.
    #[serde(default = "yes")]
    pub null_route: bool,
    /// Factor on every score but the null's.
    #[serde(default = "one")]
    pub routing_scale: f64,
    /// What b_∅ starts at.
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
            let message = "is 0; it must be at least 1, or left out for dense routing".into();
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

    fn build<E: Engine>(
        &self,
        hidden_size: usize,
        layer: Layer,
        builder: &mut Builder<'_>,
    ) -> Box<dyn Mixer<E>> {
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

/// What a token routes with.
struct Routing<'a, T> {
    query: &'a Var<T>,
    routing_query: &'a Var<T>,
    null_score: Option<&'a Var<T>>,
}

impl March {
    /// Σ_m π_tm A_mᵀ q_t. The call's new anchors are `states` with their `keys`; with a memory, its anchors come
    /// before them, and the new ones that the plan keeps join it.
    fn historical_readout<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        routing: Routing<'_, E::Tensor>,
        states: &Var<E::Tensor>,
        keys: Option<&Var<E::Tensor>>,
        plan: &AnchorPlan,
        memory: Option<&mut LayerMemory<E>>,
    ) -> Result<Option<Var<E::Tensor>>> {
        // With a budget this layer knows by itself what there is to see.
        let own = match (&memory, plan.budget) {
            (Some(memory), Some(_)) => Some(plan.seeing(memory.anchors.ledger.anchors())),
            _ => None,
        };
        let plan = own.as_ref().unwrap_or(plan);
        let (read, top_k) = plan.read_in(self.layer.index);
        let options = AnchorReadOptions {
            key_heads: self.base.key_heads,
            value_heads: self.base.value_heads,
            top_k,
            routing_scale: self.routing_scale,
            plan: Arc::clone(read),
        };
        if let Some(trace) = pass.trace() {
            trace.borrow_mut().note(self.layer.index, self.base.value_heads, plan, None);
        }
        let Routing { query, routing_query, null_score } = routing;
        let Some(memory) = memory else {
            let Some(routing_keys) = keys.filter(|_| !read.segments.is_empty()) else { return Ok(None) };
            let input = AnchorRead { query, routing_query, routing_keys, anchor_states: states, null_score };
            if pass.trace().is_some() {
                self.trace(pass, plan, self.routing_weights(pass, &options, &input)?);
            }
            return Ok(Some(pass.tape.anchor_read(input, &options)?));
        };
        let engine = pass.engine();
        if let Some(keys) = keys {
            memory.anchors.push(engine, states.value(), keys.value(), plan.storage)?;
        }
        let readout = match memory.anchors.routing_keys() {
            Some(routing_keys) if !read.segments.is_empty() => {
                let routing_keys = pass.tape.constant(routing_keys.clone());
                let input = AnchorRead {
                    query,
                    routing_query,
                    routing_keys: &routing_keys,
                    anchor_states: states,
                    null_score,
                };
                if plan.budget.is_some() || pass.trace().is_some() {
                    let weights = self.routing_weights(pass, &options, &input)?;
                    if plan.budget.is_some() {
                        let columns = engine.shape(routing_keys.value())[0];
                        memory.anchors.ledger.note(&engine.to_f32(&weights), self.base.value_heads, columns);
                    }
                    self.trace(pass, plan, weights);
                }
                let input = AnchorRead {
                    query: query.value(),
                    routing_query: routing_query.value(),
                    routing_keys: routing_keys.value(),
                    anchor_states: memory.anchors.states(),
                    null_score: null_score.map(Var::value),
                };
                Some(pass.tape.constant(engine.anchor_read_stored(input, &options)?))
            }
            _ => None,
        };
        match plan.budget {
            None if plan.new.is_empty() => {}
            None => memory.anchors.keep(engine, &plan.keep)?,
            Some(bytes) => {
                for &anchor in &plan.placed {
                    memory.anchors.settle(engine, anchor, bytes / self.layer.count, plan.record)?;
                }
            }
        }
        Ok(readout)
    }

    /// π, [tokens, value_heads, anchors].
    fn routing_weights<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        options: &AnchorReadOptions,
        input: &AnchorRead<&Var<E::Tensor>>,
    ) -> Result<E::Tensor> {
        let input = AnchorRead {
            query: input.query.value(),
            routing_query: input.routing_query.value(),
            routing_keys: input.routing_keys.value(),
            anchor_states: [self.base.key_dim, self.base.value_dim],
            null_score: input.null_score.map(Var::value),
        };
        Ok(pass.engine().routing_weights(input, options)?)
    }

    /// Notes routing weights where somebody wants to see them.
    fn trace<E: Engine>(&self, pass: &Pass<'_, '_, E>, plan: &AnchorPlan, weights: E::Tensor) {
        if let Some(trace) = pass.trace() {
            trace.borrow_mut().note(self.layer.index, self.base.value_heads, plan, Some(weights));
        }
    }
}

impl<E: Engine> Mixer<E> for March {
    fn forward(
        &self,
        pass: &Pass<'_, '_, E>,
        input: &Streams<E::Tensor>,
        memory: &mut [&mut LayerMemory<E>],
    ) -> Result<Streams<E::Tensor>> {
        let (tape, base) = (pass.tape, &self.base);
        let projected = base.project(pass, &input.text)?;
        let routing_query = pass.linear(&input.text, self.routing_query_proj)?;
        let null_score = match self.null_proj {
            Some([weight, bias]) => {
                let bias = Some(pass.weight(bias));
                Some(tape.linear(Linear { x: &input.text, weight: pass.weight(weight), bias })?)
            }
            None => None,
        };
        let count = pass.new_anchors();
        let keys = match &input.anchors {
            Some(anchors) => Some(pass.repeat_rows(&pass.linear(anchors, self.routing_key_proj)?, count)?),
            None => None,
        };
        let [q, k, v, a, b] = projected.all();
        // A null that is not there is left out by giving the routing query in its place.
        let inputs = [q, k, v, a, b, &routing_query, null_score.as_ref().unwrap_or(&routing_query)];
        let mix = |[q, k, v, a, b, routing_query, null]: [&Var<E::Tensor>; 7],
                   plan: &AnchorPlan,
                   mut memory: Option<&mut LayerMemory<E>>| {
            let (qkv, tails) = base.convolve(pass, [q, k, v], plan, memory.as_deref_mut())?;
            let [q, k, v] = qkv.each_ref();
            let out = base.recur(pass, [q, k, v, a, b], plan, memory.as_deref_mut())?;
            let keys = match &keys {
                Some(keys) if !plan.new.is_empty() => Some(pass.slice_rows(keys, plan.new.clone())?),
                _ => None,
            };
            if let Some(memory) = memory.as_deref_mut() {
                memory.anchors.push_tails(pass.engine(), tails)?;
            }
            let routing =
                Routing { query: &qkv[0], routing_query, null_score: null_score.as_ref().map(|_| null) };
            let states = &out.boundary_states;
            let history = self.historical_readout(pass, routing, states, keys.as_ref(), plan, memory)?;
            let readout = match history {
                Some(historical_readout) => tape.add(&out.readout, &historical_readout)?,
                None => out.readout,
            };
            Ok([readout, out.boundary_states])
        };
        let [readout, states] = pass.each_row(inputs, memory, mix)?;
        let text = base.output(pass, &readout, &input.text)?;
        let anchors = match &input.anchors {
            Some(anchors) if !self.layer.last() => {
                let query = pass.repeat_rows(&tape.silu(&pass.linear(anchors, base.q_proj)?)?, count)?;
                let input = StateRead { query: &query, states: &states };
                let own_readout = tape.state_read(input, base.key_heads)?;
                Some(base.output(pass, &own_readout, anchors)?)
            }
            _ => None,
        };
        Ok(Streams { text, anchors })
    }

    /// The recurrence's, and for each anchor that a token reads a score and Aᵀq.
    fn work(&self, tokens: usize, policy: &Policy) -> f64 {
        let base = &self.base;
        let plan = AnchorPlan::fresh(policy, 1, tokens);
        let (mut scored, mut read) = (0, 0);
        for segment in &plan.read.segments {
            let seen = segment.visible.len();
            scored += segment.len * seen;
            read += segment.len * policy.top_k.map_or(seen, |k| seen.min(k));
        }
        let anchor = (base.key_dim * base.value_dim * read + self.routing_dim * scored) as f64;
        base.recurrence_work(tokens) + 2.0 * base.value_heads as f64 * anchor
    }

    fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        let anchor = <Self as Mixer<E>>::anchor_bytes(self, policy.storage);
        let followed = match policy.placement {
            Placement::Adaptive(min) if self.layer.first() => {
                usize::from(tokens >= CHUNK_TOKENS) + usize::from(tokens >= min)
            }
            _ => 0,
        };
        let kept = policy.kept_after(tokens, anchor * self.layer.count);
        self.base.live_bytes(tokens) + followed * self.base.state_bytes() + kept * anchor
    }

    fn anchor_bytes(&self, storage: Storage) -> usize {
        let base = &self.base;
        let state = storage.bytes(base.value_heads * base.key_dim, base.value_dim);
        state + base.tail_bytes() + base.value_heads * self.routing_dim * size_of::<f32>()
    }

    fn states(
        &self,
        pass: &Pass<'_, '_, E>,
        text: &Var<E::Tensor>,
        plan: &AnchorPlan,
        memory: &mut LayerMemory<E>,
    ) -> Result<Option<E::Tensor>> {
        let projected = self.base.project(pass, text)?;
        let [q, k, v, a, b] = projected.all();
        // Nobody wants the convolutions' last inputs at the boundaries.
        let without = AnchorPlan { boundaries: Arc::default(), ..plan.clone() };
        let ([q, k, v], _) = self.base.convolve(pass, [q, k, v], &without, Some(memory))?;
        let out = self.base.recur(pass, [&q, &k, &v, a, b], plan, Some(memory))?;
        Ok(Some(out.boundary_states.into_value()))
    }
}

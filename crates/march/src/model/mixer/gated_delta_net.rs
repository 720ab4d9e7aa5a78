//! Gated DeltaNet: one state that decays and is corrected at every token.
//!
//! ```text
//! q, k, v = SiLU(conv(W x));   α = exp(−exp(A_log) softplus(W_a x + dt_bias));   β = σ(W_b x)
//! S ← α S + β k (v − α Sᵀk)ᵀ;   o = Sᵀ q      with q, k of length 1 and q scaled by d_k^-½
//! y = W_o (rms_norm(o) ∘ SiLU(W_g x))
//! ```
//! Memory: the state at the last multiple of the chunk's length, the recurrence's inputs since then, and the last
//! inputs of the three convolutions.

use std::sync::Arc;

use march_engine::ops::gated_delta::{CHUNK_TOKENS, GatedDelta, GatedDeltaOptions, GatedDeltaOutput};
use march_engine::ops::rms_norm::GatedRmsNorm;
use march_engine::ops::short_conv::ShortConv;
use march_engine::{Engine, Var};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::{AnchorPlan, Policy};
use crate::config::{Document, keys_of};
use crate::error::Result;
use crate::memory::LayerMemory;
use crate::model::{Builder, Init, Parameter, Pass};

/// Configuration of Gated DeltaNet, and of the recurrence in the mixers that build on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GatedDeltaNetConfig {
    /// Heads of queries and keys.
    pub num_heads: usize,
    /// Heads of values, a multiple of `num_heads`; as many by default.
    #[serde(default)]
    pub num_v_heads: Option<usize>,
    /// d_k, the width of a query and a key.
    pub head_dim: usize,
    /// d_v / d_k.
    pub expand_v: f64,
    /// Tokens that a convolution sees.
    pub conv_size: usize,
    /// Write strengths up to 2, which allow negative eigenvalues.
    #[serde(default)]
    pub allow_neg_eigval: bool,
}

impl GatedDeltaNetConfig {
    /// Heads of values.
    pub fn value_heads(&self) -> usize {
        self.num_v_heads.unwrap_or(self.num_heads)
    }

    /// d_v, the width of a value.
    pub fn value_dim(&self) -> usize {
        (self.head_dim as f64 * self.expand_v).round() as usize
    }
}

impl MixerSpec for GatedDeltaNetConfig {
    const MODEL_TYPE: &'static str = "gated_deltanet";

    fn read(document: &mut Document) -> Result<Self> {
        document.keys()
    }

    fn write(&self) -> Map<String, Value> {
        keys_of(&Self { num_v_heads: Some(self.value_heads()), ..self.clone() })
    }

    fn check(&self, _: usize) -> std::result::Result<(), Contradiction> {
        for (key, value) in
            [("num_heads", self.num_heads), ("head_dim", self.head_dim), ("conv_size", self.conv_size)]
        {
            if value == 0 {
                return Err((key, "is 0; it must be at least 1".into()));
            }
        }
        let heads = self.value_heads();
        if heads == 0 || !heads.is_multiple_of(self.num_heads) {
            let message = format!("is {heads}; it must be a multiple of `num_heads` ({})", self.num_heads);
            return Err(("num_v_heads", message));
        }
        let width = self.head_dim as f64 * self.expand_v;
        if !((1.0..=1e6).contains(&width) && (width - width.round()).abs() < 1e-6) {
            let message = format!(
                "is {}, so a value is {width} wide (`head_dim` · `expand_v`); it must be a whole number above 0",
                self.expand_v
            );
            return Err(("expand_v", message));
        }
        Ok(())
    }

    fn build<E: Engine>(&self, hidden_size: usize, _: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer<E>> {
        Box::new(GatedDeltaNet::new(self, hidden_size, builder))
    }
}

/// The recurrence and what stands around it.
#[derive(Clone, Debug)]
pub(super) struct GatedDeltaNet {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub allow_neg_eigval: bool,
    conv_size: usize,
    pub q_proj: Parameter,
    k_proj: Parameter,
    v_proj: Parameter,
    a_proj: Parameter,
    b_proj: Parameter,
    g_proj: Parameter,
    o_proj: Parameter,
    /// Of q, k and v.
    conv1d: [Parameter; 3],
    pub a_log: Parameter,
    pub dt_bias: Parameter,
    o_norm: Parameter,
}

/// What the recurrence takes from each text token, before the convolutions.
pub(super) struct Projected<T> {
    pub query: Var<T>,
    pub key: Var<T>,
    pub value: Var<T>,
    pub retention_input: Var<T>,
    pub write_input: Var<T>,
}

impl<T> Projected<T> {
    pub fn all(&self) -> [&Var<T>; 5] {
        [&self.query, &self.key, &self.value, &self.retention_input, &self.write_input]
    }
}

/// What the recurrence gives.
pub(super) struct Recurred<T> {
    /// o, [B, n, value_heads·d_v].
    pub readout: Var<T>,
    /// The states at the plan's boundaries, [N, value_heads, d_k, d_v].
    pub boundary_states: Var<T>,
}

/// Names of the convolutions' last inputs in the memory.
pub(crate) const TAILS: [&str; 3] = ["q_tail", "k_tail", "v_tail"];

/// Names of what wrote since the last chunk began, whose state the memory holds.
pub(crate) const CHUNK: [&str; 4] = ["chunk_key", "chunk_value", "chunk_retention", "chunk_write"];

impl GatedDeltaNet {
    pub fn new(keys: &GatedDeltaNetConfig, hidden_size: usize, builder: &mut Builder<'_>) -> Self {
        let (key_heads, value_heads) = (keys.num_heads, keys.value_heads());
        let (key_dim, value_dim) = (keys.head_dim, keys.value_dim());
        let (key_width, value_width) = (key_heads * key_dim, value_heads * value_dim);
        let mut conv = |name: &str, width| builder.add(name, &[width, 1, keys.conv_size], Init::Normal);
        let conv1d = [
            conv("q_conv1d.weight", key_width),
            conv("k_conv1d.weight", key_width),
            conv("v_conv1d.weight", value_width),
        ];
        Self {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            allow_neg_eigval: keys.allow_neg_eigval,
            conv_size: keys.conv_size,
            q_proj: builder.linear("q_proj", key_width, hidden_size),
            k_proj: builder.linear("k_proj", key_width, hidden_size),
            v_proj: builder.linear("v_proj", value_width, hidden_size),
            a_proj: builder.linear("a_proj", value_heads, hidden_size),
            b_proj: builder.linear("b_proj", value_heads, hidden_size),
            g_proj: builder.linear("g_proj", value_width, hidden_size),
            o_proj: builder.linear("o_proj", hidden_size, value_width),
            conv1d,
            a_log: builder.add("A_log", &[value_heads], Init::DecayRate),
            dt_bias: builder.add("dt_bias", &[value_heads], Init::TimeStep),
            o_norm: builder.add("o_norm.weight", &[value_dim], Init::Constant(1.0)),
        }
    }

    /// The projections of text.
    pub fn project<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        text: &Var<E::Tensor>,
    ) -> Result<Projected<E::Tensor>> {
        let weights = [self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj];
        let [query, key, value, retention_input, write_input] = pass.linear_each(text, weights)?;
        Ok(Projected { query, key, value, retention_input, write_input })
    }

    /// Queries, keys and values after their convolutions. With a memory, its tails come before the first token
    /// and are brought up to date; also returned are the tails as they were at each boundary.
    pub fn convolve<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        inputs: [&Var<E::Tensor>; 3],
        plan: &AnchorPlan,
        memory: Option<&mut LayerMemory<E>>,
    ) -> Result<([Var<E::Tensor>; 3], Vec<[E::Tensor; 3]>)> {
        let weights = self.conv1d.map(|p| pass.weight(p));
        let Some(memory) = memory else {
            let mut y = Vec::with_capacity(3);
            for (x, weight) in inputs.into_iter().zip(weights) {
                y.push(pass.tape.short_conv(ShortConv { x, weight, tail: None })?.0);
            }
            return Ok((take(y), Vec::new()));
        };
        let boundaries = plan.boundaries.first().map_or(&[][..], Vec::as_slice);
        let (mut y, mut at_boundaries) = (Vec::with_capacity(3), vec![Vec::new(); boundaries.len()]);
        for ((x, weight), name) in inputs.into_iter().zip(weights).zip(TAILS) {
            let tail = memory.get(name).map(|tail| pass.tape.constant(tail.clone()));
            for (tails, &boundary) in at_boundaries.iter_mut().zip(boundaries) {
                // A tail is the new tail of a call that ends at the boundary.
                let recent = self.conv_size.saturating_sub(1).min(boundary);
                let x = pass.tape.slice(x, 1, boundary - recent..boundary)?;
                let tail = tail.as_ref().filter(|_| recent == boundary);
                tails.push(pass.tape.short_conv(ShortConv { x: &x, weight, tail })?.1.into_value());
            }
            let (out, tail) = pass.tape.short_conv(ShortConv { x, weight, tail: tail.as_ref() })?;
            memory.set(name, tail.into_value());
            y.push(out);
        }
        Ok((take(y), at_boundaries.into_iter().map(take).collect()))
    }

    /// The recurrence over convolved inputs, and the states at the plan's boundaries. With a memory it goes on from
    /// where the last call ended: the chunk that this was in is computed again from its beginning, so that every
    /// token has the bits that it has in one long call.
    pub fn recur<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        [query, writes @ ..]: [&Var<E::Tensor>; 5],
        plan: &AnchorPlan,
        memory: Option<&mut LayerMemory<E>>,
    ) -> Result<Recurred<E::Tensor>> {
        let Some(memory) = memory else {
            let out = self.gated_delta(pass, query, writes, None, Arc::clone(&plan.boundaries))?;
            return Ok(Recurred { readout: out.readout, boundary_states: out.boundary_states });
        };
        let (tape, engine) = (pass.tape, pass.engine());
        let again = plan.position % CHUNK_TOKENS;
        let tokens = again + plan.tokens;
        // Where the last chunk of this call begins, counted from where its first one does.
        let chunk = (plan.position + plan.tokens) / CHUNK_TOKENS * CHUNK_TOKENS + again - plan.position;
        let mut whole = Vec::with_capacity(CHUNK.len());
        for (name, x) in CHUNK.into_iter().zip(writes) {
            whole.push(tape.constant(memory.append(engine, name, x.value().clone(), 1)?));
        }
        let new = plan.boundaries.first().map_or(&[][..], Vec::as_slice).iter().map(|b| b + again);
        let anchors: Vec<usize> = plan.replay.iter().copied().chain(new).collect();
        let mut boundaries = anchors.clone();
        let at = boundaries.partition_point(|&b| b < chunk);
        if chunk > 0 && boundaries.get(at) != Some(&chunk) {
            boundaries.insert(at, chunk);
        }
        let initial = memory.get("state").map(|state| tape.constant(state.clone()));
        let out = self.gated_delta(
            pass,
            query,
            std::array::from_fn(|i| &whole[i]),
            initial.as_ref(),
            Arc::new(vec![boundaries.clone()]),
        )?;
        let all = &out.boundary_states;
        if chunk > 0 {
            memory.set("state", tape.slice(all, 0, at..at + 1)?.into_value());
            for (name, whole) in CHUNK.into_iter().zip(whole) {
                memory.set(name, tape.slice(&whole, 1, chunk..tokens)?.into_value());
            }
        }
        // The new anchors' states: without those that are computed again, and the last chunk's where it is no anchor.
        let (old, end) = (plan.replay.len(), boundaries.len());
        let boundary_states = match boundaries.len() > anchors.len() {
            true if old < at && at + 1 < end => {
                let parts = [tape.slice(all, 0, old..at)?, tape.slice(all, 0, at + 1..end)?];
                tape.concat(&parts.each_ref(), 0)?
            }
            true if old < at => pass.slice_rows(all, old..at)?,
            true => pass.slice_rows(all, at + 1..end)?,
            false => pass.slice_rows(all, old..end)?,
        };
        Ok(Recurred { readout: out.readout, boundary_states })
    }

    fn gated_delta<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        query: &Var<E::Tensor>,
        [key, value, retention_input, write_input]: [&Var<E::Tensor>; 4],
        initial_state: Option<&Var<E::Tensor>>,
        boundaries: Arc<Vec<Vec<usize>>>,
    ) -> Result<GatedDeltaOutput<Var<E::Tensor>>> {
        let options = GatedDeltaOptions {
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            allow_neg_eigval: self.allow_neg_eigval,
            boundaries,
            final_state: false,
        };
        let input = GatedDelta {
            query,
            key,
            value,
            retention_input,
            write_input,
            a_log: pass.weight(self.a_log),
            dt_bias: pass.weight(self.dt_bias),
            initial_state,
        };
        Ok(pass.tape.gated_delta(input, &options)?)
    }

    /// y = W_o (rms_norm(o) ∘ SiLU(W_g x)); `x` may be one row for all rows of the readout.
    pub fn output<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        readout: &Var<E::Tensor>,
        x: &Var<E::Tensor>,
    ) -> Result<Var<E::Tensor>> {
        let gate =
            pass.repeat_rows(&pass.linear(x, self.g_proj)?, pass.engine().shape(readout.value())[0])?;
        let input = GatedRmsNorm { x: readout, gate: &gate, weight: pass.weight(self.o_norm) };
        pass.linear(&pass.tape.gated_rms_norm(input, pass.norm_eps())?, self.o_proj)
    }

    /// kᵀS, the update of S and Sᵀq, two operations for each number of S.
    pub(super) fn recurrence_work(&self, tokens: usize) -> f64 {
        6.0 * (self.key_dim * self.value_dim * self.value_heads) as f64 * tokens as f64
    }

    /// Bytes of what goes on: a state, the inputs since it, and the convolutions' last inputs.
    pub fn live_bytes(&self, tokens: usize) -> usize {
        let inputs = self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 2);
        let state = if tokens < CHUNK_TOKENS { 0 } else { self.state_bytes() };
        state + self.tail_bytes() + tokens % CHUNK_TOKENS * inputs * size_of::<f32>()
    }

    /// Bytes of a state.
    pub fn state_bytes(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim * size_of::<f32>()
    }

    /// Bytes of the convolutions' last inputs.
    pub fn tail_bytes(&self) -> usize {
        let channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim;
        (self.conv_size - 1) * channels * size_of::<f32>()
    }
}

/// Three of three.
fn take<T>(list: Vec<T>) -> [T; 3] {
    let Ok(array) = <[T; 3]>::try_from(list) else { unreachable!("three were pushed") };
    array
}

impl<E: Engine> Mixer<E> for GatedDeltaNet {
    fn forward(
        &self,
        pass: &Pass<'_, '_, E>,
        input: &Streams<E::Tensor>,
        memory: &mut [&mut LayerMemory<E>],
    ) -> Result<Streams<E::Tensor>> {
        let projected = self.project(pass, &input.text)?;
        let [readout] = pass.each_row(projected.all(), memory, |[q, k, v, a, b], plan, mut memory| {
            let ([q, k, v], _) = self.convolve(pass, [q, k, v], plan, memory.as_deref_mut())?;
            Ok([self.recur(pass, [&q, &k, &v, a, b], plan, memory)?.readout])
        })?;
        Ok(Streams { text: self.output(pass, &readout, &input.text)?, anchors: None })
    }

    fn work(&self, tokens: usize, _: &Policy) -> f64 {
        self.recurrence_work(tokens)
    }

    fn memory_bytes(&self, tokens: usize, _: &Policy) -> usize {
        self.live_bytes(tokens)
    }
}

//! Gated DeltaNet: one state that decays and is corrected at every token.
//!
//! ```text
//! q, k, v = SiLU(conv(W x));   α = exp(−exp(A_log) softplus(W_a x + dt_bias));   β = σ(W_b x)
//! S ← α S + β k (v − α Sᵀk)ᵀ;   o = Sᵀ q      with q, k of length 1 and q scaled by d_k^-½
//! y = W_o (rms_norm(o) ∘ SiLU(W_g x))
//! with `output_gate_activation = "sigmoid"` σ(W_g x), with `use_gate = false` no gate; with `use_short_conv = false`
//! SiLU(W x) without the convolution
//! ```
//! In a stack where other layers have anchors, this layer's part of the anchor stream reads the state at its boundary:
//! o_m = S_mᵀ q_m with q_m = SiLU(W_q u_m), as in a layer of MARCH.
//!
//! Memory: the state at the last multiple of the chunk length, the recurrence's inputs since then, and the last inputs
//! of the three convolutions (their tails).

use std::sync::Arc;

use march_engine::Tensor;
use march_engine::ops::gated_delta::{CHUNK_TOKENS, GatedDelta, GatedDeltaOptions};
use march_engine::ops::rms_norm::{gated_rms_norm_each, rms_norm_each};
use march_engine::ops::short_conv::{ShortConv, short_conv_each};
use march_engine::ops::state_read::StateRead;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::Policy;
use crate::config::{Document, keys_of};
use crate::error::Result;
use crate::memory::{LayerReader, LayerWriter, Memory};
use crate::model::pass::{repeat_rows, slice_rows};
use crate::model::{Builder, Init, MixerOutput, Parameter, Pass, Projection, Row};

/// Configuration of Gated DeltaNet, and of the recurrence in the mixers that build on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GatedDeltaNetConfig {
    /// Number of query and key heads.
    pub num_heads: usize,
    /// Number of value heads, a multiple of `num_heads` and by default equal to it.
    #[serde(default)]
    pub num_v_heads: Option<usize>,
    /// d_k, the width of a query and a key.
    pub head_dim: usize,
    /// d_v / d_k.
    pub expand_v: f64,
    /// Number of tokens that a convolution sees.
    pub conv_size: usize,
    /// Whether write strengths go up to 2, which allows negative eigenvalues.
    #[serde(default)]
    pub allow_neg_eigval: bool,
    /// Whether the readout has a gate.
    #[serde(default = "yes")]
    pub use_gate: bool,
    /// The gate's activation.
    #[serde(default)]
    pub output_gate_activation: Gate,
    /// Whether queries, keys and values have convolutions.
    #[serde(default = "yes")]
    pub use_short_conv: bool,
}

/// The activation of the readout's gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gate {
    /// x σ(x)
    #[default]
    #[serde(alias = "silu")]
    Swish,
    /// σ(x)
    Sigmoid,
}

pub(super) fn yes() -> bool {
    true
}

impl GatedDeltaNetConfig {
    /// Number of value heads.
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

    /// The last three keys are written only if they have other values than the defaults.
    fn write(&self) -> Map<String, Value> {
        let mut keys = keys_of(&Self { num_v_heads: Some(self.value_heads()), ..self.clone() });
        for (key, usual) in [
            ("use_gate", Value::Bool(true)),
            ("output_gate_activation", Value::String("swish".into())),
            ("use_short_conv", Value::Bool(true)),
        ] {
            if keys.get(key) == Some(&usual) {
                keys.remove(key);
            }
        }
        keys
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

    fn build(&self, hidden_size: usize, _: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer> {
        Box::new(GatedDeltaNet::new(self, hidden_size, builder))
    }
}

/// The recurrence with its projections, convolutions, norm and gate.
#[derive(Clone, Debug)]
pub(super) struct GatedDeltaNet {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub allow_neg_eigval: bool,
    conv_size: usize,
    pub q_proj: Projection,
    k_proj: Projection,
    v_proj: Projection,
    a_proj: Projection,
    b_proj: Projection,
    /// W_g; `None` for no gate.
    pub g_proj: Option<Projection>,
    gate: Gate,
    pub o_proj: Projection,
    /// Convolutions of q, k and v; `None` for none.
    conv1d: Option<[Parameter; 3]>,
    pub a_log: Parameter,
    pub dt_bias: Parameter,
    o_norm: Parameter,
}

/// The result of the recurrence.
pub(super) struct RecurrenceOutput {
    /// o, [B, n, value_heads·d_v].
    pub readout: Tensor,
    /// The states at the plan's boundaries, [N, value_heads, d_k, d_v].
    pub boundary_states: Tensor,
}

/// What Gated DeltaNet keeps of a text.
#[derive(Clone, Default)]
pub struct DeltaMemory {
    pub(super) recurrence: Recurrence,
    /// The last inputs of the convolutions of q, k and v, [1, conv_size − 1, channels].
    pub(super) tails: Option<[Tensor; 3]>,
}

/// Names of the convolution tails in a file.
pub(super) const TAILS: [&str; 3] = ["q_tail", "k_tail", "v_tail"];

impl Memory for DeltaMemory {
    fn fork(&self) -> Box<dyn Memory> {
        Box::new(self.clone())
    }

    fn tensors(&self) -> Vec<&Tensor> {
        self.recurrence.tensors().chain(self.tails.iter().flatten()).collect()
    }

    fn save<'a>(&'a self, file: &mut LayerWriter<'a>) -> Result<()> {
        self.recurrence.save("", file);
        for (name, tail) in TAILS.into_iter().zip(self.tails.iter().flatten()) {
            file.tensor(name, tail);
        }
        Ok(())
    }

    fn load(&mut self, file: &LayerReader<'_>) -> Result<()> {
        self.recurrence.load("", file)?;
        let [q, k, v] = TAILS.map(|name| file.required(name));
        self.tails = Some([q?, k?, v?]);
        Ok(())
    }

    fn state(&self) -> Option<&Tensor> {
        self.recurrence.state.as_ref()
    }
}

/// The gated delta rule between calls: a state, and what was written since.
///
/// The state is the one at the last point of the device's chunk grid, not the newest. The next call recomputes the open
/// chunk from there, so that every token is bit-identical to the same token in one long call.
#[derive(Clone, Default)]
pub(super) struct Recurrence {
    /// [1, value_heads, d_k, d_v]; `None` stands for zero.
    pub state: Option<Tensor>,
    /// Keys, values, retention and write inputs of the tokens since the state, each [1, n, width].
    pub open: Option<[Tensor; 4]>,
}

/// Names, in a file, of what was written since the state.
const OPEN: [&str; 4] = ["chunk_key", "chunk_value", "chunk_retention", "chunk_write"];

impl Recurrence {
    /// The rule right after a state from which no open chunk needs to be recomputed.
    pub fn at(state: Tensor) -> Self {
        Self { state: Some(state), open: None }
    }

    /// Number of tokens since the state.
    fn open_tokens(&self) -> usize {
        self.open.as_ref().map_or(0, |[keys, ..]| keys.shape()[1])
    }

    /// Appends what the next tokens write; returns everything that was written since the state.
    fn append(&mut self, writes: [&Tensor; 4]) -> Result<[Tensor; 4]> {
        match &mut self.open {
            Some(open) => {
                for (open, new) in open.iter_mut().zip(writes) {
                    open.append(new, 1)?;
                }
                Ok(open.clone())
            }
            None => Ok(self.open.insert(writes.map(Tensor::clone)).clone()),
        }
    }

    /// Everything that is kept.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.state.iter().chain(self.open.iter().flatten())
    }

    /// Lists the tensors for a file, with a prefix for their names.
    pub fn save<'a>(&'a self, prefix: &str, file: &mut LayerWriter<'a>) {
        if let Some(state) = &self.state {
            file.tensor(&format!("{prefix}state"), state);
        }
        for (name, tensor) in OPEN.into_iter().zip(self.open.iter().flatten()) {
            file.tensor(&format!("{prefix}{name}"), tensor);
        }
    }

    pub fn load(&mut self, prefix: &str, file: &LayerReader<'_>) -> Result<()> {
        self.state = file.tensor(&format!("{prefix}state"))?;
        let [key, value, retention, write] = OPEN.map(|name| file.tensor(&format!("{prefix}{name}")));
        self.open = match (key?, value?, retention?, write?) {
            (Some(key), Some(value), Some(retention), Some(write)) => Some([key, value, retention, write]),
            _ => None,
        };
        Ok(())
    }
}

/// The gated delta rule with the parameters of its gates.
pub(super) struct Rule<'a> {
    pub key_heads: usize,
    pub value_heads: usize,
    pub allow_neg_eigval: bool,
    pub a_log: &'a Tensor,
    pub dt_bias: &'a Tensor,
}

impl Rule<'_> {
    fn input<'a>(
        &'a self,
        query: &'a Tensor,
        [key, value, retention_input, write_input]: [&'a Tensor; 4],
        initial_state: Option<&'a Tensor>,
    ) -> GatedDelta<&'a Tensor> {
        let (a_log, dt_bias) = (self.a_log, self.dt_bias);
        GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, initial_state }
    }

    /// Runs over a row's tokens: queries, then keys, values, retention and write inputs. The states at the row's
    /// boundaries are returned.
    pub fn run(
        &self,
        [query, writes @ ..]: [&Tensor; 5],
        row: Row<'_>,
        memory: Option<&mut Recurrence>,
    ) -> Result<RecurrenceOutput> {
        let options = GatedDeltaOptions {
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            allow_neg_eigval: self.allow_neg_eigval,
            boundaries: Arc::clone(&row.anchors.boundaries),
            final_state: false,
            chunk_offset: 0,
        };
        let Some(memory) = memory else {
            let out = self.input(query, writes, None).gated_delta(&options)?;
            return Ok(RecurrenceOutput { readout: out.readout, boundary_states: out.boundary_states });
        };
        let (chunk, again) = (query.device().chunk_tokens(), memory.open_tokens());
        let (start, end) = (row.position - again, row.position + row.tokens);
        let whole = memory.append(writes)?;
        // The cuts of this call, relative to the position of the memory's state: first the positions where the open
        // chunk was cut before, then the new boundaries.
        let recent = row.anchors.recent.iter().filter(|&&at| at > start).map(|at| at - start);
        let new = row.anchors.boundaries.first().into_iter().flatten().map(|at| at + again);
        let anchors: Vec<usize> = recent.clone().chain(new).collect();
        // The state is kept at the last point of the grid, if that is new.
        let grid = (end / chunk * chunk).saturating_sub(start);
        let mut cuts = anchors.clone();
        let at = cuts.partition_point(|&cut| cut < grid);
        if grid > 0 && cuts.get(at) != Some(&grid) {
            cuts.insert(at, grid);
        }
        let options = GatedDeltaOptions {
            boundaries: Arc::new(vec![cuts.clone()]),
            chunk_offset: start % chunk,
            ..options
        };
        let out = self.input(query, whole.each_ref(), memory.state.as_ref()).gated_delta(&options)?;
        let all = &out.boundary_states;
        if grid > 0 {
            memory.state = Some(all.slice(0, at..at + 1)?);
            let [k, v, a, b] = whole.map(|tensor| tensor.slice(1, grid..again + row.tokens));
            memory.open = Some([k?, v?, a?, b?]);
        }
        // The states of the new anchors: without the recomputed ones, and without that of the grid point unless it is an
        // anchor.
        let (old, end) = (recent.count(), cuts.len());
        let boundary_states = match cuts.len() > anchors.len() {
            true if old < at && at + 1 < end => {
                Tensor::concat(&[&all.slice(0, old..at)?, &all.slice(0, at + 1..end)?], 0)?
            }
            true if old < at => slice_rows(all, old..at)?,
            true => slice_rows(all, at + 1..end)?,
            false => slice_rows(all, old..end)?,
        };
        Ok(RecurrenceOutput { readout: out.readout, boundary_states })
    }
}

impl GatedDeltaNet {
    pub fn new(keys: &GatedDeltaNetConfig, hidden_size: usize, builder: &mut Builder<'_>) -> Self {
        let (key_heads, value_heads) = (keys.num_heads, keys.value_heads());
        let (key_dim, value_dim) = (keys.head_dim, keys.value_dim());
        let (key_width, value_width) = (key_heads * key_dim, value_heads * value_dim);
        let mut conv = |name: &str, width| builder.add(name, &[width, 1, keys.conv_size], Init::Normal);
        let conv1d = keys.use_short_conv.then(|| {
            [
                conv("q_conv1d.weight", key_width),
                conv("k_conv1d.weight", key_width),
                conv("v_conv1d.weight", value_width),
            ]
        });
        Self {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            allow_neg_eigval: keys.allow_neg_eigval,
            // Without convolutions a token sees only itself, and the tails are empty.
            conv_size: if keys.use_short_conv { keys.conv_size } else { 1 },
            gate: keys.output_gate_activation,
            q_proj: builder.linear("q_proj", key_width, hidden_size),
            k_proj: builder.linear("k_proj", key_width, hidden_size),
            v_proj: builder.linear("v_proj", value_width, hidden_size),
            a_proj: builder.linear("a_proj", value_heads, hidden_size),
            b_proj: builder.linear("b_proj", value_heads, hidden_size),
            g_proj: keys.use_gate.then(|| builder.linear("g_proj", value_width, hidden_size)),
            o_proj: builder.linear("o_proj", hidden_size, value_width),
            conv1d,
            a_log: builder.add("A_log", &[value_heads], Init::DecayRate),
            dt_bias: builder.add("dt_bias", &[value_heads], Init::TimeStep),
            o_norm: builder.add("o_norm.weight", &[value_dim], Init::Constant(1.0)),
        }
    }

    /// The layers of queries, keys, values, retention and write inputs.
    pub fn projections(&self) -> [Projection; 5] {
        [self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj]
    }

    /// Computes queries, keys and values after their convolutions. With a memory, its tails precede the first token and
    /// are updated.
    pub fn convolve(
        &self,
        pass: &Pass,
        inputs: [&Tensor; 3],
        memory: Option<&mut DeltaMemory>,
    ) -> Result<[Tensor; 3]> {
        let tails = memory.as_ref().and_then(|memory| memory.tails.as_ref());
        let (y, new_tails) = self.convolve_after(pass, inputs, tails)?;
        if let Some(memory) = memory {
            memory.tails = Some(new_tails);
        }
        Ok(y)
    }

    /// The convolutions of tokens that follow `tails`, and the tails after them.
    fn convolve_after(
        &self,
        pass: &Pass,
        [q, k, v]: [&Tensor; 3],
        tails: Option<&[Tensor; 3]>,
    ) -> Result<([Tensor; 3], [Tensor; 3])> {
        let Some(conv1d) = self.conv1d else {
            let [y_q, y_k, y_v] = [q, k, v].map(Tensor::silu);
            let [q, k, v] = [q, k, v].map(|x| x.slice(1, 0..0));
            return Ok(([y_q?, y_k?, y_v?], [q?, k?, v?]));
        };
        let conv = |x, i: usize| {
            let (weight, tail) = (pass.weight(conv1d[i]), tails.map(|tails| &tails[i]));
            ShortConv { x, weight, tail }
        };
        let [q, k, v] = short_conv_each([conv(q, 0), conv(k, 1), conv(v, 2)])?;
        Ok(([q.0, k.0, v.0], [q.1, k.1, v.1]))
    }

    /// The convolution tails at each boundary of a row, from which a rollback continues: those after a call that ends
    /// there. `memory` is the one before the row.
    pub fn tails_at_boundaries(
        &self,
        pass: &Pass,
        inputs: [&Tensor; 3],
        row: Row<'_>,
        memory: &DeltaMemory,
    ) -> Result<Vec<[Tensor; 3]>> {
        let at = |&boundary: &usize| {
            let recent = self.conv_size.saturating_sub(1).min(boundary);
            let [q, k, v] = inputs.map(|x| x.slice(1, boundary - recent..boundary));
            let tails = memory.tails.as_ref().filter(|_| recent == boundary);
            Ok(self.convolve_after(pass, [&q?, &k?, &v?], tails)?.1)
        };
        row.anchors.boundaries.first().into_iter().flatten().map(at).collect()
    }

    /// S ← α S + β k (v − α Sᵀk)ᵀ, o = Sᵀ q over convolved inputs; also returns the states at the row's boundaries.
    pub fn recur(
        &self,
        pass: &Pass,
        inputs: [&Tensor; 5],
        row: Row<'_>,
        memory: Option<&mut Recurrence>,
    ) -> Result<RecurrenceOutput> {
        let rule = Rule {
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            allow_neg_eigval: self.allow_neg_eigval,
            a_log: pass.weight(self.a_log),
            dt_bias: pass.weight(self.dt_bias),
        };
        rule.run(inputs, row, memory)
    }

    /// rms_norm(o) ∘ SiLU(g) of each stream, which W_o multiplies; with the other gates as configured.
    pub fn gated(&self, pass: &Pass, readouts: &[&Tensor], gates: &[Option<&Tensor>]) -> Result<Streams> {
        let (norm, eps) = (pass.weight(self.o_norm), pass.norm_eps());
        let Some(gates) = gates.iter().copied().collect::<Option<Vec<_>>>() else {
            return Ok(Streams::of(rms_norm_each(readouts, norm, eps)?));
        };
        if self.gate == Gate::Swish {
            return Ok(Streams::of(gated_rms_norm_each(readouts, &gates, norm, eps)?));
        }
        let normed = rms_norm_each(readouts, norm, eps)?;
        let gated = normed.iter().zip(gates).map(|(y, gate)| Ok((y * &gate.sigmoid()?)?));
        Ok(Streams::of(gated.collect::<Result<_>>()?))
    }

    /// The readouts of text and anchors after norm and gate: o_m = A_mᵀ q_m with q_m = SiLU(W_q u_m). `own` is W_q u_m
    /// and W_g u_m.
    pub fn gated_with_anchors(
        &self,
        pass: &Pass,
        (readout, gate): (&Tensor, Option<&Tensor>),
        own: (Tensor, Option<Tensor>),
        states: &Tensor,
    ) -> Result<Streams> {
        let (query, anchor_gate) = own;
        let query = repeat_rows(&query.silu()?, pass.new_anchors())?;
        let own_readout = StateRead { query: &query, states }.state_read(self.key_heads)?;
        let anchor_gate = anchor_gate.map(|gate| repeat_rows(&gate, pass.new_anchors())).transpose()?;
        self.gated(pass, &[readout, &own_readout], &[gate, anchor_gate.as_ref()])
    }

    /// Operations for kᵀS, the update of S and Sᵀq: two for each number of S.
    pub(super) fn recurrence_work(&self, tokens: usize) -> f64 {
        6.0 * (self.key_dim * self.value_dim * self.value_heads) as f64 * tokens as f64
    }

    /// Size of the live memory in bytes: a state, the inputs since it, and the convolution tails.
    pub fn live_bytes(&self, tokens: usize) -> usize {
        let inputs = self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 2);
        let state = if tokens < CHUNK_TOKENS { 0 } else { self.state_bytes() };
        state + self.tail_bytes() + tokens % CHUNK_TOKENS * inputs * size_of::<f32>()
    }

    /// Size of a state, in bytes.
    pub fn state_bytes(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim * size_of::<f32>()
    }

    /// Size of the convolution tails, in bytes.
    pub fn tail_bytes(&self) -> usize {
        let channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim;
        (self.conv_size - 1) * channels * size_of::<f32>()
    }
}

impl Mixer for GatedDeltaNet {
    fn memory(&self) -> Box<dyn Memory> {
        Box::new(DeltaMemory::default())
    }

    fn output(&self) -> Projection {
        self.o_proj
    }

    fn forward(&self, pass: &Pass, input: &Streams, memory: &mut [&mut dyn Memory]) -> Result<Streams> {
        let ([q, k, v, a, b], gate) = pass.project(&input.text, (self.projections(), self.g_proj))?;
        let own = input.anchors.as_ref().map(|u| pass.project(u, (self.q_proj, self.g_proj))).transpose()?;
        let mixed = pass.each_row([q, k, v, a, b], memory, |[q, k, v, a, b], row, memory| {
            let mut memory: Option<&mut DeltaMemory> = memory;
            let [q, k, v] = self.convolve(pass, [&q, &k, &v], memory.as_deref_mut())?;
            let recurrence = memory.map(|memory| &mut memory.recurrence);
            let out = self.recur(pass, [&q, &k, &v, &a, &b], row, recurrence)?;
            Ok(MixerOutput { readout: out.readout, states: own.is_some().then_some(out.boundary_states) })
        })?;
        match (own, &mixed.states) {
            (Some(own), Some(states)) => {
                self.gated_with_anchors(pass, (&mixed.readout, gate.as_ref()), own, states)
            }
            _ => self.gated(pass, &[&mixed.readout], &[gate.as_ref()]),
        }
    }

    fn work(&self, tokens: usize, _: &Policy) -> f64 {
        self.recurrence_work(tokens)
    }

    fn memory_bytes(&self, tokens: usize, _: &Policy) -> usize {
        self.live_bytes(tokens)
    }
}

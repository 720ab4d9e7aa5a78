//! Gated DeltaNet: one state that decays and is corrected at every token.
//!
//! ```text
//! q, k, v = SiLU(conv(W x));   α = exp(−exp(A_log) softplus(W_a x + dt_bias));   β = σ(W_b x)
//! S ← α S + β k (v − α Sᵀk)ᵀ;   o = Sᵀ q      with q, k of length 1 and q scaled by d_k^-½
//! y = W_o (rms_norm(o) ∘ SiLU(W_g x))
//! ```
//! Memory: the state at the last multiple of the chunk length, the recurrence's inputs since then, and the last inputs
//! of the three convolutions (their tails).

use std::sync::Arc;

use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaOptions};
use march_engine::ops::rms_norm::GatedRmsNormList;
use march_engine::ops::short_conv::ShortConv;
use march_engine::{Engine, Var};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{AnyMixer, Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::Policy;
use crate::config::{Document, keys_of};
use crate::error::{Error, Result};
use crate::memory::{LayerReader, LayerWriter, Memory, tensor_bytes};
use crate::model::{Builder, Init, MixerOutput, Parameter, Pass, Row};

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

    fn build<E: Engine>(
        &self,
        hidden_size: usize,
        _: Layer,
        builder: &mut Builder<'_>,
    ) -> Box<dyn AnyMixer<E>> {
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
    pub q_proj: Parameter,
    k_proj: Parameter,
    v_proj: Parameter,
    a_proj: Parameter,
    b_proj: Parameter,
    pub g_proj: Parameter,
    pub o_proj: Parameter,
    /// Convolutions of q, k and v.
    conv1d: [Parameter; 3],
    pub a_log: Parameter,
    pub dt_bias: Parameter,
    o_norm: Parameter,
}

/// The result of the recurrence.
pub(super) struct RecurrenceOutput<T> {
    /// o, [B, n, value_heads·d_v].
    pub readout: Var<T>,
    /// The states at the plan's boundaries, [N, value_heads, d_k, d_v].
    pub boundary_states: Var<T>,
}

/// What Gated DeltaNet keeps of a text.
pub struct DeltaMemory<E: Engine> {
    pub(super) recurrence: Recurrence<E>,
    /// The last inputs of the convolutions of q, k and v, [1, conv_size − 1, channels].
    pub(super) tails: Option<[E::Tensor; 3]>,
}

impl<E: Engine> Clone for DeltaMemory<E> {
    fn clone(&self) -> Self {
        Self { recurrence: self.recurrence.clone(), tails: self.tails.clone() }
    }
}

impl<E: Engine> Default for DeltaMemory<E> {
    fn default() -> Self {
        Self { recurrence: Recurrence::default(), tails: None }
    }
}

/// Names of the convolution tails in a file.
pub(super) const TAILS: [&str; 3] = ["q_tail", "k_tail", "v_tail"];

impl<E: Engine> Memory<E> for DeltaMemory<E> {
    fn fork(&self) -> Box<dyn Memory<E>> {
        Box::new(self.clone())
    }

    fn bytes(&self, engine: &E) -> usize {
        let tails = self.tails.iter().flatten().map(|tail| tensor_bytes(engine, tail)).sum::<usize>();
        self.recurrence.bytes(engine) + tails
    }

    fn save<'a>(&'a self, engine: &E, file: &mut LayerWriter<'a, E>) -> Result<()> {
        self.recurrence.save(engine, "", file);
        for (name, tail) in TAILS.into_iter().zip(self.tails.iter().flatten()) {
            file.tensor(engine, name, tail);
        }
        Ok(())
    }

    fn load(&mut self, engine: &E, file: &LayerReader<'_>) -> Result<()> {
        self.recurrence.load(engine, "", file)?;
        let [q, k, v] = TAILS.map(|name| file.required(engine, name));
        self.tails = Some([q?, k?, v?]);
        Ok(())
    }

    fn state(&self) -> Option<&E::Tensor> {
        self.recurrence.state.as_ref()
    }
}

/// The gated delta rule between calls: a state, and what was written since.
///
/// The state is the one at the last point of the engine's chunk grid, not the newest. The next call recomputes the open
/// chunk from there, so that every token is bit-identical to the same token in one long call.
pub(super) struct Recurrence<E: Engine> {
    /// [1, value_heads, d_k, d_v]; `None` stands for zero.
    pub state: Option<E::Tensor>,
    /// Keys, values, retention and write inputs of the tokens since the state, each [1, n, width].
    pub open: Option<[E::Tensor; 4]>,
}

/// Names, in a file, of what was written since the state.
const OPEN: [&str; 4] = ["chunk_key", "chunk_value", "chunk_retention", "chunk_write"];

impl<E: Engine> Clone for Recurrence<E> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone(), open: self.open.clone() }
    }
}

impl<E: Engine> Default for Recurrence<E> {
    fn default() -> Self {
        Self { state: None, open: None }
    }
}

impl<E: Engine> Recurrence<E> {
    /// The rule right after a state from which no open chunk needs to be recomputed.
    pub fn at(state: E::Tensor) -> Self {
        Self { state: Some(state), open: None }
    }

    /// Number of tokens since the state.
    fn open_tokens(&self, engine: &E) -> usize {
        self.open.as_ref().map_or(0, |[keys, ..]| engine.shape(keys)[1])
    }

    /// Appends what the next tokens write; returns everything that was written since the state.
    fn append(&mut self, engine: &E, writes: [&E::Tensor; 4]) -> Result<[E::Tensor; 4]> {
        match &mut self.open {
            Some(open) => {
                for (open, new) in open.iter_mut().zip(writes) {
                    engine.append(open, new, 1)?;
                }
            }
            None => self.open = Some(writes.map(Clone::clone)),
        }
        let Some(open) = &self.open else { unreachable!("it was just set") };
        Ok(open.clone())
    }

    pub fn bytes(&self, engine: &E) -> usize {
        let open = self.open.iter().flatten();
        self.state.iter().chain(open).map(|tensor| tensor_bytes(engine, tensor)).sum()
    }

    /// Lists the tensors for a file, with a prefix for their names.
    pub fn save<'a>(&'a self, engine: &E, prefix: &str, file: &mut LayerWriter<'a, E>) {
        if let Some(state) = &self.state {
            file.tensor(engine, &format!("{prefix}state"), state);
        }
        for (name, tensor) in OPEN.into_iter().zip(self.open.iter().flatten()) {
            file.tensor(engine, &format!("{prefix}{name}"), tensor);
        }
    }

    pub fn load(&mut self, engine: &E, prefix: &str, file: &LayerReader<'_>) -> Result<()> {
        self.state = file.tensor(engine, &format!("{prefix}state"))?;
        let [key, value, retention, write] = OPEN.map(|name| file.tensor(engine, &format!("{prefix}{name}")));
        self.open = match (key?, value?, retention?, write?) {
            (Some(key), Some(value), Some(retention), Some(write)) => Some([key, value, retention, write]),
            _ => None,
        };
        Ok(())
    }
}

/// The gated delta rule with the parameters of its gates.
pub(super) struct Rule<'a, T> {
    pub key_heads: usize,
    pub value_heads: usize,
    pub allow_neg_eigval: bool,
    pub a_log: &'a Var<T>,
    pub dt_bias: &'a Var<T>,
}

impl<T: Clone> Rule<'_, T> {
    fn input<'a>(
        &'a self,
        query: &'a Var<T>,
        [key, value, retention_input, write_input]: [&'a Var<T>; 4],
        initial_state: Option<&'a Var<T>>,
    ) -> GatedDelta<&'a Var<T>> {
        let (a_log, dt_bias) = (self.a_log, self.dt_bias);
        GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, initial_state }
    }

    /// Runs over a row's tokens: queries, then keys, values, retention and write inputs. `boundaries` are relative to
    /// the row's first token, for each batch entry; `recent` are text positions where the open chunk was already cut.
    pub fn run<E: Engine<Tensor = T>>(
        &self,
        pass: &Pass<'_, '_, E>,
        [query, writes @ ..]: [&Var<T>; 5],
        row: Row<'_>,
        boundaries: &Arc<Vec<Vec<usize>>>,
        recent: &[usize],
        memory: Option<&mut Recurrence<E>>,
    ) -> Result<RecurrenceOutput<T>> {
        let options = GatedDeltaOptions {
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            allow_neg_eigval: self.allow_neg_eigval,
            boundaries: Arc::clone(boundaries),
            final_state: false,
            chunk_offset: 0,
        };
        let Some(memory) = memory else {
            let out = pass.tape.gated_delta(self.input(query, writes, None), &options)?;
            return Ok(RecurrenceOutput { readout: out.readout, boundary_states: out.boundary_states });
        };
        let (tape, engine, chunk) = (pass.tape, pass.engine(), E::CHUNK_TOKENS);
        let again = memory.open_tokens(engine);
        let (start, end) = (row.position - again, row.position + row.tokens);
        let whole = memory.append(engine, writes.map(Var::value))?.map(|tensor| tape.constant(tensor));
        // The cuts of this call, relative to the position of the memory's state: first the earlier ones again, then the
        // new ones.
        let before: Vec<usize> = recent.iter().filter(|&&at| at > start).map(|at| at - start).collect();
        let new = boundaries.first().map_or(&[][..], Vec::as_slice).iter().map(|at| at + again);
        let anchors: Vec<usize> = before.iter().copied().chain(new).collect();
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
        let initial = memory.state.clone().map(|state| tape.constant(state));
        let out = tape.gated_delta(self.input(query, whole.each_ref(), initial.as_ref()), &options)?;
        let all = &out.boundary_states;
        if grid > 0 {
            memory.state = Some(tape.slice(all, 0, at..at + 1)?.into_value());
            let mut open = Vec::with_capacity(OPEN.len());
            for tensor in &whole {
                open.push(tape.slice(tensor, 1, grid..again + row.tokens)?.into_value());
            }
            memory.open = <[T; 4]>::try_from(open).ok();
        }
        // The states of the new anchors: without the recomputed ones, and without that of the grid point unless it is an
        // anchor.
        let (old, end) = (before.len(), cuts.len());
        let boundary_states = match cuts.len() > anchors.len() {
            true if old < at && at + 1 < end => {
                let parts = [tape.slice(all, 0, old..at)?, tape.slice(all, 0, at + 1..end)?];
                tape.concat(&parts.each_ref(), 0)?
            }
            true if old < at => pass.slice_rows(all, old..at)?,
            true => pass.slice_rows(all, at + 1..end)?,
            false => pass.slice_rows(all, old..end)?,
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

    /// The matrices of queries, keys, values, retention and write inputs.
    pub fn projections(&self) -> [Parameter; 5] {
        [self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj]
    }

    /// Computes queries, keys and values after their convolutions. With a memory, its tails precede the first token and
    /// are updated; the tails at each of `boundaries` are returned as well.
    pub fn convolve<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        inputs: [&Var<E::Tensor>; 3],
        boundaries: &[usize],
        memory: Option<&mut DeltaMemory<E>>,
    ) -> Result<([Var<E::Tensor>; 3], Vec<[E::Tensor; 3]>)> {
        let weights = self.conv1d.map(|p| pass.weight(p));
        let tails = memory.as_ref().and_then(|memory| memory.tails.as_ref());
        let tails = tails.map(|tails| tails.each_ref().map(|tail| pass.tape.constant(tail.clone())));
        let conv = |x: [&Var<E::Tensor>; 3], tails: Option<&[Var<E::Tensor>; 3]>| {
            let input =
                |i: usize| ShortConv { x: x[i], weight: weights[i], tail: tails.map(|tails| &tails[i]) };
            let [q, k, v] = pass.tape.short_conv_each([input(0), input(1), input(2)])?;
            Ok::<_, Error>(([q.0, k.0, v.0], [q.1, k.1, v.1].map(Var::into_value)))
        };
        let mut at_boundaries = Vec::with_capacity(boundaries.len());
        if memory.is_some() {
            for &boundary in boundaries {
                // The tails at a boundary are the new tails of a call that ends there.
                let recent = self.conv_size.saturating_sub(1).min(boundary);
                let [q, k, v] = inputs.map(|x| pass.tape.slice(x, 1, boundary - recent..boundary));
                let tails = tails.as_ref().filter(|_| recent == boundary);
                at_boundaries.push(conv([&q?, &k?, &v?], tails)?.1);
            }
        }
        let (y, new_tails) = conv(inputs, tails.as_ref())?;
        if let Some(memory) = memory {
            memory.tails = Some(new_tails);
        }
        Ok((y, at_boundaries))
    }

    /// Runs the recurrence over convolved inputs; also returns the states at the row's boundaries.
    pub fn recur<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        inputs: [&Var<E::Tensor>; 5],
        row: Row<'_>,
        memory: Option<&mut Recurrence<E>>,
    ) -> Result<RecurrenceOutput<E::Tensor>> {
        let rule = Rule {
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            allow_neg_eigval: self.allow_neg_eigval,
            a_log: pass.weight(self.a_log),
            dt_bias: pass.weight(self.dt_bias),
        };
        rule.run(pass, inputs, row, &row.anchors.boundaries, &row.anchors.recent, memory)
    }

    /// rms_norm(o) ∘ SiLU(g) of each stream, which W_o multiplies.
    pub fn gated<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        readouts: &[&Var<E::Tensor>],
        gates: &[&Var<E::Tensor>],
    ) -> Result<Streams<E::Tensor>> {
        let input = GatedRmsNormList { x: readouts, gates, weight: pass.weight(self.o_norm) };
        Ok(Streams::of(pass.tape.gated_rms_norm_each(input, pass.norm_eps())?))
    }

    /// Operations for kᵀS, the update of S and Sᵀq: two for each number of S.
    pub(super) fn recurrence_work(&self, tokens: usize) -> f64 {
        6.0 * (self.key_dim * self.value_dim * self.value_heads) as f64 * tokens as f64
    }

    /// Size of the live memory in bytes: a state, the inputs since it, and the convolution tails.
    pub fn live_bytes<E: Engine>(&self, tokens: usize) -> usize {
        let inputs = self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 2);
        let state = if tokens < E::CHUNK_TOKENS { 0 } else { self.state_bytes() };
        state + self.tail_bytes() + tokens % E::CHUNK_TOKENS * inputs * size_of::<f32>()
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

impl<E: Engine> Mixer<E> for GatedDeltaNet {
    type Memory = DeltaMemory<E>;

    fn memory(&self) -> DeltaMemory<E> {
        DeltaMemory::default()
    }

    fn output(&self) -> Parameter {
        self.o_proj
    }

    fn forward(
        &self,
        pass: &Pass<'_, '_, E>,
        input: &Streams<E::Tensor>,
        memory: &mut [&mut DeltaMemory<E>],
    ) -> Result<Streams<E::Tensor>> {
        let [q, k, v, a, b] = self.projections();
        let [q, k, v, a, b, gate] = pass.linear_each(&input.text, [q, k, v, a, b, self.g_proj])?;
        let mixed =
            pass.each_row([&q, &k, &v, &a, &b], memory, |pass, [q, k, v, a, b], row, mut memory| {
                let ([q, k, v], _) = self.convolve(pass, [q, k, v], &[], memory.as_deref_mut())?;
                let recurrence = memory.map(|memory| &mut memory.recurrence);
                let out = self.recur(pass, [&q, &k, &v, a, b], row, recurrence)?;
                Ok(MixerOutput { readout: out.readout, states: None })
            })?;
        self.gated(pass, &[&mixed.readout], &[&gate])
    }

    fn work(&self, tokens: usize, _: &Policy) -> f64 {
        self.recurrence_work(tokens)
    }

    fn memory_bytes(&self, tokens: usize, _: &Policy) -> usize {
        self.live_bytes::<E>(tokens)
    }
}

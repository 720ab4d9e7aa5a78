//! Optimised forward pass of the gated delta rule, in chunks of 16 tokens.
//!
//! Token by token, the recurrence passes over the whole state for every token and multiplies it by one vector at a
//! time. Processing 16 tokens at once turns this into matrix products with one pass over the state per chunk:
//!
//! ```text
//! Vn = N diag(β) (V − diag(e) K S)        (U − W S of the usual form, with one product by N instead of two)
//! O  = s diag(e) Q S + P Vn,   S' = tot S + (diag(d) K)ᵀ Vn
//! ```
//! K S and Q S are computed as one product. The state is stored in panels of 16 columns. Heads are distributed over
//! threads. For the backward pass, Vn and the state at every 64th token are saved.

use super::chunk::{CHUNK, Chunk, GateInput, Prepared, SQUARE, chunks, gates, load_normalised};
use super::{GatedDelta, GatedDeltaOptions, GatedDeltaOutput, Sizes, check, check_differentiable};
use crate::cpu::{Carve, Cpu, Shared, with_scratch};
use crate::error::Result;
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, PANEL, Simd, Strided, gemm};
use crate::tensor::Tensor;

pub(crate) use super::fast_backward::backward;

/// Interval in tokens between the states saved for the backward pass.
pub(crate) const KEPT_EVERY: usize = 64;

/// Key and value dimension of a head, rounded up to whole panels.
#[derive(Clone, Copy)]
pub(crate) struct Padded {
    pub key: usize,
    pub value: usize,
}

impl Padded {
    pub(crate) fn of(sizes: &Sizes) -> Self {
        Self { key: simd::padded(sizes.key_dim), value: simd::padded(sizes.value_dim) }
    }
    pub(crate) fn state(self) -> usize {
        self.key * self.value
    }
}

/// Chunks of each batch row, and the number of boundaries in the rows before it.
pub(crate) struct Plan {
    pub chunks: Vec<Vec<Chunk>>,
    pub first_boundary: Vec<usize>,
}

impl Plan {
    pub(crate) fn new(sizes: &Sizes, options: &GatedDeltaOptions) -> Self {
        let mut plan = Self { chunks: Vec::new(), first_boundary: Vec::new() };
        let mut first = 0;
        for b in 0..sizes.batch {
            let boundaries = options.boundaries.get(b).map_or(&[][..], Vec::as_slice);
            plan.chunks.push(chunks(sizes.tokens, boundaries, options.chunk_offset));
            plan.first_boundary.push(first);
            first += boundaries.len();
        }
        plan
    }
}

/// Gate inputs of head `h` in batch row `b`, starting at that row's first token.
pub(crate) fn gate_input<'a>(
    sizes: &Sizes,
    input: &GatedDelta<&'a Tensor<f32>>,
    neg: bool,
    b: usize,
    h: usize,
) -> GateInput<'a> {
    let from = b * sizes.tokens * sizes.value_heads + h;
    GateInput {
        retention: input.retention_input.data().get(from..).unwrap_or_default(),
        write: input.write_input.data().get(from..).unwrap_or_default(),
        stride: sizes.value_heads,
        rate: input.a_log.data()[h].exp(),
        dt_bias: input.dt_bias.data()[h],
        write_scale: if neg { 2.0 } else { 1.0 },
    }
}

pub(crate) fn forward(
    cpu: &Cpu,
    input: GatedDelta<&Tensor<f32>>,
    options: &GatedDeltaOptions,
    keep: bool,
) -> Result<(GatedDeltaOutput<Tensor<f32>>, Vec<Tensor<f32>>)> {
    let sizes = check(&input.map(Tensor::shape), options)?;
    if keep {
        check_differentiable(&sizes)?;
    }
    let heads = sizes.value_heads;
    let pad = Padded::of(&sizes);
    let plan = Plan::new(&sizes, options);
    let kept = if keep { sizes.tokens.div_ceil(KEPT_EVERY) } else { 0 };
    let mut readout = cpu.uninit(&sizes.readout_shape());
    let mut final_state = cpu.uninit(&sizes.final_shape());
    let mut boundary_states = cpu.uninit(&sizes.boundary_shape());
    let mut writes = cpu.uninit(&[if keep { readout.len() } else { 0 }]);
    let mut states = cpu.uninit(&[sizes.batch * heads * kept * pad.state()]);
    {
        let outputs = Outputs {
            readout: Shared::new(readout.data_mut()),
            final_state: Shared::new(final_state.data_mut()),
            boundary_states: Shared::new(boundary_states.data_mut()),
            writes: keep.then(|| Shared::new(writes.data_mut())),
            states: Shared::new(states.data_mut()),
        };
        cpu.parallel(sizes.batch * heads, |task| {
            let (b, h) = (task / heads, task % heads);
            let gates = gate_input(&sizes, &input, options.allow_neg_eigval, b, h);
            with_scratch(Head::scratch(pad), |scratch| {
                let outputs = &outputs;
                let (input, plan) = (&input, &plan);
                cpu.level().run(Head { sizes, pad, input, gates, plan, b, h, kept, outputs, scratch });
            });
        });
    }
    let saved = if keep { vec![writes, states] } else { Vec::new() };
    Ok((GatedDeltaOutput { readout, final_state, boundary_states }, saved))
}

struct Outputs<'a> {
    readout: Shared<'a>,
    final_state: Shared<'a>,
    boundary_states: Shared<'a>,
    writes: Option<Shared<'a>>,
    states: Shared<'a>,
}

/// Forward pass of one head of one batch row over all tokens.
struct Head<'a> {
    sizes: Sizes,
    pad: Padded,
    input: &'a GatedDelta<&'a Tensor<f32>>,
    gates: GateInput<'a>,
    plan: &'a Plan,
    b: usize,
    h: usize,
    kept: usize,
    outputs: &'a Outputs<'a>,
    scratch: &'a mut [f32],
}

impl Head<'_> {
    fn scratch(pad: Padded) -> usize {
        pad.state() + 2 * CHUNK * pad.key + CHUNK * pad.key + 4 * CHUNK * pad.value + 5 * SQUARE
    }
}

impl Kernel for Head<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { sizes, pad, input, plan, b, h, outputs, .. } = self;
        let Sizes { tokens, value_heads, key_dim, value_dim, .. } = sizes;
        let scale = 1.0 / (key_dim as f32).sqrt();
        let (key_stride, value_stride) = (sizes.key_heads * key_dim, value_heads * value_dim);
        let mut carve = Carve(self.scratch);
        let state = carve.take(pad.state());
        let kq = carve.take(2 * CHUNK * pad.key);
        let vn = carve.take(CHUNK * pad.value);
        let rhs = carve.take(CHUNK * pad.value);
        let read = carve.take(2 * CHUNK * pad.value);
        let mut prepared = Prepared {
            key_t: carve.take(CHUNK * pad.key),
            products: carve.take(2 * SQUARE),
            decay: carve.take(SQUARE),
            inverse: carve.take(SQUARE),
            scores: carve.take(SQUARE),
        };
        let last = |chunk: &Chunk| {
            chunk.start + chunk.len == tokens && chunk.boundary.is_none() && !sizes.final_state
        };
        let mut lying = None;
        match input.initial_state {
            Some(t) => {
                let at = (b * value_heads + h) * sizes.state();
                let initial = &t.data()[at..at + sizes.state()];
                // A state that is read only once and never updated is read in place instead of being packed.
                let once = self.kept == 0 && plan.chunks[b].first().is_some_and(last);
                if once && value_dim.is_multiple_of(PANEL) {
                    lying = Some(Block::rows(initial, value_dim));
                } else {
                    simd::pack(key_dim, value_dim, initial, state);
                }
            }
            None => state.fill(0.0),
        }
        rhs.fill(0.0);
        for chunk in &plan.chunks[b] {
            let len = chunk.len;
            let row = b * tokens + chunk.start;
            if self.kept > 0 && chunk.start % KEPT_EVERY == 0 {
                let at = ((b * value_heads + h) * self.kept + chunk.start / KEPT_EVERY) * pad.state();
                // SAFETY: each head and each saved position has its own disjoint part.
                unsafe { outputs.states.part(at, pad.state()) }.copy_from_slice(state);
            }
            let g = gates(s, self.gates, chunk.start * value_heads, len);
            let key_at = row * key_stride + sizes.key_head(h) * key_dim;
            load_normalised(s, len, key_dim, &input.key.data()[key_at..], key_stride, kq);
            // Only the chunk's tokens from `first` on have a query. Query and readout rows exclude the tokens
            // without a query, `sizes.silent()` per batch row, so their row index is smaller by `silent`.
            let first = sizes.silent().saturating_sub(chunk.start).min(len);
            let (asking, silent) = (len - first, (b + 1) * sizes.silent());
            let queries = &mut kq[len * pad.key..];
            if asking > 0 {
                let from = &input.query.data()[key_at + (first * key_stride) - silent * key_stride..];
                load_normalised(s, asking, key_dim, from, key_stride, queries);
            }
            let value_at = row * value_stride + h * value_dim;
            // Prefetch the next chunk's rows in portions between the products, because the number of outstanding
            // cache misses is limited.
            let (next_key, next_value) = (key_at + len * key_stride, value_at + len * value_stride);
            let ask_keys =
                |data: &[f32], at: usize| simd::prefetch_rows(s, data, at, key_stride, CHUNK, key_dim);
            let ask_values =
                |data: &[f32]| simd::prefetch_rows(s, data, next_value, value_stride, CHUNK, value_dim);
            ask_keys(input.key.data(), next_key);
            prepared.fill(s, &g, [len, asking], key_dim, kq, scale);
            // [K; Q] S
            gemm(
                s,
                [len + asking, pad.value, key_dim],
                Band::Full,
                Strided::rows(kq, pad.key),
                lying.unwrap_or(Block::panels(state, pad.key)),
                BlockMut::rows(read, pad.value),
                Epilogue::Set,
            );
            ask_keys(input.query.data(), next_key.saturating_sub(silent * key_stride));
            // rhs = β (V − e K S)
            let (held, current) = read.split_at_mut(len * pad.value);
            let faded = g.since_start.map(|e| scale * e);
            for t in 0..len {
                let row = t * pad.value..(t + 1) * pad.value;
                let value = &input.value.data()[value_at + t * value_stride..][..value_dim];
                let (b, e) = (g.write[t], g.since_start[t]);
                // The padding of `rhs` is zeroed once above and never written.
                simd::blend(s, &mut rhs[row.clone()], false, (b, value), (-b * e, &held[row.clone()]));
            }
            let triangle = [len, pad.value, len];
            ask_values(input.value.data());
            gemm(
                s,
                triangle,
                Band::Lower,
                Strided::rows(prepared.inverse, CHUNK),
                Block::rows(rhs, pad.value),
                BlockMut::rows(vn, pad.value),
                Epilogue::Set,
            );
            gemm(
                s,
                [asking, pad.value, len],
                if first == 0 { Band::Lower } else { Band::Full },
                Strided::rows(&prepared.scores[first * CHUNK..], CHUNK),
                Block::rows(vn, pad.value),
                BlockMut::rows(current, pad.value),
                Epilogue::Rescaled(&faded[first..]),
            );
            for t in first..len {
                let to = value_at + t * value_stride - silent * value_stride;
                // SAFETY: this head's columns of this token are written by this task only.
                let out = unsafe { outputs.readout.part(to, value_dim) };
                simd::copy(s, out, &current[(t - first) * pad.value..][..value_dim]);
                if let Some(writes) = &outputs.writes {
                    // SAFETY: as above.
                    let out = unsafe { writes.part(value_at + t * value_stride, value_dim) };
                    simd::copy(s, out, &vn[t * pad.value..][..value_dim]);
                }
            }
            let next_readout = next_value.saturating_sub(silent * value_stride);
            simd::prefetch_at(s, outputs.readout.pointer(0), next_readout, value_stride, CHUNK, value_dim);
            if let Some(writes) = &outputs.writes {
                simd::prefetch_at(s, writes.pointer(0), next_value, value_stride, CHUNK, value_dim);
            }
            if last(chunk) {
                return; // the state after this chunk is not used
            }
            // S = tot S + (diag(d) K)ᵀ Vn
            for t in 0..len {
                simd::scale(s, &mut kq[t * pad.key..(t + 1) * pad.key], g.until_end[t]);
            }
            gemm(
                s,
                [key_dim, pad.value, len],
                Band::Full,
                Strided::transposed(kq, pad.key),
                Block::rows(vn, pad.value),
                BlockMut::panels(state, pad.key),
                Epilogue::Decay(g.whole),
            );
            if let Some(m) = chunk.boundary {
                let at = ((plan.first_boundary[b] + m) * value_heads + h) * sizes.state();
                // SAFETY: each pair of boundary and head has its own disjoint part.
                let out = unsafe { outputs.boundary_states.part(at, sizes.state()) };
                simd::unpack(key_dim, value_dim, state, out);
            }
        }
        if sizes.final_state {
            let at = (b * value_heads + h) * sizes.state();
            // SAFETY: each pair of batch row and head has its own disjoint part.
            let out = unsafe { outputs.final_state.part(at, sizes.state()) };
            simd::unpack(key_dim, value_dim, state, out);
        }
    }
}

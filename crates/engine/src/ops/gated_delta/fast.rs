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

use super::chunk::{CHUNK, Chunk, GateInput, Gates, Prepared, SQUARE, chunks, gates, load_normalised};
use super::{GatedDelta, GatedDeltaForward, GatedDeltaOptions, GatedDeltaOutput, Sizes};
use crate::array::Array;
use crate::cpu::{Carve, Cpu, Shared, with_scratch};
use crate::error::Result;
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, LANES, PANEL, Simd, Strided, gemm};
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
    input: &GatedDelta<&'a Array<f32>>,
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
    op: GatedDeltaForward,
    sizes: Sizes,
) -> Result<(GatedDeltaOutput<Tensor>, Vec<Tensor>)> {
    let (input, options, keep) = (op.input.as_ref().map(Tensor::f32), &op.options, op.keep);
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
    let kept = if keep { vec![writes, states] } else { Vec::new() };
    let like = |array| op.input.key.like(array);
    let output = GatedDeltaOutput { readout, final_state, boundary_states }.map(like);
    Ok((output, kept.into_iter().map(like).collect()))
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
    input: &'a GatedDelta<&'a Array<f32>>,
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

    /// s = d_k^-½
    #[inline(always)]
    fn scale(&self) -> f32 {
        1.0 / (self.sizes.key_dim as f32).sqrt()
    }

    /// Whether the state after a chunk is not used.
    #[inline(always)]
    fn is_last(&self, chunk: &Chunk) -> bool {
        let Sizes { tokens, final_state, .. } = self.sizes;
        chunk.start + chunk.len == tokens && chunk.boundary.is_none() && !final_state
    }
}

impl Kernel for Head<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Self { sizes, pad, plan, b, h, outputs, .. } = self;
        let mut work = Work::new(pad, &mut Carve(std::mem::take(&mut self.scratch)));
        let lying = self.load_state(work.state);
        touch(s, lying);
        // Its padding stays zero.
        work.rhs.fill(0.0);
        for chunk in &plan.chunks[b] {
            self.save_state(chunk, work.state);
            let gates = gates(s, self.gates, chunk.start * sizes.value_heads, chunk.len);
            let view = ChunkView::new(&self, chunk, &gates);
            self.load(s, view, &mut work);
            self.read_state(s, view, lying, &mut work);
            self.writes(s, view, &mut work);
            self.readout(s, view, &mut work);
            self.write_rows(s, view, &work);
            if self.is_last(chunk) {
                return;
            }
            self.update_state(s, view, &mut work);
            if let Some(m) = chunk.boundary {
                let which = (plan.first_boundary[b] + m) * sizes.value_heads + h;
                self.write_state(&outputs.boundary_states, which, work.state);
            }
        }
        if sizes.final_state {
            self.write_state(&outputs.final_state, b * sizes.value_heads + h, work.state);
        }
    }
}

/// Reads a state that is used in place once, in the order of memory. The product then reads 16 columns at a time, far
/// apart in memory, which the processor does not predict. Of many sequences, none has its state in a near cache.
#[inline(always)]
fn touch<S: Simd>(s: S, lying: Option<Block<'_>>) {
    let Some(state) = lying else { return };
    let mut sum = s.splat(0.0);
    for line in state.data.chunks_exact(PANEL) {
        sum = s.add(sum, s.load(line));
    }
    let mut lanes = [0.0; LANES];
    s.store(&mut lanes, sum);
    // Otherwise the compiler leaves out what nothing uses.
    std::hint::black_box(lanes);
}

/// Scratch buffers for one head's forward pass.
struct Work<'a> {
    /// S, panels of [d_k, d_v]
    state: &'a mut [f32],
    /// [K; Q]; for the update of the state, diag(d) K
    kq: &'a mut [f32],
    vn: &'a mut [f32],
    /// diag(β) (V − diag(e) K S)
    rhs: &'a mut [f32],
    /// [K S; Q S]; Q S is later overwritten by O
    read: &'a mut [f32],
    prepared: Prepared<'a>,
}

impl<'a> Work<'a> {
    #[inline(always)]
    fn new(pad: Padded, carve: &mut Carve<'a>) -> Self {
        Self {
            state: carve.take(pad.state()),
            kq: carve.take(2 * CHUNK * pad.key),
            vn: carve.take(CHUNK * pad.value),
            rhs: carve.take(CHUNK * pad.value),
            read: carve.take(2 * CHUNK * pad.value),
            prepared: Prepared {
                key_t: carve.take(CHUNK * pad.key),
                products: carve.take(2 * SQUARE),
                decay: carve.take(SQUARE),
                inverse: carve.take(SQUARE),
                scores: carve.take(SQUARE),
            },
        }
    }
}

/// A chunk's gates and its place in the tensors.
///
/// Only the chunk's tokens from `first` on have a query. Query and readout rows exclude the tokens without a
/// query, `sizes.silent()` per batch row, so their row index is smaller by `silent`.
#[derive(Clone, Copy)]
struct ChunkView<'a> {
    gates: &'a Gates,
    len: usize,
    first: usize,
    /// Number of tokens that have a query.
    asking: usize,
    silent: usize,
    /// Distance between the rows of two tokens.
    key_stride: usize,
    value_stride: usize,
    /// This head's columns of the chunk's first token.
    key_at: usize,
    value_at: usize,
}

impl<'a> ChunkView<'a> {
    #[inline(always)]
    fn new(head: &Head<'_>, chunk: &Chunk, gates: &'a Gates) -> Self {
        let Head { sizes, b, h, .. } = *head;
        let Sizes { tokens, value_heads, key_heads, key_dim, value_dim, .. } = sizes;
        let (key_stride, value_stride) = (key_heads * key_dim, value_heads * value_dim);
        let (len, row) = (chunk.len, b * tokens + chunk.start);
        let first = sizes.silent().saturating_sub(chunk.start).min(len);
        Self {
            gates,
            len,
            first,
            asking: len - first,
            silent: (b + 1) * sizes.silent(),
            key_stride,
            value_stride,
            key_at: row * key_stride + sizes.key_head(h) * key_dim,
            value_at: row * value_stride + h * value_dim,
        }
    }

    /// Place of the next chunk's first key.
    #[inline(always)]
    fn next_key(self) -> usize {
        self.key_at + self.len * self.key_stride
    }

    /// Place of the next chunk's first value.
    #[inline(always)]
    fn next_value(self) -> usize {
        self.value_at + self.len * self.value_stride
    }
}

/// Loading the state, the equations of one chunk, and writing the results, in that order. The next chunk's
/// rows are prefetched in portions between the products, because the number of outstanding cache misses is
/// limited.
impl<'a> Head<'a> {
    /// S before the first token: the initial state, or zero. A state that is read only once and never updated
    /// is returned, to be read in place instead of being packed into `state`.
    #[inline(always)]
    fn load_state(&self, state: &mut [f32]) -> Option<Block<'a>> {
        let Sizes { value_heads, key_dim, value_dim, .. } = self.sizes;
        let Some(t) = self.input.initial_state else {
            state.fill(0.0);
            return None;
        };
        let at = (self.b * value_heads + self.h) * self.sizes.state();
        let initial = &t.data()[at..at + self.sizes.state()];
        let first = self.plan.chunks[self.b].first();
        let once = self.kept == 0 && first.is_some_and(|chunk| self.is_last(chunk));
        if once && value_dim.is_multiple_of(PANEL) {
            return Some(Block::rows(initial, value_dim));
        }
        simd::pack(key_dim, value_dim, initial, state);
        None
    }

    /// Saves S for the backward pass, before every 64th token.
    #[inline(always)]
    #[allow(unsafe_code)]
    fn save_state(&self, chunk: &Chunk, state: &[f32]) {
        let size = self.pad.state();
        if self.kept > 0 && chunk.start.is_multiple_of(KEPT_EVERY) {
            let head = self.b * self.sizes.value_heads + self.h;
            let at = (head * self.kept + chunk.start / KEPT_EVERY) * size;
            // SAFETY: each head and each saved position has its own disjoint part.
            unsafe { self.outputs.states.part(at, size) }.copy_from_slice(state);
        }
    }

    /// [K; Q], normalised, and from them Γ, N and P.
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, view: ChunkView<'_>, work: &mut Work<'_>) {
        let (input, key_dim) = (self.input, self.sizes.key_dim);
        let ChunkView { len, asking, key_stride, key_at, .. } = view;
        load_normalised(s, len, key_dim, &input.key.data()[key_at..], key_stride, work.kq);
        let queries = &mut work.kq[len * self.pad.key..];
        if asking > 0 {
            let from = key_at + (view.first * key_stride) - view.silent * key_stride;
            load_normalised(s, asking, key_dim, &input.query.data()[from..], key_stride, queries);
        }
        simd::prefetch_rows(s, input.key.data(), view.next_key(), key_stride, CHUNK, key_dim);
        work.prepared.fill(s, view.gates, [len, asking], key_dim, work.kq, self.scale());
    }

    /// [K; Q] S, with the state in place if it is given as `lying`.
    #[inline(always)]
    fn read_state<S: Simd>(&self, s: S, view: ChunkView<'_>, lying: Option<Block<'_>>, work: &mut Work<'_>) {
        let (pad, key_dim) = (self.pad, self.sizes.key_dim);
        gemm(
            s,
            [view.len + view.asking, pad.value, key_dim],
            Band::Full,
            Strided::rows(work.kq, pad.key),
            lying.unwrap_or(Block::panels(work.state, pad.key)),
            BlockMut::rows(work.read, pad.value),
            Epilogue::Set,
        );
        let next = view.next_key().saturating_sub(view.silent * view.key_stride);
        simd::prefetch_rows(s, self.input.query.data(), next, view.key_stride, CHUNK, key_dim);
    }

    /// Vn = N diag(β) (V − diag(e) K S)
    #[inline(always)]
    fn writes<S: Simd>(&self, s: S, view: ChunkView<'_>, work: &mut Work<'_>) {
        let (pad, value_dim, g) = (self.pad, self.sizes.value_dim, view.gates);
        let values = self.input.value.data();
        for t in 0..view.len {
            let row = t * pad.value..(t + 1) * pad.value;
            let value = &values[view.value_at + t * view.value_stride..][..value_dim];
            let (b, e) = (g.write[t], g.since_start[t]);
            let held = &work.read[row.clone()];
            simd::blend(s, &mut work.rhs[row], false, (b, value), (-b * e, held));
        }
        simd::prefetch_rows(s, values, view.next_value(), view.value_stride, CHUNK, value_dim);
        gemm(
            s,
            [view.len, pad.value, view.len],
            Band::Lower,
            Strided::rows(work.prepared.inverse, CHUNK),
            Block::rows(work.rhs, pad.value),
            BlockMut::rows(work.vn, pad.value),
            Epilogue::Set,
        );
    }

    /// O = s diag(e) Q S + P Vn, for the tokens that have a query.
    #[inline(always)]
    fn readout<S: Simd>(&self, s: S, view: ChunkView<'_>, work: &mut Work<'_>) {
        let (pad, scale, first) = (self.pad, self.scale(), view.first);
        let faded = view.gates.since_start.map(|e| scale * e);
        gemm(
            s,
            [view.asking, pad.value, view.len],
            if first == 0 { Band::Lower } else { Band::Full },
            Strided::rows(&work.prepared.scores[first * CHUNK..], CHUNK),
            Block::rows(work.vn, pad.value),
            BlockMut::rows(&mut work.read[view.len * pad.value..], pad.value),
            Epilogue::Rescaled(&faded[first..]),
        );
    }

    /// Writes O and, for the backward pass, Vn.
    #[inline(always)]
    #[allow(unsafe_code)]
    fn write_rows<S: Simd>(&self, s: S, view: ChunkView<'_>, work: &Work<'_>) {
        let Self { pad, outputs, .. } = *self;
        let ChunkView { len, first, value_stride, value_at, .. } = view;
        let (value_dim, silent) = (self.sizes.value_dim, view.silent * value_stride);
        let current = &work.read[len * pad.value..];
        for t in first..len {
            let to = value_at + t * value_stride;
            // SAFETY: this head's columns of this token are written by this task only.
            let out = unsafe { outputs.readout.part(to - silent, value_dim) };
            simd::copy(s, out, &current[(t - first) * pad.value..][..value_dim]);
            if let Some(writes) = &outputs.writes {
                // SAFETY: as above.
                let out = unsafe { writes.part(to, value_dim) };
                simd::copy(s, out, &work.vn[t * pad.value..][..value_dim]);
            }
        }
        let next = view.next_value();
        let next_readout = next.saturating_sub(silent);
        simd::prefetch_at(s, outputs.readout.pointer(0), next_readout, value_stride, CHUNK, value_dim);
        if let Some(writes) = &outputs.writes {
            simd::prefetch_at(s, writes.pointer(0), next, value_stride, CHUNK, value_dim);
        }
    }

    /// S' = tot S + (diag(d) K)ᵀ Vn, which replaces S.
    #[inline(always)]
    fn update_state<S: Simd>(&self, s: S, view: ChunkView<'_>, work: &mut Work<'_>) {
        let (pad, len, g) = (self.pad, view.len, view.gates);
        for t in 0..len {
            simd::scale(s, &mut work.kq[t * pad.key..(t + 1) * pad.key], g.until_end[t]);
        }
        gemm(
            s,
            [self.sizes.key_dim, pad.value, len],
            Band::Full,
            Strided::transposed(work.kq, pad.key),
            Block::rows(work.vn, pad.value),
            BlockMut::panels(work.state, pad.key),
            Epilogue::Decay(g.whole),
        );
    }

    /// Writes S as state `which` of an output.
    #[inline(always)]
    #[allow(unsafe_code)]
    fn write_state(&self, to: &Shared<'_>, which: usize, state: &[f32]) {
        let Sizes { key_dim, value_dim, .. } = self.sizes;
        let size = self.sizes.state();
        // SAFETY: each pair of boundary, or batch row, and head has its own disjoint part.
        let out = unsafe { to.part(which * size, size) };
        simd::unpack(key_dim, value_dim, state, out);
    }
}

//! Optimised forward pass of the log-linear gated delta rule, in chunks of 16 tokens.
//!
//! As in the plain gated delta rule, chunks turn vector operations on the states into matrix products. Only
//! non-empty levels are stored and processed; a sequence of T tokens has at most about log2 T of them. Heads are
//! distributed over threads.
//!
//! ```text
//! O = (M ∘ Λ) diag(β) V + Σ_m diag(λ_m) pQ S^m
//! level m above the target:  S^m ← tot S^m + (diag(d) K)ᵀ (−W S^m)
//! target:  T = Σ of the levels below it,   S = tot T + (diag(d) K)ᵀ (U − W T)
//! ```
//! The target of a chunk is the level that becomes non-empty at the end of the chunk. A last chunk that does not
//! end at a multiple of 16 has no target; if the states after it are requested, its tokens are processed one by
//! one. For the backward pass, the states at the start of each block are saved.

use super::chunk::{Chunk, Prep, Segment, Source, chunks, filled, segments};
use super::{LogLinearForward, LogLinearOutput, Sizes, bit_length};
use crate::array::Array;
use crate::cpu::{Carve, Cpu, Shared, with_scratch};
use crate::error::Result;
use crate::ops::gated_delta::chunk::CHUNK;
use crate::ops::gated_delta::fast::Padded;
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, Simd, Strided, gemm};
use crate::tensor::Tensor;

pub(crate) use super::fast_backward::backward;

/// Chunks shorter than this are processed token by token if the states after them are requested.
const FEW: usize = 4;

pub(crate) fn forward(cpu: &Cpu, op: LogLinearForward, sizes: Sizes) -> Result<LogLinearOutput<Tensor>> {
    let (input, options, keep) = (op.input.each(Tensor::f32), &op.options, op.keep);
    let initial = op.initial.as_ref().map(Tensor::f32);
    let n = sizes.heads;
    let pad = Padded::of(&n);
    let chunks = chunks(sizes.position, n.tokens);
    let (segments, kept) = if keep { segments(&chunks) } else { (Vec::new(), 0) };
    let mut readouts = cpu.uninit(input.value.shape());
    let mut state = options.want_state.then(|| cpu.uninit(&sizes.state_shape()));
    let mut saved = cpu.uninit(&[n.batch * n.value_heads, kept, pad.state()]);
    {
        let readouts = Shared::new(readouts.data_mut());
        let state = state.as_mut().map(|t| Shared::new(t.data_mut()));
        let saved = Shared::new(saved.data_mut());
        cpu.parallel(n.batch * n.value_heads, |task| {
            let source = Source::new(sizes, input, options, task / n.value_heads, task % n.value_heads);
            with_scratch(Head::scratch(&source), |scratch| {
                let (chunks, segments) = (&chunks, &segments);
                let (readouts, state, saved) = (&readouts, state.as_ref(), &saved);
                cpu.level().run(Head {
                    source,
                    chunks,
                    segments,
                    kept,
                    task,
                    initial,
                    readouts,
                    state,
                    saved,
                    scratch,
                });
            });
        });
    }
    let like = |array| op.input.value.like(array);
    Ok(LogLinearOutput { readouts: like(readouts), state: state.map(like), saved: keep.then(|| like(saved)) })
}

/// Forward pass of one value head of one batch row over all tokens.
struct Head<'a> {
    source: Source<'a>,
    chunks: &'a [Chunk],
    segments: &'a [Segment],
    kept: usize,
    task: usize,
    initial: Option<&'a Array<f32>>,
    readouts: &'a Shared<'a>,
    state: Option<&'a Shared<'a>>,
    saved: &'a Shared<'a>,
    scratch: &'a mut [f32],
}

impl Head<'_> {
    fn scratch(source: &Source<'_>) -> usize {
        let pad = source.pad;
        source.sizes.levels[1] * pad.state()
            + Prep::size(pad, source.sizes.scales)
            + 2 * CHUNK * pad.value
            + 16
    }
}

impl Kernel for Head<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { source, task, .. } = self;
        let (sizes, pad) = (source.sizes, source.pad);
        let n = sizes.heads;
        let mut carve = Carve(self.scratch);
        let mut states = Levels { data: carve.take(sizes.levels[1] * pad.state()), size: pad.state() };
        let mut prep = Prep::new(pad, sizes.scales, &mut carve);
        let held = carve.take(CHUNK * pad.value);
        let out = carve.take(CHUNK * pad.value);
        load_initial(s, &source, self.initial, &mut states);
        let mut next_segment = self.segments.iter().peekable();
        for (index, chunk) in self.chunks.iter().enumerate() {
            if let Some(segment) = next_segment.next_if(|segment| segment.chunks.start == index) {
                for (i, m) in filled(chunk.position).enumerate() {
                    let at = (task * self.kept + segment.kept + i) * pad.state();
                    // SAFETY: each saved state has its own disjoint part.
                    unsafe { self.saved.part(at, pad.state()) }.copy_from_slice(states.of(m));
                }
            }
            let whole = chunk.target().is_some() && chunk.len >= FEW;
            if whole || self.state.is_none() {
                prep.fill(s, &source, chunk);
                chunk_step(s, &source, chunk, &prep, &mut states, held, out);
            } else {
                for t in 0..chunk.len {
                    prep.load(s, &source, chunk.start + t, 1);
                    let out = &mut out[t * pad.value..(t + 1) * pad.value];
                    token_step(s, &source, chunk.position + t, &mut prep, &mut states, held, out);
                }
            }
            for t in 0..chunk.len {
                let [_, at, _] = source.at(chunk.start + t);
                // SAFETY: this head's columns of this token are written by this task only.
                let to = unsafe { self.readouts.part(at, n.value_dim) };
                to.copy_from_slice(&out[t * pad.value..][..n.value_dim]);
            }
        }
        if let Some(state) = self.state {
            let end = sizes.position + n.tokens;
            for m in 0..sizes.levels[1] {
                // SAFETY: each level of each head has its own disjoint part.
                let to = unsafe { state.part((task * sizes.levels[1] + m) * n.state(), n.state()) };
                if filled(end).any(|f| f == m) {
                    simd::unpack(n.key_dim, n.value_dim, states.of(m), to);
                } else {
                    to.fill(0.0);
                }
            }
        }
    }
}

/// States of all levels, each in panels.
pub(crate) struct Levels<'a> {
    pub data: &'a mut [f32],
    pub size: usize,
}

impl Levels<'_> {
    #[inline(always)]
    pub(crate) fn of(&self, m: usize) -> &[f32] {
        &self.data[m * self.size..][..self.size]
    }

    #[inline(always)]
    pub(crate) fn of_mut(&mut self, m: usize) -> &mut [f32] {
        &mut self.data[m * self.size..][..self.size]
    }

    /// Mutable access to the states of levels `low` and `high`, where `low` < `high`.
    #[inline(always)]
    pub(crate) fn pair(&mut self, low: usize, high: usize) -> (&mut [f32], &mut [f32]) {
        let (a, b) = self.data.split_at_mut(high * self.size);
        (&mut a[low * self.size..][..self.size], &mut b[..self.size])
    }

    /// Sets the state of `target` to the sum of `levels`; if there are none, returns false and leaves it unchanged.
    #[inline(always)]
    fn merge<S: Simd>(&mut self, s: S, levels: impl Iterator<Item = usize>, target: usize) -> bool {
        let mut any = false;
        for m in levels {
            let (from, to) = self.pair(m, target);
            if any {
                simd::add_scaled(s, to, 1.0, from);
            } else {
                to.copy_from_slice(from);
            }
            any = true;
        }
        any
    }
}

/// Loads the non-empty levels before the first token, merged for its position.
#[inline(always)]
fn load_initial<S: Simd>(s: S, source: &Source<'_>, initial: Option<&Array<f32>>, states: &mut Levels<'_>) {
    let sizes = &source.sizes;
    let n = &sizes.heads;
    let target = sizes.position.trailing_zeros() as usize + 1;
    for m in filled(sizes.position) {
        let Some(initial) = initial else {
            states.of_mut(m).fill(0.0);
            continue;
        };
        let from = &initial.data()[(source.b * n.value_heads + source.h) * sizes.levels[0] * n.state()..];
        simd::pack(n.key_dim, n.value_dim, &from[m * n.state()..][..n.state()], states.of_mut(m));
        if m == target {
            for low in 0..target {
                let low = &from[low * n.state()..][..n.state()];
                simd::add_rows(s, n.key_dim, n.value_dim, low, states.of_mut(m));
            }
        }
    }
}

/// C ← epilogue(C, A S) with S in panels; rows of A have `pad.key` elements, rows of C `pad.value`.
#[inline(always)]
pub(crate) fn times_state<S: Simd>(
    s: S,
    source: &Source<'_>,
    rows: usize,
    a: &[f32],
    state: &[f32],
    c: &mut [f32],
    epilogue: Epilogue<'_>,
) {
    let pad = source.pad;
    gemm(
        s,
        [rows, pad.value, source.sizes.heads.key_dim],
        Band::Full,
        Strided::rows(a, pad.key),
        Block::panels(state, pad.key),
        BlockMut::rows(c, pad.value),
        epilogue,
    );
}

/// State ← epilogue(state, Aᵀ B), where A and B have `rows` rows.
#[inline(always)]
pub(crate) fn into_state<S: Simd>(
    s: S,
    pad: Padded,
    rows: usize,
    a: &[f32],
    b: &[f32],
    state: &mut [f32],
    epilogue: Epilogue<'_>,
) {
    gemm(
        s,
        [pad.key, pad.value, rows],
        Band::Full,
        Strided::transposed(a, pad.key),
        Block::rows(b, pad.value),
        BlockMut::panels(state, pad.key),
        epilogue,
    );
}

/// Computes the readouts of a chunk, and the states after it if it ends at a multiple of 16.
#[inline(always)]
fn chunk_step<S: Simd>(
    s: S,
    source: &Source<'_>,
    chunk: &Chunk,
    prep: &Prep<'_>,
    states: &mut Levels<'_>,
    held: &mut [f32],
    out: &mut [f32],
) {
    let (pad, len) = (source.pad, chunk.len);
    let tot = prep.gates.whole;
    let pq = &prep.wq[len * pad.key..];
    gemm(
        s,
        [len, pad.value, len],
        Band::Lower,
        Strided::rows(prep.mixed, CHUNK),
        Block::rows(prep.written, pad.value),
        BlockMut::rows(out, pad.value),
        Epilogue::Set,
    );
    let target = chunk.target();
    for m in filled(chunk.position) {
        let weights = prep.weights(source, chunk, m);
        times_state(s, source, len, pq, states.of(m), out, Epilogue::Weighted(&weights));
        if target.is_some_and(|target| m > target) {
            times_state(s, source, len, prep.wq, states.of(m), held, Epilogue::Set);
            into_state(s, pad, len, prep.faded, held, states.of_mut(m), Epilogue::Decay(tot));
        }
    }
    let Some(target) = target else { return };
    if states.merge(s, filled(chunk.position).take_while(|&m| m < target), target) {
        held[..len * pad.value].copy_from_slice(&prep.u[..len * pad.value]);
        times_state(s, source, len, prep.wq, states.of(target), held, Epilogue::Add);
        into_state(s, pad, len, prep.faded, held, states.of_mut(target), Epilogue::Decay(tot));
    } else {
        into_state(s, pad, len, prep.faded, prep.u, states.of_mut(target), Epilogue::Set);
    }
}

/// Processes one token: decay and delta update of the non-empty levels, the readout, and the merge of the new write
/// and lower levels into the level that the next position fills.
#[inline(always)]
fn token_step<S: Simd>(
    s: S,
    source: &Source<'_>,
    position: usize,
    prep: &mut Prep<'_>,
    states: &mut Levels<'_>,
    held: &mut [f32],
    out: &mut [f32],
) {
    let pad = source.pad;
    let (alpha, beta) = (prep.gates.whole, prep.gates.write[0]);
    let (k, q) = prep.kq[..2 * pad.key].split_at(pad.key);
    let meet = simd::dot(s, k, q);
    let own = prep.lambda[source.scale_of(0) * CHUNK];
    simd::scale_to(s, out, own * beta * meet, &prep.value[..pad.value]);
    // −β k
    let faded = &mut prep.faded[..pad.key];
    simd::scale_to(s, faded, -beta, k);
    for m in filled(position) {
        // Sᵀk and Sᵀq before the decay
        times_state(s, source, 2, prep.kq, states.of(m), held, Epilogue::Set);
        let (by_key, by_query) = held[..2 * pad.value].split_at_mut(pad.value);
        simd::scale(s, by_key, alpha);
        let lambda = prep.lambda[source.scale_of(m) * CHUNK];
        simd::add_scaled(s, out, lambda * alpha, by_query);
        simd::add_scaled(s, out, -lambda * beta * meet, by_key);
        into_state(s, pad, 1, faded, by_key, states.of_mut(m), Epilogue::Decay(alpha));
    }
    let target = (position + 1).trailing_zeros() as usize + 1;
    debug_assert!(target <= bit_length(position + 1));
    let any = states.merge(s, filled(position).take_while(|&m| m < target), target);
    simd::scale_to(s, faded, beta, &prep.kq[..pad.key]);
    let epilogue = if any { Epilogue::Add } else { Epilogue::Set };
    into_state(s, pad, 1, faded, prep.value, states.of_mut(target), epilogue);
}

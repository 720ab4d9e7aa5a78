//! Optimised causal attention, forward pass: tiles of keys with a running (online) softmax.
//!
//! The [Tq, Tk] score matrix would dominate memory for long sequences, so it is never stored. A task processes one
//! head and a chunk of its queries, and iterates over the keys in tiles. Kᵀ and V of a tile are packed into panels
//! once for all queries of the chunk. Each block of queries then computes its scores, converts them to weights
//! relative to its maximum score so far, and adds weights·V to its running sum. Exponentials use base 2, so queries
//! are scaled by d^-½ log2 e.
//!
//! Tiles are aligned to key 0, and each query's operations have a fixed order. A query's result is therefore
//! bit-identical whatever other queries are in the call.
//!
//! Memory besides the outputs: scratch of a fixed size per thread.

use std::f64::consts::{LN_2, LOG2_E};

pub(crate) use super::fast_backward::backward;
use super::{AttentionBlocks, AttentionForward, BLOCK_TOKENS, Sizes, fast_decode};
use crate::array::Array;
use crate::cpu::{Carve, Cpu, Shared, with_scratch};
use crate::error::Result;
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, LANES, Simd, Strided, gemm};
use crate::tensor::Tensor;

/// Number of keys per tile.
pub(crate) const TILE: usize = 128;
/// Row stride of the score buffer: nine cache lines, so that rows map to different cache sets.
pub(super) const STRIDE: usize = TILE + 16;
/// Number of queries per matrix product.
pub(super) const BLOCK: usize = 48;
/// Maximum number of queries per task.
const CHUNK: usize = 8 * BLOCK;
/// Columns per panel.
pub(super) const PANEL: usize = 16;

/// Returns the output and, with `keep`, what the backward pass needs: the output and L [B, Tq, H].
pub(crate) fn forward(cpu: &Cpu, op: AttentionForward, z: Sizes) -> Result<(Tensor, Vec<Tensor>)> {
    let input = op.input.as_ref().map(Tensor::f32);
    let mut output = cpu.uninit(&z.output());
    let mut sums = op.keep.then(|| cpu.uninit(&[z.batch, z.queries, z.heads]));
    let inputs = Inputs {
        query: input.query,
        key: Source { blocks: &[input.key], per_block: z.keys.max(1) },
        value: Source { blocks: &[input.value], per_block: z.keys.max(1) },
    };
    run(cpu, z, inputs, &mut output, sums.as_mut());
    let output = op.input.query.like(output);
    let kept = sums.map_or_else(Vec::new, |sums| vec![output.clone(), output.like(sums)]);
    Ok((output, kept))
}

/// Forward pass over a key-value cache in blocks, for inference. It processes the same tiles in the same order as
/// [`forward`], so results are bit-identical.
pub(crate) fn forward_blocks(cpu: &Cpu, op: AttentionBlocks, z: Sizes) -> Result<Tensor> {
    let keys: Vec<&Array<f32>> = op.blocks.iter().map(|block| block.key.f32()).collect();
    let values: Vec<&Array<f32>> = op.blocks.iter().map(|block| block.value.f32()).collect();
    let inputs = Inputs {
        query: op.query.f32(),
        key: Source { blocks: &keys, per_block: BLOCK_TOKENS },
        value: Source { blocks: &values, per_block: BLOCK_TOKENS },
    };
    let mut output = cpu.uninit(&z.output());
    run(cpu, z, inputs, &mut output, None);
    Ok(op.query.like(output))
}

/// Queries, and keys and values that may be split over several blocks.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub query: &'a Array<f32>,
    pub key: Source<'a>,
    pub value: Source<'a>,
}

/// Rows of keys or values in tensors of `per_block` tokens each; `per_block` is a multiple of [`TILE`] if there are
/// several.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    blocks: &'a [&'a Array<f32>],
    per_block: usize,
}

impl<'a> Source<'a> {
    /// The head's rows of the block that contains row `first`, and the index of that row within the block.
    #[inline(always)]
    pub(super) fn head(&self, heads: usize, b: usize, h: usize, first: usize) -> (Head<'a>, usize) {
        let block = self.blocks[first / self.per_block];
        (Head::new(block, block.shape()[1], heads, b, h), first % self.per_block)
    }
}

fn run(cpu: &Cpu, z: Sizes, input: Inputs<'_>, output: &mut Array<f32>, sums: Option<&mut Array<f32>>) {
    let out = &Shared::new(output.data_mut());
    let sums = sums.map(|l| Shared::new(l.data_mut()));
    let sums = sums.as_ref();
    if z.queries == 1 {
        return fast_decode::run(cpu, z, input, out, sums);
    }
    let heads = z.batch * z.heads;
    // Use smaller chunks for short calls with few heads, so that every thread has work.
    let chunk = (z.queries * heads / (4 * cpu.threads())).next_multiple_of(BLOCK).clamp(BLOCK, CHUNK);
    let chunks = z.queries.div_ceil(chunk);
    let task = |t: usize| {
        // The last chunks see the most keys; start the longest tasks first to balance the load.
        let (c, head) = (chunks - 1 - t / heads, t % heads);
        let rows = c * chunk..((c + 1) * chunk).min(z.queries);
        let (b, h) = (head / z.heads, head % z.heads);
        with_scratch(Forward::scratch(z, rows.len()), |scratch| {
            cpu.level().run(Forward { z, input, b, h, rows, out, sums, scratch });
        });
    };
    if heads * z.queries * z.keys * (z.dk + z.dv) < 64 * 1024 {
        (0..chunks * heads).for_each(task);
    } else {
        cpu.parallel(chunks * heads, task);
    }
}

/// 2^x for x ≤ 127; 0 below −126.5. Uses 2^x = 2^n (1 + r·p(r)) with n = round(x), |r| ≤ ½.
#[inline(always)]
pub(super) fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    // `max` returns its second operand if either is NaN, so NaN propagates; 2^−127 evaluates to 0.
    let x = s.max(s.splat(-127.0), x);
    let n = s.round(x);
    let r = s.sub(x, n);
    let mut p = s.splat(1.535_336_2e-4);
    for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1] {
        p = s.fma(p, r, s.splat(c));
    }
    s.mul(s.fma(p, r, s.splat(1.0)), s.pow2(n))
}

/// Scalar version of [`exp2`].
#[inline(always)]
fn exp2_one<S: Simd>(s: S, x: f32) -> f32 {
    s.largest(exp2(s, s.splat(x)))
}

/// Rows of head `h` of x [B, T, H·width]; row t of batch entry b starts at `start + t·stride`.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub data: &'a [f32],
    pub width: usize,
    pub stride: usize,
}

impl<'a> Head<'a> {
    #[inline(always)]
    pub(super) fn new(x: &'a Array<f32>, tokens: usize, heads: usize, b: usize, h: usize) -> Self {
        let (stride, width) = (x.width(), x.width() / heads);
        Self { data: &x.data()[b * tokens * stride + h * width..], width, stride }
    }

    #[inline(always)]
    pub(super) fn row(&self, t: usize) -> &'a [f32] {
        &self.data[t * self.stride..][..self.width]
    }

    /// Copies rows `first..first + count`, multiplied by `factor`, to rows of `to` with stride `padded` ≥ width;
    /// the padding is set to 0.
    #[inline(always)]
    pub(super) fn copy_rows<S: Simd>(
        &self,
        s: S,
        first: usize,
        count: usize,
        factor: f32,
        to: &mut [f32],
        padded: usize,
    ) {
        for (i, to) in to.chunks_exact_mut(padded).take(count).enumerate() {
            simd::scale_to(s, to, factor, self.row(first + i));
            to[self.width..].fill(0.0);
        }
    }

    /// Packs rows `first..first + count` into panels of 16 columns with TILE rows each; columns past the width are
    /// 0.
    #[inline(always)]
    pub(super) fn pack_panels(&self, first: usize, count: usize, to: &mut [f32]) {
        for (p, panel) in to.chunks_exact_mut(TILE * PANEL).enumerate() {
            let columns = p * PANEL..((p + 1) * PANEL).min(self.width);
            for (i, to) in panel.chunks_exact_mut(PANEL).take(count).enumerate() {
                let from = &self.row(first + i)[columns.clone()];
                if let Ok(from) = <&[f32; PANEL]>::try_from(from) {
                    to.copy_from_slice(from);
                } else {
                    to[..from.len()].copy_from_slice(from);
                    to[from.len()..].fill(0.0);
                }
            }
        }
    }

    /// Packs the transpose of rows `first..first + count` into panels of 16 columns (16 rows of x), each `width` ×
    /// 16; columns past `count` are 0.
    #[inline(always)]
    pub(super) fn pack_transposed<S: Simd>(&self, s: S, first: usize, count: usize, to: &mut [f32]) {
        let whole = self.width / LANES * LANES;
        for (p, panel) in to.chunks_exact_mut(self.width * PANEL).enumerate() {
            let Some(rows) = count.checked_sub(p * PANEL).filter(|&r| r > 0) else { break };
            let (rows, first) = (rows.min(PANEL), first + p * PANEL);
            let whole = if rows == PANEL { whole } else { 0 };
            simd::transpose(s, PANEL, whole, &self.data[first * self.stride..], self.stride, panel, PANEL);
            for (c, to) in panel.chunks_exact_mut(PANEL).enumerate().skip(whole) {
                for (i, to) in to.iter_mut().enumerate() {
                    *to = if i < rows { self.row(first + i)[c] } else { 0.0 };
                }
            }
        }
    }
}

struct Forward<'a> {
    z: Sizes,
    input: Inputs<'a>,
    b: usize,
    h: usize,
    rows: std::ops::Range<usize>,
    out: &'a Shared<'a>,
    sums: Option<&'a Shared<'a>>,
    scratch: &'a mut [f32],
}

impl Forward<'_> {
    fn scratch(z: Sizes, rows: usize) -> usize {
        let wide = z.dv.next_multiple_of(PANEL);
        [rows * z.dk, rows * wide, rows, rows, TILE * z.dk, TILE * wide, BLOCK * STRIDE]
            .map(Carve::size)
            .iter()
            .sum()
    }
}

impl Kernel for Forward<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { z, input, b, h, rows, .. } = self;
        let (dk, wide, offset) = (z.dk, z.dv.next_multiple_of(PANEL), z.offset());
        let mut carve = Carve(self.scratch);
        // Per row of the chunk: scaled query, weighted sum of values, maximum score, sum of weights. Per tile: Kᵀ
        // and V. Per block: scores.
        let q = carve.take(rows.len() * dk);
        let o = carve.take(rows.len() * wide);
        let largest = carve.take(rows.len());
        let total = carve.take(rows.len());
        let kt = carve.take(TILE * dk);
        let v = carve.take(TILE * wide);
        let scores = carve.take(BLOCK * STRIDE);
        let factor = (z.scale() * LOG2_E) as f32;
        Head::new(input.query, z.queries, z.heads, b, h).copy_rows(s, rows.start, rows.len(), factor, q, dk);
        o.fill(0.0);
        largest.fill(f32::NEG_INFINITY);
        total.fill(0.0);

        let end = offset + rows.end;
        // Tiles that no query of the chunk sees change nothing, so they are skipped.
        let begin = z.first_key(offset + rows.start) / TILE * TILE;
        let g = z.kv_head(h);
        for k0 in (begin..end).step_by(TILE) {
            let count = TILE.min(end - k0);
            let (key, first_key) = input.key.head(z.kv_heads, b, g, k0);
            let (value, first_value) = input.value.head(z.kv_heads, b, g, k0);
            key.pack_transposed(s, first_key, count, kt);
            value.pack_panels(first_value, count, v);
            // Earlier rows of the chunk precede the tile and see none of its keys.
            let first = k0.saturating_sub(offset + rows.start);
            for r0 in (first / BLOCK * BLOCK..rows.len()).step_by(BLOCK) {
                let (r0, r1) = (r0.max(first), (r0 + BLOCK).min(rows.len()));
                let seen = count.min(offset + rows.start + r1 - k0);
                let columns = seen.next_multiple_of(PANEL);
                let a = Strided::rows(&q[r0 * dk..], dk);
                let c = BlockMut::rows(scores, STRIDE);
                gemm(s, [r1 - r0, columns, dk], Band::Full, a, Block::panels(kt, dk), c, Epilogue::Set);
                for (r, scores) in (r0..r1).zip(scores.chunks_exact_mut(STRIDE)) {
                    let position = offset + rows.start + r;
                    let sees = seen.min(position + 1 - k0);
                    let before = z.first_key(position).saturating_sub(k0);
                    if before >= sees {
                        // The whole tile is before the window.
                        scores[..columns].fill(0.0);
                        continue;
                    }
                    scores[..before].fill(f32::NEG_INFINITY);
                    scores[sees..columns].fill(f32::NEG_INFINITY);
                    let decay = weights(s, &mut scores[..columns], &mut largest[r], &mut total[r]);
                    if decay != 1.0 {
                        simd::scale(s, &mut o[r * wide..(r + 1) * wide], decay);
                    }
                }
                let c = BlockMut::rows(&mut o[r0 * wide..], wide);
                let a = Strided::rows(scores, STRIDE);
                gemm(s, [r1 - r0, wide, seen], Band::Full, a, Block::panels(v, TILE), c, Epilogue::Add);
            }
        }

        for (r, i) in rows.enumerate() {
            let at = (b * z.queries + i) * z.heads + h;
            // SAFETY: head h of rows `rows` of batch entry b belongs to this task only.
            let (y, sum) = unsafe { (self.out.part(at * z.dv, z.dv), self.sums.map(|l| l.part(at, 1))) };
            finish(s, &o[r * wide..], largest[r], total[r], y, sum);
        }
    }
}

/// Writes O = weighted sum / sum of weights, and L.
#[inline(always)]
pub(super) fn finish<S: Simd>(
    s: S,
    o: &[f32],
    largest: f32,
    total: f32,
    y: &mut [f32],
    sum: Option<&mut [f32]>,
) {
    simd::scale_to(s, y, 1.0 / total, o);
    if let Some(sum) = sum {
        sum[0] = (largest + total.log2()) * LN_2 as f32;
    }
}

/// Processes one row of a tile: replaces scores by weights 2^(score − largest) and updates `largest` and `total`.
/// Returns the factor by which earlier weights must be multiplied. The length is a multiple of 16.
#[inline(always)]
pub(super) fn weights<S: Simd>(s: S, scores: &mut [f32], largest: &mut f32, total: &mut f32) -> f32 {
    let found = simd::largest(s, scores);
    let mut decay = 1.0;
    if found > *largest {
        decay = exp2_one(s, *largest - found);
        *largest = found;
    }
    let shift = s.splat(*largest);
    let mut sums = [s.splat(0.0); 2];
    for pair in scores.chunks_exact_mut(2 * LANES) {
        for (half, sum) in pair.chunks_exact_mut(LANES).zip(&mut sums) {
            let weight = exp2(s, s.sub(s.load(half), shift));
            s.store(half, weight);
            *sum = s.add(*sum, weight);
        }
    }
    *total = *total * decay + s.sum(s.add(sums[0], sums[1]));
    decay
}

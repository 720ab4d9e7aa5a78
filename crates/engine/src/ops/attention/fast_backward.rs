//! Optimised causal attention, backward pass. The weights are recomputed from the saved L, tile by tile, because
//! storing them would need a [Tq, Tk] matrix.
//!
//! dK and dV sum over queries, dQ sums over keys, so a naive split over threads would have several writers per row.
//! Instead, positions are divided into spans, and a task is a pair of a key span and a query span. Tasks run in
//! waves: wave w contains the pairs (c, c + w) for all c. No two tasks of a wave share keys or queries, so every
//! gradient row has a single writer at a time and sums its terms in wave order, independent of the number of
//! threads. A task does all query heads that read one key head, in order.
//!
//! Memory besides the outputs: D [B, Tq, H], and scratch of a fixed size per thread.

use std::f64::consts::{LN_2, LOG2_E};

use super::fast::{BLOCK, Head, PANEL, STRIDE, TILE, exp2};
use super::{Attention, AttentionBackward, Sizes};
use crate::array::Array;
use crate::cpu::{Carve, Cpu, Shared, with_scratch};
use crate::error::{Result, bad_value};
use crate::op::Op;
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, LANES, Simd, Strided, gemm};
use crate::tensor::Tensor;

/// Maximum number of positions per span.
const SPAN: usize = 4 * TILE;

pub(crate) fn backward(cpu: &Cpu, op: AttentionBackward, z: Sizes) -> Result<Attention<Tensor>> {
    let (input, heads, gradient) = (op.input.as_ref().map(Tensor::f32), z.heads, op.gradient.f32());
    let (output, sums) = match &op.kept[..] {
        [output, sums] if output.shape() == z.output() && sums.shape() == [z.batch, z.queries, heads] => {
            (output.f32(), sums.f32())
        }
        kept => {
            let message = format!("{} tensors are not what the forward pass kept", kept.len());
            return bad_value(AttentionBackward::NAME, message);
        }
    };
    let like = |array| op.gradient.like(array);
    let mut query = cpu.zeros(input.query.shape());
    let mut key = cpu.zeros(input.key.shape());
    let mut value = cpu.zeros(input.value.shape());
    if gradient.is_empty() {
        return Ok(Attention { query, key, value }.map(like));
    }
    let overlap = overlap(cpu, z, gradient, output);
    {
        let (query, key, value) =
            (Shared::new(query.data_mut()), Shared::new(key.data_mut()), Shared::new(value.data_mut()));
        let into = Attention { query: &query, key: &key, value: &value };
        // Use smaller spans for short calls with few heads, so that every thread has work. The size depends only on
        // the shape, so results do not depend on the number of threads.
        let size = (z.keys * z.batch * heads / 16).next_multiple_of(TILE).clamp(TILE, SPAN);
        let spans = z.keys.div_ceil(size);
        let (kv_heads, sharing) = (z.kv_heads, heads / z.kv_heads);
        for wave in 0..spans {
            cpu.parallel((spans - wave) * z.batch * kv_heads, |t| {
                let (c, head) = (t / (z.batch * kv_heads), t % (z.batch * kv_heads));
                let (b, g) = (head / kv_heads, head % kv_heads);
                let span = |i: usize| i * size..((i + 1) * size).min(z.keys);
                let (keys, positions) = (span(c), span(c + wave));
                // The queries are the last positions.
                let queries =
                    positions.start.max(z.offset()) - z.offset()..positions.end.max(z.offset()) - z.offset();
                if queries.is_empty() || keys.end <= z.first_key(z.offset() + queries.start) {
                    return;
                }
                for h in g * sharing..(g + 1) * sharing {
                    let (keys, queries) = (keys.clone(), queries.clone());
                    with_scratch(Pair::scratch(z), |scratch| {
                        let (sums, overlap) = (sums.data(), overlap.data());
                        cpu.level().run(Pair {
                            z,
                            input,
                            gradient,
                            sums,
                            overlap,
                            b,
                            h,
                            keys,
                            queries,
                            into,
                            scratch,
                        });
                    });
                }
            });
        }
    }
    Ok(Attention { query, key, value }.map(like))
}

/// D = Σ dO ∘ O for every query and head, [B, Tq, H].
#[allow(unsafe_code)]
fn overlap(cpu: &Cpu, z: Sizes, gradient: &Array<f32>, output: &Array<f32>) -> Array<f32> {
    let mut overlap = cpu.uninit(&[z.batch, z.queries, z.heads]);
    let rows = overlap.len();
    let out = Shared::new(overlap.data_mut());
    cpu.for_rows(cpu.row_parts(rows, z.dv), |_, range| {
        // SAFETY: parts are disjoint.
        let d = unsafe { out.part(range.start, range.len()) };
        let (start, len) = (range.start * z.dv, range.len() * z.dv);
        let (a, b) = (&gradient.data()[start..start + len], &output.data()[start..start + len]);
        cpu.level().run(Dots { width: z.dv, a, b, d });
    });
    overlap
}

struct Dots<'a> {
    width: usize,
    a: &'a [f32],
    b: &'a [f32],
    d: &'a mut [f32],
}

impl Kernel for Dots<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.a.chunks_exact(self.width).zip(self.b.chunks_exact(self.width));
        for (d, (a, b)) in self.d.iter_mut().zip(rows) {
            *d = simd::dot(s, a, b);
        }
    }
}

/// Task for one key span and one query span: adds their contributions to dK and dV, and to dQ.
struct Pair<'a> {
    z: Sizes,
    input: Attention<&'a Array<f32>>,
    gradient: &'a Array<f32>,
    sums: &'a [f32],
    overlap: &'a [f32],
    b: usize,
    h: usize,
    keys: std::ops::Range<usize>,
    queries: std::ops::Range<usize>,
    into: Attention<&'a Shared<'a>>,
    scratch: &'a mut [f32],
}

impl Pair<'_> {
    fn scratch(z: Sizes) -> usize {
        let (wk, wv) = (z.dk.next_multiple_of(PANEL), z.dv.next_multiple_of(PANEL));
        let tile = [TILE * z.dk, TILE * z.dv, TILE * wk, TILE * wk, TILE * wv];
        let block = [BLOCK * wk, BLOCK * wv, BLOCK * wk, BLOCK * STRIDE, BLOCK * STRIDE];
        tile.iter().chain(&block).map(|&len| Carve::size(len)).sum()
    }
}

impl Kernel for Pair<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { z, input, b, h, .. } = self;
        let (wk, wv, offset) = (z.dk.next_multiple_of(PANEL), z.dv.next_multiple_of(PANEL), z.offset());
        let mut carve = Carve(self.scratch);
        // Per tile: Kᵀ, Vᵀ and K as panels, dK and dV. Per block: Q (scaled), dO, dQ, P and dS.
        let kt = carve.take(TILE * z.dk);
        let vt = carve.take(TILE * z.dv);
        let k = carve.take(TILE * wk);
        let dk = carve.take(TILE * wk);
        let dv = carve.take(TILE * wv);
        let q = carve.take(BLOCK * wk);
        let d_out = carve.take(BLOCK * wv);
        let dq = carve.take(BLOCK * wk);
        let p = carve.take(BLOCK * STRIDE);
        let ds = carve.take(BLOCK * STRIDE);
        let query = Head::new(input.query, z.queries, z.heads, b, h);
        let g = z.kv_head(h);
        let key = Head::new(input.key, z.keys, z.kv_heads, b, g);
        let value = Head::new(input.value, z.keys, z.kv_heads, b, g);
        let gradient = Head::new(self.gradient, z.queries, z.heads, b, h);
        let factor = (z.scale() * LOG2_E) as f32;

        for k0 in self.keys.clone().step_by(TILE) {
            let first = self.queries.start.max(k0.saturating_sub(offset));
            // Skip the tile if no query of the span sees it.
            if first >= self.queries.end || k0 + TILE <= z.first_key(offset + first) {
                continue;
            }
            let count = TILE.min(self.keys.end - k0).min(offset + self.queries.end - k0);
            key.pack_transposed(s, k0, count, kt);
            value.pack_transposed(s, k0, count, vt);
            key.pack_panels(k0, count, k);
            dk.fill(0.0);
            dv.fill(0.0);
            for i0 in (first..self.queries.end).step_by(BLOCK) {
                let rows = BLOCK.min(self.queries.end - i0);
                let seen = count.min(offset + i0 + rows - k0);
                let columns = seen.next_multiple_of(PANEL);
                query.copy_rows(s, i0, rows, factor, q, wk);
                gradient.copy_rows(s, i0, rows, 1.0, d_out, wv);
                let size = [rows, columns, z.dk];
                let (a, c) = (Strided::rows(q, wk), BlockMut::rows(p, STRIDE));
                gemm(s, size, Band::Full, a, Block::panels(kt, z.dk), c, Epilogue::Set);
                let size = [rows, columns, z.dv];
                let (a, c) = (Strided::rows(d_out, wv), BlockMut::rows(ds, STRIDE));
                gemm(s, size, Band::Full, a, Block::panels(vt, z.dv), c, Epilogue::Set);
                for (i, (p, ds)) in
                    p.chunks_exact_mut(STRIDE).zip(ds.chunks_exact_mut(STRIDE)).enumerate().take(rows)
                {
                    let at = (b * z.queries + i0 + i) * z.heads + h;
                    let position = offset + i0 + i;
                    let sees = seen.min(position + 1 - k0);
                    let before = z.first_key(position).saturating_sub(k0).min(sees);
                    p[..before].fill(f32::NEG_INFINITY);
                    let sum = self.sums[at] * LOG2_E as f32;
                    slopes(s, &mut p[..columns], &mut ds[..columns], sees, sum, self.overlap[at]);
                }
                let (a, c) = (Strided::transposed(p, STRIDE), BlockMut::rows(dv, wv));
                gemm(s, [seen, wv, rows], Band::Full, a, Block::rows(d_out, wv), c, Epilogue::Add);
                let (a, c) = (Strided::transposed(ds, STRIDE), BlockMut::rows(dk, wk));
                gemm(s, [seen, wk, rows], Band::Full, a, Block::rows(q, wk), c, Epilogue::Add);
                let (a, c) = (Strided::rows(ds, STRIDE), BlockMut::rows(dq, wk));
                gemm(s, [rows, wk, seen], Band::Full, a, Block::panels(k, TILE), c, Epilogue::Set);
                for (i, dq) in dq.chunks_exact(wk).enumerate().take(rows) {
                    let at = (b * z.queries + i0 + i) * z.heads + h;
                    // SAFETY: no other task of the wave writes these queries of head h, which reads key head g.
                    let to = unsafe { self.into.query.part(at * z.dk, z.dk) };
                    simd::add_scaled(s, to, z.scale() as f32, dq);
                }
            }
            for (j, (dk, dv)) in dk.chunks_exact(wk).zip(dv.chunks_exact(wv)).enumerate().take(count) {
                let at = (b * z.keys + k0 + j) * z.kv_heads + g;
                // SAFETY: no other task of the wave writes these keys of key head g.
                let (key, value) =
                    unsafe { (self.into.key.part(at * z.dk, z.dk), self.into.value.part(at * z.dv, z.dv)) };
                // The queries were scaled by d^-½ log2 e; multiplying by ln 2 leaves the factor d^-½.
                simd::add_scaled(s, key, LN_2 as f32, dk);
                simd::add_scaled(s, value, 1.0, dv);
            }
        }
    }
}

/// Processes one row: replaces scores by P = 2^(score − sum), and dP by dS = P ∘ (dP − overlap); 0 from `sees` on.
#[inline(always)]
fn slopes<S: Simd>(s: S, p: &mut [f32], ds: &mut [f32], sees: usize, sum: f32, overlap: f32) {
    p[sees..].fill(f32::NEG_INFINITY);
    let (sum, overlap) = (s.splat(sum), s.splat(overlap));
    for (p, ds) in p.chunks_exact_mut(LANES).zip(ds.chunks_exact_mut(LANES)) {
        let weight = exp2(s, s.sub(s.load(p), sum));
        s.store(p, weight);
        let slope = s.mul(weight, s.sub(s.load(ds), overlap));
        s.store(ds, slope);
    }
}

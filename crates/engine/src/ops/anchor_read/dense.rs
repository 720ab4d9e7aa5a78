//! Dense anchor reader, forward pass: every token of a tile reads all visible anchors.
//!
//! The number of anchors is unbounded, so scores are never stored for all of them: two passes stream over the
//! anchors. The first finds the maximum and the sum of the softmax; the second recomputes the scores, forms the
//! weights and adds diag(π_m) (Q A_m) to the tile's readout, one anchor at a time. At any time there are scores for
//! at most 64 anchors and 96 tokens.

use super::Segment;
use super::tile::{ANCHORS, Call, PACK_FROM, TOKENS};
use crate::cpu::{Carve, Shared};
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, LANES, PANEL, Simd, Strided, gemm};

/// Tokens `first..first + count` of a segment, for one head.
pub(super) struct DenseTile<'a> {
    pub call: &'a Call<'a>,
    pub segment: &'a Segment,
    pub first: usize,
    pub count: usize,
    pub head: usize,
    pub readout: &'a Shared<'a>,
    /// log Σ exp of the scores, [rows, value_heads].
    pub log_sum: Option<&'a Shared<'a>>,
    /// π, [rows, value_heads, anchors].
    pub weights: Option<&'a Shared<'a>>,
    pub scratch: &'a mut [f32],
}

impl DenseTile<'_> {
    pub(super) fn scratch(call: &Call<'_>) -> usize {
        let pad = call.pad;
        TOKENS * (pad.key + 2 * pad.routing + pad.value + ANCHORS + 3) + ANCHORS * pad.routing + pad.state()
    }
}

impl Kernel for DenseTile<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { call, segment, first, count, head, .. } = self;
        let (sizes, pad) = (call.sizes, call.pad);
        let width = simd::padded(count);
        let mut carve = Carve(self.scratch);
        let q = carve.take(TOKENS * pad.key);
        let rho = carve.take(TOKENS * pad.routing);
        let rho_t = carve.take(TOKENS * pad.routing);
        let out = carve.take(TOKENS * pad.value);
        let scores = carve.take(ANCHORS * TOKENS);
        let largest = &mut carve.take(TOKENS)[..width];
        let sum = &mut carve.take(TOKENS)[..width];
        let null = &mut carve.take(TOKENS)[..width];
        let gathered = carve.take(ANCHORS * pad.routing);
        let panels = carve.take(pad.state());
        for t in 0..count {
            call.load_query(s, first + t, head, &mut q[t * pad.key..(t + 1) * pad.key]);
        }
        call.load_routing(s, first, count, head, rho, rho_t);
        call.load_null(first, count, head, null);
        largest.copy_from_slice(null);
        sum.fill(if call.null_score.is_some() { 1.0 } else { 0.0 });
        let seen = segment.visible.len();
        let ranges = || (0..seen).step_by(ANCHORS).map(move |a| a..(a + ANCHORS).min(seen));
        for range in ranges() {
            call.scores(s, &segment.visible, range.clone(), head, rho_t, width, gathered, scores);
            online_softmax(s, &scores[..range.len() * width], width, largest, sum);
        }
        out[..width * pad.value].fill(0.0);
        for range in ranges() {
            if seen > ANCHORS {
                call.scores(s, &segment.visible, range.clone(), head, rho_t, width, gathered, scores);
            }
            for row in scores[..range.len() * width].chunks_exact_mut(width) {
                for t in (0..width).step_by(LANES) {
                    let e = simd::exp(s, s.sub(s.load(&row[t..]), s.load(&largest[t..])));
                    s.store(&mut row[t..], s.div(e, s.load(&sum[t..])));
                }
            }
            for (i, weights) in scores[..range.len() * width].chunks_exact(width).enumerate() {
                let anchor = segment.visible.get(range.start + i);
                let plain = if count < PACK_FROM { call.plain_state(anchor, head) } else { None };
                let state = match plain {
                    Some(state) => Block::rows(state, sizes.value_dim),
                    None => {
                        call.pack_state(s, anchor, head, panels);
                        Block::panels(panels, pad.key)
                    }
                };
                gemm(
                    s,
                    [count, pad.value, sizes.key_dim],
                    Band::Full,
                    Strided::rows(q, pad.key),
                    state,
                    BlockMut::panels(out, width),
                    Epilogue::Weighted(weights),
                );
                if let Some(all) = self.weights {
                    for t in 0..count {
                        let at = ((first + t) * sizes.value_heads + head) * sizes.anchors + anchor;
                        // SAFETY: this element belongs to this token and head, which belong to this task only.
                        unsafe { all.set(at, weights[t]) };
                    }
                }
            }
        }
        for t in 0..count {
            let at = (first + t) * sizes.value_heads + head;
            // SAFETY: this token and head belong to this task only.
            let to = unsafe { self.readout.part(at * sizes.value_dim, sizes.value_dim) };
            for (p, to) in to.chunks_mut(PANEL).enumerate() {
                to.copy_from_slice(&out[p * width * PANEL + t * PANEL..][..to.len()]);
            }
            if let Some(log_sum) = self.log_sum {
                // SAFETY: as above.
                unsafe { log_sum.set(at, largest[t] + sum[t].ln()) };
            }
        }
    }
}

/// Updates the running maximum and the sum of exponentials relative to it with rows of scores.
#[inline(always)]
fn online_softmax<S: Simd>(s: S, scores: &[f32], width: usize, largest: &mut [f32], sum: &mut [f32]) {
    for t in (0..width).step_by(LANES) {
        let old = s.load(&largest[t..]);
        let mut best = old;
        for row in scores.chunks_exact(width) {
            best = s.max(best, s.load(&row[t..]));
        }
        // Initially `old` is −inf and the sum is 0; exp(−inf − best) is 0, so the sum stays 0.
        let mut total = s.mul(s.load(&sum[t..]), simd::exp(s, s.sub(old, best)));
        for row in scores.chunks_exact(width) {
            total = s.add(total, simd::exp(s, s.sub(s.load(&row[t..]), best)));
        }
        s.store(&mut largest[t..], best);
        s.store(&mut sum[t..], total);
    }
}

//! Backward pass of the anchor reader for one group of segments and one head.
//!
//! All dense tiles and then all sparse blocks of a group are processed in order by one task, because they
//! accumulate into the gradients of the same anchors. One product dO A_mᵀ serves both the score gradients and the
//! query gradients.

use std::ops::Range;

use super::sparse::{Groups, Selection, copy_panels, tokens};
use super::tile::{ANCHORS, Call, TOKENS};
use super::{NO_ANCHOR, Segment};
use crate::cpu::{Carve, Shared};
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, LANES, PANEL, Simd, Strided, gemm};

/// Gradient outputs; each element is written only by the task that owns its head and group.
pub(super) struct Outputs<'a> {
    pub query: Shared<'a>,
    pub routing_query: Shared<'a>,
    pub routing_keys: Shared<'a>,
    /// [N, value_heads, padded state], in panels.
    pub states: Shared<'a>,
    pub null_score: Option<Shared<'a>>,
}

/// Inputs of the backward pass in addition to the call's tensors.
#[derive(Clone, Copy)]
pub(super) struct BackwardInputs<'a> {
    pub readout: &'a [f32],
    pub gradient: &'a [f32],
    pub log_sum: &'a [f32],
    pub chosen: &'a [u32],
    pub weights: &'a [f32],
    pub top_k: usize,
}

/// Backward task of one head and one group of segments.
pub(super) struct Backward<'a> {
    pub call: &'a Call<'a>,
    pub given: BackwardInputs<'a>,
    pub head: usize,
    pub segments: &'a [Segment],
    /// Indices of segments that read all their visible anchors.
    pub dense: &'a [usize],
    /// Blocks of the top-K segments.
    pub blocks: &'a [Vec<Range<usize>>],
    pub out: &'a Outputs<'a>,
    pub scratch: &'a mut [f32],
}

struct Work<'a> {
    q: &'a mut [f32],
    /// π_m q
    weighted_q: &'a mut [f32],
    dout: &'a mut [f32],
    /// dO in panels
    dout_panels: &'a mut [f32],
    /// dO A_mᵀ
    back: &'a mut [f32],
    dq: &'a mut [f32],
    panels: &'a mut [f32],
    panels_t: &'a mut [f32],
    rho: &'a mut [f32],
    rho_t: &'a mut [f32],
    drho: &'a mut [f32],
    keys: &'a mut [f32],
    dkeys: &'a mut [f32],
    gathered: &'a mut [f32],
    /// Rows of tokens: scores, then weights, then their gradients.
    scores: &'a mut [f32],
    delta: &'a mut [f32],
    log_sum: &'a mut [f32],
    /// Of all tokens of a sparse block.
    block: BlockWork<'a>,
}

struct BlockWork<'a> {
    q: &'a mut [f32],
    dq: &'a mut [f32],
    /// 1 / |q|
    factors: &'a mut [f32],
    delta: &'a mut [f32],
    /// da of the K selections.
    dscores: &'a mut [f32],
}

impl Backward<'_> {
    pub(super) fn scratch(call: &Call<'_>, blocks: &[Vec<Range<usize>>], top_k: usize) -> usize {
        let pad = call.pad;
        TOKENS * (4 * pad.key + 2 * pad.value + 3 * pad.routing + ANCHORS + 2)
            + 2 * pad.state()
            + 3 * ANCHORS * pad.routing
            + 2 * largest(blocks) * pad.key
            + 2 * Carve::size(largest(blocks))
            + Carve::size(largest(blocks) * top_k)
    }
}

/// Number of tokens in the largest block.
fn largest(blocks: &[Vec<Range<usize>>]) -> usize {
    blocks.iter().map(|block| tokens(block)).max().unwrap_or(0)
}

impl Kernel for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let pad = self.call.pad;
        let mut carve = Carve(std::mem::take(&mut self.scratch));
        let largest = largest(self.blocks);
        let mut work = Work {
            q: carve.take(TOKENS * pad.key),
            weighted_q: carve.take(TOKENS * pad.key),
            dout: carve.take(TOKENS * pad.value),
            dout_panels: carve.take(TOKENS * pad.value),
            back: carve.take(TOKENS * pad.key),
            dq: carve.take(TOKENS * pad.key),
            panels: carve.take(pad.state()),
            panels_t: carve.take(pad.state()),
            rho: carve.take(TOKENS * pad.routing),
            rho_t: carve.take(TOKENS * pad.routing),
            drho: carve.take(TOKENS * pad.routing),
            keys: carve.take(ANCHORS * pad.routing),
            dkeys: carve.take(ANCHORS * pad.routing),
            gathered: carve.take(ANCHORS * pad.routing),
            scores: carve.take(ANCHORS * TOKENS),
            delta: carve.take(TOKENS),
            log_sum: carve.take(TOKENS),
            block: BlockWork {
                q: carve.take(largest * pad.key),
                dq: carve.take(largest * pad.key),
                factors: carve.take(largest),
                delta: carve.take(largest),
                dscores: carve.take(largest * self.given.top_k),
            },
        };
        for &i in self.dense {
            let segment = &self.segments[i];
            for offset in (0..segment.len).step_by(TOKENS) {
                let count = TOKENS.min(segment.len - offset);
                self.tile(s, segment, segment.start + offset, count, &mut work);
            }
        }
        for block in self.blocks {
            let BackwardInputs { top_k, chosen, .. } = self.given;
            let groups = Groups::new(self.call, block, self.head, top_k, chosen);
            self.block(s, block, &groups, &mut work);
        }
    }
}

impl Backward<'_> {
    /// δ = <dO, O> of a token.
    #[inline(always)]
    fn delta<S: Simd>(&self, s: S, row: usize) -> f32 {
        let sizes = self.call.sizes;
        let at = (row * sizes.value_heads + self.head) * sizes.value_dim;
        let span = at..at + sizes.value_dim;
        simd::dot(s, &self.given.gradient[span.clone()], &self.given.readout[span])
    }

    /// Loads dO of a token into a row, and into row `t` of panels with `rows` rows.
    #[inline(always)]
    fn load_gradient(&self, row: usize, t: usize, rows: usize, work: &mut Work<'_>) {
        let (sizes, pad) = (self.call.sizes, self.call.pad);
        let at = (row * sizes.value_heads + self.head) * sizes.value_dim;
        let dout = &self.given.gradient[at..at + sizes.value_dim];
        let to = &mut work.dout[t * pad.value..(t + 1) * pad.value];
        copy_panels(dout, to);
        let whole = sizes.value_dim / PANEL * PANEL;
        to[whole..sizes.value_dim].copy_from_slice(&dout[whole..]);
        to[sizes.value_dim..].fill(0.0);
        for (p, from) in to.as_chunks::<PANEL>().0.iter().enumerate() {
            copy_panels(from, &mut work.dout_panels[(p * rows + t) * PANEL..][..PANEL]);
        }
    }

    /// Loads A_m into `panels` and its transpose into `panels_t`.
    #[inline(always)]
    fn load_state<S: Simd>(&self, s: S, anchor: usize, work: &mut Work<'_>) {
        self.call.pack_state(s, anchor, self.head, work.panels);
        simd::transpose_panels(s, self.call.pad.key, self.call.pad.value, work.panels, work.panels_t);
    }

    /// Computes dO A_mᵀ for `count` rows.
    #[inline(always)]
    fn read_back<S: Simd>(&self, s: S, count: usize, work: &mut Work<'_>) {
        let pad = self.call.pad;
        gemm(
            s,
            [count, pad.key, self.call.sizes.value_dim],
            Band::Full,
            Strided::rows(work.dout, pad.value),
            Block::panels(work.panels_t, pad.value),
            BlockMut::rows(work.back, pad.key),
            Epilogue::Set,
        );
    }

    /// dA_m += (π_m q)ᵀ dO over `count` rows, with dO in panels of `rows` rows.
    #[inline(always)]
    #[allow(unsafe_code)]
    fn add_state<S: Simd>(&self, s: S, anchor: usize, count: usize, rows: usize, work: &Work<'_>) {
        let (sizes, pad) = (self.call.sizes, self.call.pad);
        let at = (anchor * sizes.value_heads + self.head) * pad.state();
        // SAFETY: this head and the anchors of this group belong to this task only.
        let state = unsafe { self.out.states.part(at, pad.state()) };
        gemm(
            s,
            [sizes.key_dim, pad.value, count],
            Band::Full,
            Strided::transposed(work.weighted_q, pad.key),
            Block::panels(work.dout_panels, rows),
            BlockMut::panels(state, pad.key),
            Epilogue::Add,
        );
    }

    /// Adds the gradient of a query, backpropagated through q ← s q / |q|.
    #[inline(always)]
    #[allow(unsafe_code)]
    fn add_query<S: Simd>(&self, s: S, row: usize, factor: f32, q: &[f32], dq: &[f32]) {
        let sizes = self.call.sizes;
        let (dk, scale) = (sizes.key_dim, self.call.scale());
        let at = (row * sizes.key_heads + self.head / sizes.group()) * dk;
        // SAFETY: this token's columns of this key head belong to this task only.
        let out = unsafe { self.out.query.part(at, dk) };
        simd::add_scaled(s, out, factor * scale, &dq[..dk]);
        simd::add_scaled(s, out, -factor * simd::dot(s, &dq[..dk], &q[..dk]) / scale, &q[..dk]);
    }

    #[inline(always)]
    #[allow(unsafe_code)]
    fn write_null(&self, row: usize, log_sum: f32, delta: f32) {
        let at = row * self.call.sizes.value_heads + self.head;
        if let (Some(out), Some(null)) = (&self.out.null_score, self.call.null_score) {
            // SAFETY: this token and head belong to this task only.
            unsafe { out.set(at, -(null[at] - log_sum).exp() * delta) };
        }
    }

    /// Backward step of a dense tile.
    #[inline(always)]
    #[allow(unsafe_code)]
    fn tile<S: Simd>(&self, s: S, segment: &Segment, first: usize, count: usize, work: &mut Work<'_>) {
        let Self { call, head, .. } = *self;
        let (sizes, pad) = (call.sizes, call.pad);
        let width = simd::padded(count);
        let mut factors = [0.0f32; TOKENS];
        for t in 0..count {
            factors[t] = call.load_query(s, first + t, head, &mut work.q[t * pad.key..(t + 1) * pad.key]);
            self.load_gradient(first + t, t, width, work);
            work.delta[t] = self.delta(s, first + t);
            work.log_sum[t] = self.given.log_sum[(first + t) * sizes.value_heads + head];
            self.write_null(first + t, work.log_sum[t], work.delta[t]);
        }
        work.log_sum[count..width].fill(0.0);
        work.delta[count..width].fill(0.0);
        call.load_routing(s, first, count, head, work.rho, work.rho_t);
        work.dq[..count * pad.key].fill(0.0);
        work.drho[..width * pad.routing].fill(0.0);
        let seen = segment.visible.len();
        for from in (0..seen).step_by(ANCHORS) {
            let range = from..(from + ANCHORS).min(seen);
            let anchors = range.len();
            let visible = &segment.visible;
            call.scores(s, visible, range.clone(), head, work.rho_t, width, work.gathered, work.scores);
            for row in work.scores[..anchors * width].chunks_exact_mut(width) {
                for t in (0..width).step_by(LANES) {
                    let e = simd::exp(s, s.sub(s.load(&row[t..]), s.load(&work.log_sum[t..])));
                    s.store(&mut row[t..], e);
                }
            }
            for i in 0..anchors {
                let anchor = visible.get(from + i);
                self.load_state(s, anchor, work);
                self.read_back(s, count, work);
                for t in 0..count {
                    let span = t * pad.key..(t + 1) * pad.key;
                    let weight = &mut work.scores[i * width + t];
                    let (q, back) = (&work.q[span.clone()], &work.back[span.clone()]);
                    let (weighted_q, dq) = (&mut work.weighted_q[span.clone()], &mut work.dq[span]);
                    let along = weigh(s, *weight, q, back, weighted_q, dq);
                    *weight *= along - work.delta[t];
                }
                self.add_state(s, anchor, count, width, work);
                let keys = &mut work.keys[i * pad.routing..(i + 1) * pad.routing];
                let at = (anchor * sizes.value_heads + head) * sizes.routing_dim;
                keys[..sizes.routing_dim].copy_from_slice(&call.routing_keys[at..at + sizes.routing_dim]);
                keys[sizes.routing_dim..].fill(0.0);
            }
            // dκ = da ρ and dρ = daᵀ κ over the anchors of this iteration.
            gemm(
                s,
                [anchors, pad.routing, count],
                Band::Full,
                Strided::rows(work.scores, width),
                Block::rows(work.rho, pad.routing),
                BlockMut::rows(work.dkeys, pad.routing),
                Epilogue::Set,
            );
            gemm(
                s,
                [count, pad.routing, anchors],
                Band::Full,
                Strided::transposed(work.scores, width),
                Block::rows(work.keys, pad.routing),
                BlockMut::rows(work.drho, pad.routing),
                Epilogue::Add,
            );
            for i in 0..anchors {
                let at = (visible.get(from + i) * sizes.value_heads + head) * sizes.routing_dim;
                // SAFETY: this head and the anchors of this group belong to this task only.
                let to = unsafe { self.out.routing_keys.part(at, sizes.routing_dim) };
                simd::add_scaled(s, to, 1.0, &work.dkeys[i * pad.routing..][..sizes.routing_dim]);
            }
        }
        for t in 0..count {
            let span = t * pad.key..(t + 1) * pad.key;
            self.add_query(s, first + t, factors[t], &work.q[span.clone()], &work.dq[span]);
            let at = ((first + t) * sizes.value_heads + head) * sizes.routing_dim;
            // SAFETY: this token and head belong to this task only.
            let to = unsafe { self.out.routing_query.part(at, sizes.routing_dim) };
            simd::scale_to(s, to, call.routing_scale, &work.drho[t * pad.routing..][..sizes.routing_dim]);
        }
    }

    /// Backward step of a sparse block: anchors in ascending order, each with all tokens that selected it.
    #[inline(always)]
    fn block<S: Simd>(&self, s: S, ranges: &[Range<usize>], groups: &Groups, work: &mut Work<'_>) {
        let Self { call, head, given, .. } = *self;
        let (heads, key) = (call.sizes.value_heads, call.pad.key);
        for (local, row) in ranges.iter().cloned().flatten().enumerate() {
            let q = &mut work.block.q[local * key..(local + 1) * key];
            work.block.factors[local] = call.load_query(s, row, head, q);
            let delta = self.delta(s, row);
            work.block.delta[local] = delta;
            self.write_null(row, given.log_sum[row * heads + head], delta);
        }
        work.block.dq[..tokens(ranges) * key].fill(0.0);
        for anchor in 0..call.sizes.anchors {
            let group = groups.of(anchor);
            if group.is_empty() {
                continue;
            }
            self.load_state(s, anchor, work);
            for part in group.chunks(TOKENS) {
                let count = part.len();
                for (t, &Selection { row, local, .. }) in part.iter().enumerate() {
                    let q = &work.block.q[local as usize * key..][..key];
                    copy_panels(q, &mut work.q[t * key..(t + 1) * key]);
                    self.load_gradient(row, t, count, work);
                }
                self.read_back(s, count, work);
                for (t, &Selection { row, local, k }) in part.iter().enumerate() {
                    let (local, k) = (local as usize, k as usize);
                    let span = t * key..(t + 1) * key;
                    let weight = given.weights[(row * heads + head) * given.top_k + k];
                    let (q, back) = (&work.q[span.clone()], &work.back[span.clone()]);
                    let dq = &mut work.block.dq[local * key..(local + 1) * key];
                    let along = weigh(s, weight, q, back, &mut work.weighted_q[span], dq);
                    work.block.dscores[local * given.top_k + k] = weight * (along - work.block.delta[local]);
                }
                self.add_state(s, anchor, count, count, work);
            }
        }
        for (local, row) in ranges.iter().cloned().flatten().enumerate() {
            let span = local * key..(local + 1) * key;
            let BlockWork { q, dq, factors, dscores, .. } = &work.block;
            self.add_query(s, row, factors[local], &q[span.clone()], &dq[span]);
            self.add_routing(s, row, &dscores[local * given.top_k..(local + 1) * given.top_k]);
        }
    }

    /// dρ += scale Σ_m da_m κ_m and dκ_m += scale da_m ρ for a token and its selections m.
    #[inline(always)]
    #[allow(unsafe_code)]
    fn add_routing<S: Simd>(&self, s: S, row: usize, dscores: &[f32]) {
        let Self { call, head, given, .. } = *self;
        let (dr, heads) = (call.sizes.routing_dim, call.sizes.value_heads);
        let at = row * heads + head;
        let rho = &call.routing_query[at * dr..(at + 1) * dr];
        // SAFETY: this token and head belong to this task only.
        let drho = unsafe { self.out.routing_query.part(at * dr, dr) };
        let chosen = &given.chosen[at * given.top_k..(at + 1) * given.top_k];
        for (&anchor, &dscore) in chosen.iter().zip(dscores).filter(|(anchor, _)| **anchor != NO_ANCHOR) {
            let key_at = (anchor as usize * heads + head) * dr;
            let dscore = call.routing_scale * dscore;
            simd::add_scaled(s, drho, dscore, &call.routing_keys[key_at..key_at + dr]);
            // SAFETY: this head and the anchors of this group belong to this task only.
            simd::add_scaled(s, unsafe { self.out.routing_keys.part(key_at, dr) }, dscore, rho);
        }
    }
}

/// weighted_q = weight·q and dq += weight·back in a single pass; returns <back, q>. Lengths are multiples of 8.
#[inline(always)]
fn weigh<S: Simd>(s: S, weight: f32, q: &[f32], back: &[f32], weighted_q: &mut [f32], dq: &mut [f32]) -> f32 {
    let w = s.splat(weight);
    let mut along = s.splat(0.0);
    let inputs = q.chunks_exact(LANES).zip(back.chunks_exact(LANES));
    let outputs = weighted_q.chunks_exact_mut(LANES).zip(dq.chunks_exact_mut(LANES));
    for ((q, back), (weighted_q, dq)) in inputs.zip(outputs) {
        let (q, back) = (s.load(q), s.load(back));
        along = s.fma(back, q, along);
        s.store(weighted_q, s.mul(w, q));
        let sum = s.fma(w, back, s.load(dq));
        s.store(dq, sum);
    }
    s.sum(along)
}

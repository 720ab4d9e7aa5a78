//! A tile of one token, as in a decoding step: anchors in the lanes instead of tokens. Every sum has the terms and the
//! order that it has in a larger tile, so that the bits are the same; states are read where they lie.

use std::cmp::Ordering;

use super::stored::Codes;
use super::tile::{ANCHORS, Call};
use super::{NO_ANCHOR, Segment, Visible};
use crate::cpu::{Carve, Shared};
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, LANES, PANEL, Simd, Strided, gemm, put};

/// Reads all that token `row` sees, one head.
pub(super) struct DenseOne<'a> {
    pub call: &'a Call<'a>,
    pub segment: &'a Segment,
    pub row: usize,
    pub head: usize,
    pub readout: &'a Shared<'a>,
    /// log Σ exp of the scores, [rows, value_heads].
    pub log_sum: Option<&'a Shared<'a>>,
    /// π, [rows, value_heads, anchors].
    pub weights: Option<&'a Shared<'a>>,
    pub scratch: &'a mut [f32],
}

/// Numbers that scoring `seen` anchors takes: ρ, keys, and the scores.
fn scoring(call: &Call<'_>, seen: usize) -> usize {
    (1 + LANES) * call.pad.routing + Carve::size(seen)
}

impl DenseOne<'_> {
    pub(super) fn scratch(call: &Call<'_>, segment: &Segment) -> usize {
        let pad = call.pad;
        scoring(call, segment.visible.len()) + ANCHORS + pad.key + pad.value + pad.state()
    }
}

impl Kernel for DenseOne<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { call, segment, row, head, .. } = self;
        let (sizes, pad, seen) = (call.sizes, call.pad, segment.visible.len());
        let mut carve = Carve(self.scratch);
        let scores = scores(s, call, segment, row, head, &mut carve);
        let exps = carve.take(ANCHORS);
        let q = carve.take(pad.key);
        let out = carve.take(pad.value);
        let panels = carve.take(pad.state());
        call.load_query(s, row, head, q);
        let mut largest = [0.0];
        call.load_null(row, 1, head, &mut largest);
        let [mut largest] = largest;
        let mut sum = if call.null_score.is_some() { 1.0 } else { 0.0 };
        for block in scores.chunks(ANCHORS) {
            let old = largest;
            largest = block.iter().fold(old, |m, &v| if m > v { m } else { v });
            let exp = |v: S::V| simd::exp(s, s.sub(v, s.splat(largest)));
            s.store(exps, exp(s.splat(old)));
            sum *= exps[0];
            for (from, to) in block.chunks_exact(LANES).zip(exps.chunks_exact_mut(LANES)) {
                s.store(to, exp(s.load(from)));
            }
            // Past the last anchor there are zeros.
            exps[..block.len()].iter().for_each(|e| sum += e);
        }
        for block in scores.chunks_exact_mut(LANES) {
            let e = simd::exp(s, s.sub(s.load(block), s.splat(largest)));
            s.store(block, s.div(e, s.splat(sum)));
        }
        out.fill(0.0);
        for (i, weight) in scores[..seen].iter().enumerate() {
            let anchor = segment.visible.get(i);
            let weight = Epilogue::Weighted(std::slice::from_ref(weight));
            if i + 1 < seen {
                call.ask(s, segment.visible.get(i + 1), head);
            }
            call.read_one(s, anchor, head, q, panels, out, weight);
        }
        let at = row * sizes.value_heads + head;
        // SAFETY: this token and head belong to this task alone.
        let to = unsafe { self.readout.part(at * sizes.value_dim, sizes.value_dim) };
        to.copy_from_slice(&out[..sizes.value_dim]);
        if let Some(all) = self.weights {
            for (i, &weight) in scores[..seen].iter().enumerate() {
                // SAFETY: numbers of this token and head, which belong to this task alone.
                unsafe { all.set(at * sizes.anchors + segment.visible.get(i), weight) };
            }
        }
        if let Some(log_sum) = self.log_sum {
            // SAFETY: as above.
            unsafe { log_sum.set(at, largest + sum.ln()) };
        }
    }
}

/// The scores of all anchors that a token sees, and −inf up to a multiple of eight.
#[inline(always)]
#[allow(unsafe_code)]
fn scores<'a, S: Simd>(
    s: S,
    call: &Call<'_>,
    segment: &Segment,
    row: usize,
    head: usize,
    carve: &mut Carve<'a>,
) -> &'a mut [f32] {
    let (width, wide, seen) = (call.sizes.routing_dim, call.pad.routing, segment.visible.len());
    let rho = carve.take(wide);
    let rows = carve.take(LANES * wide);
    let scores = carve.take(seen.next_multiple_of(LANES));
    let from = &call.routing_query[(row * call.sizes.value_heads + head) * width..][..width];
    simd::scale_to(s, &mut rho[..width], call.routing_scale, from);
    let stride = call.sizes.value_heads * width;
    let at = |i: usize| segment.visible.get(i) * stride + head * width;
    let mut done = 0;
    if width.is_multiple_of(LANES) && matches!(segment.visible, Visible::Run(_)) {
        // Whole keys of anchors that stand one after the other are read where they lie.
        let keys = |first: usize, count: usize| &call.routing_keys[at(first)..at(first + count - 1) + width];
        while done + MANY * LANES <= seen {
            let to = &mut scores[done..done + MANY * LANES];
            score_blocks::<S, MANY>(s, keys(done, MANY * LANES), stride, &rho[..width], to);
            done += MANY * LANES;
        }
        while done + LANES <= seen {
            let to = &mut scores[done..done + LANES];
            score_blocks::<S, 1>(s, keys(done, LANES), stride, &rho[..width], to);
            done += LANES;
        }
    }
    for first in (done..seen).step_by(LANES) {
        let (to, count) = (&mut scores[first..first + LANES], LANES.min(seen - first));
        for i in 0..count {
            simd::copy(s, &mut rows[i * wide..][..width], &call.routing_keys[at(first + i)..][..width]);
        }
        let mut acc = s.splat(0.0);
        for k in (0..width).step_by(LANES) {
            let mut turned = [0.0; LANES * LANES];
            // SAFETY: eight rows of `wide` numbers, of which k + 8 exist; what is past a key is not used.
            unsafe { s.transpose8(rows.as_ptr().add(k), wide, turned.as_mut_ptr(), LANES) };
            for (j, &rho) in rho[k..width.min(k + LANES)].iter().enumerate() {
                acc = s.fma(s.load(&turned[j * LANES..]), s.splat(rho), acc);
            }
        }
        s.store(to, acc);
        to[count..].fill(f32::NEG_INFINITY);
    }
    scores
}

/// Blocks of eight anchors that are scored side by side, so that no sum waits for itself.
const MANY: usize = 4;

/// The scores of B blocks of eight anchors whose keys are `stride` apart.
#[inline(always)]
#[allow(unsafe_code)]
fn score_blocks<S: Simd, const B: usize>(s: S, keys: &[f32], stride: usize, rho: &[f32], to: &mut [f32]) {
    assert!(rho.len().is_multiple_of(LANES) && (B * LANES - 1) * stride + rho.len() <= keys.len());
    let mut acc = [s.splat(0.0); B];
    let mut turned = [[0.0; LANES * LANES]; B];
    for (k, rho) in rho.chunks_exact(LANES).enumerate() {
        for b in 0..B {
            // SAFETY: the assertion bounds eight rows of eight numbers.
            unsafe {
                let from = keys.as_ptr().add(b * LANES * stride + k * LANES);
                s.transpose8(from, stride, turned[b].as_mut_ptr(), LANES);
            }
        }
        for j in 0..LANES {
            let rho = s.splat(rho[j]);
            for b in 0..B {
                acc[b] = s.fma(s.load(&turned[b][j * LANES..]), rho, acc[b]);
            }
        }
    }
    for b in 0..B {
        s.store(&mut to[b * LANES..], acc[b]);
    }
}

/// Chooses for token `row`, one head.
pub(super) struct ChooseOne<'a> {
    pub call: &'a Call<'a>,
    pub segment: &'a Segment,
    pub row: usize,
    pub head: usize,
    /// Anchors of this token and head, [K], ascending.
    pub chosen: &'a mut [u32],
    /// Their weights.
    pub weights: &'a mut [f32],
    pub log_sum: &'a Shared<'a>,
    pub scratch: &'a mut [f32],
}

impl ChooseOne<'_> {
    pub(super) fn scratch(call: &Call<'_>, segment: &Segment) -> usize {
        scoring(call, segment.visible.len())
    }
}

impl Kernel for ChooseOne<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { call, segment, row, head, chosen, weights, .. } = self;
        let scores = scores(s, call, segment, row, head, &mut Carve(self.scratch));
        let last = chosen.len() - 1;
        weights.fill(f32::NEG_INFINITY);
        chosen.fill(NO_ANCHOR);
        let seen = segment.visible.len();
        for (block, eight) in scores.chunks_exact(LANES).enumerate() {
            if s.all_lt(s.load(eight), s.splat(weights[last])) {
                continue;
            }
            let first = block * LANES;
            for (i, &score) in eight.iter().enumerate().take(seen - first) {
                // Among equals the later comes first; what is not a number comes before all.
                let (mut score, mut anchor) = (score, segment.visible.get(first + i) as u32);
                for (best, chosen) in weights.iter_mut().zip(chosen.iter_mut()) {
                    if score.partial_cmp(best) != Some(Ordering::Less) {
                        std::mem::swap(&mut score, best);
                        std::mem::swap(&mut anchor, chosen);
                    }
                }
            }
        }
        let mut null = [0.0];
        call.load_null(row, 1, head, &mut null);
        let log_sum = super::sparse::weigh(chosen, weights, null[0]);
        // SAFETY: this token and head belong to this task alone.
        unsafe { self.log_sum.set(row * call.sizes.value_heads + head, log_sum) };
    }
}

/// Adds the readouts of the anchors that token `row` chose, one head.
pub(super) struct ReadOne<'a> {
    pub call: &'a Call<'a>,
    pub row: usize,
    pub head: usize,
    pub chosen: &'a [u32],
    pub weights: &'a [f32],
    /// Zero before.
    pub readout: &'a Shared<'a>,
    pub scratch: &'a mut [f32],
}

impl ReadOne<'_> {
    pub(super) fn scratch(call: &Call<'_>) -> usize {
        call.pad.key + call.pad.value + call.pad.state()
    }
}

impl Kernel for ReadOne<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { call, row, head, .. } = self;
        let (sizes, pad) = (call.sizes, call.pad);
        let mut carve = Carve(self.scratch);
        let q = carve.take(pad.key);
        let read = carve.take(pad.value);
        let panels = carve.take(pad.state());
        call.load_query(s, row, head, q);
        let at = (row * sizes.value_heads + head) * sizes.value_dim;
        // SAFETY: this token and head belong to this task alone.
        let out = unsafe { self.readout.part(at, sizes.value_dim) };
        let chosen = self.chosen.iter().zip(self.weights).filter(|(anchor, _)| **anchor != NO_ANCHOR);
        for (&anchor, &weight) in chosen {
            call.read_one(s, anchor as usize, head, q, panels, read, Epilogue::Set);
            for (out, read) in out.chunks_mut(PANEL).zip(read.chunks(PANEL)) {
                simd::add_scaled(s, out, weight, read);
            }
        }
    }
}

impl Call<'_> {
    /// Asks for the state of an anchor that is read next. States lie apart, which the processor does not foresee.
    #[inline(always)]
    fn ask<S: Simd>(&self, s: S, anchor: usize, head: usize) {
        const MOST: usize = 2048;
        const LINE: usize = 64;
        if let Some((start, bytes)) = self.state(anchor, head).map(|state| state.place()) {
            for line in (0..bytes.min(MOST)).step_by(LINE) {
                s.prefetch(start.wrapping_byte_add(line));
            }
        }
    }

    /// Aᵀq of one anchor and head, into `pad.value` numbers.
    #[inline(always)]
    fn read_one<S: Simd>(
        &self,
        s: S,
        anchor: usize,
        head: usize,
        q: &[f32],
        panels: &mut [f32],
        out: &mut [f32],
        epilogue: Epilogue<'_>,
    ) {
        let key_dim = self.sizes.key_dim;
        if let Some(codes) = self.state(anchor, head) {
            return s.call(ReadCodes { q: &q[..key_dim], codes, out, epilogue });
        }
        self.pack_state(s, anchor, head, panels);
        let (q, state) = (Strided::rows(q, self.pad.key), Block::panels(panels, self.pad.key));
        gemm(s, [1, self.pad.value, key_dim], Band::Full, q, state, BlockMut::panels(out, 1), epilogue);
    }
}

/// Aᵀq where A is decoded as it is read: the bits of a product with what was decoded before.
struct ReadCodes<'a> {
    q: &'a [f32],
    codes: Codes<'a>,
    /// As many numbers as a row of the state, a multiple of 16.
    out: &'a mut [f32],
    epilogue: Epilogue<'a>,
}

impl Kernel for ReadCodes<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { q, codes, out, epilogue } = self;
        let (width, len) = (out.len(), q.len() * out.len());
        // `columns` asks for eight numbers at places below `len`, and for rows below the number of scales.
        match codes {
            Codes::F32(a) => {
                assert!(a.len() == len);
                let load = |_: usize, at: usize| {
                    // SAFETY: the numbers exist, as said above.
                    unsafe { s.load_ptr(a.as_ptr().add(at)) }
                };
                columns(s, q, width, out, epilogue, load);
            }
            Codes::Bf16(a) => {
                assert!(a.len() == len);
                let load = |_: usize, at: usize| {
                    // SAFETY: as above.
                    unsafe { s.load_bf16_ptr(a.as_ptr().add(at)) }
                };
                columns(s, q, width, out, epilogue, load);
            }
            Codes::Int8(a, scales) => {
                assert!(a.len() == len && scales.len() == q.len());
                let load = |row: usize, at: usize| {
                    // SAFETY: as above.
                    let (codes, scale) =
                        unsafe { (s.load_i8_ptr(a.as_ptr().add(at)), *scales.get_unchecked(row)) };
                    s.mul(codes, s.splat(scale))
                };
                columns(s, q, width, out, epilogue, load);
            }
        }
    }
}

/// qᵀA, A `width` wide, where `load(row, at)` gives eight numbers from number `at` of A on, which are of that row.
#[inline(always)]
fn columns<S: Simd>(
    s: S,
    q: &[f32],
    width: usize,
    out: &mut [f32],
    epilogue: Epilogue<'_>,
    load: impl Fn(usize, usize) -> S::V,
) {
    let mut from = 0;
    while from + 4 * PANEL <= width {
        some_columns::<S, 8>(s, q, width, from, out, epilogue, &load);
        from += 4 * PANEL;
    }
    while from + PANEL <= width {
        some_columns::<S, 2>(s, q, width, from, out, epilogue, &load);
        from += PANEL;
    }
}

/// Columns `from..from + 8 V` of it.
#[inline(always)]
#[allow(unsafe_code)]
fn some_columns<S: Simd, const V: usize>(
    s: S,
    q: &[f32],
    width: usize,
    from: usize,
    out: &mut [f32],
    epilogue: Epilogue<'_>,
    load: &impl Fn(usize, usize) -> S::V,
) {
    let mut acc = [s.splat(0.0); V];
    for (row, &x) in q.iter().enumerate() {
        let x = s.splat(x);
        for v in 0..V {
            acc[v] = s.fma(x, load(row, row * width + from + v * LANES), acc[v]);
        }
    }
    let out = &mut out[from..from + V * LANES];
    for v in 0..V {
        // SAFETY: the line before gives room for V times eight numbers.
        unsafe { put(s, out.as_mut_ptr().add(v * LANES), acc[v], 0, epilogue) };
    }
}

//! Anchor reader for a single token, as in a decoding step.
//!
//! With one token, a tile with tokens in the SIMD lanes would be almost empty, so here the lanes hold anchors.
//! Every sum has the same terms in the same order as in a larger tile, so results are bit-identical. States are
//! read in place.

use super::stored::Codes;
use super::tile::{ANCHORS, Call};
use super::{NO_ANCHOR, Segment, Visible};
use crate::cpu::{Carve, Shared};
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, LANES, PANEL, Simd, Strided, gemm, put};

/// Reads all visible anchors for token `row` and one head.
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

/// Scratch elements needed to score `seen` anchors: ρ, keys, and the scores.
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
            // Lanes past the last anchor are zero.
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
        // SAFETY: this token and head belong to this task only.
        let to = unsafe { self.readout.part(at * sizes.value_dim, sizes.value_dim) };
        to.copy_from_slice(&out[..sizes.value_dim]);
        if let Some(all) = self.weights {
            for (i, &weight) in scores[..seen].iter().enumerate() {
                // SAFETY: this element belongs to this token and head, which belong to this task only.
                unsafe { all.set(at * sizes.anchors + segment.visible.get(i), weight) };
            }
        }
        if let Some(log_sum) = self.log_sum {
            // SAFETY: as above.
            unsafe { log_sum.set(at, largest + sum.ln()) };
        }
    }
}

/// Scores of all anchors visible to a token, padded with −inf to a multiple of eight.
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
        // Keys of consecutive anchors are read in place if the key length is a multiple of the lane count.
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
            // SAFETY: eight rows of `wide` elements with k + 8 ≤ `wide`; elements past the end of a key are not
            // used.
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

/// Number of eight-anchor blocks scored in parallel, to hide the latency of the dependent multiply-adds.
const MANY: usize = 4;

/// Scores of B blocks of eight anchors; `stride` is the distance between keys.
#[inline(always)]
#[allow(unsafe_code)]
fn score_blocks<S: Simd, const B: usize>(s: S, keys: &[f32], stride: usize, rho: &[f32], to: &mut [f32]) {
    assert!(rho.len().is_multiple_of(LANES) && (B * LANES - 1) * stride + rho.len() <= keys.len());
    let mut acc = [s.splat(0.0); B];
    let mut turned = [[0.0; LANES * LANES]; B];
    for (k, rho) in rho.chunks_exact(LANES).enumerate() {
        for b in 0..B {
            // SAFETY: the assertion bounds eight rows of eight elements.
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

/// Selects the top-K anchors for token `row` and one head.
pub(super) struct ChooseOne<'a> {
    pub call: &'a Call<'a>,
    pub segment: &'a Segment,
    pub row: usize,
    pub head: usize,
    /// Selected anchors of this token and head in ascending order, [K].
    pub chosen: &'a mut [u32],
    /// Weights of the selected anchors.
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
                // The later anchor wins ties. A NaN score ranks as inf, so that no finite score displaces it;
                // the softmax of inf is NaN, so the token's weights and readout become NaN.
                let mut score = if score.is_nan() { f32::INFINITY } else { score };
                let mut anchor = segment.visible.get(first + i) as u32;
                for (best, chosen) in weights.iter_mut().zip(chosen.iter_mut()) {
                    if score >= *best {
                        std::mem::swap(&mut score, best);
                        std::mem::swap(&mut anchor, chosen);
                    }
                }
            }
        }
        let mut null = [0.0];
        call.load_null(row, 1, head, &mut null);
        let log_sum = super::sparse::weigh(chosen, weights, null[0]);
        // SAFETY: this token and head belong to this task only.
        unsafe { self.log_sum.set(row * call.sizes.value_heads + head, log_sum) };
    }
}

/// Sums the readouts of the anchors selected by token `row`, for one head.
pub(super) struct ReadOne<'a> {
    pub call: &'a Call<'a>,
    pub row: usize,
    pub head: usize,
    pub chosen: &'a [u32],
    pub weights: &'a [f32],
    /// Must be zero on entry; the result is added.
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
        // SAFETY: this token and head belong to this task only.
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
    /// Prefetches the state of the anchor that is read next. States are scattered in memory, so the hardware
    /// prefetcher cannot predict the address.
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

    /// Computes Aᵀq for one anchor and head into `pad.value` elements.
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

/// Aᵀq with A decoded on the fly; bit-identical to decoding first and multiplying then.
struct ReadCodes<'a> {
    q: &'a [f32],
    codes: Codes<'a>,
    /// As many elements as a row of the state, a multiple of 16.
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
        // `columns` loads eight elements at indices below `len`, and uses row indices below the number of scales.
        match codes {
            Codes::F32(a) => {
                assert!(a.len() == len);
                let load = |_: usize, at: usize| {
                    // SAFETY: the elements are in bounds, as stated above.
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

/// Computes qᵀA with rows of `width` elements; `load(row, at)` returns eight elements of A from index `at` on, all
/// of which are in row `row`.
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

/// Columns `from..from + 8 V` of qᵀA; see [`columns`].
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
        // SAFETY: the preceding line bounds V times eight elements.
        unsafe { put(s, out.as_mut_ptr().add(v * LANES), acc[v], 0, epilogue) };
    }
}

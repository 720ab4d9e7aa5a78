//! Top-K anchor reader.
//!
//! Reading only K of the visible anchors reduces the cost by a factor of visible / K, provided that each anchor is
//! still read with a matrix product. First, every tile selects its anchors with a running list of the K best
//! scores, one token per lane. Then, in blocks of 2,048 tokens, all tokens that selected an anchor are gathered and
//! multiplied by it at once. Anchors are processed in ascending order, so a token's sum has the same order as in
//! the dense reader. A token is gathered once per selected anchor, from rows far apart: a block is small enough that
//! these rows stay in the caches, and its queries are normalised once, into consecutive rows.

use std::ops::Range;

use super::tile::{ANCHORS, Call, PACK_FROM, TOKENS};
use super::{NO_ANCHOR, Segment};
use crate::cpu::{Carve, Shared};
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, LANES, PANEL, Simd, Strided, gemm};

/// Maximum number of tokens whose selections are grouped by anchor at a time.
pub(super) const BLOCK: usize = 2048;

/// Selects the top-K anchors for tokens `first..first + count` of a segment and one head.
pub(super) struct Choose<'a> {
    pub call: &'a Call<'a>,
    pub segment: &'a Segment,
    pub first: usize,
    pub count: usize,
    pub head: usize,
    pub top_k: usize,
    /// Selected anchors in ascending order, [rows, value_heads, K].
    pub chosen: &'a Shared<'a, u32>,
    /// Weights of the selected anchors.
    pub weights: &'a Shared<'a>,
    pub log_sum: &'a Shared<'a>,
    pub scratch: &'a mut [f32],
}

impl Choose<'_> {
    pub(super) fn scratch(call: &Call<'_>, top_k: usize) -> usize {
        TOKENS * (2 * call.pad.routing + ANCHORS + 1 + 2 * top_k) + ANCHORS * call.pad.routing
    }
}

impl Kernel for Choose<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { call, segment, first, count, head, top_k, .. } = self;
        let width = simd::padded(count);
        let mut carve = Carve(self.scratch);
        let rho = carve.take(TOKENS * call.pad.routing);
        let rho_t = carve.take(TOKENS * call.pad.routing);
        let scores = carve.take(ANCHORS * TOKENS);
        let null = &mut carve.take(TOKENS)[..width];
        let gathered = carve.take(ANCHORS * call.pad.routing);
        let best = &mut carve.take(TOKENS * top_k)[..width * top_k];
        let index = &mut carve.take(TOKENS * top_k)[..width * top_k];
        call.load_routing(s, first, count, head, rho, rho_t);
        call.load_null(first, count, head, null);
        best.fill(f32::NEG_INFINITY);
        // Anchor indices are kept in f32 lanes as bit patterns; they are only selected and stored, never used in
        // arithmetic.
        index.fill(f32::from_bits(NO_ANCHOR));
        let seen = segment.visible.len();
        for from in (0..seen).step_by(ANCHORS) {
            let range = from..(from + ANCHORS).min(seen);
            call.scores(s, &segment.visible, range.clone(), head, rho_t, width, gathered, scores);
            for (i, row) in scores[..range.len() * width].chunks_exact(width).enumerate() {
                let anchor = s.splat(f32::from_bits(segment.visible.get(from + i) as u32));
                for t in (0..width).step_by(LANES) {
                    insert(s, s.load(&row[t..]), anchor, top_k, width, t, best, index);
                }
            }
        }
        for t in 0..count {
            let at = ((first + t) * call.sizes.value_heads + head) * top_k;
            // SAFETY: this token and head belong to this task only.
            let (chosen, weights) = unsafe { (self.chosen.part(at, top_k), self.weights.part(at, top_k)) };
            for k in 0..top_k {
                chosen[k] = index[k * width + t].to_bits();
                weights[k] = best[k * width + t];
            }
            let log_sum = weigh(chosen, weights, null[t]);
            // SAFETY: as above.
            unsafe { self.log_sum.set((first + t) * call.sizes.value_heads + head, log_sum) };
        }
    }
}

/// Sorts a token's selections by anchor and converts their scores to weights; returns log Σ exp.
#[inline(always)]
pub(super) fn weigh(chosen: &mut [u32], weights: &mut [f32], null: f32) -> f32 {
    sort_by_anchor(chosen, weights);
    let largest = weights.iter().fold(null, |m, &v| if v > m { v } else { m });
    let mut sum = (null - largest).exp();
    for w in weights.iter_mut() {
        *w = (*w - largest).exp();
        sum += *w;
    }
    weights.iter_mut().for_each(|w| *w /= sum);
    largest + sum.ln()
}

/// Inserts one score per lane into the sorted lists of eight tokens; the later anchor wins ties. NaN ranks as +∞, so
/// that it is never dropped: the softmax then turns it into NaN weights.
#[inline(always)]
fn insert<S: Simd>(
    s: S,
    score: S::V,
    anchor: S::V,
    top_k: usize,
    width: usize,
    t: usize,
    best: &mut [f32],
    index: &mut [f32],
) {
    let last = (top_k - 1) * width + t;
    if s.all_lt(score, s.load(&best[last..])) {
        return;
    }
    let infinity = s.splat(f32::INFINITY);
    let (mut score, mut anchor) = (s.select_lt(score, infinity, score, infinity), anchor);
    for k in 0..top_k {
        let at = k * width + t;
        let (b, i) = (s.load(&best[at..]), s.load(&index[at..]));
        s.store(&mut best[at..], s.select_lt(score, b, b, score));
        s.store(&mut index[at..], s.select_lt(score, b, i, anchor));
        anchor = s.select_lt(score, b, anchor, i);
        score = s.select_lt(score, b, score, b);
    }
}

/// Sorts a token's selections by anchor; insertion sort, because the list is short.
#[inline(always)]
fn sort_by_anchor(chosen: &mut [u32], weights: &mut [f32]) {
    for i in 1..chosen.len() {
        let mut j = i;
        while j > 0 && chosen[j - 1] > chosen[j] {
            chosen.swap(j - 1, j);
            weights.swap(j - 1, j);
            j -= 1;
        }
    }
}

/// Splits top-K segments into blocks of consecutive tokens.
pub(super) fn blocks(segments: &[Segment], list: impl Iterator<Item = usize>) -> Vec<Vec<Range<usize>>> {
    let mut blocks: Vec<Vec<Range<usize>>> = Vec::new();
    let mut filled = BLOCK;
    for segment in list.map(|i| &segments[i]) {
        let mut start = segment.start;
        let end = segment.start + segment.len;
        while start < end {
            if filled == BLOCK {
                blocks.push(Vec::new());
                filled = 0;
            }
            let stop = end.min(start + BLOCK - filled);
            if let Some(block) = blocks.last_mut() {
                block.push(start..stop);
            }
            filled += stop - start;
            start = stop;
        }
    }
    blocks
}

/// Copies whole panels; for short rows this is faster than a call of the library's copy.
#[inline(always)]
pub(super) fn copy_panels(from: &[f32], to: &mut [f32]) {
    for (from, to) in from.as_chunks::<PANEL>().0.iter().zip(to.as_chunks_mut::<PANEL>().0) {
        *to = *from;
    }
}

/// Number of tokens in a block.
pub(super) fn tokens(block: &[Range<usize>]) -> usize {
    block.iter().map(Range::len).sum()
}

/// One selection of a token.
#[derive(Clone, Copy, Default)]
pub(super) struct Selection {
    /// The token, as a row of the call's tensors.
    pub row: usize,
    /// The token's index in its block.
    pub local: u32,
    /// Index among the token's K selections.
    pub k: u32,
}

/// Selections of a block grouped by anchor: entries `start[a]..start[a + 1]` belong to anchor a.
pub(super) struct Groups {
    pub start: Vec<usize>,
    pub entries: Vec<Selection>,
}

impl Groups {
    pub(super) fn new(
        call: &Call<'_>,
        block: &[Range<usize>],
        head: usize,
        top_k: usize,
        chosen: &[u32],
    ) -> Self {
        let heads = call.sizes.value_heads;
        let mut start = vec![0usize; call.sizes.anchors + 2];
        let each = |f: &mut dyn FnMut(Selection, usize)| {
            for (local, row) in block.iter().cloned().flatten().enumerate() {
                for (k, &anchor) in chosen[(row * heads + head) * top_k..][..top_k].iter().enumerate() {
                    if anchor != NO_ANCHOR {
                        f(Selection { row, local: local as u32, k: k as u32 }, anchor as usize);
                    }
                }
            }
        };
        each(&mut |_, anchor| start[anchor + 2] += 1);
        for a in 1..start.len() {
            start[a] += start[a - 1];
        }
        let mut entries = vec![Selection::default(); start[start.len() - 1]];
        each(&mut |selection, anchor| {
            entries[start[anchor + 1]] = selection;
            start[anchor + 1] += 1;
        });
        start.pop();
        Self { start, entries }
    }

    pub(super) fn of(&self, anchor: usize) -> &[Selection] {
        &self.entries[self.start[anchor]..self.start[anchor + 1]]
    }
}

/// Sums the readouts of a block's selected anchors, for one head.
pub(super) struct ReadBlock<'a> {
    pub call: &'a Call<'a>,
    pub block: &'a [Range<usize>],
    pub groups: &'a Groups,
    pub head: usize,
    pub top_k: usize,
    pub weights: &'a [f32],
    /// Must be zero on entry; results are added.
    pub readout: &'a Shared<'a>,
    pub scratch: &'a mut [f32],
}

impl ReadBlock<'_> {
    pub(super) fn scratch(call: &Call<'_>, block: &[Range<usize>]) -> usize {
        (TOKENS + tokens(block)) * call.pad.key + TOKENS * call.pad.value + call.pad.state()
    }
}

impl Kernel for ReadBlock<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { call, groups, head, top_k, .. } = self;
        let (sizes, pad) = (call.sizes, call.pad);
        let mut carve = Carve(self.scratch);
        let q = carve.take(TOKENS * pad.key);
        let read = carve.take(TOKENS * pad.value);
        let panels = carve.take(pad.state());
        let queries = carve.take(tokens(self.block) * pad.key);
        for (row, to) in self.block.iter().cloned().flatten().zip(queries.chunks_exact_mut(pad.key)) {
            call.load_query(s, row, head, to);
        }
        for anchor in 0..sizes.anchors {
            let group = groups.of(anchor);
            if group.is_empty() {
                continue;
            }
            let plain = if group.len() < PACK_FROM { call.plain_state(anchor, head) } else { None };
            let state = match plain {
                Some(state) => Block::rows(state, sizes.value_dim),
                None => {
                    call.pack_state(s, anchor, head, panels);
                    Block::panels(panels, pad.key)
                }
            };
            for part in group.chunks(TOKENS) {
                let count = part.len();
                for (selection, to) in part.iter().zip(q.chunks_exact_mut(pad.key)) {
                    copy_panels(&queries[selection.local as usize * pad.key..][..pad.key], to);
                }
                gemm(
                    s,
                    [count, pad.value, sizes.key_dim],
                    Band::Full,
                    Strided::rows(q, pad.key),
                    state,
                    BlockMut::panels(read, count),
                    Epilogue::Set,
                );
                for (t, &Selection { row, k, .. }) in part.iter().enumerate() {
                    let at = row * sizes.value_heads + head;
                    let weight = self.weights[at * top_k + k as usize];
                    // SAFETY: this token and head belong to this task only.
                    let to = unsafe { self.readout.part(at * sizes.value_dim, sizes.value_dim) };
                    for (p, to) in to.chunks_mut(PANEL).enumerate() {
                        simd::add_scaled(s, to, weight, &read[p * count * PANEL + t * PANEL..][..PANEL]);
                    }
                }
            }
        }
    }
}

//! Chunking and per-chunk precomputation shared by the forward and backward passes.
//!
//! Chunks are aligned to multiples of 16 in the whole sequence, not in the call, because levels are merged at fixed
//! positions of the sequence. This file splits a call into such chunks, determines which levels a chunk reads, and
//! computes what depends only on the chunk's own tokens:
//!
//! ```text
//! −W = −N diag(βe) K,   pQ = diag(e) Q − P W,   U = N diag(β) V,   M = P N,   Λ_ij = λ_i[level(i, j)]
//! ```
//! N, P and e are those of `gated_delta::chunk`. States are stored in panels of 16 columns; `wq` holds −W and pQ as
//! one matrix.

use super::{LogLinear, LogLinearOptions, Sizes, bit_length};
use crate::array::Array;
use crate::cpu::Carve;
use crate::ops::gated_delta::chunk::{
    CHUNK, GateInput, Gates, Prepared, SQUARE, gates, load_normalised, load_rows,
};
use crate::ops::gated_delta::fast::{Padded, gate_input};
use crate::simd::{self, Band, Block, BlockMut, Epilogue, LANES, Simd, Strided, gemm};

/// Highest level within a chunk, log2 16.
const INNER: usize = 4;

/// Consecutive tokens between two multiples of 16 of the sequence position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the first token within the call.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
    /// Position of the first token in the whole sequence.
    pub position: usize,
}

impl Chunk {
    /// Level that receives the chunk's writes and all lower levels, if the chunk ends at a multiple of 16.
    pub fn target(&self) -> Option<usize> {
        let end = self.position + self.len;
        end.is_multiple_of(CHUNK).then(|| end.trailing_zeros() as usize + 1)
    }

    /// Level at which row `i` reads the state that was level `m` before the chunk.
    #[inline(always)]
    pub fn seen(&self, m: usize, i: usize) -> usize {
        if m > INNER { m } else { bit_length((self.position + i) ^ (self.position >> m << m)) }
    }
}

/// Splits `tokens` tokens, the first at `position`, into chunks.
pub fn chunks(position: usize, tokens: usize) -> Vec<Chunk> {
    let mut list = Vec::with_capacity(tokens / CHUNK + 2);
    let mut start = 0;
    while start < tokens {
        let here = position + start;
        let len = (CHUNK - here % CHUNK).min(tokens - start);
        list.push(Chunk { start, len, position: here });
        start += len;
    }
    list
}

/// Non-empty levels before the token at `position`, ascending.
#[inline(always)]
pub fn filled(position: usize) -> impl Iterator<Item = usize> {
    (1..=bit_length(position)).filter(move |m| position >> (m - 1) & 1 == 1)
}

/// Number of chunks per block. The forward pass saves the states at the start of each block for the backward pass;
/// about √count chunks per block balance the memory of saved states and recomputed states.
pub(crate) fn block_chunks(count: usize) -> usize {
    1 << (bit_length(count) / 2).min(5)
}

/// Consecutive chunks that belong to one block.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub chunks: std::ops::Range<usize>,
    /// Number of states saved by the preceding blocks.
    pub kept: usize,
}

/// Splits a sequence into blocks; also returns the total number of saved states.
pub(crate) fn segments(chunks: &[Chunk]) -> (Vec<Segment>, usize) {
    let size = block_chunks(chunks.len()) * CHUNK;
    let (mut list, mut from, mut kept) = (Vec::new(), 0, 0);
    for run in chunks.chunk_by(|a, b| a.position / size == b.position / size) {
        list.push(Segment { chunks: from..from + run.len(), kept });
        from += run.len();
        kept += run[0].position.count_ones() as usize;
    }
    (list, kept)
}

/// Inputs of one value head of one batch row.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub sizes: Sizes,
    pub pad: Padded,
    pub input: LogLinear<&'a Array<f32>>,
    pub gates: GateInput<'a>,
    pub b: usize,
    pub h: usize,
}

impl<'a> Source<'a> {
    pub(crate) fn new(
        sizes: Sizes,
        input: LogLinear<&'a Array<f32>>,
        options: &LogLinearOptions,
        b: usize,
        h: usize,
    ) -> Self {
        let gates = gate_input(&sizes.heads, &input.gated_delta(), options.allow_neg_eigval, b, h);
        Self { sizes, pad: Padded::of(&sizes.heads), input, gates, b, h }
    }

    /// Offsets of token `t` in the keys, values and level inputs.
    #[inline(always)]
    pub(crate) fn at(&self, t: usize) -> [usize; 3] {
        let n = &self.sizes.heads;
        let row = self.b * n.tokens + t;
        [
            (row * n.key_heads + n.key_head(self.h)) * n.key_dim,
            (row * n.value_heads + self.h) * n.value_dim,
            (row * n.value_heads + self.h) * self.sizes.scales,
        ]
    }

    /// This head's row of L.
    #[inline(always)]
    pub(crate) fn level_scale(&self) -> &'a [f32] {
        &self.input.level_scale.data()[self.h * self.sizes.scales..][..self.sizes.scales]
    }

    /// Index into λ for a level; levels from NL − 1 on share the last entry.
    #[inline(always)]
    pub(crate) fn scale_of(&self, level: usize) -> usize {
        level.min(self.sizes.scales - 1)
    }
}

/// State-independent values of a chunk.
pub(crate) struct Prep<'a> {
    pub gates: Gates,
    pub key_factors: [f32; CHUNK],
    pub query_factors: [f32; CHUNK],
    /// K, then Q
    pub kq: &'a mut [f32],
    /// diag(d) K
    pub faded: &'a mut [f32],
    /// −W, then pQ
    pub wq: &'a mut [f32],
    /// V
    pub value: &'a mut [f32],
    /// diag(β) V
    pub written: &'a mut [f32],
    /// U
    pub u: &'a mut [f32],
    /// λ, [NL][16]
    pub lambda: &'a mut [f32],
    /// Level inputs W_l x, [NL][16], zero for rows past the chunk's end
    pub level: &'a mut [f32],
    /// M
    pub m: &'a mut [f32],
    /// M ∘ Λ
    pub mixed: &'a mut [f32],
    pub triangles: Prepared<'a>,
}

impl<'a> Prep<'a> {
    pub(crate) fn size(pad: Padded, scales: usize) -> usize {
        6 * CHUNK * pad.key + 3 * CHUNK * pad.value + 2 * CHUNK * scales + 7 * SQUARE
    }

    pub(crate) fn new(pad: Padded, scales: usize, carve: &mut Carve<'a>) -> Self {
        Self {
            gates: Gates {
                write: [0.0; CHUNK],
                log_retention: [0.0; CHUNK],
                total_log: [0.0; CHUNK],
                total_rest: [0.0; CHUNK],
                since_start: [0.0; CHUNK],
                until_end: [0.0; CHUNK],
                whole: 1.0,
            },
            key_factors: [0.0; CHUNK],
            query_factors: [0.0; CHUNK],
            kq: carve.take(2 * CHUNK * pad.key),
            faded: carve.take(CHUNK * pad.key),
            wq: carve.take(2 * CHUNK * pad.key),
            value: carve.take(CHUNK * pad.value),
            written: carve.take(CHUNK * pad.value),
            u: carve.take(CHUNK * pad.value),
            lambda: carve.take(CHUNK * scales),
            level: carve.take(CHUNK * scales),
            m: carve.take(SQUARE),
            mixed: carve.take(SQUARE),
            triangles: Prepared {
                products: carve.take(2 * SQUARE),
                decay: carve.take(SQUARE),
                inverse: carve.take(SQUARE),
                scores: carve.take(SQUARE),
                key_t: carve.take(CHUNK * pad.key),
            },
        }
    }

    /// Loads `len` tokens: computes gates, normalised keys and queries, values and λ.
    #[inline(always)]
    pub(crate) fn load<S: Simd>(&mut self, s: S, source: &Source<'_>, start: usize, len: usize) {
        let Source { sizes, pad, input, .. } = source;
        let n = &sizes.heads;
        let [key_at, value_at, level_at] = source.at(start);
        let (key_stride, value_stride) = (n.key_heads * n.key_dim, n.value_heads * n.value_dim);
        self.gates = gates(s, source.gates, start * n.value_heads, len);
        self.key_factors =
            load_normalised(s, len, n.key_dim, &input.key.data()[key_at..], key_stride, self.kq);
        let queries = &mut self.kq[len * pad.key..];
        self.query_factors =
            load_normalised(s, len, n.key_dim, &input.query.data()[key_at..], key_stride, queries);
        load_rows(s, len, n.value_dim, &input.value.data()[value_at..], value_stride, self.value);
        let level = &input.level_input.data()[level_at..];
        let stride = n.value_heads * sizes.scales;
        for (l, &scale) in source.level_scale().iter().enumerate() {
            let (w, lambda) = (&mut self.level[l * CHUNK..][..CHUNK], &mut self.lambda[l * CHUNK..][..CHUNK]);
            w.fill(0.0);
            for t in 0..len {
                w[t] = level[t * stride + l];
            }
            for i in [0, LANES] {
                s.store(&mut lambda[i..], simd::softplus(s, s.mul(s.splat(scale), s.load(&w[i..]))));
            }
        }
    }

    /// Computes all remaining fields from the loaded tokens.
    #[inline(always)]
    pub(crate) fn fill<S: Simd>(&mut self, s: S, source: &Source<'_>, chunk: &Chunk) {
        let pad = source.pad;
        let len = chunk.len;
        self.load(s, source, chunk.start, len);
        let g = &self.gates;
        self.triangles.fill(s, g, [len, len], source.sizes.heads.key_dim, self.kq, 1.0);
        let t = &self.triangles;
        for i in 0..len {
            let row = i * pad.key..(i + 1) * pad.key;
            let k = &self.kq[row.clone()];
            simd::scale_to(s, &mut self.faded[row.clone()], g.until_end[i], k);
            // The rows of pQ temporarily hold −diag(βe) K.
            let q_row = (len + i) * pad.key..(len + i + 1) * pad.key;
            simd::scale_to(s, &mut self.wq[q_row], -g.write[i] * g.since_start[i], k);
            let row = i * pad.value..(i + 1) * pad.value;
            simd::scale_to(s, &mut self.written[row.clone()], g.write[i], &self.value[row]);
        }
        let (w, pq) = self.wq.split_at_mut(len * pad.key);
        let (inverse, scores) = (Strided::rows(t.inverse, CHUNK), Strided::rows(t.scores, CHUNK));
        let by_key = [len, pad.key, len];
        gemm(
            s,
            by_key,
            Band::Lower,
            inverse,
            Block::rows(pq, pad.key),
            BlockMut::rows(w, pad.key),
            Epilogue::Set,
        );
        for i in 0..len {
            let q = &self.kq[(len + i) * pad.key..][..pad.key];
            simd::scale_to(s, &mut pq[i * pad.key..(i + 1) * pad.key], g.since_start[i], q);
        }
        gemm(
            s,
            by_key,
            Band::Lower,
            scores,
            Block::rows(w, pad.key),
            BlockMut::rows(pq, pad.key),
            Epilogue::Add,
        );
        gemm(
            s,
            [len, pad.value, len],
            Band::Lower,
            inverse,
            Block::rows(self.written, pad.value),
            BlockMut::rows(self.u, pad.value),
            Epilogue::Set,
        );
        gemm(
            s,
            [len, CHUNK, len],
            Band::Lower,
            scores,
            Block::rows(t.inverse, CHUNK),
            BlockMut::rows(self.m, CHUNK),
            Epilogue::Set,
        );
        for i in 0..len {
            for j in 0..=i {
                self.mixed[i * CHUNK + j] =
                    self.m[i * CHUNK + j] * self.lambda[inner_scale(source, chunk, i, j) + i];
            }
            self.mixed[i * CHUNK + i + 1..(i + 1) * CHUNK].fill(0.0);
        }
    }

    /// λ for each row of the chunk, for the state that was level `m` before the chunk.
    #[inline(always)]
    pub(crate) fn weights(&self, source: &Source<'_>, chunk: &Chunk, m: usize) -> [f32; CHUNK] {
        std::array::from_fn(|i| self.lambda[source.scale_of(chunk.seen(m, i)) * CHUNK + i])
    }
}

/// Offset in `lambda` of level(i, j) for rows i and j of one chunk.
#[inline(always)]
pub(crate) fn inner_scale(source: &Source<'_>, chunk: &Chunk, i: usize, j: usize) -> usize {
    let from = chunk.position % CHUNK;
    source.scale_of(bit_length((from + i) ^ (from + j))) * CHUNK
}

/// Adds one value per row to dλ, [NL][16], for the state that was level `m` before the chunk.
#[inline(always)]
pub(crate) fn add_to_levels(
    source: &Source<'_>,
    chunk: &Chunk,
    m: usize,
    values: &[f32; CHUNK],
    to: &mut [f32],
) {
    for i in 0..chunk.len {
        to[source.scale_of(chunk.seen(m, i)) * CHUNK + i] += values[i];
    }
}

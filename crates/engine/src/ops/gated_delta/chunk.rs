//! State-independent precomputation for one chunk (up to 16 tokens) of one head.
//!
//! The recurrence is sequential in tokens, but within a chunk it can be rewritten as a small triangular system plus
//! matrix products with the incoming state. Everything in this file depends only on the chunk's own tokens: gates,
//! normalised keys and queries, and these triangular matrices:
//!
//! ```text
//! G = cumsum(log α),  e = exp G,  d = exp(G_B − G),  tot = exp G_B,  Γ_ij = exp(G_i − G_j) for i ≥ j
//! N = (I + strict_tril(diag(β) K Kᵀ ∘ Γ))⁻¹,   P = s · tril(Q Kᵀ ∘ Γ)
//! ```
//! Exponents are clamped to ≤ 0, so the entries above the diagonal, which are masked out, cannot overflow.

use super::L2_EPS;
use crate::simd::{self, Band, Block, BlockMut, Epilogue, LANES, PANEL, Simd, Strided, gemm, transpose};

/// Number of tokens in a full chunk.
pub(crate) const CHUNK: usize = 16;
/// Number of elements in a 16 × 16 matrix.
pub(crate) const SQUARE: usize = CHUNK * CHUNK;

/// Consecutive tokens that end at a multiple of 16, at a boundary, or at the end of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the first token within the call.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
    /// Boundary at the end of this chunk, as an index into its row's boundary list.
    pub boundary: Option<usize>,
}

/// Splits `tokens` tokens into chunks. The first token is `offset` tokens after a multiple of 16.
pub fn chunks(tokens: usize, boundaries: &[usize], offset: usize) -> Vec<Chunk> {
    let mut list = Vec::with_capacity(tokens / CHUNK + boundaries.len() + 1);
    let (mut start, mut next) = (0, 0);
    while start < tokens {
        let mut end = (((start + offset) / CHUNK + 1) * CHUNK - offset).min(tokens);
        let mut boundary = None;
        if let Some(&b) = boundaries.get(next)
            && b <= end
        {
            end = b;
            boundary = Some(next);
            next += 1;
        }
        list.push(Chunk { start, len: end - start, boundary });
        start = end;
    }
    list
}

/// Gate values of the tokens of one chunk.
#[derive(Clone, Copy)]
pub(crate) struct Gates {
    /// β
    pub write: [f32; CHUNK],
    /// log α
    pub log_retention: [f32; CHUNK],
    /// G, rounded to f32
    pub total_log: [f32; CHUNK],
    /// Rounding error of `total_log` (compensated summation). After strong decay G is large, and differences of the
    /// rounded values alone would be inaccurate.
    pub total_rest: [f32; CHUNK],
    /// e = exp G
    pub since_start: [f32; CHUNK],
    /// d = exp(G_B − G)
    pub until_end: [f32; CHUNK],
    /// tot = exp G_B
    pub whole: f32,
}

/// Gate inputs of one head: element `at + t·stride` of both slices belongs to token t, where `at` is chosen by the
/// caller.
#[derive(Clone, Copy)]
pub(crate) struct GateInput<'a> {
    pub retention: &'a [f32],
    pub write: &'a [f32],
    pub stride: usize,
    /// exp(a_log)
    pub rate: f32,
    pub dt_bias: f32,
    /// 1, or 2 if negative eigenvalues are allowed.
    pub write_scale: f32,
}

/// Computes the gates of `len` tokens; the first token's inputs are at index `at`.
#[inline(always)]
pub(crate) fn gates<S: Simd>(s: S, input: GateInput<'_>, at: usize, len: usize) -> Gates {
    let mut g = Gates {
        write: [0.0; CHUNK],
        log_retention: [0.0; CHUNK],
        total_log: [0.0; CHUNK],
        total_rest: [0.0; CHUNK],
        since_start: [0.0; CHUNK],
        until_end: [0.0; CHUNK],
        whole: 1.0,
    };
    for t in 0..len {
        g.log_retention[t] = input.retention[at + t * input.stride] + input.dt_bias;
        g.write[t] = input.write[at + t * input.stride];
    }
    for i in [0, LANES] {
        let z = s.load(&g.log_retention[i..]);
        s.store(&mut g.log_retention[i..], s.mul(s.splat(-input.rate), simd::softplus(s, z)));
        let w = s.load(&g.write[i..]);
        s.store(&mut g.write[i..], s.mul(s.splat(input.write_scale), simd::sigmoid(s, w)));
    }
    let (mut sum, mut rest) = (0.0f32, 0.0f32);
    for t in 0..CHUNK {
        if t < len {
            let term = g.log_retention[t];
            let next = sum + term;
            let part = next - sum;
            rest += (sum - (next - part)) + (term - part);
            sum = next;
        } else {
            g.log_retention[t] = 0.0;
            g.write[t] = 0.0;
        }
        g.total_log[t] = sum;
        g.total_rest[t] = rest;
    }
    for i in [0, LANES] {
        let total = s.load(&g.total_log[i..]);
        s.store(&mut g.since_start[i..], simd::exp(s, total));
        let left = s.sub(s.splat(rest), s.load(&g.total_rest[i..]));
        let log = s.add(s.sub(s.splat(sum), total), left);
        s.store(&mut g.until_end[i..], simd::exp(s, s.min(log, s.splat(0.0))));
    }
    g.whole = g.since_start[CHUNK - 1];
    g
}

/// Loads `len` rows of `width` elements with stride `stride`, normalises them into rows of `padded(width)` elements
/// and returns the normalisation factors 1 / sqrt(Σx² + 1e-6).
#[inline(always)]
pub(crate) fn load_normalised<S: Simd>(
    s: S,
    len: usize,
    width: usize,
    from: &[f32],
    stride: usize,
    to: &mut [f32],
) -> [f32; CHUNK] {
    let wide = simd::padded(width);
    // Compute all squared norms first, so that the square roots and divisions run vectorised over rows.
    let mut factors = [0.0; CHUNK];
    for t in 0..len {
        let x = &from[t * stride..][..width];
        factors[t] = simd::dot(s, x, x);
    }
    for i in [0, LANES] {
        let sum = s.add(s.load(&factors[i..]), s.splat(L2_EPS as f32));
        s.store(&mut factors[i..], s.div(s.splat(1.0), s.sqrt(sum)));
    }
    for t in 0..len {
        let (y, rest) = to[t * wide..][..wide].split_at_mut(width);
        simd::scale_to(s, y, factors[t], &from[t * stride..][..width]);
        rest.fill(0.0);
    }
    factors
}

/// Copies `len` rows of `width` elements with stride `stride` into zero-padded rows of `padded(width)` elements.
#[inline(always)]
pub(crate) fn load_rows<S: Simd>(
    s: S,
    len: usize,
    width: usize,
    from: &[f32],
    stride: usize,
    to: &mut [f32],
) {
    let wide = simd::padded(width);
    for t in 0..len {
        let (y, rest) = to[t * wide..][..wide].split_at_mut(width);
        simd::copy(s, y, &from[t * stride..][..width]);
        rest.fill(0.0);
    }
}

/// Triangular matrices of a chunk, stored as rows of 16.
pub(crate) struct Prepared<'a> {
    /// K Kᵀ (rows 0..len), followed by Q Kᵀ for the tokens that have a query.
    pub products: &'a mut [f32],
    /// Γ, zero above the diagonal.
    pub decay: &'a mut [f32],
    /// N
    pub inverse: &'a mut [f32],
    /// P, only the rows of tokens that have a query.
    pub scores: &'a mut [f32],
    /// Kᵀ [padded(d_k), 16]
    pub key_t: &'a mut [f32],
}

impl Prepared<'_> {
    /// Computes the matrices from `kq`, which holds `len` rows of keys followed by `asking` rows of queries (those
    /// of the chunk's last tokens). Rows are `padded(key_dim)` wide and the buffer has at least 16 rows.
    #[inline(always)]
    pub(crate) fn fill<S: Simd>(
        &mut self,
        s: S,
        gates: &Gates,
        [len, asking]: [usize; 2],
        key_dim: usize,
        kq: &[f32],
        scale: f32,
    ) {
        let wide = simd::padded(key_dim);
        // Columns of Kᵀ from `len` on contain whatever follows the keys; the products computed from them are never
        // used.
        transpose(s, CHUNK, wide, kq, wide, self.key_t, PANEL);
        gemm(
            s,
            [len + asking, CHUNK, key_dim],
            Band::Full,
            Strided::rows(kq, wide),
            Block::rows(self.key_t, PANEL),
            BlockMut::rows(self.products, CHUNK),
            Epilogue::Set,
        );
        let g = [s.load(&gates.total_log), s.load(&gates.total_log[LANES..])];
        let r = [s.load(&gates.total_rest), s.load(&gates.total_rest[LANES..])];
        let zero = s.splat(0.0);
        for i in 0..len {
            let (gi, ri) = (s.splat(gates.total_log[i]), s.splat(gates.total_rest[i]));
            let strength = s.splat(gates.write[i]);
            let asks = i + asking >= len;
            let mut lower = [0.0f32; CHUNK];
            // In rows 0 to 7 of a lower triangle, columns 8 to 15 are zero.
            let halves = if i < LANES { 1 } else { 2 };
            for h in 0..halves {
                let o = h * LANES;
                let mask = s.load(&MASK[CHUNK - 1 - i + o..]);
                let log = s.add(s.sub(gi, g[h]), s.sub(ri, r[h]));
                let fade = s.mul(mask, simd::exp(s, s.min(log, zero)));
                s.store(&mut self.decay[i * CHUNK + o..], fade);
                let kk = s.load(&self.products[i * CHUNK + o..]);
                if asks {
                    let qk = s.load(&self.products[(asking + i) * CHUNK + o..]);
                    // Products right of the diagonal may be inf or NaN: select zero instead of multiplying by zero.
                    let p = s.mul(s.mul(s.splat(scale), qk), fade);
                    s.store(&mut self.scores[i * CHUNK + o..], s.select_lt(zero, mask, p, zero));
                }
                s.store(&mut lower[o..], s.mul(s.mul(strength, kk), fade));
            }
            if halves == 1 {
                s.store(&mut self.decay[i * CHUNK + LANES..], zero);
                s.store(&mut self.scores[i * CHUNK + LANES..], zero);
            }
            // Forward substitution: N_i = unit_i − Σ_{j<i} L_ij N_j.
            let mut row = [s.load(&UNIT[CHUNK - 1 - i..]), s.load(&UNIT[CHUNK - 1 - i + LANES..])];
            for (j, &l) in lower.iter().enumerate().take(i) {
                let l = s.splat(-l);
                row[0] = s.fma(l, s.load(&self.inverse[j * CHUNK..]), row[0]);
                if j >= LANES {
                    row[1] = s.fma(l, s.load(&self.inverse[j * CHUNK + LANES..]), row[1]);
                }
            }
            s.store(&mut self.inverse[i * CHUNK..], row[0]);
            s.store(&mut self.inverse[i * CHUNK + LANES..], row[1]);
        }
    }
}

/// Gradients of one head's gate inputs for one chunk.
pub(crate) struct GateGradients {
    pub retention_input: [f32; CHUNK],
    pub write_input: [f32; CHUNK],
    /// Summed over the chunk's tokens.
    pub a_log: f32,
    pub dt_bias: f32,
}

/// Backpropagates d log α and dβ to the gate inputs: dz = −d log α · exp(a_log) · σ(z).
#[inline(always)]
pub(crate) fn gate_gradients<S: Simd>(
    s: S,
    gates: &Gates,
    input: GateInput<'_>,
    at: usize,
    len: usize,
    dlog: &[f32],
    dwrite: &[f32; CHUNK],
) -> GateGradients {
    let mut d =
        GateGradients { retention_input: [0.0; CHUNK], write_input: [0.0; CHUNK], a_log: 0.0, dt_bias: 0.0 };
    let mut slope = [0.0f32; CHUNK];
    for t in 0..len {
        slope[t] = input.retention[at + t * input.stride] + input.dt_bias;
    }
    for i in [0, LANES] {
        let v = simd::sigmoid(s, s.load(&slope[i..]));
        s.store(&mut slope[i..], v);
    }
    for t in 0..len {
        let sigma = gates.write[t] / input.write_scale;
        d.retention_input[t] = -dlog[t] * input.rate * slope[t];
        d.write_input[t] = dwrite[t] * gates.write[t] * (1.0 - sigma);
        d.dt_bias += d.retention_input[t];
        d.a_log += dlog[t] * gates.log_retention[t];
    }
    d
}

/// Backpropagates through the L2 normalisation y = r x: out = r (dy − y <dy, y>), or out += … if `add` is set.
#[inline(always)]
pub(crate) fn through_norm<S: Simd>(s: S, out: &mut [f32], add: bool, r: f32, y: &[f32], dy: &[f32]) {
    simd::blend(s, out, add, (r, dy), (-r * simd::dot(s, y, dy), y));
}

/// Sixteen ones followed by zeros. Read from index 15 − i it is a mask of columns 0..=i; from 16 − i, of columns
/// 0..i.
pub(crate) static MASK: [f32; 2 * CHUNK] = {
    let mut mask = [0.0; 2 * CHUNK];
    let mut i = 0;
    while i < CHUNK {
        mask[i] = 1.0;
        i += 1;
    }
    mask
};

/// A single one at index 15. Read from index 15 − i it is the unit vector of column i.
static UNIT: [f32; 2 * CHUNK] = {
    let mut unit = [0.0; 2 * CHUNK];
    unit[CHUNK - 1] = 1.0;
    unit
};

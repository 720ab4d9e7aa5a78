//! Eight channels at a time. Weights are packed so that the K taps of eight channels lie together; tokens go
//! by in groups of eight with the last K inputs in registers, so that a group reads each input once. Blocks
//! of tokens go to threads. The backward pass recomputes z, keeps the last K values of dz the same way, and
//! computes the K − 1 values that a block needs from the next block a second time. Weight gradients are
//! summed per part and then over the parts in order; parts depend on the shape only.
//!
//! K = 4 is compiled for; other kernels use the loops of [`super::any_kernel`].

use super::any_kernel::{AnyBackward, AnyForward};
use super::{ShortConv, ShortConvGradients, Sizes, check, check_gradient};
use crate::cpu::{Carve, Cpu, Shared, with_scratch};
use crate::error::Result;
use crate::simd::{self, Kernel, LANES, Simd, load_or_part, store_or_part};
use crate::tensor::Tensor;

/// Tokens that go by together.
const GROUP: usize = 8;

#[allow(unsafe_code)]
pub(crate) fn forward(cpu: &Cpu, input: ShortConv<&Tensor<f32>>) -> Result<(Tensor<f32>, Tensor<f32>)> {
    let sizes = check(input.x.shape(), input.weight.shape(), input.tail.map(Tensor::shape))?;
    let Sizes { batch, width, kernel, .. } = sizes;
    let mut y = cpu.uninit(input.x.shape());
    let mut tail = cpu.uninit(&[batch, kernel - 1, width]);
    let blocks = Blocks::new(sizes);
    with_scratch(Carve::size(packed_len(sizes)) + Carve::size(width), |scratch| {
        let mut scratch = Carve(scratch);
        let (packed, zeros) = (scratch.take(packed_len(sizes)), scratch.take(width));
        pack(sizes, input.weight.data(), packed);
        zeros.fill(0.0);
        let inputs = Inputs::new(sizes, input, zeros);
        let out = Shared::new(y.data_mut());
        cpu.parallel(blocks.count(), |item| {
            let Block { b, start, end } = blocks.get(item);
            let rows = inputs.rows(b, start, end - start);
            // SAFETY: blocks are disjoint ranges of tokens.
            let y = unsafe { out.part((b * sizes.tokens + start) * width, (end - start) * width) };
            match kernel {
                4 => cpu.level().run(Forward::<4> { width, rows: &rows, packed, y }),
                _ => cpu.level().run(AnyForward { width, kernel, rows: &rows, packed, y }),
            }
        });
        let new_rows = (0..batch).flat_map(|b| (0..kernel - 1).map(move |j| (b, j)));
        for (row, (b, j)) in tail.data_mut().chunks_exact_mut(width.max(1)).zip(new_rows) {
            row.copy_from_slice(inputs.row(b, sizes.tokens + j));
        }
    });
    Ok((y, tail))
}

#[allow(unsafe_code)]
pub(crate) fn backward(
    cpu: &Cpu,
    input: ShortConv<&Tensor<f32>>,
    gradient: &Tensor<f32>,
) -> Result<ShortConvGradients<Tensor<f32>>> {
    let sizes = check(input.x.shape(), input.weight.shape(), input.tail.map(Tensor::shape))?;
    check_gradient(input.x.shape(), gradient.shape())?;
    let Sizes { tokens, width, kernel, .. } = sizes;
    let blocks = Blocks::new(sizes);
    let len = packed_len(sizes);
    let mut dx = cpu.uninit(input.x.shape());
    let mut dw = cpu.zeros(input.weight.shape());
    let mut partial = cpu.zeros(&[blocks.parts(), len]);
    with_scratch(Carve::size(len) + Carve::size(width), |scratch| {
        let mut scratch = Carve(scratch);
        let (packed, zeros) = (scratch.take(len), scratch.take(width));
        pack(sizes, input.weight.data(), packed);
        zeros.fill(0.0);
        let inputs = Inputs::new(sizes, input, zeros);
        let (out, sums) = (Shared::new(dx.data_mut()), Shared::new(partial.data_mut()));
        cpu.parallel(blocks.parts(), |part| {
            // SAFETY: each part has sums of its own.
            let dw = unsafe { sums.part(part * len, len) };
            for item in blocks.of_part(part) {
                let Block { b, start, end } = blocks.get(item);
                // dx of the block's last tokens reads dz of K − 1 tokens after it, where they exist.
                let ahead = (end + kernel - 1).min(tokens) - start;
                let rows = inputs.rows(b, start, ahead);
                let at = (b * tokens + start) * width;
                let dy = &gradient.data()[at..at + ahead * width];
                // SAFETY: blocks are disjoint ranges of tokens.
                let dx = unsafe { out.part(at, (end - start) * width) };
                let span = Span { width, own: end - start, rows: &rows, packed, dy };
                match kernel {
                    4 => with_scratch(len, |carry| cpu.level().run(Backward::<4> { span, carry, dx, dw })),
                    _ => with_scratch(ahead * width.next_multiple_of(LANES), |dz| {
                        cpu.level().run(AnyBackward { span, kernel, dz, dx, dw });
                    }),
                }
            }
        });
    });
    for sums in partial.data().chunks_exact(len.max(1)) {
        unpack_add(sizes, sums, dw.data_mut());
    }
    Ok(ShortConvGradients { x: dx, weight: dw })
}

/// A range of tokens of one sequence.
struct Block {
    b: usize,
    start: usize,
    end: usize,
}

/// The split of a call into blocks of tokens, and of the blocks into at most 64 parts.
#[derive(Clone, Copy)]
struct Blocks {
    sizes: Sizes,
    length: usize,
    per_sequence: usize,
    per_part: usize,
}

impl Blocks {
    fn new(sizes: Sizes) -> Self {
        const SMALL: usize = 16 * 1024;
        let all = sizes.batch * sizes.tokens;
        let length = (SMALL / sizes.width.max(1)).max(all.div_ceil(64)).next_multiple_of(GROUP).max(GROUP);
        let per_sequence = sizes.tokens.div_ceil(length);
        Self { sizes, length, per_sequence, per_part: (sizes.batch * per_sequence).div_ceil(64).max(1) }
    }

    fn count(&self) -> usize {
        self.sizes.batch * self.per_sequence
    }

    fn parts(&self) -> usize {
        self.count().div_ceil(self.per_part)
    }

    fn of_part(&self, part: usize) -> std::ops::Range<usize> {
        part * self.per_part..((part + 1) * self.per_part).min(self.count())
    }

    fn get(&self, item: usize) -> Block {
        let (b, block) = (item / self.per_sequence, item % self.per_sequence);
        let start = block * self.length;
        Block { b, start, end: (start + self.length).min(self.sizes.tokens) }
    }
}

/// The tail and the tokens of each sequence as one run of rows.
struct Inputs<'a> {
    sizes: Sizes,
    x: &'a [f32],
    tail: Option<&'a [f32]>,
    zeros: &'a [f32],
}

impl<'a> Inputs<'a> {
    fn new(sizes: Sizes, input: ShortConv<&'a Tensor<f32>>, zeros: &'a [f32]) -> Self {
        Self { sizes, x: input.x.data(), tail: input.tail.map(Tensor::data), zeros }
    }

    /// Row i of the K − 1 rows of the tail and then the tokens.
    fn row(&self, b: usize, i: usize) -> &'a [f32] {
        let Sizes { tokens, width, kernel, .. } = self.sizes;
        if i >= kernel - 1 {
            return &self.x[(b * tokens + i - (kernel - 1)) * width..][..width];
        }
        self.tail.map_or(self.zeros, |tail| &tail[(b * (kernel - 1) + i) * width..][..width])
    }

    /// The rows that tokens start .. start + count read: K − 1 before the first, then they themselves.
    fn rows(&self, b: usize, start: usize, count: usize) -> Vec<&'a [f32]> {
        (start..start + count + self.sizes.kernel - 1).map(|i| self.row(b, i)).collect()
    }
}

/// The length of packed weights: [⌈D / 8⌉, K, 8].
fn packed_len(sizes: Sizes) -> usize {
    sizes.width.next_multiple_of(LANES) * sizes.kernel
}

/// Where weight (d, j) lies in packed weights.
fn place(kernel: usize, d: usize, j: usize) -> usize {
    (d / LANES * kernel + j) * LANES + d % LANES
}

fn pack(sizes: Sizes, weight: &[f32], packed: &mut [f32]) {
    packed.fill(0.0);
    for d in 0..sizes.width {
        for j in 0..sizes.kernel {
            packed[place(sizes.kernel, d, j)] = weight[d * sizes.kernel + j];
        }
    }
}

fn unpack_add(sizes: Sizes, packed: &[f32], weight: &mut [f32]) {
    for d in 0..sizes.width {
        for j in 0..sizes.kernel {
            weight[d * sizes.kernel + j] += packed[place(sizes.kernel, d, j)];
        }
    }
}

struct Forward<'a, const K: usize> {
    width: usize,
    /// K − 1 rows before the block, then its rows.
    rows: &'a [&'a [f32]],
    packed: &'a [f32],
    y: &'a mut [f32],
}

impl<const K: usize> Forward<'_, K> {
    /// The outputs of some tokens in channels c .. c + 8 N.
    #[inline(always)]
    fn strip<S: Simd, const N: usize, const PART: bool>(
        &mut self,
        s: S,
        tokens: std::ops::Range<usize>,
        c: usize,
    ) {
        let packed = &self.packed[c * K..][..K * N * LANES];
        let w: [[S::V; K]; N] =
            std::array::from_fn(|n| std::array::from_fn(|j| s.load(&packed[(n * K + j) * LANES..])));
        // x[n][j] is the input that tap j of the current token reads.
        let mut x = [[s.splat(0.0); K]; N];
        for j in 1..K {
            for n in 0..N {
                x[n][j] = load_or_part::<S, PART>(s, &self.rows[tokens.start + j - 1][c + n * LANES..]);
            }
        }
        for t in tokens {
            let row = &self.rows[t + K - 1][c..];
            let y = &mut self.y[t * self.width..][..self.width][c..];
            for n in 0..N {
                for j in 1..K {
                    x[n][j - 1] = x[n][j];
                }
                x[n][K - 1] = load_or_part::<S, PART>(s, &row[n * LANES..]);
                let z = taps(s, &w[n], &x[n]);
                store_or_part::<S, PART>(s, &mut y[n * LANES..], simd::silu(s, z));
            }
        }
    }
}

/// Σ_j w_j x_j, j upwards.
#[inline(always)]
fn taps<S: Simd, const K: usize>(s: S, w: &[S::V; K], x: &[S::V; K]) -> S::V {
    let mut z = s.mul(w[0], x[0]);
    for j in 1..K {
        z = s.fma(w[j], x[j], z);
    }
    z
}

impl<const K: usize> Kernel for Forward<'_, K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let count = self.rows.len() - (K - 1);
        for start in (0..count).step_by(GROUP) {
            let tokens = start..(start + GROUP).min(count);
            let mut c = 0;
            while c + 2 * LANES <= self.width {
                self.strip::<S, 2, false>(s, tokens.clone(), c);
                c += 2 * LANES;
            }
            while c < self.width {
                self.strip::<S, 1, true>(s, tokens.clone(), c);
                c += LANES;
            }
        }
    }
}

/// What the backward pass of one block reads.
pub(super) struct Span<'a> {
    pub width: usize,
    /// Tokens of the block; rows and dy go on for up to K − 1 tokens more.
    pub own: usize,
    /// K − 1 rows before the block, then rows as far as dy goes.
    pub rows: &'a [&'a [f32]],
    pub packed: &'a [f32],
    pub dy: &'a [f32],
}

struct Backward<'a, const K: usize> {
    span: Span<'a>,
    /// The last K values of dz of every channel between groups, [⌈D / 8⌉, K, 8]; the first is not used.
    carry: &'a mut [f32],
    dx: &'a mut [f32],
    dw: &'a mut [f32],
}

impl<const K: usize> Backward<'_, K> {
    /// Steps t of some channels: dz of token t, its part of dw, and dx of token t − K + 1, which it completes.
    #[inline(always)]
    fn strip<S: Simd, const PART: bool>(&mut self, s: S, steps: std::ops::Range<usize>, c: usize) {
        let Span { width, own, rows, packed, dy } = self.span;
        let known = rows.len() - (K - 1);
        let (at, len) = (c * K, K * LANES);
        let load = |p: &[f32]| -> [S::V; K] { std::array::from_fn(|j| s.load(&p[j * LANES..])) };
        let w = load(&packed[at..at + len]);
        let mut dw = load(&self.dw[at..at + len]);
        // dz[j] is that of token t − K + 1 + j; x[j] is what tap j of token t reads.
        let mut dz = if steps.start == 0 { [s.splat(0.0); K] } else { load(&self.carry[at..at + len]) };
        let mut x = [s.splat(0.0); K];
        for j in 1..K {
            if let Some(row) = rows.get(steps.start + j - 1) {
                x[j] = load_or_part::<S, PART>(s, &row[c..]);
            }
        }
        for t in steps {
            for j in 1..K {
                x[j - 1] = x[j];
                dz[j - 1] = dz[j];
            }
            if t < known {
                x[K - 1] = load_or_part::<S, PART>(s, &rows[t + K - 1][c..]);
                let (_, slope) = simd::silu_and_slope(s, taps(s, &w, &x));
                dz[K - 1] = s.mul(load_or_part::<S, PART>(s, &dy[t * width..][..width][c..]), slope);
            } else {
                dz[K - 1] = s.splat(0.0);
            }
            if t < own {
                for j in 0..K {
                    dw[j] = s.fma(dz[K - 1], x[j], dw[j]);
                }
            }
            if t + 1 >= K {
                let mut sum = s.mul(w[0], dz[K - 1]);
                for j in 1..K {
                    sum = s.fma(w[j], dz[K - 1 - j], sum);
                }
                store_or_part::<S, PART>(s, &mut self.dx[(t + 1 - K) * width..][..width][c..], sum);
            }
        }
        for j in 0..K {
            s.store(&mut self.dw[at + j * LANES..], dw[j]);
            s.store(&mut self.carry[at + j * LANES..], dz[j]);
        }
    }
}

impl<const K: usize> Kernel for Backward<'_, K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let steps = self.span.own + K - 1;
        for start in (0..steps).step_by(GROUP) {
            let group = start..(start + GROUP).min(steps);
            let mut c = 0;
            while c + LANES <= self.span.width {
                self.strip::<S, false>(s, group.clone(), c);
                c += LANES;
            }
            if c < self.span.width {
                self.strip::<S, true>(s, group.clone(), c);
            }
        }
    }
}

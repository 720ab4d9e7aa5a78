//! Optimised short convolution, eight channels at a time.
//!
//! Weights are packed so that the K taps of eight channels are contiguous. Tokens are processed in groups whose
//! inputs are kept in registers, so that a group reads each input once. Blocks of tokens are distributed over
//! threads. The backward pass recomputes z, carries the last K − 1 values of dz from group to group, and recomputes
//! those that a block needs from the next block. Weight gradients are summed per part and then over the parts in
//! order; the parts depend only on the shape.
//!
//! This file is specialised for K = 4; other kernel widths use the loops of [`super::any_kernel`].

use super::any_kernel::{AnyBackward, AnyForward};
use super::{ShortConv, ShortConvBackward, ShortConvForward, ShortConvGradients, Sizes};
use crate::array::Array;
use crate::cpu::{Carve, Cpu, Shared, with_scratch};
use crate::error::Result;
use crate::simd::{self, Kernel, LANES, Simd, load_or_part, store_or_part};
use crate::tensor::Tensor;

/// Kernel width that this file is specialised for.
const K: usize = 4;
/// Number of tokens processed together.
const GROUP: usize = 4;
/// Number of inputs that a group reads.
const SEEN: usize = GROUP + K - 1;

pub(crate) fn forward(cpu: &Cpu, op: ShortConvForward, sizes: Vec<Sizes>) -> Result<Vec<(Tensor, Tensor)>> {
    let one = |(input, sizes): (&ShortConv<Tensor>, Sizes)| {
        let (y, tail) = run_forward(cpu, sizes, input.map(Tensor::f32));
        (input.x.like(y), input.x.like(tail))
    };
    Ok(op.inputs.iter().zip(sizes).map(one).collect())
}

pub(crate) fn backward(
    cpu: &Cpu,
    op: ShortConvBackward,
    sizes: Vec<Sizes>,
) -> Result<Vec<ShortConvGradients>> {
    let one = |((input, gradient), sizes): ((&ShortConv<Tensor>, &Tensor), Sizes)| {
        let (x, weight) = run_backward(cpu, sizes, input.map(Tensor::f32), gradient.f32());
        ShortConvGradients { x: gradient.like(x), weight: gradient.like(weight) }
    };
    Ok(op.inputs.iter().zip(&op.gradients).zip(sizes).map(one).collect())
}

#[allow(unsafe_code)]
fn run_forward(cpu: &Cpu, sizes: Sizes, input: ShortConv<&Array<f32>>) -> (Array<f32>, Array<f32>) {
    let Sizes { batch, width, kernel, .. } = sizes;
    let mut y = cpu.uninit(input.x.shape());
    let mut tail = cpu.uninit(&[batch, kernel - 1, width]);
    let blocks = Blocks::new(sizes);
    // A decoding step uses each weight once: it packs them in registers.
    let once = sizes.tokens < GROUP && kernel == K && width.is_multiple_of(LANES);
    let room = if once { 0 } else { packed_len(sizes) };
    with_scratch(Carve::size(room) + Carve::size(width), |scratch| {
        let mut scratch = Carve(scratch);
        let (packed, zeros) = (scratch.take(room), scratch.take(width));
        if !once {
            pack(sizes, input.weight.data(), packed);
        }
        zeros.fill(0.0);
        let inputs = Inputs::new(sizes, input, zeros);
        let out = Shared::new(y.data_mut());
        cpu.parallel(blocks.count(), |item| {
            let Block { b, start, end } = blocks.get(item);
            let rows = inputs.rows(b, start, end - start);
            // SAFETY: blocks are disjoint ranges of tokens.
            let y = unsafe { out.part((b * sizes.tokens + start) * width, (end - start) * width) };
            match kernel {
                K if once => {
                    let step = Step(Forward { width, rows: &rows, packed: input.weight.data(), y });
                    cpu.level().run(step);
                }
                K => cpu.level().run(Forward { width, rows: &rows, packed, y }),
                _ => cpu.level().run(AnyForward { width, kernel, rows: &rows, packed, y }),
            }
        });
        let new_rows = (0..batch).flat_map(|b| (0..kernel - 1).map(move |j| (b, j)));
        for (row, (b, j)) in tail.data_mut().chunks_exact_mut(width.max(1)).zip(new_rows) {
            row.copy_from_slice(inputs.row(b, sizes.tokens + j));
        }
    });
    (y, tail)
}

#[allow(unsafe_code)]
fn run_backward(
    cpu: &Cpu,
    sizes: Sizes,
    input: ShortConv<&Array<f32>>,
    gradient: &Array<f32>,
) -> (Array<f32>, Array<f32>) {
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
            // SAFETY: each part has its own sums.
            let dw = unsafe { sums.part(part * len, len) };
            for item in blocks.of_part(part) {
                let Block { b, start, end } = blocks.get(item);
                // dx of the block's last tokens needs dz of the K − 1 tokens after the block, if they exist.
                let ahead = (end + kernel - 1).min(tokens) - start;
                let rows = inputs.rows(b, start, ahead);
                let at = (b * tokens + start) * width;
                let dy = &gradient.data()[at..at + ahead * width];
                // SAFETY: blocks are disjoint ranges of tokens.
                let dx = unsafe { out.part(at, (end - start) * width) };
                let span = Span { width, own: end - start, rows: &rows, packed, dy };
                match kernel {
                    K => with_scratch(len, |carry| cpu.level().run(Backward { span, carry, dx, dw })),
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
    (dx, dw)
}

/// Range of tokens of one sequence.
struct Block {
    b: usize,
    start: usize,
    end: usize,
}

/// Split of a call into blocks of tokens, and of the blocks into at most 64 parts.
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
        let per_sequence = if sizes.width == 0 { 0 } else { sizes.tokens.div_ceil(length) };
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

/// The tail and the tokens of each sequence as one list of rows.
struct Inputs<'a> {
    sizes: Sizes,
    x: &'a [f32],
    tail: Option<&'a [f32]>,
    zeros: &'a [f32],
}

impl<'a> Inputs<'a> {
    fn new(sizes: Sizes, input: ShortConv<&'a Array<f32>>, zeros: &'a [f32]) -> Self {
        Self { sizes, x: input.x.data(), tail: input.tail.map(Array::data), zeros }
    }

    /// Row i of the K − 1 tail rows followed by the tokens.
    fn row(&self, b: usize, i: usize) -> &'a [f32] {
        let Sizes { tokens, width, kernel, .. } = self.sizes;
        if i >= kernel - 1 {
            return &self.x[(b * tokens + i - (kernel - 1)) * width..][..width];
        }
        self.tail.map_or(self.zeros, |tail| &tail[(b * (kernel - 1) + i) * width..][..width])
    }

    /// Rows that tokens start .. start + count read: the K − 1 rows before the first, and the tokens themselves.
    fn rows(&self, b: usize, start: usize, count: usize) -> Vec<&'a [f32]> {
        (start..start + count + self.sizes.kernel - 1).map(|i| self.row(b, i)).collect()
    }
}

/// Number of packed weight elements: [⌈D / 8⌉, K, 8].
fn packed_len(sizes: Sizes) -> usize {
    sizes.width.next_multiple_of(LANES) * sizes.kernel
}

/// The weights of eight channels, packed. Constant sizes reduce this to a few shuffles.
#[inline(always)]
fn pack_eight(weight: &[f32; K * LANES]) -> [f32; K * LANES] {
    std::array::from_fn(|i| weight[i % LANES * K + i / LANES])
}

fn pack(sizes: Sizes, weight: &[f32], packed: &mut [f32]) {
    let eight = sizes.kernel * LANES;
    if sizes.kernel == K && sizes.width.is_multiple_of(LANES) {
        let (packed, _) = packed.as_chunks_mut();
        let (weight, _) = weight.as_chunks();
        packed.iter_mut().zip(weight).for_each(|(packed, weight)| *packed = pack_eight(weight));
        return;
    }
    packed.fill(0.0);
    for (packed, weight) in packed.chunks_exact_mut(eight).zip(weight.chunks(eight)) {
        for (lane, taps) in weight.chunks_exact(sizes.kernel).enumerate() {
            for (j, &w) in taps.iter().enumerate() {
                packed[j * LANES + lane] = w;
            }
        }
    }
}

fn unpack_add(sizes: Sizes, packed: &[f32], weight: &mut [f32]) {
    let eight = sizes.kernel * LANES;
    for (packed, weight) in packed.chunks_exact(eight).zip(weight.chunks_mut(eight)) {
        for (lane, taps) in weight.chunks_exact_mut(sizes.kernel).enumerate() {
            for (j, w) in taps.iter_mut().enumerate() {
                *w += packed[j * LANES + lane];
            }
        }
    }
}

struct Forward<'a> {
    width: usize,
    /// K − 1 rows before the block, followed by its rows.
    rows: &'a [&'a [f32]],
    packed: &'a [f32],
    y: &'a mut [f32],
}

impl Forward<'_> {
    /// Processes G tokens from `start` on, all channels.
    #[inline(always)]
    fn group<S: Simd, const G: usize>(&mut self, s: S, start: usize) {
        let width = self.width;
        let mut rows: [&[f32]; SEEN] = [&[]; SEEN];
        for i in 0..G + K - 1 {
            rows[i] = &self.rows[start + i][..width];
        }
        let mut out = self.y[start * width..][..G * width].chunks_exact_mut(width);
        let mut y: [&mut [f32]; G] = std::array::from_fn(|_| out.next().unwrap_or_default());
        let mut c = 0;
        while c + LANES <= width {
            strip::<S, G, false>(s, &rows, &self.packed[c * K..], &mut y, c);
            c += LANES;
        }
        if c < width {
            strip::<S, G, true>(s, &rows, &self.packed[c * K..], &mut y, c);
        }
    }
}

/// As [`Forward`] for a few tokens, with weights that are not packed.
struct Step<'a>(Forward<'a>);

impl Kernel for Step<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Forward { width, rows, packed: weights, y } = self.0;
        let (weights, _) = weights.as_chunks::<{ K * LANES }>();
        for (c, weights) in (0..width).step_by(LANES).zip(weights) {
            let packed = pack_eight(weights);
            for (t, y) in y.chunks_exact_mut(width).enumerate() {
                let mut seen: [&[f32]; SEEN] = [&[]; SEEN];
                seen[..K].copy_from_slice(&rows[t..t + K]);
                strip::<S, 1, false>(s, &seen, &packed, &mut [y], c);
            }
        }
    }
}

/// Outputs of G tokens in eight channels; `rows` starts with the row of tap 0 of the first token.
#[inline(always)]
fn strip<S: Simd, const G: usize, const PART: bool>(
    s: S,
    rows: &[&[f32]; SEEN],
    packed: &[f32],
    y: &mut [&mut [f32]; G],
    c: usize,
) {
    let w: [S::V; K] = load_taps(s, packed);
    let mut x = [w[0]; SEEN];
    for i in 0..G + K - 1 {
        x[i] = load_or_part::<S, PART>(s, &rows[i][c..]);
    }
    for t in 0..G {
        let z = taps(s, &w, &x, t);
        store_or_part::<S, PART>(s, &mut y[t][c..], simd::silu(s, z));
    }
}

#[inline(always)]
fn load_taps<S: Simd>(s: S, packed: &[f32]) -> [S::V; K] {
    let packed = &packed[..K * LANES];
    let mut w = [s.splat(0.0); K];
    for j in 0..K {
        w[j] = s.load(&packed[j * LANES..]);
    }
    w
}

/// Σ_j w_j x_(t + j), in ascending order of j.
#[inline(always)]
fn taps<S: Simd>(s: S, w: &[S::V; K], x: &[S::V; SEEN], t: usize) -> S::V {
    let mut z = s.mul(w[0], x[t]);
    for j in 1..K {
        z = s.fma(w[j], x[t + j], z);
    }
    z
}

impl Kernel for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let count = self.rows.len() - (K - 1);
        let mut t = 0;
        while t + GROUP <= count {
            self.group::<S, GROUP>(s, t);
            t += GROUP;
        }
        while t < count {
            self.group::<S, 1>(s, t);
            t += 1;
        }
    }
}

/// Inputs of the backward pass of one block.
pub(super) struct Span<'a> {
    pub width: usize,
    /// Number of tokens in the block; `rows` and `dy` extend up to K − 1 tokens further.
    pub own: usize,
    /// K − 1 rows before the block, followed by as many rows as `dy` covers.
    pub rows: &'a [&'a [f32]],
    pub packed: &'a [f32],
    pub dy: &'a [f32],
}

struct Backward<'a> {
    span: Span<'a>,
    /// Last K − 1 values of dz of every channel, carried between groups, [⌈D / 8⌉, K − 1, 8].
    carry: &'a mut [f32],
    dx: &'a mut [f32],
    dw: &'a mut [f32],
}

impl Backward<'_> {
    /// Computes dz of tokens start .. start + GROUP, their contribution to dw, and dx of the tokens they complete,
    /// which are K − 1 earlier. `WHOLE` means that all these tokens belong to the block.
    #[inline(always)]
    fn group<S: Simd, const WHOLE: bool>(&mut self, s: S, start: usize) {
        let width = self.span.width;
        let last = self.span.rows.len() - 1;
        let mut rows: [&[f32]; SEEN] = [&[]; SEEN];
        for i in 0..SEEN {
            rows[i] = &self.span.rows[(start + i).min(last)][..width];
        }
        let mut c = 0;
        while c + LANES <= width {
            self.strip::<S, WHOLE, false>(s, &rows, start, c);
            c += LANES;
        }
        if c < width {
            self.strip::<S, WHOLE, true>(s, &rows, start, c);
        }
    }

    #[inline(always)]
    fn strip<S: Simd, const WHOLE: bool, const PART: bool>(
        &mut self,
        s: S,
        rows: &[&[f32]; SEEN],
        start: usize,
        c: usize,
    ) {
        let Span { width, own, rows: all, packed, dy } = self.span;
        let known = all.len() - (K - 1);
        let w = load_taps(s, &packed[c * K..]);
        let mut x = [s.splat(0.0); SEEN];
        for i in 0..SEEN {
            x[i] = load_or_part::<S, PART>(s, &rows[i][c..]);
        }
        // dz[i] belongs to token start − K + 1 + i.
        let mut dz = [s.splat(0.0); SEEN];
        let carry = &mut self.carry[c * (K - 1)..][..(K - 1) * LANES];
        for i in 0..K - 1 {
            dz[i] = s.load(&carry[i * LANES..]);
        }
        for i in 0..GROUP {
            if WHOLE || start + i < known {
                let (_, slope) = simd::silu_and_slope(s, taps(s, &w, &x, i));
                let dy = load_or_part::<S, PART>(s, &dy[(start + i) * width..][..width][c..]);
                dz[K - 1 + i] = s.mul(dy, slope);
            }
        }
        for i in 0..K - 1 {
            s.store(&mut carry[i * LANES..], dz[GROUP + i]);
        }
        let sums = &mut self.dw[c * K..][..K * LANES];
        for j in 0..K {
            let mut sum = s.load(&sums[j * LANES..]);
            for i in 0..GROUP {
                if WHOLE || start + i < own {
                    sum = s.fma(dz[K - 1 + i], x[i + j], sum);
                }
            }
            s.store(&mut sums[j * LANES..], sum);
        }
        for i in 0..GROUP {
            if WHOLE || (start + i >= K - 1 && start + i < own + K - 1) {
                let mut sum = s.mul(w[0], dz[K - 1 + i]);
                for j in 1..K {
                    sum = s.fma(w[j], dz[K - 1 + i - j], sum);
                }
                let dx = &mut self.dx[(start + i - (K - 1)) * width..][..width];
                store_or_part::<S, PART>(s, &mut dx[c..], sum);
            }
        }
    }
}

impl Kernel for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.carry.fill(0.0);
        let own = self.span.own;
        for start in (0..own + K - 1).step_by(GROUP) {
            if start >= K - 1 && start + GROUP <= own {
                self.group::<S, true>(s, start);
            } else {
                self.group::<S, false>(s, start);
            }
        }
    }
}

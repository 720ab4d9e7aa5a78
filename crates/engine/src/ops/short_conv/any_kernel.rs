//! Short convolution for any kernel width: loops over the taps instead of keeping them in registers.

use super::fast::Span;
use crate::simd::{self, Kernel, LANES, Simd, load_or_part, store_or_part};

pub(super) struct AnyForward<'a> {
    pub width: usize,
    pub kernel: usize,
    /// K − 1 rows before the block, followed by its rows.
    pub rows: &'a [&'a [f32]],
    pub packed: &'a [f32],
    pub y: &'a mut [f32],
}

/// Σ_j w_j x_j for channels c .. c + 8, in ascending order of j; `rows` starts with the row of tap 0.
#[inline(always)]
fn taps<S: Simd>(s: S, kernel: usize, packed: &[f32], rows: &[&[f32]], c: usize) -> S::V {
    let w = &packed[c * kernel..][..kernel * LANES];
    let mut z = s.mul(s.load(w), load_or_part::<S, true>(s, &rows[0][c..]));
    for j in 1..kernel {
        z = s.fma(s.load(&w[j * LANES..]), load_or_part::<S, true>(s, &rows[j][c..]), z);
    }
    z
}

impl Kernel for AnyForward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { width, kernel, rows, packed, y } = self;
        for (t, y) in y.chunks_exact_mut(width.max(1)).enumerate() {
            for c in (0..width).step_by(LANES) {
                let z = taps(s, kernel, packed, &rows[t..], c);
                store_or_part::<S, true>(s, &mut y[c..], simd::silu(s, z));
            }
        }
    }
}

pub(super) struct AnyBackward<'a> {
    pub span: Span<'a>,
    pub kernel: usize,
    /// dz of the block and of the following tokens that it needs, each row padded to whole vectors.
    pub dz: &'a mut [f32],
    pub dx: &'a mut [f32],
    pub dw: &'a mut [f32],
}

impl Kernel for AnyBackward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { span: Span { width, own, rows, packed, dy }, kernel, dz, dx, dw } = self;
        let padded = width.next_multiple_of(LANES);
        let known = rows.len() - (kernel - 1);
        for t in 0..known {
            for c in (0..width).step_by(LANES) {
                let (_, slope) = simd::silu_and_slope(s, taps(s, kernel, packed, &rows[t..], c));
                let dy = load_or_part::<S, true>(s, &dy[t * width..][..width][c..]);
                let v = s.mul(dy, slope);
                s.store(&mut dz[t * padded + c..], v);
                if t < own {
                    for j in 0..kernel {
                        let sum = &mut dw[(c / LANES * kernel + j) * LANES..];
                        let x = load_or_part::<S, true>(s, &rows[t + j][c..]);
                        let added = s.fma(v, x, s.load(sum));
                        s.store(sum, added);
                    }
                }
            }
        }
        for t in 0..own {
            for c in (0..width).step_by(LANES) {
                let mut sum = s.splat(0.0);
                for j in 0..kernel {
                    let from = t + kernel - 1 - j;
                    if from < known {
                        let w = s.load(&packed[(c / LANES * kernel + j) * LANES..]);
                        sum = s.fma(w, s.load(&dz[from * padded + c..]), sum);
                    }
                }
                store_or_part::<S, true>(s, &mut dx[t * width..][..width][c..], sum);
            }
        }
    }
}

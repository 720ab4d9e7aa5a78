//! Operations on one row: dot products, scaled sums, reductions. Any length; the tail is done last.

use super::{LANES, Simd};

/// Σ a·b
#[inline(always)]
pub(crate) fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let mut acc = [s.splat(0.0); 2];
    let mut i = 0;
    while i + 2 * LANES <= n {
        acc[0] = s.fma(s.load(&a[i..]), s.load(&b[i..]), acc[0]);
        acc[1] = s.fma(s.load(&a[i + LANES..]), s.load(&b[i + LANES..]), acc[1]);
        i += 2 * LANES;
    }
    if i + LANES <= n {
        acc[0] = s.fma(s.load(&a[i..]), s.load(&b[i..]), acc[0]);
        i += LANES;
    }
    let mut total = s.sum(s.add(acc[0], acc[1]));
    while i < n {
        total += a[i] * b[i];
        i += 1;
    }
    total
}

/// y += factor·x
#[inline(always)]
pub(crate) fn add_scaled<S: Simd>(s: S, y: &mut [f32], factor: f32, x: &[f32]) {
    let n = y.len().min(x.len());
    let (y, x) = (&mut y[..n], &x[..n]);
    let f = s.splat(factor);
    let mut i = 0;
    while i + LANES <= n {
        let v = s.fma(f, s.load(&x[i..]), s.load(&y[i..]));
        s.store(&mut y[i..], v);
        i += LANES;
    }
    while i < n {
        y[i] += factor * x[i];
        i += 1;
    }
}

/// y = factor·x
#[inline(always)]
pub(crate) fn scale_to<S: Simd>(s: S, y: &mut [f32], factor: f32, x: &[f32]) {
    let n = y.len().min(x.len());
    let (y, x) = (&mut y[..n], &x[..n]);
    let f = s.splat(factor);
    let mut i = 0;
    while i + LANES <= n {
        let v = s.mul(f, s.load(&x[i..]));
        s.store(&mut y[i..], v);
        i += LANES;
    }
    while i < n {
        y[i] = factor * x[i];
        i += 1;
    }
}

/// x *= factor
#[inline(always)]
pub(crate) fn scale<S: Simd>(s: S, x: &mut [f32], factor: f32) {
    let f = s.splat(factor);
    let mut chunks = x.chunks_exact_mut(LANES);
    for c in &mut chunks {
        let v = s.mul(f, s.load(c));
        s.store(c, v);
    }
    for v in chunks.into_remainder() {
        *v *= factor;
    }
}

/// The largest element (−inf for none).
#[inline(always)]
pub(crate) fn largest<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut best = s.splat(f32::NEG_INFINITY);
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder();
    for c in chunks {
        best = s.max(best, s.load(c));
    }
    tail.iter().fold(s.largest(best), |m, &v| if v > m { v } else { m })
}

/// x ← e^(x − shift), and the sum of the results. The length is a multiple of 8 (pad with −inf).
#[inline(always)]
pub(crate) fn exp_minus<S: Simd>(s: S, x: &mut [f32], shift: f32) -> f32 {
    let m = s.splat(shift);
    let mut acc = s.splat(0.0);
    let mut chunks = x.chunks_exact_mut(LANES);
    for c in &mut chunks {
        let e = super::exp(s, s.sub(s.load(c), m));
        s.store(c, e);
        acc = s.add(acc, e);
    }
    debug_assert!(chunks.into_remainder().is_empty());
    s.sum(acc)
}

/// Asks for `count` rows of `width` numbers, `stride` apart, the first at element `at`. Rows of one head lie far
/// apart, which the processor does not foresee by itself.
#[inline(always)]
pub(crate) fn prefetch_rows<S: Simd>(
    s: S,
    data: &[f32],
    at: usize,
    stride: usize,
    count: usize,
    width: usize,
) {
    for row in 0..count {
        for column in (0..width).step_by(2 * LANES) {
            s.prefetch(data.as_ptr().wrapping_add(at + row * stride + column));
        }
    }
}

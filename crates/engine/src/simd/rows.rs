//! Operations on a single row of any length: dot products, scaled sums, reductions. The tail is processed last.

use super::{LANES, Simd};

/// Σ a·b
#[inline(always)]
pub(crate) fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let mut acc = [s.splat(0.0); 2];
    let (pairs_a, pairs_b) = (a.chunks_exact(2 * LANES), b.chunks_exact(2 * LANES));
    let (mut rest_a, mut rest_b) = (pairs_a.remainder(), pairs_b.remainder());
    for (a, b) in pairs_a.zip(pairs_b) {
        acc[0] = s.fma(s.load(a), s.load(b), acc[0]);
        acc[1] = s.fma(s.load(&a[LANES..]), s.load(&b[LANES..]), acc[1]);
    }
    if rest_a.len() >= LANES {
        acc[0] = s.fma(s.load(rest_a), s.load(rest_b), acc[0]);
        (rest_a, rest_b) = (&rest_a[LANES..], &rest_b[LANES..]);
    }
    let total = s.sum(s.add(acc[0], acc[1]));
    rest_a.iter().zip(rest_b).fold(total, |total, (a, b)| total + a * b)
}

/// y += factor·x
#[inline(always)]
pub(crate) fn add_scaled<S: Simd>(s: S, y: &mut [f32], factor: f32, x: &[f32]) {
    let f = s.splat(factor);
    let n = y.len().min(x.len());
    let mut ys = y[..n].chunks_exact_mut(LANES);
    let xs = x[..n].chunks_exact(LANES);
    let rest = xs.remainder();
    for (y, x) in (&mut ys).zip(xs) {
        let v = s.fma(f, s.load(x), s.load(y));
        s.store(y, v);
    }
    ys.into_remainder().iter_mut().zip(rest).for_each(|(y, x)| *y += factor * x);
}

/// y = factor·x
#[inline(always)]
pub(crate) fn scale_to<S: Simd>(s: S, y: &mut [f32], factor: f32, x: &[f32]) {
    let f = s.splat(factor);
    let n = y.len().min(x.len());
    let mut ys = y[..n].chunks_exact_mut(LANES);
    let xs = x[..n].chunks_exact(LANES);
    let rest = xs.remainder();
    for (y, x) in (&mut ys).zip(xs) {
        s.store(y, s.mul(f, s.load(x)));
    }
    ys.into_remainder().iter_mut().zip(rest).for_each(|(y, x)| *y = factor * x);
}

/// z = a·x + b·y, or z += a·x + b·y with `add`.
#[inline(always)]
pub(crate) fn blend<S: Simd>(s: S, z: &mut [f32], add: bool, (a, x): (f32, &[f32]), (b, y): (f32, &[f32])) {
    let n = z.len().min(x.len()).min(y.len());
    let (av, bv) = (s.splat(a), s.splat(b));
    let mut zs = z[..n].chunks_exact_mut(LANES);
    let (xs, ys) = (x[..n].chunks_exact(LANES), y[..n].chunks_exact(LANES));
    let rest = xs.remainder().iter().zip(ys.remainder());
    for ((z, x), y) in (&mut zs).zip(xs).zip(ys) {
        let first = if add { s.fma(av, s.load(x), s.load(z)) } else { s.mul(av, s.load(x)) };
        s.store(z, s.fma(bv, s.load(y), first));
    }
    for (z, (x, y)) in zs.into_remainder().iter_mut().zip(rest) {
        *z = if add { *z } else { 0.0 } + a * x + b * y;
    }
}

/// y = x for short rows, inline instead of calling `memcpy`.
#[inline(always)]
pub(crate) fn copy<S: Simd>(s: S, y: &mut [f32], x: &[f32]) {
    let n = y.len().min(x.len());
    let mut ys = y[..n].chunks_exact_mut(LANES);
    let xs = x[..n].chunks_exact(LANES);
    let rest = xs.remainder();
    for (y, x) in (&mut ys).zip(xs) {
        s.store(y, s.load(x));
    }
    ys.into_remainder().iter_mut().zip(rest).for_each(|(y, x)| *y = *x);
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

/// Maximum element (−inf if empty).
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

/// x ← e^(x − shift); returns the sum of the results. The length must be a multiple of 8 (pad with −inf).
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

/// Prefetches `count` rows of `width` elements with stride `stride`, the first at index `at`. The rows of one head
/// are far apart, so the hardware prefetcher does not predict them.
#[inline(always)]
pub(crate) fn prefetch_rows<S: Simd>(
    s: S,
    data: &[f32],
    at: usize,
    stride: usize,
    count: usize,
    width: usize,
) {
    prefetch_at(s, data.as_ptr(), at, stride, count, width);
}

/// Variant of [`prefetch_rows`] that takes a pointer, for memory that will be written.
#[inline(always)]
pub(crate) fn prefetch_at<S: Simd>(
    s: S,
    p: *const f32,
    at: usize,
    stride: usize,
    count: usize,
    width: usize,
) {
    for row in 0..count {
        for column in (0..width).step_by(2 * LANES) {
            s.prefetch(p.wrapping_add(at + row * stride + column));
        }
    }
}

//! Operations on a single row of any length: dot products, scaled sums, reductions. The tail is processed last.
//!
//! The loops are indexed: without link-time optimisation the compiler leaves calls to `Iterator::zip` in the kernels.

use super::{LANES, Simd};

/// Σ a·b
#[inline(always)]
pub(crate) fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len());
    let (pairs_a, mut rest_a) = a[..n].as_chunks::<{ 2 * LANES }>();
    let (pairs_b, mut rest_b) = b[..n].as_chunks::<{ 2 * LANES }>();
    let mut acc = [s.splat(0.0); 2];
    for i in 0..pairs_a.len().min(pairs_b.len()) {
        let (a, b) = (&pairs_a[i], &pairs_b[i]);
        acc[0] = s.fma(s.load(a), s.load(b), acc[0]);
        acc[1] = s.fma(s.load(&a[LANES..]), s.load(&b[LANES..]), acc[1]);
    }
    if rest_a.len() >= LANES {
        acc[0] = s.fma(s.load(rest_a), s.load(rest_b), acc[0]);
        (rest_a, rest_b) = (&rest_a[LANES..], &rest_b[LANES..]);
    }
    let mut total = s.sum(s.add(acc[0], acc[1]));
    for i in 0..rest_a.len().min(rest_b.len()) {
        total += rest_a[i] * rest_b[i];
    }
    total
}

/// y += factor·x
#[inline(always)]
pub(crate) fn add_scaled<S: Simd>(s: S, y: &mut [f32], factor: f32, x: &[f32]) {
    let f = s.splat(factor);
    let n = y.len().min(x.len());
    let (ys, y_rest) = y[..n].as_chunks_mut::<LANES>();
    let (xs, x_rest) = x[..n].as_chunks::<LANES>();
    for i in 0..ys.len().min(xs.len()) {
        let v = s.fma(f, s.load(&xs[i]), s.load(&ys[i]));
        s.store(&mut ys[i], v);
    }
    for i in 0..y_rest.len().min(x_rest.len()) {
        y_rest[i] += factor * x_rest[i];
    }
}

/// y = factor·x
#[inline(always)]
pub(crate) fn scale_to<S: Simd>(s: S, y: &mut [f32], factor: f32, x: &[f32]) {
    let f = s.splat(factor);
    let n = y.len().min(x.len());
    let (ys, y_rest) = y[..n].as_chunks_mut::<LANES>();
    let (xs, x_rest) = x[..n].as_chunks::<LANES>();
    for i in 0..ys.len().min(xs.len()) {
        s.store(&mut ys[i], s.mul(f, s.load(&xs[i])));
    }
    for i in 0..y_rest.len().min(x_rest.len()) {
        y_rest[i] = factor * x_rest[i];
    }
}

/// z = a·x + b·y, or z += a·x + b·y with `add`.
#[inline(always)]
pub(crate) fn blend<S: Simd>(s: S, z: &mut [f32], add: bool, (a, x): (f32, &[f32]), (b, y): (f32, &[f32])) {
    let n = z.len().min(x.len()).min(y.len());
    let (av, bv) = (s.splat(a), s.splat(b));
    let (zs, z_rest) = z[..n].as_chunks_mut::<LANES>();
    let (xs, x_rest) = x[..n].as_chunks::<LANES>();
    let (ys, y_rest) = y[..n].as_chunks::<LANES>();
    for i in 0..zs.len().min(xs.len()).min(ys.len()) {
        let (x, y) = (s.load(&xs[i]), s.load(&ys[i]));
        let first = if add { s.fma(av, x, s.load(&zs[i])) } else { s.mul(av, x) };
        s.store(&mut zs[i], s.fma(bv, y, first));
    }
    for i in 0..z_rest.len().min(x_rest.len()).min(y_rest.len()) {
        z_rest[i] = if add { z_rest[i] } else { 0.0 } + a * x_rest[i] + b * y_rest[i];
    }
}

/// y = x for short rows, inline instead of calling `memcpy`.
#[inline(always)]
pub(crate) fn copy<S: Simd>(s: S, y: &mut [f32], x: &[f32]) {
    let n = y.len().min(x.len());
    let (ys, y_rest) = y[..n].as_chunks_mut::<LANES>();
    let (xs, x_rest) = x[..n].as_chunks::<LANES>();
    for i in 0..ys.len().min(xs.len()) {
        s.store(&mut ys[i], s.load(&xs[i]));
    }
    y_rest.copy_from_slice(x_rest);
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

//! Partial vectors at the end of a row: the vector arithmetic is applied to lanes padded with zeros, not replaced
//! by scalar code. An element's result is therefore bit-identical wherever it is in a row or in a thread's part.

use super::{LANES, Simd};

/// Loads eight elements; with `PART`, the remaining elements of `p` padded with zeros.
#[inline(always)]
pub(crate) fn load_or_part<S: Simd, const PART: bool>(s: S, p: &[f32]) -> S::V {
    if !PART || p.len() >= LANES {
        return s.load(p);
    }
    let mut lanes = [0.0; LANES];
    lanes[..p.len()].copy_from_slice(p);
    s.load(&lanes)
}

/// Stores eight elements; with `PART`, as many as fit in `p`.
#[inline(always)]
pub(crate) fn store_or_part<S: Simd, const PART: bool>(s: S, p: &mut [f32], v: S::V) {
    if !PART || p.len() >= LANES {
        return s.store(p, v);
    }
    let mut lanes = [0.0; LANES];
    s.store(&mut lanes, v);
    p.copy_from_slice(&lanes[..p.len()]);
}

/// σ(x) and e^−x for SiLU. x is clamped to ±87, which avoids handling the ends of the full range.
#[inline(always)]
fn gate<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    // `max` and `min` return their second operand if either is NaN, so NaN propagates.
    let x = s.max(s.splat(-87.0), s.min(s.splat(87.0), s.sub(s.splat(0.0), x)));
    // Like `exp`, but multiplies by 2^n in one step.
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    let one = s.splat(1.0);
    let e = s.mul(s.fma(s.mul(p, r), r, s.add(r, one)), s.pow2(n));
    (s.div(one, s.add(one, e)), e)
}

/// SiLU(x) = x σ(x).
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.mul(x, gate(s, x).0)
}

/// SiLU(x) and its derivative σ(x) (1 + x (1 − σ(x))); 1 − σ(x) is computed as e^−x σ(x), which avoids
/// cancellation.
#[inline(always)]
pub(crate) fn silu_and_slope<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let one = s.splat(1.0);
    let (sig, e) = gate(s, x);
    let silu = s.mul(x, sig);
    (silu, s.mul(sig, s.fma(silu, e, one)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, Level};

    struct Both<'a>(&'a mut [f32], &'a mut [f32]);
    impl Kernel for Both<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for (y, slope) in self.0.chunks_exact_mut(LANES).zip(self.1.chunks_exact_mut(LANES)) {
                let (v, d) = silu_and_slope(s, s.load(y));
                s.store(y, v);
                s.store(slope, d);
            }
        }
    }

    #[test]
    fn silu_is_close_to_f64() {
        let xs: Vec<f32> = (0..80_000).map(|i| -100.0 + i as f32 * 0.0025).collect();
        for level in Level::detect().into_iter().chain(Level::portable()) {
            let (mut ys, mut slopes) = (xs.clone(), xs.clone());
            level.run(Both(&mut ys, &mut slopes));
            for ((&x, &y), &slope) in xs.iter().zip(&ys).zip(&slopes) {
                let x = f64::from(x);
                let sig = 1.0 / (1.0 + (-x).exp());
                let (want, want_slope) = (x * sig, sig * (1.0 + x * (1.0 - sig)));
                assert!(
                    (f64::from(y) - want).abs() <= 6e-7 * want.abs() + 1e-35,
                    "SiLU({x}) = {y}, not {want}"
                );
                assert!(
                    (f64::from(slope) - want_slope).abs() <= 6e-7,
                    "slope at {x}: {slope}, not {want_slope}"
                );
            }
            let (mut odd, mut slopes) =
                ([f32::NAN, f32::INFINITY, 0.0, -0.0, 1e30, -1e30, 0.0, 0.0], [0.0; 8]);
            level.run(Both(&mut odd, &mut slopes));
            assert!(odd[0].is_nan() && slopes[0].is_nan());
            assert_eq!(odd[1..5], [f32::INFINITY, 0.0, 0.0, 1e30]);
            assert!(odd[5].abs() < 1e-7);
        }
    }
}

//! Vectorised exp, sigmoid and softplus, accurate to a few units in the last place.

use super::Simd;

/// e^x: 0 below −87.3, inf above 88.7, NaN for NaN.
///
/// x = n·ln2 + r with |r| ≤ ln2/2; e^r is a polynomial of degree 6, multiplied by 2^n in two steps.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    let low = s.splat(-87.336_54);
    let high = s.splat(88.722_83);
    // `max` and `min` return their second operand if either is NaN, so NaN propagates.
    let clamped = s.min(high, s.max(low, x));
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    // ln2 is split into two parts, so that n·ln2 is exact enough.
    let r = s.fma(n, s.splat(-0.693_359_4), clamped);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    let e = s.fma(s.mul(p, r), r, s.add(r, s.splat(1.0)));
    let half = s.round(s.mul(n, s.splat(0.5)));
    let y = s.mul(s.mul(e, s.pow2(half)), s.pow2(s.sub(n, half)));
    let y = s.select_lt(x, low, s.splat(0.0), y);
    s.select_lt(high, x, s.splat(f32::INFINITY), y)
}

/// σ(x) = 1 / (1 + e^−x)
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// ln(1 + y) for y in [0, 1] as 2·atanh(y / (2 + y)); the relative error is close to one unit in the last place.
#[inline(always)]
fn log1p_exp_neg<S: Simd>(s: S, y: S::V) -> S::V {
    let z = s.div(y, s.add(y, s.splat(2.0)));
    let z2 = s.mul(z, z);
    let mut p = s.splat(1.0 / 17.0);
    for c in [1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0] {
        p = s.fma(p, z2, s.splat(c));
    }
    let two_z = s.add(z, z);
    s.fma(s.mul(two_z, z2), p, two_z)
}

/// softplus(x) = max(x, 0) + ln(1 + e^−|x|)
#[inline(always)]
pub(crate) fn softplus<S: Simd>(s: S, x: S::V) -> S::V {
    let zero = s.splat(0.0);
    let minus_abs = s.min(x, s.sub(zero, x));
    s.add(s.max(x, zero), log1p_exp_neg(s, exp(s, minus_abs)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, LANES, Level};

    struct Map<'a>(&'a mut [f32], u8);
    impl Kernel for Map<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for chunk in self.0.chunks_exact_mut(LANES) {
                let x = s.load(chunk);
                let y = match self.1 {
                    0 => exp(s, x),
                    1 => sigmoid(s, x),
                    _ => softplus(s, x),
                };
                s.store(chunk, y);
            }
        }
    }

    #[test]
    fn close_to_f64_over_the_whole_range() {
        let xs: Vec<f32> = (0..80_000).map(|i| -100.0 + i as f32 * 0.0024).collect();
        let reference: [fn(f64) -> f64; 3] =
            [f64::exp, |x| 1.0 / (1.0 + (-x).exp()), |x| x.max(0.0) + (-x.abs()).exp().ln_1p()];
        for level in Level::detect().into_iter().chain(Level::portable()) {
            for (kind, f) in reference.iter().enumerate() {
                let mut ys = xs.clone();
                level.run(Map(&mut ys, kind as u8));
                for (&x, &y) in xs.iter().zip(&ys) {
                    let want = f(f64::from(x));
                    if want > 1.2e-38 && want < 3.4e38 {
                        let error = ((f64::from(y) - want) / want).abs();
                        assert!(error < 4e-7, "kind {kind} at {x}: {y} for {want}, {error}");
                    }
                }
            }
        }
    }

    #[test]
    fn special_values() {
        for level in Level::detect().into_iter().chain(Level::portable()) {
            let mut xs = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -200.0, 200.0, 1.0];
            level.run(Map(&mut xs, 0));
            assert_eq!(xs[..4], [1.0, 1.0, f32::INFINITY, 0.0]);
            assert!(xs[4].is_nan());
            assert_eq!(xs[5..7], [0.0, f32::INFINITY]);
        }
    }
}

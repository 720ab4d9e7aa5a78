//! The end of a row that does not fill a vector: the same arithmetic as the rest, on lanes padded with zeros.
//! A number's bits then do not depend on where in a row, or in a thread's part, it lies.

use super::{LANES, Simd};

/// Reads eight numbers; with `PART`, what is left of `p` and then zeros.
#[inline(always)]
pub(crate) fn load_or_part<S: Simd, const PART: bool>(s: S, p: &[f32]) -> S::V {
    if !PART || p.len() >= LANES {
        return s.load(p);
    }
    let mut lanes = [0.0; LANES];
    lanes[..p.len()].copy_from_slice(p);
    s.load(&lanes)
}

/// Writes eight numbers; with `PART`, as many as `p` still takes.
#[inline(always)]
pub(crate) fn store_or_part<S: Simd, const PART: bool>(s: S, p: &mut [f32], v: S::V) {
    if !PART || p.len() >= LANES {
        return s.store(p, v);
    }
    let mut lanes = [0.0; LANES];
    s.store(&mut lanes, v);
    p.copy_from_slice(&lanes[..p.len()]);
}

/// σ(x), for use in SiLU: below −87 it stays at σ(−87) = 2e-38, which saves the ends of the full range.
#[inline(always)]
fn gate<S: Simd>(s: S, x: S::V) -> S::V {
    // `max` and `min` return their second operand where one is NaN, so NaN comes through.
    let x = s.max(s.splat(-87.0), s.min(s.splat(87.0), s.sub(s.splat(0.0), x)));
    // As `exp`, but 2^n in one step.
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    let one = s.splat(1.0);
    let e = s.fma(s.mul(p, r), r, s.add(r, one));
    s.div(one, s.fma(e, s.pow2(n), one))
}

/// SiLU(x) = x σ(x).
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.mul(x, gate(s, x))
}

/// SiLU(x) and its slope σ(x) (1 + x (1 − σ(x))).
#[inline(always)]
pub(crate) fn silu_and_slope<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let one = s.splat(1.0);
    let sig = gate(s, x);
    (s.mul(x, sig), s.mul(sig, s.fma(x, s.sub(one, sig), one)))
}

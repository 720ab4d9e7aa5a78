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

/// SiLU(x) = x σ(x).
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.mul(x, super::sigmoid(s, x))
}

/// SiLU(x) and its slope σ(x) (1 + x (1 − σ(x))).
#[inline(always)]
pub(crate) fn silu_and_slope<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let one = s.splat(1.0);
    let sig = super::sigmoid(s, x);
    (s.mul(x, sig), s.mul(sig, s.fma(x, s.sub(one, sig), one)))
}

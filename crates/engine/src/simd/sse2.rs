//! Two vectors of four lanes, for every x86-64 processor. Results are bit-identical to [`super::portable`];
//! explicit intrinsics reduce compile time to a fraction of what vectorising plain arrays takes.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::{Kernel, Simd};

#[derive(Clone, Copy)]
pub(crate) struct Sse2;

type V = [__m128; 2];

/// Wraps intrinsics that access no memory.
macro_rules! sse2 {
    ($($code:tt)*) => {
        // SAFETY: every x86-64 processor has SSE2.
        unsafe { $($code)* }
    };
}

#[inline(always)]
fn both(a: V, b: V, f: impl Fn(__m128, __m128) -> __m128) -> V {
    [f(a[0], b[0]), f(a[1], b[1])]
}

/// Lanes (0+4)+(2+6) and (1+5)+(3+7); the other two lanes are unused.
#[inline(always)]
fn fold(a: V) -> __m128 {
    sse2! {
        let four = _mm_add_ps(a[0], a[1]);
        _mm_add_ps(four, _mm_movehl_ps(four, four))
    }
}

/// Moves the second lane to the first.
#[inline(always)]
fn second(a: __m128) -> __m128 {
    sse2!(_mm_shuffle_ps::<1>(a, a))
}

impl Simd for Sse2 {
    type V = V;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        sse2!([_mm_set1_ps(x); 2])
    }
    #[inline(always)]
    fn load(self, p: &[f32]) -> V {
        assert!(p.len() >= 8);
        // SAFETY: the length is asserted.
        unsafe { self.load_ptr(p.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, p: &mut [f32], v: V) {
        assert!(p.len() >= 8);
        // SAFETY: the length is asserted.
        unsafe { self.store_ptr(p.as_mut_ptr(), v) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> V {
        // SAFETY: guaranteed by the caller.
        unsafe { [_mm_loadu_ps(p), _mm_loadu_ps(p.add(4))] }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut f32, v: V) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            _mm_storeu_ps(p, v[0]);
            _mm_storeu_ps(p.add(4), v[1]);
        }
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        both(a, b, |a, b| sse2!(_mm_add_ps(a, b)))
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        both(a, b, |a, b| sse2!(_mm_sub_ps(a, b)))
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        both(a, b, |a, b| sse2!(_mm_mul_ps(a, b)))
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        both(a, b, |a, b| sse2!(_mm_div_ps(a, b)))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        both(a, b, |a, b| sse2!(_mm_max_ps(a, b)))
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        both(a, b, |a, b| sse2!(_mm_min_ps(a, b)))
    }
    #[inline(always)]
    fn sqrt(self, a: V) -> V {
        a.map(|a| sse2!(_mm_sqrt_ps(a)))
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn round(self, a: V) -> V {
        // Adding and subtracting 1.5·2^23 rounds |x| < 2^22 to the nearest integer, ties to even.
        let shift = self.splat(12_582_912.0);
        self.sub(self.add(a, shift), shift)
    }
    #[inline(always)]
    fn pow2(self, n: V) -> V {
        n.map(|n| {
            sse2! {
                let i = _mm_add_epi32(_mm_cvttps_epi32(n), _mm_set1_epi32(127));
                _mm_castsi128_ps(_mm_slli_epi32::<23>(i))
            }
        })
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        let less = both(a, b, |a, b| sse2!(_mm_cmplt_ps(a, b)));
        let yes = both(less, yes, |less, yes| sse2!(_mm_and_ps(less, yes)));
        let no = both(less, no, |less, no| sse2!(_mm_andnot_ps(less, no)));
        both(yes, no, |yes, no| sse2!(_mm_or_ps(yes, no)))
    }
    #[inline(always)]
    fn all_lt(self, a: V, b: V) -> bool {
        let less = both(a, b, |a, b| sse2!(_mm_cmplt_ps(a, b)));
        sse2!(_mm_movemask_ps(_mm_and_ps(less[0], less[1]))) == 0xF
    }
    #[inline(always)]
    fn sum(self, a: V) -> f32 {
        let two = fold(a);
        sse2!(_mm_cvtss_f32(_mm_add_ss(two, second(two))))
    }
    #[inline(always)]
    fn sums(self, [a, b, c, d, e, f, g, h]: [V; 8]) -> V {
        let four = |a, b, c, d| {
            sse2! {
                // Interleave the two used lanes of each vector: a b a b and c d c d.
                let (ab, cd) = (_mm_unpacklo_ps(fold(a), fold(b)), _mm_unpacklo_ps(fold(c), fold(d)));
                _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab))
            }
        };
        [four(a, b, c, d), four(e, f, g, h)]
    }
    #[inline(always)]
    fn largest(self, a: V) -> f32 {
        // `max` returns its second operand if the first is NaN.
        sse2! {
            let four = _mm_max_ps(a[1], _mm_max_ps(a[0], _mm_set1_ps(f32::NEG_INFINITY)));
            let two = _mm_max_ps(_mm_movehl_ps(four, four), four);
            _mm_cvtss_f32(_mm_max_ss(second(two), two))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, p: *const u16) -> V {
        // SAFETY: guaranteed by the caller.
        let half = unsafe { _mm_loadu_si128(p.cast()) };
        sse2! {
            let zero = _mm_setzero_si128();
            [_mm_unpacklo_epi16(zero, half), _mm_unpackhi_epi16(zero, half)].map(|v| _mm_castsi128_ps(v))
        }
    }
    #[inline(always)]
    unsafe fn load_i8_ptr(self, p: *const i8) -> V {
        // SAFETY: guaranteed by the caller.
        let bytes = unsafe { _mm_loadl_epi64(p.cast()) };
        // Move each byte to the top of a wider integer, then shift it down with sign extension.
        sse2! {
            let pairs = _mm_unpacklo_epi8(bytes, bytes);
            [_mm_unpacklo_epi16(pairs, pairs), _mm_unpackhi_epi16(pairs, pairs)]
                .map(|v| _mm_cvtepi32_ps(_mm_srai_epi32::<24>(v)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8_quads(self, p: *const i8) -> [V; 4] {
        // SAFETY: guaranteed by the caller.
        let v = unsafe { [_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(16).cast())] };
        // A byte in the top position of a 32-bit word is its value times 2^24; this needs shifts and masks but no
        // sign extension.
        sse2! {
            let top = _mm_set1_epi32(0xFF00_0000_u32.cast_signed());
            [
                v.map(|v| _mm_cvtepi32_ps(_mm_slli_epi32::<24>(v))),
                v.map(|v| _mm_cvtepi32_ps(_mm_and_si128(_mm_slli_epi32::<16>(v), top))),
                v.map(|v| _mm_cvtepi32_ps(_mm_and_si128(_mm_slli_epi32::<8>(v), top))),
                v.map(|v| _mm_cvtepi32_ps(_mm_and_si128(v, top))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn transpose8(self, a: *const f32, lda: usize, b: *mut f32, ldb: usize) {
        for i in [0, 4] {
            for j in [0, 4] {
                // SAFETY: the caller's guarantee covers all reads and writes.
                unsafe {
                    let [mut r0, mut r1, mut r2, mut r3] =
                        std::array::from_fn(|r| _mm_loadu_ps(a.add((i + r) * lda + j)));
                    _MM_TRANSPOSE4_PS(&mut r0, &mut r1, &mut r2, &mut r3);
                    for (r, row) in [r0, r1, r2, r3].into_iter().enumerate() {
                        _mm_storeu_ps(b.add((j + r) * ldb + i), row);
                    }
                }
            }
        }
    }
    #[inline(always)]
    fn prefetch(self, _: *const f32) {}
    /// Not inlined: one copy of each kernel suffices and saves minutes of compile time.
    #[inline(never)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::portable::Portable;
    use super::*;

    /// Applies every method to some numbers and returns the results as bits.
    fn all<S: Simd>(s: S, numbers: &[f32; 24]) -> Vec<u32> {
        let [a, b, c] = [0, 8, 16].map(|i| s.load(&numbers[i..]));
        let bytes: [i8; 32] = std::array::from_fn(|i| (i as i8).wrapping_mul(37).wrapping_sub(100));
        let halves: [u16; 8] = std::array::from_fn(|i| (numbers[i].to_bits() >> 16) as u16);
        let eight = [a, b, c, s.add(a, b), s.sub(b, c), s.mul(a, c), s.max(a, b), s.min(a, b)];
        let mut seen = eight.to_vec();
        seen.extend([s.div(a, b), s.sqrt(s.mul(a, a)), s.fma(a, b, c), s.round(c), s.pow2(s.round(c))]);
        seen.extend([s.select_lt(a, b, b, c), s.splat(numbers[3]), s.sums(eight)]);
        seen.extend([s.load_bf16(&halves), s.load_i8(&bytes)]);
        // SAFETY: 32 bytes.
        seen.extend(unsafe { s.load_i8_quads(bytes.as_ptr()) });
        let mut out = vec![0.0; seen.len() * 8];
        out.chunks_exact_mut(8).zip(&seen).for_each(|(to, &v)| s.store(to, v));
        out.extend([s.sum(a), s.largest(a), s.largest(c)]);
        out.extend([(a, a), (a, b), (s.min(a, b), s.splat(1e9))].map(|(a, b)| f32::from(s.all_lt(a, b))));
        let mut turned = [0.0; 8 * 9];
        let square: [f32; 64] = std::array::from_fn(|i| numbers[i % 24] + i as f32);
        // SAFETY: eight rows of eight on both sides.
        unsafe { s.transpose8(square.as_ptr(), 8, turned.as_mut_ptr(), 9) };
        out.extend(turned);
        out.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn the_bits_are_those_of_plain_arrays() {
        let mut numbers: [f32; 24] = std::array::from_fn(|i| (i as f32 * 2.7).sin() * 30.0);
        assert_eq!(all(Sse2, &numbers), all(Portable, &numbers));
        numbers[2] = f32::NAN;
        numbers[5] = f32::INFINITY;
        numbers[12] = f32::NEG_INFINITY;
        let (found, right) = (all(Sse2, &numbers), all(Portable, &numbers));
        let same =
            |(a, b): (&u32, &u32)| a == b || (f32::from_bits(*a).is_nan() && f32::from_bits(*b).is_nan());
        assert!(found.iter().zip(&right).all(same));
    }
}

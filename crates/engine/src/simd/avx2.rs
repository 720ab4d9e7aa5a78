//! AVX2 with FMA. Every method maps to one or a few instructions. An `Avx2` value exists only on processors that
//! support them.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::{Kernel, LanesKernel, Simd, lanes};

#[derive(Clone, Copy)]
pub(crate) struct Avx2 {
    /// Whether the processor has AVX-512 as well, and products are to use it.
    wide: bool,
}

/// # Safety
/// The processor must support AVX2 and FMA, and AVX-512 if `wide`.
#[target_feature(enable = "avx2,fma")]
#[inline(never)]
pub(super) unsafe fn run<K: Kernel>(kernel: K, wide: bool) -> K::Output {
    kernel.run(Avx2 { wide })
}

// SAFETY of all blocks below: an `Avx2` value is only created in `run`, on processors with AVX2 and FMA; slice
// lengths are checked, and pointer methods rely on their caller's guarantee.
impl Simd for Avx2 {
    type V = __m256;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, p: &[f32]) -> __m256 {
        assert!(p.len() >= 8);
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(p.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, p: &mut [f32], v: __m256) {
        assert!(p.len() >= 8);
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(p.as_mut_ptr(), v) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> __m256 {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut f32, v: __m256) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn sqrt(self, a: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_sqrt_ps(a) }
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    fn pow2(self, n: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(i))
        }
    }
    #[inline(always)]
    fn select_lt(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    fn all_lt(self, a: __m256, b: __m256) -> bool {
        // SAFETY: see above.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) == 0xFF }
    }
    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        // SAFETY: see above.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn sums(self, [a, b, c, d, e, f, g, h]: [__m256; 8]) -> __m256 {
        // SAFETY: see above.
        unsafe {
            // For two vectors side by side: the sums of lanes 0+4, 1+5, 2+6, 3+7.
            let four = |x, y| {
                let low = _mm256_permute2f128_ps::<0x20>(x, y);
                _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(x, y))
            };
            // For four vectors: the sums of the first and third, and of the second and fourth of these.
            let two = |x, y| _mm256_add_ps(_mm256_shuffle_ps::<0x44>(x, y), _mm256_shuffle_ps::<0xEE>(x, y));
            let (left, right) = (two(four(a, b), four(c, d)), two(four(e, f), four(g, h)));
            let even = _mm256_shuffle_ps::<0x88>(left, right);
            let sums = _mm256_add_ps(even, _mm256_shuffle_ps::<0xDD>(left, right)); // a c e g b d f h
            _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
        }
    }
    #[inline(always)]
    fn largest(self, a: __m256) -> f32 {
        // SAFETY: see above.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, p: *const u16) -> __m256 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let half = _mm_loadu_si128(p.cast());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8_ptr(self, p: *const i8) -> __m256 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let bytes = _mm_loadl_epi64(p.cast());
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
        }
    }
    #[inline(always)]
    unsafe fn load_i8_quads(self, p: *const i8) -> [__m256; 4] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            // A byte in the top position of a 32-bit word is its value times 2^24; this needs shifts and masks but
            // no sign extension.
            let v = _mm256_loadu_si256(p.cast());
            let top = _mm256_set1_epi32(0xFF00_0000_u32.cast_signed());
            [
                _mm256_cvtepi32_ps(_mm256_slli_epi32::<24>(v)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_slli_epi32::<16>(v), top)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_slli_epi32::<8>(v), top)),
                _mm256_cvtepi32_ps(_mm256_and_si256(v, top)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn transpose8(self, a: *const f32, lda: usize, b: *mut f32, ldb: usize) {
        // SAFETY: the caller's guarantee covers all reads and writes.
        unsafe {
            let mut r = [_mm256_setzero_ps(); 8];
            for i in 0..8 {
                r[i] = _mm256_loadu_ps(a.add(i * lda));
            }
            let mut u = r;
            for i in 0..4 {
                u[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                u[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            let mut w = u;
            for h in 0..2 {
                let o = 4 * h;
                w[o] = _mm256_shuffle_ps::<0x44>(u[o], u[o + 2]);
                w[o + 1] = _mm256_shuffle_ps::<0xEE>(u[o], u[o + 2]);
                w[o + 2] = _mm256_shuffle_ps::<0x44>(u[o + 1], u[o + 3]);
                w[o + 3] = _mm256_shuffle_ps::<0xEE>(u[o + 1], u[o + 3]);
            }
            for j in 0..4 {
                _mm256_storeu_ps(b.add(j * ldb), _mm256_permute2f128_ps::<0x20>(w[j], w[j + 4]));
                _mm256_storeu_ps(b.add((j + 4) * ldb), _mm256_permute2f128_ps::<0x31>(w[j], w[j + 4]));
            }
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: a prefetch accesses no memory architecturally, so any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves that the processor has the features.
        unsafe { run(kernel, self.wide) }
    }
    #[inline(always)]
    fn call_lanes<K: LanesKernel>(self, kernel: K) {
        if self.wide {
            // SAFETY: `wide` says that the processor has the features.
            unsafe { lanes::run(kernel) }
        } else {
            self.call(lanes::Eight(kernel));
        }
    }
}

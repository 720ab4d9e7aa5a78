//! AVX2, with or without VNNI. An `Avx2` value exists only on processors that support it.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::{Wide, WideKernel};

#[derive(Clone, Copy)]
pub(crate) struct Avx2<const VNNI: bool>(());

/// # Safety
/// The processor must support these features.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
pub(super) unsafe fn run<K: WideKernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<false>(()))
}

/// # Safety
/// The processor must support these features.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
#[inline(never)]
pub(super) unsafe fn run_vnni<K: WideKernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<true>(()))
}

/// Two vectors of eight lanes.
type F = [__m256; 2];
type I = [__m256i; 2];

// SAFETY of all blocks below: an `Avx2` value is only created in `run` and `run_vnni`, on processors with the features;
// pointer methods rely on their caller's guarantee.
impl<const VNNI: bool> Wide for Avx2<VNNI> {
    const ROWS: usize = if VNNI { 5 } else { 4 };
    const TWO: bool = false;
    type F = F;
    type I = I;
    type Codes = I;
    /// With VNNI the codes; without, the bytes v = code − 128 and |v|.
    type Eight = [I; 2];
    type Quad = __m256i;
    /// With VNNI sums of 32 bits; without, of 16: eight sums of two products up to 15 · 127 fit.
    type Sum4 = I;

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> F {
        // SAFETY: see above.
        unsafe {
            [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))]
        }
    }
    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        // SAFETY: see above.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        // SAFETY: see above.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        // SAFETY: see above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        // SAFETY: see above.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        // SAFETY: see above.
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        // SAFETY: see above.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn sqrt(self, a: F) -> F {
        // SAFETY: see above.
        unsafe { [_mm256_sqrt_ps(a[0]), _mm256_sqrt_ps(a[1])] }
    }
    #[inline(always)]
    fn select_lt(self, a: F, b: F, yes: F, no: F) -> F {
        // SAFETY: see above.
        unsafe {
            [
                _mm256_blendv_ps(no[0], yes[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
                _mm256_blendv_ps(no[1], yes[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
            ]
        }
    }
    #[inline(always)]
    fn round(self, a: F) -> F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: see above.
        unsafe { [_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])] }
    }
    #[inline(always)]
    fn max_abs(self, a: F, b: F) -> F {
        // SAFETY: see above.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            [
                _mm256_max_ps(_mm256_andnot_ps(sign, a[0]), b[0]),
                _mm256_max_ps(_mm256_andnot_ps(sign, a[1]), b[1]),
            ]
        }
    }
    #[inline(always)]
    fn to_int(self, a: F) -> I {
        // SAFETY: see above.
        unsafe { [_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1])] }
    }
    #[inline(always)]
    fn from_int(self, a: I) -> F {
        // SAFETY: see above.
        unsafe { [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])] }
    }
    #[inline(always)]
    unsafe fn load_int(self, p: *const u32) -> I {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast())] }
    }
    #[inline(always)]
    unsafe fn store_int(self, p: *mut i32, v: I) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_si256(p.cast(), v[0]);
            _mm256_storeu_si256(p.add(8).cast(), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, v: I) {
        // SAFETY: see above.
        unsafe {
            // Lanes 0-3, 8-11, 4-7, 12-15, each in its lowest byte.
            let low = _mm256_set1_epi32(255);
            let words = _mm256_packus_epi32(_mm256_and_si256(v[0], low), _mm256_and_si256(v[1], low));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let (first, second) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(p.cast(), _mm_packus_epi16(first, second));
        }
    }
    #[inline(always)]
    fn add_int(self, a: I, b: I) -> I {
        // SAFETY: see above.
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    fn total(self, a: I) -> i32 {
        // SAFETY: see above.
        unsafe {
            let eight = _mm256_add_epi32(a[0], a[1]);
            let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)))
        }
    }
    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        // SAFETY: see above.
        unsafe {
            let eight = _mm256_max_ps(a[0], a[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn any_nan(self, a: F) -> bool {
        // SAFETY: see above.
        unsafe {
            let [a, b] =
                [_mm256_cmp_ps::<_CMP_UNORD_Q>(a[0], a[0]), _mm256_cmp_ps::<_CMP_UNORD_Q>(a[1], a[1])];
            _mm256_movemask_ps(_mm256_or_ps(a, b)) != 0
        }
    }
    #[inline(always)]
    fn six<const SHIFT: i32>(self, a: I) -> I {
        // SAFETY: see above.
        unsafe {
            let mask = _mm256_set1_epi32(63);
            [
                _mm256_and_si256(_mm256_srli_epi32::<SHIFT>(a[0]), mask),
                _mm256_and_si256(_mm256_srli_epi32::<SHIFT>(a[1]), mask),
            ]
        }
    }
    #[inline(always)]
    fn tops(self, a: [I; 3]) -> I {
        let mut tops = a[0];
        for half in 0..2 {
            // SAFETY: see above.
            unsafe {
                let [a, b, c] = [
                    _mm256_srli_epi32::<30>(a[0][half]),
                    _mm256_srli_epi32::<30>(a[1][half]),
                    _mm256_srli_epi32::<30>(a[2][half]),
                ];
                let low = _mm256_or_si256(a, _mm256_slli_epi32::<2>(b));
                tops[half] = _mm256_or_si256(low, _mm256_slli_epi32::<4>(c));
            }
        }
        tops
    }
    #[inline(always)]
    unsafe fn codes(self, p: *const u8) -> I {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn store_codes(self, p: *mut u8, codes: I) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_si256(p.cast(), codes[0]);
            _mm256_storeu_si256(p.add(32).cast(), codes[1]);
        }
    }
    #[inline(always)]
    fn nibbles(self, codes: I) -> [I; 2] {
        // SAFETY: see above.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let high = |v| _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask);
            [
                [_mm256_and_si256(codes[0], mask), _mm256_and_si256(codes[1], mask)],
                [high(codes[0]), high(codes[1])],
            ]
        }
    }
    #[inline(always)]
    fn eight(self, codes: I) -> [I; 2] {
        if VNNI {
            return [codes, codes];
        }
        // SAFETY: see above.
        unsafe {
            let half = _mm256_set1_epi8(-128);
            let signed = [_mm256_xor_si256(codes[0], half), _mm256_xor_si256(codes[1], half)];
            [signed, [_mm256_abs_epi8(signed[0]), _mm256_abs_epi8(signed[1])]]
        }
    }
    #[inline(always)]
    unsafe fn quad(self, p: *const i8) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn start8(self, offset: *const i32) -> I {
        // SAFETY: see above.
        unsafe {
            if VNNI { [_mm256_set1_epi32(offset.read_unaligned()); 2] } else { [_mm256_setzero_si256(); 2] }
        }
    }
    #[inline(always)]
    fn step8(self, mut sum: I, [w, size]: [I; 2], x: __m256i) -> I {
        for half in 0..2 {
            // SAFETY: see above.
            unsafe {
                sum[half] = if VNNI {
                    _mm256_dpbusd_avx_epi32(sum[half], w[half], x)
                } else {
                    // |v| · (x with the sign of v): two products are at most 2 · 127 · 127, which 16 bits hold.
                    let pairs = _mm256_maddubs_epi16(size[half], _mm256_sign_epi8(x, w[half]));
                    _mm256_add_epi32(sum[half], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
                };
            }
        }
        sum
    }
    #[inline(always)]
    fn start4(self) -> I {
        // SAFETY: see above.
        unsafe { [_mm256_setzero_si256(); 2] }
    }
    #[inline(always)]
    fn step4(self, mut sum: I, w: I, x: __m256i) -> I {
        for half in 0..2 {
            // SAFETY: see above.
            unsafe {
                sum[half] = if VNNI {
                    _mm256_dpbusd_avx_epi32(sum[half], w[half], x)
                } else {
                    _mm256_add_epi16(sum[half], _mm256_maddubs_epi16(w[half], x))
                };
            }
        }
        sum
    }
    #[inline(always)]
    fn end4(self, sum: I) -> I {
        if VNNI {
            return sum;
        }
        // SAFETY: see above.
        unsafe {
            let one = _mm256_set1_epi16(1);
            [_mm256_madd_epi16(sum[0], one), _mm256_madd_epi16(sum[1], one)]
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch accesses no memory architecturally, so any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

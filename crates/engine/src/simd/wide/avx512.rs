//! AVX-512 with VNNI. An `Avx512` value exists only on processors that support it.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::{Wide, WideKernel};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// # Safety
/// The processor must support these features.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
#[inline(never)]
pub(super) unsafe fn run<K: WideKernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

// SAFETY of all blocks below: an `Avx512` value is only created in `run`, on processors with the features; pointer
// methods rely on their caller's guarantee.
impl Wide for Avx512 {
    const ROWS: usize = 6;
    const ALL: usize = 8;
    const TWO: bool = true;
    type F = __m512;
    type I = __m512i;
    type Codes = __m512i;
    type Eight = __m512i;
    type Quad = __m512i;
    type Sum4 = __m512i;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sqrt_ps(a) }
    }
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    fn max_abs(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_max_ps(_mm512_abs_ps(a), b) }
    }
    #[inline(always)]
    fn to_int(self, a: __m512) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_cvtps_epi32(a) }
    }
    #[inline(always)]
    fn from_int(self, a: __m512i) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn load_int(self, p: *const u32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_int(self, p: *mut i32, v: __m512i) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, v: __m512i) {
        // SAFETY: see above.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v)) }
    }
    #[inline(always)]
    fn add_int(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    fn total(self, a: __m512i) -> i32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_add_epi32(a) }
    }
    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_max_ps(a) }
    }
    #[inline(always)]
    fn any_nan(self, a: __m512) -> bool {
        // SAFETY: see above.
        unsafe { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a) != 0 }
    }
    #[inline(always)]
    fn six<const SHIFT: i32>(self, a: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let shifted = _mm512_srl_epi32(a, _mm_cvtsi32_si128(SHIFT));
            _mm512_and_si512(shifted, _mm512_set1_epi32(63))
        }
    }
    #[inline(always)]
    fn tops(self, a: [__m512i; 3]) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let [a, b, c] =
                [_mm512_srli_epi32::<30>(a[0]), _mm512_srli_epi32::<30>(a[1]), _mm512_srli_epi32::<30>(a[2])];
            let low = _mm512_or_si512(a, _mm512_slli_epi32::<2>(b));
            _mm512_or_si512(low, _mm512_slli_epi32::<4>(c))
        }
    }
    #[inline(always)]
    unsafe fn codes(self, p: *const u8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_codes(self, p: *mut u8, codes: __m512i) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_si512(p.cast(), codes) }
    }
    #[inline(always)]
    fn nibbles(self, codes: __m512i) -> [__m512i; 2] {
        // SAFETY: see above.
        unsafe {
            let mask = _mm512_set1_epi8(15);
            [_mm512_and_si512(codes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(codes), mask)]
        }
    }
    #[inline(always)]
    fn eight(self, codes: __m512i) -> __m512i {
        codes
    }
    #[inline(always)]
    unsafe fn quad(self, p: *const i8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn start8(self, offset: *const i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(offset.read_unaligned()) }
    }
    #[inline(always)]
    fn step8(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_dpbusd_epi32(sum, w, x) }
    }
    #[inline(always)]
    fn start4(self) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    fn step4(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
        self.step8(sum, w, x)
    }
    #[inline(always)]
    fn end4(self, sum: __m512i) -> __m512i {
        sum
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch accesses no memory architecturally, so any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

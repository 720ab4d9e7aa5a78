//! Products of f32 over vectors of any width: eight lanes as in [`Simd`], or sixteen with AVX-512.
#![allow(unsafe_code)]

use super::{Kernel, LANES, Simd};

/// What dot products need of a vector type.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// Lanes per vector.
    const LANES: usize;
    /// Rows of x that have their sums in registers, together with four rows of W.
    const ROWS: usize;
    /// Rows of x per pass over few rows of W that are read in place.
    const PASS: usize;
    /// Rows of a tile of small matrix products, which is two vectors wide.
    const TILE: usize;
    type V: Copy;

    fn splat(self, x: f32) -> Self::V;
    /// Loads the first elements of `p`.
    fn load(self, p: &[f32]) -> Self::V;
    /// Stores to the first elements of `p`.
    fn store(self, p: &mut [f32], v: Self::V);
    /// # Safety
    /// `p` must be valid for reads of a vector.
    unsafe fn load_ptr(self, p: *const f32) -> Self::V;
    /// # Safety
    /// `p` must be valid for writes of a vector.
    unsafe fn store_ptr(self, p: *mut f32, v: Self::V);
    /// Loads bf16 numbers (as bits), widened to f32.
    /// # Safety
    /// `p` must be valid for reads of a vector's number of elements.
    unsafe fn load_bf16_ptr(self, p: *const u16) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a·b + c`, fused if the processor supports it.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Lane sums of eight vectors, each in the same order.
    fn sums(self, a: [Self::V; 8]) -> [f32; 8];
    /// Prefetches the cache line of `p`; any address is allowed.
    fn prefetch(self, p: *const f32);
}

/// Computation over vectors of any width. `run` must be `#[inline(always)]`.
pub(crate) trait LanesKernel {
    fn run<S: Lanes>(self, s: S);
}

/// Vectors that can also be transposed.
pub(crate) trait Square: Lanes {
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// Vector i of the result has lane i of every vector.
    fn transpose(self, a: [Self::V; 16]) -> [Self::V; 16];
}

/// Computation over vectors of sixteen lanes. `run` must be `#[inline(always)]`.
pub(crate) trait SquareKernel {
    fn run<S: Square>(self, s: S);
}

/// A kernel for eight lanes.
pub(super) struct Eight<K>(pub K);

impl<K: LanesKernel> Kernel for Eight<K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.run(s);
    }
}

impl<S: Simd> Lanes for S {
    const LANES: usize = LANES;
    const ROWS: usize = 3;
    const PASS: usize = 4;
    const TILE: usize = 6;
    type V = S::V;

    #[inline(always)]
    fn splat(self, x: f32) -> S::V {
        Simd::splat(self, x)
    }
    #[inline(always)]
    fn load(self, p: &[f32]) -> S::V {
        Simd::load(self, p)
    }
    #[inline(always)]
    fn store(self, p: &mut [f32], v: S::V) {
        Simd::store(self, p, v);
    }
    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { Simd::load_ptr(self, p) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut f32, v: S::V) {
        // SAFETY: guaranteed by the caller.
        unsafe { Simd::store_ptr(self, p, v) }
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, p: *const u16) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { Simd::load_bf16_ptr(self, p) }
    }
    #[inline(always)]
    fn add(self, a: S::V, b: S::V) -> S::V {
        Simd::add(self, a, b)
    }
    #[inline(always)]
    fn sub(self, a: S::V, b: S::V) -> S::V {
        Simd::sub(self, a, b)
    }
    #[inline(always)]
    fn fma(self, a: S::V, b: S::V, c: S::V) -> S::V {
        Simd::fma(self, a, b, c)
    }
    #[inline(always)]
    fn sums(self, a: [S::V; 8]) -> [f32; 8] {
        let mut sums = [0.0; 8];
        Simd::store(self, &mut sums, Simd::sums(self, a));
        sums
    }
    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        Simd::prefetch(self, p);
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use sixteen::{run, run_square};

#[cfg(target_arch = "x86_64")]
mod sixteen {
    use std::arch::x86_64::*;

    use super::{Lanes, LanesKernel, Square, SquareKernel};

    /// AVX-512. A value exists only on processors that support it.
    #[derive(Clone, Copy)]
    pub(crate) struct Sixteen(());

    /// # Safety
    /// The processor must support these features.
    #[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")]
    #[inline(never)]
    pub(crate) unsafe fn run<K: LanesKernel>(kernel: K) {
        kernel.run(Sixteen(()));
    }

    /// # Safety
    /// The processor must support these features.
    #[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")]
    #[inline(never)]
    pub(crate) unsafe fn run_square<K: SquareKernel>(kernel: K) {
        kernel.run(Sixteen(()));
    }

    // SAFETY of all blocks below: a `Sixteen` value is only created in `run`, on processors with the features; slice
    // lengths are checked, and pointer methods rely on their caller's guarantee.
    impl Lanes for Sixteen {
        const LANES: usize = 16;
        const ROWS: usize = 6;
        const PASS: usize = 8;
        const TILE: usize = 8;
        type V = __m512;

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            // SAFETY: see above.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        fn load(self, p: &[f32]) -> __m512 {
            assert!(p.len() >= 16);
            // SAFETY: see above.
            unsafe { _mm512_loadu_ps(p.as_ptr()) }
        }
        #[inline(always)]
        fn store(self, p: &mut [f32], v: __m512) {
            assert!(p.len() >= 16);
            // SAFETY: see above.
            unsafe { _mm512_storeu_ps(p.as_mut_ptr(), v) }
        }
        #[inline(always)]
        unsafe fn load_ptr(self, p: *const f32) -> __m512 {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm512_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store_ptr(self, p: *mut f32, v: __m512) {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm512_storeu_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn load_bf16_ptr(self, p: *const u16) -> __m512 {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let half = _mm256_loadu_si256(p.cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
            }
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
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: see above.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn sums(self, a: [__m512; 8]) -> [f32; 8] {
            // SAFETY: see above.
            unsafe {
                let mut half = [_mm256_setzero_ps(); 8];
                for i in 0..8 {
                    let top = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(a[i])));
                    half[i] = _mm256_add_ps(_mm512_castps512_ps256(a[i]), top);
                }
                // Pairs of neighbours, twice: then each half of a vector holds the sums of four.
                let add = |x, y| _mm256_hadd_ps(x, y);
                let low = add(add(half[0], half[1]), add(half[2], half[3]));
                let high = add(add(half[4], half[5]), add(half[6], half[7]));
                let left = _mm256_permute2f128_ps::<0x20>(low, high);
                let mut sums = [0.0; 8];
                let right = _mm256_permute2f128_ps::<0x31>(low, high);
                _mm256_storeu_ps(sums.as_mut_ptr(), _mm256_add_ps(left, right));
                sums
            }
        }
        #[inline(always)]
        fn prefetch(self, p: *const f32) {
            // SAFETY: a prefetch accesses no memory architecturally, so any address is allowed.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
        }
    }

    impl Square for Sixteen {
        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: see above.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn transpose(self, a: [__m512; 16]) -> [__m512; 16] {
            let (mut r, mut t) = (a, a);
            // SAFETY: see above.
            unsafe {
                let pd = |v| _mm512_castps_pd(v);
                for i in (0..16).step_by(2) {
                    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
                    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
                }
                // Each quarter of r[g + c] has four numbers of column c of four.
                for g in (0..16).step_by(4) {
                    r[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(t[g]), pd(t[g + 2])));
                    r[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(t[g]), pd(t[g + 2])));
                    r[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(t[g + 1]), pd(t[g + 3])));
                    r[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(t[g + 1]), pd(t[g + 3])));
                }
                for c in 0..4 {
                    t[c] = _mm512_shuffle_f32x4::<0x88>(r[c], r[4 + c]);
                    t[4 + c] = _mm512_shuffle_f32x4::<0xDD>(r[c], r[4 + c]);
                    t[8 + c] = _mm512_shuffle_f32x4::<0x88>(r[8 + c], r[12 + c]);
                    t[12 + c] = _mm512_shuffle_f32x4::<0xDD>(r[8 + c], r[12 + c]);
                }
                for c in 0..4 {
                    r[c] = _mm512_shuffle_f32x4::<0x88>(t[c], t[8 + c]);
                    r[8 + c] = _mm512_shuffle_f32x4::<0xDD>(t[c], t[8 + c]);
                    r[4 + c] = _mm512_shuffle_f32x4::<0x88>(t[4 + c], t[12 + c]);
                    r[12 + c] = _mm512_shuffle_f32x4::<0xDD>(t[4 + c], t[12 + c]);
                }
            }
            r
        }
    }
}

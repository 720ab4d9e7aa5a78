//! Eight lanes of f32, chosen at run time: AVX2 with FMA where the processor has them, SSE2 on other x86-64
//! processors, plain arrays elsewhere (which a compiler turns into NEON, say).
//!
//! A kernel is written once, generic over [`Simd`], and marked `#[inline(always)]`; [`Level::run`] enters it
//! through a function that is compiled for the detected features. Threads are outside, kernels inside.

mod avx2;
mod gemm;
mod math;
mod panels;
mod part;
#[cfg(any(test, not(target_arch = "x86_64")))]
mod portable;
mod rows;
mod sse2;

pub(crate) use gemm::{Band, Block, BlockMut, Epilogue, PANEL, Strided, gemm, put, transpose};
pub(crate) use math::{exp, sigmoid, softplus};
pub(crate) use panels::{add_rows, pack, padded, transpose_panels, unpack};
pub(crate) use part::{load_or_part, silu, silu_and_slope, store_or_part};
pub(crate) use rows::*;

/// The level of any processor of this architecture.
#[cfg(target_arch = "x86_64")]
const BASE: sse2::Sse2 = sse2::Sse2;
#[cfg(not(target_arch = "x86_64"))]
const BASE: portable::Portable = portable::Portable;

/// Lanes of a vector.
pub(crate) const LANES: usize = 8;

/// The instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// Any processor: SSE2 on x86-64, plain arrays elsewhere.
    Portable,
}

impl Level {
    /// The best level of this processor.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            return Self::Avx2;
        }
        Self::Portable
    }

    /// Runs a kernel at this level.
    #[inline]
    #[allow(unsafe_code)]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Cpu` only holds `Avx2` after `detect` has seen AVX2 and FMA.
            Self::Avx2 => unsafe { avx2::run(kernel) },
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 => BASE.call(kernel),
            Self::Portable => BASE.call(kernel),
        }
    }
}

/// A computation that is generic over the instruction set. `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Eight lanes of f32. A value of an implementing type proves that the processor has what it needs.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    type V: Copy;

    fn splat(self, x: f32) -> Self::V;
    /// Reads the first eight numbers of `p`.
    fn load(self, p: &[f32]) -> Self::V;
    /// Writes the first eight numbers of `p`.
    fn store(self, p: &mut [f32], v: Self::V);
    /// # Safety
    /// `p` must be valid for reads of eight numbers.
    #[allow(unsafe_code)]
    unsafe fn load_ptr(self, p: *const f32) -> Self::V;
    /// # Safety
    /// `p` must be valid for writes of eight numbers.
    #[allow(unsafe_code)]
    unsafe fn store_ptr(self, p: *mut f32, v: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn sqrt(self, a: Self::V) -> Self::V;
    /// `a·b + c`, in one rounding where the processor has it.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// 2^n for integral n in −126..=127.
    fn pow2(self, n: Self::V) -> Self::V;
    /// Lanes of `yes` where a < b, of `no` elsewhere (and where either is NaN).
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Whether a < b in every lane.
    fn all_lt(self, a: Self::V, b: Self::V) -> bool;
    /// Sum of the lanes, in one fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
    fn sum(self, a: Self::V) -> f32;
    /// The sum of each of eight vectors, in the same order.
    fn sums(self, a: [Self::V; 8]) -> Self::V;
    /// The largest lane.
    fn largest(self, a: Self::V) -> f32;
    /// Eight bf16 numbers (as bits) widened.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn load_bf16(self, p: &[u16]) -> Self::V {
        assert!(p.len() >= LANES);
        // SAFETY: the assertion.
        unsafe { self.load_bf16_ptr(p.as_ptr()) }
    }
    /// Eight signed bytes widened.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn load_i8(self, p: &[i8]) -> Self::V {
        assert!(p.len() >= LANES);
        // SAFETY: the assertion.
        unsafe { self.load_i8_ptr(p.as_ptr()) }
    }
    /// # Safety
    /// `p` must be valid for reads of eight numbers.
    #[allow(unsafe_code)]
    unsafe fn load_bf16_ptr(self, p: *const u16) -> Self::V;
    /// # Safety
    /// `p` must be valid for reads of eight numbers.
    #[allow(unsafe_code)]
    unsafe fn load_i8_ptr(self, p: *const i8) -> Self::V;
    /// 32 signed bytes as four vectors of their values times 2^24: byte 4i + j is lane i of vector j.
    /// # Safety
    /// `p` must be valid for reads of 32 bytes.
    #[allow(unsafe_code)]
    unsafe fn load_i8_quads(self, p: *const i8) -> [Self::V; 4];
    /// Transposes an 8×8 block: reads rows `a + i·lda`, writes rows `b + j·ldb`.
    /// # Safety
    /// Both must be valid for eight rows of eight numbers.
    #[allow(unsafe_code)]
    unsafe fn transpose8(self, a: *const f32, lda: usize, b: *mut f32, ldb: usize);
    /// Asks for the cache line of `p`; any address is allowed.
    fn prefetch(self, p: *const f32);
    /// Enters `kernel` as a function of its own, compiled for this level.
    fn call<K: Kernel>(self, kernel: K) -> K::Output;
}

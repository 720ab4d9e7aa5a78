//! SIMD abstraction with eight f32 lanes; the instruction set is selected at run time. On x86-64 it is AVX2 with FMA;
//! the feature `portable` adds SSE2 for older processors, which doubles the time to compile this crate. Elsewhere it is
//! plain arrays, which the compiler can vectorise, for example to NEON. Products with weights also know AVX-512
//! ([`Lanes`]), and products of integers have vectors of their own ([`wide`]).
//!
//! A kernel is written once, generic over [`Simd`], and marked `#[inline(always)]`; [`Level::run`] calls it through
//! a function that is compiled for the detected features. Threading is done outside of kernels.

mod avx2;
mod gemm;
mod lanes;
mod math;
mod panels;
mod part;
#[cfg(any(test, not(target_arch = "x86_64")))]
mod portable;
mod rows;
#[cfg(all(target_arch = "x86_64", any(test, feature = "portable")))]
mod sse2;
pub(crate) mod wide;

pub(crate) use gemm::{Band, Block, BlockMut, Epilogue, PANEL, Strided, gemm, put, transpose};
pub(crate) use lanes::{Lanes, LanesKernel, Square, SquareKernel};
pub(crate) use math::{exp, sigmoid, softplus};
pub(crate) use panels::{add_rows, pack, padded, transpose_panels, unpack};
pub(crate) use part::{load_or_part, silu, silu_and_slope, store_or_part};
pub(crate) use rows::*;

/// Instruction set that every processor of this architecture supports.
#[cfg(all(target_arch = "x86_64", feature = "portable"))]
const BASE: sse2::Sse2 = sse2::Sse2;
#[cfg(not(target_arch = "x86_64"))]
const BASE: portable::Portable = portable::Portable;

/// Lanes per vector.
pub(crate) const LANES: usize = 8;

/// Instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// 512-bit vectors for products of matrices; otherwise as [`Level::Avx2`].
    Avx512,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// Any processor: SSE2 on x86-64, plain arrays elsewhere.
    #[cfg(any(not(target_arch = "x86_64"), feature = "portable"))]
    Portable,
}

impl Level {
    /// Best level that this processor supports; `None` if it has no AVX2 and this crate was built without the feature
    /// `portable`.
    pub fn detect() -> Option<Self> {
        let known = [Self::Avx512, Self::Avx2].into_iter().find(|level| level.present());
        known.or_else(Self::portable)
    }

    /// Whether this processor has the instructions, and the system lets programs use them.
    pub fn present(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma");
            match self {
                Self::Avx512 => {
                    avx2 && has!("avx512f") && has!("avx512vl") && has!("avx512bw") && has!("avx512dq")
                }
                Self::Avx2 => avx2,
                #[cfg(feature = "portable")]
                Self::Portable => true,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    /// The level for any processor; `None` on x86-64 without the feature `portable`.
    pub fn portable() -> Option<Self> {
        #[cfg(any(not(target_arch = "x86_64"), feature = "portable"))]
        return Some(Self::Portable);
        #[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
        None
    }

    /// Runs a kernel at this level.
    #[inline]
    #[allow(unsafe_code)]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Cpu` only holds a level that is present.
            Self::Avx512 | Self::Avx2 => unsafe { avx2::run(kernel, self == Self::Avx512) },
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512 | Self::Avx2 => BASE.call(kernel),
            #[cfg(any(not(target_arch = "x86_64"), feature = "portable"))]
            Self::Portable => BASE.call(kernel),
        }
    }

    /// Runs a kernel of sixteen lanes. Only [`Level::Avx512`] has such vectors.
    #[inline]
    #[allow(unsafe_code)]
    pub(crate) fn run_square<K: SquareKernel>(self, kernel: K) {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Cpu` only holds a level that is present.
            Self::Avx512 => unsafe { lanes::run_square(kernel) },
            _ => {
                drop(kernel);
                unreachable!("vectors of sixteen lanes need AVX-512")
            }
        }
    }

    /// Runs a kernel with the widest vectors of this level.
    #[inline]
    #[allow(unsafe_code)]
    pub(crate) fn run_lanes<K: LanesKernel>(self, kernel: K) {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Cpu` only holds a level that is present.
            Self::Avx512 => unsafe { lanes::run(kernel) },
            level => level.run(lanes::Eight(kernel)),
        }
    }
}

/// Computation that is generic over the instruction set. `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Eight lanes of f32. A value of an implementing type proves that the processor supports its instructions.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    type V: Copy;

    fn splat(self, x: f32) -> Self::V;
    /// Loads the first eight elements of `p`.
    fn load(self, p: &[f32]) -> Self::V;
    /// Stores to the first eight elements of `p`.
    fn store(self, p: &mut [f32], v: Self::V);
    /// # Safety
    /// `p` must be valid for reads of eight elements.
    #[allow(unsafe_code)]
    unsafe fn load_ptr(self, p: *const f32) -> Self::V;
    /// # Safety
    /// `p` must be valid for writes of eight elements.
    #[allow(unsafe_code)]
    unsafe fn store_ptr(self, p: *mut f32, v: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn sqrt(self, a: Self::V) -> Self::V;
    /// `a·b + c`, fused (a single rounding) if the processor supports it.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// 2^n for integral n in −126..=127.
    fn pow2(self, n: Self::V) -> Self::V;
    /// Per lane: `yes` if a < b, otherwise `no` (also if either is NaN).
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Whether a < b in every lane.
    fn all_lt(self, a: Self::V, b: Self::V) -> bool;
    /// Sum of the lanes in a fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
    fn sum(self, a: Self::V) -> f32;
    /// Lane sums of eight vectors, each in the order of [`Simd::sum`].
    fn sums(self, a: [Self::V; 8]) -> Self::V;
    /// Maximum of the lanes.
    fn largest(self, a: Self::V) -> f32;
    /// Loads eight bf16 numbers (as bits), widened to f32.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn load_bf16(self, p: &[u16]) -> Self::V {
        assert!(p.len() >= LANES);
        // SAFETY: the length is asserted.
        unsafe { self.load_bf16_ptr(p.as_ptr()) }
    }
    /// Loads eight signed bytes, converted to f32.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn load_i8(self, p: &[i8]) -> Self::V {
        assert!(p.len() >= LANES);
        // SAFETY: the length is asserted.
        unsafe { self.load_i8_ptr(p.as_ptr()) }
    }
    /// # Safety
    /// `p` must be valid for reads of eight elements.
    #[allow(unsafe_code)]
    unsafe fn load_bf16_ptr(self, p: *const u16) -> Self::V;
    /// # Safety
    /// `p` must be valid for reads of eight elements.
    #[allow(unsafe_code)]
    unsafe fn load_i8_ptr(self, p: *const i8) -> Self::V;
    /// Loads 32 signed bytes as four vectors of their values times 2^24: byte 4i + j is lane i of vector j.
    /// # Safety
    /// `p` must be valid for reads of 32 bytes.
    #[allow(unsafe_code)]
    unsafe fn load_i8_quads(self, p: *const i8) -> [Self::V; 4];
    /// Transposes an 8×8 block: reads rows `a + i·lda`, writes rows `b + j·ldb`.
    /// # Safety
    /// Both pointers must be valid for eight rows of eight elements.
    #[allow(unsafe_code)]
    unsafe fn transpose8(self, a: *const f32, lda: usize, b: *mut f32, ldb: usize);
    /// Prefetches the cache line of `p`; any address is allowed.
    fn prefetch(self, p: *const f32);
    /// Calls `kernel` as a separate function compiled for this instruction set.
    fn call<K: Kernel>(self, kernel: K) -> K::Output;
    /// Calls `kernel` as a separate function with the widest vectors that the processor has.
    #[inline(always)]
    fn call_lanes<K: LanesKernel>(self, kernel: K) {
        self.call(lanes::Eight(kernel));
    }
}

//! SIMD abstraction for products of integers: sixteen lanes, in which bytes are multiplied and summed four at a time.
//!
//! ```text
//! lane i of sum  +=  Σ_j code[4i + j] · x[j],   j = 0..4       codes unsigned, x signed
//! ```
//! The instruction set is selected at run time: AVX-512 with VNNI, AVX2 with VNNI, AVX2, or plain arrays on any
//! processor. Sums of integers are exact, and operations on f32 are single and unfused, so every path gives the same
//! bits.
//!
//! A kernel is written once, generic over [`Wide`], and marked `#[inline(always)]`; [`Path::run`] calls it through a
//! function that is compiled for the instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

/// Lanes per vector.
pub(crate) const WIDE: usize = 16;

/// Instruction sets that products of integers are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// 512-bit vectors with products of bytes that are summed in one instruction (VNNI).
    Vnni512,
    /// 256-bit vectors with such products (AVX-VNNI).
    Vnni256,
    /// 256-bit vectors.
    Avx2,
    /// Any processor.
    Portable,
}

impl Path {
    /// All of them, the fastest first.
    pub const ALL: [Self; 4] = [Self::Vnni512, Self::Vnni256, Self::Avx2, Self::Portable];

    /// Whether this processor has the instructions, and the system lets programs use them.
    pub fn present(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            match self {
                Self::Vnni512 => avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512vnni"),
                Self::Vnni256 => avx2 && has!("avxvnni"),
                Self::Avx2 => avx2,
                Self::Portable => true,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    /// The fastest that is present.
    pub fn detect() -> Self {
        Self::ALL.into_iter().find(|path| path.present()).unwrap_or(Self::Portable)
    }

    /// The usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vnni512 => "AVX-512 VNNI",
            Self::Vnni256 => "AVX-VNNI",
            Self::Avx2 => "AVX2",
            Self::Portable => "portable",
        }
    }

    /// Rows of x that a tile has at most if there are so many.
    pub(crate) fn tile_rows(self, rows: usize) -> usize {
        struct Rows(usize);
        impl WideKernel for Rows {
            type Output = usize;
            #[inline(always)]
            fn run<S: Wide>(self, _: S) -> usize {
                if self.0 <= S::ALL { S::ALL } else { S::ROWS }
            }
        }
        self.run(Rows(rows))
    }

    /// Runs a kernel with these instructions, which the processor must have.
    #[allow(unsafe_code)]
    pub(crate) fn run<K: WideKernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Cpu` only holds a path that is present.
            Self::Vnni512 => unsafe { avx512::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Vnni256 => unsafe { avx2::run_vnni(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx2 => unsafe { avx2::run(kernel) },
            _ => kernel.run(portable::Portable),
        }
    }
}

/// Computation that is generic over the instruction set. `run` must be `#[inline(always)]`.
pub(crate) trait WideKernel {
    type Output;
    fn run<S: Wide>(self, s: S) -> Self::Output;
}

/// Sixteen lanes of f32 and i32. A value of an implementing type proves that the processor supports its instructions.
#[allow(unsafe_code)]
pub(crate) trait Wide: Copy + Send + Sync + 'static {
    /// Rows of x that a tile has at most: as many as leave room for the weights in registers.
    const ROWS: usize;
    /// Rows of x up to which there is only one tile.
    const ALL: usize = Self::ROWS;
    /// Whether tiles have two groups of rows of W if there are several tiles, each of three rows or more.
    const TWO: bool;

    /// Sixteen numbers.
    type F: Copy;
    /// Sixteen integers.
    type I: Copy;
    /// 64 unsigned codes.
    type Codes: Copy;
    /// 64 codes of eight bits, prepared for products.
    type Eight: Copy;
    /// Four numbers of x, in every lane.
    type Quad: Copy;
    /// Sums of products with codes of four bits: eight steps can be added up.
    type Sum4: Copy;

    fn splat(self, x: f32) -> Self::F;
    /// # Safety
    /// `p` must be valid for reads of 16 elements.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// # Safety
    /// `p` must be valid for writes of 16 elements.
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// Loads 16 numbers in f16.
    /// # Safety
    /// `p` must be valid for reads of 32 bytes.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller of a and b per lane; b if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger of a and b per lane; b if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    fn sqrt(self, a: Self::F) -> Self::F;
    /// Per lane: `yes` if a < b, otherwise `no` (also if either is NaN).
    fn select_lt(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// The larger of |a| and b per lane; b if a is NaN.
    fn max_abs(self, a: Self::F, b: Self::F) -> Self::F;
    /// The nearest integers, ties to even; unspecified outside of i32.
    fn to_int(self, a: Self::F) -> Self::I;
    fn from_int(self, a: Self::I) -> Self::F;
    /// # Safety
    /// `p` must be valid for reads of 16 elements.
    unsafe fn load_int(self, p: *const u32) -> Self::I;
    /// # Safety
    /// `p` must be valid for writes of 16 elements.
    unsafe fn store_int(self, p: *mut i32, v: Self::I);
    /// Stores the lowest byte of every lane.
    /// # Safety
    /// `p` must be valid for writes of 16 bytes.
    unsafe fn store_bytes(self, p: *mut u8, v: Self::I);
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// The sum of the lanes.
    fn total(self, a: Self::I) -> i32;
    /// The largest lane, none of which is NaN.
    fn largest(self, a: Self::F) -> f32;
    fn any_nan(self, a: Self::F) -> bool;
    /// Six bits of every lane, from bit `SHIFT` on.
    fn six<const SHIFT: i32>(self, a: Self::I) -> Self::I;
    /// Two bits each of the top of three vectors: 2⁰, 2² and 2⁴ times what is above bit 30.
    fn tops(self, a: [Self::I; 3]) -> Self::I;

    /// # Safety
    /// `p` must be valid for reads of 64 bytes.
    unsafe fn codes(self, p: *const u8) -> Self::Codes;
    /// # Safety
    /// `p` must be valid for writes of 64 bytes.
    unsafe fn store_codes(self, p: *mut u8, codes: Self::Codes);
    /// Codes in the lower and in the upper halves of the bytes.
    fn nibbles(self, codes: Self::Codes) -> [Self::Codes; 2];
    /// Prepares codes 128 + v of signed bytes v ≥ −127.
    fn eight(self, codes: Self::Codes) -> Self::Eight;
    /// # Safety
    /// `p` must be valid for reads of four bytes.
    unsafe fn quad(self, p: *const i8) -> Self::Quad;
    /// The sum before the first step; `offset` is −128 times the sum of all x.
    /// # Safety
    /// `offset` must be valid for reads.
    unsafe fn start8(self, offset: *const i32) -> Self::I;
    fn step8(self, sum: Self::I, w: Self::Eight, x: Self::Quad) -> Self::I;
    fn start4(self) -> Self::Sum4;
    fn step4(self, sum: Self::Sum4, w: Self::Codes, x: Self::Quad) -> Self::Sum4;
    fn end4(self, sum: Self::Sum4) -> Self::I;
    /// Prefetches the cache line of `p`; any address is allowed.
    fn prefetch(self, p: *const u8);
}

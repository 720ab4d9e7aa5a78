//! Rows of a weight matrix in any precision, widened to f32 as they are read.
#![allow(unsafe_code)]

use crate::precision::from_bf16;
use crate::simd::{Lanes, Simd};

/// Access to the elements of W by their index in the whole matrix.
pub(super) trait Source<S: Lanes>: Copy {
    /// Elements per cache line.
    const LINE: usize;
    /// Whether a vector is as cheap to load alone as in a block of four. A tile then has several rows of W, whose
    /// elements stay in registers for four rows of x.
    const ALONE: bool = true;
    /// Loads a vector of elements, widened to f32.
    /// # Safety
    /// The elements from `at` on must exist.
    unsafe fn load(self, s: S, at: usize) -> S::V;
    /// Loads four vectors of one row, starting at a multiple of their length within that row.
    /// # Safety
    /// The elements from `at` on must exist.
    #[inline(always)]
    unsafe fn block(self, s: S, at: usize) -> [S::V; 4] {
        let n = S::LANES;
        // SAFETY: guaranteed by the caller.
        unsafe {
            [self.load(s, at), self.load(s, at + n), self.load(s, at + 2 * n), self.load(s, at + 3 * n)]
        }
    }
    /// One element.
    fn get(self, at: usize) -> f32;
    /// Prefetches the cache line of an element, which need not exist.
    fn prefetch(self, s: S, at: usize);
    /// Applies the scale of row `_row` of W to a sum.
    #[inline(always)]
    fn scaled(self, sum: f32, _row: usize) -> f32 {
        sum
    }
}

/// Value of int8 code 1 while sums are formed, because codes are widened from the top byte of a 32-bit word. As a
/// power of two, it does not affect the rounding of the sums.
const UNIT: f32 = 16_777_216.0;

/// Elements in f32.
#[derive(Clone, Copy)]
pub(super) struct F32<'a>(pub &'a [f32]);
/// Elements in bf16.
#[derive(Clone, Copy)]
pub(super) struct Bf16<'a>(pub &'a [u16]);
/// Elements in int8, with a scale for each row.
#[derive(Clone, Copy)]
pub(super) struct Int8<'a> {
    pub codes: &'a [i8],
    pub scales: &'a [f32],
}

impl<S: Lanes> Source<S> for F32<'_> {
    const LINE: usize = 16;
    #[inline(always)]
    unsafe fn load(self, s: S, at: usize) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { s.load_ptr(self.0.as_ptr().add(at)) }
    }
    #[inline(always)]
    fn get(self, at: usize) -> f32 {
        self.0[at]
    }
    #[inline(always)]
    fn prefetch(self, s: S, at: usize) {
        s.prefetch(self.0.as_ptr().wrapping_add(at));
    }
}

impl<S: Lanes> Source<S> for Bf16<'_> {
    const LINE: usize = 32;
    #[inline(always)]
    unsafe fn load(self, s: S, at: usize) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { s.load_bf16_ptr(self.0.as_ptr().add(at)) }
    }
    #[inline(always)]
    fn get(self, at: usize) -> f32 {
        from_bf16(self.0[at])
    }
    #[inline(always)]
    fn prefetch(self, s: S, at: usize) {
        s.prefetch(self.0.as_ptr().wrapping_add(at).cast());
    }
}

impl<S: Simd> Source<S> for Int8<'_> {
    const LINE: usize = 64;
    const ALONE: bool = false;
    #[inline(always)]
    unsafe fn load(self, s: S, at: usize) -> <S as Simd>::V {
        // SAFETY: guaranteed by the caller.
        unsafe { s.mul(s.load_i8_ptr(self.codes.as_ptr().add(at)), Simd::splat(s, UNIT)) }
    }
    #[inline(always)]
    unsafe fn block(self, s: S, at: usize) -> [<S as Simd>::V; 4] {
        // SAFETY: guaranteed by the caller.
        unsafe { s.load_i8_quads(self.codes.as_ptr().add(at)) }
    }
    #[inline(always)]
    fn get(self, at: usize) -> f32 {
        f32::from(self.codes[at]) * UNIT
    }
    #[inline(always)]
    fn prefetch(self, s: S, at: usize) {
        Simd::prefetch(s, self.codes.as_ptr().wrapping_add(at).cast());
    }
    #[inline(always)]
    fn scaled(self, sum: f32, row: usize) -> f32 {
        sum * (1.0 / UNIT) * self.scales[row]
    }
}

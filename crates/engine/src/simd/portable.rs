//! Eight lanes as a plain array, for architectures without a specific implementation.
#![allow(unsafe_code)]

use super::{Kernel, Simd};

#[derive(Clone, Copy)]
pub(crate) struct Portable;

type V = [f32; 8];

#[inline(always)]
fn each(f: impl FnMut(usize) -> f32) -> V {
    std::array::from_fn(f)
}

impl Simd for Portable {
    type V = V;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; 8]
    }
    #[inline(always)]
    fn load(self, p: &[f32]) -> V {
        each(|i| p[i])
    }
    #[inline(always)]
    fn store(self, p: &mut [f32], v: V) {
        p[..8].copy_from_slice(&v);
    }
    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> V {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut f32, v: V) {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<V>().write_unaligned(v) }
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn sqrt(self, a: V) -> V {
        each(|i| a[i].sqrt())
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // AArch64 always has a fused instruction; elsewhere `mul_add` could be a slow library call.
        if cfg!(target_arch = "aarch64") {
            each(|i| a[i].mul_add(b[i], c[i]))
        } else {
            each(|i| a[i] * b[i] + c[i])
        }
    }
    #[inline(always)]
    fn round(self, a: V) -> V {
        // Adding and subtracting 1.5·2^23 rounds |x| < 2^22 to the nearest integer, ties to even.
        const SHIFT: f32 = 12_582_912.0;
        each(|i| (a[i] + SHIFT) - SHIFT)
    }
    #[inline(always)]
    fn pow2(self, n: V) -> V {
        each(|i| f32::from_bits((((n[i] as i32) + 127) << 23) as u32))
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        each(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn all_lt(self, a: V, b: V) -> bool {
        a.iter().zip(&b).all(|(a, b)| a < b)
    }
    #[inline(always)]
    fn sum(self, a: V) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    #[inline(always)]
    fn sums(self, a: [V; 8]) -> V {
        a.map(|a| self.sum(a))
    }
    #[inline(always)]
    fn largest(self, a: V) -> f32 {
        a.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, p: *const u16) -> V {
        // SAFETY: guaranteed by the caller.
        let p = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        each(|i| f32::from_bits(u32::from(p[i]) << 16))
    }
    #[inline(always)]
    unsafe fn load_i8_ptr(self, p: *const i8) -> V {
        // SAFETY: guaranteed by the caller.
        let p = unsafe { p.cast::<[i8; 8]>().read_unaligned() };
        each(|i| f32::from(p[i]))
    }
    #[inline(always)]
    unsafe fn load_i8_quads(self, p: *const i8) -> [V; 4] {
        // SAFETY: guaranteed by the caller.
        let p = unsafe { p.cast::<[i8; 32]>().read_unaligned() };
        std::array::from_fn(|j| each(|i| f32::from(p[4 * i + j]) * 16_777_216.0))
    }
    #[inline(always)]
    unsafe fn transpose8(self, a: *const f32, lda: usize, b: *mut f32, ldb: usize) {
        for i in 0..8 {
            for j in 0..8 {
                // SAFETY: the caller guarantees eight rows of eight elements on both sides.
                unsafe { *b.add(j * ldb + i) = *a.add(i * lda + j) };
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

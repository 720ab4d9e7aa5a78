//! Sixteen lanes as plain arrays, for any processor.
#![allow(unsafe_code)]

use super::Wide;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

type F = [f32; 16];
type I = [i32; 16];

#[inline(always)]
fn each<T>(f: impl FnMut(usize) -> T) -> [T; 16] {
    std::array::from_fn(f)
}

impl Wide for Portable {
    const ROWS: usize = 2;
    const TWO: bool = false;
    type F = F;
    type I = I;
    type Codes = [u8; 64];
    type Eight = [u8; 64];
    type Quad = [i8; 4];
    type Sum4 = I;

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F) {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<F>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> F {
        // SAFETY: guaranteed by the caller.
        let bits = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        each(|i| half::f16::from_bits(bits[i]).to_f32())
    }
    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn sqrt(self, a: F) -> F {
        each(|i| a[i].sqrt())
    }
    #[inline(always)]
    fn select_lt(self, a: F, b: F, yes: F, no: F) -> F {
        each(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn round(self, a: F) -> F {
        each(|i| a[i].round_ties_even())
    }
    #[inline(always)]
    fn max_abs(self, a: F, b: F) -> F {
        each(|i| if a[i].abs() > b[i] { a[i].abs() } else { b[i] })
    }
    #[inline(always)]
    fn to_int(self, a: F) -> I {
        each(|i| a[i].round_ties_even() as i32)
    }
    #[inline(always)]
    fn from_int(self, a: I) -> F {
        each(|i| a[i] as f32)
    }
    #[inline(always)]
    unsafe fn load_int(self, p: *const u32) -> I {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<I>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_int(self, p: *mut i32, v: I) {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<I>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, v: I) {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<[u8; 16]>().write_unaligned(each(|i| v[i] as u8)) }
    }
    #[inline(always)]
    fn add_int(self, a: I, b: I) -> I {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn total(self, a: I) -> i32 {
        a.iter().sum()
    }
    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        a.iter().fold(a[0], |m, &v| if v > m { v } else { m })
    }
    #[inline(always)]
    fn any_nan(self, a: F) -> bool {
        a.iter().any(|v| v.is_nan())
    }
    #[inline(always)]
    fn six<const SHIFT: i32>(self, a: I) -> I {
        each(|i| a[i] >> SHIFT & 63)
    }
    #[inline(always)]
    fn tops(self, a: [I; 3]) -> I {
        let top = |v: i32| v.cast_unsigned() >> 30;
        each(|i| (top(a[0][i]) | top(a[1][i]) << 2 | top(a[2][i]) << 4).cast_signed())
    }
    #[inline(always)]
    unsafe fn codes(self, p: *const u8) -> [u8; 64] {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<[u8; 64]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_codes(self, p: *mut u8, codes: [u8; 64]) {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<[u8; 64]>().write_unaligned(codes) }
    }
    #[inline(always)]
    fn nibbles(self, codes: [u8; 64]) -> [[u8; 64]; 2] {
        [codes.map(|code| code & 15), codes.map(|code| code >> 4)]
    }
    #[inline(always)]
    fn eight(self, codes: [u8; 64]) -> [u8; 64] {
        codes
    }
    #[inline(always)]
    unsafe fn quad(self, p: *const i8) -> [i8; 4] {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<[i8; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn start8(self, offset: *const i32) -> I {
        // SAFETY: guaranteed by the caller.
        [unsafe { offset.read_unaligned() }; 16]
    }
    #[inline(always)]
    fn step8(self, sum: I, w: [u8; 64], x: [i8; 4]) -> I {
        each(|i| {
            let product = |j: usize| i32::from(w[4 * i + j]) * i32::from(x[j]);
            sum[i] + product(0) + product(1) + product(2) + product(3)
        })
    }
    #[inline(always)]
    fn start4(self) -> I {
        [0; 16]
    }
    #[inline(always)]
    fn step4(self, sum: I, w: [u8; 64], x: [i8; 4]) -> I {
        self.step8(sum, w, x)
    }
    #[inline(always)]
    fn end4(self, sum: I) -> I {
        sum
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}

//! Rounding of weights to `q8` and `q4`, sixteen rows at a time, a row in each lane.
//!
//! `q8`: the scale is max |w| / 127 of a block, in f16.
//!
//! `q4`: w ≈ scale · code − min with 0 ≤ code ≤ 15 and min ≥ 0.
//! 1. For each block, codes are formed with several trial scales; for the codes of each trial, the scale and the minimum
//!    of least squares follow. The best trial counts. Large numbers weigh more in the squares: they matter more for
//!    products.
//! 2. Scales and minima of a super are rounded to six bits. Of the neighbours of both, the best pair is chosen, with new
//!    codes for each.
#![allow(unsafe_code)]

use half::f16;

use super::blocks::{Bits, COLUMNS, FACTORS, GROUP, SUPER, set_codes, set_half, set_six_bits};
use crate::simd::wide::{Wide, WideKernel};

/// Trial scales of a block, as numbers of steps between its smallest and its largest number.
const TRIALS: usize = 21;

/// Task that rounds `rows`, sixteen of `width` numbers or those that are left.
pub(super) struct Quantise<'a> {
    pub bits: Bits,
    pub width: usize,
    pub rows: &'a [f32],
    pub group: &'a mut [u8],
}

/// A block, [column, row].
type Block = [[f32; GROUP]; COLUMNS];

impl WideKernel for Quantise<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Wide>(self, s: S) {
        let Self { bits, width, rows, mut group } = self;
        let mut blocks = [[[0.0; GROUP]; COLUMNS]; SUPER];
        for from in (0..width).step_by(SUPER * COLUMNS) {
            let columns = (width - from).min(SUPER * COLUMNS);
            let count = columns.div_ceil(COLUMNS);
            blocks[count - 1] = [[0.0; GROUP]; COLUMNS];
            for (r, row) in rows.chunks_exact(width).enumerate() {
                for (i, &number) in row[from..from + columns].iter().enumerate() {
                    blocks[i / COLUMNS][i % COLUMNS][r] = number;
                }
            }
            let (this, rest) = group.split_at_mut(FACTORS + count * bits.codes());
            let (factors, codes) = this.split_at_mut(FACTORS);
            quantise(s, bits, &blocks[..count], factors, codes);
            group = rest;
        }
    }
}

/// Factors and codes of a super.
#[inline(always)]
fn quantise<S: Wide>(s: S, bits: Bits, blocks: &[Block], factors: &mut [u8], codes: &mut [u8]) {
    factors.fill(0);
    codes.fill(0);
    let codes = codes.chunks_exact_mut(bits.codes());
    match bits {
        Bits::Eight => {
            for (b, (block, codes)) in blocks.iter().zip(codes).enumerate() {
                let scales = eight(s, block, codes);
                scales.into_iter().enumerate().for_each(|(r, v)| set_half(factors, b * GROUP + r, v));
            }
        }
        Bits::Four => {
            let mut found = [[[0.0; GROUP]; 2]; SUPER];
            for (found, block) in found.iter_mut().zip(blocks) {
                *found = search(s, block);
            }
            let mut tops = [[f16::ZERO; GROUP]; 2];
            for (k, top) in tops.iter_mut().enumerate() {
                for (r, top) in top.iter_mut().enumerate() {
                    let largest = found.iter().fold(0.0f32, |m, found| m.max(found[k][r]));
                    *top = upwards(largest / 63.0);
                    set_half(factors, k * GROUP + r, *top);
                }
            }
            let tops = tops.map(|top| top.map(f16::to_f32));
            let mut six = [[0; 2 * SUPER]; GROUP];
            for (b, (block, codes)) in blocks.iter().zip(codes).enumerate() {
                let [scales, mins] = round_factors(s, block, &found[b], &tops, codes);
                for (r, six) in six.iter_mut().enumerate() {
                    (six[b], six[SUPER + b]) = (scales[r] as u32, mins[r] as u32);
                }
            }
            six.into_iter().enumerate().for_each(|(r, six)| set_six_bits(factors, r, six));
        }
    }
}

/// The number in f16, or the next one above if f16 has few digits left for it.
fn upwards(value: f32) -> f16 {
    let near = f16::from_f32(value);
    if near.is_normal() || near.to_f32() >= value { near } else { f16::from_bits(near.to_bits() + 1) }
}

/// Codes and scales of a block of `q8`.
#[inline(always)]
fn eight<S: Wide>(s: S, block: &Block, to: &mut [u8]) -> [f16; GROUP] {
    let mut largest = s.splat(0.0);
    for column in block {
        // SAFETY: a column has 16 numbers.
        largest = s.max_abs(unsafe { s.load(column.as_ptr()) }, largest);
    }
    let mut lanes = [0.0; GROUP];
    // SAFETY: room for 16 numbers.
    unsafe { s.store(lanes.as_mut_ptr(), s.mul(largest, s.splat(1.0 / 127.0))) };
    let scales = lanes.map(upwards);
    // The reciprocal of a scale, or zero.
    let inverses = scales.map(|scale| if scale > f16::ZERO { 1.0 / scale.to_f32() } else { 0.0 });
    let mut codes = [[0; GROUP]; COLUMNS];
    // SAFETY: 16 numbers each.
    unsafe {
        let inverse = s.load(inverses.as_ptr());
        for (column, codes) in block.iter().zip(&mut codes) {
            let scaled = s.mul(s.load(column.as_ptr()), inverse);
            let clamped = s.max(s.min(scaled, s.splat(127.0)), s.splat(-127.0));
            let mut ints = [0; GROUP];
            s.store_int(ints.as_mut_ptr(), s.to_int(clamped));
            for r in 0..GROUP {
                codes[r] = (ints[r] + 128) as u8;
            }
        }
    }
    set_codes(Bits::Eight, to, &codes);
    scales
}

/// Sums over a block of weights u and codes l: Σ u, Σ u x, and for the codes Σ u l, Σ u l², Σ u l x.
struct Sums<F> {
    u: F,
    x: F,
    l: F,
    ll: F,
    lx: F,
}

impl<F: Copy> Sums<F> {
    /// Σ u (scale · l − min − x)² − Σ u x².
    #[inline(always)]
    fn error<S: Wide<F = F>>(&self, s: S, scale: F, min: F) -> F {
        let two = s.splat(2.0);
        let a = s.mul(scale, s.sub(s.mul(scale, self.ll), s.mul(two, s.add(self.lx, s.mul(min, self.l)))));
        s.add(a, s.mul(min, s.add(s.mul(min, self.u), s.mul(two, self.x))))
    }
}

/// Weights of the squares of a block: |x| + √(mean x²).
#[inline(always)]
fn weights<S: Wide>(s: S, block: &Block) -> [S::F; COLUMNS] {
    // SAFETY: a column has 16 numbers.
    unsafe {
        let mut squares = s.splat(0.0);
        for column in block {
            let x = s.load(column.as_ptr());
            squares = s.add(squares, s.mul(x, x));
        }
        let mean = s.sqrt(s.mul(squares, s.splat(1.0 / COLUMNS as f32)));
        let mut weights = [mean; COLUMNS];
        for c in 0..COLUMNS {
            weights[c] = s.add(mean, s.max_abs(s.load(block[c].as_ptr()), s.splat(0.0)));
        }
        weights
    }
}

/// Sums with codes l = round((x + min) · inverse), limited to 0..=15.
#[inline(always)]
fn sums<S: Wide>(s: S, block: &Block, weights: &[S::F; COLUMNS], inverse: S::F, min: S::F) -> Sums<S::F> {
    let zero = s.splat(0.0);
    let mut sums = Sums { u: zero, x: zero, l: zero, ll: zero, lx: zero };
    for c in 0..COLUMNS {
        // SAFETY: a column has 16 numbers.
        let x = unsafe { s.load(block[c].as_ptr()) };
        let l = code(s, x, inverse, min);
        let ul = s.mul(weights[c], l);
        sums.u = s.add(sums.u, weights[c]);
        sums.x = s.add(sums.x, s.mul(weights[c], x));
        sums.l = s.add(sums.l, ul);
        sums.ll = s.add(sums.ll, s.mul(ul, l));
        sums.lx = s.add(sums.lx, s.mul(ul, x));
    }
    sums
}

#[inline(always)]
fn code<S: Wide>(s: S, x: S::F, inverse: S::F, min: S::F) -> S::F {
    let l = s.round(s.mul(s.add(x, min), inverse));
    s.max(s.min(l, s.splat(15.0)), s.splat(0.0))
}

/// Scale and minimum of a block of `q4` of each row, before they are rounded.
#[inline(always)]
fn search<S: Wide>(s: S, block: &Block) -> [[f32; GROUP]; 2] {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let weights = weights(s, block);
    let (mut low, mut high) = (zero, s.splat(f32::MIN));
    for column in block {
        // SAFETY: a column has 16 numbers.
        let x = unsafe { s.load(column.as_ptr()) };
        (low, high) = (s.min(x, low), s.max(x, high));
    }
    let min = s.sub(zero, low);
    let range = s.add(high, min);
    // Zero where the range has no reciprocal: all codes are then zero.
    let tiny = s.splat(1e-30);
    let per_range = s.select_lt(tiny, range, s.div(one, s.max(range, tiny)), zero);
    let (mut best, mut scale, mut least) = (s.splat(f32::MAX), zero, min);
    for trial in 0..TRIALS {
        let inverse = s.mul(per_range, s.splat(14.0 + 0.1 * trial as f32));
        let sums = sums(s, block, &weights, inverse, min);
        // Least squares for scale · l − min. Without a minimum where that would be negative, or where codes are all the
        // same; where all are zero, there is only the minimum.
        let determinant = s.sub(s.mul(sums.u, sums.ll), s.mul(sums.l, sums.l));
        let least_determinant = s.mul(s.splat(1e-5), s.mul(sums.u, sums.ll));
        let over = s.div(one, determinant);
        let a = s.mul(s.sub(s.mul(sums.u, sums.lx), s.mul(sums.x, sums.l)), over);
        let m = s.mul(s.sub(s.mul(sums.l, sums.lx), s.mul(sums.ll, sums.x)), over);
        let alone = s.select_lt(zero, sums.ll, s.div(sums.lx, sums.ll), zero);
        let (a, m) = (s.select_lt(m, zero, alone, a), s.select_lt(m, zero, zero, m));
        let single = s.select_lt(zero, sums.ll, zero, min);
        let a = s.select_lt(least_determinant, determinant, a, alone);
        let m = s.select_lt(least_determinant, determinant, m, single);
        let (a, error) = (s.max(a, zero), sums.error(s, a, m));
        scale = s.select_lt(error, best, a, scale);
        least = s.select_lt(error, best, m, least);
        best = s.select_lt(error, best, error, best);
    }
    let mut found = [[0.0; GROUP]; 2];
    // SAFETY: room for 16 numbers each.
    unsafe {
        s.store(found[0].as_mut_ptr(), scale);
        s.store(found[1].as_mut_ptr(), least);
    }
    found
}

/// Factors of six bits of a block of `q4`: of `found` in units of `tops` and its neighbours the best; and the codes.
#[inline(always)]
fn round_factors<S: Wide>(
    s: S,
    block: &Block,
    found: &[[f32; GROUP]; 2],
    tops: &[[f32; GROUP]; 2],
    to: &mut [u8],
) -> [[f32; GROUP]; 2] {
    let (zero, one, most) = (s.splat(0.0), s.splat(1.0), s.splat(63.0));
    let weights = weights(s, block);
    // SAFETY: 16 numbers each.
    let [scale, min, top_scale, top_min] = unsafe {
        [
            s.load(found[0].as_ptr()),
            s.load(found[1].as_ptr()),
            s.load(tops[0].as_ptr()),
            s.load(tops[1].as_ptr()),
        ]
    };
    let near = |v, top| {
        let units = s.select_lt(zero, top, s.div(v, top), zero);
        s.min(s.round(units), most)
    };
    let (scale, min) = (near(scale, top_scale), near(min, top_min));
    let (mut best, mut best_scale, mut best_min) = (s.splat(f32::MAX), scale, min);
    for trial in 0..9 {
        // Nearest values first: they stay if a neighbour is only as good.
        let shift = |k: usize| s.splat([0.0, -1.0, 1.0][k]);
        let (a, m) = (s.add(scale, shift(trial % 3)), s.add(min, shift(trial / 3)));
        let (a, m) = (s.max(s.min(a, most), zero), s.max(s.min(m, most), zero));
        let (real_a, real_m) = (s.mul(a, top_scale), s.mul(m, top_min));
        let inverse = s.select_lt(zero, real_a, s.div(one, real_a), zero);
        let error = sums(s, block, &weights, inverse, real_m).error(s, real_a, real_m);
        best_scale = s.select_lt(error, best, a, best_scale);
        best_min = s.select_lt(error, best, m, best_min);
        best = s.select_lt(error, best, error, best);
    }
    let (real_a, real_m) = (s.mul(best_scale, top_scale), s.mul(best_min, top_min));
    let inverse = s.select_lt(zero, real_a, s.div(one, real_a), zero);
    let mut codes = [[0; GROUP]; COLUMNS];
    let mut factors = [[0.0; GROUP]; 2];
    // SAFETY: 16 numbers each.
    unsafe {
        for c in 0..COLUMNS {
            let mut ints = [0; GROUP];
            s.store_int(ints.as_mut_ptr(), s.to_int(code(s, s.load(block[c].as_ptr()), inverse, real_m)));
            for r in 0..GROUP {
                codes[c][r] = ints[r] as u8;
            }
        }
        s.store(factors[0].as_mut_ptr(), best_scale);
        s.store(factors[1].as_mut_ptr(), best_min);
    }
    set_codes(Bits::Four, to, &codes);
    factors
}

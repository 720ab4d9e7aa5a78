//! Rows of x rounded to eight bits, in the order in which tiles read them.
//!
//! ```text
//! per block of 32 numbers:  scale = max |x| / 127,   x̂ = round(x / scale)       x ≈ scale · x̂
//! per tile of M rows:       [block, step, row, 4] codes;   [block, row] scales, offsets −128 Σ x̂, sums scale · Σ x̂
//! ```
//! The last block is padded with zeros. A block with a number that is not finite has the scale NaN.
#![allow(unsafe_code)]

use std::ops::Range;

use crate::cpu::{Carve, Shared};
use crate::ops::pack::blocks::{COLUMNS, STEP};
use crate::simd::wide::{WIDE, Wide, WideKernel};

/// Steps in a block.
const STEPS: usize = COLUMNS / STEP;

/// Rows of x in tiles.
pub(super) struct Rounded<'a> {
    width: usize,
    tiles: &'a [Range<usize>],
    codes: Shared<'a>,
    scales: Shared<'a>,
    offsets: Shared<'a>,
    sums: Shared<'a>,
}

/// A tile of M rows.
pub(super) struct Tile {
    pub codes: *const i8,
    pub scales: *const f32,
    pub offsets: *const i32,
    pub sums: *const f32,
}

impl<'a> Rounded<'a> {
    /// Scratch elements for rows of this width.
    pub(super) fn scratch(rows: usize, width: usize) -> usize {
        let blocks = width.div_ceil(COLUMNS);
        Carve::size(rows * blocks * COLUMNS / 4) + 3 * Carve::size(rows * blocks)
    }

    /// Takes memory of [`Self::scratch`] elements. Each tile must be filled by [`Fill`] before it is read.
    pub(super) fn new(tiles: &'a [Range<usize>], width: usize, scratch: &'a mut [f32]) -> Self {
        let (rows, blocks) = (tiles.last().map_or(0, |tile| tile.end), width.div_ceil(COLUMNS));
        let mut carve = Carve(scratch);
        let codes = Shared::new(carve.take(rows * blocks * COLUMNS / 4));
        let mut take = || Shared::new(carve.take(rows * blocks));
        Self { width, tiles, codes, scales: take(), offsets: take(), sums: take() }
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }
    pub(super) fn blocks(&self) -> usize {
        self.width.div_ceil(COLUMNS)
    }
    pub(super) fn rows(&self) -> usize {
        self.tiles.last().map_or(0, |tile| tile.end)
    }
    pub(super) fn tiles(&self) -> &[Range<usize>] {
        self.tiles
    }
    /// The tile that starts with row `r`.
    #[inline(always)]
    pub(super) fn tile(&self, r: usize) -> Tile {
        let at = r * self.blocks();
        Tile {
            codes: self.codes.pointer(at * COLUMNS / 4).cast(),
            scales: self.scales.pointer(at),
            offsets: self.offsets.pointer(at).cast(),
            sums: self.sums.pointer(at),
        }
    }
}

/// Task that rounds the rows of a tile.
pub(super) struct Fill<'a> {
    pub x: &'a [f32],
    pub to: &'a Rounded<'a>,
    pub tile: Range<usize>,
}

impl WideKernel for Fill<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Wide>(self, s: S) {
        let Self { x, to, tile } = self;
        let (width, blocks, m) = (to.width, to.blocks(), tile.len());
        let at = tile.start * blocks;
        // SAFETY: a tile belongs to one task, and numbers of any bits are valid.
        let (codes, scales, offsets, sums) = unsafe {
            (
                to.codes.part(at * COLUMNS / 4, m * blocks * COLUMNS / 4),
                to.scales.part(at, m * blocks),
                to.offsets.part(at, m * blocks),
                to.sums.part(at, m * blocks),
            )
        };
        for i in 0..m {
            let row = &x[(tile.start + i) * width..][..width];
            for b in 0..blocks {
                let mut padded = [0.0; COLUMNS];
                let from = &row[b * COLUMNS..];
                let block = match from.first_chunk::<COLUMNS>() {
                    Some(block) => block,
                    None => {
                        padded[..from.len()].copy_from_slice(from);
                        &padded
                    }
                };
                let (scale, sum, rounded) = round(s, block);
                let k = b * m + i;
                scales[k] = scale;
                offsets[k] = f32::from_bits((-128 * sum).cast_unsigned());
                sums[k] = scale * sum as f32;
                let to = &mut codes[b * STEPS * m..][..STEPS * m];
                for (step, &four) in rounded.as_chunks::<STEP>().0.iter().enumerate() {
                    to[step * m + i] = f32::from_bits(u32::from_ne_bytes(four));
                }
            }
        }
    }
}

/// Rounds a block: its scale, the sum of its codes, and its codes.
#[inline(always)]
fn round<S: Wide>(s: S, block: &[f32; COLUMNS]) -> (f32, i32, [u8; COLUMNS]) {
    let (mut codes, zero) = ([0; COLUMNS], s.splat(0.0));
    // SAFETY: a block is two vectors.
    unsafe {
        let (a, b) = (s.load(block.as_ptr()), s.load(block.as_ptr().add(WIDE)));
        // Zero times a number that is not finite is NaN.
        if s.any_nan(s.add(s.mul(a, zero), s.mul(b, zero))) {
            return (f32::NAN, 0, codes);
        }
        let scale = s.largest(s.max_abs(a, s.max_abs(b, zero))) / 127.0;
        // A block whose scale would be subnormal is rounded to zeros.
        if scale < f32::MIN_POSITIVE {
            return (0.0, 0, codes);
        }
        let inverse = s.splat(1.0 / scale);
        let (a, b) = (s.to_int(s.mul(a, inverse)), s.to_int(s.mul(b, inverse)));
        s.store_bytes(codes.as_mut_ptr(), a);
        s.store_bytes(codes.as_mut_ptr().add(WIDE), b);
        (scale, s.total(s.add_int(a, b)), codes)
    }
}

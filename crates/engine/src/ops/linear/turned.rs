//! Products of many rows with sixteen lanes, with the bits of [`super::dots`]: a lane for each row of W instead of each
//! part of a row.
//!
//! A dot product has sixteen partial sums over l = i, i + 16, …. Here, for each i in turn, a vector has partial sum i of
//! sixteen rows of W, and is added to those of other i in the order in which `dots` adds lanes. x and W are turned for
//! this: what is multiplied in one step is together.
//!
//! ```text
//! x: per tile of rows   [i, l / 16, 16]    numbers of a step of up to eleven rows
//! W: per 32 rows        [i, l / 16, 32]    after the last i, the rest of each row
//! ```
//! A tile of eleven rows of x and 32 rows of W keeps its sums in registers. W is turned once for all rows of x.
#![allow(unsafe_code)]

use std::ops::Range;

use super::Sizes;
use super::source::{Bf16, F32, Source};
use crate::cpu::Shared;
use crate::ops::pack::RawWeight;
use crate::simd::{Square, SquareKernel};

/// Rows of x in a tile at most.
pub(super) const TILE: usize = 11;
/// Number of rows of x from which on W is turned: then tiles have at least eight rows.
pub(super) const MANY: usize = 25;
/// Rows of W in a tile: two vectors.
pub(super) const PAIR: usize = 32;
/// Lanes per vector.
const N: usize = 16;
/// Order of the partial sums in which neighbours are added, then pairs of neighbours, and so on.
const ORDER: [usize; N] = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15];

/// Scratch elements of x in tiles.
pub(super) fn scratch(tiles: usize, inner: usize) -> usize {
    tiles * inner * N
}

/// Task that turns a tile of rows of x.
pub(super) struct Turn<'a> {
    pub x: &'a [f32],
    pub inner: usize,
    pub rows: Range<usize>,
    pub to: &'a mut [f32],
}

impl SquareKernel for Turn<'_> {
    #[inline(always)]
    fn run<S: Square>(self, s: S) {
        let Self { x, inner, rows, to } = self;
        let x = F32(&x[rows.start * inner..rows.end * inner]);
        turn(s, x, 0..rows.len(), inner, to, N, 0);
    }
}

/// Turns up to sixteen rows into vectors of sixteen numbers, at `at` of each `stride` numbers of `to`.
#[inline(always)]
fn turn<S: Square, W: Source<S>>(
    s: S,
    w: W,
    rows: Range<usize>,
    inner: usize,
    to: &mut [f32],
    stride: usize,
    at: usize,
) {
    let steps = inner / N;
    assert!(to.len() >= inner * stride && at + N <= stride);
    for q in 0..steps {
        let mut lines = [s.splat(0.0); N];
        for (j, row) in rows.clone().enumerate() {
            // SAFETY: row `row` has at least 16 (q + 1) numbers.
            lines[j] = unsafe { w.load(s, row * inner + q * N) };
        }
        let turned = s.transpose(lines);
        for i in 0..N {
            s.store(&mut to[(i * steps + q) * stride + at..], turned[i]);
        }
    }
    for l in steps * N..inner {
        let mut line = [0.0; N];
        for (j, row) in rows.clone().enumerate() {
            line[j] = w.get(row * inner + l);
        }
        to[l * stride + at..][..N].copy_from_slice(&line);
    }
}

/// Task that computes columns `columns` of y = x Wᵀ.
pub(super) struct Turned<'a> {
    pub sizes: Sizes,
    /// Tiles of rows of x, and these turned.
    pub tiles: &'a [Range<usize>],
    pub x: &'a Shared<'a>,
    pub weight: RawWeight<'a>,
    pub y: &'a Shared<'a>,
    pub columns: Range<usize>,
    pub scratch: &'a mut [f32],
}

impl Turned<'_> {
    pub(super) fn scratch(sizes: Sizes) -> usize {
        sizes.inner * PAIR
    }
}

impl SquareKernel for Turned<'_> {
    #[inline(always)]
    fn run<S: Square>(self, s: S) {
        let Sizes { inner, outer, .. } = self.sizes;
        assert!(self.columns.end <= outer);
        match self.weight {
            RawWeight::F32(w) => {
                assert!(w.len() == outer * inner);
                self.multiply(s, F32(w));
            }
            RawWeight::Bf16(w) => {
                assert!(w.len() == outer * inner);
                self.multiply(s, Bf16(w));
            }
            RawWeight::Int8 { .. } | RawWeight::Blocks(_) => {
                unreachable!("such products are computed elsewhere")
            }
        }
    }
}

impl Turned<'_> {
    #[inline(always)]
    fn multiply<S: Square, W: Source<S>>(self, s: S, w: W) {
        let Sizes { inner, .. } = self.sizes;
        let panel = &mut *self.scratch;
        for c in self.columns.clone().step_by(PAIR) {
            let middle = (c + N).min(self.columns.end);
            let end = (c + PAIR).min(self.columns.end);
            turn(s, w, c..middle, inner, panel, PAIR, 0);
            turn(s, w, middle..end, inner, panel, PAIR, N);
            for (t, rows) in self.tiles.iter().enumerate() {
                // SAFETY: x is complete, and nobody writes it any more.
                let x: &[f32] = unsafe { self.x.part(t * inner * N, inner * N) };
                let (r, columns, y, sizes) = (rows.start, c..end, self.y, self.sizes);
                match rows.len() {
                    8 => tile::<S, 8>(s, x, panel, sizes, r, columns, y),
                    9 => tile::<S, 9>(s, x, panel, sizes, r, columns, y),
                    10 => tile::<S, 10>(s, x, panel, sizes, r, columns, y),
                    11 => tile::<S, 11>(s, x, panel, sizes, r, columns, y),
                    rows => unreachable!("a tile of {rows} rows"),
                }
            }
        }
    }
}

/// Multiplies a tile of M rows of x with 32 rows of W.
#[inline(always)]
fn tile<S: Square, const M: usize>(
    s: S,
    x: &[f32],
    panel: &[f32],
    sizes: Sizes,
    r: usize,
    columns: Range<usize>,
    y: &Shared<'_>,
) {
    let Sizes { inner, outer, .. } = sizes;
    let steps = inner / N;
    // The unchecked reads below rely on this.
    assert!(x.len() >= inner * N && panel.len() >= inner * PAIR);
    // Sums that wait for a neighbour of as many partial sums; with the present one, their number is in binary what a
    // counter of the partial sums is.
    let mut waiting = [[[s.splat(0.0); 2]; M]; 4];
    let mut acc = [[s.splat(0.0); 2]; M];
    for (count, &i) in ORDER.iter().enumerate() {
        acc = [[s.splat(0.0); 2]; M];
        let (mut from_x, mut from_w) = (i * steps * N, i * steps * PAIR);
        for _ in 0..steps {
            // SAFETY: both are within the slices, whose lengths are asserted.
            unsafe {
                let w = [s.load_ptr(panel.as_ptr().add(from_w)), s.load_ptr(panel.as_ptr().add(from_w + N))];
                for m in 0..M {
                    let xm = s.splat(*x.as_ptr().add(from_x + m));
                    acc[m][0] = s.fma(xm, w[0], acc[m][0]);
                    acc[m][1] = s.fma(xm, w[1], acc[m][1]);
                }
            }
            from_x += N;
            from_w += PAIR;
        }
        let mut level = 0;
        while count >> level & 1 == 1 {
            for m in 0..M {
                for j in 0..2 {
                    acc[m][j] = s.add(waiting[level][m][j], acc[m][j]);
                }
            }
            level += 1;
        }
        if level < 4 {
            waiting[level] = acc;
        }
    }
    for l in steps * N..inner {
        for m in 0..M {
            for j in 0..2 {
                let w = s.load(&panel[l * PAIR + j * N..]);
                acc[m][j] = s.add(acc[m][j], s.mul(s.splat(x[l * N + m]), w));
            }
        }
    }
    for m in 0..M {
        let mut line = [0.0; PAIR];
        s.store(&mut line, acc[m][0]);
        s.store(&mut line[N..], acc[m][1]);
        // SAFETY: these columns of a row of y belong to this task only.
        let y = unsafe { y.part((r + m) * outer + columns.start, columns.len()) };
        y.copy_from_slice(&line[..columns.len()]);
    }
}

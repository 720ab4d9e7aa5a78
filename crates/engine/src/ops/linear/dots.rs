//! Dot products of rows of x with rows of W in a fixed summation order, for weights of any precision.
//!
//! Inference must give the same bits for a token whether it is computed alone or in a batch, so the order of
//! summation must not depend on the number of rows:
//!
//! ```text
//! lane i of eight sums x_l w_l over l = i, i + 8, …;   then the lanes;   then the remaining l;   then · scale
//! ```
//! With AVX-512 there are sixteen lanes, except for int8, so that results differ between instruction sets.
//!
//! W is read from memory once, and what is multiplied together must come from a near cache:
//!
//! - Few rows: four rows of x at a time (eight with AVX-512) stay in the L1 cache while W streams past them, widened in
//!   registers. With AVX-512, a single row of x is multiplied by one row of W after the other, so that W is read in
//!   one piece. With more rows, a group of rows of W stays in a near cache until all rows of x were multiplied by it: a
//!   few rows in the L1 cache if all of x fits there as well, otherwise many in the L2 cache.
//! - Many rows: a piece of W is converted to f32 and stays in the L1 cache while blocks of rows of x stream past it.
#![allow(unsafe_code)]

use std::ops::Range;

use super::Sizes;
use super::source::{Bf16, F32, Int8, Source};
use crate::cpu::{Carve, Shared};
use crate::ops::pack::RawWeight;
use crate::simd::{Kernel, Lanes, LanesKernel, Simd};

/// Number of rows of W processed together.
pub(super) const COLUMNS: usize = 8;
/// Maximum number of rows of x for which W is read in place.
const FEW: usize = 24;
/// Maximum number of rows of x per pass over W.
const PASS: usize = 8;
/// Number of rows of x that are read where they are. More than these would be at the same places of the L1 cache, if their
/// length is a power of two, and need too many addresses: they are copied, so that what is multiplied in one step is
/// together.
const LOOSE: usize = 4;
/// A multiple of the rows of W in every tile.
const TILES: usize = 12;
/// Bytes of W that stay in the L2 cache between passes, and as many that are prefetched meanwhile.
const GROUP: usize = 128 * 1024;
/// Elements of x that leave room in the L1 cache for a few rows of W.
const NEAR: usize = 4096;
/// Prefetch distance, in cache lines past the current rows.
const AHEAD: usize = 64;
/// Elements of a row processed at a time, so that the rows of x of a pass fill most of the L1 cache: 32 KiB with AVX2, 48
/// KiB with AVX-512. A multiple of the block size.
const fn piece_length(pass: usize) -> usize {
    if pass == PASS { 1024 } else { 1536 }
}
/// Elements of a row converted at a time when there are many rows of x; a multiple of the block size.
const PANEL: usize = 512;

/// Task that computes columns `columns` of y = x Wᵀ.
pub(super) struct Dots<'a> {
    pub sizes: Sizes,
    pub x: &'a [f32],
    pub weight: RawWeight<'a>,
    pub y: &'a Shared<'a>,
    pub columns: Range<usize>,
    pub scratch: &'a mut [f32],
}

/// A multiple of the rows of x in every tile.
const MULTIPLE: usize = 6;
/// Lanes of the widest vectors.
const WIDEST: usize = 16;

/// Number of rows of x that fit in the L2 cache while W is streamed.
fn block_rows(inner: usize) -> usize {
    (64 * 1024 / inner.max(1)).clamp(MULTIPLE, 512) / MULTIPLE * MULTIPLE
}

/// Number of rows of W in a group, for elements of which a cache line holds `line`.
fn group_columns(inner: usize, line: usize) -> usize {
    (GROUP / (inner * 64 / line).max(1)).max(1).next_multiple_of(TILES)
}

impl Dots<'_> {
    pub(super) fn scratch(sizes: Sizes) -> usize {
        if sizes.rows <= FEW {
            // Bytes per element are at least one, so a group has at most this many rows of W.
            let sums = group_columns(sizes.inner, 64) * PASS * WIDEST;
            let sums = if sizes.inner <= piece_length(PASS) { 0 } else { sums };
            return sums + if sizes.rows > LOOSE { sizes.rows * sizes.inner } else { 0 };
        }
        let block = block_rows(sizes.inner).min(sizes.rows.next_multiple_of(MULTIPLE));
        COLUMNS * PANEL + block * COLUMNS * WIDEST
    }
}

/// Products with weights in f32 and bf16.
impl LanesKernel for Dots<'_> {
    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Sizes { rows, inner, outer } = self.sizes;
        // The unchecked reads below rely on this.
        assert!(self.x.len() == rows * inner && self.columns.end <= outer);
        let mut carve = Carve(self.scratch);
        let whole = inner / S::LANES * S::LANES;
        let packs = S::PASS > LOOSE && (LOOSE + 1..=FEW).contains(&rows) && whole > 0;
        let packed = carve.take(if packs { rows * whole } else { 0 });
        if packs {
            pack(s, self.x, inner, packed);
        }
        let scratch = carve.0;
        let call = Call { sizes: self.sizes, x: self.x, packed, y: self.y, columns: self.columns };
        match self.weight {
            RawWeight::F32(w) => {
                assert!(w.len() == outer * inner);
                call.run(s, F32(w), scratch);
            }
            RawWeight::Bf16(w) => {
                assert!(w.len() == outer * inner);
                call.run(s, Bf16(w), scratch);
            }
            RawWeight::Int8 { .. } | RawWeight::Blocks(_) => {
                unreachable!("such products are computed elsewhere")
            }
        }
    }
}

/// Products with weights in int8, whose codes are in an order for eight lanes.
pub(super) struct Int8Dots<'a>(pub Dots<'a>);

impl Kernel for Int8Dots<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Dots { sizes, x, weight, y, columns, scratch } = self.0;
        let Sizes { rows, inner, outer } = sizes;
        let RawWeight::Int8 { codes, scales } = weight else {
            unreachable!("such products are computed elsewhere")
        };
        // The unchecked reads below rely on this.
        assert!(x.len() == rows * inner && columns.end <= outer);
        assert!(codes.len() == outer * inner && scales.len() == outer);
        Call { sizes, x, packed: &[], y, columns }.run(s, Int8 { codes, scales }, scratch);
    }
}

/// Copies the rows of each pass: vector v of row i of M is at v · M + i.
#[inline(always)]
fn pack<S: Lanes>(s: S, x: &[f32], inner: usize, to: &mut [f32]) {
    let whole = inner / S::LANES * S::LANES;
    for (x, to) in x.chunks(S::PASS * inner).zip(to.chunks_mut(S::PASS * whole)) {
        let rows = x.len() / inner;
        for (i, row) in x.chunks_exact(inner).enumerate() {
            for l in (0..whole).step_by(S::LANES) {
                s.store(&mut to[l * rows + i * S::LANES..], s.load(&row[l..]));
            }
        }
    }
}

struct Call<'a> {
    sizes: Sizes,
    x: &'a [f32],
    /// The same in the order of [`pack`], for passes of more than `LOOSE` rows.
    packed: &'a [f32],
    y: &'a Shared<'a>,
    columns: Range<usize>,
}

impl Call<'_> {
    #[inline(always)]
    fn run<S: Lanes, W: Source<S>>(self, s: S, w: W, scratch: &mut [f32]) {
        match self.sizes.rows {
            rows if rows <= S::PASS && rows * self.sizes.inner <= S::PASS * piece_length(S::PASS) => {
                self.pass(s, w, 0, self.columns.clone(), 0..self.sizes.inner, Prefetch::InOrder, &mut []);
            }
            0..=FEW => self.passes(s, w, scratch),
            _ => self.blocks(s, w, scratch),
        }
    }

    /// Multiplies some rows of x at a time by a group of rows of W. The first pass reads the group from memory, and the
    /// others find it in a cache:
    ///
    /// - If all of x is small, a group is a few rows of W that stay in the L1 cache.
    /// - Otherwise a group fills part of the L2 cache, and all passes together prefetch the next one, so that reading
    ///   memory and multiplying overlap. Long rows are processed in pieces, so that those of x stay in the L1 cache;
    ///   `sums` holds the partial sums between pieces.
    #[inline(always)]
    fn passes<S: Lanes, W: Source<S>>(&self, s: S, w: W, sums: &mut [f32]) {
        let Sizes { rows, inner, .. } = self.sizes;
        let passes = rows.div_ceil(S::PASS);
        let near = rows * inner <= NEAR;
        let (group, length) =
            if near { (TILES, inner) } else { (group_columns(inner, W::LINE), piece_length(S::PASS)) };
        for c in self.columns.clone().step_by(group) {
            let columns = c..(c + group).min(self.columns.end);
            for pass in 0..passes {
                // At least one piece, so that empty rows give zeros.
                for from in (0..inner.max(1)).step_by(length.max(1)) {
                    let piece = from..(from + length).min(inner);
                    let ahead = match (near, pass) {
                        (true, 0) => Prefetch::InOrder,
                        (true, _) => Prefetch::Nothing,
                        // The same piece of the rows of the next group, of which each pass takes an equal part.
                        (false, _) => Prefetch::NextGroup {
                            distance: group * inner + pass * (piece.len() / passes),
                            every: passes,
                        },
                    };
                    let sums = if near { &mut [] } else { &mut *sums };
                    self.pass(s, w, pass * S::PASS, columns.clone(), piece, ahead, sums);
                }
            }
        }
    }

    /// Multiplies a piece of the rows of x from `r` on, as many as a pass has at most, by each row of W in `columns`.
    #[inline(always)]
    fn pass<S: Lanes, W: Source<S>>(
        &self,
        s: S,
        w: W,
        r: usize,
        columns: Range<usize>,
        piece: Range<usize>,
        ahead: Prefetch,
        sums: &mut [f32],
    ) {
        match self.sizes.rows - r {
            0 => {}
            // W is read fastest in one piece. With eight lanes the sums of a single row would wait for each other.
            1 if S::LANES == WIDEST => self.stream::<S, W, 1, 1>(s, w, r, columns, piece, ahead, sums),
            1 => self.stream::<S, W, 1, 4>(s, w, r, columns, piece, ahead, sums),
            2 => self.stream::<S, W, 2, 4>(s, w, r, columns, piece, ahead, sums),
            n if S::LANES == WIDEST => match n {
                3 => self.stream::<S, W, 3, 4>(s, w, r, columns, piece, ahead, sums),
                4 => self.stream::<S, W, 4, 4>(s, w, r, columns, piece, ahead, sums),
                5 => self.stream::<S, W, 5, 4>(s, w, r, columns, piece, ahead, sums),
                6 => self.stream::<S, W, 6, 4>(s, w, r, columns, piece, ahead, sums),
                7 => self.stream::<S, W, 7, 3>(s, w, r, columns, piece, ahead, sums),
                _ => self.stream::<S, W, PASS, 3>(s, w, r, columns, piece, ahead, sums),
            },
            3 if W::ALONE => self.stream::<S, W, 3, 3>(s, w, r, columns, piece, ahead, sums),
            3 => self.stream::<S, W, 3, 2>(s, w, r, columns, piece, ahead, sums),
            _ if W::ALONE => self.stream::<S, W, 4, 3>(s, w, r, columns, piece, ahead, sums),
            _ => self.stream::<S, W, 4, 2>(s, w, r, columns, piece, ahead, sums),
        }
    }

    /// Multiplies a piece of M rows of x by each row of W in `columns` as it is read.
    #[inline(always)]
    fn stream<S: Lanes, W: Source<S>, const M: usize, const N: usize>(
        &self,
        s: S,
        w: W,
        r: usize,
        columns: Range<usize>,
        piece: Range<usize>,
        ahead: Prefetch,
        sums: &mut [f32],
    ) {
        let (mut c, mut sums) = (columns.start, sums);
        while c + N <= columns.end {
            let (tile, rest) = sums.split_at_mut(sums.len().min(M * N * S::LANES));
            self.stream_tile::<S, W, M, N>(s, w, r, c, piece.clone(), ahead, tile);
            (c, sums) = (c + N, rest);
        }
        if N == 3 && c + 2 == columns.end {
            let (tile, _) = sums.split_at_mut(sums.len().min(M * 2 * S::LANES));
            return self.stream_tile::<S, W, M, 2>(s, w, r, c, piece, ahead, tile);
        }
        while c < columns.end {
            let (tile, rest) = sums.split_at_mut(sums.len().min(M * S::LANES));
            self.stream_tile::<S, W, M, 1>(s, w, r, c, piece.clone(), ahead, tile);
            (c, sums) = (c + 1, rest);
        }
    }

    #[inline(always)]
    fn stream_tile<S: Lanes, W: Source<S>, const M: usize, const N: usize>(
        &self,
        s: S,
        w: W,
        r: usize,
        c: usize,
        piece: Range<usize>,
        ahead: Prefetch,
        sums: &mut [f32],
    ) {
        let inner = self.sizes.inner;
        let (mut x, mut at) = ([self.x; M], [0; N]);
        for i in 0..M {
            x[i] = &self.x[(r + i) * inner..][..inner];
        }
        for j in 0..N {
            at[j] = (c + j) * inner;
        }
        let packed =
            if M > LOOSE { self.packed[r * (inner / S::LANES * S::LANES)..].as_ptr() } else { x[0].as_ptr() };
        let mut acc = [[s.splat(0.0); N]; M];
        if piece.start > 0 {
            for i in 0..M {
                for j in 0..N {
                    acc[i][j] = s.load(&sums[(i * N + j) * S::LANES..]);
                }
            }
        }
        let whole = piece.end / S::LANES * S::LANES;
        let (mut l, mut wait) = (piece.start, 0);
        let mut next = match ahead {
            Prefetch::Nothing => 0,
            Prefetch::InOrder => at[0] + N * inner + AHEAD * W::LINE,
            Prefetch::NextGroup { distance, .. } => distance + l,
        };
        while l + 4 * S::LANES <= whole {
            match ahead {
                Prefetch::Nothing => {}
                Prefetch::InOrder => {
                    for line in (0..N * 4 * S::LANES).step_by(W::LINE) {
                        w.prefetch(s, next + line);
                    }
                    next += N * 4 * S::LANES;
                }
                Prefetch::NextGroup { every, .. } => {
                    if wait == 0 {
                        for j in 0..N {
                            for line in (0..4 * S::LANES).step_by(W::LINE) {
                                w.prefetch(s, at[j] + next + line);
                            }
                        }
                        next += 4 * S::LANES;
                        wait = every;
                    }
                    wait -= 1;
                }
            }
            // SAFETY: l plus four vectors ≤ inner, rows c + j are within W, as checked by `run`, and `packed` has all of
            // them for M rows.
            unsafe {
                if W::ALONE && M > 2 {
                    for v in (l..l + 4 * S::LANES).step_by(S::LANES) {
                        let mut ws = [s.splat(0.0); N];
                        for j in 0..N {
                            ws[j] = w.load(s, at[j] + v);
                        }
                        for i in 0..M {
                            let xi = s.load_ptr(match M > LOOSE {
                                true => packed.add(v * M + i * S::LANES),
                                false => x[i].as_ptr().add(v),
                            });
                            for j in 0..N {
                                acc[i][j] = s.fma(xi, ws[j], acc[i][j]);
                            }
                        }
                    }
                } else {
                    for j in 0..N {
                        let ws = w.block(s, at[j] + l);
                        for v in 0..4 {
                            for i in 0..M {
                                let xi = s.load_ptr(x[i].as_ptr().add(l + v * S::LANES));
                                acc[i][j] = s.fma(xi, ws[v], acc[i][j]);
                            }
                        }
                    }
                }
            }
            l += 4 * S::LANES;
        }
        while l < whole {
            // SAFETY: l plus a vector ≤ inner, and rows c + j are within W, as checked by `run`.
            unsafe {
                let mut xs = [s.splat(0.0); M];
                for i in 0..M {
                    xs[i] = s.load_ptr(x[i].as_ptr().add(l));
                }
                for j in 0..N {
                    let wj = w.load(s, at[j] + l);
                    for i in 0..M {
                        acc[i][j] = s.fma(xs[i], wj, acc[i][j]);
                    }
                }
            }
            l += S::LANES;
        }
        if piece.end == inner {
            return self.finish(s, w, &acc, r, c);
        }
        for i in 0..M {
            for j in 0..N {
                s.store(&mut sums[(i * N + j) * S::LANES..], acc[i][j]);
            }
        }
    }

    /// Multiplies blocks of rows of x by eight rows of W, one piece at a time. `sums` holds the partial sums
    /// between pieces.
    #[inline(always)]
    fn blocks<S: Lanes, W: Source<S>>(&self, s: S, w: W, scratch: &mut [f32]) {
        let Sizes { rows, inner, .. } = self.sizes;
        let mut carve = Carve(scratch);
        let panel = carve.take(COLUMNS * PANEL);
        let sums = std::mem::take(&mut carve.0);
        let (block, whole) = (block_rows(inner), inner / S::LANES * S::LANES);
        for r0 in (0..rows).step_by(block) {
            let r1 = (r0 + block).min(rows);
            for c in self.columns.clone().step_by(COLUMNS) {
                let wide = (self.columns.end - c).min(COLUMNS);
                // At least one piece, so that rows of fewer than eight elements are processed too.
                for from in (0..whole.max(1)).step_by(PANEL) {
                    let piece = Piece { from, to: (from + PANEL).min(whole), last: from + PANEL >= whole };
                    for j in 0..wide {
                        let mut l = from;
                        while l + 4 * S::LANES <= piece.to {
                            // Prefetch the next rows of W; they arrive while blocks of x are processed.
                            for line in (0..4 * S::LANES).step_by(W::LINE) {
                                w.prefetch(s, (c + j + COLUMNS) * inner + l + line);
                            }
                            // SAFETY: l plus four vectors ≤ inner, and row c + j is within W.
                            let block = unsafe { w.block(s, (c + j) * inner + l) };
                            for v in 0..4 {
                                s.store(&mut panel[j * PANEL + l - from + v * S::LANES..], block[v]);
                            }
                            l += 4 * S::LANES;
                        }
                        while l < piece.to {
                            // SAFETY: l plus a vector ≤ inner, and row c + j is within W.
                            let v = unsafe { w.load(s, (c + j) * inner + l) };
                            s.store(&mut panel[j * PANEL + l - from..], v);
                            l += S::LANES;
                        }
                    }
                    for r in (r0..r1).step_by(S::ROWS) {
                        let sums = &mut sums[(r - r0) * COLUMNS * S::LANES..];
                        match r1 - r {
                            1 => self.row_tiles::<S, W, 1>(s, w, &piece, panel, sums, r, c, wide),
                            2 => self.row_tiles::<S, W, 2>(s, w, &piece, panel, sums, r, c, wide),
                            n if S::ROWS == 3 || n == 3 => {
                                self.row_tiles::<S, W, 3>(s, w, &piece, panel, sums, r, c, wide);
                            }
                            4 => self.row_tiles::<S, W, 4>(s, w, &piece, panel, sums, r, c, wide),
                            5 => self.row_tiles::<S, W, 5>(s, w, &piece, panel, sums, r, c, wide),
                            _ => self.row_tiles::<S, W, 6>(s, w, &piece, panel, sums, r, c, wide),
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn row_tiles<S: Lanes, W: Source<S>, const M: usize>(
        &self,
        s: S,
        w: W,
        piece: &Piece,
        panel: &[f32],
        sums: &mut [f32],
        r: usize,
        c: usize,
        wide: usize,
    ) {
        let mut j = 0;
        while j + 4 <= wide {
            self.piece_tile::<S, W, M, 4>(s, w, piece, panel, sums, r, c, j);
            j += 4;
        }
        while j < wide {
            self.piece_tile::<S, W, M, 1>(s, w, piece, panel, sums, r, c, j);
            j += 1;
        }
    }

    #[inline(always)]
    fn piece_tile<S: Lanes, W: Source<S>, const M: usize, const N: usize>(
        &self,
        s: S,
        w: W,
        piece: &Piece,
        panel: &[f32],
        sums: &mut [f32],
        r: usize,
        c: usize,
        j0: usize,
    ) {
        let inner = self.sizes.inner;
        let len = piece.to - piece.from;
        let (mut x, mut p) = ([self.x; M], [panel; N]);
        for i in 0..M {
            x[i] = &self.x[(r + i) * inner + piece.from..][..len];
        }
        for j in 0..N {
            p[j] = &panel[(j0 + j) * PANEL..][..len];
        }
        let place = |i: usize, j: usize| (i * COLUMNS + j0 + j) * S::LANES;
        let mut acc = [[s.splat(0.0); N]; M];
        if piece.from > 0 {
            for i in 0..M {
                for j in 0..N {
                    acc[i][j] = s.load(&sums[place(i, j)..]);
                }
            }
        }
        let mut l = 0;
        while l < len {
            // SAFETY: `len` is a multiple of 8, and every slice has that length.
            unsafe {
                let mut xs = [s.splat(0.0); M];
                for i in 0..M {
                    xs[i] = s.load_ptr(x[i].as_ptr().add(l));
                }
                for j in 0..N {
                    let wj = s.load_ptr(p[j].as_ptr().add(l));
                    for i in 0..M {
                        acc[i][j] = s.fma(xs[i], wj, acc[i][j]);
                    }
                }
            }
            l += S::LANES;
        }
        if piece.last {
            return self.finish(s, w, &acc, r, c + j0);
        }
        for i in 0..M {
            for j in 0..N {
                s.store(&mut sums[place(i, j)..], acc[i][j]);
            }
        }
    }

    /// Sums the lanes, adds the remaining elements of the rows and applies the scale.
    #[inline(always)]
    fn finish<S: Lanes, W: Source<S>, const M: usize, const N: usize>(
        &self,
        s: S,
        w: W,
        acc: &[[S::V; N]; M],
        r: usize,
        c: usize,
    ) {
        let Sizes { inner, outer, .. } = self.sizes;
        // At most 24 sums, eight at a time. With fewer vectors, the first fills the other places.
        let mut sums = [0.0; 24];
        for from in (0..M * N).step_by(8) {
            let mut eight = [acc[0][0]; 8];
            for k in from..(from + 8).min(M * N) {
                eight[k - from] = acc[k / N][k % N];
            }
            sums[from..from + 8].copy_from_slice(&s.sums(eight));
        }
        for i in 0..M {
            // SAFETY: row r + i, columns c..c + N belong to this task only.
            let out = unsafe { self.y.part((r + i) * outer + c, N) };
            for j in 0..N {
                let mut sum = sums[i * N + j];
                for l in inner / S::LANES * S::LANES..inner {
                    sum += self.x[(r + i) * inner + l] * w.get((c + j) * inner + l);
                }
                out[j] = w.scaled(sum, c + j);
            }
        }
    }
}

/// What to prefetch while rows of W are read.
#[derive(Clone, Copy)]
enum Prefetch {
    /// Nothing.
    Nothing,
    /// As much as is read, `AHEAD` cache lines past the current rows.
    InOrder,
    /// One block for `every` blocks that are read, starting `distance` elements past the current rows.
    NextGroup { distance: usize, every: usize },
}

/// Range of the inner dimension.
struct Piece {
    from: usize,
    to: usize,
    last: bool,
}

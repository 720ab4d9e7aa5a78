//! Products of rows of x, rounded to eight bits, with weights in blocks of codes.
//!
//! ```text
//! y[r, o] = Σ over blocks b, in ascending order, of   (Σ_l code[o, l] · x̂[r, l]) · (scale[o, b] · s[r, b])
//!                                                     − min[o, b] · (s[r, b] Σ_l x̂[r, l])        (q4 only)
//! ```
//! The sums over l are integers, hence exact, and those over blocks are formed in one fixed order with unfused
//! operations. So the bits of a row depend neither on the other rows nor on the instruction set.
//!
//! A tile is a few rows of x times a group or two of 16 rows of W, whose sums stay in registers. With few rows of x, all
//! tiles use a group before the next is read from memory. With many, pieces of a group stay in the L1 cache while all
//! rows of x stream past them; codes of four bits are unpacked once for all of them.
#![allow(unsafe_code)]

use std::ops::Range;

use super::rounded::Rounded;
use crate::cpu::{Carve, Shared};
use crate::ops::pack::blocks::{Bits, Blocks, COLUMNS, FACTORS, GROUP, STEP, SUPER};
use crate::simd::wide::{WIDE, Wide, WideKernel};

/// Steps in a block.
const STEPS: usize = COLUMNS / STEP;
/// Factors of a super in f32: scales, then minima, each [block, row].
const ROOM: usize = 2 * SUPER * GROUP;
/// Number of tiles up to which a group is used whole.
const FEW: usize = 4;
/// Supers in a piece of a group that stays in the L1 cache.
const PIECE: usize = 4;
/// Bytes of rounded x that stay in the L2 cache while pieces of W are used.
const NEAR: usize = 512 * 1024;

/// Task that computes the columns of y = x Wᵀ that belong to `groups` of rows of W.
pub(super) struct Tiles<'a> {
    pub x: &'a Rounded<'a>,
    pub weight: Blocks<'a>,
    pub y: &'a Shared<'a>,
    pub groups: Range<usize>,
    pub scratch: &'a mut [f32],
}

/// Number of rows of x whose codes stay in the L2 cache.
fn near_rows(width: usize) -> usize {
    (NEAR / width.max(1)).clamp(48, 512)
}

impl Tiles<'_> {
    /// Scratch elements of a task.
    pub(super) fn scratch(rows: usize, width: usize, bits: Bits) -> usize {
        let sums = near_rows(width).min(rows) * 2 * GROUP;
        let panel = if bits == Bits::Four { 2 * PIECE * Unpacked::SUPER / 4 } else { 0 };
        Carve::size(sums) + Carve::size(panel)
    }
}

impl WideKernel for Tiles<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Wide>(self, s: S) {
        let Self { x, weight, y, groups, scratch } = self;
        // The unchecked reads below rely on this.
        assert!(weight.bytes.len() == weight.bits.bytes(weight.rows, weight.width));
        assert!(groups.end <= weight.rows.div_ceil(GROUP) && x.width() == weight.width);
        let call = Call { x, weight, y };
        match weight.bits {
            Bits::Eight => call.run(s, Q8, groups, scratch),
            Bits::Four => call.run(s, Q4, groups, scratch),
        }
    }
}

/// How codes and factors of a group are stored.
trait Format: Copy {
    /// Whether a minimum is subtracted.
    const MINS: bool;
    /// Bytes of the codes of a block.
    const CODES: usize;
    /// Bytes of the factors of a super.
    const FACTORS: usize;
    /// Distance of prefetching in bytes, measured: the fewer bytes a block has, the sooner the next one is needed.
    const AHEAD: usize = 8192;
    /// Bytes of a whole super.
    const SUPER: usize = Self::FACTORS + SUPER * Self::CODES;
    /// Factors of a super in f32: those at `p` if they are stored so, otherwise `room`.
    /// # Safety
    /// `p` must be the start of a super.
    unsafe fn factors<S: Wide>(self, s: S, p: *const u8, room: &mut [f32; ROOM]) -> *const f32;
    /// Sums of products of a block.
    /// # Safety
    /// Each of `w` must be the start of the codes of a block; `x` of the codes of M rows in this block, and `offsets`
    /// of M numbers.
    unsafe fn sums<S: Wide, const M: usize, const N: usize>(
        self,
        s: S,
        w: [*const u8; N],
        x: *const i8,
        offsets: *const i32,
    ) -> [[S::I; N]; M];
}

/// A group in `q8`.
#[derive(Clone, Copy)]
struct Q8;
/// A group in `q4`.
#[derive(Clone, Copy)]
struct Q4;
/// A group in `q4` with a code in each byte and factors in f32.
#[derive(Clone, Copy)]
struct Unpacked;

impl Format for Q8 {
    const MINS: bool = false;
    const AHEAD: usize = 4096;
    const CODES: usize = Bits::Eight.codes();
    const FACTORS: usize = FACTORS;
    #[inline(always)]
    unsafe fn factors<S: Wide>(self, s: S, p: *const u8, room: &mut [f32; ROOM]) -> *const f32 {
        for b in 0..SUPER {
            // SAFETY: the factors of a super are eight times sixteen scales in f16.
            unsafe { s.store(room[b * WIDE..].as_mut_ptr(), s.load_f16(p.cast::<u16>().add(b * WIDE))) };
        }
        room.as_ptr()
    }
    #[inline(always)]
    unsafe fn sums<S: Wide, const M: usize, const N: usize>(
        self,
        s: S,
        w: [*const u8; N],
        x: *const i8,
        offsets: *const i32,
    ) -> [[S::I; N]; M] {
        // SAFETY: a block of W has eight steps of 64 bytes, one of x eight steps of M times four bytes.
        unsafe {
            let mut sums = [[s.start8(offsets); N]; M];
            for i in 1..M {
                sums[i] = [s.start8(offsets.add(i)); N];
            }
            for step in 0..STEPS {
                let mut codes = [s.eight(s.codes(w[0].add(step * 4 * WIDE))); N];
                for j in 1..N {
                    codes[j] = s.eight(s.codes(w[j].add(step * 4 * WIDE)));
                }
                for i in 0..M {
                    let xi = s.quad(x.add((step * M + i) * STEP));
                    for j in 0..N {
                        sums[i][j] = s.step8(sums[i][j], codes[j], xi);
                    }
                }
            }
            sums
        }
    }
}

impl Format for Q4 {
    const MINS: bool = true;
    const CODES: usize = Bits::Four.codes();
    const FACTORS: usize = FACTORS;
    #[inline(always)]
    unsafe fn factors<S: Wide>(self, s: S, p: *const u8, room: &mut [f32; ROOM]) -> *const f32 {
        // SAFETY: the factors of a super are sixteen d, sixteen e, and three vectors of words.
        unsafe {
            let (d, e) = (s.load_f16(p.cast()), s.load_f16(p.cast::<u16>().add(WIDE)));
            let words = p.cast::<u32>().add(WIDE);
            let words = [s.load_int(words), s.load_int(words.add(WIDE)), s.load_int(words.add(2 * WIDE))];
            let room = room.as_mut_ptr();
            let put = |i: usize, six: S::I| {
                let factor = if i < SUPER { d } else { e };
                s.store(room.add(i * WIDE), s.mul(s.from_int(six), factor));
            };
            for (k, word) in words.into_iter().enumerate() {
                put(5 * k, s.six::<0>(word));
                put(5 * k + 1, s.six::<6>(word));
                put(5 * k + 2, s.six::<12>(word));
                put(5 * k + 3, s.six::<18>(word));
                put(5 * k + 4, s.six::<24>(word));
            }
            put(15, s.tops(words));
            room
        }
    }
    #[inline(always)]
    unsafe fn sums<S: Wide, const M: usize, const N: usize>(
        self,
        s: S,
        w: [*const u8; N],
        x: *const i8,
        _: *const i32,
    ) -> [[S::I; N]; M] {
        // SAFETY: a block of W has four times 64 bytes, one of x eight steps of M times four bytes.
        unsafe {
            let mut sums = [[s.start4(); N]; M];
            for step in 0..STEPS / 2 {
                let mut codes = [s.nibbles(s.codes(w[0].add(step * 4 * WIDE))); N];
                for j in 1..N {
                    codes[j] = s.nibbles(s.codes(w[j].add(step * 4 * WIDE)));
                }
                for half in 0..2 {
                    for i in 0..M {
                        let xi = s.quad(x.add(((step + half * STEPS / 2) * M + i) * STEP));
                        for j in 0..N {
                            sums[i][j] = s.step4(sums[i][j], codes[j][half], xi);
                        }
                    }
                }
            }
            ended(s, sums)
        }
    }
}

impl Format for Unpacked {
    const MINS: bool = true;
    const CODES: usize = Bits::Eight.codes();
    const FACTORS: usize = 4 * ROOM;
    #[inline(always)]
    unsafe fn factors<S: Wide>(self, _: S, p: *const u8, _: &mut [f32; ROOM]) -> *const f32 {
        p.cast()
    }
    #[inline(always)]
    unsafe fn sums<S: Wide, const M: usize, const N: usize>(
        self,
        s: S,
        w: [*const u8; N],
        x: *const i8,
        _: *const i32,
    ) -> [[S::I; N]; M] {
        // SAFETY: as for `Q8`.
        unsafe {
            let mut sums = [[s.start4(); N]; M];
            for step in 0..STEPS {
                let mut codes = [s.codes(w[0].add(step * 4 * WIDE)); N];
                for j in 1..N {
                    codes[j] = s.codes(w[j].add(step * 4 * WIDE));
                }
                for i in 0..M {
                    let xi = s.quad(x.add((step * M + i) * STEP));
                    for j in 0..N {
                        sums[i][j] = s.step4(sums[i][j], codes[j], xi);
                    }
                }
            }
            ended(s, sums)
        }
    }
}

#[inline(always)]
fn ended<S: Wide, const M: usize, const N: usize>(s: S, sums: [[S::Sum4; N]; M]) -> [[S::I; N]; M] {
    let mut ended = [[s.end4(sums[0][0]); N]; M];
    for i in 0..M {
        for j in 0..N {
            ended[i][j] = s.end4(sums[i][j]);
        }
    }
    ended
}

impl Unpacked {
    /// Unpacks `blocks` blocks of a super.
    /// # Safety
    /// `from` must be the start of a super in `q4`, `to` valid for writes of a super.
    #[inline(always)]
    unsafe fn fill<S: Wide>(s: S, from: *const u8, to: *mut u8, blocks: usize) {
        // SAFETY: within the supers.
        unsafe {
            Q4.factors(s, from, &mut *to.cast::<[f32; ROOM]>());
            for b in 0..blocks {
                let from = from.add(FACTORS + b * Q4::CODES);
                let to = to.add(Self::FACTORS + b * Self::CODES);
                for step in 0..STEPS / 2 {
                    let [low, high] = s.nibbles(s.codes(from.add(step * 4 * WIDE)));
                    s.store_codes(to.add(step * 4 * WIDE), low);
                    s.store_codes(to.add((step + STEPS / 2) * 4 * WIDE), high);
                }
            }
        }
    }
}

struct Call<'a> {
    x: &'a Rounded<'a>,
    weight: Blocks<'a>,
    y: &'a Shared<'a>,
}

/// Part of the blocks of a row.
#[derive(Clone, Copy)]
struct Piece {
    from: usize,
    to: usize,
    last: bool,
    fetch: Fetch,
}

/// What is prefetched for each block: bytes `from..to` of the one that is `distance` bytes away.
#[derive(Clone, Copy, Default)]
struct Fetch {
    distance: usize,
    from: usize,
    to: usize,
}

impl Call<'_> {
    #[inline(always)]
    fn run<S: Wide, F: Format>(&self, s: S, format: F, groups: Range<usize>, scratch: &mut [f32]) {
        let tiles = self.x.tiles();
        let blocks = self.x.blocks();
        let step = if S::TWO && tiles.len() > 1 { 2 } else { 1 };
        let group = self.weight.bits.group(self.weight.width);
        let place = |g: usize| self.weight.bytes[g * group..].as_ptr();
        let mut carve = Carve(scratch);
        if tiles.len() <= FEW {
            // A single tile reads memory as it goes. Of several, each fetches a part of what the next groups need.
            let distance = if tiles.len() > 1 { step * group } else { F::AHEAD };
            let lines = F::CODES / 64;
            for g in groups.clone().step_by(step) {
                let other = (g + 1).min(groups.end - 1);
                for (t, tile) in tiles.iter().enumerate() {
                    let lines = lines * t / tiles.len()..lines * (t + 1) / tiles.len();
                    let fetch = Fetch { distance, from: 64 * lines.start, to: 64 * lines.end };
                    let piece = Piece { from: 0, to: blocks, last: true, fetch };
                    self.tile(s, format, tile.clone(), [g, other], [place(g), place(other)], piece, &mut []);
                }
            }
            return;
        }
        let near = near_rows(self.weight.width);
        let sums = carve.take(near.min(self.x.rows()) * 2 * GROUP);
        let mut first = 0;
        while first < tiles.len() {
            let start = tiles[first].start;
            let count = tiles[first..].iter().take_while(|tile| tile.end <= start + near).count().max(1);
            let tiles = &tiles[first..first + count];
            for g in groups.clone().step_by(step) {
                let other = (g + 1).min(groups.end - 1);
                // At least one piece, so that empty rows give zeros.
                for from in (0..blocks.max(1)).step_by(PIECE * SUPER) {
                    let to = (from + PIECE * SUPER).min(blocks);
                    let piece = Piece { from, to, last: to == blocks, fetch: Fetch::default() };
                    let skip = from / SUPER * F::SUPER;
                    let at = [place(g).wrapping_add(skip), place(other).wrapping_add(skip)];
                    if F::MINS {
                        let mut panel = Carve(&mut *carve.0);
                        let panel = panel.take(2 * PIECE * Unpacked::SUPER / 4).as_mut_ptr().cast::<u8>();
                        for (j, at) in at.into_iter().enumerate().take(step) {
                            for k in 0..(to - from).div_ceil(SUPER) {
                                // SAFETY: the panel has room for two pieces.
                                unsafe {
                                    let to = panel.add((j * PIECE + k) * Unpacked::SUPER);
                                    let count = (piece.to - piece.from - k * SUPER).min(SUPER);
                                    Unpacked::fill(s, at.add(k * F::SUPER), to, count);
                                }
                            }
                        }
                        let at = [panel, panel.wrapping_add((step - 1) * PIECE * Unpacked::SUPER)];
                        for tile in tiles {
                            let sums = &mut sums[(tile.start - start) * 2 * GROUP..];
                            let at = at.map(<*mut u8>::cast_const);
                            self.tile(s, Unpacked, tile.clone(), [g, other], at, piece, sums);
                        }
                    } else {
                        for tile in tiles {
                            let sums = &mut sums[(tile.start - start) * 2 * GROUP..];
                            self.tile(s, format, tile.clone(), [g, other], at, piece, sums);
                        }
                    }
                }
            }
            first += count;
        }
    }

    #[inline(always)]
    fn tile<S: Wide, F: Format>(
        &self,
        s: S,
        format: F,
        rows: Range<usize>,
        groups: [usize; 2],
        at: [*const u8; 2],
        piece: Piece,
        sums: &mut [f32],
    ) {
        let ([group, _], [place, _], r) = (groups, at, rows.start);
        let two = S::TWO && self.x.tiles().len() > 1;
        // Tiles of two groups have three rows at least: see `tiles`.
        match rows.len() {
            1 => self.multiply::<S, F, 1, 1>(s, format, r, [group], [place], piece, sums),
            2 => self.multiply::<S, F, 2, 1>(s, format, r, [group], [place], piece, sums),
            3 if two => self.multiply::<S, F, 3, 2>(s, format, r, groups, at, piece, sums),
            4 if two => self.multiply::<S, F, 4, 2>(s, format, r, groups, at, piece, sums),
            5 if two => self.multiply::<S, F, 5, 2>(s, format, r, groups, at, piece, sums),
            6 if two => self.multiply::<S, F, 6, 2>(s, format, r, groups, at, piece, sums),
            3 => self.multiply::<S, F, 3, 1>(s, format, r, [group], [place], piece, sums),
            4 => self.multiply::<S, F, 4, 1>(s, format, r, [group], [place], piece, sums),
            5 if S::ALL >= 5 => self.multiply::<S, F, 5, 1>(s, format, r, [group], [place], piece, sums),
            6 if S::ALL >= 6 => self.multiply::<S, F, 6, 1>(s, format, r, [group], [place], piece, sums),
            7 if S::ALL >= 7 => self.multiply::<S, F, 7, 1>(s, format, r, [group], [place], piece, sums),
            8 if S::ALL >= 8 => self.multiply::<S, F, 8, 1>(s, format, r, [group], [place], piece, sums),
            rows => unreachable!("a tile of {rows} rows"),
        }
    }

    /// Multiplies a piece of M rows of x with N groups. `sums` holds the sums between pieces.
    #[inline(always)]
    fn multiply<S: Wide, F: Format, const M: usize, const N: usize>(
        &self,
        s: S,
        format: F,
        r: usize,
        groups: [usize; N],
        at: [*const u8; N],
        piece: Piece,
        sums: &mut [f32],
    ) {
        let (x, weights) = (self.x.tile(r), &self.weight);
        let mut acc = [[s.splat(0.0); N]; M];
        if piece.from > 0 {
            assert!(sums.len() >= M * N * WIDE);
            for i in 0..M {
                for j in 0..N {
                    // SAFETY: the length is asserted.
                    acc[i][j] = unsafe { s.load(sums.as_ptr().add((i * N + j) * WIDE)) };
                }
            }
        }
        let mut rooms = [[0.0; ROOM]; N];
        let (mut at, mut from) = (at, piece.from);
        while from < piece.to {
            let count = (piece.to - from).min(SUPER);
            let mut factors = [std::ptr::null(); N];
            for j in 0..N {
                // SAFETY: a super starts here.
                factors[j] = unsafe { format.factors(s, at[j], &mut rooms[j]) };
                at[j] = at[j].wrapping_add(F::FACTORS);
            }
            for b in 0..count {
                for line in (piece.fetch.from..piece.fetch.to).step_by(64) {
                    for j in 0..N {
                        s.prefetch(at[j].wrapping_add(piece.fetch.distance + line));
                    }
                }
                let k = (from + b) * M;
                // SAFETY: this block is within W and within x, as checked by `run`; factors are [2, 8, 16].
                unsafe {
                    let found = format.sums::<S, M, N>(s, at, x.codes.add(k * COLUMNS), x.offsets.add(k));
                    let (mut scales, mut mins) = ([s.splat(0.0); N], [s.splat(0.0); N]);
                    for j in 0..N {
                        scales[j] = s.load(factors[j].add(b * WIDE));
                        if F::MINS {
                            mins[j] = s.load(factors[j].add((SUPER + b) * WIDE));
                        }
                    }
                    for i in 0..M {
                        let scale = s.splat(*x.scales.add(k + i));
                        for j in 0..N {
                            let product = s.mul(s.from_int(found[i][j]), s.mul(scales[j], scale));
                            acc[i][j] = s.add(acc[i][j], product);
                        }
                        if F::MINS {
                            let sum = s.splat(*x.sums.add(k + i));
                            for j in 0..N {
                                acc[i][j] = s.sub(acc[i][j], s.mul(mins[j], sum));
                            }
                        }
                    }
                }
                for j in 0..N {
                    at[j] = at[j].wrapping_add(F::CODES);
                }
            }
            from += count;
        }
        if !piece.last {
            assert!(sums.len() >= M * N * WIDE);
            for i in 0..M {
                for j in 0..N {
                    // SAFETY: the length is asserted.
                    unsafe { s.store(sums.as_mut_ptr().add((i * N + j) * WIDE), acc[i][j]) };
                }
            }
            return;
        }
        for i in 0..M {
            for j in 0..N {
                let c = groups[j] * GROUP;
                let mut lanes = [0.0; WIDE];
                // SAFETY: the row of y has these columns, which belong to this task only.
                let y = unsafe { self.y.part((r + i) * weights.rows + c, GROUP.min(weights.rows - c)) };
                // SAFETY: both have room for 16 numbers.
                unsafe {
                    if y.len() == WIDE {
                        s.store(y.as_mut_ptr(), acc[i][j]);
                    } else {
                        s.store(lanes.as_mut_ptr(), acc[i][j]);
                        y.copy_from_slice(&lanes[..y.len()]);
                    }
                }
            }
        }
    }
}

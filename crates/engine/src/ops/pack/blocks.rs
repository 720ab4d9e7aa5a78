//! How weights in `q8` and `q4` lie in memory.
//!
//! ```text
//! matrix = groups of 16 rows;   group = supers of 256 columns;   super = factors, up to 8 blocks of 32 columns
//! block  = steps of 4 columns:  16 rows · 4 codes
//!
//! q8: w = scale · (code − 128)             codes of eight bits
//!     factors: [block, row] scales in f16
//! q4: w = (d · scale) · code − (e · min)   codes of four bits: step i in the lower halves of bytes, step i + 4 above
//!     factors: [row] d, [row] e in f16, [3, row] words: scales of the blocks, then minima, in six bits each
//! ```
//! A word of `q4` holds five factors; its top two bits are a third of the last factor. A kernel computes sixteen sums at
//! once and reads a group from its start to its end. Rows and columns are padded with zeros.

use std::ops::Range;

use half::f16;

use crate::precision::Precision;

/// Rows in a group.
pub(crate) const GROUP: usize = 16;
/// Columns in a block.
pub(crate) const COLUMNS: usize = 32;
/// Blocks in a super.
pub(crate) const SUPER: usize = 8;
/// Bytes of the factors of a super of a group.
pub(crate) const FACTORS: usize = 256;
/// Columns in a step of a block.
pub(crate) const STEP: usize = 4;
/// Bytes of a step of codes of eight bits, and of two steps of codes of four bits.
const LINE: usize = GROUP * STEP;
/// The largest size of a number: the factors of all formats can hold it.
pub(crate) const LARGEST: f32 = 4e6;

/// Formats of weights in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bits {
    Eight,
    Four,
}

impl Bits {
    /// The format of a precision; `None` if it has no blocks.
    pub(crate) const fn of(precision: Precision) -> Option<Self> {
        match precision {
            Precision::Q8 => Some(Self::Eight),
            Precision::Q4 => Some(Self::Four),
            Precision::F32 | Precision::Bf16 | Precision::Int8 => None,
        }
    }

    /// Bytes of the codes of a block of a group.
    pub(crate) const fn codes(self) -> usize {
        match self {
            Self::Eight => GROUP * COLUMNS,
            Self::Four => GROUP * COLUMNS / 2,
        }
    }

    /// Bytes of a group of rows of `width` columns.
    pub(crate) const fn group(self, width: usize) -> usize {
        let blocks = width.div_ceil(COLUMNS);
        blocks.div_ceil(SUPER) * FACTORS + blocks * self.codes()
    }

    /// Bytes of `rows` rows of `width` columns.
    pub(crate) const fn bytes(self, rows: usize, width: usize) -> usize {
        rows.div_ceil(GROUP) * self.group(width)
    }

    /// Values of row `row` of `width` columns of a matrix.
    fn row(self, bytes: &[u8], row: usize, width: usize, to: &mut [f32]) {
        let group = &bytes[row / GROUP * self.group(width)..][..self.group(width)];
        let lane = row % GROUP;
        let mut rest = group;
        for to in to[..width].chunks_mut(SUPER * COLUMNS) {
            let (factors, after) = rest.split_at(FACTORS);
            let (codes, after) = after.split_at(to.len().div_ceil(COLUMNS) * self.codes());
            rest = after;
            for (b, (to, codes)) in to.chunks_mut(COLUMNS).zip(codes.chunks_exact(self.codes())).enumerate() {
                let (scale, min) = match self {
                    Self::Eight => (half_at(factors, b * GROUP + lane), 0.0),
                    Self::Four => (
                        half_at(factors, lane) * six_bits(factors, b, lane),
                        half_at(factors, GROUP + lane) * six_bits(factors, SUPER + b, lane),
                    ),
                };
                for (i, to) in to.iter_mut().enumerate() {
                    let (step, at) = (i / STEP, lane * STEP + i % STEP);
                    *to = match self {
                        Self::Eight => scale * (f32::from(codes[step * LINE + at]) - 128.0),
                        Self::Four => {
                            let byte = codes[step % 4 * LINE + at];
                            scale * f32::from(byte >> (4 * (step / 4)) & 15) - min
                        }
                    };
                }
            }
        }
    }
}

/// A weight [rows, width] in blocks: q8 or q4.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    pub(crate) bits: Bits,
    pub(crate) bytes: &'a [u8],
    pub(crate) rows: usize,
    pub(crate) width: usize,
}

impl<'a> Blocks<'a> {
    /// A weight from its bytes; `None` if the precision has no blocks, or the weight another number of bytes.
    pub fn new(precision: Precision, bytes: &'a [u8], [rows, width]: [usize; 2]) -> Option<Self> {
        let [groups, group] = precision.blocks_shape(rows, width)?;
        let bits = Bits::of(precision)?;
        (bytes.len() == groups * group).then_some(Self { bits, bytes, rows, width })
    }

    /// Values of a row, of which there are `width`.
    pub fn row(&self, row: usize, to: &mut [f32]) {
        self.bits.row(self.bytes, row, self.width, to);
    }

    /// Whether all values are finite whose factors begin in a range of the bytes. Codes are always finite, and so are
    /// factors of six bits.
    pub fn are_finite(&self, range: Range<usize>) -> bool {
        const EXPONENT: u16 = 0x7C00;
        let (group, range) = (self.bits.group(self.width), range.start..range.end.min(self.bytes.len()));
        if group == 0 {
            return true;
        }
        let halves = match self.bits {
            Bits::Eight => SUPER * GROUP,
            Bits::Four => 2 * GROUP,
        };
        let supers = (0..group).step_by(FACTORS + SUPER * self.bits.codes());
        let groups = range.start / group..range.end.div_ceil(group);
        let places = groups.flat_map(|g| supers.clone().map(move |at| g * group + at));
        places.filter(|at| range.contains(at)).all(|at| {
            let any = |any, &half: &[u8; 2]| any | (u16::from_le_bytes(half) & EXPONENT == EXPONENT);
            !self.bytes[at..][..2 * halves].as_chunks().0.iter().fold(false, any)
        })
    }
}

impl Precision {
    /// Shape of the bytes of a weight in blocks: groups of 16 rows, and the bytes of a group. `None` if the precision has
    /// no blocks, or if there are too many bytes to be counted.
    pub fn blocks_shape(self, rows: usize, width: usize) -> Option<[usize; 2]> {
        let (bits, blocks) = (Bits::of(self)?, width.div_ceil(COLUMNS));
        let factors = blocks.div_ceil(SUPER).checked_mul(FACTORS)?;
        let group = blocks.checked_mul(bits.codes())?.checked_add(factors)?;
        let groups = rows.div_ceil(GROUP);
        groups.checked_mul(group).map(|_| [groups, group])
    }
}

/// Number `i` of numbers in f16.
fn half_at(bytes: &[u8], i: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32()
}

/// Factor `i` of a row of `q4`.
fn six_bits(factors: &[u8], i: usize, lane: usize) -> f32 {
    let word = |k: usize| {
        let at = 4 * GROUP + (k * GROUP + lane) * 4;
        u32::from_le_bytes([factors[at], factors[at + 1], factors[at + 2], factors[at + 3]])
    };
    let bits = match i {
        15 => word(0) >> 30 | word(1) >> 30 << 2 | word(2) >> 30 << 4,
        _ => word(i / 5) >> (6 * (i % 5)) & 63,
    };
    bits as f32
}

/// Writes a number in f16.
pub(super) fn set_half(bytes: &mut [u8], i: usize, value: f16) {
    bytes[2 * i..][..2].copy_from_slice(&value.to_le_bytes());
}

/// Writes the factors of a row of `q4`, each below 64.
pub(super) fn set_six_bits(factors: &mut [u8], lane: usize, six: [u32; 2 * SUPER]) {
    for k in 0..3 {
        let five = (0..5).fold(0, |word, i| word | six[5 * k + i] << (6 * i));
        let word: u32 = five | (six[15] >> (2 * k) & 3) << 30;
        factors[4 * GROUP + (k * GROUP + lane) * 4..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

/// Writes the codes of a block, [column, row].
pub(super) fn set_codes(bits: Bits, to: &mut [u8], codes: &[[u8; GROUP]; COLUMNS]) {
    for (c, rows) in codes.iter().enumerate() {
        let (step, j) = (c / STEP, c % STEP);
        for (lane, &code) in rows.iter().enumerate() {
            match bits {
                Bits::Eight => to[step * LINE + lane * STEP + j] = code,
                Bits::Four if step < 4 => to[step * LINE + lane * STEP + j] = code,
                Bits::Four => to[(step - 4) * LINE + lane * STEP + j] |= code << 4,
            }
        }
    }
}

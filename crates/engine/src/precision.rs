//! Reduced-precision number formats for anchor states and inference weights.
//!
//! ```text
//! bf16: the upper half of an f32, rounded to nearest, ties to even
//! int8: v ≈ scale · code, one scale per row: scale = max |v| / 127, code = round(v / scale)
//! q8:   v ≈ scale · code, one scale in f16 per 32 numbers of a row
//! q4:   v ≈ scale · code − min, 0 ≤ code ≤ 15, with scale and min of six bits per 32 numbers of a row
//! ```

use std::fmt;
use std::str::FromStr;

use crate::ops::pack::blocks::Bits;

/// Precision of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// 32 bits, exact.
    #[default]
    F32,
    /// 8 significant bits; half the size of f32.
    Bf16,
    /// One byte per number plus one scale per row; about a quarter of the size of f32.
    Int8,
    /// One byte per number plus one scale per 32 numbers; 8.5 bits. Products are computed in integers.
    Q8,
    /// Four bits per number plus a scale and a minimum per 32 numbers; 4.5 bits. Products are computed in integers.
    Q4,
}

impl Precision {
    /// All of them, the largest first.
    pub const ALL: [Self; 5] = [Self::F32, Self::Bf16, Self::Int8, Self::Q8, Self::Q4];

    /// Size in bytes of `rows` rows of `width` numbers. In `q8` and `q4`, rows are padded to multiples of 16 and columns
    /// to multiples of 32.
    pub fn bytes(self, rows: usize, width: usize) -> usize {
        match self {
            Self::F32 => rows * width * size_of::<f32>(),
            Self::Bf16 => rows * width * size_of::<u16>(),
            Self::Int8 => rows * (width + size_of::<f32>()),
            Self::Q8 => Bits::Eight.bytes(rows, width),
            Self::Q4 => Bits::Four.bytes(rows, width),
        }
    }
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.into_iter().find(|precision| precision.name() == text);
        found.ok_or_else(|| format!("is `{text}`; it must be `f32`, `bf16`, `int8`, `q8` or `q4`"))
    }
}

impl Precision {
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Q8 => "q8",
            Self::Q4 => "q4",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Precision of anchor states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Storage {
    /// 32 bits, exact.
    #[default]
    F32,
    /// 8 significant bits; half the size of f32.
    Bf16,
    /// One byte per number plus one scale per row; about a quarter of the size of f32.
    Int8,
}

impl From<Storage> for Precision {
    fn from(storage: Storage) -> Self {
        match storage {
            Storage::F32 => Self::F32,
            Storage::Bf16 => Self::Bf16,
            Storage::Int8 => Self::Int8,
        }
    }
}

impl Storage {
    /// All of them, the largest first.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Int8];

    /// Size in bytes of `rows` rows of `width` numbers.
    pub fn bytes(self, rows: usize, width: usize) -> usize {
        Precision::from(self).bytes(rows, width)
    }
}

impl FromStr for Storage {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.into_iter().find(|&storage| Precision::from(storage).name() == text);
        found.ok_or_else(|| format!("is `{text}`; it must be `f32`, `bf16` or `int8`"))
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Precision::from(*self).fmt(f)
    }
}

/// Bits of the nearest bf16 number.
#[inline]
pub fn to_bf16(v: f32) -> u16 {
    half::bf16::from_f32(v).to_bits()
}

/// Converts bf16 bits to f32.
#[inline(always)]
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Quantises a row into `codes` and returns its scale.
pub fn to_int8(row: &[f32], codes: &mut [i8]) -> f32 {
    let largest = row.iter().fold(0.0f32, |m, v| if v.abs() > m { v.abs() } else { m });
    let scale = largest / 127.0;
    // Rows of zeros, and rows whose scale would be subnormal, are quantised to zeros.
    let inverse = if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
    for (code, v) in codes.iter_mut().zip(row) {
        *code = (v * inverse).round().clamp(-127.0, 127.0) as i8;
    }
    scale
}

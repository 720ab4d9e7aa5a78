//! Reduced-precision number formats for anchor states and inference weights.
//!
//! ```text
//! bf16: the upper half of an f32, rounded to nearest, ties to even
//! int8: v ≈ scale · code, one scale per row: scale = max |v| / 127, code = round(v / scale)
//! ```

use std::fmt;
use std::str::FromStr;

/// Storage precision of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// 32 bits, exact.
    #[default]
    F32,
    /// 8 significant bits; half the size of f32.
    Bf16,
    /// One byte per number plus one scale per row; about a quarter of the size of f32.
    Int8,
}

impl Precision {
    /// Size in bytes of `rows` rows of `width` numbers.
    pub fn bytes(self, rows: usize, width: usize) -> usize {
        match self {
            Self::F32 => rows * width * size_of::<f32>(),
            Self::Bf16 => rows * width * size_of::<u16>(),
            Self::Int8 => rows * (width + size_of::<f32>()),
        }
    }
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            "int8" => Ok(Self::Int8),
            _ => Err(format!("is `{text}`; it must be `f32`, `bf16` or `int8`")),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        })
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

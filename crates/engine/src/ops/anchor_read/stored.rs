//! Anchor states as a bank stores them: f32, bf16, or int8 with one scale a row. Dequantised a tile at a time.

use std::fmt;
use std::str::FromStr;

use half::bf16;

use crate::error::{Result, bad_shape};
use crate::simd::{self, LANES, Simd};

/// The precision of stored anchor states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Storage {
    /// Exact.
    #[default]
    F32,
    /// Eight bits of mantissa, half the bytes.
    Bf16,
    /// One byte a number and a scale for each row of d_v, about a quarter of the bytes.
    Int8,
}

impl Storage {
    /// Bytes of `rows` rows of `width` numbers.
    pub fn bytes(self, rows: usize, width: usize) -> usize {
        match self {
            Self::F32 => 4 * rows * width,
            Self::Bf16 => 2 * rows * width,
            Self::Int8 => rows * width + 4 * rows,
        }
    }
}

impl FromStr for Storage {
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

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        })
    }
}

/// Stored states [n, value_heads, d_k, d_v].
#[derive(Clone, Debug)]
pub struct StoredStates {
    shape: [usize; 4],
    data: Data,
}

#[derive(Clone, Debug)]
enum Data {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    Int8 { codes: Vec<i8>, scales: Vec<f32> },
}

impl StoredStates {
    /// Stores states [n, value_heads, d_k, d_v].
    pub fn new(data: &[f32], shape: &[usize], storage: Storage) -> Result<Self> {
        let &[n, heads, key_dim, value_dim] = shape else {
            return bad_shape("store_states", "states", shape, "[anchors, value_heads, d_k, d_v]");
        };
        let shape = [n, heads, key_dim, value_dim];
        let data = match storage {
            Storage::F32 => Data::F32(data.to_vec()),
            Storage::Bf16 => Data::Bf16(data.iter().map(|&v| bf16::from_f32(v).to_bits()).collect()),
            Storage::Int8 => {
                let mut codes = Vec::with_capacity(data.len());
                let mut scales = Vec::with_capacity(n * heads * key_dim);
                for row in data.chunks_exact(value_dim.max(1)) {
                    let largest = row.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    let scale = largest / 127.0;
                    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                    codes.extend(row.iter().map(|v| (v * inverse).round().clamp(-127.0, 127.0) as i8));
                    scales.push(scale);
                }
                Data::Int8 { codes, scales }
            }
        };
        Ok(Self { shape, data })
    }

    /// [n, value_heads, d_k, d_v].
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The precision.
    pub fn storage(&self) -> Storage {
        match self.data {
            Data::F32(_) => Storage::F32,
            Data::Bf16(_) => Storage::Bf16,
            Data::Int8 { .. } => Storage::Int8,
        }
    }

    /// Bytes of the numbers and scales.
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(v) => v.len() * 4,
            Data::Bf16(v) => v.len() * 2,
            Data::Int8 { codes, scales } => codes.len() + scales.len() * 4,
        }
    }

    /// All states as f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let width = self.shape[3].max(1);
        match &self.data {
            Data::F32(v) => v.clone(),
            Data::Bf16(v) => v.iter().map(|&b| bf16::from_bits(b).to_f32()).collect(),
            Data::Int8 { codes, scales } => codes
                .chunks_exact(width)
                .zip(scales)
                .flat_map(|(r, &s)| r.iter().map(move |&c| f32::from(c) * s))
                .collect(),
        }
    }

    /// State (`n`, `head`) where it lies, if it is stored as f32.
    pub(crate) fn plain(&self, n: usize, head: usize) -> Option<&[f32]> {
        let [_, heads, rows, cols] = self.shape;
        let at = (n * heads + head) * rows * cols;
        match &self.data {
            Data::F32(v) => v.get(at..at + rows * cols),
            _ => None,
        }
    }

    /// Writes state (`n`, `head`) into panels.
    #[inline(always)]
    pub(crate) fn pack<S: Simd>(&self, s: S, n: usize, head: usize, panels: &mut [f32]) {
        let [_, heads, rows, cols] = self.shape;
        let (at, rp) = ((n * heads + head) * rows * cols, simd::padded(rows));
        if let Data::F32(v) = &self.data {
            return simd::pack(rows, cols, &v[at..at + rows * cols], panels);
        }
        panels[..rp * simd::padded(cols)].fill(0.0);
        for r in 0..rows {
            for c in (0..cols).step_by(LANES) {
                let from = at + r * cols + c;
                let to = (c / simd::PANEL) * rp * simd::PANEL + r * simd::PANEL + c % simd::PANEL;
                let width = LANES.min(cols - c);
                let to = &mut panels[to..to + LANES];
                match &self.data {
                    Data::F32(_) => {}
                    Data::Bf16(v) if width == LANES => s.store(to, s.load_bf16(&v[from..])),
                    Data::Bf16(v) => {
                        (0..width).for_each(|i| to[i] = bf16::from_bits(v[from + i]).to_f32());
                    }
                    Data::Int8 { codes, scales } => {
                        let scale = scales[(n * heads + head) * rows + r];
                        if width == LANES {
                            s.store(to, s.mul(s.load_i8(&codes[from..]), s.splat(scale)));
                        } else {
                            (0..width).for_each(|i| to[i] = f32::from(codes[from + i]) * scale);
                        }
                    }
                }
            }
        }
    }
}

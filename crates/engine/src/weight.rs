//! Weights in reduced precision, for inference.
//!
//! Packed weights have their own types, so that only the operations that can read them accept them: products with
//! weights, embeddings and losses, all without gradients. These operations take a [`Weight`], which is either a
//! tensor or a packed weight.
#![allow(unsafe_code)]

use crate::cpu::{Cpu, Shared};
use crate::error::{Result, bad_shape, bad_value};
use crate::precision::{Precision, from_bf16, to_bf16, to_int8};
use crate::tensor::{Real, Tensor};

/// Weight matrix in full precision or packed in reduced precision.
#[derive(Clone, Copy, Debug)]
pub enum Weight<T, P> {
    /// A tensor of the engine.
    Full(T),
    /// A weight made by [`crate::Engine::pack`].
    Packed(P),
}

impl<T, P> Weight<T, P> {
    /// Borrows the tensor or the packed weight.
    pub fn as_ref(&self) -> Weight<&T, &P> {
        match self {
            Self::Full(tensor) => Weight::Full(tensor),
            Self::Packed(packed) => Weight::Packed(packed),
        }
    }

    /// Applies `f` to the tensor of a full weight.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Weight<U, P> {
        match self {
            Self::Full(tensor) => Weight::Full(f(tensor)),
            Self::Packed(packed) => Weight::Packed(packed),
        }
    }

    /// Tensor of a full weight; `None` for a packed one.
    pub fn full(&self) -> Option<&T> {
        match self {
            Self::Full(tensor) => Some(tensor),
            Self::Packed(_) => None,
        }
    }
}

/// Lets a plain tensor be passed where a packed weight is accepted.
impl<T, P> From<T> for Weight<T, P> {
    fn from(tensor: T) -> Self {
        Self::Full(tensor)
    }
}

/// Elements of a weight in storage format.
#[derive(Clone, Copy)]
pub(crate) enum RawWeight<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    /// One scale per row; the codes of a row are in the order of [`place`].
    Int8 {
        codes: &'a [i8],
        scales: &'a [f32],
    },
}

/// Words reserved for the scales, so that the codes start on a cache line.
fn scale_room(rows: usize) -> usize {
    rows.next_multiple_of(16)
}

/// Index of element `i` among the `width` int8 codes of its row. In each full block of 32, code 8j + i is byte 4i +
/// j: one 32-byte load then yields four vectors in element order using only shifts and masks.
pub(crate) fn place(i: usize, width: usize) -> usize {
    if i < width / BLOCK * BLOCK { i / BLOCK * BLOCK + i % 8 * 4 + i % BLOCK / 8 } else { i }
}

/// Number of codes per reordered block.
pub(crate) const BLOCK: usize = 32;

/// Packed weight [rows, width] of the CPU engine. Cloning copies a handle.
#[derive(Clone)]
pub struct PackedWeight {
    shape: [usize; 2],
    precision: Precision,
    /// Storage: f32 values; bf16 codes, two per word; or f32 scales followed by int8 codes, four per word.
    words: Tensor<f32>,
}

impl std::fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PackedWeight{:?} in {}", self.shape, self.precision)
    }
}

impl PackedWeight {
    /// Dimensions, [rows, width].
    pub fn shape(&self) -> &[usize; 2] {
        &self.shape
    }

    /// Storage precision.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Elements in storage format.
    pub(crate) fn raw(&self) -> RawWeight<'_> {
        let [rows, width] = self.shape;
        let (len, words) = (rows * width, self.words.data());
        match self.precision {
            Precision::F32 => RawWeight::F32(words),
            Precision::Bf16 => {
                assert!(words.len() * 2 >= len);
                // SAFETY: the memory holds `len` codes, and every bit pattern is a valid code.
                RawWeight::Bf16(unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), len) })
            }
            Precision::Int8 => {
                let (scales, codes) = words.split_at(scale_room(rows));
                assert!(codes.len() * 4 >= len);
                // SAFETY: the memory holds `len` codes, and every bit pattern is a valid code.
                let codes = unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), len) };
                RawWeight::Int8 { codes, scales: &scales[..rows] }
            }
        }
    }

    /// Dequantised values.
    pub(crate) fn numbers(&self) -> Vec<f32> {
        match self.raw() {
            RawWeight::F32(v) => v.to_vec(),
            RawWeight::Bf16(v) => v.iter().map(|&bits| from_bf16(bits)).collect(),
            RawWeight::Int8 { codes, scales } => codes
                .chunks_exact(self.shape[1].max(1))
                .zip(scales)
                .flat_map(|(row, &scale)| {
                    (0..row.len()).map(move |i| f32::from(row[place(i, row.len())]) * scale)
                })
                .collect(),
        }
    }
}

impl<'a> Weight<&'a Tensor<f32>, &'a PackedWeight> {
    /// Elements in storage format.
    pub(crate) fn raw(self) -> RawWeight<'a> {
        match self {
            Self::Full(tensor) => RawWeight::F32(tensor.data()),
            Self::Packed(packed) => packed.raw(),
        }
    }

    /// Dimensions.
    pub(crate) fn shape(self) -> &'a [usize] {
        match self {
            Self::Full(tensor) => tensor.shape(),
            Self::Packed(packed) => packed.shape(),
        }
    }
}

/// Checks that a weight can be packed, and returns its rows and width.
pub(crate) fn check_shape(shape: &[usize]) -> Result<[usize; 2]> {
    match *shape {
        [rows, width] => Ok([rows, width]),
        _ => bad_shape("pack", "weight", shape, "two dimensions [rows, width]"),
    }
}

/// Rejects numbers that the precision cannot represent; `numbers` are rows of `width`.
pub fn check_packable<R: Real>(numbers: &[R], width: usize, precision: Precision) -> Result<()> {
    if precision == Precision::Int8
        && let Some(at) = numbers.iter().position(|v| !v.is_finite())
    {
        let message = format!("row {} holds a number that is not finite, which int8 cannot hold", at / width);
        return bad_value("pack", message);
    }
    Ok(())
}

/// Like [`check_shape`], but also rejects values that the precision cannot represent.
fn check<R: Real>(weight: &Tensor<R>, precision: Precision) -> Result<[usize; 2]> {
    let [rows, width] = check_shape(weight.shape())?;
    check_packable(weight.data(), width, precision)?;
    Ok([rows, width])
}

/// Packs a weight, using all threads.
pub(crate) fn pack(cpu: &Cpu, weight: &Tensor<f32>, precision: Precision) -> Result<PackedWeight> {
    let shape @ [rows, width] = check(weight, precision)?;
    let (scale_words, code_words) = match precision {
        Precision::F32 => return Ok(PackedWeight { shape, precision, words: weight.clone() }),
        Precision::Bf16 => (0, (rows * width).div_ceil(2)),
        Precision::Int8 => (scale_room(rows), (rows * width).div_ceil(4)),
    };
    let mut words = cpu.uninit(&[scale_words + code_words]);
    let (scales, codes) = words.data_mut().split_at_mut(scale_words);
    let scales = Shared::new(scales);
    let bytes = codes.len() * 4;
    // SAFETY: the same memory as bytes, which have alignment 1 and no invalid bit patterns.
    let codes =
        Shared::new(unsafe { std::slice::from_raw_parts_mut(codes.as_mut_ptr().cast::<u8>(), bytes) });
    cpu.for_rows(cpu.row_parts(rows, width), |_, range| {
        for r in range {
            let row = &weight.data()[r * width..][..width];
            match precision {
                Precision::F32 => {}
                Precision::Bf16 => {
                    // SAFETY: each row has its own disjoint part.
                    let to = unsafe { codes.part(2 * r * width, 2 * width) };
                    for (to, &v) in to.chunks_exact_mut(2).zip(row) {
                        to.copy_from_slice(&to_bf16(v).to_ne_bytes());
                    }
                }
                Precision::Int8 => {
                    // SAFETY: each row has its own disjoint part.
                    let (to, scale) = unsafe { (codes.part(r * width, width), scales.part(r, 1)) };
                    let mut codes = vec![0; width];
                    scale[0] = to_int8(row, &mut codes);
                    for (i, code) in codes.into_iter().enumerate() {
                        to[place(i, width)] = code.cast_unsigned();
                    }
                }
            }
        }
    });
    Ok(PackedWeight { shape, precision, words })
}

/// Packed weight of the reference engine: rounded like the CPU engine's, but stored as f64.
#[derive(Clone, Debug)]
pub struct RoundedWeight {
    shape: [usize; 2],
    precision: Precision,
    numbers: Tensor<f64>,
}

impl RoundedWeight {
    /// Rounds a weight to the given precision.
    pub(crate) fn new(weight: &Tensor<f64>, precision: Precision) -> Result<Self> {
        let shape @ [rows, width] = check(weight, precision)?;
        let mut data = Vec::with_capacity(rows * width);
        for row in weight.data().chunks_exact(width.max(1)) {
            let row: Vec<f32> = row.iter().map(|&v| v as f32).collect();
            match precision {
                Precision::F32 => data.extend(row.iter().map(|&v| f64::from(v))),
                Precision::Bf16 => data.extend(row.iter().map(|&v| f64::from(from_bf16(to_bf16(v))))),
                Precision::Int8 => {
                    let mut codes = vec![0; width];
                    let scale = to_int8(&row, &mut codes);
                    data.extend(codes.iter().map(|&code| f64::from(code) * f64::from(scale)));
                }
            }
        }
        Ok(Self { shape, precision, numbers: Tensor::detached(data, &shape) })
    }

    /// Dimensions, [rows, width].
    pub fn shape(&self) -> &[usize; 2] {
        &self.shape
    }

    /// Precision that the values are rounded to.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Rounded values, [rows, width].
    pub(crate) fn numbers(&self) -> &Tensor<f64> {
        &self.numbers
    }
}

impl<'a> Weight<&'a Tensor<f64>, &'a RoundedWeight> {
    /// Values, [rows, width].
    pub(crate) fn numbers(self) -> &'a Tensor<f64> {
        match self {
            Self::Full(tensor) => tensor,
            Self::Packed(rounded) => rounded.numbers(),
        }
    }
}

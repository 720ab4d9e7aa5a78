//! Weights of inference in fewer bits: a tensor [rows, width] whose buffer holds bf16 numbers, or scales and then
//! signed bytes. Only products with weights, embeddings and losses read them; all else refuses them ([`dense`]).
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::cpu::{Cpu, Shared};
use crate::error::{Result, bad_shape, bad_value};
use crate::precision::{Precision, from_bf16, to_bf16, to_int8};
use crate::tensor::{Pool, Real, Tensor};

/// The numbers of a weight as they lie in memory.
#[derive(Clone, Copy)]
pub(crate) enum Weight<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    /// One scale for each row; the codes of a row are in the order of [`place`].
    Int8 {
        codes: &'a [i8],
        scales: &'a [f32],
    },
}

/// Numbers of a buffer that hold the scales, so that the codes start on a cache line.
fn scale_room(rows: usize) -> usize {
    rows.next_multiple_of(16)
}

/// Where the code of number `i` stands among the `width` int8 codes of its row. In each whole block of 32, code
/// 8j + i is byte 4i + j: one read of 32 bytes then gives four vectors in the numbers' order with shifts alone.
pub(crate) fn place(i: usize, width: usize) -> usize {
    if i < width / BLOCK * BLOCK { i / BLOCK * BLOCK + i % 8 * 4 + i % BLOCK / 8 } else { i }
}

/// Codes that stand in an order of their own.
pub(crate) const BLOCK: usize = 32;

impl Tensor<f32> {
    /// The numbers, whatever their precision.
    pub(crate) fn weight(&self) -> Weight<'_> {
        let (len, words) = (self.len(), self.words());
        match self.precision() {
            Precision::F32 => Weight::F32(self.data()),
            Precision::Bf16 => {
                assert!(words.len() * 2 >= len);
                // SAFETY: the buffer has room for `len` codes; any bits are a number.
                Weight::Bf16(unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), len) })
            }
            Precision::Int8 => {
                let rows = self.shape()[0];
                let (scales, codes) = words.split_at(scale_room(rows));
                assert!(codes.len() * 4 >= len);
                // SAFETY: as above.
                let codes = unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), len) };
                Weight::Int8 { codes, scales: &scales[..rows] }
            }
        }
    }

    /// The numbers as f32, whatever their precision.
    pub(crate) fn numbers(&self) -> Vec<f32> {
        match self.weight() {
            Weight::F32(v) => v.to_vec(),
            Weight::Bf16(v) => v.iter().map(|&bits| from_bf16(bits)).collect(),
            Weight::Int8 { codes, scales } => codes
                .chunks_exact(self.width().max(1))
                .zip(scales)
                .flat_map(|(row, &scale)| {
                    (0..row.len()).map(move |i| f32::from(row[place(i, row.len())]) * scale)
                })
                .collect(),
        }
    }

    /// A weight [rows, width] to be filled.
    fn packed(pool: &Arc<Pool<f32>>, shape: &[usize; 2], precision: Precision) -> Self {
        let [rows, width] = *shape;
        let words = match precision {
            Precision::F32 => rows * width,
            Precision::Bf16 => (rows * width).div_ceil(2),
            Precision::Int8 => scale_room(rows) + (rows * width).div_ceil(4),
        };
        Self::with_words(pool, words, shape, precision)
    }
}

/// The weight's shape, if it is a matrix of f32 that can be rounded.
fn check<R: Real>(weight: &Tensor<R>, precision: Precision) -> Result<[usize; 2]> {
    dense("quantize", [weight])?;
    let &[rows, width] = weight.shape() else {
        return bad_shape("quantize", "weight", weight.shape(), "two dimensions [rows, width]");
    };
    if let Some(at) = weight.data().iter().position(|v| !v.is_finite())
        && precision == Precision::Int8
    {
        return bad_value(
            "quantize",
            format!("row {} holds a number that is not finite, which int8 cannot", at / width),
        );
    }
    Ok([rows, width])
}

/// A weight in another precision, on all threads.
pub(crate) fn quantize(cpu: &Cpu, weight: &Tensor<f32>, precision: Precision) -> Result<Tensor<f32>> {
    let shape = check(weight, precision)?;
    if precision == Precision::F32 {
        return Ok(weight.clone());
    }
    let [rows, width] = shape;
    let mut packed = Tensor::packed(cpu.buffers(), &shape, precision);
    let (scales, codes) =
        packed.words_mut().split_at_mut(if precision == Precision::Int8 { scale_room(rows) } else { 0 });
    let scales = Shared::new(scales);
    let bytes = codes.len() * 4;
    // SAFETY: the same memory seen as bytes, which have no alignment and no invalid bits.
    let codes =
        Shared::new(unsafe { std::slice::from_raw_parts_mut(codes.as_mut_ptr().cast::<u8>(), bytes) });
    cpu.for_rows(cpu.row_parts(rows, width), |_, range| {
        for r in range {
            let row = &weight.data()[r * width..][..width];
            match precision {
                Precision::F32 => {}
                Precision::Bf16 => {
                    // SAFETY: each row has its own part.
                    let to = unsafe { codes.part(2 * r * width, 2 * width) };
                    for (to, &v) in to.chunks_exact_mut(2).zip(row) {
                        to.copy_from_slice(&to_bf16(v).to_ne_bytes());
                    }
                }
                Precision::Int8 => {
                    // SAFETY: each row has its own part.
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
    Ok(packed)
}

/// The same rounding; the rounded numbers stay f64.
pub(crate) fn quantize_reference(weight: &Tensor<f64>, precision: Precision) -> Result<Tensor<f64>> {
    let [rows, width] = check(weight, precision)?;
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
    Ok(Tensor::detached(data, &[rows, width]).with_precision(precision))
}

/// Refuses weights in another precision than f32, for operations that do not know them.
pub(crate) fn dense<'a, R: Real>(
    operation: &'static str,
    tensors: impl IntoIterator<Item = &'a Tensor<R>>,
) -> Result<()> {
    match tensors.into_iter().find(|tensor| tensor.precision() != Precision::F32) {
        None => Ok(()),
        Some(tensor) => bad_value(
            operation,
            format!(
                "a weight {:?} in {} came; only linear, embedding and the losses read such a weight, \
                 without gradients: use the f32 one here",
                tensor.shape(),
                tensor.precision()
            ),
        ),
    }
}

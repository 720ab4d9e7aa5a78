//! Weights in reduced precision, for inference.
//!
//! ```text
//! pack:    [rows, width] in f32  →  bf16, int8 with one scale per row, or blocks of codes (q8, q4)
//! unpack:  the values that it stands for, in f32
//! ```
//! A packed weight is a tensor of another number type. Only the operations that can read it accept it: products with
//! weights, embeddings and losses, all without gradients.
#![allow(unsafe_code)]

pub(crate) mod blocks;
mod quantise;
mod stored;

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::array::Array;
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::device::Device;
use crate::error::{Result, bad_shape, bad_value};
use crate::op::Op;
use crate::precision::{Precision, from_bf16, to_bf16, to_int8};
use crate::reference::Reference;
use crate::simd::wide::Path;
use crate::tensor::{Data, Tensor};
pub use blocks::Blocks;
use blocks::{Bits, GROUP};
use quantise::Quantise;
pub use stored::SharedBytes;

/// Packs a weight.
pub struct Pack {
    /// Weight, [rows, width].
    pub weight: Tensor,
    /// Number format of the result.
    pub precision: Precision,
}

impl Op for Pack {
    const NAME: &'static str = "pack";
    /// Rows and width.
    type Sizes = [usize; 2];
    type Output = Tensor;

    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.weight]
    }
    fn check(&self) -> Result<[usize; 2]> {
        match *self.weight.shape() {
            [rows, width] => Ok([rows, width]),
            _ => bad_shape("pack", "weight", self.weight.shape(), "two dimensions [rows, width]"),
        }
    }
}

/// Dequantises a packed weight.
pub struct Unpack {
    /// A weight made by [`Tensor::pack`].
    pub packed: Tensor,
}

impl Op for Unpack {
    const NAME: &'static str = "unpack";
    type Sizes = ();
    type Output = Tensor;

    fn inputs(&self) -> Vec<&Tensor> {
        Vec::new()
    }
    fn weights(&self) -> Vec<&Tensor> {
        vec![&self.packed]
    }
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

impl Tensor {
    /// Packs a weight [rows, width] in reduced precision, with one scale per row if the precision has scales.
    /// `linear`, `embedding` and the losses accept it in place of the full weight, without gradients.
    pub fn pack(&self, precision: Precision) -> Result<Tensor> {
        Pack { weight: self.detach(), precision }.run()
    }

    /// Values of a packed weight, [rows, width]; a plain tensor is returned as it is.
    pub fn unpack(&self) -> Result<Tensor> {
        if self.is_plain() { Ok(self.clone()) } else { Unpack { packed: self.clone() }.run() }
    }
}

/// Reads the numbers of a row into a slice.
pub type ReadRow<'a> = &'a (dyn Fn(usize, &mut [f32]) + Sync);

impl Tensor {
    /// [`Tensor::pack`] of a weight whose rows are read while it is packed, by all threads and each row once. On the CPU
    /// the weight is never in memory as a whole in f32.
    pub fn pack_rows(
        shape: [usize; 2],
        precision: Precision,
        device: &Device,
        read: ReadRow<'_>,
    ) -> Result<Tensor> {
        if let Some(cpu) = device.backend::<Cpu>() {
            return Ok(Tensor::new(Data::Packed(pack_rows(cpu, shape, precision, read)?), device));
        }
        let mut numbers = vec![0.0; shape[0] * shape[1]];
        for (r, row) in numbers.chunks_exact_mut(shape[1].max(1)).enumerate() {
            read(r, row);
        }
        Tensor::from_slice(&numbers, &shape, device)?.pack(precision)
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
    /// q8 or q4.
    Blocks(Blocks<'a>),
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

/// Packed weight [rows, width] of the CPU. Cloning copies a handle.
#[derive(Clone)]
pub struct PackedWeight {
    shape: [usize; 2],
    precision: Precision,
    words: Words,
}

/// Where the numbers of a packed weight are.
#[derive(Clone)]
enum Words {
    /// f32 values; bf16 codes, two per word; f32 scales followed by int8 codes, four per word; or blocks.
    Own(Array<f32>),
    /// bf16 codes or blocks in shared bytes, from an aligned place.
    Shared(SharedBytes, usize),
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

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.precision.bytes(self.shape[0], self.shape[1])
    }

    /// Where the numbers are.
    pub(crate) fn address(&self) -> usize {
        match self.raw() {
            RawWeight::F32(numbers) => numbers.as_ptr().addr(),
            RawWeight::Bf16(codes) => codes.as_ptr().addr(),
            RawWeight::Int8 { codes, .. } => codes.as_ptr().addr(),
            RawWeight::Blocks(blocks) => blocks.bytes.as_ptr().addr(),
        }
    }

    /// Elements in storage format.
    pub(crate) fn raw(&self) -> RawWeight<'_> {
        let [rows, width] = self.shape;
        let len = rows * width;
        let words = match &self.words {
            Words::Own(words) => words.data(),
            Words::Shared(bytes, start) => {
                let bytes = &(**bytes).as_ref()[*start..][..self.bytes()];
                if let Some(bits) = Bits::of(self.precision) {
                    return RawWeight::Blocks(Blocks { bits, bytes, rows, width });
                }
                assert!(bytes.len() == 2 * len);
                assert!(bytes.as_ptr().cast::<u16>().is_aligned());
                // SAFETY: the memory holds `len` codes, it is aligned, and every bit pattern is a valid code.
                let codes = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), len) };
                return RawWeight::Bf16(codes);
            }
        };
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
            Precision::Q8 | Precision::Q4 => {
                let bits = if self.precision == Precision::Q8 { Bits::Eight } else { Bits::Four };
                let len = bits.bytes(rows, width);
                assert!(words.len() * 4 >= len);
                // SAFETY: the memory holds `len` bytes.
                let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), len) };
                RawWeight::Blocks(Blocks { bits, bytes, rows, width })
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
            RawWeight::Blocks(blocks) => {
                let mut numbers = vec![0.0; self.shape[0] * self.shape[1]];
                let rows = numbers.chunks_exact_mut(self.shape[1].max(1));
                rows.enumerate().for_each(|(r, row)| blocks.row(r, row));
                numbers
            }
        }
    }
}

/// A weight of the CPU, packed or not, in storage format.
pub(crate) fn raw(weight: &Tensor) -> RawWeight<'_> {
    match weight.data() {
        Data::F32(array) => RawWeight::F32(array.data()),
        Data::Packed(packed) => packed.raw(),
        _ => unreachable!("the CPU runs only operations on its own weights"),
    }
}

/// Values of a weight of the reference device, packed or not, [rows, width].
pub(crate) fn numbers(weight: &Tensor) -> &Array<f64> {
    match weight.data() {
        Data::F64(array) => array,
        Data::Rounded(rounded) => rounded.numbers(),
        _ => unreachable!("the reference device runs only operations on its own weights"),
    }
}

/// Rejects numbers that the precision cannot represent; `numbers` are rows of `width`.
pub fn check_packable<R: Copy + Into<f64>>(numbers: &[R], width: usize, precision: Precision) -> Result<()> {
    match numbers.iter().position(|&v| !fits(v.into(), precision)) {
        Some(at) => refuse(at / width, numbers[at].into(), precision),
        None => Ok(()),
    }
}

fn fits(number: f64, precision: Precision) -> bool {
    match precision {
        Precision::F32 | Precision::Bf16 => true,
        Precision::Int8 => number.is_finite(),
        Precision::Q8 | Precision::Q4 => number.abs() <= f64::from(blocks::LARGEST),
    }
}

fn refuse<T>(row: usize, number: f64, precision: Precision) -> Result<T> {
    let message = if number.is_finite() {
        format!("row {row} holds {number:e}, but {precision} holds numbers up to {:e}", blocks::LARGEST)
    } else {
        format!("row {row} holds a number that is not finite, which {precision} cannot hold")
    };
    bad_value("pack", message)
}

/// Packs a weight, using all threads.
pub(crate) fn pack(cpu: &Cpu, op: Pack, shape: [usize; 2]) -> Result<Tensor> {
    let (weight, precision, width) = (op.weight.f32(), op.precision, shape[1]);
    let packed = if precision == Precision::F32 {
        PackedWeight { shape, precision, words: Words::Own(weight.clone()) }
    } else {
        pack_rows(cpu, shape, precision, &|r, row| row.copy_from_slice(&weight.data()[r * width..][..width]))?
    };
    Ok(op.weight.like(Data::Packed(packed)))
}

/// Packs the rows that `read` gives, using all threads.
fn pack_rows(
    cpu: &Cpu,
    shape @ [rows, width]: [usize; 2],
    precision: Precision,
    read: ReadRow<'_>,
) -> Result<PackedWeight> {
    let (scale_words, code_words) = match precision {
        Precision::Int8 => (scale_room(rows), (rows * width).div_ceil(4)),
        _ => (0, precision.bytes(rows, width).div_ceil(4)),
    };
    let mut words = cpu.uninit(&[scale_words + code_words]);
    let (scales, codes) = words.data_mut().split_at_mut(scale_words);
    let scales = Shared::new(scales);
    let len = codes.len() * 4;
    // SAFETY: the same memory as bytes, which have alignment 1 and no invalid bit patterns.
    let codes = Shared::new(unsafe { std::slice::from_raw_parts_mut(codes.as_mut_ptr().cast::<u8>(), len) });
    let bits = Bits::of(precision);
    let together = if bits.is_some() { GROUP } else { 1 };
    // The first row with a number that does not fit.
    let wrong = AtomicUsize::new(usize::MAX);
    cpu.for_rows(cpu.row_parts(rows.div_ceil(together), together * width), |_, range| {
        with_scratch(together * width, |scratch| {
            for g in range {
                let first = g * together;
                let count = (rows - first).min(together);
                let numbers = &mut scratch[..count * width];
                for i in 0..count {
                    read(first + i, &mut numbers[i * width..][..width]);
                }
                if let Some(at) = numbers.iter().position(|&v| !fits(v.into(), precision)) {
                    wrong.fetch_min(first + at / width, Ordering::Relaxed);
                    continue;
                }
                match (precision, bits) {
                    (_, Some(bits)) => {
                        let size = bits.group(width);
                        // SAFETY: each group has its own disjoint part.
                        let group = unsafe { codes.part(g * size, size) };
                        cpu.path().run(Quantise { bits, width, rows: numbers, group });
                    }
                    (Precision::Int8, _) => {
                        // SAFETY: each row has its own disjoint part.
                        let (to, scale) = unsafe { (codes.part(g * width, width), scales.part(g, 1)) };
                        let mut codes = vec![0; width];
                        scale[0] = to_int8(numbers, &mut codes);
                        for (i, code) in codes.into_iter().enumerate() {
                            to[place(i, width)] = code.cast_unsigned();
                        }
                    }
                    (Precision::Bf16, _) => {
                        // SAFETY: each row has its own disjoint part.
                        let to = unsafe { codes.part(2 * g * width, 2 * width) };
                        for (to, &v) in to.chunks_exact_mut(2).zip(&*numbers) {
                            to.copy_from_slice(&to_bf16(v).to_ne_bytes());
                        }
                    }
                    _ => {
                        // SAFETY: each row has its own disjoint part.
                        let to = unsafe { codes.part(4 * g * width, 4 * width) };
                        for (to, &v) in to.chunks_exact_mut(4).zip(&*numbers) {
                            to.copy_from_slice(&v.to_ne_bytes());
                        }
                    }
                }
            }
        });
    });
    let row = wrong.into_inner();
    if row < rows {
        let mut numbers = vec![0.0; width];
        read(row, &mut numbers);
        let number = numbers.into_iter().find(|&v| !fits(v.into(), precision));
        return refuse(row, number.map_or(f64::NAN, f64::from), precision);
    }
    Ok(PackedWeight { shape, precision, words: Words::Own(words) })
}

pub(crate) fn unpack(cpu: &Cpu, op: Unpack, (): ()) -> Result<Tensor> {
    let Data::Packed(packed) = op.packed.data() else { return bad_value("unpack", NOT_PACKED) };
    Ok(op.packed.like(cpu.from_slice(&packed.numbers(), packed.shape())?))
}

const NOT_PACKED: &str = "the tensor is not a packed weight";

/// [`pack`] on the reference device.
pub(crate) fn round(_: &Reference, op: Pack, shape: [usize; 2]) -> Result<Tensor> {
    check_packable(op.weight.f64().data(), shape[1], op.precision)?;
    Ok(op.weight.like(Data::Rounded(RoundedWeight::new(op.weight.f64(), shape, op.precision))))
}

/// [`unpack`] on the reference device.
pub(crate) fn unround(_: &Reference, op: Unpack, (): ()) -> Result<Tensor> {
    let Data::Rounded(rounded) = op.packed.data() else { return bad_value("unpack", NOT_PACKED) };
    Ok(op.packed.like(rounded.numbers().clone()))
}

/// Packed weight of the reference device: rounded like the CPU's, but stored as f64.
#[derive(Clone, Debug)]
pub struct RoundedWeight {
    shape: [usize; 2],
    precision: Precision,
    numbers: Array<f64>,
}

impl RoundedWeight {
    /// Rounds a weight to the given precision.
    fn new(weight: &Array<f64>, shape @ [rows, width]: [usize; 2], precision: Precision) -> Self {
        let mut data = Vec::with_capacity(rows * width);
        let lines: Vec<f32> = weight.data().iter().map(|&v| v as f32).collect();
        match precision {
            Precision::F32 => data.extend(lines.iter().map(|&v| f64::from(v))),
            Precision::Bf16 => data.extend(lines.iter().map(|&v| f64::from(from_bf16(to_bf16(v))))),
            Precision::Int8 => {
                let mut codes = vec![0; width];
                for row in lines.chunks_exact(width.max(1)) {
                    let scale = to_int8(row, &mut codes);
                    data.extend(codes.iter().map(|&code| f64::from(code) * f64::from(scale)));
                }
            }
            Precision::Q8 => rounded_rows(&lines, width, Bits::Eight, &mut data),
            Precision::Q4 => rounded_rows(&lines, width, Bits::Four, &mut data),
        }
        Self { shape, precision, numbers: Array::detached(data, &shape) }
    }

    /// Dimensions, [rows, width].
    pub fn shape(&self) -> &[usize; 2] {
        &self.shape
    }

    /// Precision that the values are rounded to.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Size in bytes of the packed weight that this stands for.
    pub(crate) fn bytes(&self) -> usize {
        self.precision.bytes(self.shape[0], self.shape[1])
    }

    /// Rounded values, [rows, width].
    pub(crate) fn numbers(&self) -> &Array<f64> {
        &self.numbers
    }
}

/// Appends the values that rows of `width` numbers have in blocks.
fn rounded_rows(rows: &[f32], width: usize, bits: Bits, to: &mut Vec<f64>) {
    let path = Path::detect();
    let (mut group, mut row) = (vec![0; bits.group(width)], vec![0.0; width]);
    for rows in rows.chunks(GROUP * width.max(1)) {
        path.run(Quantise { bits, width, rows, group: &mut group });
        let count = rows.len() / width.max(1);
        let blocks = Blocks { bits, bytes: &group, rows: count, width };
        for r in 0..count {
            blocks.row(r, &mut row);
            to.extend(row.iter().map(|&v| f64::from(v)));
        }
    }
}

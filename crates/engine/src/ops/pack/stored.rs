//! Weights as files hold them: bytes that stay where they are, and bytes to be written.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::blocks::{Bits, Blocks};
use super::{PackedWeight, RawWeight, RoundedWeight, Words};
use crate::array::Array;
use crate::bytes::plain_bytes;
use crate::cpu::Cpu;
use crate::device::Device;
use crate::error::{Result, bad_value};
use crate::precision::Precision;
use crate::reference::Reference;
use crate::tensor::{Data, Tensor};

/// Bytes that several weights share, such as a mapped file.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Where blocks must begin to be read in place: a line of codes is a cache line then.
const LINE: usize = 64;

impl Tensor {
    /// A weight in bf16, q8 or q4 whose bytes are a range of `bytes`. On the CPU they stay where they are; only blocks
    /// that do not begin at a cache line are copied. `None` if the device cannot use the bytes: for bf16 if it is not the
    /// CPU, if the machine is big-endian, or if the range is not aligned; for blocks if it has none.
    pub fn from_packed(
        bytes: SharedBytes,
        range: Range<usize>,
        shape @ [rows, width]: [usize; 2],
        precision: Precision,
        device: &Device,
    ) -> Result<Option<Tensor>> {
        let Some(own) = (*bytes).as_ref().get(range.clone()) else {
            return bad_value("from_packed", format!("bytes {range:?} are past the end"));
        };
        let expected = match precision {
            Precision::Bf16 => rows.checked_mul(width).and_then(|count| count.checked_mul(size_of::<u16>())),
            _ => precision.blocks_shape(rows, width).map(|[groups, group]| groups * group),
        };
        if expected != Some(own.len()) {
            let message = format!("{} bytes for {rows} rows of {width} numbers in {precision}", own.len());
            return bad_value("from_packed", message);
        }
        let blocks = Bits::of(precision).map(|bits| Blocks { bits, bytes: own, rows, width });
        let aligned = |to: usize| own.as_ptr().addr().is_multiple_of(to);
        let words = match (blocks, device.backend::<Cpu>()) {
            (Some(_), Some(_)) if aligned(LINE) => Words::Shared(bytes, range.start),
            (Some(_), Some(cpu)) => {
                let mut words = cpu.uninit(&[own.len() / 4]);
                let from = own.as_chunks().0;
                words.data_mut().iter_mut().zip(from).for_each(|(to, &word)| *to = f32::from_ne_bytes(word));
                Words::Own(words)
            }
            (None, Some(_)) if aligned(align_of::<u16>()) && cfg!(target_endian = "little") => {
                Words::Shared(bytes, range.start)
            }
            (Some(blocks), None) if device.backend::<Reference>().is_some() => {
                let rounded = RoundedWeight::of_blocks(&blocks, precision);
                return Ok(Some(Tensor::new(Data::Rounded(rounded), device)));
            }
            _ => return Ok(None),
        };
        Ok(Some(Tensor::new(Data::Packed(PackedWeight { shape, precision, words }), device)))
    }

    /// The bytes of a tensor of the CPU as a file holds them, little-endian. There are none for int8.
    pub fn file_bytes(&self) -> Result<Cow<'_, [u8]>> {
        let raw = match self.data() {
            Data::F32(array) => RawWeight::F32(array.data()),
            Data::Packed(packed) => packed.raw(),
            _ => {
                return bad_value("file_bytes", format!("a tensor in {} is on another device", self.dtype()));
            }
        };
        match raw {
            RawWeight::F32(numbers) => Ok(plain_bytes(numbers)),
            RawWeight::Bf16(codes) => Ok(plain_bytes(codes)),
            RawWeight::Blocks(blocks) => Ok(Cow::Borrowed(blocks.bytes)),
            RawWeight::Int8 { .. } => bad_value("file_bytes", "weights in int8 have no form in files"),
        }
    }
}

impl RoundedWeight {
    /// The values of blocks.
    fn of_blocks(blocks: &Blocks<'_>, precision: Precision) -> Self {
        let shape = [blocks.rows, blocks.width];
        let (mut data, mut row) = (Vec::with_capacity(shape[0] * shape[1]), vec![0.0; shape[1]]);
        for r in 0..shape[0] {
            blocks.row(r, &mut row);
            data.extend(row.iter().map(|&v| f64::from(v)));
        }
        Self { shape, precision, numbers: Array::detached(data, &shape) }
    }
}

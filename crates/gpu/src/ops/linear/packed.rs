//! Weights in reduced precision on the device.
//!
//! The host rounds them, once, exactly as the CPU does. Every row starts at a word of its own, so that kernels
//! read whole words: two codes in bf16, or four codes in int8 after the scales of all rows. The rest of a row's last
//! word is zero.

use std::sync::Arc;

use march_engine::ops::pack::{Pack, Unpack, check_packable};
use march_engine::{DType, Data, Error, Foreign, Precision, Result, Tensor, to_bf16, to_int8};

use crate::array::{GpuArray, array};
use crate::gpu::Gpu;
use crate::ops::embedding;
use crate::ops::product::Matrix;

/// Weight matrix [rows, width] in reduced precision on the device. Cloning copies a handle.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    shape: [usize; 2],
    precision: Precision,
    words: GpuArray,
}

pub(crate) fn pack(gpu: &Gpu, op: Pack, shape: [usize; 2]) -> Result<Tensor> {
    Ok(op.weight.like(Packed::new(gpu, array(&op.weight), shape, op.precision)?))
}

pub(crate) fn unpack(gpu: &Gpu, op: Unpack, (): ()) -> Result<Tensor> {
    let Some(packed) = op.packed.foreign::<Packed>() else {
        let message = "the tensor is not a packed weight".into();
        return Err(Error::Value { operation: "unpack", message });
    };
    let ids: Vec<u32> = (0..packed.shape[0] as u32).collect();
    Ok(op.packed.like(embedding::rows(gpu, packed.matrix(), &ids, &packed.shape)?))
}

impl Packed {
    fn new(gpu: &Gpu, weight: &GpuArray, shape: [usize; 2], precision: Precision) -> Result<Self> {
        let [rows, width] = shape;
        if matches!(precision, Precision::Q8 | Precision::Q4) {
            let message = format!("this device has no weights in {precision}; use f32, bf16 or int8");
            return Err(Error::Value { operation: "pack", message });
        }
        if precision == Precision::F32 {
            return Ok(Self { shape, precision, words: weight.clone() });
        }
        let numbers = gpu.download(weight);
        gpu.alive()?;
        check_packable(&numbers, width, precision)?;
        let lines = numbers.chunks_exact(width.max(1));
        let mut words = Vec::new();
        if precision == Precision::Bf16 {
            for pair in lines.flat_map(|row| row.chunks(2)) {
                let code = |i: usize| pair.get(i).map_or(0, |&v| u32::from(to_bf16(v)));
                words.push(code(0) | code(1) << 16);
            }
        } else {
            words.resize(rows, 0);
            let mut codes = vec![0i8; width.next_multiple_of(4)];
            for (r, row) in lines.enumerate() {
                words[r] = to_int8(row, &mut codes[..width]).to_bits();
                let bytes = codes.as_chunks().0.iter().map(|four| four.map(i8::cast_unsigned));
                words.extend(bytes.map(u32::from_le_bytes));
            }
        }
        Ok(Self { shape, precision, words: gpu.upload_indices(&words)? })
    }

    /// As kernels read it.
    pub fn matrix(&self) -> Matrix<'_> {
        let [rows, width] = self.shape;
        let (stride, format) = match self.precision {
            Precision::F32 => (width, 0),
            Precision::Bf16 => (width.div_ceil(2), 1),
            // `new` makes no others.
            Precision::Int8 | Precision::Q8 | Precision::Q4 => (width.div_ceil(4), 2),
        };
        Matrix { words: &self.words, rows, stride, format }
    }
}

impl Foreign for Packed {
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn dtype(&self) -> DType {
        self.precision.into()
    }
    fn is_plain(&self) -> bool {
        false
    }
    fn bytes(&self) -> usize {
        self.precision.bytes(self.shape[0], self.shape[1])
    }
}

impl From<Packed> for Data {
    fn from(packed: Packed) -> Self {
        Self::Foreign(Arc::new(packed))
    }
}

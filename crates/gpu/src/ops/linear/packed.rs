//! Weights in reduced precision on the device.
//!
//! The host rounds them, once, exactly as the CPU engine does. Every row starts at a word of its own, so that kernels
//! read whole words: two codes in bf16, or four codes in int8 after the scales of all rows. The rest of a row's last
//! word is zero.

use march_engine::{Precision, Result, check_packable, to_bf16, to_int8};

use crate::gpu::Gpu;
use crate::ops::product::Matrix;
use crate::tensor::Tensor;

/// Weight matrix [rows, width] in reduced precision on the device. Cloning copies a handle.
#[derive(Clone, Debug)]
pub struct Packed {
    shape: [usize; 2],
    precision: Precision,
    words: Tensor,
}

impl Packed {
    pub(crate) fn new(gpu: &Gpu, weight: &Tensor, precision: Precision) -> Result<Self> {
        let &[rows, width] = weight.shape() else { unreachable!("the engine checks it") };
        let shape = [rows, width];
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

    pub(crate) fn unpack(&self, gpu: &Gpu) -> Result<Tensor> {
        let [rows, _] = self.shape;
        let ids: Vec<u32> = (0..rows as u32).collect();
        crate::ops::embedding::rows(gpu, self.matrix(), &ids, &self.shape)
    }

    pub(crate) fn shape(&self) -> &[usize; 2] {
        &self.shape
    }

    pub(crate) fn precision(&self) -> Precision {
        self.precision
    }

    /// As kernels read it.
    pub(crate) fn matrix(&self) -> Matrix<'_> {
        let [rows, width] = self.shape;
        let (stride, format) = match self.precision {
            Precision::F32 => (width, 0),
            Precision::Bf16 => (width.div_ceil(2), 1),
            Precision::Int8 => (width.div_ceil(4), 2),
        };
        Matrix { words: &self.words, rows, stride, format }
    }
}

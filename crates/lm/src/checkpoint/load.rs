//! Loading models from checkpoint folders. These methods of the model are here because the model itself does not use
//! files.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use march_engine::{Device, Precision, SharedBytes, Tensor};
use safetensors::Dtype;

use super::Checkpoint;
use super::read::Kind;
use crate::error::Result;
use crate::model::{Model, ParameterSpec, Parameters, unpackable};

impl Model {
    /// Loads a model and its parameters from a checkpoint.
    pub fn load(device: &Device, checkpoint: &Checkpoint) -> Result<(Self, Parameters)> {
        Self::load_in(device, checkpoint, Precision::F32)
    }

    /// Loads a model and its parameters for inference, with weights in fewer bits; see [`Model::quantize`].
    pub fn load_in(
        device: &Device,
        checkpoint: &Checkpoint,
        weights: Precision,
    ) -> Result<(Self, Parameters)> {
        let model = Self::new(checkpoint.config());
        checkpoint.check(model.layout())?;
        let layout = model.layout();
        let mut parameters = Vec::with_capacity(layout.len());
        checkpoint.take_all(layout, |i| {
            parameters.push(checkpoint.parameter(device, &layout[i], weights)?);
            Ok(())
        })?;
        Ok((model, parameters))
    }

    /// The fingerprint of a checkpoint of this model, equal to [`Model::fingerprint`], without loading its numbers.
    pub fn checkpoint_fingerprint(&self, checkpoint: &Checkpoint) -> Result<String> {
        self.fingerprint_of(|i, places| checkpoint.sample(&self.layout()[i], places))
    }
}

impl Checkpoint {
    /// Precision in which most of the model is stored, or the nearest that the device multiplies by: q8 for the blocks of a
    /// GGUF file, bf16 for all of these on devices that do not have them.
    pub fn precision(&self, device: &Device) -> Precision {
        let count = |of: &dyn Fn(Kind) -> bool| -> usize {
            let of = self.tensors.values().filter(|(_, entry)| of(entry.kind));
            of.map(|(_, entry)| entry.shape.iter().product::<usize>()).sum()
        };
        let blocks = count(&|kind| matches!(kind, Kind::Blocks(_)));
        let [q8, q4] = [Precision::Q8, Precision::Q4].map(|own| count(&|kind| kind == Kind::Packed(own)));
        let small = blocks + q8 + q4 + count(&|kind| kind == Kind::Plain(Dtype::BF16));
        let packs = ["cpu", "reference"].contains(&device.name());
        match count(&|_| true) {
            all if 2 * q8 > all && packs => Precision::Q8,
            all if 2 * q4 > all && packs => Precision::Q4,
            all if 2 * blocks > all && device.name() == "cpu" => Precision::Q8,
            all if 2 * small > all => Precision::Bf16,
            _ => Precision::F32,
        }
    }

    /// A parameter for inference: as it lies in the file if that is possible, else converted while it is read.
    pub(crate) fn parameter(
        &self,
        device: &Device,
        spec: &ParameterSpec,
        weights: Precision,
    ) -> Result<Tensor> {
        let tensor = match spec.shape[..] {
            [rows, width] if weights != Precision::F32 && spec.is_matrix() => {
                let shape = [rows, width];
                if let Some((bytes, range)) = self.bytes_in(spec, weights)?
                    && let Some(mapped) = Tensor::from_packed(bytes, range, shape, weights, device)?
                {
                    return Ok(mapped);
                }
                packed(device, self, spec, shape, weights)?
            }
            _ => Tensor::from_slice(&self.tensor(spec)?, &spec.shape, device)?,
        };
        // Other parameters may be mapped parts of the same tensor; their pages come back when they are read.
        self.release(spec);
        Ok(tensor)
    }

    /// The bytes of a tensor in the file, if it holds exactly the parameter's numbers in this precision, in one piece.
    fn bytes_in(
        &self,
        parameter: &ParameterSpec,
        weights: Precision,
    ) -> Result<Option<(SharedBytes, Range<usize>)>> {
        let (file, entry, source) = self.find(parameter)?;
        let (start, ranges) = (entry.range.start, source.ranges());
        let range = match (entry.kind, &ranges[..]) {
            _ if !source.is_plain() => return Ok(None),
            (Kind::Plain(Dtype::BF16), [range]) if weights == Precision::Bf16 => {
                start + 2 * range.start..start + 2 * range.end
            }
            (Kind::Packed(own), _) if weights == own && source.rows.is_none() => entry.range.clone(),
            _ => return Ok(None),
        };
        Ok(Some((file.shared(), range)))
    }
}

/// Numbers of a matrix after which the pages of its file are released while it is packed.
const RELEASED: usize = 1 << 23;

/// Packs a matrix while it is read, so that it is never in memory as a whole, neither in f32 nor as the pages of its file.
fn packed(
    device: &Device,
    checkpoint: &Checkpoint,
    spec: &ParameterSpec,
    shape: [usize; 2],
    weights: Precision,
) -> Result<Tensor> {
    let read = checkpoint.reader(spec)?;
    let failed = Mutex::new(None);
    let (count, every) = (AtomicUsize::new(1), (RELEASED / shape[1].max(1)).max(1));
    let row = |r: usize, to: &mut [f32]| {
        if let Err(error) = read(r * shape[1], to) {
            to.fill(0.0);
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
        // A page that another thread still reads is mapped again.
        if count.fetch_add(1, Ordering::Relaxed).is_multiple_of(every) {
            checkpoint.release(spec);
        }
    };
    let packed = Tensor::pack_rows(shape, weights, device, &row);
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => packed.map_err(|error| unpackable(spec, &error)),
    }
}

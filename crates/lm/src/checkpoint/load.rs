//! Loading models from checkpoint folders. These methods of the model are here because the model itself does not use
//! files.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use march_engine::{Device, Precision, Tensor};

use super::Checkpoint;
use crate::error::Result;
use crate::model::{Model, ParameterSpec, Parameters, rounded, unpackable};

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
            let spec = &layout[i];
            if weights == Precision::Bf16
                && spec.is_matrix()
                && let Some((bytes, range)) = checkpoint.bf16_bytes(spec)?
                && let Some(mapped) = Tensor::from_bf16(bytes, range, &spec.shape, device)?
            {
                parameters.push(mapped);
                return Ok(());
            }
            if let [rows, width] = spec.shape[..]
                && weights != Precision::F32
                && spec.is_matrix()
            {
                parameters.push(packed(device, checkpoint, spec, [rows, width], weights)?);
                checkpoint.release(spec);
                return Ok(());
            }
            let numbers = checkpoint.tensor(spec)?;
            parameters.push(rounded(spec, Tensor::from_slice(&numbers, &spec.shape, device)?, weights)?);
            drop(numbers);
            // Other parameters may be mapped parts of the same tensor; their pages come back when they are read.
            checkpoint.release(spec);
            Ok(())
        })?;
        Ok((model, parameters))
    }

    /// The fingerprint of a checkpoint of this model, equal to [`Model::fingerprint`], without loading its numbers.
    pub fn checkpoint_fingerprint(&self, checkpoint: &Checkpoint) -> Result<String> {
        self.fingerprint_of(|i, places| checkpoint.sample(&self.layout()[i], places))
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

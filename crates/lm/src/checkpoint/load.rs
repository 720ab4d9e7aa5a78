//! Loading models from checkpoint folders. These methods of the model are here because the model itself does not use
//! files.

use std::sync::Arc;

use march_engine::{Device, Precision, Tensor, to_bf16};

use super::Checkpoint;
use crate::error::Result;
use crate::model::{Model, ParameterSpec, Parameters, rounded};

/// Numbers that are held in f32 at a time while a matrix is converted.
const BLOCK: usize = 1 << 20;

/// A matrix in bf16, converted block of rows by block of rows, so that it is never in memory in f32. `None` if the
/// device cannot read it.
fn bf16_by_rows(device: &Device, checkpoint: &Checkpoint, spec: &ParameterSpec) -> Result<Option<Tensor>> {
    let (rows, width) = (spec.shape[0], spec.shape[1]);
    let mut bytes = Vec::with_capacity(2 * rows * width);
    let block = (BLOCK / width.max(1)).max(1);
    let read = checkpoint.reader(spec)?;
    let mut numbers = vec![0.0; block.min(rows) * width];
    for start in (0..rows).step_by(block) {
        let numbers = &mut numbers[..block.min(rows - start) * width];
        read(start * width, numbers)?;
        bytes.extend(numbers.iter().flat_map(|number| to_bf16(*number).to_le_bytes()));
    }
    let all = 0..bytes.len();
    Ok(Tensor::from_bf16(Arc::new(bytes), all, &spec.shape, device)?)
}

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
            if weights == Precision::Bf16
                && spec.is_matrix()
                && checkpoint.is_in_blocks(spec)
                && let Some(packed) = bf16_by_rows(device, checkpoint, spec)?
            {
                parameters.push(packed);
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

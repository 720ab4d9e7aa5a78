//! Models from checkpoint folders. The model itself knows nothing of files, so these methods of it are here.

use march_engine::{Engine, Precision};

use super::Checkpoint;
use crate::error::Result;
use crate::model::{InferenceParameters, Model, ParameterSpec, Parameters, rounded};

impl<E: Engine> Model<E> {
    /// A model and its parameters from a checkpoint.
    pub fn load(engine: &E, checkpoint: &Checkpoint) -> Result<(Self, Parameters<E>)> {
        Self::load_each(engine, checkpoint, |_, tensor| Ok(tensor))
    }

    /// A model and its parameters for inference, with weights in fewer bits; see [`Model::quantize`].
    pub fn load_in(
        engine: &E,
        checkpoint: &Checkpoint,
        weights: Precision,
    ) -> Result<(Self, InferenceParameters<E>)> {
        Self::load_each(engine, checkpoint, |spec, tensor| rounded(engine, spec, tensor, weights))
    }

    /// A model from a checkpoint, and what `take` makes of each of its parameters.
    fn load_each<T>(
        engine: &E,
        checkpoint: &Checkpoint,
        take: impl Fn(&ParameterSpec, E::Tensor) -> Result<T>,
    ) -> Result<(Self, Vec<T>)> {
        let model = Self::new(checkpoint.config());
        checkpoint.check(model.layout())?;
        let mut parameters = Vec::with_capacity(model.layout().len());
        checkpoint.read_all(model.layout(), |i, numbers| {
            let spec = &model.layout()[i];
            parameters.push(take(spec, engine.from_f32(numbers, &spec.shape)?)?);
            Ok(())
        })?;
        Ok((model, parameters))
    }

    /// The fingerprint of a checkpoint of this model, as [`Model::fingerprint`] gives it, without its numbers in memory.
    pub fn checkpoint_fingerprint(&self, checkpoint: &Checkpoint) -> Result<String> {
        self.fingerprint_of(|i, places| checkpoint.sample(&self.layout()[i], places))
    }
}

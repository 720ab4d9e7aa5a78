//! Loading models from checkpoint folders. These methods of the model are here because the model itself does not use
//! files.

use march_engine::{Engine, Precision};

use super::Checkpoint;
use crate::error::Result;
use crate::model::{InferenceParameters, Model, ParameterSpec, Parameters, rounded};

impl<E: Engine> Model<E> {
    /// Loads a model and its parameters from a checkpoint.
    pub fn load(engine: &E, checkpoint: &Checkpoint) -> Result<(Self, Parameters<E>)> {
        Self::load_each(engine, checkpoint, |_, tensor| Ok(tensor))
    }

    /// Loads a model and its parameters for inference, with weights in fewer bits; see [`Model::quantize`].
    pub fn load_in(
        engine: &E,
        checkpoint: &Checkpoint,
        weights: Precision,
    ) -> Result<(Self, InferenceParameters<E>)> {
        Self::load_each(engine, checkpoint, |spec, tensor| rounded(engine, spec, tensor, weights))
    }

    /// Loads a model from a checkpoint, and applies `take` to each of its parameters.
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

    /// The fingerprint of a checkpoint of this model, equal to [`Model::fingerprint`], without loading its numbers.
    pub fn checkpoint_fingerprint(&self, checkpoint: &Checkpoint) -> Result<String> {
        self.fingerprint_of(|i, places| checkpoint.sample(&self.layout()[i], places))
    }
}

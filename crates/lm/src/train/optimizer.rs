//! AdamW on all parameters: moments, gradient clipping, and the choice of tensors that decay.

use march_engine::Engine;
use march_engine::ops::adamw::{AdamW, Step, clip_factor};

use super::TrainConfig;
use crate::error::Result;
use crate::model::ParameterSpec;

/// The moments of all parameters.
pub struct Optimizer<E: Engine> {
    pub(super) first: Vec<E::Tensor>,
    pub(super) second: Vec<E::Tensor>,
}

impl<E: Engine> Optimizer<E> {
    /// Creates moments of zero.
    pub fn new(engine: &E, layout: &[ParameterSpec]) -> Result<Self> {
        let zeros =
            || layout.iter().map(|spec| Ok(engine.full(&spec.shape, 0.0)?)).collect::<Result<Vec<_>>>();
        Ok(Self { first: zeros()?, second: zeros()? })
    }

    /// Updates all parameters, given the learning rate, the gradient's squared norm and the step's number from 1. A
    /// parameter that no gradient reached is updated with a zero gradient.
    pub(super) fn update(
        &mut self,
        engine: &E,
        layout: &[ParameterSpec],
        parameters: &mut [E::Tensor],
        gradients: &[Option<E::Tensor>],
        config: &TrainConfig,
        (learning_rate, squared_norm, step): (f64, f64, u64),
    ) -> Result<()> {
        let clip = clip_factor(squared_norm, config.clip_norm);
        for (i, spec) in layout.iter().enumerate() {
            let settings = Step {
                learning_rate,
                betas: config.betas,
                eps: config.eps,
                weight_decay: if spec.shape.len() >= 2 { config.weight_decay } else { 0.0 },
                clip,
                step,
            };
            let state = AdamW {
                parameter: &mut parameters[i],
                first_moment: &mut self.first[i],
                second_moment: &mut self.second[i],
            };
            match &gradients[i] {
                Some(gradient) => engine.adamw(state, gradient, &settings)?,
                None => engine.adamw(state, &engine.full(&spec.shape, 0.0)?, &settings)?,
            }
        }
        Ok(())
    }
}

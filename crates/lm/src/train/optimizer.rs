//! AdamW on all parameters: moments, gradient clipping, and the choice of tensors that decay.

use march_engine::Tensor;
use march_engine::ops::adamw::{self, AdamW, Step, clip_factor};

use super::TrainConfig;
use crate::error::Result;
use crate::model::Model;

/// The moments of the parameters that are trained.
pub struct Optimizer {
    pub(super) first: Vec<Option<Tensor>>,
    pub(super) second: Vec<Option<Tensor>>,
}

impl Optimizer {
    /// Creates moments of zero for the parameters that are `trained`.
    pub fn new(parameters: &[Tensor], trained: &[bool]) -> Result<Self> {
        let moment = |(parameter, trained): (&Tensor, &bool)| trained.then(|| zeros(parameter)).transpose();
        let moments = || parameters.iter().zip(trained).map(moment).collect::<Result<Vec<_>>>();
        Ok(Self { first: moments()?, second: moments()? })
    }

    /// Updates all parameters that have moments, given the learning rate, the gradient's squared norm and the step's number
    /// from 1. A parameter that no gradient reached is updated with a zero gradient.
    pub(super) fn update(
        &mut self,
        model: &Model,
        parameters: &mut [Tensor],
        gradients: &[Option<Tensor>],
        config: &TrainConfig,
        (rate, squared_norm, step): (f64, f64, u64),
    ) -> Result<()> {
        let clip = clip_factor(squared_norm, config.clip_norm);
        let routing = model.config().mixer.extension();
        for (i, spec) in model.layout().iter().enumerate() {
            let (Some(first_moment), Some(second_moment)) = (&mut self.first[i], &mut self.second[i]) else {
                continue;
            };
            let routes = routing.as_ref().is_some_and(|routing| routing.adds(&spec.name));
            let learning_rate = if routes { rate * config.routing_rate } else { rate };
            let gradient = match &gradients[i] {
                Some(gradient) => gradient.clone(),
                None => zeros(&parameters[i])?,
            };
            let settings = Step {
                learning_rate,
                betas: config.betas,
                eps: config.eps,
                weight_decay: if spec.shape.len() >= 2 { config.weight_decay } else { 0.0 },
                clip,
                step,
            };
            let state = AdamW { parameter: &mut parameters[i], first_moment, second_moment };
            adamw::update(state, &gradient, &settings)?;
        }
        Ok(())
    }
}

fn zeros(like: &Tensor) -> Result<Tensor> {
    Ok(Tensor::full(like.shape(), 0.0, like.device())?)
}

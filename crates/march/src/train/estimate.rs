//! How much memory a step will take, measured on a short text.

use march_engine::{Cpu, Tape};

use super::TrainKeys;
use crate::error::Result;
use crate::model::{Batch, Model, Parameters, Settings};

/// Bytes that a step takes, estimated before the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepMemory {
    /// Weights, gradients and both moments.
    pub parameters: usize,
    /// What the backward pass needs of one call's tokens.
    pub activations: usize,
    /// The same where blocks are computed again.
    pub recomputed: usize,
}

impl StepMemory {
    /// Runs the model forward on a short text and scales what it keeps to the calls that training will make.
    pub fn measure(
        engine: &Cpu,
        model: &Model<Cpu>,
        parameters: &Parameters<Cpu>,
        settings: &Settings,
        keys: &TrainKeys,
        sequence_length: usize,
    ) -> Result<Self> {
        let short = sequence_length.min(512);
        let ids = vec![0; short];
        let kept = |recompute: bool| -> Result<usize> {
            let settings = Settings { recompute, ..settings.clone() };
            let before = engine.live_bytes();
            let tape = Tape::new(engine);
            let weights = model.bind(&tape, parameters);
            let _hidden = model.forward(&tape, &weights, Batch::one(&ids), &settings, None)?;
            Ok(engine.live_bytes().saturating_sub(before))
        };
        let rows = keys.micro_batch.min(keys.tokens_per_step / sequence_length.max(1)).max(1);
        let scale = |bytes: usize| bytes / short * sequence_length * rows;
        let whole = scale(kept(false)?);
        let layers = model.config().num_hidden_layers;
        Ok(Self {
            parameters: 4 * size_of::<f32>() * model.parameter_count(),
            // The gradients of one block come on top.
            activations: whole + whole / layers,
            recomputed: scale(kept(true)?) + 2 * whole / layers,
        })
    }
}

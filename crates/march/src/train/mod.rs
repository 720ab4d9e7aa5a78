//! Learning: batches in, updated weights out.
//!
//! [`Trainer`] makes one step at a time and can be written to a checkpoint folder and read again such that going on
//! equals never having stopped, bit for bit. [`Run`] is the loop around it: validate, sample, save, step, log.

mod environment;
mod estimate;
mod keys;
mod optimizer;
mod run;
mod sources;
mod state;

use march_engine::{Engine, Tape};

use crate::data::Loader;
use crate::error::{Error, Result};
use crate::model::{Batch, Model, Parameters, Settings};

pub use environment::Session;
pub use estimate::StepMemory;
pub use keys::{DataKeys, TrainKeys};
pub use optimizer::Optimizer;
pub use run::{Event, Run, RunOptions, StepLine};
pub use state::Progress;

/// What one step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The mean loss of the step's tokens, in nats, before the update.
    pub loss: f64,
    /// The gradient's global norm, before the clip.
    pub gradient_norm: f64,
    /// The learning rate.
    pub rate: f64,
    /// Tokens learned from.
    pub tokens: usize,
}

/// A model that learns.
pub struct Trainer<'e, E: Engine> {
    engine: &'e E,
    model: Model<E>,
    parameters: Parameters<E>,
    optimizer: Optimizer<E>,
    settings: Settings,
    keys: TrainKeys,
    /// Sequences of one step.
    rows: usize,
    /// Steps made.
    step: u64,
}

impl<'e, E: Engine> Trainer<'e, E> {
    /// A trainer before its first step.
    pub fn new(
        engine: &'e E,
        model: Model<E>,
        parameters: Parameters<E>,
        settings: Settings,
        keys: TrainKeys,
        sequence_length: usize,
    ) -> Result<Self> {
        let optimizer = Optimizer::new(engine, model.layout())?;
        let rows = keys.tokens_per_step / sequence_length;
        Ok(Self { engine, model, parameters, optimizer, settings, keys, rows, step: 0 })
    }

    /// The model.
    pub fn model(&self) -> &Model<E> {
        &self.model
    }

    /// Its numbers.
    pub fn parameters(&self) -> &Parameters<E> {
        &self.parameters
    }

    /// Steps made.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Anchors and recomputation.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Computes blocks again in the backward pass, or not. The results are the same, bit for bit.
    pub fn set_recompute(&mut self, recompute: bool) {
        self.settings.recompute = recompute;
    }

    /// Learns from the loader's next sequences. A loss or gradient that is not finite changes nothing and is an
    /// error that says where it came from.
    pub fn advance(&mut self, loader: &mut Loader) -> Result<StepReport> {
        let length = loader.source().sequence_length();
        let tokens = self.rows * length;
        let mut gradients: Vec<Option<E::Tensor>> = vec![None; self.parameters.len()];
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        let (mut loss, mut left) = (0.0, self.rows);
        while left > 0 {
            let rows = left.min(self.keys.micro_batch);
            inputs.clear();
            targets.clear();
            loader.next(rows, &mut inputs, &mut targets)?;
            loss += self.micro_step(Batch { ids: &inputs, rows }, &targets, tokens, &mut gradients)?;
            left -= rows;
        }
        let mut squared = 0.0;
        for gradient in gradients.iter().flatten() {
            squared += self.engine.squared_norm(gradient)?;
        }
        if !(loss.is_finite() && squared.is_finite()) {
            return Err(self.diverged(loss, &gradients));
        }
        let rate = self.keys.rate(self.step);
        self.step += 1;
        self.optimizer.update(
            self.engine,
            self.model.layout(),
            &mut self.parameters,
            &gradients,
            &self.keys,
            (rate, squared, self.step),
        )?;
        Ok(StepReport { loss, gradient_norm: squared.sqrt(), rate, tokens })
    }

    /// Adds the gradients of some of the step's sequences; gives their part of the loss.
    fn micro_step(
        &self,
        batch: Batch<'_>,
        targets: &[u32],
        tokens: usize,
        gradients: &mut [Option<E::Tensor>],
    ) -> Result<f64> {
        let tape = Tape::new(self.engine);
        let weights = self.model.bind(&tape, &self.parameters);
        let hidden = self.model.forward(&tape, &weights, batch, &self.settings, None)?;
        let loss = self.model.loss(&tape, &weights, &hidden, targets, Some(tokens as f64))?;
        drop((weights, hidden));
        let mut failed = None;
        tape.backward(&loss, |key, gradient| match &mut gradients[key] {
            Some(sum) => failed = self.engine.accumulate(sum, &gradient).err().or(failed.take()),
            none => *none = Some(gradient),
        })?;
        match failed {
            Some(error) => Err(error.into()),
            None => Ok(self.engine.to_f64(loss.value())[0]),
        }
    }

    /// What to say of a loss or gradient that is not finite.
    fn diverged(&self, loss: f64, gradients: &[Option<E::Tensor>]) -> Error {
        let norm = |tensor: &E::Tensor| self.engine.squared_norm(tensor).map_or(f64::NAN, f64::sqrt);
        let mut text = format!(
            "step {}: the loss is {loss}, or a gradient is not finite; the weights were not changed.\n\
             Norms by layer (weights, gradient):",
            self.step + 1
        );
        let mut layers: Vec<(String, f64, f64)> = Vec::new();
        for (i, spec) in self.model.layout().iter().enumerate() {
            let part = match spec.name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) {
                Some((layer, _)) => format!("layer {layer}"),
                None => spec.name.clone(),
            };
            let weight = norm(&self.parameters[i]).powi(2);
            let gradient = gradients[i].as_ref().map_or(0.0, norm).powi(2);
            match layers.last_mut() {
                Some(last) if last.0 == part => {
                    last.1 += weight;
                    last.2 += gradient;
                }
                _ => layers.push((part, weight, gradient)),
            }
        }
        for (part, weight, gradient) in layers {
            text += &format!("\n  {part}: {:.3e}, {:.3e}", weight.sqrt(), gradient.sqrt());
        }
        text += "\nTry a lower `learning_rate`, a longer `warmup` or a lower `clip_norm`, and go on from the last \
                 checkpoint with --resume.";
        Error::Diverged(text)
    }

    /// The mean loss of given sequences, in nats a token.
    pub fn validate(&self, loader: &Loader, sequences: usize) -> Result<f64> {
        let length = loader.source().sequence_length();
        let count = (sequences as u64).min(loader.source().sequences());
        let (mut inputs, mut targets, mut total) = (Vec::new(), Vec::new(), 0.0);
        let settings = Settings { recompute: false, ..self.settings.clone() };
        let mut at = 0;
        while at < count {
            let rows = (count - at).min(self.keys.micro_batch as u64);
            inputs.clear();
            targets.clear();
            for i in at..at + rows {
                loader.source().sequence(i, &mut inputs, &mut targets)?;
            }
            let tape = Tape::inference(self.engine);
            let weights = self.model.bind(&tape, &self.parameters);
            let batch = Batch { ids: &inputs, rows: rows as usize };
            let hidden = self.model.forward(&tape, &weights, batch, &settings, None)?;
            let loss = self.model.loss(&tape, &weights, &hidden, &targets, Some(1.0))?;
            total += self.engine.to_f64(loss.value())[0];
            at += rows;
        }
        Ok(total / (count as f64 * length as f64))
    }
}

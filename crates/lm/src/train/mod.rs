//! Training: batches in, updated weights out.
//!
//! [`Trainer`] makes one step at a time. It can be saved to a checkpoint folder and restored such that resuming is
//! bit-identical to never having stopped. The training loop is in the module `run`.

mod config;
mod estimate;
mod optimizer;
pub mod ranks;
mod state;

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use march_engine::ops::adamw::squared_norm;
use march_engine::ops::cross_entropy::{IGNORE, TokenLosses};
use march_engine::{Device, Tape, Tensor};

use crate::data::Loader;
use crate::error::{Error, Result};
use crate::model::{Batch, Model, Parameters, Settings, Weights};
use ranks::{Overlap, Ranks, SingleProcess};

pub use config::{Only, Recompute, Schedule, TrainConfig};
pub use estimate::{MemoryPlan, StepMemory, machine_memory, training_bytes};
pub use optimizer::Optimizer;
pub use state::Progress;

/// The result of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// The mean loss of the step's tokens, in nats, before the update.
    pub loss: f64,
    /// The gradient's global norm, before clipping.
    pub gradient_norm: f64,
    /// The learning rate.
    pub rate: f64,
    /// Number of tokens trained on, in all processes.
    pub tokens: usize,
    /// How far summing gradients overlapped with the backward pass; `None` for a single process.
    pub overlap: Option<Overlap>,
}

/// The result of a validation on held-out sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Validation {
    /// The mean loss, in nats per target.
    pub loss: f64,
    /// The fraction of targets that are the most probable token.
    pub accuracy: f64,
}

/// A model in training.
pub struct Trainer {
    model: Model,
    parameters: Parameters,
    /// Which of the parameters are trained.
    trained: Vec<bool>,
    optimizer: Optimizer,
    settings: Settings,
    config: TrainConfig,
    /// Number of sequences per step, in all processes.
    rows: usize,
    ranks: RefCell<Box<dyn Ranks>>,
    /// Number of completed steps.
    step: u64,
}

impl Trainer {
    /// Creates a trainer before its first step.
    pub fn new(
        model: Model,
        parameters: Parameters,
        settings: Settings,
        config: TrainConfig,
        sequence_length: usize,
    ) -> Result<Self> {
        let trained = trained(&model, config.only);
        let optimizer = Optimizer::new(&parameters, &trained)?;
        let rows = config.tokens_per_step / sequence_length;
        Ok(Self {
            model,
            parameters,
            trained,
            optimizer,
            settings,
            config,
            rows,
            ranks: RefCell::new(Box::<SingleProcess>::default()),
            step: 0,
        })
    }

    /// Trains together with other processes. Each must have been created with the same arguments.
    pub fn with_ranks(mut self, ranks: Box<dyn Ranks>) -> Result<Self> {
        if ranks.count() > self.rows {
            return Err(Error::Request(format!(
                "a step has {} sequences, too few for {} processes; raise `tokens_per_step` or start fewer",
                self.rows,
                ranks.count()
            )));
        }
        self.ranks = RefCell::new(ranks);
        Ok(self)
    }

    /// This process's number, from 0, and the number of processes.
    pub fn rank(&self) -> (usize, usize) {
        let ranks = self.ranks.borrow();
        (ranks.rank(), ranks.count())
    }

    /// The number of sequences that this process computes at a time.
    pub fn rows_at_once(&self) -> usize {
        self.ranks.borrow().share(self.rows).len().min(self.config.micro_batch)
    }

    /// Sums elementwise over all processes.
    pub fn sum(&self, values: &mut [f64]) -> Result<()> {
        self.ranks.borrow_mut().sum(values)
    }

    /// The device that holds the parameters.
    fn device(&self) -> &Device {
        self.parameters[0].device()
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model's parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Number of parameters that are trained.
    pub fn trained_count(&self) -> usize {
        let specs = self.model.layout().iter().zip(&self.trained);
        specs.filter(|(_, trained)| **trained).map(|(spec, _)| spec.count()).sum()
    }

    /// Number of completed steps.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The settings for anchors and recomputation.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Trains on the loader's next sequences. A loss or gradient that is not finite changes nothing and is an error
    /// that says where it occurred.
    pub fn advance(&mut self, loader: &mut Loader) -> Result<StepReport> {
        let never = AtomicBool::new(false);
        // Nothing stops it, so there is a report.
        Ok(self.advance_unless(loader, &never)?.unwrap_or_default())
    }

    /// Like [`Trainer::advance`], but stops between two micro-batches once `stop` is set; then nothing has changed and
    /// there is no report. With several processes `stop` is ignored, because all would have to stop at the same point.
    pub fn advance_unless(&mut self, loader: &mut Loader, stop: &AtomicBool) -> Result<Option<StepReport>> {
        let tokens = self.rows * loader.source().sequence_length();
        // Gradients and the loss are divided by the expected number of targets, which all processes know before they have
        // counted theirs.
        let expected = (self.rows * loader.source().targets()) as f64;
        let mut counted = 0;
        let mut gradients: Vec<Option<Tensor>> = vec![None; self.parameters.len()];
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        let (mut loss, mut overlap) = (0.0, None);
        let (share, count) = {
            let ranks = self.ranks.borrow();
            (ranks.share(self.rows), ranks.count())
        };
        let first = loader.cursor();
        loader.seek(first.wrapping_add(share.start as u64));
        let mut left = share.len();
        while left > 0 {
            if count == 1 && stop.load(Ordering::Relaxed) {
                loader.seek(first);
                return Ok(None);
            }
            let rows = left.min(self.config.micro_batch);
            loader.next(rows, &mut inputs, &mut targets)?;
            left -= rows;
            counted += count_targets(&targets);
            let batch = Batch { ids: &inputs, rows };
            if left > 0 || count == 1 {
                loss += self.micro_step(batch, &targets, expected, &mut gradients, &mut |_, _| {})?;
            } else {
                let (part, sent) = self.summed_micro_step(batch, &targets, expected, &mut gradients)?;
                loss += part;
                overlap = Some(sent);
            }
        }
        loader.seek(first.wrapping_add(self.rows as u64));
        let squared = squared_norm(&gradients.iter().flatten().collect::<Vec<_>>())?;
        let mut counted = counted as f64;
        if count > 1 {
            [loss, counted] = self.agree([loss, counted], squared, count as f64)?;
        }
        // The report gives the mean of the targets that there were; the factor is exactly 1 if as many were expected.
        loss *= expected / counted.max(1.0);
        if !(loss.is_finite() && squared.is_finite()) {
            return Err(self.diverged(loss, &gradients));
        }
        let rate = self.config.rate(self.step);
        self.step += 1;
        self.optimizer.update(
            &self.model,
            &mut self.parameters,
            &gradients,
            &self.config,
            (rate, squared, self.step),
        )?;
        Ok(Some(StepReport { loss, gradient_norm: squared.sqrt(), rate, tokens, overlap }))
    }

    /// Adds the gradients of some of the step's sequences and returns their part of the loss. `ready` is called with
    /// each parameter's index once these sequences add nothing more to its gradient.
    fn micro_step(
        &self,
        batch: Batch<'_>,
        targets: &[u32],
        expected: f64,
        gradients: &mut [Option<Tensor>],
        ready: &mut dyn FnMut(usize, &mut [Option<Tensor>]),
    ) -> Result<f64> {
        let tape = Tape::new();
        let weights = self.model.bind_some(&tape, &self.parameters, &self.trained);
        let hidden = self.model.forward(&weights, batch, &self.settings, None)?;
        let loss = self.model.loss(&weights, &hidden, targets, Some(expected))?;
        drop((weights, hidden));
        let mut failed = None;
        tape.backward(&loss, |key, gradient| {
            match &mut gradients[key] {
                Some(sum) => failed = sum.accumulate(&gradient).err().or(failed.take()),
                none => *none = Some(gradient),
            }
            ready(key, gradients);
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let loss = loss.to_f64()[0];
        // The loss of a lost device is meaningless.
        self.device().check()?;
        Ok(loss)
    }

    /// The step's last [`Trainer::micro_step`] with several processes: gradients are summed as they become final.
    fn summed_micro_step(
        &self,
        batch: Batch<'_>,
        targets: &[u32],
        expected: f64,
        gradients: &mut [Option<Tensor>],
    ) -> Result<(f64, Overlap)> {
        let (mut loss, mut order) = (0.0, Vec::new());
        let mut ranks = self.ranks.borrow_mut();
        let mut backward = |hand_over: &mut ranks::HandOver<'_>| -> Result<()> {
            loss = self.micro_step(batch, targets, expected, gradients, &mut |key, gradients| {
                if let Some(gradient) = gradients[key].take() {
                    order.push(key);
                    hand_over(&gradient.to_f32());
                }
            })?;
            Ok(())
        };
        let (mut sums, overlap) = ranks.sum_during(self.trained_count(), &mut backward)?;
        for key in order {
            let spec = &self.model.layout()[key];
            let (own, rest) = sums.split_at(spec.count());
            gradients[key] = Some(Tensor::from_slice(own, &spec.shape, self.device())?);
            sums = rest;
        }
        Ok((loss, overlap))
    }

    /// Sums of the loss and the number of targets over all processes; fails if their gradients are not bit-identical.
    fn agree(&self, [loss, counted]: [f64; 2], squared: f64, count: f64) -> Result<[f64; 2]> {
        let bits = squared.to_bits();
        let halves = [(bits >> 32) as f64, (bits & u64::from(u32::MAX)) as f64];
        let mut values = [loss, counted, halves[0], halves[1]];
        self.sum(&mut values)?;
        // Sums of whole numbers below 2^53 are exact.
        if values[2..] != halves.map(|half| half * count) {
            return Err(Error::Diverged(format!(
                "step {}: the processes do not have the same gradient; do they all run the same program on the same \
                 data? Continue from the last checkpoint.",
                self.step + 1
            )));
        }
        Ok([values[0], values[1]])
    }

    /// The error for a loss or gradient that is not finite.
    fn diverged(&self, loss: f64, gradients: &[Option<Tensor>]) -> Error {
        let norm = |tensor: &Tensor| squared_norm(&[tensor]).map_or(f64::NAN, f64::sqrt);
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
        text += "\nTry a lower `learning_rate`, a longer `warmup` or a lower `clip_norm`, and continue from the last \
                 checkpoint.";
        Error::Diverged(text)
    }

    /// The mean loss of the source's first sequences, and the fraction of targets that are the most probable token;
    /// `None` if `stop` was set, which is checked between two micro-batches. With several processes `stop` is ignored.
    pub fn validate(
        &self,
        loader: &Loader,
        sequences: usize,
        stop: &AtomicBool,
    ) -> Result<Option<Validation>> {
        let alone = self.rank().1 == 1;
        let count = (sequences as u64).min(loader.source().sequences());
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        let settings = Settings { recompute: false, ..self.settings.clone() };
        let weights: Weights = self.parameters[..].into();
        let share = self.ranks.borrow().share(count as usize);
        let (mut at, end) = (share.start as u64, share.end as u64);
        let (mut nats, mut right, mut counted) = (0.0, 0.0, 0.0);
        while at < end {
            if alone && stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let rows = (end - at).min(self.config.micro_batch as u64);
            inputs.clear();
            targets.clear();
            for i in at..at + rows {
                loader.source().sequence(i, &mut inputs, &mut targets)?;
            }
            let batch = Batch { ids: &inputs, rows: rows as usize };
            let hidden = self.model.forward(&weights, batch, &settings, None)?;
            let TokenLosses { nll, greedy } = self.model.token_losses(&weights, &hidden, &targets)?;
            nats += nll.iter().map(|&nll| f64::from(nll)).sum::<f64>();
            right += greedy.iter().zip(&targets).filter(|(a, b)| **b != IGNORE && a == b).count() as f64;
            counted += count_targets(&targets) as f64;
            at += rows;
        }
        let mut sums = [nats, right, counted];
        self.sum(&mut sums)?;
        let [nats, right, counted] = sums;
        Ok(Some(Validation { loss: nats / counted, accuracy: right / counted }))
    }
}

/// Which parameters of a model are trained.
fn trained(model: &Model, only: Only) -> Vec<bool> {
    let routing = model.config().mixer.extension();
    let adds = |name: &str| routing.as_ref().is_some_and(|routing| routing.adds(name));
    model.layout().iter().map(|spec| only == Only::All || adds(&spec.name)).collect()
}

/// How many targets count.
fn count_targets(targets: &[u32]) -> usize {
    targets.iter().filter(|&&id| id != IGNORE).count()
}

//! An example on an engine: what the engine computes.

use std::sync::{Arc, Mutex, PoisonError};

use march_lm::Result;
use march_lm::anchors::Policy;
use march_lm::engine::ops::adamw::{AdamW, Step, clip_factor};
use march_lm::engine::{Engine, Tape};
use march_lm::model::{Batch, Model, Settings, Trace};

use super::Example;

/// An example on an engine.
pub(super) struct LoadedExample<'e, E: Engine> {
    engine: &'e E,
    example: &'e Example,
    /// The model.
    pub model: Model<E>,
    parameters: Vec<E::Tensor>,
}

impl<'e, E: Engine> LoadedExample<'e, E> {
    /// Puts the parameters on the engine.
    pub fn new(engine: &'e E, example: &'e Example) -> Result<Self> {
        let model: Model<E> = Model::new(&example.config);
        let both = model.layout().iter().zip(&example.parameters);
        let parameters = both.map(|(spec, numbers)| engine.from_f32(numbers, &spec.shape));
        let parameters = parameters.collect::<std::result::Result<_, _>>()?;
        Ok(Self { engine, example, model, parameters })
    }

    /// Logits of all tokens, as training computes them.
    pub fn forward(&self, policy: &Policy) -> Result<Vec<f64>> {
        let tape = Tape::inference(self.engine);
        let weights = self.model.bind(&tape, &self.parameters);
        let settings = Settings { policy: policy.clone(), recompute: false };
        let batch = Batch::one(&self.example.tokens);
        let hidden = self.model.forward(&tape, &weights, batch, &settings, None)?;
        Ok(self.engine.to_f64(self.model.logits(&tape, &weights, &hidden)?.value()))
    }

    /// Logits of all tokens through a bank, in calls of the given sizes; the last size repeats.
    pub fn extend(&self, policy: &Policy, calls: &[usize]) -> Result<Vec<f64>> {
        let tape = Tape::inference(self.engine);
        let weights = self.model.bind(&tape, &self.parameters);
        let mut bank = self.model.bank(policy.clone())?;
        let (mut logits, mut rest, mut size) = (Vec::new(), &self.example.tokens[..], 1);
        let mut sizes = calls.iter();
        while !rest.is_empty() {
            size = sizes.next().copied().unwrap_or(size);
            let (part, later) = rest.split_at(size.min(rest.len()));
            let hidden = self.model.extend(&tape, &weights, Batch::one(part), &mut [&mut bank], None)?;
            logits.extend(self.engine.to_f64(self.model.logits(&tape, &weights, &hidden)?.value()));
            rest = later;
        }
        Ok(logits)
    }

    /// The routing weights of all tokens, from the forward pass, or from a bank in calls of one size.
    pub fn traced(&self, calls: Option<usize>) -> Result<Trace<E>> {
        let trace = Arc::new(Mutex::new(Trace::default()));
        let tape = Tape::inference(self.engine);
        let weights = self.model.bind(&tape, &self.parameters);
        let (tokens, policy) = (&self.example.tokens, self.model.policy());
        match calls {
            None => {
                let settings = Settings { policy, recompute: false };
                self.model.forward(&tape, &weights, Batch::one(tokens), &settings, Some(&trace))?;
            }
            Some(size) => {
                let mut bank = self.model.bank(policy)?;
                for part in tokens.chunks(size) {
                    let batch = Batch::one(part);
                    self.model.extend(&tape, &weights, batch, &mut [&mut bank], Some(&trace))?;
                }
            }
        }
        let found = std::mem::take(&mut *trace.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(found)
    }

    /// The mean next-token loss of all tokens, and its gradients; none where nothing reached a parameter.
    pub fn gradients(&self, recompute: bool) -> Result<(f64, Vec<Option<E::Tensor>>)> {
        let tokens = &self.example.tokens;
        self.gradients_of(Batch::one(&tokens[..tokens.len() - 1]), &tokens[1..], recompute)
    }

    fn gradients_of(
        &self,
        inputs: Batch<'_>,
        targets: &[u32],
        recompute: bool,
    ) -> Result<(f64, Vec<Option<E::Tensor>>)> {
        let tape = Tape::new(self.engine);
        let weights = self.model.bind(&tape, &self.parameters);
        let settings = Settings { policy: self.model.policy(), recompute };
        let hidden = self.model.forward(&tape, &weights, inputs, &settings, None)?;
        let loss = self.model.loss(&tape, &weights, &hidden, targets, None)?;
        let mut gradients = vec![None; self.parameters.len()];
        tape.backward(&loss, |key, gradient| gradients[key] = Some(gradient))?;
        Ok((self.engine.to_f64(loss.value())[0], gradients))
    }

    /// The losses and the gradient norms of the steps of training, each before its update.
    pub fn train(&mut self) -> Result<(Vec<f64>, Vec<f64>)> {
        let engine = self.engine;
        let run = &self.example.training;
        let zeros = || {
            let each = self.model.layout().iter().map(|spec| engine.full(&spec.shape, 0.0));
            each.collect::<std::result::Result<Vec<_>, _>>()
        };
        let (mut first, mut second) = (zeros()?, zeros()?);
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for (step, rows) in (1..).zip(&run.batches) {
            let inputs: Vec<u32> = rows.iter().flat_map(|row| &row[..row.len() - 1]).copied().collect();
            let targets: Vec<u32> = rows.iter().flat_map(|row| &row[1..]).copied().collect();
            let batch = Batch { ids: &inputs, rows: rows.len() };
            let (loss, gradients) = self.gradients_of(batch, &targets, false)?;
            let squared = engine.squared_norm(&gradients.iter().flatten().collect::<Vec<_>>())?;
            losses.push(loss);
            norms.push(squared.sqrt());
            for (i, gradient) in gradients.iter().enumerate() {
                let Some(gradient) = gradient else { continue };
                let decayed = self.model.layout()[i].shape.len() >= 2;
                let settings = Step {
                    learning_rate: run.rates[step as usize - 1],
                    betas: run.betas,
                    eps: run.eps,
                    weight_decay: if decayed { run.weight_decay } else { 0.0 },
                    clip: clip_factor(squared, run.clip_norm),
                    step,
                };
                let state = AdamW {
                    parameter: &mut self.parameters[i],
                    first_moment: &mut first[i],
                    second_moment: &mut second[i],
                };
                engine.adamw(state, gradient, &settings)?;
            }
        }
        Ok((losses, norms))
    }
}

//! An example on a device: what the device computes.

use march_lm::Result;
use march_lm::anchors::Policy;
use march_lm::engine::ops::adamw::{self, AdamW, Step, clip_factor};
use march_lm::engine::{Device, Tape, Tensor};
use march_lm::model::{Batch, Model, Parameters, Settings, Trace, TraceCell, Weights};

use super::Example;

/// An example on a device.
pub(super) struct LoadedExample<'e> {
    example: &'e Example,
    /// The model.
    pub model: Model,
    parameters: Parameters,
}

impl<'e> LoadedExample<'e> {
    /// Puts the parameters on the device.
    pub fn new(device: &Device, example: &'e Example) -> Result<Self> {
        let model = Model::new(&example.config);
        let both = model.layout().iter().zip(&example.parameters);
        let parameters = both.map(|(spec, numbers)| Tensor::from_slice(numbers, &spec.shape, device));
        let parameters = parameters.collect::<std::result::Result<_, _>>()?;
        Ok(Self { example, model, parameters })
    }

    fn weights(&self) -> Weights {
        self.parameters.as_slice().into()
    }

    /// Logits of all tokens, as training computes them.
    pub fn forward(&self, policy: &Policy) -> Result<Vec<f64>> {
        let weights = self.weights();
        let settings = Settings { policy: policy.clone(), ..Default::default() };
        let batch = Batch::one(&self.example.tokens);
        let hidden = self.model.forward(&weights, batch, &settings, None)?;
        Ok(self.model.logits(&weights, &hidden)?.to_f64())
    }

    /// Logits of all tokens through a bank, in calls of the given sizes; the last size repeats.
    pub fn extend(&self, policy: &Policy, calls: &[usize]) -> Result<Vec<f64>> {
        let weights = self.weights();
        let mut bank = self.model.bank(policy.clone())?;
        let (mut logits, mut rest, mut size) = (Vec::new(), &self.example.tokens[..], 1);
        let mut sizes = calls.iter();
        while !rest.is_empty() {
            size = sizes.next().copied().unwrap_or(size);
            let (part, later) = rest.split_at(size.min(rest.len()));
            let hidden = self.model.extend(&weights, Batch::one(part), &mut [&mut bank], None)?;
            logits.extend(self.model.logits(&weights, &hidden)?.to_f64());
            rest = later;
        }
        Ok(logits)
    }

    /// The routing weights of all tokens, from the forward pass, or from a bank in calls of one size.
    pub fn traced(&self, calls: Option<usize>) -> Result<Trace> {
        let trace = TraceCell::default();
        let weights = self.weights();
        let (tokens, policy) = (&self.example.tokens, self.model.policy());
        match calls {
            None => {
                let settings = Settings { policy, ..Default::default() };
                self.model.forward(&weights, Batch::one(tokens), &settings, Some(&trace))?;
            }
            Some(size) => {
                let mut bank = self.model.bank(policy)?;
                for part in tokens.chunks(size) {
                    let batch = Batch::one(part);
                    self.model.extend(&weights, batch, &mut [&mut bank], Some(&trace))?;
                }
            }
        }
        let found = std::mem::take(&mut *trace.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        Ok(found)
    }

    /// The mean next-token loss of all tokens, and its gradients; none where nothing reached a parameter.
    pub fn gradients(&self, recompute: bool) -> Result<(f64, Vec<Option<Tensor>>)> {
        let tokens = &self.example.tokens;
        self.gradients_of(Batch::one(&tokens[..tokens.len() - 1]), &tokens[1..], recompute)
    }

    fn gradients_of(
        &self,
        inputs: Batch<'_>,
        targets: &[u32],
        recompute: bool,
    ) -> Result<(f64, Vec<Option<Tensor>>)> {
        let tape = Tape::new();
        let weights = self.model.bind(&tape, &self.parameters);
        let settings = Settings { policy: self.model.policy(), recompute, ..Default::default() };
        let hidden = self.model.forward(&weights, inputs, &settings, None)?;
        let loss = self.model.loss(&weights, &hidden, targets, None)?;
        let mut gradients = vec![None; self.parameters.len()];
        tape.backward(&loss, |key, gradient| gradients[key] = Some(gradient))?;
        Ok((loss.to_f64()[0], gradients))
    }

    /// The losses and the gradient norms of the steps of training, each before its update.
    pub fn train(&mut self) -> Result<(Vec<f64>, Vec<f64>)> {
        let run = &self.example.training;
        let zeros = || {
            let each = self.parameters.iter().map(|one| Tensor::full(one.shape(), 0.0, one.device()));
            each.collect::<std::result::Result<Vec<_>, _>>()
        };
        let (mut first, mut second) = (zeros()?, zeros()?);
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for (step, rows) in (1..).zip(&run.batches) {
            let inputs: Vec<u32> = rows.iter().flat_map(|row| &row[..row.len() - 1]).copied().collect();
            let targets: Vec<u32> = rows.iter().flat_map(|row| &row[1..]).copied().collect();
            let batch = Batch { ids: &inputs, rows: rows.len() };
            let (loss, gradients) = self.gradients_of(batch, &targets, false)?;
            let squared = adamw::squared_norm(&gradients.iter().flatten().collect::<Vec<_>>())?;
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
                adamw::update(state, gradient, &settings)?;
            }
        }
        Ok((losses, norms))
    }
}

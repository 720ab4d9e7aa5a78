//! Whether a device computes what the processor computes: logits, losses, gradients and training of small models of every
//! kind, from the same initial weights. `march doctor --device gpu` compares all of them, and `march train --device gpu`
//! one of them before its first step.

use anyhow::bail;
use march::Config;
use march::data::{Loader, TextSource};
use march::engine::{Cpu, Engine, Tape};
use march::model::{Batch, Model, ModelConfig, Settings};
use march::train::{Schedule, TrainConfig, Trainer};

/// The largest difference of logits and losses.
const LOSS: f64 = 1e-4;

/// The largest difference of a gradient.
const GRADIENT: f64 = 1e-3;

/// The models: a name, the preset of their kind, and what differs from it besides the sizes.
const MODELS: [(&str, &str, &[&str]); 6] = [
    ("march", "tiny/march", &["model.routing_dim=8", "model.anchor_interval=8"]),
    (
        "march, top-2",
        "tiny/march",
        &["model.routing_dim=8", "model.anchor_interval=8", "model.routing_top_k=2"],
    ),
    ("gated_deltanet", "tiny/gdn", &[]),
    ("memory_caching", "tiny/memory-caching", &["model.routing_dim=8", "model.anchor_interval=8"]),
    ("log_linear_gated_deltanet", "tiny/log-linear", &["model.num_levels=8"]),
    ("transformer", "tiny/transformer", &[]),
];

/// The sizes of all of them.
const SIZES: [&str; 6] = [
    "model.vocab_size=61",
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.intermediate_size=48",
    "model.num_heads=2",
    "model.initializer_range=0.12",
];

/// The head of a recurrent model: neither a power of two nor a divisor of the width.
const HEAD: &str = "model.head_dim=12";

/// How a device differs from the processor in one model. Losses differ by the absolute value, logits and gradients by a
/// share of their largest value; infinite if the device's value is not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The model.
    pub model: &'static str,
    /// Of the logits, read at once and in pieces through a bank.
    pub logits: f64,
    /// Of the loss.
    pub loss: f64,
    /// Of the gradient that differs most.
    pub gradient: f64,
    /// Its parameter.
    pub parameter: String,
    /// Of the losses of the steps of training.
    pub training: f64,
}

impl Difference {
    /// What differs by more than is allowed.
    pub fn failures(&self) -> Vec<String> {
        let Self { model, logits, loss, gradient, parameter, training } = self;
        let all = [
            ("the logits differ".to_string(), *logits, LOSS),
            ("the loss differs".to_string(), *loss, LOSS),
            (format!("the gradient of {parameter} differs"), *gradient, GRADIENT),
            ("the losses of training differ".to_string(), *training, LOSS),
        ];
        let failed = all.iter().filter(|(_, error, most)| error.is_nan() || error > most);
        failed
            .map(|(what, error, most)| format!("{model}: {what} by {error:.1e}, and {most:.0e} is allowed"))
            .collect()
    }
}

/// Compares the loss and the gradients of a model of 2 layers on a few tokens, before training.
pub fn quick<E: Engine>(device: &E, cpu: &Cpu) -> anyhow::Result<()> {
    let failures = compare(device, cpu, MODELS[0], 40, 0)?.failures();
    if let Some(first) = failures.first() {
        bail!(
            "the device does not compute what the processor computes, so it is not used for training: {first}; \
             `march doctor --device gpu` tests every operation"
        );
    }
    Ok(())
}

/// Compares all kinds of models, and reports each to `show`.
#[cfg_attr(not(feature = "gpu"), allow(dead_code))] // the tests call it too
pub fn all<E: Engine>(
    device: &E,
    cpu: &Cpu,
    show: &mut dyn FnMut(&Difference),
) -> anyhow::Result<Vec<Difference>> {
    let mut list = Vec::new();
    for model in MODELS {
        let difference = compare(device, cpu, model, 75, 6)?;
        show(&difference);
        list.push(difference);
    }
    Ok(list)
}

/// Compares one model on `tokens` tokens, and in `steps` steps of training.
fn compare<E: Engine>(
    device: &E,
    cpu: &Cpu,
    (name, preset, own): (&'static str, &str, &[&str]),
    tokens: usize,
    steps: usize,
) -> anyhow::Result<Difference> {
    let head = (preset != "tiny/transformer").then_some(HEAD);
    let settings: Vec<String> = SIZES.iter().chain(&head).chain(own).map(|text| text.to_string()).collect();
    let config = Config::load_with(preset, &settings)?.model;
    let want = Outcome::of(cpu, &config, tokens, steps)?;
    let found = Outcome::of(device, &config, tokens, steps)?;
    device.check()?;
    let absolute = |found: &[f64], want: &[f64]| error(found, want, 1.0);
    // A gradient that is nearly zero everywhere is compared with the others.
    let largest = want.gradients.iter().map(|(_, values)| peak(values)).fold(0.0, f64::max);
    let gradients = found.gradients.iter().zip(&want.gradients);
    let (gradient, parameter) = gradients
        .map(|((name, found), (_, want))| (error(found, want, peak(want).max(1e-3 * largest)), name.clone()))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .unwrap_or_default();
    Ok(Difference {
        model: name,
        logits: error(&found.logits, &want.logits, peak(&want.logits)),
        loss: absolute(&[found.loss], &[want.loss]),
        gradient,
        parameter,
        training: absolute(&found.losses, &want.losses),
    })
}

/// The largest absolute value.
fn peak(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, value| most.max(value.abs()))
}

/// The largest difference, divided by `unit`; infinite unless all values are finite and as many as wanted.
fn error(found: &[f64], want: &[f64], unit: f64) -> f64 {
    if found.len() != want.len() || !found.iter().chain(want).all(|value| value.is_finite()) {
        return f64::INFINITY;
    }
    let differences: Vec<f64> = found.iter().zip(want).map(|(a, b)| a - b).collect();
    peak(&differences) / if unit > 0.0 { unit } else { 1.0 }
}

/// What an engine computes.
struct Outcome {
    logits: Vec<f64>,
    loss: f64,
    gradients: Vec<(String, Vec<f64>)>,
    losses: Vec<f64>,
}

impl Outcome {
    fn of<E: Engine>(engine: &E, config: &ModelConfig, tokens: usize, steps: usize) -> anyhow::Result<Self> {
        const SEED: u64 = 1;
        let model: Model<E> = Model::new(config);
        let parameters = model.init(engine, SEED)?;
        let settings = Settings { policy: model.policy(), recompute: false };
        let text = text(2 * tokens + 1, config.vocab_size);
        let (ids, targets) = (&text[..tokens], &text[1..=tokens]);
        let logits = {
            let tape = Tape::inference(engine);
            let weights = model.bind(&tape, &parameters);
            let hidden = model.forward(&tape, &weights, Batch::one(ids), &settings, None)?;
            let mut logits = engine.to_f64(model.logits(&tape, &weights, &hidden)?.value());
            let mut bank = model.bank(settings.policy.clone())?;
            for part in ids.chunks(7) {
                let hidden = model.extend(&tape, &weights, Batch::one(part), &mut [&mut bank], None)?;
                logits.extend(engine.to_f64(model.logits(&tape, &weights, &hidden)?.value()));
            }
            logits
        };
        let tape = Tape::new(engine);
        let weights = model.bind(&tape, &parameters);
        let hidden = model.forward(&tape, &weights, Batch::one(ids), &settings, None)?;
        let loss = model.loss(&tape, &weights, &hidden, targets, None)?;
        let names = model.layout().iter().map(|spec| spec.name.clone());
        let mut gradients: Vec<(String, Vec<f64>)> = names.map(|name| (name, Vec::new())).collect();
        tape.backward(&loss, |key, gradient| gradients[key].1 = engine.to_f64(&gradient))?;
        let loss = engine.to_f64(loss.value())[0];
        drop(tape);
        let config = TrainConfig {
            tokens_per_step: 2 * tokens,
            micro_batch: 2,
            learning_rate: 4e-3,
            schedule: Schedule::Constant,
            warmup: 0.0,
            ..TrainConfig::default()
        };
        let mut loader = Loader::new(Box::new(TextSource::new(text, tokens)?), None)?;
        let mut trainer = Trainer::new(engine, model, parameters, settings, config, tokens)?;
        let mut losses = Vec::with_capacity(steps);
        for _ in 0..steps {
            losses.push(trainer.advance(&mut loader)?.loss);
        }
        Ok(Self { logits, loss, gradients, losses })
    }
}

/// A text without a pattern; always the same.
fn text(tokens: usize, vocabulary: usize) -> Vec<u32> {
    let next = |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    let states = std::iter::successors(Some(1), next);
    states.skip(1).take(tokens).map(|state| ((state >> 33) % vocabulary as u64) as u32).collect()
}

#[cfg(test)]
mod tests {
    use march::engine::ops::swiglu::SwiGlu;
    use march::engine::{Fallback, Kernels, Precision, Reference, Result, Tensor};

    use super::*;

    fn cpu() -> Cpu {
        Cpu::new(march::engine::CpuOptions { threads: 1, ..Default::default() }).unwrap()
    }

    /// The reference engine is a device whose results are close to those of the processor, but not the same.
    #[test]
    fn a_device_that_computes_the_same() {
        quick(&Reference, &cpu()).unwrap();
        let mut shown = 0;
        let list = all(&Reference, &cpu(), &mut |_| shown += 1).unwrap();
        assert_eq!((list.len(), shown), (MODELS.len(), MODELS.len()));
        for difference in list {
            assert_eq!(difference.failures(), [""; 0], "{difference:?}");
            assert!(difference.logits > 0.0 && difference.gradient > 0.0, "{difference:?}");
        }
    }

    /// A device whose one operation is slightly wrong.
    struct Wrong(Cpu, f64);

    impl Kernels for Wrong {
        type Tensor = Tensor<f32>;
        type Packed = <Cpu as Engine>::Packed;
        type Stored = <Cpu as Engine>::Stored;

        fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<Tensor<f32>> {
            Engine::from_f32(&self.0, data, shape)
        }
        fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<Tensor<f32>> {
            Engine::from_f64(&self.0, data, shape)
        }
        fn full(&self, shape: &[usize], value: f64) -> Result<Tensor<f32>> {
            Engine::full(&self.0, shape, value)
        }
        fn shape<'a>(&self, tensor: &'a Tensor<f32>) -> &'a [usize] {
            tensor.shape()
        }
        fn to_f32(&self, tensor: &Tensor<f32>) -> Vec<f32> {
            Engine::to_f32(&self.0, tensor)
        }
        fn to_f64(&self, tensor: &Tensor<f32>) -> Vec<f64> {
            Engine::to_f64(&self.0, tensor)
        }
        fn packed_shape<'a>(&self, packed: &'a Self::Packed) -> &'a [usize; 2] {
            Engine::packed_shape(&self.0, packed)
        }
        fn packed_precision(&self, packed: &Self::Packed) -> Precision {
            Engine::packed_precision(&self.0, packed)
        }
        fn stored_shape(&self, states: &Self::Stored) -> [usize; 4] {
            Kernels::stored_shape(&self.0, states)
        }
        fn stored_bytes(&self, states: &Self::Stored) -> usize {
            Engine::stored_bytes(&self.0, states)
        }
        fn swiglu_backward(
            &self,
            inputs: &[SwiGlu<&Tensor<f32>>],
            gradients: &[&Tensor<f32>],
        ) -> Result<Vec<SwiGlu<Tensor<f32>>>> {
            let mut found = Engine::swiglu_backward(&self.0, inputs, gradients)?;
            for d in &mut found {
                let up = Engine::to_f64(&self.0, &d.up);
                let wrong: Vec<f64> = up.iter().map(|value| value * self.1).collect();
                d.up = Engine::from_f64(&self.0, &wrong, d.up.shape())?;
            }
            Ok(found)
        }
    }

    #[test]
    fn a_device_that_is_wrong() {
        quick(&Fallback::new(Wrong(cpu(), 1.0), cpu()), &cpu()).unwrap();
        for factor in [1.02, f64::NAN] {
            let wrong = Fallback::new(Wrong(cpu(), factor), cpu());
            let message = quick(&wrong, &cpu()).unwrap_err().to_string();
            assert!(message.contains("march: the gradient of model."), "{message}");
            assert!(message.contains("march doctor --device gpu"), "{message}");
        }
    }
}

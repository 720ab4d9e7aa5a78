//! The five golden checkpoints, through the fast engine and through the equations in f64: logits, routing weights,
//! other policies, gradients, and six steps of AdamW.

#[path = "../../cli/src/golden/mod.rs"]
#[allow(dead_code)]
mod checks;

use checks::{Check, Example};
use march_lm::engine::ops::swiglu::SwiGlu;
use march_lm::engine::{Cpu, CpuOptions, Engine, Fallback, Kernels, Precision, Reference, Result, Tensor};

use crate::common::{cpu, invariant};
use crate::toy;

/// How the tokens come when a bank holds what was read before.
const CALLS: [&[usize]; 3] = [&[150], &[1], &[7, 64, 1, 33]];

/// The same for routing weights; `None`: no bank.
const TRACED: [Option<usize>; 4] = [None, Some(150), Some(1), Some(11)];

fn assert_passed(checks: impl IntoIterator<Item = Check>) {
    for check in checks {
        assert_eq!(check.failure(), None);
    }
}

fn logits(engine: &impl Engine) {
    for example in Example::golden().unwrap() {
        assert_passed([example.logits(engine, &CALLS).unwrap(), example.routing(engine, &TRACED).unwrap()]);
    }
}

fn gradients(engine: &impl Engine) {
    for example in Example::golden().unwrap() {
        assert_passed([example.gradients(engine).unwrap()]);
    }
}

fn training(engine: &impl Engine) {
    for example in Example::golden().unwrap() {
        assert_passed(example.training(engine).unwrap());
    }
}

#[test]
fn logits_of_the_fast_engine() {
    logits(&cpu());
    logits(&invariant());
    logits(&Cpu::new(CpuOptions { threads: 1, portable: true, ..Default::default() }).unwrap());
}

#[test]
fn logits_of_the_reference_engine() {
    logits(&Reference);
}

#[test]
fn gradients_of_the_fast_engine() {
    gradients(&cpu());
    gradients(&invariant());
}

#[test]
fn gradients_of_the_reference_engine() {
    gradients(&Reference);
}

#[test]
fn decoding_with_the_fast_engine() {
    for example in Example::golden().unwrap() {
        assert_passed([example.decoding(&invariant()).unwrap()]);
    }
}

#[test]
fn training_with_the_fast_engine() {
    training(&cpu());
}

#[test]
fn training_with_the_reference_engine() {
    training(&Reference);
}

/// A device that implements four operations and leaves the others to the reference engine computes the same model.
#[test]
fn a_partial_engine() {
    let engine = toy::engine();
    let examples = Example::golden().unwrap();
    let example = examples.iter().find(|example| example.name == "march_topk").unwrap();
    assert_passed([example.logits(&engine, &CALLS).unwrap(), example.routing(&engine, &TRACED).unwrap()]);
    let forward = engine.device.counts();
    assert_passed([example.gradients(&engine).unwrap()]);
    let all = engine.device.counts();
    // Products, sums of residuals and norms ran on the device, in both; the model calls no other function of one number.
    for operation in [0, 2, 3] {
        assert!(forward[operation] > 0 && all[operation] > forward[operation], "{forward:?}, {all:?}");
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
fn a_wrong_engine() {
    let examples = Example::golden().unwrap();
    let example = examples.iter().find(|example| example.name == "march").unwrap();
    for (factor, wrong) in [(1.0, false), (1.02, true), (f64::NAN, true)] {
        let engine = Fallback::new(Wrong(invariant(), factor), invariant());
        let gradients = example.gradients(&engine).unwrap().failure();
        assert_eq!(gradients.is_some(), wrong, "{gradients:?}");
        assert!(gradients.is_none_or(|text| text.starts_with("march: the gradient of model.")));
        let [losses, _] = example.training(&engine).unwrap();
        assert_eq!(losses.failure().is_some(), wrong, "{losses:?}");
    }
}

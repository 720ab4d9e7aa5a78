//! The operations as programs that run on any device, and their outputs and gradients as numbers.

use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions};
use march_engine::ops::attention::Attention;
use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaOptions};
use march_engine::ops::log_linear::{LogLinear, LogLinearOptions};
use march_engine::ops::state_read::StateRead;
use march_engine::{Device, Result, Tape, Tensor};

use super::cases::{Case, Random};

/// A tensor that a program is given.
#[derive(Clone)]
pub(super) struct Input {
    /// Name in messages.
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

impl Input {
    fn on(&self, device: &Device) -> Result<Tensor> {
        Tensor::from_f64(&self.data, &self.shape, device)
    }
}

/// A computation on any device: tensors in, tensors out.
pub(super) type Program = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>>;

/// A program with one output.
pub(super) fn one(run: impl Fn(&[Tensor]) -> Result<Tensor> + 'static) -> Program {
    Box::new(move |v| Ok(vec![run(v)?]))
}

/// A program of operations that no gradient passes through.
pub(super) fn plain(run: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'static) -> Program {
    Box::new(move |v| run(&v.iter().map(Tensor::detach).collect::<Vec<_>>()))
}

/// The numbers of one run.
#[derive(PartialEq)]
pub(super) struct Outcome {
    pub outputs: Vec<Vec<f64>>,
    pub gradients: Vec<Option<Vec<f64>>>,
}

/// Runs a case forward and, with pseudo-random gradients of its outputs, backward.
pub(super) fn outcome(device: &Device, case: &Case) -> Result<Outcome> {
    let tape = Tape::new();
    let parameter = |(i, input): (usize, &Input)| Ok(tape.parameter(i, &input.on(device)?));
    let inputs = case.inputs.iter().enumerate().map(parameter).collect::<Result<Vec<_>>>()?;
    let outputs = (case.program)(&inputs)?;
    let seed =
        |(i, output): (usize, &Tensor)| Random(77 + i as u64).input("", output.shape(), 1.0).on(device);
    let seeds = outputs.iter().enumerate().map(seed).collect::<Result<Vec<_>>>()?;
    let seeds: Vec<(&Tensor, Tensor)> = outputs.iter().zip(seeds).collect();
    let mut gradients = vec![None; inputs.len()];
    tape.backward_from(&seeds, |key, gradient| gradients[key] = Some(gradient.to_f64()))?;
    Ok(Outcome { outputs: outputs.iter().map(Tensor::to_f64).collect(), gradients })
}

/// x, the weight and, where there is one, the bias.
pub(super) fn linear() -> Program {
    one(|v| match v {
        [x, weight, bias] => x.linear_bias(weight, bias),
        _ => v[0].linear(&v[1]),
    })
}

/// x, the weight and, where there is one, the tail.
pub(super) fn short_conv() -> Program {
    Box::new(|v| {
        let (y, tail) = v[0].short_conv(&v[1], v.get(2))?;
        Ok(vec![y, tail])
    })
}

/// Query, key and value.
pub(super) fn attention(heads: usize) -> Program {
    one(move |v| Attention { query: &v[0], key: &v[1], value: &v[2] }.attention(heads))
}

/// The inputs in the order of their fields, the initial state last.
fn delta_of(v: &[Tensor]) -> GatedDelta<&Tensor> {
    let [query, key, value, retention_input, write_input, a_log, dt_bias] = std::array::from_fn(|i| &v[i]);
    let initial_state = v.get(7);
    GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, initial_state }
}

pub(super) fn gated_delta(options: GatedDeltaOptions) -> Program {
    Box::new(move |v| {
        let out = delta_of(v).gated_delta(&options)?;
        Ok(vec![out.readout, out.final_state, out.boundary_states])
    })
}

pub(super) fn log_linear(options: LogLinearOptions) -> Program {
    one(move |v| {
        let GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, .. } = delta_of(v);
        let (level_input, level_scale) = (&v[7], &v[8]);
        let input = LogLinear {
            query,
            key,
            value,
            retention_input,
            write_input,
            a_log,
            dt_bias,
            level_input,
            level_scale,
        };
        Ok(input.log_linear_delta(&options, None)?.0)
    })
}

/// The inputs in the order of their fields.
pub(super) fn read_of(v: &[Tensor]) -> AnchorRead<&Tensor> {
    let [query, routing_query, routing_keys, anchor_states] = std::array::from_fn(|i| &v[i]);
    AnchorRead { query, routing_query, routing_keys, anchor_states, null_score: v.get(4) }
}

pub(super) fn anchor_read(options: AnchorReadOptions) -> Program {
    one(move |v| read_of(v).anchor_read(&options))
}

/// Query and states.
pub(super) fn state_read(key_heads: usize) -> Program {
    one(move |v| StateRead { query: &v[0], states: &v[1] }.state_read(key_heads))
}

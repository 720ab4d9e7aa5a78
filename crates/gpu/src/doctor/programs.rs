//! The operations as programs that run on any engine, and their outputs and gradients as numbers.

use std::sync::Arc;

use march_engine::ops::adamw::{AdamW, Step, clip_factor};
use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions};
use march_engine::ops::attention::{Attention, KeyValues};
use march_engine::ops::cross_entropy::LinearCrossEntropy;
use march_engine::ops::elementwise::{Map, Zip};
use march_engine::ops::embedding::Embedding;
use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaOptions};
use march_engine::ops::linear::Linear;
use march_engine::ops::log_linear::{LogLinear, LogLinearOptions};
use march_engine::ops::matmul::{MatMul, Transpose};
use march_engine::ops::rms_norm::{GatedRmsNorm, RmsNorm};
use march_engine::ops::rotary::Rotary;
use march_engine::ops::short_conv::ShortConv;
use march_engine::ops::state_read::StateRead;
use march_engine::ops::swiglu::SwiGlu;
use march_engine::{Engine, Precision, Result, Tape, Var, Weight};

use super::cases::{Case, Random};

/// A tensor that a program is given.
#[derive(Clone)]
pub(super) struct Input {
    /// Name in messages.
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

/// A computation on any engine: variables in, variables out. Its gradients are those of all inputs.
pub(super) trait Program {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>>;
}

/// An operation with its settings; the inputs are in the order of its fields, optional ones last.
pub(super) enum Op {
    Linear,
    LinearEach,
    MatMul(Transpose),
    RmsNorm,
    GatedRmsNorm,
    SwiGlu,
    ShortConv,
    Map(Map),
    Zip(Zip),
    Softmax,
    Slice(usize, usize, usize),
    Concat(usize),
    Permute(Vec<usize>),
    Sum(usize),
    Mean(usize),
    Expand(usize, usize),
    Embedding(Vec<u32>),
    Rotary(Rotary),
    Attention(usize),
    CrossEntropy(Vec<u32>),
    GatedDelta(GatedDeltaOptions),
    AnchorRead(AnchorReadOptions),
    /// With the number of key heads.
    StateRead(usize),
    LogLinear(LogLinearOptions),
    /// Operations that have no gradient.
    Plain(Plain),
}

/// An operation that no gradient passes through.
pub(super) enum Plain {
    AdamW,
    SquaredNorm,
    Accumulate,
    Append,
    TokenLosses(Vec<u32>),
    /// Products, rows and losses by a weight in a precision.
    Packed(Precision, Vec<u32>),
    /// With the number of heads; the keys and values come in blocks.
    AttentionBlocks(usize),
    Stored(Precision, AnchorReadOptions),
    RoutingWeights(AnchorReadOptions),
}

/// The numbers of one run. An engine may lack a backward operation and still have the forward one.
pub(super) struct Outcome {
    pub outputs: Vec<Vec<f64>>,
    pub gradients: Result<Vec<Option<Vec<f64>>>>,
}

/// Runs a case forward and, with pseudo-random gradients of its outputs, backward.
pub(super) fn outcome<E: Engine>(engine: &E, case: &Case) -> Result<Outcome> {
    if let Op::Plain(plain) = &case.op {
        let tensors = case
            .inputs
            .iter()
            .map(|input| engine.from_f64(&input.data, &input.shape))
            .collect::<Result<Vec<_>>>()?;
        return Ok(Outcome { outputs: plain.run(engine, tensors)?, gradients: Ok(Vec::new()) });
    }
    let tape = Tape::new(engine);
    let vars = case
        .inputs
        .iter()
        .enumerate()
        .map(|(i, input)| Ok(tape.parameter(i, engine.from_f64(&input.data, &input.shape)?)))
        .collect::<Result<Vec<_>>>()?;
    let outputs = case.op.run(&tape, &vars)?;
    let mut seeds = Vec::new();
    for (i, output) in outputs.iter().enumerate() {
        let shape = engine.shape(output.value()).to_vec();
        let gradient = Random(77 + i as u64).input("", &shape, 1.0);
        seeds.push((output, engine.from_f64(&gradient.data, &shape)?));
    }
    let mut gradients = vec![None; case.inputs.len()];
    let done = tape.backward_from(&seeds, |key, gradient| gradients[key] = Some(engine.to_f64(&gradient)));
    let outputs = outputs.iter().map(|output| engine.to_f64(output.value())).collect();
    Ok(Outcome { outputs, gradients: done.map(|()| gradients) })
}

fn delta_of<T>(v: &[T]) -> GatedDelta<&T> {
    let [query, key, value, retention_input, write_input, a_log, dt_bias] = std::array::from_fn(|i| &v[i]);
    let initial_state = v.get(7);
    GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, initial_state }
}

fn levels_of<T>(v: &[T]) -> LogLinear<&T> {
    let GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, .. } = delta_of(v);
    let (level_input, level_scale) = (&v[7], &v[8]);
    LogLinear { query, key, value, retention_input, write_input, a_log, dt_bias, level_input, level_scale }
}

fn read_of<T>(v: &[T]) -> AnchorRead<&T> {
    let [query, routing_query, routing_keys, anchor_states] = std::array::from_fn(|i| &v[i]);
    AnchorRead { query, routing_query, routing_keys, anchor_states, null_score: v.get(4) }
}

impl Program for Op {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let one = match self {
            Self::Linear => tape.linear(Linear { x: &v[0], weight: &v[1], bias: v.get(2) }),
            Self::LinearEach => {
                return Ok(tape.linear_each(&v[0], [Weight::Full(&v[1]), Weight::Full(&v[2])])?.into());
            }
            Self::MatMul(transpose) => tape.matmul(MatMul { a: &v[0], b: &v[1] }, *transpose),
            Self::RmsNorm => tape.rms_norm(RmsNorm { x: &v[0], weight: &v[1] }, 1e-6),
            Self::GatedRmsNorm => {
                tape.gated_rms_norm(GatedRmsNorm { x: &v[0], weight: &v[1], gate: &v[2] }, 1e-6)
            }
            Self::SwiGlu => tape.swiglu(SwiGlu { gate: &v[0], up: &v[1] }),
            Self::ShortConv => {
                let (y, tail) = tape.short_conv(ShortConv { x: &v[0], weight: &v[1], tail: v.get(2) })?;
                return Ok(vec![y, tail]);
            }
            Self::Map(kind) => tape.map(*kind, &v[0]),
            Self::Zip(kind) => tape.zip(*kind, &v[0], &v[1]),
            Self::Softmax => tape.softmax(&v[0]),
            &Self::Slice(axis, start, end) => tape.slice(&v[0], axis, start..end),
            Self::Concat(axis) => tape.concat(&v.iter().collect::<Vec<_>>(), *axis),
            Self::Permute(axes) => tape.permute(&v[0], axes),
            Self::Sum(axis) => tape.sum(&v[0], *axis),
            Self::Mean(axis) => tape.mean(&v[0], *axis),
            &Self::Expand(axis, count) => tape.expand(&v[0], axis, count),
            Self::Embedding(ids) => tape.embedding(Embedding { table: &v[0], ids, shape: &[ids.len()] }),
            Self::Rotary(rotary) => tape.rotary(&v[0], *rotary),
            Self::Attention(heads) => {
                tape.attention(Attention { query: &v[0], key: &v[1], value: &v[2] }, *heads)
            }
            Self::CrossEntropy(targets) => {
                tape.linear_cross_entropy(LinearCrossEntropy { x: &v[0], weight: &v[1] }, targets, None)
            }
            Self::GatedDelta(options) => {
                let out = tape.gated_delta(delta_of(v), options)?;
                return Ok(vec![out.readout, out.final_state, out.boundary_states]);
            }
            Self::AnchorRead(options) => tape.anchor_read(read_of(v), options),
            Self::StateRead(heads) => tape.state_read(StateRead { query: &v[0], states: &v[1] }, *heads),
            Self::LogLinear(options) => tape.log_linear_delta(levels_of(v), options, None).map(|out| out.0),
            Self::Plain(_) => return Ok(Vec::new()),
        };
        Ok(vec![one?])
    }
}

impl Plain {
    /// The numbers of the operation's results.
    fn run<E: Engine>(&self, engine: &E, mut t: Vec<E::Tensor>) -> Result<Vec<Vec<f64>>> {
        match self {
            Self::AdamW => {
                let Some(gradient) = t.pop() else { return Ok(Vec::new()) };
                let norm = engine.squared_norm(&[&gradient])?;
                for step in 1..=3 {
                    let [parameter, first_moment, second_moment] = &mut t[..] else { return Ok(Vec::new()) };
                    let state = AdamW { parameter, first_moment, second_moment };
                    engine.adamw(state, &gradient, &settings(step, clip_factor(norm, 1.0)))?;
                }
                Ok(t.iter().map(|tensor| engine.to_f64(tensor)).collect())
            }
            Self::SquaredNorm => Ok(vec![vec![engine.squared_norm(&t.iter().collect::<Vec<_>>())?]]),
            Self::Accumulate => {
                let (mut sum, held) = (t[0].clone(), t[0].clone());
                engine.accumulate(&mut sum, &t[1])?;
                engine.accumulate(&mut sum, &t[1])?;
                Ok(vec![engine.to_f64(&sum), engine.to_f64(&held)])
            }
            Self::Append => {
                let (mut whole, held) = (t[0].clone(), t[0].clone());
                for _ in 0..9 {
                    engine.append(&mut whole, &t[1], 1)?;
                }
                Ok(vec![engine.to_f64(&whole), engine.to_f64(&held)])
            }
            Self::TokenLosses(targets) => {
                let losses = engine.token_losses(&t[0], &t[1], targets)?;
                Ok(vec![
                    losses.nll.iter().map(|&v| f64::from(v)).collect(),
                    losses.greedy.iter().map(|&id| f64::from(id)).collect(),
                ])
            }
            Self::Packed(precision, ids) => {
                let packed = engine.pack(&t[1], *precision)?;
                let weight = Weight::Packed(&packed);
                let losses = engine.token_losses(&t[0], weight, ids)?;
                Ok(vec![
                    engine.to_f64(&engine.linear(Linear { x: &t[0], weight, bias: None })?),
                    engine.to_f64(&engine.embedding(Embedding {
                        table: weight,
                        ids,
                        shape: &[ids.len()],
                    })?),
                    engine.to_f64(&engine.unpack(&packed)?),
                    losses.nll.iter().map(|&v| f64::from(v)).collect(),
                ])
            }
            Self::AttentionBlocks(heads) => {
                let block = |i: usize| KeyValues { key: t[i].clone(), value: t[i + 1].clone() };
                let y = engine.attention_blocks(&t[0], &[block(1), block(3)], *heads)?;
                Ok(vec![engine.to_f64(&y)])
            }
            Self::Stored(storage, options) => {
                let stored = [Arc::new(engine.store_states(&t[3], *storage)?)];
                let AnchorRead { query, routing_query, routing_keys, null_score, .. } = read_of(&t);
                let input =
                    AnchorRead { query, routing_query, routing_keys, anchor_states: &stored[..], null_score };
                Ok(vec![engine.to_f64(&engine.anchor_read_stored(input, options)?)])
            }
            Self::RoutingWeights(options) => {
                let shape = engine.shape(&t[3]);
                let anchor_states = [shape[2], shape[3]];
                let AnchorRead { query, routing_query, routing_keys, null_score, .. } = read_of(&t);
                let input = AnchorRead { query, routing_query, routing_keys, anchor_states, null_score };
                Ok(vec![engine.to_f64(&engine.routing_weights(input, options)?)])
            }
        }
    }
}

pub(super) fn settings(step: u64, clip: f64) -> Step {
    Step { learning_rate: 0.01, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip, step }
}

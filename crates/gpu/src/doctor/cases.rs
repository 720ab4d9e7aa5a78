//! What the check of a device runs: every operation with random and extreme inputs. Sizes are small, so that a software
//! device takes seconds, and odd, so that no tile divides them.

use std::sync::Arc;

use march_engine::ops::adamw::{self, AdamW, Step, clip_factor};
use march_engine::ops::anchor_read::{AnchorReadOptions, ReadPlan, Segment, Visible};
use march_engine::ops::attention::{BLOCK_TOKENS, KeyValues};
use march_engine::ops::cross_entropy::{IGNORE, TokenLosses};
use march_engine::ops::elementwise::{Map, Zip};
use march_engine::ops::gated_delta::GatedDeltaOptions;
use march_engine::ops::log_linear::LogLinearOptions;
use march_engine::ops::matmul::Transpose;
use march_engine::ops::rotary::Rotary;
use march_engine::{Precision, Result, Storage, Tensor};

use super::programs::{
    Input, Program, anchor_read, attention, gated_delta, linear, log_linear, one, plain, read_of, short_conv,
    state_read,
};

/// One run of an operation.
pub(super) struct Case {
    /// What is special about it, for messages.
    pub label: String,
    pub program: Program,
    pub inputs: Vec<Input>,
}

fn case(label: impl Into<String>, program: Program, inputs: impl Into<Vec<Input>>) -> Case {
    Case { label: label.into(), program, inputs: inputs.into() }
}

/// A small deterministic generator (SplitMix64).
pub(super) struct Random(pub u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, count: usize) -> usize {
        (self.bits() % count as u64) as usize
    }

    /// Roughly normal numbers, each an f32, so that all devices see the same.
    pub fn input(&mut self, name: &'static str, shape: &[usize], scale: f64) -> Input {
        let mut normal = || (0..12).map(|_| self.unit()).sum::<f64>() - 6.0;
        let data = (0..shape.iter().product()).map(|_| f64::from((normal() * scale) as f32)).collect();
        Input { name, shape: shape.to_vec(), data }
    }

    fn ids(&mut self, count: usize, below: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(below) as u32).collect()
    }
}

/// Every operation by name, with its cases.
pub(super) fn all() -> Vec<(&'static str, Vec<Case>)> {
    let mut found = products();
    found.extend(layers());
    found.extend(recurrences());
    found.extend(readers());
    found.extend(basics());
    found.extend(without_gradients());
    found
}

fn products() -> Vec<(&'static str, Vec<Case>)> {
    let mut r = Random(1);
    let mut product = |rows: usize, inner: usize, outer: usize| {
        let inputs = [
            r.input("x", &[rows, inner], 1.0),
            r.input("weight", &[outer, inner], 1.0),
            r.input("bias", &[outer], 1.0),
        ];
        case(format!("{rows}×{inner}×{outer}"), linear(), inputs)
    };
    let linear = vec![product(1, 64, 48), product(37, 65, 29), product(70, 130, 90)];
    let each = [
        r.input("x", &[9, 33], 1.0),
        r.input("first weight", &[20, 33], 1.0),
        r.input("second weight", &[7, 33], 1.0),
    ];
    let matmul = [(false, false), (true, false), (false, true), (true, true)].map(|(a, b)| {
        let left: &[usize] = if a { &[3, 23, 17] } else { &[3, 17, 23] };
        let right: &[usize] = if b { &[3, 19, 23] } else { &[3, 23, 19] };
        let inputs = [r.input("a", left, 1.0), r.input("b", right, 1.0)];
        let program = one(move |v| v[0].matmul_with(&v[1], Transpose { a, b }));
        case(format!("transposed {a} and {b}"), program, inputs)
    });
    let mut targets = r.ids(23, 71);
    targets[5] = IGNORE;
    let mut loss = |label: &str, scale: f64| {
        let inputs = [r.input("x", &[23, 40], 1.0), r.input("weight", &[71, 40], scale)];
        let targets = targets.clone();
        case(label, one(move |v| v[0].linear_cross_entropy(&v[1], &targets, None)), inputs)
    };
    let loss = vec![loss("logits of about one", 0.16), loss("large logits", 8.0)];
    let ids = r.ids(30, 11);
    let embedding = one(move |v| v[0].embedding(&ids, &[ids.len()]));
    let embedding = vec![case("30 of 11 rows", embedding, [r.input("table", &[11, 19], 1.0)])];
    let two: Program = Box::new(|v| Ok(v[0].linear_each([&v[1], &v[2]])?.into()));
    vec![
        ("linear", linear),
        ("linear_each", vec![case("two weights", two, each)]),
        ("matmul", matmul.into()),
        ("linear_cross_entropy", loss),
        ("embedding", embedding),
    ]
}

fn layers() -> Vec<(&'static str, Vec<Case>)> {
    let mut r = Random(2);
    let mut norm = |rows: usize, width: usize, scale: f64| {
        let inputs = [
            r.input("x", &[rows, width], scale),
            r.input("weight", &[width], 1.0),
            r.input("gate", &[rows, width], 2.0),
        ];
        (format!("{rows} rows of {width}, × {scale}"), inputs)
    };
    let rows = [norm(1, 100, 1.0), norm(61, 24, 1.0), norm(7, 700, 1.0), norm(5, 64, 1e3), norm(5, 64, 1e-3)];
    let gated = rows
        .clone()
        .map(|(label, inputs)| case(label, one(|v| v[0].gated_rms_norm(&v[2], &v[1], 1e-6)), inputs));
    let norm =
        rows.map(|(label, [x, weight, _])| case(label, one(|v| v[0].rms_norm(&v[1], 1e-6)), [x, weight]));
    let swiglu = [1.0, 60.0].map(|scale| {
        let inputs = [r.input("gate", &[13, 50], scale), r.input("up", &[13, 50], 1.0)];
        case(format!("gates × {scale}"), one(|v| v[0].swiglu(&v[1])), inputs)
    });
    let conv = [(1.0, false), (1.0, true), (60.0, true)].map(|(scale, tail)| {
        let mut inputs = vec![r.input("x", &[2, 41, 37], scale), r.input("weight", &[37, 4], 1.0)];
        if tail {
            inputs.push(r.input("tail", &[2, 3, 37], scale));
        }
        case(format!("inputs × {scale}, tail {tail}"), short_conv(), inputs)
    });
    let rotary = [0, 100_000].map(|offset| {
        let rotary = Rotary::new(3, 10_000.0, offset);
        let program = one(move |v| v[0].rotary(rotary));
        case(format!("from position {offset}"), program, [r.input("x", &[2, 17, 3 * 10], 1.0)])
    });
    let attentions = [(1, 50, 1.0), (35, 0, 1.0), (20, 21, 10.0)].map(|(queries, before, scale)| {
        let keys = queries + before;
        let inputs = [
            r.input("query", &[2, queries, 2 * 16], scale),
            r.input("key", &[2, keys, 2 * 16], 1.0),
            r.input("value", &[2, keys, 2 * 12], 1.0),
        ];
        case(format!("{queries} queries after {before}, × {scale}"), attention(2), inputs)
    });
    vec![
        ("rms_norm", norm.into()),
        ("gated_rms_norm", gated.into()),
        ("swiglu", swiglu.into()),
        ("short_conv", conv.into()),
        ("rotary", rotary.into()),
        ("attention", attentions.into()),
    ]
}

/// Inputs that both recurrences share. With `extreme`, gates of every kind are mixed: the decay ordinary, everything or
/// nothing, the write strength ordinary, 0 or 1.
fn delta_inputs(r: &mut Random, tokens: usize, [hk, hv, dk, dv]: [usize; 4], extreme: bool) -> Vec<Input> {
    let batch = 2;
    let mut inputs = vec![
        r.input("query", &[batch, tokens, hk * dk], 1.0),
        r.input("key", &[batch, tokens, hk * dk], 1.0),
        r.input("value", &[batch, tokens, hv * dv], 1.0),
        r.input("retention_input", &[batch, tokens, hv], 1.0),
        r.input("write_input", &[batch, tokens, hv], 1.0),
        r.input("a_log", &[hv], 0.5),
        r.input("dt_bias", &[hv], 1.0),
    ];
    inputs[6].data.iter_mut().for_each(|v| *v -= 2.0);
    for i in (0..batch * tokens * hv).filter(|_| extreme) {
        let (a_log, dt_bias) = (inputs[5].data[i % hv], inputs[6].data[i % hv]);
        match r.below(3) {
            0 => inputs[3].data[i] = f64::from((80.0 * (-a_log).exp() - dt_bias) as f32),
            1 => inputs[3].data[i] = -200.0,
            _ => {}
        }
        match r.below(3) {
            0 => inputs[4].data[i] = -200.0,
            1 => inputs[4].data[i] = 200.0,
            _ => {}
        }
    }
    inputs
}

fn recurrences() -> Vec<(&'static str, Vec<Case>)> {
    let mut r = Random(3);
    let kinds = [
        ("ordinary gates", 45, [1, 2, 32, 32], false),
        ("odd widths", 19, [2, 2, 13, 21], false),
        ("extreme gates", 45, [1, 2, 32, 32], true),
        ("one token", 1, [2, 4, 16, 16], false),
    ];
    let delta = kinds.map(|(label, tokens, heads, extreme)| {
        let [key_heads, value_heads, dk, dv] = heads;
        let mut inputs = delta_inputs(&mut r, tokens, heads, extreme);
        inputs.push(r.input("initial_state", &[2, value_heads, dk, dv], 0.5));
        let boundaries = Arc::new(vec![(1..=tokens).step_by(7).collect(), vec![tokens]]);
        let options = GatedDeltaOptions {
            key_heads,
            value_heads,
            allow_neg_eigval: extreme,
            boundaries,
            final_state: true,
            chunk_offset: 0,
        };
        case(label, gated_delta(options), inputs)
    });
    let levels = kinds.map(|(label, tokens, heads, extreme)| {
        let [key_heads, value_heads, ..] = heads;
        let mut inputs = delta_inputs(&mut r, tokens, heads, extreme);
        inputs.push(r.input("level_input", &[2, tokens, value_heads * 7], 1.0));
        inputs.push(r.input("level_scale", &[value_heads, 7], 1.0));
        let options = LogLinearOptions {
            key_heads,
            value_heads,
            allow_neg_eigval: extreme,
            position: 0,
            want_state: false,
        };
        case(label, log_linear(options), inputs)
    });
    let states = [r.input("query", &[29, 2 * 15], 1.0), r.input("states", &[29, 4, 15, 18], 1.0)];
    vec![
        ("gated_delta", delta.into()),
        ("log_linear_delta", levels.into()),
        ("state_read", vec![case("29 rows", state_read(2), states)]),
    ]
}

/// Inputs of the anchor reader for 40 tokens and 13 anchors. Routing inputs are multiples of 1/8 and the scale is a
/// power of two: scores are exact then, so that all devices choose alike.
fn read_inputs(r: &mut Random, scale: f64) -> Vec<Input> {
    let mut inputs = vec![
        r.input("query", &[40, 16], 1.0),
        r.input("routing_query", &[40, 2 * 11], scale),
        r.input("routing_keys", &[13, 2 * 11], 0.7),
        r.input("anchor_states", &[13, 2, 16, 20], 1.0),
        r.input("null_score", &[40, 2], 1.0),
    ];
    for input in &mut inputs[1..3] {
        input.data.iter_mut().for_each(|v| *v = (*v * 8.0).round() / 8.0);
    }
    inputs
}

fn read_options(top_k: Option<usize>) -> AnchorReadOptions {
    // Tokens without anchors, with a run of them, with a list, and with none of those before.
    let segments = vec![
        Segment { start: 2, len: 9, visible: Visible::Run(0..5) },
        Segment { start: 11, len: 20, visible: Visible::List(vec![0, 3, 4, 7, 8, 12]) },
        Segment { start: 33, len: 7, visible: Visible::Run(0..13) },
    ];
    let plan = Arc::new(ReadPlan { segments });
    AnchorReadOptions { key_heads: 1, value_heads: 2, top_k, routing_scale: 0.5, plan }
}

fn readers() -> Vec<(&'static str, Vec<Case>)> {
    let mut r = Random(4);
    let dense = [1.0, 30.0].map(|scale| {
        let inputs = read_inputs(&mut r, scale);
        case(format!("scores × {scale}"), anchor_read(read_options(None)), inputs)
    });
    let chosen = [1, 3]
        .map(|k| case(format!("top {k}"), anchor_read(read_options(Some(k))), read_inputs(&mut r, 1.0)));
    let mut stored = Vec::new();
    for storage in Storage::ALL {
        for top_k in [None, Some(2)] {
            let options = read_options(top_k);
            let program = plain(move |v| {
                let states = Arc::new(vec![v[3].store(storage)?]);
                Ok(vec![read_of(v).map_with(|x| x, |_| &states).anchor_read_stored(&options)?])
            });
            stored.push(case(format!("states in {storage}, {top_k:?}"), program, read_inputs(&mut r, 1.0)));
        }
    }
    let weights = [None, Some(2)].map(|top_k| {
        let options = read_options(top_k);
        let dims = |states: &Tensor| [states.shape()[2], states.shape()[3]];
        let program = plain(move |v| Ok(vec![read_of(v).map_with(|x| x, dims).routing_weights(&options)?]));
        case(format!("top {top_k:?}"), program, read_inputs(&mut r, 1.0))
    });
    vec![
        ("anchor_read", dense.into()),
        ("anchor_read of the top K", chosen.into()),
        ("anchor_read_stored", stored),
        ("routing_weights", weights.into()),
    ]
}

fn basics() -> Vec<(&'static str, Vec<Case>)> {
    let mut r = Random(5);
    let mut maps = Vec::new();
    for kind in [Map::Neg, Map::Relu, Map::Square, Map::Scale(-1.5), Map::Shift(0.75), Map::Exp] {
        maps.push(case(format!("{kind:?}"), one(move |v| v[0].map(kind)), [r.input("x", &[300], 2.0)]));
    }
    for kind in [Map::Sigmoid, Map::Silu, Map::Tanh, Map::Softplus] {
        for scale in [1e-3, 2.0, 100.0] {
            maps.push(case(
                format!("{kind:?} × {scale}"),
                one(move |v| v[0].map(kind)),
                [r.input("x", &[300], scale)],
            ));
        }
    }
    for kind in [Map::Ln, Map::Sqrt, Map::Reciprocal] {
        let mut x = r.input("x", &[300], 2.0);
        x.data.iter_mut().for_each(|v| *v = f64::from((v.abs() + 0.25) as f32));
        maps.push(case(format!("{kind:?}"), one(move |v| v[0].map(kind)), [x]));
    }
    let mut zips = Vec::new();
    for kind in [Zip::Add, Zip::Sub, Zip::Mul, Zip::Div] {
        for (a, b) in [([5, 60, 3], [5, 60, 3]), ([5, 60, 3], [1, 1, 3]), ([5, 1, 3], [1, 60, 1])] {
            let (a, mut b) = (r.input("a", &a, 1.0), r.input("b", &b, 1.0));
            if kind == Zip::Div {
                b.data.iter_mut().for_each(|v| *v = f64::from((v.abs() + 0.25) as f32));
            }
            zips.push(case(
                format!("{kind:?} {:?} {:?}", a.shape, b.shape),
                one(move |v| v[0].zip(kind, &v[1])),
                [a, b],
            ));
        }
    }
    let mut masked = r.input("x", &[4, 37], 1.0);
    masked.data[..37].fill(f64::NEG_INFINITY);
    masked.data[40..60].fill(f64::NEG_INFINITY);
    let softmax = || one(|v| v[0].softmax());
    let softmaxes = vec![
        case("scores of about one", softmax(), [r.input("x", &[7, 300], 1.0)]),
        case("large scores", softmax(), [r.input("x", &[7, 33], 60.0)]),
        case("masked scores", softmax(), [masked]),
    ];
    let x = r.input("x", &[6, 35, 14], 1.0);
    let on_axes = |program: &dyn Fn(usize) -> Program| -> Vec<Case> {
        (0..3).map(|axis| case(format!("axis {axis}"), program(axis), [x.clone()])).collect()
    };
    let slices = on_axes(&|axis| one(move |v| v[0].slice(axis, 1..5)));
    let sums = on_axes(&|axis| one(move |v| v[0].sum(axis)));
    let means = on_axes(&|axis| one(move |v| v[0].mean(axis)));
    let expands = on_axes(&|axis| one(move |v| v[0].expand(axis, 3)));
    let concats = (0..3)
        .map(|axis| {
            let part = |r: &mut Random, size: usize| {
                let mut shape = [3, 5, 7];
                shape[axis] = size;
                r.input("part", &shape, 1.0)
            };
            let parts: Vec<Input> = [2, 9, 1].iter().map(|&size| part(&mut r, size)).collect();
            let program = one(move |v| Tensor::concat(&v.iter().collect::<Vec<_>>(), axis));
            case(format!("axis {axis}"), program, parts)
        })
        .collect();
    let permutes = [[2, 1, 0], [1, 0, 2], [0, 2, 1], [1, 2, 0]]
        .map(|axes| case(format!("{axes:?}"), one(move |v| v[0].permute(&axes)), [x.clone()]));
    vec![
        ("map", maps),
        ("zip", zips),
        ("softmax", softmaxes),
        ("slice and place", slices),
        ("concat", concats),
        ("permute", permutes.into()),
        ("sum", sums),
        ("mean", means),
        ("expand", expands),
    ]
}

/// The losses and the most probable targets.
fn numbers(losses: &TokenLosses, like: &Tensor) -> Result<[Tensor; 2]> {
    let greedy: Vec<f32> = losses.greedy.iter().map(|&id| id as f32).collect();
    let tensor = |numbers: &[f32]| Tensor::from_slice(numbers, &[numbers.len()], like.device());
    Ok([tensor(&losses.nll)?, tensor(&greedy)?])
}

/// Three steps of AdamW, with clipping.
fn steps(v: &[Tensor]) -> Result<Vec<Tensor>> {
    let [mut parameter, mut first_moment, mut second_moment] = std::array::from_fn(|i| v[i].clone());
    let clip = clip_factor(adamw::squared_norm(&[&v[3]])?, 1.0);
    for step in 1..=3 {
        let state = AdamW {
            parameter: &mut parameter,
            first_moment: &mut first_moment,
            second_moment: &mut second_moment,
        };
        adamw::update(state, &v[3], &settings(step, clip))?;
    }
    Ok(vec![parameter, first_moment, second_moment])
}

pub(super) fn settings(step: u64, clip: f64) -> Step {
    Step { learning_rate: 0.01, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip, step }
}

/// A sum or a whole that grows `times` times, and a handle on what it was before.
fn grown(v: &[Tensor], times: usize, grow: impl Fn(&mut Tensor) -> Result<()>) -> Result<Vec<Tensor>> {
    let (mut whole, held) = (v[0].clone(), v[0].clone());
    (0..times).try_for_each(|_| grow(&mut whole))?;
    Ok(vec![whole, held])
}

/// Operations that have no gradient.
fn without_gradients() -> Vec<(&'static str, Vec<Case>)> {
    let mut r = Random(6);
    let single = |program: Program, inputs: Vec<Input>| vec![case("one call", program, inputs)];
    let mut state: Vec<Input> =
        ["parameter", "first", "second", "gradient"].map(|name| r.input(name, &[1001], 0.3)).into();
    state[2].data.iter_mut().for_each(|v| *v = v.abs());
    let many = [5000, 1, 0, 300, 4097, 7, 8, 9, 10, 11].map(|len| r.input("x", &[len], 0.3)).into();
    let pair = vec![r.input("sum", &[7, 100], 1.0), r.input("term", &[7, 100], 1.0)];
    let rows = vec![r.input("whole", &[1, 3, 5], 1.0), r.input("rows", &[1, 2, 5], 1.0)];
    let logits = vec![r.input("x", &[23, 40], 1.0), r.input("weight", &[71, 40], 0.3)];
    let ids = r.ids(23, 71);
    let packed = [Precision::F32, Precision::Bf16, Precision::Int8].map(|precision| {
        let ids = ids.clone();
        let program = plain(move |v| {
            let weight = v[1].pack(precision)?;
            let [nll, _] = numbers(&v[0].token_losses(&weight, &ids)?, &v[0])?;
            Ok(vec![v[0].linear(&weight)?, weight.embedding(&ids, &[ids.len()])?, weight.unpack()?, nll])
        });
        case(format!("in {precision}"), program, logits.clone())
    });
    let blocks = vec![
        r.input("query", &[1, 3, 2 * 16], 1.0),
        r.input("keys", &[1, BLOCK_TOKENS, 2 * 16], 1.0),
        r.input("values", &[1, BLOCK_TOKENS, 2 * 12], 1.0),
        r.input("later keys", &[1, 9, 2 * 16], 1.0),
        r.input("later values", &[1, 9, 2 * 12], 1.0),
    ];
    let attention_blocks = plain(|v| {
        let block = |i: usize| KeyValues { key: v[i].clone(), value: v[i + 1].clone() };
        Ok(vec![v[0].attention_blocks(&[block(1), block(3)], 2)?])
    });
    let losses = plain(move |v| Ok(numbers(&v[0].token_losses(&v[1], &ids)?, &v[0])?.into()));
    let norm = plain(|v| {
        let norm = adamw::squared_norm(&v.iter().collect::<Vec<_>>())?;
        Ok(vec![Tensor::from_f64(&[norm], &[1], v[0].device())?])
    });
    vec![
        ("attention_blocks", single(attention_blocks, blocks)),
        ("token_losses", single(losses, logits)),
        ("packed weights", packed.into()),
        ("accumulate", single(plain(|v| grown(v, 2, |sum| sum.accumulate(&v[1]))), pair)),
        ("append", single(plain(|v| grown(v, 9, |whole| whole.append(&v[1], 1))), rows)),
        ("adamw", single(plain(steps), state)),
        ("squared_norm", single(norm, many)),
    ]
}

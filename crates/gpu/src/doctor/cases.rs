//! What the check of a device runs: every operation with random and extreme inputs. Sizes are small, so that a software
//! device takes seconds, and odd, so that no tile divides them.

use std::sync::Arc;

use march_engine::Precision;
use march_engine::ops::anchor_read::{AnchorReadOptions, ReadPlan, Segment, Visible};
use march_engine::ops::attention::BLOCK_TOKENS;
use march_engine::ops::cross_entropy::IGNORE;
use march_engine::ops::elementwise::{Map, Zip};
use march_engine::ops::gated_delta::GatedDeltaOptions;
use march_engine::ops::log_linear::LogLinearOptions;
use march_engine::ops::matmul::Transpose;
use march_engine::ops::rotary::Rotary;

use super::programs::{Input, Op, Plain};

/// One run of an operation.
pub(super) struct Case {
    /// What is special about it, for messages.
    pub label: String,
    pub op: Op,
    pub inputs: Vec<Input>,
}

fn case(label: impl Into<String>, op: Op, inputs: impl Into<Vec<Input>>) -> Case {
    Case { label: label.into(), op, inputs: inputs.into() }
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

    /// Roughly normal numbers, each an f32, so that both engines see the same.
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
    found.extend(plain());
    found
}

fn products() -> Vec<(&'static str, Vec<Case>)> {
    let mut r = Random(1);
    let mut linear = |rows: usize, inner: usize, outer: usize| {
        let inputs = [
            r.input("x", &[rows, inner], 1.0),
            r.input("weight", &[outer, inner], 1.0),
            r.input("bias", &[outer], 1.0),
        ];
        case(format!("{rows}×{inner}×{outer}"), Op::Linear, inputs)
    };
    let linear = vec![linear(1, 64, 48), linear(37, 65, 29), linear(70, 130, 90)];
    let each = [
        r.input("x", &[9, 33], 1.0),
        r.input("first weight", &[20, 33], 1.0),
        r.input("second weight", &[7, 33], 1.0),
    ];
    let matmul = [(false, false), (true, false), (false, true), (true, true)].map(|(a, b)| {
        let left: &[usize] = if a { &[3, 23, 17] } else { &[3, 17, 23] };
        let right: &[usize] = if b { &[3, 19, 23] } else { &[3, 23, 19] };
        let inputs = [r.input("a", left, 1.0), r.input("b", right, 1.0)];
        case(format!("transposed {a} and {b}"), Op::MatMul(Transpose { a, b }), inputs)
    });
    let mut targets = r.ids(23, 71);
    targets[5] = IGNORE;
    let mut loss = |label: &str, scale: f64| {
        let inputs = [r.input("x", &[23, 40], 1.0), r.input("weight", &[71, 40], scale)];
        case(label, Op::CrossEntropy(targets.clone()), inputs)
    };
    let loss = vec![loss("logits of about one", 0.16), loss("large logits", 8.0)];
    let embedding = Op::Embedding(r.ids(30, 11));
    let embedding = vec![case("30 of 11 rows", embedding, [r.input("table", &[11, 19], 1.0)])];
    vec![
        ("linear", linear),
        ("linear_each", vec![case("two weights", Op::LinearEach, each)]),
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
    let gated = rows.clone().map(|(label, inputs)| case(label, Op::GatedRmsNorm, inputs));
    let norm = rows.map(|(label, [x, weight, _])| case(label, Op::RmsNorm, [x, weight]));
    let swiglu = [1.0, 60.0].map(|scale| {
        let inputs = [r.input("gate", &[13, 50], scale), r.input("up", &[13, 50], 1.0)];
        case(format!("gates × {scale}"), Op::SwiGlu, inputs)
    });
    let conv = [(1.0, false), (1.0, true), (60.0, true)].map(|(scale, tail)| {
        let mut inputs = vec![r.input("x", &[2, 41, 37], scale), r.input("weight", &[37, 4], 1.0)];
        if tail {
            inputs.push(r.input("tail", &[2, 3, 37], scale));
        }
        case(format!("inputs × {scale}, tail {tail}"), Op::ShortConv, inputs)
    });
    let rotary = [0, 100_000].map(|offset| {
        let rotary = Rotary { heads: 3, theta: 10_000.0, offset };
        case(format!("from position {offset}"), Op::Rotary(rotary), [r.input("x", &[2, 17, 3 * 10], 1.0)])
    });
    let attention = [(1, 50, 1.0), (35, 0, 1.0), (20, 21, 10.0)].map(|(queries, before, scale)| {
        let keys = queries + before;
        let inputs = [
            r.input("query", &[2, queries, 2 * 16], scale),
            r.input("key", &[2, keys, 2 * 16], 1.0),
            r.input("value", &[2, keys, 2 * 12], 1.0),
        ];
        case(format!("{queries} queries after {before}, × {scale}"), Op::Attention(2), inputs)
    });
    vec![
        ("rms_norm", norm.into()),
        ("gated_rms_norm", gated.into()),
        ("swiglu", swiglu.into()),
        ("short_conv", conv.into()),
        ("rotary", rotary.into()),
        ("attention", attention.into()),
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
        case(label, Op::GatedDelta(options), inputs)
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
        case(label, Op::LogLinear(options), inputs)
    });
    let state_read = [r.input("query", &[29, 2 * 15], 1.0), r.input("states", &[29, 4, 15, 18], 1.0)];
    vec![
        ("gated_delta", delta.into()),
        ("log_linear_delta", levels.into()),
        ("state_read", vec![case("29 rows", Op::StateRead(2), state_read)]),
    ]
}

/// Inputs of the anchor reader for 40 tokens and 13 anchors. Routing inputs are multiples of 1/8 and the scale is a
/// power of two: scores are exact then, so that both engines choose alike.
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
        case(format!("scores × {scale}"), Op::AnchorRead(read_options(None)), inputs)
    });
    let chosen = [1, 3]
        .map(|k| case(format!("top {k}"), Op::AnchorRead(read_options(Some(k))), read_inputs(&mut r, 1.0)));
    let mut stored = Vec::new();
    for storage in [Precision::F32, Precision::Bf16, Precision::Int8] {
        for top_k in [None, Some(2)] {
            let op = Op::Plain(Plain::Stored(storage, read_options(top_k)));
            stored.push(case(format!("states in {storage}, {top_k:?}"), op, read_inputs(&mut r, 1.0)));
        }
    }
    let weights = [None, Some(2)].map(|top_k| {
        let op = Op::Plain(Plain::RoutingWeights(read_options(top_k)));
        case(format!("top {top_k:?}"), op, read_inputs(&mut r, 1.0))
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
        maps.push(case(format!("{kind:?}"), Op::Map(kind), [r.input("x", &[300], 2.0)]));
    }
    for kind in [Map::Sigmoid, Map::Silu, Map::Tanh, Map::Softplus] {
        for scale in [1e-3, 2.0, 100.0] {
            maps.push(case(format!("{kind:?} × {scale}"), Op::Map(kind), [r.input("x", &[300], scale)]));
        }
    }
    for kind in [Map::Ln, Map::Sqrt, Map::Reciprocal] {
        let mut x = r.input("x", &[300], 2.0);
        x.data.iter_mut().for_each(|v| *v = f64::from((v.abs() + 0.25) as f32));
        maps.push(case(format!("{kind:?}"), Op::Map(kind), [x]));
    }
    let mut zips = Vec::new();
    for kind in [Zip::Add, Zip::Sub, Zip::Mul, Zip::Div] {
        for (a, b) in [([5, 60, 3], [5, 60, 3]), ([5, 60, 3], [1, 1, 3]), ([5, 1, 3], [1, 60, 1])] {
            let (a, mut b) = (r.input("a", &a, 1.0), r.input("b", &b, 1.0));
            if kind == Zip::Div {
                b.data.iter_mut().for_each(|v| *v = f64::from((v.abs() + 0.25) as f32));
            }
            zips.push(case(format!("{kind:?} {:?} {:?}", a.shape, b.shape), Op::Zip(kind), [a, b]));
        }
    }
    let mut masked = r.input("x", &[4, 37], 1.0);
    masked.data[..37].fill(f64::NEG_INFINITY);
    masked.data[40..60].fill(f64::NEG_INFINITY);
    let softmax = vec![
        case("scores of about one", Op::Softmax, [r.input("x", &[7, 300], 1.0)]),
        case("large scores", Op::Softmax, [r.input("x", &[7, 33], 60.0)]),
        case("masked scores", Op::Softmax, [masked]),
    ];
    let x = r.input("x", &[6, 35, 14], 1.0);
    let on_axes = |op: &dyn Fn(usize) -> Op| -> Vec<Case> {
        (0..3).map(|axis| case(format!("axis {axis}"), op(axis), [x.clone()])).collect()
    };
    let slices = on_axes(&|axis| Op::Slice(axis, 1, 5));
    let sums = on_axes(&Op::Sum);
    let means = on_axes(&Op::Mean);
    let expands = on_axes(&|axis| Op::Expand(axis, 3));
    let concats = (0..3)
        .map(|axis| {
            let part = |r: &mut Random, size: usize| {
                let mut shape = [3, 5, 7];
                shape[axis] = size;
                r.input("part", &shape, 1.0)
            };
            let parts: Vec<Input> = [2, 9, 1].iter().map(|&size| part(&mut r, size)).collect();
            case(format!("axis {axis}"), Op::Concat(axis), parts)
        })
        .collect();
    let permutes = [[2, 1, 0], [1, 0, 2], [0, 2, 1], [1, 2, 0]]
        .map(|axes| case(format!("{axes:?}"), Op::Permute(axes.into()), [x.clone()]));
    vec![
        ("map", maps),
        ("zip", zips),
        ("softmax", softmax),
        ("slice and place", slices),
        ("concat", concats),
        ("permute", permutes.into()),
        ("sum", sums),
        ("mean", means),
        ("expand", expands),
    ]
}

fn plain() -> Vec<(&'static str, Vec<Case>)> {
    let mut r = Random(6);
    let one = |op: Plain, inputs: Vec<Input>| vec![case("one call", Op::Plain(op), inputs)];
    let mut state: Vec<Input> =
        ["parameter", "first", "second", "gradient"].map(|name| r.input(name, &[1001], 0.3)).into();
    state[2].data.iter_mut().for_each(|v| *v = v.abs());
    let many = [5000, 1, 0, 300, 4097, 7, 8, 9, 10, 11].map(|len| r.input("x", &[len], 0.3)).into();
    let pair = vec![r.input("sum", &[7, 100], 1.0), r.input("term", &[7, 100], 1.0)];
    let rows = vec![r.input("whole", &[1, 3, 5], 1.0), r.input("rows", &[1, 2, 5], 1.0)];
    let logits = vec![r.input("x", &[23, 40], 1.0), r.input("weight", &[71, 40], 0.3)];
    let ids = r.ids(23, 71);
    let packed = [Precision::F32, Precision::Bf16, Precision::Int8].map(|precision| {
        let op = Op::Plain(Plain::Packed(precision, ids.clone()));
        case(format!("in {precision}"), op, logits.clone())
    });
    let blocks = vec![
        r.input("query", &[1, 3, 2 * 16], 1.0),
        r.input("keys", &[1, BLOCK_TOKENS, 2 * 16], 1.0),
        r.input("values", &[1, BLOCK_TOKENS, 2 * 12], 1.0),
        r.input("later keys", &[1, 9, 2 * 16], 1.0),
        r.input("later values", &[1, 9, 2 * 12], 1.0),
    ];
    vec![
        ("attention_blocks", one(Plain::AttentionBlocks(2), blocks)),
        ("token_losses", one(Plain::TokenLosses(ids), logits)),
        ("packed weights", packed.into()),
        ("accumulate", one(Plain::Accumulate, pair)),
        ("append", one(Plain::Append, rows)),
        ("adamw", one(Plain::AdamW, state)),
        ("squared_norm", one(Plain::SquaredNorm, many)),
    ]
}

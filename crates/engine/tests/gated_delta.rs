//! gated_delta: CPU = reference = finite differences, on odd sizes, boundaries and extreme gates.

use std::sync::Arc;

use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaOptions};
use march_engine::{Device, Error, Result, Tensor};

use crate::common::{
    Input, Random, assert_close, compare, cpu, finite_differences, infer, outcome, portable, tensors,
};

/// The inputs, in their order.
fn all_of(t: &[Tensor]) -> GatedDelta<&Tensor> {
    GatedDelta {
        query: &t[0],
        key: &t[1],
        value: &t[2],
        retention_input: &t[3],
        write_input: &t[4],
        a_log: &t[5],
        dt_bias: &t[6],
        initial_state: t.get(7),
    }
}

/// Readout, final state and boundary states.
fn rule(options: &GatedDeltaOptions) -> impl Fn(&[Tensor]) -> Result<Vec<Tensor>> {
    move |v| {
        let out = all_of(v).gated_delta(options)?;
        Ok(vec![out.readout, out.final_state, out.boundary_states])
    }
}

#[derive(Clone, Copy)]
struct Case {
    batch: usize,
    tokens: usize,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    interval: usize,
    initial: bool,
    neg: bool,
}

fn program(c: Case, random: &mut Random) -> (GatedDeltaOptions, Vec<Input>) {
    let boundaries = if c.interval == 0 {
        Vec::new()
    } else {
        // Rows differ: every row leaves out one of the boundaries.
        (0..c.batch)
            .map(|b| {
                (1..=c.tokens / c.interval)
                    .filter(|m| b == 0 || m % 3 != b % 3)
                    .map(|m| m * c.interval)
                    .collect()
            })
            .collect()
    };
    let gates = [c.batch, c.tokens, c.value_heads];
    let mut inputs = vec![
        random.input("query", &[c.batch, c.tokens, c.key_heads * c.key_dim], 1.0),
        random.input("key", &[c.batch, c.tokens, c.key_heads * c.key_dim], 1.0),
        random.input("value", &[c.batch, c.tokens, c.value_heads * c.value_dim], 1.0),
        random.input("retention_input", &gates, 1.0),
        random.input("write_input", &gates, 1.0),
        random.input("a_log", &[c.value_heads], 1.0),
        random.input("dt_bias", &[c.value_heads], 1.0),
    ];
    inputs[6].data.iter_mut().for_each(|v| *v -= 2.0);
    if c.initial {
        inputs.push(random.input("initial_state", &[c.batch, c.value_heads, c.key_dim, c.value_dim], 0.5));
    }
    let options = GatedDeltaOptions {
        key_heads: c.key_heads,
        value_heads: c.value_heads,
        allow_neg_eigval: c.neg,
        boundaries: Arc::new(boundaries),
        final_state: true,
        chunk_offset: 0,
    };
    (options, inputs)
}

const BASE: Case = Case {
    batch: 1,
    tokens: 40,
    key_heads: 1,
    value_heads: 1,
    key_dim: 8,
    value_dim: 8,
    interval: 0,
    initial: false,
    neg: false,
};

fn cases() -> Vec<Case> {
    vec![
        Case { tokens: 0, interval: 4, initial: true, ..BASE },
        Case { tokens: 1, key_dim: 3, value_dim: 5, ..BASE },
        Case { tokens: 1, interval: 1, initial: true, ..BASE },
        Case { tokens: 15, interval: 1, batch: 2, ..BASE },
        Case { tokens: 16, interval: 16, ..BASE },
        Case {
            tokens: 150,
            interval: 20,
            batch: 2,
            key_heads: 2,
            value_heads: 2,
            key_dim: 12,
            value_dim: 24,
            initial: true,
            ..BASE
        },
        Case {
            tokens: 70,
            interval: 7,
            key_heads: 2,
            value_heads: 6,
            key_dim: 5,
            value_dim: 17,
            neg: true,
            ..BASE
        },
        Case { tokens: 200, interval: 64, value_heads: 2, key_dim: 64, value_dim: 32, initial: true, ..BASE },
        Case { tokens: 130, interval: 3, key_dim: 20, value_dim: 40, batch: 3, ..BASE },
    ]
}

#[test]
fn cpu_equals_reference() {
    let mut random = Random(11);
    for (i, case) in cases().into_iter().enumerate() {
        let (options, inputs) = program(case, &mut random);
        compare(&format!("case {i}"), &rule(&options), &inputs);
    }
}

#[test]
fn reference_equals_finite_differences() {
    let mut random = Random(12);
    for case in [
        Case {
            tokens: 9,
            interval: 4,
            batch: 2,
            key_heads: 1,
            value_heads: 2,
            key_dim: 3,
            value_dim: 4,
            initial: true,
            ..BASE
        },
        Case { tokens: 7, interval: 3, key_dim: 2, value_dim: 3, neg: true, ..BASE },
    ] {
        let (options, inputs) = program(case, &mut random);
        finite_differences("gated_delta", &rule(&options), &inputs, 6);
    }
}

/// Sets of gates at the ends of their range, over many tokens.
#[test]
fn extreme_gates() {
    let mut random = Random(13);
    let case = Case { tokens: 75, interval: 20, key_dim: 12, value_dim: 16, value_heads: 2, ..BASE };
    // (a_log, retention_input, write_input): log α = −80; log α = 0 exactly; β = 0; β = 1; a mix in one chunk.
    for (i, (a_log, retention, write)) in
        [(0.0, 80.0, 0.0), (-200.0, 0.0, 0.0), (0.0, -3.0, -200.0), (0.0, -3.0, 200.0), (0.0, f64::NAN, 0.0)]
            .into_iter()
            .enumerate()
    {
        let (options, mut inputs) = program(case, &mut random);
        inputs[5].data.fill(a_log);
        inputs[6].data.fill(0.0);
        for (t, v) in inputs[3].data.iter_mut().enumerate() {
            *v = if retention.is_nan() { [80.0, -60.0, 0.0, 3.0, -100.0][t % 5] } else { retention };
        }
        inputs[4].data.fill(write);
        compare(&format!("extreme gates {i}"), &rule(&options), &inputs);
    }
}

/// Tokens `range` of inputs that have a time dimension, of the last batch row.
fn part(inputs: &[Input], range: std::ops::Range<usize>) -> Vec<Input> {
    let cut = |input: &Input| match input.shape[..] {
        [batch, tokens, width] => {
            let row = &input.data[(batch - 1) * tokens * width..];
            let data = row[range.start * width..range.end * width].to_vec();
            Input { name: input.name, shape: vec![1, range.len(), width], data }
        }
        _ => input.clone(),
    };
    inputs.iter().map(cut).collect()
}

/// The readouts of pieces of the last batch row, put together, and the state after them.
fn pieces(cpu: &Device, options: &GatedDeltaOptions, inputs: &[Input], cuts: &[usize]) -> [Vec<f64>; 2] {
    let (mut readouts, mut state) = (Vec::new(), None);
    for cut in cuts.windows(2) {
        let mut piece = part(inputs, cut[0]..cut[1]);
        piece.extend(state.take());
        let mut out = outcome(cpu, &rule(options), &piece).unwrap().outputs;
        let (shape, data) = out.remove(1);
        readouts.extend(out.remove(0).1);
        state = Some(Input { name: "initial_state", shape, data });
    }
    [readouts, state.unwrap().data]
}

/// A cut at a multiple of 64 tokens changes no bit; boundaries that chunks divide change no bit of the readout.
#[test]
fn cuts_and_boundaries_change_no_bits() {
    let cpu = cpu(2);
    let case = Case { tokens: 200, key_dim: 24, value_dim: 20, value_heads: 2, ..BASE };
    let (options, inputs) = program(case, &mut Random(14));
    let whole = outcome(&cpu, &rule(&options), &inputs).unwrap().outputs;
    let boundaries = Arc::new(vec![vec![16, 32, 96, 200]]);
    let with = GatedDeltaOptions { boundaries, ..options.clone() };
    let with = outcome(&cpu, &rule(&with), &inputs).unwrap().outputs;
    assert!(whole[0] == with[0]);
    let [readouts, state] = pieces(&cpu, &options, &inputs, &[0, 64, 128, 200]);
    assert!(whole[0].1 == readouts && whole[1].1 == state);
}

/// One token at a time agrees with the whole, and a row of a batch with the row alone, bit for bit.
#[test]
fn steps_and_batches() {
    let cpu = cpu(0);
    let case = Case { tokens: 37, key_dim: 12, value_dim: 24, value_heads: 2, batch: 2, ..BASE };
    let (options, inputs) = program(case, &mut Random(15));
    let whole = outcome(&cpu, &rule(&options), &inputs).unwrap();
    let alone = outcome(&cpu, &rule(&options), &part(&inputs, 0..37)).unwrap();
    assert!(whole.outputs[0].1[37 * 48..] == alone.outputs[0].1[..]);
    let [readouts, _] = pieces(&cpu, &options, &inputs, &(0..=37).collect::<Vec<_>>());
    assert_close("token by token", &readouts, &alone.outputs[0].1, 1e-5);
}

/// Where the state after the last token is not wanted, all else stays as it is.
#[test]
fn without_the_final_state() {
    for device in [Device::reference(), cpu(0)] {
        let sizes = [(40, 8), (9, 8), (9, 32), (16, 80)];
        for (interval, (tokens, value_dim)) in
            [0, 8, 20].into_iter().flat_map(|c| sizes.map(|size| (c, size)))
        {
            let case = Case { interval, tokens, value_dim, initial: true, ..BASE };
            let (options, inputs) = program(case, &mut Random(17));
            let all = infer(&device, &rule(&options), &inputs).unwrap();
            let options = GatedDeltaOptions { final_state: false, ..options };
            let out = infer(&device, &rule(&options), &inputs).unwrap();
            assert!(out[0] == all[0] && out[2] == all[2]);
            assert_eq!(out[1].0, [0, 1, 8, value_dim]);
        }
    }
}

/// Where only the last tokens ask, they get the bits that they get where all ask, and states stay as they are; no
/// gradient is formed.
#[test]
fn only_the_last_tokens_ask() {
    fn check(device: &Device, case: Case, asking: usize) {
        let (options, inputs) = program(case, &mut Random(18));
        let mut t = tensors(&inputs, device);
        let all = all_of(&t).gated_delta(&options).unwrap();
        let last = |x: &Tensor| x.slice(1, case.tokens - asking..case.tokens).unwrap();
        t[0] = last(&t[0]);
        let some = all_of(&t).gated_delta(&options).unwrap();
        assert!(some.readout.to_f64() == last(&all.readout).to_f64(), "{asking} ask");
        assert!(some.boundary_states.to_f64() == all.boundary_states.to_f64());
        assert!(some.final_state.to_f64() == all.final_state.to_f64());
    }
    let devices: Vec<Device> = [Device::reference(), cpu(0)].into_iter().chain(portable(0)).collect();
    for tokens in [1, 16, 40] {
        for interval in [0, 7] {
            let heads = Case { key_heads: 2, value_heads: 4, value_dim: 20, ..BASE };
            let case = Case { tokens, interval, batch: 2, initial: true, ..heads };
            for asking in [0, 1, 2, 9, 17, 39, 40].into_iter().filter(|&n| n <= tokens) {
                devices.iter().for_each(|device| check(device, case, asking));
            }
        }
    }
    let (options, mut inputs) = program(BASE, &mut Random(19));
    let mut refused = |device, tokens: usize| {
        inputs[0] = Random(20).input("query", &[1, tokens, 8], 1.0);
        outcome(device, &rule(&options), &inputs).unwrap_err()
    };
    for device in &devices[..2] {
        let error = refused(device, BASE.tokens - 1);
        assert!(matches!(error, Error::Value { operation: "gated_delta", .. }), "{error:?}");
        assert!(matches!(refused(device, BASE.tokens + 1), Error::Shape { .. }));
    }
}

#[test]
fn bad_calls_are_errors() {
    let cpu = cpu(0);
    let (options, inputs) = program(Case { interval: 8, initial: true, ..BASE }, &mut Random(16));
    for i in 0..inputs.len() {
        let mut bad = inputs.clone();
        let last = bad[i].shape.len() - 1;
        bad[i].shape[last] += 1;
        bad[i].data = vec![0.0; bad[i].shape.iter().product()];
        match outcome(&cpu, &rule(&options), &bad) {
            Err(Error::Shape { operation: "gated_delta", .. }) => {}
            other => panic!("{}: {:?}", bad[i].name, other.err()),
        }
    }
    let refused = |options| matches!(outcome(&cpu, &rule(&options), &inputs), Err(Error::Value { .. }));
    for boundaries in [vec![vec![0]], vec![vec![3, 3]], vec![vec![41]], vec![vec![1], vec![2]]] {
        assert!(refused(GatedDeltaOptions { boundaries: Arc::new(boundaries), ..options.clone() }));
    }
    assert!(refused(GatedDeltaOptions { value_heads: 3, key_heads: 2, ..options }));
}

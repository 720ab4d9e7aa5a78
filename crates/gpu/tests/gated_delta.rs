//! gated_delta: device = reference, on odd sizes, boundaries and extreme gates; any cut of a sequence = the whole.

use std::sync::Arc;

use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaOptions};
use march_engine::{Device, Result, Tensor};

use crate::common::{self, Input, Output, Random, compare, devices, outcome, tests};

tests![
    device_equals_reference,
    several_dispatches,
    some_outputs_have_no_gradient,
    random_shapes,
    extreme_gates,
    cuts_change_no_bits,
    only_the_last_tokens_ask,
];

/// Readout, final state and boundary states; the inputs are in the order of their fields.
fn rule(v: &[Tensor], options: &GatedDeltaOptions) -> Result<Vec<Tensor>> {
    let [query, key, value, retention_input, write_input, a_log, dt_bias] = std::array::from_fn(|i| &v[i]);
    let initial_state = v.get(7);
    let input = GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, initial_state };
    let out = input.gated_delta(options)?;
    Ok(vec![out.readout, out.final_state, out.boundary_states])
}

fn check(label: &str, options: &GatedDeltaOptions, inputs: &[Input]) {
    compare(label, &|v| rule(v, options), inputs);
}

/// Only one of the outputs has a gradient.
fn check_one(label: &str, output: usize, options: &GatedDeltaOptions, inputs: &[Input]) {
    compare(label, &|v| Ok(vec![rule(v, options)?.swap_remove(output)]), inputs);
}

#[derive(Clone, Copy, Debug)]
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

fn device_equals_reference() {
    let mut random = Random(11);
    for case in [
        Case { tokens: 0, interval: 4, initial: true, ..BASE },
        Case { tokens: 0, ..BASE },
        Case { tokens: 1, key_dim: 3, value_dim: 5, ..BASE },
        Case { tokens: 1, interval: 1, initial: true, ..BASE },
        Case { tokens: 15, interval: 1, batch: 2, ..BASE },
        Case { tokens: 32, interval: 16, ..BASE },
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
        Case { tokens: 100, interval: 64, value_heads: 2, key_dim: 64, value_dim: 32, initial: true, ..BASE },
        Case { tokens: 130, interval: 3, key_dim: 20, value_dim: 40, batch: 3, ..BASE },
        Case { tokens: 45, key_dim: 131, value_dim: 70, initial: true, ..BASE },
    ] {
        let (options, inputs) = program(case, &mut random);
        check(&format!("{case:?}"), &options, &inputs);
    }
}

/// Long sequences take several dispatches, between which the state passes through a tensor.
fn several_dispatches() {
    let mut random = Random(23);
    for (interval, initial) in [(100, true), (0, false)] {
        let case = Case { tokens: 1400, key_dim: 67, value_dim: 3, interval, initial, ..BASE };
        let (mut options, inputs) = program(case, &mut random);
        if initial {
            check(&format!("{case:?}"), &options, &inputs);
            continue;
        }
        // Without a final state or an initial one, neither tensor is there to pass the state.
        options.final_state = false;
        check_one(&format!("{case:?}"), 0, &options, &inputs);
    }
}

fn some_outputs_have_no_gradient() {
    let mut random = Random(21);
    let case = Case { tokens: 50, interval: 20, value_heads: 2, initial: true, ..BASE };
    let (options, inputs) = program(case, &mut random);
    check_one("only the readout", 0, &options, &inputs);
    check_one("only boundary states", 2, &options, &inputs);
}

fn random_shapes() {
    let mut random = Random(22);
    for _ in 0..16 {
        let key_heads = random.between(1, 3);
        let case = Case {
            batch: random.between(1, 3),
            tokens: random.between(0, 80),
            key_heads,
            value_heads: key_heads * random.between(1, 2),
            // Few key sizes: each is a kernel of its own.
            key_dim: [3, 18, 67][random.between(0, 2)],
            value_dim: random.between(1, 40),
            interval: [0, 5, 32, 33][random.between(0, 3)],
            initial: random.between(0, 1) == 1,
            neg: random.between(0, 1) == 1,
        };
        let (options, inputs) = program(case, &mut random);
        check(&format!("{case:?}"), &options, &inputs);
    }
}

/// Gates at the ends of their range, over many tokens.
fn extreme_gates() {
    let mut random = Random(13);
    let case = Case { tokens: 75, interval: 20, key_dim: 12, value_dim: 16, value_heads: 2, ..BASE };
    // (a_log, retention_input, write_input): log α = −80; log α = 0 exactly; β = 0; β = 1; a mix in one chunk.
    for (i, (a_log, retention, write)) in
        [(0.0, 80.0, 0.0), (-200.0, 0.0, 0.0), (0.0, -3.0, -200.0), (0.0, -3.0, 200.0), (0.0, f64::NAN, 0.0)]
            .into_iter()
            .enumerate()
    {
        let (mut options, mut inputs) = program(case, &mut random);
        if i % 2 == 1 {
            options.boundaries = Arc::new(Vec::new());
        }
        inputs[5].data.fill(a_log);
        inputs[6].data.fill(0.0);
        for (t, v) in inputs[3].data.iter_mut().enumerate() {
            *v = if retention.is_nan() { [80.0, -60.0, 0.0, 3.0, -100.0][t % 5] } else { retention };
        }
        inputs[4].data.fill(write);
        check(&format!("extreme gates {i}"), &options, &inputs);
    }
    // Zero queries and keys: the norm's floor decides.
    let (options, mut inputs) = program(case, &mut random);
    inputs[0].data[..60].fill(0.0);
    inputs[1].data[30..90].fill(0.0);
    check("zero rows", &options, &inputs);
}

/// Tokens `range` of inputs that have a time dimension, of batch row `row`.
fn part(inputs: &[Input], row: usize, range: std::ops::Range<usize>) -> Vec<Input> {
    let cut = |input: &Input| match input.shape[..] {
        [_, tokens, width] => Input {
            name: input.name,
            shape: vec![1, range.len(), width],
            data: input.data[(row * tokens + range.start) * width..(row * tokens + range.end) * width]
                .to_vec(),
        },
        _ => input.clone(),
    };
    inputs.iter().map(cut).collect()
}

/// The outputs, without what a backward pass needs.
fn infer(device: &Device, options: &GatedDeltaOptions, inputs: &[Input]) -> Vec<Output> {
    common::infer(device, &|v| rule(v, options), inputs).unwrap()
}

/// A row of a batch alone, tokens one by one or in pieces, and calls with and without boundaries give the same bits.
fn cuts_change_no_bits() {
    let mut random = Random(15);
    let case = Case { tokens: 53, key_dim: 12, value_dim: 24, value_heads: 2, batch: 2, ..BASE };
    let (options, inputs) = program(case, &mut random);
    let width = 48;
    for device in devices() {
        let whole = infer(device, &options, &inputs);
        let kept = outcome(device, &|v| rule(v, &options), &inputs).unwrap();
        assert!(kept.outputs[..2] == whole[..2]);
        let boundaries = Arc::new(vec![vec![5, 16, 53], vec![1]]);
        let with = infer(device, &GatedDeltaOptions { boundaries, ..options.clone() }, &inputs);
        assert!(with[..2] == whole[..2]);
        assert_eq!(with[2].0, [4, 2, 12, 24]);
        for cuts in [vec![53], vec![1; 53], vec![17, 1, 32, 3]] {
            let (mut readout, mut state, mut from) = (Vec::new(), None, 0);
            for count in cuts {
                let mut piece = part(&inputs, 1, from..from + count);
                piece.extend(state.take());
                let mut out = infer(device, &options, &piece);
                let (shape, data) = out.remove(1);
                readout.extend(out.remove(0).1);
                state = Some(Input { name: "initial_state", shape, data });
                from += count;
            }
            assert!(readout == whole[0].1[53 * width..]);
            assert!(state.unwrap().data == whole[1].1[whole[1].1.len() / 2..]);
        }
    }
}

/// Where only the last tokens ask, or the final state is not wanted, all else keeps its bits.
fn only_the_last_tokens_ask() {
    let case = Case {
        tokens: 40,
        interval: 7,
        batch: 2,
        key_heads: 2,
        value_heads: 4,
        value_dim: 20,
        initial: true,
        ..BASE
    };
    let (options, inputs) = program(case, &mut Random(18));
    for device in devices() {
        for boundaries in [Arc::clone(&options.boundaries), Arc::new(Vec::new())] {
            let options = GatedDeltaOptions { boundaries, ..options.clone() };
            let all = infer(device, &options, &inputs);
            for asking in [0, 1, 17, 40] {
                let mut some = inputs.clone();
                let query = &inputs[0].data;
                some[0].shape[1] = asking;
                some[0].data = [&query[(40 - asking) * 16..40 * 16], &query[(80 - asking) * 16..]].concat();
                let found = infer(device, &options, &some);
                let want = &all[0].1;
                assert!(
                    found[0].1 == [&want[(40 - asking) * 80..40 * 80], &want[(80 - asking) * 80..]].concat()
                );
                assert!(found[1..] == all[1..], "{asking} ask");
            }
            let without = infer(device, &GatedDeltaOptions { final_state: false, ..options }, &inputs);
            assert!(without[0] == all[0] && without[2] == all[2]);
            assert_eq!(without[1].0, [0, 4, 8, 20]);
        }
    }
}

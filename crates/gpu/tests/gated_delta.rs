//! gated_delta: device = reference, on odd sizes, boundaries and extreme gates; any cut of a sequence = the whole.

use std::sync::Arc;

use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaOptions};
use march_engine::{Engine, Result, Tape, Var};

use crate::common::{Input, Program, Random, compare, devices, outcome};

struct Rule(GatedDeltaOptions);

/// The inputs, in their order.
fn all_of<T>(t: &[T]) -> GatedDelta<&T> {
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

impl Program for Rule {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let out = tape.gated_delta(all_of(v), &self.0)?;
        Ok(vec![out.readout, out.final_state, out.boundary_states])
    }
}

/// Only the readout has a gradient.
struct ReadoutOnly(Rule);

impl Program for ReadoutOnly {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![self.0.run(tape, v)?.swap_remove(0)])
    }
}

/// Only the boundary states have a gradient.
struct BoundariesOnly(Rule);

impl Program for BoundariesOnly {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![self.0.run(tape, v)?.swap_remove(2)])
    }
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

fn program(c: Case, random: &mut Random) -> (Rule, Vec<Input>) {
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
    (Rule(options), inputs)
}

#[test]
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
        let (rule, inputs) = program(case, &mut random);
        compare(&format!("{case:?}"), &rule, &inputs);
    }
}

/// Long sequences take several dispatches, between which the state passes through a tensor.
#[test]
fn several_dispatches() {
    let mut random = Random(23);
    for (interval, initial) in [(100, true), (0, false)] {
        let case = Case { tokens: 1400, key_dim: 67, value_dim: 3, interval, initial, ..BASE };
        let (mut rule, inputs) = program(case, &mut random);
        if initial {
            compare(&format!("{case:?}"), &rule, &inputs);
            continue;
        }
        // Without a final state or an initial one, neither tensor is there to pass the state.
        rule.0.final_state = false;
        compare(&format!("{case:?}"), &ReadoutOnly(rule), &inputs);
    }
}

#[test]
fn some_outputs_have_no_gradient() {
    let mut random = Random(21);
    let case = Case { tokens: 50, interval: 20, value_heads: 2, initial: true, ..BASE };
    let (rule, inputs) = program(case, &mut random);
    compare("only the readout", &ReadoutOnly(rule), &inputs);
    let (rule, inputs) = program(case, &mut random);
    compare("only boundary states", &BoundariesOnly(rule), &inputs);
}

#[test]
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
        let (rule, inputs) = program(case, &mut random);
        compare(&format!("{case:?}"), &rule, &inputs);
    }
}

/// Gates at the ends of their range, over many tokens.
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
        let (mut rule, mut inputs) = program(case, &mut random);
        if i % 2 == 1 {
            rule.0.boundaries = Arc::new(Vec::new());
        }
        inputs[5].data.fill(a_log);
        inputs[6].data.fill(0.0);
        for (t, v) in inputs[3].data.iter_mut().enumerate() {
            *v = if retention.is_nan() { [80.0, -60.0, 0.0, 3.0, -100.0][t % 5] } else { retention };
        }
        inputs[4].data.fill(write);
        compare(&format!("extreme gates {i}"), &rule, &inputs);
    }
    // Zero queries and keys: the norm's floor decides.
    let (rule, mut inputs) = program(case, &mut random);
    inputs[0].data[..60].fill(0.0);
    inputs[1].data[30..90].fill(0.0);
    compare("zero rows", &rule, &inputs);
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

/// Readout, final state and boundary states, without what a backward pass needs.
fn infer<E: Engine>(
    engine: &E,
    options: &GatedDeltaOptions,
    inputs: &[Input],
) -> [(Vec<usize>, Vec<f64>); 3] {
    let tensors: Vec<_> = inputs.iter().map(|i| engine.from_f64(&i.data, &i.shape).unwrap()).collect();
    let (out, _) = engine.gated_delta(all_of(&tensors), options, false).unwrap();
    [out.readout, out.final_state, out.boundary_states]
        .map(|t| (engine.shape(&t).to_vec(), engine.to_f64(&t)))
}

/// A row of a batch alone, tokens one by one or in pieces, and calls with and without boundaries give the same bits.
#[test]
fn cuts_change_no_bits() {
    let mut random = Random(15);
    let case = Case { tokens: 53, key_dim: 12, value_dim: 24, value_heads: 2, batch: 2, ..BASE };
    let (rule, inputs) = program(case, &mut random);
    let width = 48;
    for device in devices() {
        let whole = infer(&device, &rule.0, &inputs);
        let kept = outcome(&device, &rule, &inputs).unwrap();
        assert!(kept.outputs[0].1 == whole[0].1 && kept.outputs[1].1 == whole[1].1);
        let lists = Arc::new(vec![vec![5, 16, 53], vec![1]]);
        let with = infer(&device, &GatedDeltaOptions { boundaries: lists, ..rule.0.clone() }, &inputs);
        assert!(with[0] == whole[0] && with[1] == whole[1]);
        assert_eq!(with[2].0, [4, 2, 12, 24]);
        for cuts in [vec![53], vec![1; 53], vec![17, 1, 32, 3]] {
            let (mut readout, mut state, mut from) = (Vec::new(), None, 0);
            for count in cuts {
                let mut piece = part(&inputs, 1, from..from + count);
                piece.extend(state.take());
                let [out, last, _] = infer(&device, &rule.0, &piece);
                readout.extend(out.1);
                state = Some(Input { name: "initial_state", shape: last.0, data: last.1 });
                from += count;
            }
            assert!(readout == whole[0].1[53 * width..]);
            assert!(state.unwrap().data == whole[1].1[whole[1].1.len() / 2..]);
        }
    }
}

/// Where only the last tokens ask, or the final state is not wanted, all else keeps its bits.
#[test]
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
    let (rule, inputs) = program(case, &mut Random(18));
    for device in devices() {
        for boundaries in [Arc::clone(&rule.0.boundaries), Arc::new(Vec::new())] {
            let options = GatedDeltaOptions { boundaries, ..rule.0.clone() };
            let all = infer(&device, &options, &inputs);
            for asking in [0, 1, 17, 40] {
                let mut some = inputs.clone();
                let query = &inputs[0].data;
                some[0].shape[1] = asking;
                some[0].data = [&query[(40 - asking) * 16..40 * 16], &query[(80 - asking) * 16..]].concat();
                let found = infer(&device, &options, &some);
                let want = &all[0].1;
                assert!(
                    found[0].1 == [&want[(40 - asking) * 80..40 * 80], &want[(80 - asking) * 80..]].concat()
                );
                assert!(found[1..] == all[1..], "{asking} ask");
            }
            let without = infer(&device, &GatedDeltaOptions { final_state: false, ..options }, &inputs);
            assert!(without[0] == all[0] && without[2] == all[2]);
            assert_eq!(without[1].0, [0, 4, 8, 20]);
        }
    }
}

//! gated_delta: fast = reference = finite differences, on odd sizes, boundaries and extreme gates.

use std::sync::Arc;

use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaOptions};
use march_engine::{Cpu, CpuOptions, Engine, Error, Reference, Result, Tape, Var};

use crate::common::{Input, Program, Random, assert_close, compare, finite_differences, outcome};

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
        let input = all_of(v);
        let out = tape.gated_delta(input, &self.0)?;
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
fn fast_equals_reference() {
    let mut random = Random(11);
    for (i, case) in cases().into_iter().enumerate() {
        let (rule, inputs) = program(case, &mut random);
        compare(&format!("case {i}"), &rule, &inputs);
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
        let (rule, inputs) = program(case, &mut random);
        finite_differences("gated_delta", &rule, &inputs, 6);
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
        let (rule, mut inputs) = program(case, &mut random);
        inputs[5].data.fill(a_log);
        inputs[6].data.fill(0.0);
        for (t, v) in inputs[3].data.iter_mut().enumerate() {
            *v = if retention.is_nan() { [80.0, -60.0, 0.0, 3.0, -100.0][t % 5] } else { retention };
        }
        inputs[4].data.fill(write);
        compare(&format!("extreme gates {i}"), &rule, &inputs);
    }
}

/// A cut at a multiple of 64 tokens changes no bit; boundaries that chunks divide change no bit of the readout.
#[test]
fn cuts_and_boundaries_change_no_bits() {
    let mut random = Random(14);
    let cpu = Cpu::new(CpuOptions { threads: 2, ..Default::default() }).unwrap();
    let case = Case { tokens: 200, key_dim: 24, value_dim: 20, value_heads: 2, ..BASE };
    let (mut rule, inputs) = program(case, &mut random);
    let whole = outcome(&cpu, &rule, &inputs).unwrap();
    rule.0.boundaries = Arc::new(vec![vec![16, 32, 96, 200]]);
    let with = outcome(&cpu, &rule, &inputs).unwrap();
    assert!(whole.outputs[0].1 == with.outputs[0].1);
    rule.0.boundaries = Arc::new(Vec::new());
    let mut state: Option<Input> = None;
    let mut readouts = Vec::new();
    for (from, to) in [(0, 64), (64, 128), (128, 200)] {
        let mut piece: Vec<Input> = inputs
            .iter()
            .map(|input| match input.shape[..] {
                [_, _, width] => Input {
                    name: input.name,
                    shape: vec![1, to - from, width],
                    data: input.data[from * width..to * width].to_vec(),
                },
                _ => input.clone(),
            })
            .collect();
        piece.extend(state.take());
        let out = outcome(&cpu, &rule, &piece).unwrap();
        readouts.extend(out.outputs[0].1.clone());
        state = Some(Input {
            name: "initial_state",
            shape: out.outputs[1].0.clone(),
            data: out.outputs[1].1.clone(),
        });
    }
    assert!(whole.outputs[0].1 == readouts);
    assert!(whole.outputs[1].1 == state.unwrap().data);
}

/// One token at a time agrees with the whole, and a row of a batch with the row alone, bit for bit.
#[test]
fn steps_and_batches() {
    let mut random = Random(15);
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    let case = Case { tokens: 37, key_dim: 12, value_dim: 24, value_heads: 2, batch: 2, ..BASE };
    let (rule, inputs) = program(case, &mut random);
    let whole = outcome(&cpu, &rule, &inputs).unwrap();
    let width = 48;
    let row: Vec<Input> = inputs
        .iter()
        .map(|i| match i.shape[..] {
            [_, t, w] => Input { name: i.name, shape: vec![1, t, w], data: i.data[t * w..].to_vec() },
            _ => i.clone(),
        })
        .collect();
    let alone = outcome(&cpu, &rule, &row).unwrap();
    assert!(whole.outputs[0].1[37 * width..] == alone.outputs[0].1[..]);
    let mut state: Option<Input> = None;
    let mut readouts = Vec::new();
    for t in 0..37 {
        let mut piece: Vec<Input> = row
            .iter()
            .map(|i| match i.shape[..] {
                [_, _, w] => {
                    Input { name: i.name, shape: vec![1, 1, w], data: i.data[t * w..(t + 1) * w].to_vec() }
                }
                _ => i.clone(),
            })
            .collect();
        piece.extend(state.take());
        let out = outcome(&cpu, &rule, &piece).unwrap();
        readouts.extend(out.outputs[0].1.clone());
        state = Some(Input {
            name: "initial_state",
            shape: out.outputs[1].0.clone(),
            data: out.outputs[1].1.clone(),
        });
    }
    assert_close("token by token", &readouts, &alone.outputs[0].1, 1e-5);
}

/// Where the state after the last token is not wanted, all else stays as it is.
#[test]
fn without_the_final_state() {
    fn check<E: Engine>(engine: &E) {
        let sizes = [(40, 8), (9, 8), (9, 32), (16, 80)];
        for (interval, (tokens, value_dim)) in
            [0, 8, 20].into_iter().flat_map(|c| sizes.map(|size| (c, size)))
        {
            let case = Case { interval, tokens, value_dim, initial: true, ..BASE };
            let (rule, inputs) = program(case, &mut Random(17));
            let t: Vec<_> = inputs.iter().map(|i| engine.from_f64(&i.data, &i.shape).unwrap()).collect();
            let input = all_of(&t);
            let (all, _) = engine.gated_delta(input, &rule.0, false).unwrap();
            let options = GatedDeltaOptions { final_state: false, ..rule.0.clone() };
            let (out, _) = engine.gated_delta(input, &options, false).unwrap();
            assert!(engine.to_f64(&out.readout) == engine.to_f64(&all.readout));
            assert!(engine.to_f64(&out.boundary_states) == engine.to_f64(&all.boundary_states));
            assert_eq!(engine.shape(&out.final_state), [0, 1, 8, value_dim]);
        }
    }
    check(&Reference);
    check(&Cpu::new(CpuOptions::default()).unwrap());
}

/// Where only the last tokens ask, they get the bits that they get where all ask, and states stay as they are; no
/// gradient is formed.
#[test]
fn only_the_last_tokens_ask() {
    fn check<E: Engine>(engine: &E, case: Case, asking: usize) {
        let (rule, inputs) = program(case, &mut Random(18));
        let mut t: Vec<_> = inputs.iter().map(|i| engine.from_f64(&i.data, &i.shape).unwrap()).collect();
        let run = |t: &[E::Tensor], keep| {
            let input = all_of(t);
            engine.gated_delta(input, &rule.0, keep).map(|(out, _)| out)
        };
        let all = run(&t, false).unwrap();
        let tape = Tape::inference(engine);
        let last = |x: &E::Tensor| {
            let x = tape.constant(x.clone());
            tape.slice(&x, 1, case.tokens - asking..case.tokens).unwrap().into_value()
        };
        t[0] = last(&t[0]);
        let some = run(&t, false).unwrap();
        assert!(engine.to_f64(&some.readout) == engine.to_f64(&last(&all.readout)), "{asking} ask");
        assert!(engine.to_f64(&some.boundary_states) == engine.to_f64(&all.boundary_states));
        assert!(engine.to_f64(&some.final_state) == engine.to_f64(&all.final_state));
    }
    let cpu = |portable| Cpu::new(CpuOptions { portable, ..CpuOptions::default() }).unwrap();
    for tokens in [1, 16, 40] {
        for interval in [0, 7] {
            let case = Case {
                tokens,
                interval,
                batch: 2,
                key_heads: 2,
                value_heads: 4,
                value_dim: 20,
                initial: true,
                ..BASE
            };
            for asking in [0, 1, 2, 9, 17, 39, 40].into_iter().filter(|&n| n <= tokens) {
                check(&Reference, case, asking);
                check(&cpu(false), case, asking);
                check(&cpu(true), case, asking);
            }
        }
    }
    let (rule, mut inputs) = program(BASE, &mut Random(19));
    let mut with = |tokens: usize| {
        inputs[0] = Random(20).input("query", &[1, tokens, 8], 1.0);
        inputs.clone()
    };
    let fewer = with(BASE.tokens - 1);
    for refused in [outcome(&cpu(false), &rule, &fewer).err(), outcome(&Reference, &rule, &fewer).err()] {
        assert!(matches!(refused, Some(Error::Value { operation: "gated_delta", .. })), "{refused:?}");
    }
    assert!(matches!(outcome(&cpu(false), &rule, &with(BASE.tokens + 1)), Err(Error::Shape { .. })));
}

#[test]
fn bad_calls_are_errors() {
    let mut random = Random(16);
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    let (rule, inputs) = program(Case { interval: 8, initial: true, ..BASE }, &mut random);
    for i in 0..inputs.len() {
        let mut bad = inputs.clone();
        let last = bad[i].shape.len() - 1;
        bad[i].shape[last] += 1;
        bad[i].data = vec![0.0; bad[i].shape.iter().product()];
        match outcome(&cpu, &rule, &bad) {
            Err(Error::Shape { operation: "gated_delta", .. }) => {}
            other => panic!("{}: {:?}", bad[i].name, other.err()),
        }
    }
    for boundaries in [vec![vec![0]], vec![vec![3, 3]], vec![vec![41]], vec![vec![1], vec![2]]] {
        let options = GatedDeltaOptions { boundaries: Arc::new(boundaries), ..rule.0.clone() };
        assert!(matches!(outcome(&cpu, &Rule(options), &inputs), Err(Error::Value { .. })));
    }
    let options = GatedDeltaOptions { value_heads: 3, key_heads: 2, ..rule.0.clone() };
    assert!(matches!(outcome(&cpu, &Rule(options), &inputs), Err(Error::Value { .. })));
}

//! linear, the norms, state_read and AdamW: fast = reference = finite differences, on odd sizes.

use march_engine::ops::adamw::{AdamW, Step, clip_factor};
use march_engine::ops::linear::Linear;
use march_engine::ops::rms_norm::{GatedRmsNorm, RmsNorm};
use march_engine::ops::state_read::StateRead;
use march_engine::{Cpu, CpuOptions, Engine, Products, Reference, Result, Tape, Var};

use crate::common::{self, Input, Program, Random, compare, finite_differences};

struct LinearProgram;
impl Program for LinearProgram {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.linear(Linear { x: &v[0], weight: &v[1], bias: v.get(2) })?])
    }
}

#[test]
fn linear() {
    let mut random = Random(1);
    for (rows, inner, outer, bias) in [
        (1, 1, 1, false),
        (0, 3, 4, true),
        (7, 13, 9, true),
        (2, 64, 33, false),
        (37, 100, 70, true),
        (600, 40, 17, false),
    ] {
        let mut inputs =
            vec![random.input("x", &[rows, inner], 1.0), random.input("weight", &[outer, inner], 1.0)];
        if bias {
            inputs.push(random.input("bias", &[outer], 1.0));
        }
        compare(&format!("linear {rows}×{inner}×{outer}"), &LinearProgram, &inputs);
        if rows * inner * outer < 1000 {
            finite_differences("linear", &LinearProgram, &inputs, 5);
        }
    }
}

struct Norms;
impl Program for Norms {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![
            tape.rms_norm(RmsNorm { x: &v[0], weight: &v[2] }, 1e-6)?,
            tape.gated_rms_norm(GatedRmsNorm { x: &v[0], gate: &v[1], weight: &v[2] }, 1e-6)?,
        ])
    }
}

fn norm_inputs(random: &mut Random, rows: usize, heads: usize, width: usize) -> Vec<Input> {
    vec![
        random.input("x", &[rows, heads * width], 1.0),
        random.input("gate", &[rows, heads * width], 2.0),
        random.input("weight", &[width], 1.0),
    ]
}

#[test]
fn norms() {
    let mut random = Random(2);
    for (rows, heads, width) in [(1, 1, 3), (0, 1, 8), (5, 3, 12), (33, 1, 100), (260, 2, 64), (3, 1, 7)] {
        let inputs = norm_inputs(&mut random, rows, heads, width);
        compare(&format!("norms {rows}×{heads}×{width}"), &Norms, &inputs);
        if rows * heads * width < 400 {
            finite_differences("norms", &Norms, &inputs, 6);
        }
    }
}

struct OwnState(usize);
impl Program for OwnState {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.state_read(StateRead { query: &v[0], states: &v[1] }, self.0)?])
    }
}

#[test]
fn state_read() {
    let mut random = Random(3);
    for (rows, key_heads, value_heads, key_dim, value_dim) in
        [(0, 1, 1, 4, 4), (1, 1, 1, 1, 1), (5, 2, 4, 12, 24), (70, 1, 3, 20, 9), (33, 2, 2, 64, 32)]
    {
        let inputs = vec![
            random.input("query", &[rows, key_heads * key_dim], 1.0),
            random.input("states", &[rows, value_heads, key_dim, value_dim], 1.0),
        ];
        compare(
            &format!("state_read {rows}×{value_heads}×{key_dim}×{value_dim}"),
            &OwnState(key_heads),
            &inputs,
        );
        if rows * key_dim * value_dim < 2000 {
            finite_differences("state_read", &OwnState(key_heads), &inputs, 6);
        }
    }
}

/// For inference, a row of a product has the same bits alone and among any number of others, on any thread count.
#[test]
fn invariant_rows() {
    let mut random = Random(4);
    for (inner, outer) in [(1, 1), (20, 9), (64, 48), (333, 70)] {
        let (x, w) = (random.input("x", &[700, inner], 1.0), random.input("weight", &[outer, inner], 1.0));
        let mut want: Option<Vec<f32>> = None;
        for threads in [1, 2] {
            let options = CpuOptions { threads, products: Products::BatchInvariant, ..Default::default() };
            let cpu = Cpu::new(options).unwrap();
            let weight = cpu.from_f64(&w.data, &w.shape).unwrap();
            let run = |from: usize, rows: usize| {
                let x = cpu.from_f64(&x.data[from * inner..(from + rows) * inner], &[rows, inner]).unwrap();
                cpu.to_f32(&cpu.linear(Linear { x: &x, weight: &weight, bias: None }).unwrap())
            };
            let whole = run(0, 700);
            for (from, rows) in [(0, 1), (5, 1), (5, 2), (7, 3), (60, 64), (100, 511), (0, 600)] {
                assert!(
                    run(from, rows) == whole[from * outer..(from + rows) * outer],
                    "{rows} rows from {from}"
                );
            }
            assert!(*want.get_or_insert(whole.clone()) == whole);
        }
    }
}

/// Three steps of AdamW with clipping: fast = reference.
#[test]
fn adamw() {
    fn train<E: Engine>(engine: &E, inputs: &[Input]) -> (Vec<Vec<f64>>, f64) {
        let mut t: Vec<_> = inputs.iter().map(|i| engine.from_f64(&i.data, &i.shape).unwrap()).collect();
        let gradient = t.remove(3);
        let norm = engine.squared_norm(&[&gradient]).unwrap();
        for step in 1..=3 {
            let step = Step {
                learning_rate: 0.01,
                betas: [0.9, 0.95],
                eps: 1e-8,
                weight_decay: 0.1,
                clip: clip_factor(norm, 1.0),
                step,
            };
            // A handle that somebody else holds: the update must not reach it.
            let before = t[0].clone();
            let old = engine.to_f64(&before);
            let [parameter, first_moment, second_moment] = &mut t[..] else { panic!("three tensors") };
            engine.adamw(AdamW { parameter, first_moment, second_moment }, &gradient, &step).unwrap();
            assert!(engine.to_f64(&before) == old);
        }
        (t.iter().map(|t| engine.to_f64(t)).collect(), norm)
    }
    let mut random = Random(5);
    for len in [0, 1, 13, 5000, 100_003] {
        let mut inputs: Vec<Input> =
            ["parameter", "first", "second", "gradient"].map(|n| random.input(n, &[len], 0.3)).into();
        inputs[2].data.iter_mut().for_each(|v| *v = v.abs());
        let (want, norm) = train(&Reference, &inputs);
        for cpu in common::fast_engines() {
            let (found, fast_norm) = train(&cpu, &inputs);
            assert!((fast_norm - norm).abs() <= 1e-6 * norm);
            for (i, (found, want)) in found.iter().zip(&want).enumerate() {
                common::assert_close(&format!("{} of {len} on {cpu:?}", inputs[i].name), found, want, 1e-5);
            }
        }
    }
    assert_eq!((clip_factor(4.0, 1.0), clip_factor(0.25, 1.0)), (0.5, 1.0));
}

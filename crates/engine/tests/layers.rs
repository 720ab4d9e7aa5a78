//! linear and the norms: fast = reference = finite differences, on odd sizes.

mod common;

use common::{Input, Program, Random, compare, finite_differences};
use march_engine::ops::linear::Linear;
use march_engine::ops::rms_norm::{GatedRmsNorm, RmsNorm};
use march_engine::{Engine, Result, Tape, Var};

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

//! Programs of operations that take lists, with inputs of odd and empty sizes, for every engine.

use march_engine::ops::linear::{LinearList, Product};
use march_engine::ops::rms_norm::{GatedRmsNormList, RmsNormList};
use march_engine::ops::short_conv::ShortConv;
use march_engine::ops::swiglu::SwiGlu;
use march_engine::{Engine, Result, Tape, Var, Weight};

use super::{Input, Program, Random};

/// Results that receive a gradient.
fn used<T>(all: impl IntoIterator<Item = T>, used: &[bool]) -> Vec<T> {
    all.into_iter().zip(used).filter(|(_, used)| **used).map(|(y, _)| y).collect()
}

/// Products of two x with several weights.
#[derive(Clone, Debug)]
pub struct Products {
    pub weights: usize,
    /// x, weight, and whether there is a bias and a residual.
    pub products: Vec<(usize, usize, bool, bool)>,
    pub used: Vec<bool>,
}

impl Products {
    fn inputs(&self, random: &mut Random, rows: [usize; 2], inner: usize, outer: &[usize]) -> Vec<Input> {
        let mut inputs =
            vec![random.input("x0", &[rows[0], inner], 1.0), random.input("x1", &[rows[1], inner], 1.0)];
        inputs.extend(outer.iter().map(|&outer| random.input("weight", &[outer, inner], 0.5)));
        for &(x, weight, bias, residual) in &self.products {
            if bias {
                inputs.push(random.input("bias", &[outer[weight]], 1.0));
            }
            if residual {
                inputs.push(random.input("residual", &[rows[x], outer[weight]], 1.0));
            }
        }
        inputs
    }

    /// Calls `check` with each case: a label, the program, its inputs.
    pub fn cases(mut check: impl FnMut(&str, &Self, &[Input])) {
        let mut random = Random(23);
        let one = vec![(0, 0, false, true), (1, 0, false, true)];
        let two =
            vec![(0, 0, false, false), (0, 1, false, false), (1, 0, false, false), (1, 1, false, false)];
        let mixed = vec![
            (0, 0, false, false),
            (0, 1, true, false),
            (0, 2, false, true),
            (0, 3, true, true),
            (0, 4, false, false),
            (1, 0, false, false),
            (1, 4, true, false),
            (1, 0, false, true),
        ];
        for rows in [[75, 9], [1, 0], [0, 1], [70, 130], [3, 17]] {
            for (products, outer, inner) in
                [(&one, vec![70], 67), (&one, vec![3], 5), (&two, vec![33, 7], 67), (&two, vec![64, 100], 64)]
            {
                let used = vec![true; products.len()];
                let program = Self { weights: outer.len(), products: products.clone(), used };
                let inputs = program.inputs(&mut random, rows, inner, &outer);
                check(&format!("{rows:?} rows of {inner} with {outer:?}"), &program, &inputs);
            }
            for used in [0b1111_1111, 0b0011_0010, 0b1000_0001] {
                let used: Vec<bool> = (0..8).map(|i| used >> i & 1 == 1).collect();
                let program = Self { weights: 5, products: mixed.clone(), used };
                let inputs = program.inputs(&mut random, rows, 30, &[64, 3, 33, 129, 17]);
                check(&format!("{rows:?} rows, used {:?}", program.used), &program, &inputs);
            }
        }
        // So many rows that a device may make their sums in pieces.
        let program = Self { weights: 1, products: one, used: vec![true; 2] };
        let inputs = program.inputs(&mut random, [4300, 5], 3, &[19]);
        check("many rows", &program, &inputs);
    }
}

impl Program for Products {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let mut rest = v[2 + self.weights..].iter();
        let mut next = |is_there: bool| if is_there { rest.next() } else { None };
        let products: Vec<_> = self
            .products
            .iter()
            .map(|&(x, weight, bias, residual)| {
                let (bias, residual) = (next(bias), next(residual));
                Product { x, weight, bias, residual }
            })
            .collect();
        let weights: Vec<_> = v[2..2 + self.weights].iter().map(Weight::Full).collect();
        let list = LinearList { x: &[&v[0], &v[1]], weights: &weights, products: &products };
        Ok(used(tape.linear_list(list)?, &self.used))
    }
}

/// Norms of several x with the same weights, plain and gated, so that each x has two consumers.
#[derive(Clone, Debug)]
pub struct Norms {
    pub used: Vec<bool>,
}

impl Norms {
    /// Calls `check` with each case: a label, the program, its inputs.
    pub fn cases(mut check: impl FnMut(&str, &Self, &[Input])) {
        let mut random = Random(29);
        for (rows, heads, width, used) in [
            (vec![75, 9], 1, 32, vec![true; 2]),
            (vec![1, 0], 2, 20, vec![true; 2]),
            (vec![0, 3], 1, 7, vec![true; 2]),
            (vec![33, 5, 1], 3, 65, vec![true; 3]),
            (vec![4, 6], 1, 300, vec![false, true]),
            (vec![20, 3, 2], 1, 5, vec![true, false, true]),
        ] {
            let mut inputs = vec![random.input("weight", &[width], 1.0)];
            for name in ["x", "gate"] {
                inputs.extend(rows.iter().map(|&rows| random.input(name, &[rows, heads * width], 1.0)));
            }
            check(&format!("{rows:?} rows of {heads} × {width}, used {used:?}"), &Self { used }, &inputs);
        }
    }
}

impl Program for Norms {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let (x, gates) = v[1..].split_at(self.used.len());
        let (x, gates): (Vec<_>, Vec<_>) = (x.iter().collect(), gates.iter().collect());
        let mut outputs = used(tape.rms_norm_each(RmsNormList { x: &x, weight: &v[0] }, 1e-6)?, &self.used);
        let gated = GatedRmsNormList { x: &x, gates: &gates, weight: &v[0] };
        outputs.extend(used(tape.gated_rms_norm_each(gated, 1e-6)?, &self.used));
        Ok(outputs)
    }
}

/// SwiGLU of several inputs.
#[derive(Clone, Debug)]
pub struct SwiGlus {
    pub used: Vec<bool>,
}

impl SwiGlus {
    /// Calls `check` with each case: a label, the program, its inputs.
    pub fn cases(mut check: impl FnMut(&str, &Self, &[Input])) {
        let mut random = Random(31);
        for (sizes, used) in [
            (vec![257, 31], vec![true, true]),
            (vec![0, 7], vec![true, true]),
            (vec![1, 0], vec![true, true]),
            (vec![300, 256, 5], vec![true, false, true]),
        ] {
            let mut inputs = Vec::new();
            for &size in &sizes {
                inputs.extend([random.input("gate", &[size], 2.0), random.input("up", &[size], 1.0)]);
            }
            check(&format!("{sizes:?} numbers, used {used:?}"), &Self { used }, &inputs);
        }
    }
}

impl Program for SwiGlus {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let inputs: Vec<_> = v.chunks_exact(2).map(|two| SwiGlu { gate: &two[0], up: &two[1] }).collect();
        Ok(used(tape.swiglu_each(&inputs)?, &self.used))
    }
}

/// Three convolutions.
#[derive(Clone, Debug)]
pub struct Convolutions {
    pub tails: bool,
    pub used: [bool; 3],
}

impl Convolutions {
    /// Calls `check` with each case: a label, the program, its inputs.
    pub fn cases(mut check: impl FnMut(&str, &Self, &[Input])) {
        let mut random = Random(37);
        for (batch, tokens, kernel, widths) in [
            (1, 1, 4, [32, 32, 64]),
            (2, 75, 4, [5, 33, 7]),
            (1, 40, 1, [3, 300, 65]),
            (3, 9, 3, [2, 0, 1]),
            (1, 0, 4, [4, 4, 4]),
            (1, 12, 4, [64, 64, 64]),
        ] {
            for (tails, used) in [(false, [true; 3]), (true, [true; 3]), (false, [true, false, true])] {
                let mut inputs = Vec::new();
                inputs.extend(widths.map(|width| random.input("x", &[batch, tokens, width], 1.0)));
                inputs.extend(widths.map(|width| random.input("weight", &[width, kernel], 1.0)));
                if tails {
                    inputs.extend(widths.map(|width| random.input("tail", &[batch, kernel - 1, width], 1.0)));
                }
                let label =
                    format!("{batch} × {tokens}, K {kernel}, {widths:?}, tails {tails}, used {used:?}");
                check(&label, &Self { tails, used }, &inputs);
            }
        }
    }
}

impl Program for Convolutions {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let input = |q: usize| ShortConv { x: &v[q], weight: &v[3 + q], tail: self.tails.then(|| &v[6 + q]) };
        let all = used(tape.short_conv_each([0, 1, 2].map(input))?, &self.used);
        Ok(all.into_iter().flat_map(|(y, tail)| [y, tail]).collect())
    }
}

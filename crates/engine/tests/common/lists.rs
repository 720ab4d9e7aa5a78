//! Cases of operations that take lists, with inputs of odd and empty sizes, for every device. Each function calls `check`
//! with a label, the program and its inputs.

use march_engine::ops::linear::{Product, linear_list};
use march_engine::ops::rms_norm::{gated_rms_norm_each, rms_norm_each};
use march_engine::ops::short_conv::{ShortConv, short_conv_each};
use march_engine::ops::swiglu::swiglu_each;
use march_engine::{Result, Tensor};

use super::{Input, Program, Random};

/// Results that receive a gradient.
fn used<T>(all: impl IntoIterator<Item = T>, used: &[bool]) -> Vec<T> {
    all.into_iter().zip(used).filter(|(_, used)| **used).map(|(y, _)| y).collect()
}

/// Products of two x with several weights.
struct Products {
    /// Rows of each weight.
    outer: Vec<usize>,
    /// x, weight, and whether there is a bias and a residual.
    products: Vec<(usize, usize, bool, bool)>,
    used: Vec<bool>,
}

impl Products {
    fn inputs(&self, random: &mut Random, rows: [usize; 2], inner: usize) -> Vec<Input> {
        let mut inputs =
            vec![random.input("x0", &[rows[0], inner], 1.0), random.input("x1", &[rows[1], inner], 1.0)];
        inputs.extend(self.outer.iter().map(|&outer| random.input("weight", &[outer, inner], 0.5)));
        for &(x, weight, bias, residual) in &self.products {
            if bias {
                inputs.push(random.input("bias", &[self.outer[weight]], 1.0));
            }
            if residual {
                inputs.push(random.input("residual", &[rows[x], self.outer[weight]], 1.0));
            }
        }
        inputs
    }

    fn run(&self, v: &[Tensor]) -> Result<Vec<Tensor>> {
        let (weights, rest) = v[2..].split_at(self.outer.len());
        let (weights, mut rest) = (weights.iter().collect::<Vec<_>>(), rest.iter());
        let mut next = |is_there: bool| if is_there { rest.next() } else { None };
        let product = |&(x, weight, bias, residual)| {
            let (bias, residual) = (next(bias), next(residual));
            Product { x, weight, bias, residual }
        };
        let products: Vec<_> = self.products.iter().map(product).collect();
        Ok(used(linear_list(&[&v[0], &v[1]], &weights, &products)?, &self.used))
    }
}

pub fn products(mut check: impl FnMut(&str, Program<'_>, &[Input])) {
    let mut random = Random(23);
    let mut case = |rows: [usize; 2], inner, program: Products| {
        let inputs = program.inputs(&mut random, rows, inner);
        let label = format!("{rows:?} rows of {inner} with {:?}, used {:?}", program.outer, program.used);
        check(&label, &|v| program.run(v), &inputs);
    };
    let one = vec![(0, 0, false, true), (1, 0, false, true)];
    let two = vec![(0, 0, false, false), (0, 1, false, false), (1, 0, false, false), (1, 1, false, false)];
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
            case(rows, inner, Products { outer, products: products.clone(), used });
        }
        for used in [0b1111_1111, 0b0011_0010, 0b1000_0001] {
            let used = (0..8).map(|i| used >> i & 1 == 1).collect();
            case(rows, 30, Products { outer: vec![64, 3, 33, 129, 17], products: mixed.clone(), used });
        }
    }
    // So many rows that a device may make their sums in pieces.
    case([4300, 5], 3, Products { outer: vec![19], products: one, used: vec![true; 2] });
}

/// Norms of several x with the same weights, plain and gated, so that each x has two consumers.
pub fn norms(mut check: impl FnMut(&str, Program<'_>, &[Input])) {
    let mut random = Random(29);
    for (rows, heads, width, uses) in [
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
        let program = |v: &[Tensor]| {
            let all: Vec<&Tensor> = v[1..].iter().collect();
            let (x, gates) = all.split_at(uses.len());
            let mut outputs = used(rms_norm_each(x, &v[0], 1e-6)?, &uses);
            outputs.extend(used(gated_rms_norm_each(x, gates, &v[0], 1e-6)?, &uses));
            Ok(outputs)
        };
        check(&format!("{rows:?} rows of {heads} × {width}, used {uses:?}"), &program, &inputs);
    }
}

/// SwiGLU of several inputs.
pub fn swiglus(mut check: impl FnMut(&str, Program<'_>, &[Input])) {
    let mut random = Random(31);
    for (sizes, uses) in [
        (vec![257, 31], vec![true, true]),
        (vec![0, 7], vec![true, true]),
        (vec![1, 0], vec![true, true]),
        (vec![300, 256, 5], vec![true, false, true]),
    ] {
        let mut inputs = Vec::new();
        for &size in &sizes {
            inputs.extend([random.input("gate", &[size], 2.0), random.input("up", &[size], 1.0)]);
        }
        let program = |v: &[Tensor]| {
            let (gates, ups): (Vec<_>, Vec<_>) = v.chunks_exact(2).map(|two| (&two[0], &two[1])).unzip();
            Ok(used(swiglu_each(&gates, &ups)?, &uses))
        };
        check(&format!("{sizes:?} numbers, used {uses:?}"), &program, &inputs);
    }
}

/// Three convolutions.
pub fn convolutions(mut check: impl FnMut(&str, Program<'_>, &[Input])) {
    let mut random = Random(37);
    for (batch, tokens, kernel, widths) in [
        (1, 1, 4, [32, 32, 64]),
        (2, 75, 4, [5, 33, 7]),
        (1, 40, 1, [3, 300, 65]),
        (3, 9, 3, [2, 0, 1]),
        (1, 0, 4, [4, 4, 4]),
        (1, 12, 4, [64, 64, 64]),
    ] {
        for (tails, uses) in [(false, [true; 3]), (true, [true; 3]), (false, [true, false, true])] {
            let mut inputs = Vec::new();
            inputs.extend(widths.map(|width| random.input("x", &[batch, tokens, width], 1.0)));
            inputs.extend(widths.map(|width| random.input("weight", &[width, kernel], 1.0)));
            if tails {
                inputs.extend(widths.map(|width| random.input("tail", &[batch, kernel - 1, width], 1.0)));
            }
            let program = |v: &[Tensor]| {
                let input = |q: usize| ShortConv { x: &v[q], weight: &v[3 + q], tail: v.get(6 + q) };
                let all = used(short_conv_each([0, 1, 2].map(input))?, &uses);
                Ok(all.into_iter().flat_map(|(y, tail)| [y, tail]).collect())
            };
            let label = format!("{batch} × {tokens}, K {kernel}, {widths:?}, tails {tails}, used {uses:?}");
            check(&label, &program, &inputs);
        }
    }
}

//! sum, mean, expand and sum_to: device = reference, on odd and empty shapes and on sums long enough for several turns.

use march_engine::{Engine, Reference, Result, Tape, Var};

use crate::common::{Program, Random, assert_close, compare, devices};

/// A test's program, written once for all engines.
macro_rules! program {
    ($name:ident { $($field:ident: $kind:ty),* } |$this:ident, $tape:ident, $v:ident| $body:expr) => {
        struct $name { $($field: $kind),* }
        impl Program for $name {
            fn run<'e, E: Engine>(
                &self,
                $tape: &Tape<'e, E>,
                $v: &[Var<E::Tensor>],
            ) -> Result<Vec<Var<E::Tensor>>> {
                let $this = self;
                $body
            }
        }
    };
}

program! { SumProgram { axis: usize } |this, tape, v| Ok(vec![tape.sum(&v[0], this.axis)?]) }
program! { MeanProgram { axis: usize } |this, tape, v| Ok(vec![tape.mean(&v[0], this.axis)?]) }
program! { ExpandProgram { axis: usize, count: usize } |this, tape, v| {
    Ok(vec![tape.expand(&v[0], this.axis, this.count)?])
}}

fn every_axis(shape: &[usize], random: &mut Random) {
    let inputs = [random.input("x", shape, 1.0)];
    for axis in 0..shape.len() {
        compare(&format!("sum {shape:?} {axis}"), &SumProgram { axis }, &inputs);
        if shape[axis] > 0 {
            compare(&format!("mean {shape:?} {axis}"), &MeanProgram { axis }, &inputs);
        }
    }
}

#[test]
fn reductions() {
    let mut random = Random(23);
    for shape in [
        vec![5],
        vec![1, 1],
        vec![3, 4, 5],
        vec![7, 41, 3],
        vec![2, 900, 43],
        vec![300, 17],
        vec![0, 3],
        vec![3, 0, 20],
        vec![20_001],
        vec![3, 5000, 2],
    ] {
        every_axis(&shape, &mut random);
    }
    for shape in [vec![5], vec![3, 4, 5], vec![0, 3]] {
        let inputs = [random.input("x", &shape, 1.0)];
        for (axis, count) in (0..=shape.len()).flat_map(|axis| [(axis, 0), (axis, 1), (axis, 3)]) {
            compare(&format!("expand {shape:?} {axis} {count}"), &ExpandProgram { axis, count }, &inputs);
        }
    }
    compare("expand a number", &ExpandProgram { axis: 0, count: 4 }, &[random.input("x", &[], 1.0)]);
}

#[test]
fn random_shapes() {
    let mut random = Random(24);
    for _ in 0..15 {
        let shape: Vec<usize> = (0..random.between(1, 3)).map(|_| random.between(1, 40)).collect();
        every_axis(&shape, &mut random);
    }
}

#[test]
fn sums_to_smaller_shapes() {
    let mut random = Random(25);
    let cases: [(&[usize], &[usize]); 10] = [
        (&[5, 7], &[5, 7]),
        (&[5, 7], &[7]),
        (&[5, 7], &[5, 1]),
        (&[5, 7], &[]),
        (&[700, 33], &[33]),
        (&[2, 3, 4, 5], &[3, 1, 5]),
        (&[2, 3, 4, 5], &[2, 1, 4, 1]),
        (&[0, 3], &[3]),
        (&[2, 1, 3], &[1, 1, 3]),
        (&[3, 2, 3, 2, 3, 2, 3], &[2, 1, 2, 1, 2, 1]),
    ];
    for (from, to) in cases {
        let x = random.input("x", from, 1.0);
        let reference = Reference.sum_to(&Reference.from_f64(&x.data, from).unwrap(), to).unwrap();
        for device in devices() {
            let found = device.sum_to(&device.from_f64(&x.data, from).unwrap(), to).unwrap();
            assert_eq!(device.shape(&found), to);
            let what = format!("sum_to {from:?} {to:?} on {device:?}");
            assert_close(&what, &device.to_f64(&found), reference.data(), 1e-5);
        }
    }
}

/// More sums than a dispatch has workgroups in one dimension.
#[test]
fn many_sums() {
    let (rows, width) = (70_001, 3);
    let numbers: Vec<f32> = (0..rows * width).map(|i| (i % 1000) as f32).collect();
    let want: Vec<f32> = numbers.chunks(width).map(|row| row.iter().sum()).collect();
    for device in devices() {
        let x = device.from_f32(&numbers, &[rows, width]).unwrap();
        assert!(device.to_f32(&device.sum(&x, 1).unwrap()) == want, "{device:?}");
    }
}

/// A sum's bits do not depend on the other sums of the call.
#[test]
fn a_row_stands_alone() {
    let mut random = Random(26);
    for (rows, width) in [(9, 5000), (300, 20), (5, 300)] {
        let x: Vec<f32> = (0..rows * width).map(|_| random.normal() as f32).collect();
        for device in devices() {
            let run = |x: &[f32]| {
                let x = device.from_f32(x, &[x.len() / width, width]).unwrap();
                device.to_f32(&device.sum(&x, 1).unwrap())
            };
            let whole = run(&x);
            for row in [0, 1, rows - 1] {
                assert_eq!(run(&x[row * width..(row + 1) * width]), whole[row..row + 1]);
            }
        }
    }
}

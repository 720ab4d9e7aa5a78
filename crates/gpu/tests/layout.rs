//! slice, place, concat, permute and append: device = reference, on odd and empty shapes.

use march_engine::{Engine, Result, Tape, Var};

use crate::common::{Input, Program, Random, compare, devices};

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

program! { SliceProgram { axis: usize, range: std::ops::Range<usize> } |this, tape, v| {
    Ok(vec![tape.slice(&v[0], this.axis, this.range.clone())?])
}}

program! { ConcatProgram { axis: usize } |this, tape, v| {
    let parts: Vec<_> = v.iter().collect();
    Ok(vec![tape.concat(&parts, this.axis)?])
}}

program! { PermuteProgram { axes: Vec<usize> } |this, tape, v| {
    Ok(vec![tape.permute(&v[0], &this.axes)?])
}}

program! { ReshapeProgram { shape: Vec<usize> } |this, tape, v| {
    Ok(vec![tape.reshape(&v[0], &this.shape)?])
}}

/// A slice's gradient is a place, so both are compared.
#[test]
fn slices() {
    let mut random = Random(19);
    let x = [random.input("x", &[3, 5, 7], 1.0)];
    for (axis, range) in [(0, 1..2), (0, 0..3), (1, 0..2), (1, 4..5), (2, 2..6), (2, 3..3), (1, 5..5)] {
        compare(&format!("slice {axis} {range:?}"), &SliceProgram { axis, range }, &x);
    }
    let large = [random.input("x", &[31, 32, 33], 1.0)];
    for axis in 0..3 {
        compare("slice", &SliceProgram { axis, range: 5..30 }, &large);
    }
    compare("slice", &SliceProgram { axis: 1, range: 1..3 }, &[random.input("x", &[0, 4], 1.0)]);
    compare("slice", &SliceProgram { axis: 1, range: 1..3 }, &[random.input("x", &[1, 4, 3], 1.0)]);
}

#[test]
fn concats() {
    let mut random = Random(20);
    for axis in 0..3 {
        for sizes in [
            vec![2],
            vec![1, 3],
            vec![0, 4, 2],
            vec![0, 0],
            vec![40, 9, 23],
            vec![1; 8],
            vec![2, 1, 3, 1, 1, 2, 5, 4, 1, 0, 1, 2, 1, 3, 1, 1, 7],
        ] {
            let mut input = |size| {
                let mut shape = [3, 5, 7];
                shape[axis] = size;
                random.input("part", &shape, 1.0)
            };
            let inputs: Vec<Input> = sizes.iter().map(|&size| input(size)).collect();
            compare(&format!("concat {axis} {sizes:?}"), &ConcatProgram { axis }, &inputs);
        }
    }
}

#[test]
fn permutations() {
    let mut random = Random(21);
    let cases: [(&[usize], &[usize]); 14] = [
        (&[], &[]),
        (&[5], &[0]),
        (&[3, 4], &[1, 0]),
        (&[17, 29], &[1, 0]),
        (&[2, 3, 4], &[0, 2, 1]),
        (&[2, 3, 4], &[1, 0, 2]),
        (&[2, 1, 4, 3], &[3, 1, 0, 2]),
        (&[3, 9, 2, 10], &[2, 0, 3, 1]),
        (&[0, 3, 2], &[2, 0, 1]),
        (&[2, 40, 3, 24], &[0, 2, 1, 3]),
        (&[2, 40, 3, 24], &[0, 2, 3, 1]),
        (&[61, 103], &[1, 0]),
        (&[28, 2, 64], &[1, 2, 0]),
        (&[2, 3, 2, 3, 2, 3], &[5, 4, 3, 2, 1, 0]),
    ];
    for (shape, axes) in cases {
        let inputs = [random.input("x", shape, 1.0)];
        compare(&format!("permute {shape:?} by {axes:?}"), &PermuteProgram { axes: axes.to_vec() }, &inputs);
    }
}

#[test]
fn random_shapes() {
    let mut random = Random(27);
    for _ in 0..25 {
        let shape: Vec<usize> = (0..random.between(1, 5)).map(|_| random.between(1, 7)).collect();
        let mut axes: Vec<usize> = (0..shape.len()).collect();
        for i in (1..axes.len()).rev() {
            axes.swap(i, random.between(0, i));
        }
        let inputs = [random.input("x", &shape, 1.0)];
        compare(&format!("permute {shape:?} by {axes:?}"), &PermuteProgram { axes }, &inputs);
        let axis = random.between(0, shape.len() - 1);
        let end = random.between(0, shape[axis]);
        let range = random.between(0, end)..end;
        compare(&format!("slice {shape:?} {axis} {range:?}"), &SliceProgram { axis, range }, &inputs);
    }
}

#[test]
fn reshapes() {
    let mut random = Random(22);
    for (from, to) in [(vec![2, 6], vec![3, 4]), (vec![1], vec![]), (vec![0, 5], vec![7, 0])] {
        let inputs = [random.input("x", &from, 1.0)];
        compare(&format!("reshape {from:?} {to:?}"), &ReshapeProgram { shape: to }, &inputs);
    }
}

/// Row after row, past several doublings: the numbers are those of one tensor, and other handles do not change.
#[test]
fn append_row_by_row() {
    for device in devices() {
        for (rows_at_once, rows, width) in [(1, 300, 7), (3, 50, 64), (5, 9, 1)] {
            let numbers: Vec<f32> = (0..rows_at_once * rows * width).map(|i| i as f32).collect();
            let step = rows_at_once * width;
            let mut whole = device.from_f32(&[], &[1, 0, width]).unwrap();
            let mut held = Vec::new();
            for (i, row) in numbers.chunks(step).enumerate() {
                let row = device.from_f32(row, &[1, rows_at_once, width]).unwrap();
                device.append(&mut whole, &row, 1).unwrap();
                if i % 7 == 0 {
                    held.push(whole.clone());
                }
                if i % 11 == 0 {
                    // A handle that is dropped again: the next row goes in place.
                    assert_eq!(device.shape(&whole.clone()), [1, (i + 1) * rows_at_once, width]);
                }
            }
            assert_eq!(device.to_f32(&whole), numbers);
            let doubled =
                device.to_f32(&device.zip(march_engine::ops::elementwise::Zip::Add, &whole, &whole).unwrap());
            assert!(doubled.iter().zip(&numbers).all(|(d, n)| *d == 2.0 * n));
            for (i, held) in held.iter().enumerate() {
                assert_eq!(device.to_f32(held), numbers[..(7 * i + 1) * step], "handle {i} on {device:?}");
            }
        }
    }
}

/// Appending to itself, and appending nothing.
#[test]
fn append_the_same_tensor() {
    for device in devices() {
        let mut whole = device.from_f32(&[1.0, 2.0], &[2]).unwrap();
        let same = whole.clone();
        device.append(&mut whole, &same, 0).unwrap();
        device.append(&mut whole, &device.from_f32(&[], &[0]).unwrap(), 0).unwrap();
        assert_eq!(device.to_f32(&whole), [1.0, 2.0, 1.0, 2.0]);
        assert_eq!(device.to_f32(&same), [1.0, 2.0]);
    }
}

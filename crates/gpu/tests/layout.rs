//! slice, place, concat, permute and append: device = reference, on odd and empty shapes.

use std::ops::Range;

use march_engine::Tensor;

use crate::common::{Input, Random, compare, devices, tests};

tests![slices, concats, permutations, random_shapes, reshapes, append_row_by_row, append_the_same_tensor];

fn slice(input: &Input, axis: usize, range: Range<usize>) {
    let label = format!("slice {:?} {axis} {range:?}", input.shape);
    let program = |v: &[Tensor]| Ok(vec![v[0].slice(axis, range.clone())?]);
    compare(&label, &program, std::slice::from_ref(input));
}

fn permute(input: &Input, axes: &[usize]) {
    let label = format!("permute {:?} by {axes:?}", input.shape);
    compare(&label, &|v| Ok(vec![v[0].permute(axes)?]), std::slice::from_ref(input));
}

/// A slice's gradient is a place, so both are compared.
fn slices() {
    let mut random = Random(19);
    let x = random.input("x", &[3, 5, 7], 1.0);
    for (axis, range) in [(0, 1..2), (0, 0..3), (1, 0..2), (1, 4..5), (2, 2..6), (2, 3..3), (1, 5..5)] {
        slice(&x, axis, range);
    }
    let large = random.input("x", &[31, 32, 33], 1.0);
    (0..3).for_each(|axis| slice(&large, axis, 5..30));
    slice(&random.input("x", &[0, 4], 1.0), 1, 1..3);
    slice(&random.input("x", &[1, 4, 3], 1.0), 1, 1..3);
}

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
            let program = |v: &[Tensor]| Ok(vec![Tensor::concat(&v.iter().collect::<Vec<_>>(), axis)?]);
            compare(&format!("concat {axis} {sizes:?}"), &program, &inputs);
        }
    }
}

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
        permute(&random.input("x", shape, 1.0), axes);
    }
}

fn random_shapes() {
    let mut random = Random(27);
    for _ in 0..25 {
        let shape: Vec<usize> = (0..random.between(1, 5)).map(|_| random.between(1, 7)).collect();
        let mut axes: Vec<usize> = (0..shape.len()).collect();
        for i in (1..axes.len()).rev() {
            axes.swap(i, random.between(0, i));
        }
        let input = random.input("x", &shape, 1.0);
        permute(&input, &axes);
        let axis = random.between(0, shape.len() - 1);
        let end = random.between(0, shape[axis]);
        slice(&input, axis, random.between(0, end)..end);
    }
}

fn reshapes() {
    let mut random = Random(22);
    for (from, to) in [(vec![2, 6], vec![3, 4]), (vec![1], vec![]), (vec![0, 5], vec![7, 0])] {
        let inputs = [random.input("x", &from, 1.0)];
        compare(&format!("reshape {from:?} {to:?}"), &|v| Ok(vec![v[0].reshape(&to)?]), &inputs);
    }
}

/// Row after row, past several doublings: the numbers are those of one tensor, and other handles do not change.
fn append_row_by_row() {
    for device in devices() {
        for (rows_at_once, rows, width) in [(1, 300, 7), (3, 50, 64), (5, 9, 1)] {
            let numbers: Vec<f32> = (0..rows_at_once * rows * width).map(|i| i as f32).collect();
            let step = rows_at_once * width;
            let mut whole = Tensor::from_slice(&[], &[1, 0, width], device).unwrap();
            let mut held = Vec::new();
            for (i, row) in numbers.chunks(step).enumerate() {
                let row = Tensor::from_slice(row, &[1, rows_at_once, width], device).unwrap();
                whole.append(&row, 1).unwrap();
                if i % 7 == 0 {
                    held.push(whole.clone());
                }
                if i % 11 == 0 {
                    // A handle that is dropped again: the next row goes in place.
                    assert_eq!(whole.clone().shape(), [1, (i + 1) * rows_at_once, width]);
                }
            }
            assert_eq!(whole.to_f32(), numbers);
            let doubled = whole.add(&whole).unwrap().to_f32();
            assert!(doubled.iter().zip(&numbers).all(|(d, n)| *d == 2.0 * n));
            for (i, held) in held.iter().enumerate() {
                assert_eq!(held.to_f32(), numbers[..(7 * i + 1) * step], "handle {i} on {device}");
            }
        }
    }
}

/// Appending to itself, and appending nothing.
fn append_the_same_tensor() {
    for device in devices() {
        let mut whole = Tensor::from_slice(&[1.0, 2.0], &[2], device).unwrap();
        let same = whole.clone();
        whole.append(&same, 0).unwrap();
        whole.append(&Tensor::from_slice(&[], &[0], device).unwrap(), 0).unwrap();
        assert_eq!(whole.to_f32(), [1.0, 2.0, 1.0, 2.0]);
        assert_eq!(same.to_f32(), [1.0, 2.0]);
    }
}

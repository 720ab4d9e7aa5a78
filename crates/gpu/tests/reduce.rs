//! sum, mean, expand and sum_to: device = reference, on odd and empty shapes and on sums long enough for several turns.

use march_engine::ops::reduce::SumTo;
use march_engine::{Device, Op, Tensor};

use crate::common::{Random, assert_close, compare, devices, tests};

tests![reductions, random_shapes, sums_to_smaller_shapes, many_sums, a_row_stands_alone];

fn every_axis(shape: &[usize], random: &mut Random) {
    let inputs = [random.input("x", shape, 1.0)];
    for axis in 0..shape.len() {
        compare(&format!("sum {shape:?} {axis}"), &|v| Ok(vec![v[0].sum(axis)?]), &inputs);
        if shape[axis] > 0 {
            compare(&format!("mean {shape:?} {axis}"), &|v| Ok(vec![v[0].mean(axis)?]), &inputs);
        }
    }
}

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
    for shape in [vec![], vec![5], vec![3, 4, 5], vec![0, 3]] {
        let inputs = [random.input("x", &shape, 1.0)];
        for (axis, count) in (0..=shape.len()).flat_map(|axis| [(axis, 0), (axis, 1), (axis, 3)]) {
            let label = format!("expand {shape:?} {axis} {count}");
            compare(&label, &|v| Ok(vec![v[0].expand(axis, count)?]), &inputs);
        }
    }
}

fn random_shapes() {
    let mut random = Random(24);
    for _ in 0..15 {
        let shape: Vec<usize> = (0..random.between(1, 3)).map(|_| random.between(1, 40)).collect();
        every_axis(&shape, &mut random);
    }
}

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
        let sum = |device: &Device| SumTo { x: x.on(device), shape: to.to_vec() }.run().unwrap();
        let want = sum(&Device::reference()).to_f64();
        for device in devices() {
            let found = sum(device);
            assert_eq!(found.shape(), to);
            assert_close(&format!("sum_to {from:?} {to:?} on {device}"), &found.to_f64(), &want, 1e-5);
        }
    }
}

/// More sums than a dispatch has workgroups in one dimension.
fn many_sums() {
    let (rows, width) = (70_001, 3);
    let numbers: Vec<f32> = (0..rows * width).map(|i| (i % 1000) as f32).collect();
    let want: Vec<f32> = numbers.chunks(width).map(|row| row.iter().sum()).collect();
    for device in devices() {
        let x = Tensor::from_slice(&numbers, &[rows, width], device).unwrap();
        assert!(x.sum(1).unwrap().to_f32() == want, "{device}");
    }
}

/// A sum's bits do not depend on the other sums of the call.
fn a_row_stands_alone() {
    let mut random = Random(26);
    for (rows, width) in [(9, 5000), (300, 20), (5, 300)] {
        let x = random.input("x", &[rows, width], 1.0);
        for device in devices() {
            let x = x.on(device);
            let whole = x.sum(1).unwrap().to_f32();
            for row in [0, 1, rows - 1] {
                let alone = x.slice(0, row..row + 1).unwrap().sum(1).unwrap();
                assert_eq!(alone.to_f32(), whole[row..row + 1]);
            }
        }
    }
}

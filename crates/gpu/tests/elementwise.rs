//! map, zip, accumulate and full: device = reference, on odd shapes, broadcasting, and at the ends of the value range.

use march_engine::ops::elementwise::{Map, Zip, ZipBackward};
use march_engine::{Device, Op, Result, Tensor};

use crate::common::{Input, Random, assert_close, compare, devices, tensors, tests};

tests![
    maps,
    ends_of_the_range,
    an_element_of_a_map_has_the_same_bits_anywhere,
    zips,
    zips_of_random_shapes,
    gradients_by_the_device,
    accumulate_spares_other_handles,
];

const MAPS: [Map; 13] = [
    Map::Neg,
    Map::Exp,
    Map::Ln,
    Map::Sigmoid,
    Map::Silu,
    Map::Tanh,
    Map::Relu,
    Map::Softplus,
    Map::Square,
    Map::Sqrt,
    Map::Reciprocal,
    Map::Scale(-1.5),
    Map::Shift(0.75),
];

fn map(v: &[Tensor], kind: Map) -> Result<Vec<Tensor>> {
    // ln, √ and 1/x want positive numbers.
    let x = match kind {
        Map::Ln | Map::Sqrt | Map::Reciprocal => v[0].square()?.shift(0.5)?,
        _ => v[0].clone(),
    };
    Ok(vec![x.map(kind)?])
}

fn maps() {
    let mut random = Random(11);
    for kind in MAPS {
        for shape in [vec![], vec![7], vec![0, 4], vec![3, 5, 11], vec![13, 257]] {
            let inputs = [random.input("x", &shape, 2.0)];
            compare(&format!("{kind:?} {shape:?}"), &|v| map(v, kind), &inputs);
        }
        // Small numbers: the error is relative to them.
        let small = [random.input("x", &[50], 1e-3)];
        compare(&format!("{kind:?} of small numbers"), &|v| map(v, kind), &small);
    }
}

/// Saturated ends: the value is exact there, and the gradient neither overflows nor becomes NaN.
fn ends_of_the_range() {
    let mut data =
        vec![-1e4, -200.0, -100.0, -89.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 100.0, 200.0, 1e4];
    for kind in [Map::Sigmoid, Map::Silu, Map::Tanh, Map::Relu, Map::Softplus] {
        let inputs = [Input { name: "x", shape: vec![data.len()], data: data.clone() }];
        compare(&format!("{kind:?} at the ends"), &|v| map(v, kind), &inputs);
    }
    data.retain(|&x| x < 85.0);
    let inputs = [Input { name: "x", shape: vec![data.len()], data }];
    compare("Exp at the ends", &|v| map(v, Map::Exp), &inputs);
    for device in devices() {
        let x = Tensor::from_slice(&[89.0, 1e4, f32::INFINITY, f32::NEG_INFINITY], &[4], device).unwrap();
        let y = x.exp().unwrap().to_f32();
        assert_eq!(y, [f32::INFINITY, f32::INFINITY, f32::INFINITY, 0.0], "{device}");
    }
}

fn an_element_of_a_map_has_the_same_bits_anywhere() {
    let mut random = Random(12);
    let x: Vec<f32> = (0..1003).map(|_| random.normal() as f32 * 3.0).collect();
    for device in devices() {
        for kind in MAPS {
            let run = |x: &[f32]| {
                let y = Tensor::from_slice(x, &[x.len()], device).unwrap().map(kind).unwrap();
                y.to_f32().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let whole = run(&x);
            for (start, len) in [(0, 1), (5, 3), (1000, 3), (17, 29)] {
                assert_eq!(run(&x[start..start + len]), whole[start..start + len], "{kind:?} on {device}");
            }
        }
    }
}

fn zip(v: &[Tensor], kind: Zip) -> Result<Vec<Tensor>> {
    let b = if kind == Zip::Div { v[1].square()?.shift(0.5)? } else { v[1].clone() };
    Ok(vec![v[0].zip(kind, &b)?])
}

const ZIPS: [Zip; 4] = [Zip::Add, Zip::Sub, Zip::Mul, Zip::Div];

fn zips() {
    let mut random = Random(13);
    let shapes: [(&[usize], &[usize]); 16] = [
        (&[5, 7], &[5, 7]),
        (&[], &[]),
        (&[4, 9], &[]),
        (&[], &[3, 2]),
        (&[6, 10], &[10]),
        (&[6, 10], &[6, 1]),
        (&[1, 10], &[6, 1]),
        (&[2, 3, 1, 5], &[4, 1]),
        (&[3, 1, 4, 1], &[2, 1, 6]),
        (&[0, 3], &[1, 3]),
        (&[2, 0], &[]),
        (&[2, 1], &[2, 0]),
        (&[1], &[1, 1, 1]),
        (&[13, 301], &[13, 301]),
        (&[3, 101, 7], &[101, 1]),
        (&[2, 1, 3, 1, 2, 1], &[1, 2, 1, 3, 1, 2]),
    ];
    for kind in ZIPS {
        for (a, b) in shapes {
            let inputs = [random.input("a", a, 1.0), random.input("b", b, 1.0)];
            compare(&format!("{kind:?} {a:?} {b:?}"), &|v| zip(v, kind), &inputs);
        }
    }
}

fn zips_of_random_shapes() {
    let mut random = Random(15);
    for _ in 0..25 {
        let shape: Vec<usize> = (0..random.between(1, 5)).map(|_| random.between(1, 6)).collect();
        let mut part = |shape: &[usize]| -> Vec<usize> {
            let skip = random.between(0, shape.len() - 1);
            shape[skip..].iter().map(|&size| if random.between(0, 2) == 0 { 1 } else { size }).collect()
        };
        let (a, b) = (part(&shape), part(&shape));
        let kind = ZIPS[random.between(0, 3)];
        let inputs = [random.input("a", &a, 1.0), random.input("b", &b, 1.0)];
        compare(&format!("{kind:?} {a:?} {b:?}"), &|v| zip(v, kind), &inputs);
    }
}

/// The device's own gradients of sums and differences, which recording does not call.
fn gradients_by_the_device() {
    let mut random = Random(14);
    let mut inputs =
        [random.input("a", &[3, 4], 1.0), random.input("b", &[4], 1.0), random.input("dy", &[3, 4], 1.0)];
    inputs[1].data.iter_mut().for_each(|v| *v = f64::from((v.abs() + 0.5) as f32));
    let all = |device: &Device| -> Vec<Vec<f64>> {
        let mut found = Vec::new();
        for kind in ZIPS {
            for needs in [[true, true], [true, false], [false, true], [false, false]] {
                let [a, b, gradient] = tensors(&inputs, device).try_into().unwrap();
                let d = ZipBackward { kind, a, b, gradient, needs }.run().unwrap();
                assert_eq!([d[0].is_some(), d[1].is_some()], needs);
                found.extend(d.iter().flatten().map(Tensor::to_f64));
            }
        }
        found
    };
    let want = all(&Device::reference());
    for device in devices() {
        for (found, want) in all(device).iter().zip(&want) {
            assert_close(device.name(), found, want, 1e-5);
        }
    }
}

/// A sum changes in place only if nobody else holds it.
fn accumulate_spares_other_handles() {
    for device in devices() {
        for len in [0, 1, 700] {
            let numbers: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let mut sum = Tensor::from_slice(&numbers, &[len], device).unwrap();
            let term = Tensor::full(&[len], 0.5, device).unwrap();
            let held = sum.clone();
            sum.accumulate(&term).unwrap();
            sum.accumulate(&term).unwrap();
            assert_eq!(held.to_f32(), numbers);
            let same = sum.clone();
            sum.accumulate(&same).unwrap();
            let want: Vec<f32> = numbers.iter().map(|v| 2.0 * (v + 1.0)).collect();
            assert_eq!(sum.to_f32(), want);
        }
    }
}

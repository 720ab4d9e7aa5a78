//! map, zip, accumulate and full: device = reference, on odd shapes, broadcasting, and at the ends of the value range.

use march_engine::ops::elementwise::{Map, Zip};
use march_engine::{Engine, Reference, Result, Tape, Var};

use crate::common::{Input, Program, Random, assert_close, compare, devices};

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

program! { MapProgram { kind: Map } |this, tape, v| {
    // ln, √ and 1/x want positive numbers.
    let x = match this.kind {
        Map::Ln | Map::Sqrt | Map::Reciprocal => tape.shift(&tape.square(&v[0])?, 0.5)?,
        _ => v[0].clone(),
    };
    Ok(vec![tape.map(this.kind, &x)?])
}}

#[test]
fn maps() {
    let mut random = Random(11);
    for kind in MAPS {
        for shape in [vec![], vec![7], vec![0, 4], vec![3, 5, 11], vec![13, 257]] {
            let inputs = [random.input("x", &shape, 2.0)];
            compare(&format!("{kind:?} {shape:?}"), &MapProgram { kind }, &inputs);
        }
        // Small numbers: the error is relative to them.
        compare(
            &format!("{kind:?} of small numbers"),
            &MapProgram { kind },
            &[random.input("x", &[50], 1e-3)],
        );
    }
}

/// Saturated ends: the value is exact there, and the gradient neither overflows nor becomes NaN.
#[test]
fn ends_of_the_range() {
    let mut data =
        vec![-1e4, -200.0, -100.0, -89.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 100.0, 200.0, 1e4];
    for kind in [Map::Sigmoid, Map::Silu, Map::Tanh, Map::Relu, Map::Softplus] {
        let inputs = [Input { name: "x", shape: vec![data.len()], data: data.clone() }];
        compare(&format!("{kind:?} at the ends"), &MapProgram { kind }, &inputs);
    }
    data.retain(|&x| x < 85.0);
    let inputs = [Input { name: "x", shape: vec![data.len()], data }];
    compare("Exp at the ends", &MapProgram { kind: Map::Exp }, &inputs);
    for device in devices() {
        let x = device.from_f32(&[89.0, 1e4, f32::INFINITY, f32::NEG_INFINITY], &[4]).unwrap();
        let y = device.to_f32(&device.map(Map::Exp, &x).unwrap());
        assert_eq!(y, [f32::INFINITY, f32::INFINITY, f32::INFINITY, 0.0], "{device:?}");
    }
}

#[test]
fn an_element_of_a_map_has_the_same_bits_anywhere() {
    let mut random = Random(12);
    let x: Vec<f32> = (0..1003).map(|_| random.normal() as f32 * 3.0).collect();
    for device in devices() {
        for kind in MAPS {
            let run = |x: &[f32]| {
                let y = device.map(kind, &device.from_f32(x, &[x.len()]).unwrap()).unwrap();
                device.to_f32(&y).iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let whole = run(&x);
            for (start, len) in [(0, 1), (5, 3), (1000, 3), (17, 29)] {
                assert_eq!(run(&x[start..start + len]), whole[start..start + len], "{kind:?} on {device:?}");
            }
        }
    }
}

program! { ZipProgram { kind: Zip } |this, tape, v| {
    let b = match this.kind {
        Zip::Div => tape.shift(&tape.square(&v[1])?, 0.5)?,
        _ => v[1].clone(),
    };
    Ok(vec![tape.zip(this.kind, &v[0], &b)?])
}}

const ZIPS: [Zip; 4] = [Zip::Add, Zip::Sub, Zip::Mul, Zip::Div];

#[test]
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
            compare(&format!("{kind:?} {a:?} {b:?}"), &ZipProgram { kind }, &inputs);
        }
    }
}

#[test]
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
        compare(&format!("{kind:?} {a:?} {b:?}"), &ZipProgram { kind }, &inputs);
    }
}

/// The engine's own gradients of sums and differences, which the tape does not call.
#[test]
fn gradients_by_the_engine() {
    fn all<E: Engine>(engine: &E, inputs: &[Input]) -> Vec<Vec<f64>> {
        let tensor = |i: usize| engine.from_f64(&inputs[i].data, &inputs[i].shape).unwrap();
        let mut found = Vec::new();
        for kind in ZIPS {
            for needs in [[true, true], [true, false], [false, true], [false, false]] {
                let d = engine.zip_backward(kind, &tensor(0), &tensor(1), &tensor(2), needs).unwrap();
                assert_eq!([d[0].is_some(), d[1].is_some()], needs);
                found.extend(d.iter().flatten().map(|d| engine.to_f64(d)));
            }
        }
        found
    }
    let mut random = Random(14);
    let mut inputs =
        [random.input("a", &[3, 4], 1.0), random.input("b", &[4], 1.0), random.input("dy", &[3, 4], 1.0)];
    inputs[1].data.iter_mut().for_each(|v| *v = v.abs() + 0.5);
    inputs[1].data.iter_mut().for_each(|v| *v = f64::from(*v as f32));
    let want = all(&Reference, &inputs);
    for device in devices() {
        for (found, want) in all(&device, &inputs).iter().zip(&want) {
            assert_close(&format!("{device:?}"), found, want, 1e-5);
        }
    }
}

/// A sum changes in place only if nobody else holds it.
#[test]
fn accumulate_spares_other_handles() {
    for device in devices() {
        for len in [0, 1, 700] {
            let numbers: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let mut sum = device.from_f32(&numbers, &[len]).unwrap();
            let term = device.full(&[len], 0.5).unwrap();
            let held = sum.clone();
            device.accumulate(&mut sum, &term).unwrap();
            device.accumulate(&mut sum, &term).unwrap();
            assert_eq!(device.to_f32(&held), numbers);
            let same = sum.clone();
            device.accumulate(&mut sum, &same).unwrap();
            let want: Vec<f32> = numbers.iter().map(|v| 2.0 * (v + 1.0)).collect();
            assert_eq!(device.to_f32(&sum), want);
        }
    }
}

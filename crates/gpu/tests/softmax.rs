//! softmax: device = reference on odd widths, large scores, and rows that are masked in part or wholly.

use march_engine::{Engine, Result, Tape, Var};

use crate::common::{FORWARD, Input, Program, Random, compare, compare_within, devices, outcome};

struct Softmax;

impl Program for Softmax {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.softmax(&v[0])?])
    }
}

#[test]
fn device_equals_reference() {
    let mut random = Random(3);
    for shape in [vec![1], vec![0, 3], vec![3, 0], vec![2, 3, 7], vec![5, 64], vec![3, 65], vec![2, 301]] {
        compare(&format!("softmax {shape:?}"), &Softmax, &[random.input("x", &shape, 1.0)]);
        // Large scores: nearly all weight is on one element, and gradients are differences of nearly equal numbers.
        let input = random.input("x", &shape, 40.0);
        compare_within(&format!("softmax {shape:?} × 40"), &Softmax, &[input], FORWARD, 1e-2);
    }
    for _ in 0..15 {
        let shape = [random.between(1, 20), random.between(1, 200)];
        let input = random.input("x", &shape, 3.0);
        compare(&format!("softmax {shape:?}"), &Softmax, &[input]);
    }
}

/// The largest number wherever it is: if it is not found, the exponentials overflow.
#[test]
fn one_large_score() {
    let width = 64;
    let data = (0..width * width).map(|i| if i / width == i % width { 300.0 } else { 0.0 }).collect();
    let input = Input { name: "x", shape: vec![width, width], data };
    compare_within("one large score", &Softmax, &[input], FORWARD, 1e-2);
}

#[test]
fn masked_rows() {
    let none = f64::NEG_INFINITY;
    for width in [3, 70] {
        // One row all masked, one with a single element left, one free.
        let mut data = vec![none; 2 * width];
        data[width + 1] = 4.0;
        data.extend((0..width).map(|i| i as f64));
        let input = Input { name: "x", shape: vec![3, width], data };
        compare(&format!("masked softmax {width}"), &Softmax, std::slice::from_ref(&input));
        for device in devices() {
            let found = outcome(&device, &Softmax, std::slice::from_ref(&input)).unwrap();
            assert!(found.outputs[0].1[..width].iter().all(|&v| v == 0.0), "{device:?}");
            assert_eq!(found.outputs[0].1[width + 1], 1.0, "{device:?}");
        }
    }
}

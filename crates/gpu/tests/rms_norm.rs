//! rms_norm and gated_rms_norm: device = reference, on odd, short and long rows, and at the ends of the value range.

use march_engine::ops::rms_norm::{GatedRmsNorm, GatedRmsNormList, RmsNorm, RmsNormList};
use march_engine::{Engine, Result, Tape, Var};

use crate::common::{Input, Program, Random, compare, devices, open_devices};

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
    for (rows, heads, width) in [
        (1, 1, 1),
        (1, 1, 3),
        (0, 1, 8),
        (5, 3, 12),
        (33, 1, 100),
        (260, 2, 64),
        (3, 1, 7),
        (700, 1, 5),
        (37, 1, 257),
        (20, 1, 1500),
        (17, 1, 4099),
    ] {
        let inputs = norm_inputs(&mut random, rows, heads, width);
        compare(&format!("norms {rows}×{heads}×{width}"), &Norms, &inputs);
    }
}

#[test]
fn random_shapes() {
    let mut random = Random(3);
    for _ in 0..20 {
        let [rows, heads, width] = [random.between(1, 60), random.between(1, 4), random.between(1, 200)];
        let inputs = norm_inputs(&mut random, rows, heads, width);
        compare(&format!("norms {rows}×{heads}×{width}"), &Norms, &inputs);
    }
}

/// Rows of zeros, where eps alone bounds the factor, gates that are shut or wide open, and large and small numbers.
#[test]
fn extremes() {
    let mut random = Random(4);
    let mut inputs = norm_inputs(&mut random, 6, 1, 70);
    for (row, scale) in [0.0, 1e-3, 1.0, 1e3, 1.0, 1.0].into_iter().enumerate() {
        for i in 0..70 {
            inputs[0].data[row * 70 + i] = f64::from((inputs[0].data[row * 70 + i] * scale) as f32);
            inputs[1].data[row * 70 + i] *= [1.0, 1.0, 1.0, 1.0, 100.0, -100.0][row];
        }
    }
    // The gradient of a row of zeros is 1,000 times the others': rows of one scale are compared with each other.
    for rows in [0..1, 1..2, 2..3, 3..4, 4..6] {
        let mut some = inputs.clone();
        for input in &mut some[..2] {
            input.data = input.data[rows.start * 70..rows.end * 70].to_vec();
            input.shape[0] = rows.len();
        }
        compare(&format!("extreme norms {rows:?}"), &Norms, &some);
    }
}

/// Whole blocks of rows, several for each workgroup of the backward pass, each of another scale: a factor that is left
/// over from another row shows.
#[test]
fn rows_of_many_scales() {
    let mut random = Random(6);
    for width in [24, 64, 100] {
        let rows = 1100;
        let mut inputs = norm_inputs(&mut random, rows, 1, width);
        for (i, v) in inputs[0].data.iter_mut().enumerate() {
            let scale = [1.0, 7.0, 0.3, 2.0, 0.5, 3.0, 11.0][i / width * 5 / 3 % 7];
            *v = f64::from((*v * scale) as f32);
        }
        compare(&format!("rows of many scales, {width}"), &Norms, &inputs);
    }
}

/// Two tensors take a dispatch forward; backward one, and one that adds the weights' sums.
#[test]
fn two_take_one_dispatch() {
    for device in open_devices() {
        let tensor = |rows: usize| device.full(&[rows, 48], 0.5).unwrap();
        let (x, gates, dy) = ([tensor(30), tensor(4)], [tensor(30), tensor(4)], [tensor(30), tensor(4)]);
        let (weight, mut dx) = (device.full(&[48], 2.0).unwrap(), [Some(tensor(30)), Some(tensor(4))]);
        let (x, gates, dy) = (x.each_ref(), gates.each_ref(), dy.each_ref());
        let plain = RmsNormList { x: &x, weight: &weight };
        let gated = GatedRmsNormList { x: &x, gates: &gates, weight: &weight };
        let before = device.dispatches();
        device.rms_norm(plain, 1e-6).unwrap();
        device.gated_rms_norm(gated, 1e-6).unwrap();
        assert_eq!(device.dispatches() - before, 2);
        device.rms_norm_backward(plain, 1e-6, &dy, &mut dx).unwrap();
        device.gated_rms_norm_backward(gated, 1e-6, &dy).unwrap();
        assert_eq!(device.dispatches() - before, 6);
    }
}

/// A row alone has the bits that it has among others.
#[test]
fn a_row_stands_alone() {
    let mut random = Random(5);
    for (rows, width) in [(70, 20), (9, 64), (5, 300), (3, 2000)] {
        let inputs = norm_inputs(&mut random, rows, 1, width);
        for device in devices() {
            let weight = device.from_f64(&inputs[2].data, &[width]).unwrap();
            let run = |from: usize, count: usize| {
                let part = |i: usize| {
                    device
                        .from_f64(&inputs[i].data[from * width..(from + count) * width], &[count, width])
                        .unwrap()
                };
                let (x, gate) = (part(0), part(1));
                let plain = device.rms_norm(RmsNormList { x: &[&x], weight: &weight }, 1e-6).unwrap();
                let input = GatedRmsNormList { x: &[&x], gates: &[&gate], weight: &weight };
                [plain, device.gated_rms_norm(input, 1e-6).unwrap()].map(|y| device.to_f32(&y[0]))
            };
            let whole = run(0, rows);
            for (from, count) in [(0, 1), (1, 2), (rows - 1, 1)] {
                let some = run(from, count);
                for (some, whole) in some.iter().zip(&whole) {
                    assert!(some[..] == whole[from * width..(from + count) * width], "{width} on {device:?}");
                }
            }
        }
    }
}

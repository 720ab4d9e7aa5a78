//! rms_norm and gated_rms_norm: device = reference, on odd, short and long rows, and at the ends of the value range.

use march_engine::ops::rms_norm::{GatedRmsNorm, GatedRmsNormBackward, RmsNorm, RmsNormBackward};
use march_engine::{Op, Result, Tensor};

use crate::common::{Input, Random, compare, devices, dispatches, infer, open_devices, tests};

tests![norms, random_shapes, extremes, rows_of_many_scales, two_take_one_dispatch, a_row_stands_alone];

fn both(v: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![v[0].rms_norm(&v[2], 1e-6)?, v[0].gated_rms_norm(&v[1], &v[2], 1e-6)?])
}

fn norm_inputs(random: &mut Random, rows: usize, heads: usize, width: usize) -> Vec<Input> {
    vec![
        random.input("x", &[rows, heads * width], 1.0),
        random.input("gate", &[rows, heads * width], 2.0),
        random.input("weight", &[width], 1.0),
    ]
}

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
        compare(&format!("norms {rows}×{heads}×{width}"), &both, &inputs);
    }
}

fn random_shapes() {
    let mut random = Random(3);
    for _ in 0..20 {
        let [rows, heads, width] = [random.between(1, 60), random.between(1, 4), random.between(1, 200)];
        let inputs = norm_inputs(&mut random, rows, heads, width);
        compare(&format!("norms {rows}×{heads}×{width}"), &both, &inputs);
    }
}

/// Rows of zeros, where eps alone bounds the factor, gates that are shut or wide open, and large and small numbers.
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
        compare(&format!("extreme norms {rows:?}"), &both, &some);
    }
}

/// Whole blocks of rows, several for each workgroup of the backward pass, each of another scale: a factor that is left
/// over from another row shows.
fn rows_of_many_scales() {
    let mut random = Random(6);
    for width in [24, 64, 100] {
        let rows = 1100;
        let mut inputs = norm_inputs(&mut random, rows, 1, width);
        for (i, v) in inputs[0].data.iter_mut().enumerate() {
            let scale = [1.0, 7.0, 0.3, 2.0, 0.5, 3.0, 11.0][i / width * 5 / 3 % 7];
            *v = f64::from((*v * scale) as f32);
        }
        compare(&format!("rows of many scales, {width}"), &both, &inputs);
    }
}

/// Two tensors take a dispatch forward; backward one, and one that adds the weights' sums.
fn two_take_one_dispatch() {
    for device in open_devices() {
        let two = || [30, 4].map(|rows| Tensor::full(&[rows, 48], 0.5, &device).unwrap()).to_vec();
        let weight = Tensor::full(&[48], 2.0, &device).unwrap();
        let plain = || RmsNorm { x: two(), weight: weight.clone(), eps: 1e-6 };
        let gated = || GatedRmsNorm { x: two(), gates: two(), weight: weight.clone(), eps: 1e-6 };
        let dx = two().into_iter().map(Some).collect();
        let backward = RmsNormBackward { forward: plain(), gradients: two(), dx };
        let gated_backward = GatedRmsNormBackward { forward: gated(), gradients: two() };
        let (plain, gated, before) = (plain(), gated(), dispatches(&device));
        plain.run().unwrap();
        gated.run().unwrap();
        assert_eq!(dispatches(&device) - before, 2);
        backward.run().unwrap();
        gated_backward.run().unwrap();
        assert_eq!(dispatches(&device) - before, 6);
    }
}

/// A row alone has the bits that it has among others.
fn a_row_stands_alone() {
    let mut random = Random(5);
    for (rows, width) in [(70, 20), (9, 64), (5, 300), (3, 2000)] {
        let inputs = norm_inputs(&mut random, rows, 1, width);
        for device in devices() {
            let run = |from: usize, count: usize| {
                let mut part = inputs.clone();
                for input in &mut part[..2] {
                    input.shape[0] = count;
                    input.data = input.data[from * width..(from + count) * width].to_vec();
                }
                infer(device, &both, &part).unwrap()
            };
            let whole = run(0, rows);
            for (from, count) in [(0, 1), (1, 2), (rows - 1, 1)] {
                for (some, whole) in run(from, count).iter().zip(&whole) {
                    let want = &whole.1[from * width..(from + count) * width];
                    assert!(some.1 == want, "{width} on {device}");
                }
            }
        }
    }
}

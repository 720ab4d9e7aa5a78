//! softmax: device = reference on odd widths, large scores, and rows that are masked in part or wholly.

use march_engine::{Result, Tensor};

use crate::common::{FORWARD, Input, Random, compare, compare_within, devices, infer, tests};

tests![device_equals_reference, one_large_score, masked_rows];

fn softmax(v: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![v[0].softmax()?])
}

fn device_equals_reference() {
    let mut random = Random(3);
    for shape in [vec![1], vec![0, 3], vec![3, 0], vec![2, 3, 7], vec![5, 64], vec![3, 65], vec![2, 301]] {
        compare(&format!("softmax {shape:?}"), &softmax, &[random.input("x", &shape, 1.0)]);
        // Large scores: nearly all weight is on one element, and gradients are differences of nearly equal numbers.
        let input = random.input("x", &shape, 40.0);
        compare_within(&format!("softmax {shape:?} × 40"), &softmax, &[input], [FORWARD, 1e-2]);
    }
    for _ in 0..15 {
        let shape = [random.between(1, 20), random.between(1, 200)];
        compare(&format!("softmax {shape:?}"), &softmax, &[random.input("x", &shape, 3.0)]);
    }
}

/// The largest number wherever it is: if it is not found, the exponentials overflow.
fn one_large_score() {
    let width = 64;
    let data = (0..width * width).map(|i| if i / width == i % width { 300.0 } else { 0.0 }).collect();
    let input = Input { name: "x", shape: vec![width, width], data };
    compare_within("one large score", &softmax, &[input], [FORWARD, 1e-2]);
}

fn masked_rows() {
    for width in [3, 70] {
        // One row all masked, one with a single element left, one free.
        let mut data = vec![f64::NEG_INFINITY; 2 * width];
        data[width + 1] = 4.0;
        data.extend((0..width).map(|i| i as f64));
        let input = [Input { name: "x", shape: vec![3, width], data }];
        compare(&format!("masked softmax {width}"), &softmax, &input);
        for device in devices() {
            let y = infer(device, &softmax, &input).unwrap().remove(0).1;
            assert!(y[..width].iter().all(|&v| v == 0.0), "{device}");
            assert_eq!(y[width + 1], 1.0, "{device}");
        }
    }
}

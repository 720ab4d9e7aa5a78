//! short_conv: device = reference, with and without a tail, in pieces, on odd and empty sizes.

use march_engine::ops::short_conv::{ShortConv, ShortConvBackward, short_conv_each};
use march_engine::{Op, Result, Tensor};

use crate::common::{Input, Random, compare, devices, dispatches, open_devices, tests};

tests![short_conv, random_shapes, extremes, pieces_equal_whole, three_take_one_dispatch];

/// Inputs x, weight and, where there is one, a tail.
fn conv(v: &[Tensor]) -> Result<Vec<Tensor>> {
    let (y, tail) = v[0].short_conv(&v[1], v.get(2))?;
    Ok(vec![y, tail])
}

fn conv_inputs(random: &mut Random, sizes: [usize; 4], tail: bool) -> Vec<Input> {
    let [batch, tokens, width, kernel] = sizes;
    let weight: &[usize] = if tokens % 2 == 0 { &[width, 1, kernel] } else { &[width, kernel] };
    let mut inputs =
        vec![random.input("x", &[batch, tokens, width], 1.0), random.input("weight", weight, 1.0)];
    if tail {
        inputs.push(random.input("tail", &[batch, kernel - 1, width], 1.0));
    }
    inputs
}

fn short_conv() {
    let mut random = Random(4);
    for sizes in [
        [1, 1, 1, 1],
        [2, 0, 5, 4],
        [0, 3, 5, 4],
        [2, 3, 0, 4],
        [2, 1, 5, 4],
        [1, 2, 16, 4],
        [3, 3, 8, 4],
        [2, 9, 5, 4],
        [1, 5, 7, 1],
        [2, 3, 9, 7],
        [2, 70, 100, 4],
        [1, 500, 24, 4],
        [70, 5, 33, 4],
        [1, 100, 300, 2],
    ] {
        for tail in [false, true] {
            let inputs = conv_inputs(&mut random, sizes, tail);
            compare(&format!("short_conv {sizes:?}, tail {tail}"), &conv, &inputs);
        }
    }
}

fn random_shapes() {
    let mut random = Random(5);
    for _ in 0..20 {
        let sizes =
            [random.between(1, 3), random.between(1, 80), random.between(1, 60), random.between(1, 5)];
        let inputs = conv_inputs(&mut random, sizes, true);
        compare(&format!("short_conv {sizes:?}"), &conv, &inputs);
    }
}

/// Sums so large that the activation is shut or wide open.
fn extremes() {
    let mut random = Random(8);
    let mut inputs = conv_inputs(&mut random, [2, 40, 12, 4], true);
    inputs[0].data.iter_mut().for_each(|v| *v = f64::from((*v * 100.0) as f32));
    compare("short_conv of large numbers", &conv, &inputs);
}

/// Text in pieces, each given the tail of the one before, has the bits of one call.
fn pieces_equal_whole() {
    for device in devices() {
        for (kernel, width) in [(1, 5), (2, 8), (4, 5), (4, 100), (6, 20)] {
            let tokens = 83;
            let inputs = conv_inputs(&mut Random(6), [2, tokens, width, kernel], false);
            let (x, weight) = (inputs[0].on(device), inputs[1].on(device));
            let (whole, last) = x.short_conv(&weight, None).unwrap();
            let mut tail = None;
            for cut in [0, 1, 2, 2, 4, 5, 21, 64, 65, 80, 83].windows(2) {
                let piece = x.slice(1, cut[0]..cut[1]).unwrap();
                let (y, new_tail) = piece.short_conv(&weight, tail.as_ref()).unwrap();
                let want = whole.slice(1, cut[0]..cut[1]).unwrap();
                assert!(y.to_f32() == want.to_f32(), "K {kernel}, {cut:?} on {device}");
                tail = Some(new_tail);
            }
            assert!(tail.unwrap().to_f32() == last.to_f32(), "K {kernel}: the last tail");
        }
    }
}

/// Three convolutions take a dispatch forward; backward one, and one that adds sums. Each has the bits it has alone.
fn three_take_one_dispatch() {
    let mut random = Random(13);
    let widths = [20, 8, 70];
    let inputs = widths.map(|width| conv_inputs(&mut random, [1, 30, width, 4], true));
    for device in open_devices() {
        let on = |i: usize| inputs.each_ref().map(|inputs| inputs[i].on(&device));
        let (x, weights, tails) = (on(0), on(1), on(2));
        for tail in [false, true] {
            let input = |q: usize| ShortConv { x: &x[q], weight: &weights[q], tail: tail.then(|| &tails[q]) };
            let before = dispatches(&device);
            let all = short_conv_each([0, 1, 2].map(input)).unwrap();
            assert_eq!(dispatches(&device) - before, 1);
            for (q, (y, new_tail)) in all.iter().enumerate() {
                let [alone] = short_conv_each([input(q)]).unwrap();
                assert!(y.to_f32() == alone.0.to_f32(), "y of {q} on {device}");
                assert!(new_tail.to_f32() == alone.1.to_f32(), "tail of {q} on {device}");
            }
        }
        let input = |q: usize| ShortConv { x: x[q].clone(), weight: weights[q].clone(), tail: None };
        let before = dispatches(&device);
        ShortConvBackward { inputs: [0, 1, 2].map(input).into(), gradients: x.to_vec() }.run().unwrap();
        assert_eq!(dispatches(&device) - before, 2);
    }
}

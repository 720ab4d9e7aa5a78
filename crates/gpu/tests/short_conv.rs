//! short_conv: device = reference, with and without a tail, in pieces, on odd and empty sizes.

use march_engine::ops::short_conv::ShortConv;
use march_engine::{Engine, Result, Tape, Var};

use crate::common::{Input, Program, Random, compare, devices, open_devices};

/// Inputs x, weight and, where there is one, a tail.
struct ConvProgram;

impl Program for ConvProgram {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let (y, tail) = tape.short_conv(ShortConv { x: &v[0], weight: &v[1], tail: v.get(2) })?;
        Ok(vec![y, tail])
    }
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

#[test]
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
            compare(&format!("short_conv {sizes:?}, tail {tail}"), &ConvProgram, &inputs);
        }
    }
}

#[test]
fn random_shapes() {
    let mut random = Random(5);
    for _ in 0..20 {
        let sizes =
            [random.between(1, 3), random.between(1, 80), random.between(1, 60), random.between(1, 5)];
        let inputs = conv_inputs(&mut random, sizes, true);
        compare(&format!("short_conv {sizes:?}"), &ConvProgram, &inputs);
    }
}

/// Sums so large that the activation is shut or wide open.
#[test]
fn extremes() {
    let mut random = Random(8);
    let mut inputs = conv_inputs(&mut random, [2, 40, 12, 4], true);
    inputs[0].data.iter_mut().for_each(|v| *v = f64::from((*v * 100.0) as f32));
    compare("short_conv of large numbers", &ConvProgram, &inputs);
}

/// Text in pieces, each given the tail of the one before, has the bits of one call.
#[test]
fn pieces_equal_whole() {
    for device in devices() {
        for (kernel, width) in [(1, 5), (2, 8), (4, 5), (4, 100), (6, 20)] {
            let mut random = Random(6);
            let (batch, tokens) = (2, 83);
            let inputs = conv_inputs(&mut random, [batch, tokens, width, kernel], false);
            let weight = device.from_f64(&inputs[1].data, &inputs[1].shape).unwrap();
            let piece = |from: usize, to: usize| {
                let rows = (0..batch).flat_map(|b| {
                    inputs[0].data[(b * tokens + from) * width..(b * tokens + to) * width].iter().copied()
                });
                device.from_f64(&rows.collect::<Vec<_>>(), &[batch, to - from, width]).unwrap()
            };
            let call = |x: &_, tail: Option<&_>| {
                device.short_conv(&[ShortConv { x, weight: &weight, tail }]).map(|mut found| found.remove(0))
            };
            let (whole, last) = call(&piece(0, tokens), None).unwrap();
            let (whole, last) = (device.to_f32(&whole), device.to_f32(&last));
            let mut tail = None;
            for cut in [0, 1, 2, 2, 4, 5, 21, 64, 65, 80, 83].windows(2) {
                let (y, new_tail) = call(&piece(cut[0], cut[1]), tail.as_ref()).unwrap();
                let y = device.to_f32(&y);
                let len = (cut[1] - cut[0]) * width;
                for b in 0..batch {
                    let want = &whole[(b * tokens + cut[0]) * width..][..len];
                    assert!(y[b * len..(b + 1) * len] == *want, "K {kernel}, {cut:?} on {device:?}");
                }
                tail = Some(new_tail);
            }
            assert!(device.to_f32(&tail.unwrap()) == last, "K {kernel}: the last tail");
        }
    }
}

/// Three convolutions take a dispatch forward; backward one, and one that adds sums. Each has the bits it has alone.
#[test]
fn three_take_one_dispatch() {
    let mut random = Random(13);
    let widths = [20, 8, 70];
    let x = widths.map(|width| random.input("x", &[1, 30, width], 1.0));
    let weights = widths.map(|width| random.input("weight", &[width, 4], 1.0));
    let tails = widths.map(|width| random.input("tail", &[1, 3, width], 1.0));
    for device in open_devices() {
        let load = |input: &Input| device.from_f64(&input.data, &input.shape).unwrap();
        let (x, weights, tails) =
            (x.each_ref().map(load), weights.each_ref().map(load), tails.each_ref().map(load));
        for tail in [false, true] {
            let input = |q: usize| ShortConv { x: &x[q], weight: &weights[q], tail: tail.then(|| &tails[q]) };
            let before = device.dispatches();
            let all = device.short_conv(&[input(0), input(1), input(2)]).unwrap();
            assert_eq!(device.dispatches() - before, 1);
            for (q, (y, new_tail)) in all.iter().enumerate() {
                let alone = device.short_conv(&[input(q)]).unwrap().remove(0);
                assert!(device.to_f32(y) == device.to_f32(&alone.0), "y of {q} on {device:?}");
                assert!(device.to_f32(new_tail) == device.to_f32(&alone.1), "tail of {q} on {device:?}");
            }
        }
        let inputs = [0, 1, 2].map(|q| ShortConv { x: &x[q], weight: &weights[q], tail: None });
        let before = device.dispatches();
        device.short_conv_backward(&inputs, &x.each_ref()).unwrap();
        assert_eq!(device.dispatches() - before, 2);
    }
}

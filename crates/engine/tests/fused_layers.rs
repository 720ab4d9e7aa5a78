//! swiglu, short_conv and linear_cross_entropy: CPU = reference = finite differences, on odd sizes.

use march_engine::ops::cross_entropy::{IGNORE, LinearCrossEntropy, LinearCrossEntropyBackward};
use march_engine::ops::short_conv::{ShortConv, ShortConvBackward};
use march_engine::ops::swiglu::{SwiGlu, SwiGluBackward};
use march_engine::{Device, Op, Result, Tape, Tensor};

use crate::common::{
    self, Input, Random, all_devices, assert_close, compare, cpu, cpus, finite_differences, outcome, tensors,
};

#[test]
fn swiglu() {
    let mut random = Random(3);
    let swiglu = |v: &[Tensor]| Ok(vec![v[0].swiglu(&v[1])?]);
    for shape in [&[1][..], &[0, 4], &[3, 5], &[2, 3, 100], &[401, 130]] {
        let inputs = [random.input("gate", shape, 3.0), random.input("up", shape, 1.0)];
        common::check(&format!("swiglu {shape:?}"), &swiglu, &inputs, 2000, 8);
    }
}

/// Inputs x, weight and, where there is one, a tail.
fn conv(v: &[Tensor]) -> Result<Vec<Tensor>> {
    let (y, tail) = v[0].short_conv(&v[1], v.get(2))?;
    Ok(vec![y, tail])
}

/// The new tail depends on x, but no gradient flows through it: y alone is differentiated.
fn only_y(v: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![conv(v)?.remove(0)])
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
        [2, 3, 0, 2],
        [2, 1, 5, 4],
        [1, 2, 16, 4],
        [3, 3, 8, 4],
        [2, 9, 5, 4],
        [1, 5, 7, 1],
        [2, 3, 9, 7],
        [2, 70, 100, 4],
        [2, 70, 100, 3],
        [1, 1500, 24, 4],
        [70, 5, 33, 4],
        [1, 700, 200, 4],
        [1, 700, 200, 2],
    ] {
        for tail in [false, true] {
            let inputs = conv_inputs(&mut random, sizes, tail);
            let [batch, tokens, width, kernel] = sizes;
            let label = format!("short_conv {batch}×{tokens}×{width}, K {kernel}, tail {tail}");
            compare(&label, &conv, &inputs);
            if batch * tokens * width < 400 && !tail {
                finite_differences(&label, &only_y, &inputs, 8);
            }
        }
    }
    let inputs = conv_inputs(&mut random, [2, 6, 5, 4], true);
    finite_differences("short_conv with a constant tail", &only_y, &inputs, 8);
}

/// Text in pieces, each given the tail of the one before, has the bits of one call.
fn pieces_equal_whole(device: &Device, kernel: usize, width: usize) {
    let inputs = conv_inputs(&mut Random(6), [2, 83, width, kernel], false);
    let (x, weight) = (inputs[0].on(device), inputs[1].on(device));
    let (whole, last) = x.short_conv(&weight, None).unwrap();
    let mut tail: Option<Tensor> = None;
    for cut in [0, 1, 2, 2, 4, 5, 21, 64, 65, 80, 83].windows(2) {
        let piece = |x: &Tensor| x.slice(1, cut[0]..cut[1]).unwrap();
        let (y, new_tail) = piece(&x).short_conv(&weight, tail.as_ref()).unwrap();
        assert!(y.to_f64() == piece(&whole).to_f64(), "K {kernel}, tokens {cut:?}");
        tail = Some(new_tail);
    }
    assert!(tail.unwrap().to_f64() == last.to_f64(), "K {kernel}: the last tail");
}

#[test]
fn short_conv_in_pieces() {
    for (kernel, width) in [(1, 5), (2, 8), (4, 5), (4, 100), (6, 20)] {
        all_devices().iter().for_each(|device| pieces_equal_whole(device, kernel, width));
    }
}

/// A row's bits do not depend on the other sequences of the call, nor on the number of threads.
#[test]
fn short_conv_and_swiglu_rows_stand_alone() {
    let (tokens, width) = (40, 100);
    let inputs = conv_inputs(&mut Random(7), [5, tokens, width, 4], false);
    let (one, two) = (cpu(1), cpu(2));
    let results = all_rows(&two, &inputs);
    assert!(all_rows(&one, &inputs) == results, "the thread count changes bits");
    let mut alone = inputs.clone();
    alone[0].shape[0] = 1;
    alone[0].data.truncate(tokens * width);
    for (alone, all) in all_rows(&two, &alone).iter().zip(&results) {
        assert!(*alone == all[..alone.len()], "the batch changes bits");
    }
}

/// Results of which each sequence has its own part: y of both operations and dx of the convolution.
fn all_rows(cpu: &Device, inputs: &[Input]) -> [Vec<f64>; 3] {
    let (x, weight) = (inputs[0].on(cpu), inputs[1].on(cpu));
    let (y, _) = x.short_conv(&weight, None).unwrap();
    let z = x.swiglu(&y).unwrap();
    let backward =
        ShortConvBackward { inputs: vec![ShortConv { x, weight, tail: None }], gradients: vec![z.clone()] };
    [y.to_f64(), z.to_f64(), backward.run().unwrap()[0].x.to_f64()]
}

fn targets(random: &mut Random, count: usize, vocabulary: usize, ignored: f64) -> Vec<u32> {
    (0..count)
        .map(|_| if random.unit() < ignored { IGNORE } else { random.between(0, vocabulary - 1) as u32 })
        .collect()
}

#[test]
fn linear_cross_entropy() {
    let mut random = Random(8);
    for (shape, vocabulary, ignored, normaliser) in [
        (&[1, 5][..], 7, 0.0, None),
        (&[0, 5], 7, 0.0, None),
        (&[3, 0], 7, 0.0, None),
        (&[6, 5], 1, 0.3, None),
        (&[2, 9, 13], 7, 0.3, Some(11.0)),
        (&[4, 8], 7, 1.0, None),
        (&[4, 8], 7, 1.0, Some(4.0)),
        (&[3, 50, 100], 1000, 0.2, None),
        (&[600, 33], 70, 0.0, Some(600.0)),
        (&[1100, 16], 1003, 0.1, None),
    ] {
        let width = shape[shape.len() - 1];
        let rows = shape[..shape.len() - 1].iter().product();
        let inputs = [random.input("x", shape, 1.0), random.input("weight", &[vocabulary, width], 0.7)];
        let targets = targets(&mut random, rows, vocabulary, ignored);
        let loss = |v: &[Tensor]| Ok(vec![v[0].linear_cross_entropy(&v[1], &targets, normaliser)?]);
        compare(&format!("linear_cross_entropy {shape:?}, V {vocabulary}"), &loss, &inputs);
        if rows * vocabulary < 400 {
            finite_differences("linear_cross_entropy", &loss, &inputs, 8);
        }
        let token_losses = |device: &Device| {
            let losses = inputs[0].on(device).token_losses(&inputs[1].on(device), &targets).unwrap();
            (losses.nll.iter().map(|&v| f64::from(v)).collect::<Vec<_>>(), losses.greedy)
        };
        let want = token_losses(&Device::reference());
        for cpu in cpus() {
            let found = token_losses(&cpu);
            assert_close("token_losses", &found.0, &want.0, common::FORWARD);
            assert_eq!(found.1, want.1);
        }
    }
}

/// A loss near 0 and a loss far above keep their digits, and so do their gradients.
#[test]
fn linear_cross_entropy_at_the_extremes() {
    let x = Input { name: "x", shape: vec![2, 1], data: vec![1.0, 1.0] };
    let mut weight = Input { name: "weight", shape: vec![9, 1], data: vec![0.0; 9] };
    weight.data[4] = 30.0;
    weight.data[5] = -90.0;
    let inputs = [x, weight];
    let loss = |v: &[Tensor], first| Ok(vec![v[0].linear_cross_entropy(&v[1], &[first, IGNORE], None)?]);
    compare("target 4", &|v| loss(v, 4), &inputs);
    compare("target 5", &|v| loss(v, 5), &inputs);
    for cpu in cpus() {
        let found = outcome(&cpu, &|v| loss(v, IGNORE), &inputs).unwrap();
        assert_eq!(found.outputs[0].1, [0.0]);
        assert!(found.gradients.iter().all(|g| g.as_ref().is_some_and(|g| g.iter().all(|&v| v == 0.0))));
    }
}

/// An upstream gradient of 1 gives what the forward kept; only what needs a gradient gets one.
#[test]
fn linear_cross_entropy_keeps_only_what_is_needed() {
    let mut random = Random(9);
    let inputs = [random.input("x", &[5, 6], 1.0), random.input("weight", &[7, 6], 1.0)];
    let [x, weight] = &tensors(&inputs, &cpu(0))[..] else { unreachable!() };
    let targets = [1, IGNORE, 6, 0, 3];
    let run = |needs| {
        let (x, weight, targets) = (x.clone(), weight.clone(), targets.to_vec());
        LinearCrossEntropy { x, weight, targets, normaliser: None, needs }.run().unwrap()
    };
    let all = run([true, true]);
    let all_gradients = all.gradients.map(|gradient| gradient.unwrap().to_f32());
    for needs in [[true, false], [false, true], [false, false]] {
        let some = run(needs);
        assert_eq!(some.loss.to_f32(), all.loss.to_f32());
        for i in 0..2 {
            let gradient = some.gradients[i].as_ref().map(Tensor::to_f32);
            assert_eq!(gradient, needs[i].then(|| all_gradients[i].clone()));
        }
    }
    let tape = Tape::new();
    let loss = tape.parameter(0, x).linear_cross_entropy(weight, &targets, None).unwrap();
    let mut seen = Vec::new();
    tape.backward(&loss, |key, gradient| seen.push((key, gradient.to_f32()))).unwrap();
    assert_eq!(seen, [(0, all_gradients[0].clone())]);
}

fn messages(device: &Device) -> Vec<String> {
    fn error<T>(result: Result<T>) -> String {
        result.err().unwrap().to_string()
    }
    let t = |shape: &[usize]| Tensor::full(shape, 1.0, device).unwrap();
    let conv = |x: &[usize], weight: &[usize], tail: Option<&[usize]>| {
        error(t(x).short_conv(&t(weight), tail.map(t).as_ref()))
    };
    let loss = |x: &[usize], weight: &[usize], targets: &[u32], normaliser: Option<f64>| {
        error(t(x).linear_cross_entropy(&t(weight), targets, normaliser))
    };
    let x = t(&[1, 2, 4]);
    let pair = SwiGlu { gates: vec![x.clone()], ups: vec![x.clone()] };
    let input = ShortConv { x, weight: t(&[4, 3]), tail: None };
    vec![
        error(t(&[2, 3]).swiglu(&t(&[3, 2]))),
        error(SwiGluBackward { forward: pair, gradients: vec![t(&[8])] }.run()),
        conv(&[2, 3], &[3, 4], None),
        conv(&[1, 2, 3], &[4, 4], None),
        conv(&[1, 2, 3], &[3, 2, 4], None),
        conv(&[1, 2, 3], &[3, 0], None),
        conv(&[1, 2, 3], &[3, 4], Some(&[1, 2, 3])),
        error(ShortConvBackward { inputs: vec![input], gradients: vec![t(&[1, 3, 4])] }.run()),
        loss(&[2, 4], &[7, 5], &[0, 1], None),
        loss(&[2, 4], &[7], &[0, 1], None),
        loss(&[2, 4], &[7, 4], &[0, 1, 2], None),
        loss(&[3, 4], &[7, 4], &[0, IGNORE, 7], None),
        loss(&[2, 4], &[7, 4], &[0, 1], Some(0.0)),
        error(LinearCrossEntropyBackward { kept: [None, None], gradient: t(&[2]) }.run()),
        error(t(&[2, 4]).token_losses(&t(&[7, 4]), &[9, 0])),
    ]
}

#[test]
fn errors_name_what_is_wrong() {
    let found = messages(&cpu(0));
    assert_eq!(found, messages(&Device::reference()));
    let parts = [
        "`up` has shape [3, 2], expected [2, 3]",
        "`gradient` has shape [8]",
        "`x` has shape [2, 3], expected three dimensions",
        "`weight` has shape [4, 4], expected [3, K]",
        "`weight` has shape [3, 2, 4], expected [D, K]",
        "K ≥ 1",
        "`tail` has shape [1, 2, 3], expected [1, 3, 3]",
        "`gradient` has shape [1, 3, 4]",
        "`x` has shape [2, 4], expected [.., 5]",
        "`weight` has shape [7], expected two dimensions",
        "got 3 targets, expected 2 (rows of x)",
        "target 7 at position 2 is out of range for a vocabulary of 7",
        "the normaliser is 0",
        "`gradient` has shape [2]",
        "token_losses: target 9 at position 0",
    ];
    for (found, part) in found.iter().zip(parts) {
        assert!(found.contains(part), "{found:?} does not say {part:?}");
    }
    assert_eq!(found.len(), parts.len());
}

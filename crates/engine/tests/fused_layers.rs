//! swiglu, short_conv and linear_cross_entropy: fast = reference = finite differences, on odd sizes.

use march_engine::ops::cross_entropy::{IGNORE, LinearCrossEntropy, TokenLosses};
use march_engine::ops::short_conv::ShortConv;
use march_engine::ops::swiglu::SwiGlu;
use march_engine::{Cpu, CpuOptions, Engine, Reference, Result, Tape, Var};

use crate::common::{
    self, Input, Program, Random, assert_close, compare, fast_engines, finite_differences, outcome,
};

struct SwiGluProgram;
impl Program for SwiGluProgram {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.swiglu(SwiGlu { gate: &v[0], up: &v[1] })?])
    }
}

#[test]
fn swiglu() {
    let mut random = Random(3);
    for shape in [&[1][..], &[0, 4], &[3, 5], &[2, 3, 100], &[401, 130]] {
        let inputs = [random.input("gate", shape, 3.0), random.input("up", shape, 1.0)];
        compare(&format!("swiglu {shape:?}"), &SwiGluProgram, &inputs);
        if inputs[0].data.len() < 1000 {
            finite_differences("swiglu", &SwiGluProgram, &inputs, 8);
        }
    }
}

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
    for (batch, tokens, width, kernel) in [
        (1, 1, 1, 1),
        (2, 0, 5, 4),
        (0, 3, 5, 4),
        (2, 3, 0, 4),
        (2, 3, 0, 2),
        (2, 1, 5, 4),
        (1, 2, 16, 4),
        (3, 3, 8, 4),
        (2, 9, 5, 4),
        (1, 5, 7, 1),
        (2, 3, 9, 7),
        (2, 70, 100, 4),
        (2, 70, 100, 3),
        (1, 1500, 24, 4),
        (70, 5, 33, 4),
        (1, 700, 200, 4),
        (1, 700, 200, 2),
    ] {
        for tail in [false, true] {
            let inputs = conv_inputs(&mut random, [batch, tokens, width, kernel], tail);
            compare(
                &format!("short_conv {batch}×{tokens}×{width}, K {kernel}, tail {tail}"),
                &ConvProgram,
                &inputs,
            );
            if batch * tokens * width < 400 && !tail {
                // The new tail depends on x, but no gradient flows through it: y alone is differentiated.
                finite_differences("short_conv", &OnlyY, &inputs, 8);
            }
        }
    }
    let inputs = conv_inputs(&mut random, [2, 6, 5, 4], true);
    finite_differences("short_conv with a constant tail", &OnlyY, &inputs, 8);
}

struct OnlyY;
impl Program for OnlyY {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.short_conv(ShortConv { x: &v[0], weight: &v[1], tail: v.get(2) })?.0])
    }
}

/// Text in pieces, each given the tail of the one before, has the bits of one call.
fn pieces_equal_whole<E: Engine>(engine: &E, kernel: usize, width: usize) {
    let mut random = Random(6);
    let (batch, tokens) = (2, 83);
    let inputs = conv_inputs(&mut random, [batch, tokens, width, kernel], false);
    let weight = engine.from_f64(&inputs[1].data, &inputs[1].shape).unwrap();
    let piece = |from: usize, to: usize| {
        let rows = (0..batch).flat_map(|b| {
            inputs[0].data[(b * tokens + from) * width..(b * tokens + to) * width].iter().copied()
        });
        engine.from_f64(&rows.collect::<Vec<_>>(), &[batch, to - from, width]).unwrap()
    };
    let conv = |x: &E::Tensor, tail: Option<&E::Tensor>| {
        engine.short_conv(&[ShortConv { x, weight: &weight, tail }]).unwrap().remove(0)
    };
    let (whole, last) = conv(&piece(0, tokens), None);
    let (whole, last) = (engine.to_f64(&whole), engine.to_f64(&last));
    let mut tail: Option<E::Tensor> = None;
    let cuts = [0, 1, 2, 2, 4, 5, 21, 64, 65, 80, 83];
    for cut in cuts.windows(2) {
        let x = piece(cut[0], cut[1]);
        let (y, new_tail) = conv(&x, tail.as_ref());
        let y = engine.to_f64(&y);
        for b in 0..batch {
            let len = (cut[1] - cut[0]) * width;
            let found = &y[b * len..(b + 1) * len];
            assert!(*found == whole[(b * tokens + cut[0]) * width..][..len], "K {kernel}, tokens {cut:?}");
        }
        tail = Some(new_tail);
    }
    assert!(engine.to_f64(&tail.unwrap()) == last, "K {kernel}: the last tail");
}

#[test]
fn short_conv_in_pieces() {
    for (kernel, width) in [(1, 5), (2, 8), (4, 5), (4, 100), (6, 20)] {
        pieces_equal_whole(&Reference, kernel, width);
        for engine in fast_engines() {
            pieces_equal_whole(&engine, kernel, width);
        }
    }
}

/// A row's bits do not depend on the other sequences of the call, nor on the number of threads.
#[test]
fn short_conv_and_swiglu_rows_stand_alone() {
    let mut random = Random(7);
    let (batch, tokens, width) = (5, 40, 100);
    let inputs = conv_inputs(&mut random, [batch, tokens, width, 4], false);
    let one = Cpu::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
    let two = Cpu::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
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
fn all_rows(cpu: &Cpu, inputs: &[Input]) -> [Vec<f64>; 3] {
    let x = cpu.from_f64(&inputs[0].data, &inputs[0].shape).unwrap();
    let weight = cpu.from_f64(&inputs[1].data, &inputs[1].shape).unwrap();
    let input = [ShortConv { x: &x, weight: &weight, tail: None }];
    let (y, _) = &cpu.short_conv(&input).unwrap()[0];
    let z = &cpu.swiglu(&[SwiGlu { gate: &x, up: y }]).unwrap()[0];
    let d = &cpu.short_conv_backward(&input, &[z]).unwrap()[0];
    [cpu.to_f64(y), cpu.to_f64(z), cpu.to_f64(&d.x)]
}

struct Loss {
    targets: Vec<u32>,
    normaliser: Option<f64>,
}
impl Program for Loss {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let input = LinearCrossEntropy { x: &v[0], weight: &v[1] };
        Ok(vec![tape.linear_cross_entropy(input, &self.targets, self.normaliser)?])
    }
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
        let loss = Loss { targets: targets(&mut random, rows, vocabulary, ignored), normaliser };
        compare(&format!("linear_cross_entropy {shape:?}, V {vocabulary}"), &loss, &inputs);
        if rows * vocabulary < 400 {
            finite_differences("linear_cross_entropy", &loss, &inputs, 8);
        }
        let want = token_losses(&Reference, &inputs, &loss.targets);
        for engine in fast_engines() {
            let found = token_losses(&engine, &inputs, &loss.targets);
            let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            assert_close("token_losses", &wide(&found.nll), &wide(&want.nll), common::FORWARD);
            assert_eq!(found.greedy, want.greedy);
        }
    }
}

fn token_losses<E: Engine>(engine: &E, inputs: &[Input], targets: &[u32]) -> TokenLosses {
    let x = engine.from_f64(&inputs[0].data, &inputs[0].shape).unwrap();
    let weight = engine.from_f64(&inputs[1].data, &inputs[1].shape).unwrap();
    engine.token_losses(&x, &weight, targets).unwrap()
}

/// A loss near 0 and a loss far above keep their digits, and so do their gradients.
#[test]
fn linear_cross_entropy_at_the_extremes() {
    let x = Input { name: "x", shape: vec![2, 1], data: vec![1.0, 1.0] };
    let mut weight = Input { name: "weight", shape: vec![9, 1], data: vec![0.0; 9] };
    weight.data[4] = 30.0;
    weight.data[5] = -90.0;
    for target in [4, 5] {
        let loss = Loss { targets: vec![target, IGNORE], normaliser: None };
        compare(&format!("target {target}"), &loss, &[x.clone(), weight.clone()]);
    }
    let none = Loss { targets: vec![IGNORE; 2], normaliser: None };
    for engine in fast_engines() {
        let found = outcome(&engine, &none, &[x.clone(), weight.clone()]).unwrap();
        assert_eq!(found.outputs[0].1, [0.0]);
        assert!(found.gradients.iter().all(|g| g.as_ref().is_some_and(|g| g.iter().all(|&v| v == 0.0))));
    }
}

/// An upstream gradient of 1 gives what the forward kept; only what needs a gradient gets one.
#[test]
fn linear_cross_entropy_keeps_only_what_is_needed() {
    let engine = Cpu::new(CpuOptions::default()).unwrap();
    let mut random = Random(9);
    let x = engine.from_f64(&random.input("x", &[5, 6], 1.0).data, &[5, 6]).unwrap();
    let weight = engine.from_f64(&random.input("weight", &[7, 6], 1.0).data, &[7, 6]).unwrap();
    let input = LinearCrossEntropy { x: &x, weight: &weight };
    let targets = [1, IGNORE, 6, 0, 3];
    let all = engine.linear_cross_entropy(input, &targets, None, [true, true]).unwrap();
    for needs in [[true, false], [false, true], [false, false]] {
        let some = engine.linear_cross_entropy(input, &targets, None, needs).unwrap();
        assert_eq!(engine.to_f32(&some.loss), engine.to_f32(&all.loss));
        for i in 0..2 {
            let (some, all) = (&some.gradients[i], all.gradients[i].as_ref().unwrap());
            assert_eq!(some.is_some(), needs[i]);
            assert!(some.as_ref().is_none_or(|some| engine.to_f32(some) == engine.to_f32(all)));
        }
    }
    let tape = Tape::new(&engine);
    let (xv, wv) = (tape.parameter(0, x.clone()), tape.constant(weight.clone()));
    let loss = tape.linear_cross_entropy(LinearCrossEntropy { x: &xv, weight: &wv }, &targets, None).unwrap();
    let mut seen = Vec::new();
    tape.backward(&loss, |key, gradient| seen.push((key, engine.to_f32(&gradient)))).unwrap();
    assert_eq!(seen, [(0, engine.to_f32(all.gradients[0].as_ref().unwrap()))]);
}

fn messages<E: Engine>(engine: &E) -> Vec<String> {
    let t = |shape: &[usize]| engine.full(shape, 1.0).unwrap();
    let conv = |x: &[usize], weight: &[usize], tail: Option<&[usize]>| {
        let tail = tail.map(t);
        engine
            .short_conv(&[ShortConv { x: &t(x), weight: &t(weight), tail: tail.as_ref() }])
            .unwrap_err()
            .to_string()
    };
    let loss = |x: &[usize], weight: &[usize], targets: &[u32], normaliser: Option<f64>| {
        let input = LinearCrossEntropy { x: &t(x), weight: &t(weight) };
        engine.linear_cross_entropy(input, targets, normaliser, [true; 2]).unwrap_err().to_string()
    };
    let x = t(&[1, 2, 4]);
    let input = ShortConv { x: &x, weight: &t(&[4, 3]), tail: None };
    vec![
        engine.swiglu(&[SwiGlu { gate: &t(&[2, 3]), up: &t(&[3, 2]) }]).unwrap_err().to_string(),
        engine.swiglu_backward(&[SwiGlu { gate: &x, up: &x }], &[&t(&[8])]).unwrap_err().to_string(),
        conv(&[2, 3], &[3, 4], None),
        conv(&[1, 2, 3], &[4, 4], None),
        conv(&[1, 2, 3], &[3, 2, 4], None),
        conv(&[1, 2, 3], &[3, 0], None),
        conv(&[1, 2, 3], &[3, 4], Some(&[1, 2, 3])),
        engine.short_conv_backward(&[input], &[&t(&[1, 3, 4])]).unwrap_err().to_string(),
        loss(&[2, 4], &[7, 5], &[0, 1], None),
        loss(&[2, 4], &[7], &[0, 1], None),
        loss(&[2, 4], &[7, 4], &[0, 1, 2], None),
        loss(&[3, 4], &[7, 4], &[0, IGNORE, 7], None),
        loss(&[2, 4], &[7, 4], &[0, 1], Some(0.0)),
        engine.linear_cross_entropy_backward([None, None], &t(&[2])).unwrap_err().to_string(),
        engine.token_losses(&t(&[2, 4]), &t(&[7, 4]), &[9, 0]).unwrap_err().to_string(),
    ]
}

#[test]
fn errors_name_what_is_wrong() {
    let found = messages(&Cpu::new(CpuOptions::default()).unwrap());
    assert_eq!(found, messages(&Reference));
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

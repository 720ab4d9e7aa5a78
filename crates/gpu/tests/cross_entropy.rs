//! linear_cross_entropy and token_losses: device = reference, with tokens without a target, ties, large logits and
//! packed weights.

use march_engine::ops::cross_entropy::{IGNORE, LinearCrossEntropy};
use march_engine::{Engine, Precision, Reference, Result, Tape, Var, Weight};

use crate::common::{Input, Program, Random, assert_close, compare, devices, open_devices};

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

fn targets(random: &mut Random, rows: usize, vocabulary: usize, ignored: f64) -> Vec<u32> {
    (0..rows)
        .map(|_| match random.unit() < ignored {
            true => IGNORE,
            false => random.between(0, vocabulary - 1) as u32,
        })
        .collect()
}

#[test]
fn device_equals_reference() {
    let mut random = Random(3);
    let mut cases = vec![
        (vec![0], 3, 5, 0.0, 1.0),
        (vec![1], 1, 1, 0.0, 1.0),
        (vec![4], 3, 7, 1.0, 1.0),
        (vec![2, 9], 5, 11, 0.3, 1.0),
        (vec![67], 33, 300, 0.0, 1.0),
        (vec![70], 20, 257, 0.8, 1.0),
        // Logits of a few hundred: softmax is 0 or 1.
        (vec![9], 8, 40, 0.2, 100.0),
    ];
    for _ in 0..12 {
        let sizes = [40, 30, 90].map(|most| random.between(1, most));
        cases.push((vec![sizes[0]], sizes[1], sizes[2], random.unit() / 2.0, 1.0));
    }
    for (leading, width, vocabulary, ignored, scale) in cases {
        let rows: usize = leading.iter().product();
        let shape = [leading.clone(), vec![width]].concat();
        let inputs = [random.input("x", &shape, scale), random.input("weight", &[vocabulary, width], 1.0)];
        let targets = targets(&mut random, rows, vocabulary, ignored);
        for normaliser in [None, Some(12.5)] {
            let label = format!("cross entropy {shape:?}, V {vocabulary}, {ignored} ignored, × {scale}");
            compare(&label, &Loss { targets: targets.clone(), normaliser }, &inputs);
        }
    }
}

/// The losses and the most probable targets, with a weight in some precision.
fn losses<E: Engine>(
    engine: &E,
    [x, w]: [&Input; 2],
    targets: &[u32],
    precision: Precision,
) -> (Vec<f64>, Vec<u32>, Vec<f64>) {
    let x = engine.from_f64(&x.data, &x.shape).unwrap();
    let weight = engine.pack(&engine.from_f64(&w.data, &w.shape).unwrap(), precision).unwrap();
    let weight = Weight::Packed(&weight);
    let found = engine.token_losses(&x, weight, targets).unwrap();
    let input = LinearCrossEntropy { x: &x, weight };
    let total = engine.linear_cross_entropy(input, targets, None, [false; 2]).unwrap();
    (found.nll.iter().map(|&v| f64::from(v)).collect(), found.greedy, engine.to_f64(&total.loss))
}

#[test]
fn losses_of_tokens() {
    let mut random = Random(9);
    for (rows, width, vocabulary, ignored) in
        [(0, 2, 3, 0.0), (1, 5, 9, 0.0), (30, 17, 300, 0.3), (5, 7, 1, 0.0), (6, 4, 5, 1.0)]
    {
        let x = random.input("x", &[rows, width], 1.0);
        let w = random.input("w", &[vocabulary, width], 1.0);
        let targets = targets(&mut random, rows, vocabulary, ignored);
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let want = losses(&Reference, [&x, &w], &targets, precision);
            for device in devices() {
                let who = format!("{device:?}: {rows}×{width}×{vocabulary} in {precision}");
                let found = losses(&device, [&x, &w], &targets, precision);
                assert_close(&who, &found.0, &want.0, 1e-5);
                assert_eq!(found.1, want.1, "{who}");
                assert_close(&who, &found.2, &want.2, 1e-5);
            }
        }
    }
}

#[test]
fn the_first_of_equal_logits_is_the_greedy_one() {
    // Logits: 0 everywhere but twice 2, at 5 and at 300, which different invocations read.
    let mut w = vec![0.0; 400];
    (w[5], w[300]) = (2.0, 2.0);
    for device in devices() {
        let x = device.from_f64(&[1.0, -1.0], &[2, 1]).unwrap();
        let weight = device.from_f64(&w, &[400, 1]).unwrap();
        let found = device.token_losses(&x, &weight, &[1, 1]).unwrap();
        assert_eq!(found.greedy, [5, 0], "{device:?}");
    }
}

#[test]
fn a_token_alone_has_the_same_bits() {
    let mut random = Random(15);
    let (rows, width, vocabulary) = (40, 30, 77);
    let x = random.input("x", &[rows, width], 1.0);
    let w = random.input("w", &[vocabulary, width], 1.0);
    let targets = targets(&mut random, rows, vocabulary, 0.0);
    for device in devices() {
        let weight = device.from_f64(&w.data, &w.shape).unwrap();
        let run = |from: usize, rows: usize| {
            let x = device.from_f64(&x.data[from * width..][..rows * width], &[rows, width]).unwrap();
            device.token_losses(&x, &weight, &targets[from..from + rows]).unwrap()
        };
        let all = run(0, rows);
        for (from, rows) in [(0, 1), (39, 1), (10, 20)] {
            assert!(run(from, rows).nll == all.nll[from..from + rows], "{device:?}: {rows} from {from}");
        }
    }
}

#[test]
fn only_what_is_needed() {
    let mut random = Random(21);
    let (x, w) = (random.input("x", &[20, 6], 1.0), random.input("w", &[30, 6], 1.0));
    let targets = targets(&mut random, 20, 30, 0.2);
    for device in open_devices() {
        let (x, w) =
            (device.from_f64(&x.data, &x.shape).unwrap(), device.from_f64(&w.data, &w.shape).unwrap());
        let input = LinearCrossEntropy { x: &x, weight: &w };
        let run = |needs| device.linear_cross_entropy(input, &targets, None, needs).unwrap();
        let all = run([true; 2]);
        for needs in [[false, false], [true, false], [false, true]] {
            let some = run(needs);
            assert_eq!(device.to_f32(&some.loss), device.to_f32(&all.loss));
            for i in 0..2 {
                let same = some.gradients[i].as_ref().map(|g| device.to_f32(g));
                let want = all.gradients[i].as_ref().filter(|_| needs[i]).map(|g| device.to_f32(g));
                assert!(same == want, "{device:?}: gradient {i} of {needs:?}");
            }
        }
    }
}

//! linear_cross_entropy and token_losses: device = reference, with tokens without a target, ties, large logits and
//! packed weights.

use march_engine::ops::cross_entropy::{IGNORE, LinearCrossEntropy};
use march_engine::{Device, Op, Precision, Tensor};
use march_gpu::Gpu;
use march_gpu::sliced::forward_in_blocks;

use crate::common::{Input, Random, assert_close, compare, devices, tests};

tests![
    device_equals_reference,
    losses_of_tokens,
    the_first_of_equal_logits_is_the_greedy_one,
    a_token_alone_has_the_same_bits,
    only_what_is_needed,
    blocks_change_nothing,
];

fn targets(random: &mut Random, rows: usize, vocabulary: usize, ignored: f64) -> Vec<u32> {
    (0..rows)
        .map(|_| match random.unit() < ignored {
            true => IGNORE,
            false => random.between(0, vocabulary - 1) as u32,
        })
        .collect()
}

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
            compare(&label, &|v| Ok(vec![v[0].linear_cross_entropy(&v[1], &targets, normaliser)?]), &inputs);
        }
    }
}

/// The losses, the most probable targets and the total, with a weight in some precision.
fn losses(
    device: &Device,
    [x, w]: [&Input; 2],
    targets: &[u32],
    precision: Precision,
) -> (Vec<f64>, Vec<u32>, Vec<f64>) {
    let (x, weight) = (x.on(device), w.on(device).pack(precision).unwrap());
    let found = x.token_losses(&weight, targets).unwrap();
    let total = x.linear_cross_entropy(&weight, targets, None).unwrap();
    (found.nll.iter().map(|&v| f64::from(v)).collect(), found.greedy, total.to_f64())
}

fn losses_of_tokens() {
    let mut random = Random(9);
    for (rows, width, vocabulary, ignored) in
        [(0, 2, 3, 0.0), (1, 5, 9, 0.0), (30, 17, 300, 0.3), (5, 7, 1, 0.0), (6, 4, 5, 1.0)]
    {
        let x = random.input("x", &[rows, width], 1.0);
        let w = random.input("w", &[vocabulary, width], 1.0);
        let targets = targets(&mut random, rows, vocabulary, ignored);
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let want = losses(&Device::reference(), [&x, &w], &targets, precision);
            for device in devices() {
                let who = format!("{device}: {rows}×{width}×{vocabulary} in {precision}");
                let found = losses(device, [&x, &w], &targets, precision);
                assert_close(&who, &found.0, &want.0, 1e-5);
                assert_eq!(found.1, want.1, "{who}");
                assert_close(&who, &found.2, &want.2, 1e-5);
            }
        }
    }
}

fn the_first_of_equal_logits_is_the_greedy_one() {
    // Logits: 0 everywhere but twice 2, at 5 and at 300, which different invocations read.
    let mut w = vec![0.0; 400];
    (w[5], w[300]) = (2.0, 2.0);
    for device in devices() {
        let x = Tensor::from_f64(&[1.0, -1.0], &[2, 1], device).unwrap();
        let weight = Tensor::from_f64(&w, &[400, 1], device).unwrap();
        let found = x.token_losses(&weight, &[1, 1]).unwrap();
        assert_eq!(found.greedy, [5, 0], "{device}");
    }
}

fn a_token_alone_has_the_same_bits() {
    let mut random = Random(15);
    let (rows, width, vocabulary) = (40, 30, 77);
    let x = random.input("x", &[rows, width], 1.0);
    let w = random.input("w", &[vocabulary, width], 1.0);
    let targets = targets(&mut random, rows, vocabulary, 0.0);
    for device in devices() {
        let (x, weight) = (x.on(device), w.on(device));
        let all = x.token_losses(&weight, &targets).unwrap();
        for part in [0..1, 39..40, 10..30] {
            let some = x.slice(0, part.clone()).unwrap();
            let found = some.token_losses(&weight, &targets[part.clone()]).unwrap();
            assert!(found.nll == all.nll[part.clone()], "{device}: {part:?}");
        }
    }
}

/// The loss and the gradients of x and of the weight, where they are there.
type Parts = (Vec<f32>, [Option<Vec<f32>>; 2]);

fn only_what_is_needed() {
    let mut random = Random(21);
    let (x, w) = (random.input("x", &[20, 6], 1.0), random.input("w", &[30, 6], 1.0));
    let targets = targets(&mut random, 20, 30, 0.2);
    for device in devices() {
        let run = |needs: [bool; 2]| -> Parts {
            let (x, weight, targets) = (x.on(device), w.on(device), targets.clone());
            let found = LinearCrossEntropy { x, weight, targets, normaliser: None, needs }.run().unwrap();
            (found.loss.to_f32(), found.gradients.map(|d| d.map(|d| d.to_f32())))
        };
        let all = run([true; 2]);
        for needs in [[false, false], [true, false], [false, true]] {
            let some = run(needs);
            assert_eq!(some.0, all.0);
            for i in 0..2 {
                let want = all.1[i].clone().filter(|_| needs[i]);
                assert!(some.1[i] == want, "{device}: gradient {i} of {needs:?}");
            }
        }
    }
}

/// A scratch that holds few tokens changes no loss and no gradient of x, and that of W only by rounding.
fn blocks_change_nothing() {
    let (rows, width, vocabulary) = (45, 9, 50);
    let mut random = Random(23);
    let (x, w) = (random.input("x", &[rows, width], 1.0), random.input("w", &[vocabulary, width], 1.0));
    let targets = targets(&mut random, rows, vocabulary, 0.15);
    for device in devices() {
        let run = |block: usize| {
            let (x, weight, targets) = (x.on(device), w.on(device), targets.clone());
            let op = LinearCrossEntropy { x, weight, targets, normaliser: None, needs: [true; 2] };
            let sizes = op.check().unwrap();
            let found = forward_in_blocks(device.backend::<Gpu>().unwrap(), op, sizes, block).unwrap();
            let [dx, dw] = found.gradients.map(|d| d.unwrap());
            (found.loss.to_f32(), dx.to_f32(), dw.to_f32())
        };
        let want = run(64);
        for block in [1, 4, 17, 20] {
            let found = run(block);
            assert!((&found.0, &found.1) == (&want.0, &want.1), "{device}: blocks of {block}");
            let near = found.2.iter().zip(&want.2).all(|(a, b)| (a - b).abs() < 1e-6);
            assert!(near, "{device}: dW in blocks of {block}");
        }
    }
}

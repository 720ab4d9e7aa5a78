//! adamw and squared_norm: device = reference, over several steps with clipping, on odd and empty sizes.

use march_engine::ops::adamw::{AdamW, Step, clip_factor, squared_norm, update};
use march_engine::{Device, Tensor};

use crate::common::{Input, Random, assert_close, cpu, devices, tensors, tests};

tests![steps, norm_of_many_tensors];

fn train(device: &Device, inputs: &[Input], scale: f64) -> (Vec<Vec<f64>>, f64) {
    let mut t = tensors(inputs, device);
    let gradient = t.remove(3);
    let norm = squared_norm(&[&gradient]).unwrap();
    for step in 1..=3 {
        let step = Step {
            learning_rate: 0.01,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            clip: clip_factor(norm, scale),
            step,
        };
        // A handle that somebody else holds: the update must not reach it. The last step is in place.
        let before = (step.step < 3).then(|| t[0].clone());
        let old = before.as_ref().map(Tensor::to_f64);
        let [parameter, first_moment, second_moment] = &mut t[..] else { panic!("three tensors") };
        update(AdamW { parameter, first_moment, second_moment }, &gradient, &step).unwrap();
        assert!(before.map(|before| before.to_f64()) == old);
    }
    (t.iter().map(Tensor::to_f64).collect(), norm)
}

/// Three steps of AdamW with and without clipping: device = reference, and closer to the CPU.
fn steps() {
    let mut random = Random(5);
    for len in [0, 1, 13, 256, 5000, 20_003] {
        for limit in [1.0, 1e6] {
            let mut inputs: Vec<Input> =
                ["parameter", "first", "second", "gradient"].map(|n| random.input(n, &[len], 0.3)).into();
            inputs[2].data.iter_mut().for_each(|v| *v = v.abs());
            let (want, norm) = train(&Device::reference(), &inputs, limit);
            let (cpu, _) = train(&cpu(1), &inputs, limit);
            for device in devices() {
                let (found, its_norm) = train(device, &inputs, limit);
                assert!((its_norm - norm).abs() <= 1e-6 * norm, "{its_norm} for {norm} on {device}");
                for (i, found) in found.iter().enumerate() {
                    let what = format!("{} of {len} on {device}", inputs[i].name);
                    assert_close(&what, found, &want[i], 1e-5);
                    assert_close(&format!("{what}, by the CPU"), found, &cpu[i], 1e-6);
                }
            }
        }
    }
}

/// The norm of many tensors at once, more than one dispatch covers, some of them empty.
fn norm_of_many_tensors() {
    let mut random = Random(6);
    let sizes = [5, 0, 4096, 4097, 1, 20_001, 0, 333, 8192, 12_289, 7, 1, 2, 3, 0, 4, 5, 100];
    for count in [0, 1, 2, 7, 8, 9, 16, 17, 18] {
        let inputs: Vec<Input> = sizes[..count].iter().map(|&n| random.input("x", &[n], 0.3)).collect();
        let want: f64 = inputs.iter().map(|x| x.data.iter().map(|v| v * v).sum::<f64>()).sum();
        for device in devices() {
            let tensors = tensors(&inputs, device);
            let tensors: Vec<&Tensor> = tensors.iter().collect();
            let found = squared_norm(&tensors).unwrap();
            assert!((found - want).abs() <= 1e-6 * want, "{count} tensors: {found} for {want} on {device}");
            assert_eq!(squared_norm(&tensors).unwrap(), found, "not repeatable");
        }
    }
}

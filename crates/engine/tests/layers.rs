//! linear, the norms, state_read and AdamW: CPU = reference = finite differences, on odd sizes.

use march_engine::ops::adamw::{self, AdamW, Step, clip_factor};
use march_engine::ops::state_read::StateRead;
use march_engine::{Device, Result, Tensor};

use crate::common::{
    Input, Random, assert_close, compare, cpus, describe, finite_differences, invariant, tensors,
};

/// x Wᵀ, with a bias where there is one.
fn product(v: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![match v {
        [x, weight, bias] => x.linear_bias(weight, bias)?,
        _ => v[0].linear(&v[1])?,
    }])
}

#[test]
fn linear() {
    let mut random = Random(1);
    for (rows, inner, outer, bias) in [
        (1, 1, 1, false),
        (0, 3, 4, true),
        (7, 13, 9, true),
        (2, 64, 33, false),
        (37, 100, 70, true),
        (600, 40, 17, false),
    ] {
        let mut inputs =
            vec![random.input("x", &[rows, inner], 1.0), random.input("weight", &[outer, inner], 1.0)];
        if bias {
            inputs.push(random.input("bias", &[outer], 1.0));
        }
        compare(&format!("linear {rows}×{inner}×{outer}"), &product, &inputs);
        if rows * inner * outer < 1000 {
            finite_differences("linear", &product, &inputs, 5);
        }
    }
}

#[test]
fn norms() {
    let both = |v: &[Tensor]| Ok(vec![v[0].rms_norm(&v[2], 1e-6)?, v[0].gated_rms_norm(&v[1], &v[2], 1e-6)?]);
    let mut random = Random(2);
    for (rows, heads, width) in [(1, 1, 3), (0, 1, 8), (5, 3, 12), (33, 1, 100), (260, 2, 64), (3, 1, 7)] {
        let inputs = [
            random.input("x", &[rows, heads * width], 1.0),
            random.input("gate", &[rows, heads * width], 2.0),
            random.input("weight", &[width], 1.0),
        ];
        compare(&format!("norms {rows}×{heads}×{width}"), &both, &inputs);
        if rows * heads * width < 400 {
            finite_differences("norms", &both, &inputs, 6);
        }
    }
}

#[test]
fn state_read() {
    let mut random = Random(3);
    for (rows, key_heads, value_heads, key_dim, value_dim) in
        [(0, 1, 1, 4, 4), (1, 1, 1, 1, 1), (5, 2, 4, 12, 24), (70, 1, 3, 20, 9), (33, 2, 2, 64, 32)]
    {
        let inputs = [
            random.input("query", &[rows, key_heads * key_dim], 1.0),
            random.input("states", &[rows, value_heads, key_dim, value_dim], 1.0),
        ];
        let read = |v: &[Tensor]| Ok(vec![StateRead { query: &v[0], states: &v[1] }.state_read(key_heads)?]);
        compare(&format!("state_read {rows}×{value_heads}×{key_dim}×{value_dim}"), &read, &inputs);
        if rows * key_dim * value_dim < 2000 {
            finite_differences("state_read", &read, &inputs, 6);
        }
    }
}

/// For inference, a row of a product has the same bits alone and among any number of others, on any thread count.
#[test]
fn invariant_rows() {
    let mut random = Random(4);
    for (inner, outer) in [(1, 1), (20, 9), (64, 48), (333, 70)] {
        let (x, w) = (random.input("x", &[700, inner], 1.0), random.input("weight", &[outer, inner], 1.0));
        let mut want: Option<Vec<f32>> = None;
        for cpu in [invariant(1), invariant(2)] {
            let (x, weight) = (x.on(&cpu), w.on(&cpu));
            let run = |from, rows| x.slice(0, from..from + rows).unwrap().linear(&weight).unwrap().to_f32();
            let whole = run(0, 700);
            for (from, rows) in [(0, 1), (5, 1), (5, 2), (7, 3), (60, 64), (100, 511), (0, 600)] {
                let same = run(from, rows) == whole[from * outer..(from + rows) * outer];
                assert!(same, "{rows} rows from {from}");
            }
            assert!(*want.get_or_insert(whole.clone()) == whole);
        }
    }
}

/// Three steps of AdamW with clipping: CPU = reference.
#[test]
fn adamw() {
    fn train(device: &Device, inputs: &[Input]) -> (Vec<Vec<f64>>, f64) {
        let mut t = tensors(inputs, device);
        let gradient = t.remove(3);
        let norm = adamw::squared_norm(&[&gradient]).unwrap();
        for step in 1..=3 {
            let step = Step {
                learning_rate: 0.01,
                betas: [0.9, 0.95],
                eps: 1e-8,
                weight_decay: 0.1,
                clip: clip_factor(norm, 1.0),
                step,
            };
            // A handle that somebody else holds: the update must not reach it.
            let before = t[0].clone();
            let old = before.to_f64();
            let [parameter, first_moment, second_moment] = &mut t[..] else { panic!("three tensors") };
            adamw::update(AdamW { parameter, first_moment, second_moment }, &gradient, &step).unwrap();
            assert!(before.to_f64() == old);
        }
        (t.iter().map(Tensor::to_f64).collect(), norm)
    }
    let mut random = Random(5);
    for len in [0, 1, 13, 5000, 100_003] {
        let mut inputs =
            ["parameter", "first", "second", "gradient"].map(|name| random.input(name, &[len], 0.3));
        inputs[2].data.iter_mut().for_each(|v| *v = v.abs());
        let (want, norm) = train(&Device::reference(), &inputs);
        for cpu in cpus() {
            let (found, fast_norm) = train(&cpu, &inputs);
            assert!((fast_norm - norm).abs() <= 1e-6 * norm);
            for ((input, found), want) in inputs.iter().zip(&found).zip(&want) {
                let label = format!("{} of {len} on {}", input.name, describe(&cpu));
                assert_close(&label, found, want, 1e-5);
            }
        }
    }
    assert_eq!((clip_factor(4.0, 1.0), clip_factor(0.25, 1.0)), (0.5, 1.0));
}

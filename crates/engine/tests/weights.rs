//! Weights of inference in bf16 and int8: fast = reference, a row's bits alone and among others, and what refuses them.

mod common;

use common::{Random, assert_close, fast_engines};
use march_engine::ops::adamw::{AdamW, Step};
use march_engine::ops::cross_entropy::LinearCrossEntropy;
use march_engine::ops::elementwise::{Map, Zip};
use march_engine::ops::embedding::Embedding;
use march_engine::ops::linear::Linear;
use march_engine::ops::matmul::{MatMul, Transpose};
use march_engine::ops::rms_norm::RmsNorm;
use march_engine::ops::swiglu::SwiGlu;
use march_engine::{Cpu, CpuOptions, Engine, Precision, Products, Reference, Result, Tape};

const ALL: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Int8];

/// x Wᵀ + b, rows of W, the loss of each row of x, and W itself, with W in a precision.
fn results<E: Engine>(
    engine: &E,
    [x, w, b]: [&common::Input; 3],
    precision: Precision,
) -> Result<Vec<Vec<f64>>> {
    let x = engine.from_f64(&x.data, &x.shape)?;
    let f32_weight = engine.from_f64(&w.data, &w.shape)?;
    let weight = engine.quantize(&f32_weight, precision)?;
    assert_eq!((engine.precision(&weight), engine.shape(&weight)), (precision, &w.shape[..]));
    let bias = engine.from_f64(&b.data, &b.shape)?;
    let rows = engine.shape(&x)[0];
    let ids: Vec<u32> = (0..rows).map(|i| (i * 5 % w.shape[0]) as u32).collect();
    let mut list = vec![
        engine.to_f64(&engine.linear(Linear { x: &x, weight: &weight, bias: Some(&bias) })?),
        engine.to_f64(&engine.embedding(Embedding { table: &weight, ids: &ids, shape: &[rows] })?),
        engine.to_f64(&weight),
    ];
    if rows > 0 {
        let losses = engine.token_losses(&x, &weight, &ids)?;
        list.push(losses.nll.iter().map(|&v| f64::from(v)).collect());
        let input = LinearCrossEntropy { x: &x, weight: &weight };
        list.push(engine.to_f64(&engine.linear_cross_entropy(input, &ids, None, [false; 2])?.loss));
    }
    Ok(list)
}

#[test]
fn fast_is_reference() {
    let mut random = Random(1);
    let sizes = [
        (1, 1, 1),
        (1, 7, 3),
        (1, 16, 8),
        (1, 67, 21),
        (2, 9, 5),
        (2, 40, 13),
        (3, 24, 17),
        (3, 100, 9),
        (4, 8, 2),
        (4, 33, 7),
        (5, 31, 19),
        (5, 64, 16),
        (0, 12, 4),
        (47, 530, 23),
        (130, 1100, 12),
    ];
    for (rows, inner, outer) in sizes {
        let x = random.input("x", &[rows, inner], 1.0);
        let w = random.input("weight", &[outer, inner], 0.3);
        let b = random.input("bias", &[outer], 1.0);
        for precision in ALL {
            let want = results(&Reference, [&x, &w, &b], precision).unwrap();
            for cpu in fast_engines() {
                let found = results(&cpu, [&x, &w, &b], precision).unwrap();
                for (i, (found, want)) in found.iter().zip(&want).enumerate() {
                    let label = format!("{rows}×{inner}×{outer} in {precision}, result {i}, on {cpu:?}");
                    assert_close(&label, found, want, common::FORWARD);
                }
            }
        }
    }
}

/// What rounding changes is within half a step: 2⁻⁸ of a number for bf16, 1/254 of a row's largest for int8.
#[test]
fn rounding() {
    let w = Random(2).input("weight", &[9, 70], 1.0);
    let cpu = Cpu::new(CpuOptions { threads: 2, ..Default::default() }).unwrap();
    let weight = cpu.from_f64(&w.data, &w.shape).unwrap();
    let numbers = |precision| cpu.to_f64(&cpu.quantize(&weight, precision).unwrap());
    assert!(numbers(Precision::F32) == w.data);
    for (v, q) in w.data.iter().zip(numbers(Precision::Bf16)) {
        assert!((v - q).abs() <= v.abs() * 2f64.powi(-8), "{v} became {q}");
    }
    for (row, quantised) in w.data.chunks(70).zip(numbers(Precision::Int8).chunks(70)) {
        let largest = row.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        row.iter().zip(quantised).for_each(|(v, q)| assert!((v - q).abs() <= largest / 254.0 * 1.001));
    }
    // 70 numbers a row: 140 bytes in bf16; 70 and a scale in int8.
    assert_eq!(ALL.map(|p| p.bytes(9, 70)), [9 * 280, 9 * 140, 9 * 74]);
}

/// A row has the same bits alone and among any number of others, on any thread count.
#[test]
fn invariant_rows() {
    let mut random = Random(4);
    for (inner, outer) in [(1, 1), (20, 9), (64, 48), (333, 70), (1030, 33)] {
        let (x, w) = (random.input("x", &[130, inner], 1.0), random.input("weight", &[outer, inner], 1.0));
        for precision in ALL {
            let mut want: Option<Vec<f32>> = None;
            for threads in [1, 2] {
                let options =
                    CpuOptions { threads, products: Products::BatchInvariant, ..Default::default() };
                let cpu = Cpu::new(options).unwrap();
                let weight = cpu.quantize(&cpu.from_f64(&w.data, &w.shape).unwrap(), precision).unwrap();
                let run = |from: usize, rows: usize| {
                    let data = &x.data[from * inner..(from + rows) * inner];
                    let x = cpu.from_f64(data, &[rows, inner]).unwrap();
                    cpu.to_f32(&cpu.linear(Linear { x: &x, weight: &weight, bias: None }).unwrap())
                };
                let whole = run(0, 130);
                let cuts = [(0, 1), (5, 1), (5, 2), (7, 3), (9, 4), (11, 5), (3, 6), (60, 64), (1, 129)];
                for (from, rows) in cuts {
                    let same = run(from, rows) == whole[from * outer..(from + rows) * outer];
                    assert!(same, "{rows} rows from {from} of {inner}×{outer} in {precision}");
                }
                assert!(*want.get_or_insert(whole.clone()) == whole);
            }
        }
    }
}

/// Every operation but the three refuses such a weight in words; so does a tape that wants gradients.
#[test]
fn refused() {
    fn check<E: Engine>(engine: &E) {
        let dense = engine.full(&[4, 4], 0.5).unwrap();
        for precision in [Precision::Bf16, Precision::Int8] {
            let q = &engine.quantize(&dense, precision).unwrap();
            let mut target = dense.clone();
            let [mut first, mut second] = [dense.clone(), dense.clone()];
            let step = Step {
                learning_rate: 0.1,
                betas: [0.9, 0.9],
                eps: 1e-8,
                weight_decay: 0.0,
                clip: 1.0,
                step: 1,
            };
            let linear = Linear { x: &dense, weight: q, bias: None };
            let errors = [
                engine.map(Map::Exp, q).err(),
                engine.zip(Zip::Add, &dense, q).err(),
                engine.matmul(MatMul { a: &dense, b: q }, Transpose::default()).err(),
                engine.softmax(q).err(),
                engine.slice(q, 0, 0..1).err(),
                engine.concat(&[&dense, q], 0).err(),
                engine.permute(q, &[1, 0]).err(),
                engine.reshape(q, &[16]).err(),
                engine.sum(q, 0).err(),
                engine.swiglu(SwiGlu { gate: q, up: &dense }).err(),
                engine.rms_norm(RmsNorm { x: q, weight: &dense }, 1e-6).err(),
                engine.linear(Linear { x: q, weight: &dense, bias: None }).err(),
                engine.linear_backward(linear, &dense, [true; 3]).err(),
                engine.append(&mut target, q, 0).err(),
                engine.accumulate(&mut target, q).err(),
                engine.quantize(q, precision).err(),
                engine.squared_norm(q).err(),
                engine
                    .adamw(
                        AdamW {
                            parameter: &mut q.clone(),
                            first_moment: &mut first,
                            second_moment: &mut second,
                        },
                        &dense,
                        &step,
                    )
                    .err(),
            ];
            for (i, error) in errors.into_iter().enumerate() {
                let message = error.unwrap_or_else(|| panic!("operation {i} took a weight in {precision}"));
                assert!(
                    message.to_string().contains(&format!("in {precision} came; only linear")),
                    "{message}"
                );
            }
            let tape = Tape::new(engine);
            let (x, weight) = (tape.parameter(0, dense.clone()), tape.parameter(1, q.clone()));
            let constant = tape.constant(q.clone());
            let errors = [
                tape.linear(Linear { x: &x, weight: &constant, bias: None }).err(),
                tape.embedding(Embedding { table: &weight, ids: &[1], shape: &[1] }).err(),
                tape.linear_cross_entropy(LinearCrossEntropy { x: &x, weight: &constant }, &[0; 4], None)
                    .err(),
            ];
            for error in errors {
                let message = error.expect("a gradient that does not exist").to_string();
                assert!(message.contains("no gradient passes a weight in"), "{message}");
            }
            // Without gradients the same is fine.
            let tape = Tape::inference(engine);
            let (x, weight) = (tape.parameter(0, dense.clone()), tape.parameter(1, q.clone()));
            tape.linear(Linear { x: &x, weight: &weight, bias: None }).unwrap();
        }
        let message = engine.quantize(&engine.full(&[4], 1.0).unwrap(), Precision::Int8).unwrap_err();
        assert!(message.to_string().contains("two dimensions"), "{message}");
        let infinite = engine.full(&[2, 3], f64::INFINITY).unwrap();
        let message = engine.quantize(&infinite, Precision::Int8).unwrap_err();
        assert!(message.to_string().contains("row 0 holds a number that is not finite"), "{message}");
        assert!(engine.quantize(&infinite, Precision::Bf16).is_ok());
    }
    check(&Reference);
    fast_engines().iter().for_each(check);
}

#[test]
fn names() {
    for precision in ALL {
        assert_eq!(precision.to_string().parse(), Ok(precision));
    }
    assert!("fp8".parse::<Precision>().unwrap_err().contains("`f32`, `bf16` or `int8`"));
}

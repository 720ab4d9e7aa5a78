//! Packed weights in bf16 and int8: fast = reference, a row's bits alone and among others, and what refuses them.

use march_engine::ops::cross_entropy::LinearCrossEntropy;
use march_engine::ops::embedding::Embedding;
use march_engine::ops::linear::Linear;
use march_engine::{Cpu, CpuOptions, Engine, Precision, Products, Reference, Result, Tape, Weight};

use crate::common::{self, Random, assert_close, fast_engines};

const ALL: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Int8];

/// x Wᵀ + b, rows of W, the loss of each row of x, and W itself, with W in a precision.
fn results<E: Engine>(
    engine: &E,
    [x, w, b]: [&common::Input; 3],
    precision: Precision,
) -> Result<Vec<Vec<f64>>> {
    let x = engine.from_f64(&x.data, &x.shape)?;
    let f32_weight = engine.from_f64(&w.data, &w.shape)?;
    let packed = engine.pack(&f32_weight, precision)?;
    assert_eq!(
        (engine.packed_precision(&packed), &engine.packed_shape(&packed)[..]),
        (precision, &w.shape[..])
    );
    let weight = Weight::Packed(&packed);
    let bias = engine.from_f64(&b.data, &b.shape)?;
    let rows = engine.shape(&x)[0];
    let ids: Vec<u32> = (0..rows).map(|i| (i * 5 % w.shape[0]) as u32).collect();
    let mut list = vec![
        engine.to_f64(&engine.linear(Linear { x: &x, weight, bias: Some(&bias) })?),
        engine.to_f64(&engine.embedding(Embedding { table: weight, ids: &ids, shape: &[rows] })?),
        engine.to_f64(&engine.unpack(&packed)?),
    ];
    if rows > 0 {
        let losses = engine.token_losses(&x, weight, &ids)?;
        list.push(losses.nll.iter().map(|&v| f64::from(v)).collect());
        let input = LinearCrossEntropy { x: &x, weight };
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
    let numbers = |precision| cpu.to_f64(&cpu.unpack(&cpu.pack(&weight, precision).unwrap()).unwrap());
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
                let weight = cpu.pack(&cpu.from_f64(&w.data, &w.shape).unwrap(), precision).unwrap();
                let run = |from: usize, rows: usize| {
                    let data = &x.data[from * inner..(from + rows) * inner];
                    let x = cpu.from_f64(data, &[rows, inner]).unwrap();
                    let weight = Weight::Packed(&weight);
                    cpu.to_f32(&cpu.linear(Linear { x: &x, weight, bias: None }).unwrap())
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

/// No gradient passes a packed weight: the loss refuses to compute one, and so does a tape that records. All other
/// operations do not take packed weights at all, by their types.
#[test]
fn refused() {
    fn check<E: Engine>(engine: &E) {
        let dense = engine.full(&[4, 4], 0.5).unwrap();
        for precision in [Precision::Bf16, Precision::Int8] {
            let packed = &engine.pack(&dense, precision).unwrap();
            let input = LinearCrossEntropy { x: &dense, weight: Weight::Packed(packed) };
            let tape = Tape::new(engine);
            let x = tape.parameter(0, dense.clone());
            let weight = Weight::Packed(packed);
            let errors = [
                engine.linear_cross_entropy(input, &[0; 4], None, [true, false]).err(),
                engine.linear_cross_entropy(input, &[0; 4], None, [false, true]).err(),
                tape.linear(Linear { x: &x, weight, bias: None }).err(),
                tape.linear_each(&x, [weight]).err(),
                tape.embedding(Embedding { table: weight, ids: &[1], shape: &[1] }).err(),
                tape.linear_cross_entropy(LinearCrossEntropy { x: &x, weight }, &[0; 4], None).err(),
            ];
            for (i, error) in errors.into_iter().enumerate() {
                let message = error.unwrap_or_else(|| panic!("call {i} passed a weight in {precision}"));
                let expected = format!("a weight in {precision} has no gradient");
                assert!(message.to_string().contains(&expected), "{message}");
            }
            // Without gradients, the same calls are valid.
            let tape = Tape::inference(engine);
            let x = tape.parameter(0, dense.clone());
            tape.linear(Linear { x: &x, weight, bias: None }).unwrap();
            tape.linear_each(&x, [weight, Weight::Full(&x)]).unwrap();
            tape.embedding(Embedding { table: weight, ids: &[1], shape: &[1] }).unwrap();
            tape.linear_cross_entropy(LinearCrossEntropy { x: &x, weight }, &[0; 4], None).unwrap();
        }
        let message = engine.pack(&engine.full(&[4], 1.0).unwrap(), Precision::Int8).unwrap_err();
        assert!(message.to_string().contains("two dimensions"), "{message}");
        let infinite = engine.full(&[2, 3], f64::INFINITY).unwrap();
        let message = engine.pack(&infinite, Precision::Int8).unwrap_err();
        assert!(message.to_string().contains("row 0 holds a number that is not finite"), "{message}");
        assert!(engine.pack(&infinite, Precision::Bf16).is_ok());
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

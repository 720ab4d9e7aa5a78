//! Packed weights in bf16 and int8: CPU = reference, a row's bits alone and among others, and what refuses them.

use march_engine::ops::cross_entropy::LinearCrossEntropy;
use march_engine::{DType, Device, Op, Precision, Tape, Tensor};

use crate::common::{self, Input, Random, all_devices, assert_close, cpu, cpus, describe, invariant, narrow};

/// Precisions whose products are computed in f32; `integers.rs` is about the others.
const ALL: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Int8];

/// x Wᵀ + b, rows of W, W itself, and the loss of each row of x and of all, with W in a precision.
fn results(device: &Device, inputs: &[Input; 3], precision: Precision) -> Vec<Vec<f64>> {
    let [x, weight, bias] = inputs.each_ref().map(|input| input.on(device));
    let packed = weight.pack(precision).unwrap();
    assert_eq!((packed.dtype(), packed.shape()), (DType::from(precision), weight.shape()));
    assert!(!packed.is_plain());
    let (rows, outer) = (x.shape()[0], weight.shape()[0]);
    let ids: Vec<u32> = (0..rows).map(|i| (i * 5 % outer) as u32).collect();
    let mut list = vec![
        x.linear_bias(&packed, &bias).unwrap().to_f64(),
        packed.embedding(&ids, &[rows]).unwrap().to_f64(),
        packed.unpack().unwrap().to_f64(),
    ];
    if rows > 0 {
        let losses = x.token_losses(&packed, &ids).unwrap();
        list.push(losses.nll.iter().map(|&v| f64::from(v)).collect());
        list.push(x.linear_cross_entropy(&packed, &ids, None).unwrap().to_f64());
    }
    list
}

#[test]
fn cpu_is_reference() {
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
        let inputs = [
            random.input("x", &[rows, inner], 1.0),
            random.input("weight", &[outer, inner], 0.3),
            random.input("bias", &[outer], 1.0),
        ];
        for precision in ALL {
            let want = results(&Device::reference(), &inputs, precision);
            for cpu in cpus() {
                for (i, (found, want)) in results(&cpu, &inputs, precision).iter().zip(&want).enumerate() {
                    let label = format!("{rows}×{inner}×{outer} in {precision}, result {i}");
                    assert_close(&format!("{label}, on {}", describe(&cpu)), found, want, common::FORWARD);
                }
            }
        }
    }
}

/// What rounding changes is within half a step: 2⁻⁸ of a number for bf16, 1/254 of a row's largest for int8.
#[test]
fn rounding() {
    let w = Random(2).input("weight", &[9, 70], 1.0);
    let weight = w.on(&cpu(2));
    let numbers = |precision| weight.pack(precision).unwrap().unpack().unwrap().to_f64();
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
    assert_eq!(ALL.map(|p| weight.pack(p).unwrap().bytes()), ALL.map(|p| p.bytes(9, 70)));
}

/// A row has the same bits alone and among any number of others, on any thread count.
#[test]
fn invariant_rows() {
    let mut random = Random(4);
    for (inner, outer) in [(1, 1), (20, 9), (64, 48), (333, 70), (1030, 33)] {
        let (x, w) = (random.input("x", &[130, inner], 1.0), random.input("weight", &[outer, inner], 1.0));
        for precision in ALL {
            let mut want: Option<Vec<f32>> = None;
            let all = [narrow(1), narrow(2), Some(invariant(1)), Some(invariant(2))];
            for (i, cpu) in all.into_iter().enumerate().filter_map(|(i, cpu)| Some((i, cpu?))) {
                if i == 2 {
                    // Another instruction set may give other bits.
                    want = None;
                }
                let (x, weight) = (x.on(&cpu), w.on(&cpu).pack(precision).unwrap());
                let run =
                    |from, rows| x.slice(0, from..from + rows).unwrap().linear(&weight).unwrap().to_f32();
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

/// No gradient passes a packed weight: the loss refuses to compute one, and so does whatever is recorded.
#[test]
fn no_gradient_passes_a_packed_weight() {
    for device in all_devices() {
        let dense = Tensor::full(&[4, 4], 0.5, &device).unwrap();
        for precision in &Precision::ALL[1..] {
            let weight = dense.pack(*precision).unwrap();
            let loss = |needs| {
                let (x, weight, targets) = (dense.clone(), weight.clone(), vec![0; 4]);
                LinearCrossEntropy { x, weight, targets, normaliser: None, needs }.run().err()
            };
            let tape = Tape::new();
            let x = tape.parameter(0, &dense);
            let errors = [
                loss([true, false]),
                loss([false, true]),
                x.linear(&weight).err(),
                dense
                    .linear_bias(&weight, &tape.parameter(1, &Tensor::full(&[4], 1.0, &device).unwrap()))
                    .err(),
                x.linear_each([&weight]).err(),
                tape.parameter(2, &weight).embedding(&[1], &[1]).err(),
                x.linear_cross_entropy(&weight, &[0; 4], None).err(),
            ];
            for (i, error) in errors.into_iter().enumerate() {
                let message = error.unwrap_or_else(|| panic!("call {i} passed a weight in {precision}"));
                let expected = format!("a weight in {precision} has no gradient");
                assert!(message.to_string().contains(&expected), "{message}");
            }
            assert!(tape.is_empty());
            // Without gradients, the same calls are valid.
            dense.linear(&weight).unwrap();
            dense.linear_each([&weight, &dense]).unwrap();
            weight.embedding(&[1], &[1]).unwrap();
            dense.linear_cross_entropy(&weight, &[0; 4], None).unwrap();
        }
    }
}

#[test]
fn what_cannot_be_packed() {
    for device in all_devices() {
        let full = |shape: &[usize], value| Tensor::full(shape, value, &device).unwrap();
        let message = full(&[4], 1.0).pack(Precision::Int8).unwrap_err().to_string();
        assert!(message.contains("two dimensions"), "{message}");
        let infinite = full(&[2, 3], f64::INFINITY);
        let message = infinite.pack(Precision::Int8).unwrap_err().to_string();
        assert!(message.contains("row 0 holds a number that is not finite"), "{message}");
        assert!(infinite.pack(Precision::Bf16).is_ok());
        let message = infinite.pack(Precision::Bf16).unwrap().softmax().unwrap_err().to_string();
        assert!(message.contains("cannot read a tensor in bf16; unpack it first"), "{message}");
    }
}

#[test]
fn names() {
    for precision in Precision::ALL {
        assert_eq!(precision.to_string().parse(), Ok(precision));
    }
    assert!("fp8".parse::<Precision>().unwrap_err().contains("`f32`, `bf16`, `int8`, `q8` or `q4`"));
}

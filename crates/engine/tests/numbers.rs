//! Checksums, number formats, and the accuracy of functions.

use std::collections::BTreeSet;

use march_engine::{Tensor, checksum, from_bf16, to_bf16, to_int8};

use crate::common::{cpu, portable};

/// Bytes that a checksum processes at once.
const BLOCK: usize = 64;

#[test]
fn any_change_changes_it() {
    let bytes: Vec<u8> = (0..200u32).map(|i| (i * 37 + 11) as u8).collect();
    let mut sums = BTreeSet::from([checksum(&bytes)]);
    let mut count = 1;
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            sums.insert(checksum(&changed));
            // Two flips one block apart affect the same lane.
            if let Some(other) = changed.get_mut(at + BLOCK) {
                *other ^= 1 << bit;
                sums.insert(checksum(&changed));
                count += 1;
            }
            count += 1;
        }
        sums.insert(checksum(&bytes[..at]));
        count += 1;
    }
    for zeros in 1..200 {
        sums.insert(checksum(&vec![0; zeros]));
        count += 1;
    }
    assert_eq!(sums.len(), count);
    assert_eq!(checksum(b"a file must not change its meaning"), 0x2A34_E903_AEA7_E0C0);
}

#[test]
fn bf16_rounds_to_even() {
    for (v, want) in [
        (1.0, 1.0),
        (1.0 + 1.0 / 256.0, 1.0),       // halfway, down to even
        (1.0 + 3.0 / 256.0, 1.015_625), // halfway, up to even
        (1.003_907, 1.007_812_5),       // just above halfway
        (-1.003_907, -1.007_812_5),
        (0.0, 0.0),
        (f32::INFINITY, f32::INFINITY),
    ] {
        assert_eq!(from_bf16(to_bf16(v)), want, "{v}");
    }
    assert!(from_bf16(to_bf16(f32::NAN)).is_nan());
}

#[test]
fn int8_is_within_half_a_step() {
    let row = [0.3f32, -1.27, 0.0, 1.0, 0.004_9];
    let mut codes = [0; 5];
    let scale = to_int8(&row, &mut codes);
    assert_eq!((scale, codes[1]), (1.27 / 127.0, -127));
    row.iter().zip(codes).for_each(|(v, c)| assert!((v - f32::from(c) * scale).abs() <= 0.5001 * scale));
    assert_eq!(to_int8(&[0.0; 5], &mut codes), 0.0);
    assert_eq!(codes, [0; 5]);
    to_int8(&[1e-45; 5], &mut codes);
    assert_eq!(codes, [0; 5]);
}

#[test]
fn tanh_is_close_to_f64() {
    let x: Vec<f32> = (-120_000..120_000).map(|i| i as f32 * 1e-4).collect();
    for device in [Some(cpu(0)), portable(0)].into_iter().flatten() {
        let tanh = |x: &[f32]| Tensor::from_slice(x, &[x.len()], &device).unwrap().tanh().unwrap().to_f32();
        for (&x, &y) in x.iter().zip(&tanh(&x)) {
            let want = f64::from(x).tanh();
            assert!((f64::from(y) - want).abs() <= 4e-7 * want.abs(), "tanh {x}: {y} for {want}");
        }
        let y = tanh(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0]);
        assert_eq!([y[0], y[1], y[3]], [1.0, -1.0, 0.0]);
        assert!(y[2].is_nan());
    }
}

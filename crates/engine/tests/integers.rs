//! Weights in q8 and q4: products in integers on every instruction set, and what rounding changes.

use std::sync::Arc;

use march_engine::{Blocks, CpuOptions, Device, Path, Precision, Products, Tensor};

use crate::common::{Random, cpu};

const BOTH: [Precision; 2] = [Precision::Q8, Precision::Q4];

/// The CPU for inference with each instruction set that the machine has.
fn paths(threads: usize) -> Vec<(Path, Device)> {
    let present = Path::ALL.into_iter().filter(|path| path.present());
    let device = |path| {
        let (products, integers) = (Products::BatchInvariant, Some(path));
        Device::cpu(CpuOptions { threads, products, integers, ..Default::default() }).unwrap()
    };
    present.map(|path| (path, device(path))).collect()
}

fn numbers(random: &mut Random, count: usize, scale: f64) -> Vec<f32> {
    (0..count).map(|_| (random.normal() * scale) as f32).collect()
}

/// A row as the product sees it: rounded to eight bits in blocks of 32.
fn rounded(row: &[f32]) -> Vec<f64> {
    let block = |block: &[f32]| {
        let scale = block.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0;
        let inverse = if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
        let value = |v: &f32| f64::from((v * inverse).round_ties_even()) * f64::from(scale);
        block.iter().map(value).collect::<Vec<_>>()
    };
    row.chunks(32).flat_map(block).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The product in f64 of what is multiplied, and a bound for the size of the terms of each sum.
fn product(x: &[f32], w: &[f64], inner: usize, outer: usize) -> Vec<(f64, f64)> {
    let mut y = Vec::new();
    for row in x.chunks_exact(inner) {
        let row = rounded(row);
        for w in w.chunks_exact(inner).take(outer) {
            let sum = row.iter().zip(w).map(|(x, w)| x * w).sum();
            let largest = |v: &[f64]| v.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            let blocks = row.chunks(32).zip(w.chunks(32));
            y.push((sum, blocks.map(|(x, w)| x.len() as f64 * largest(x) * largest(w)).sum()));
        }
    }
    y
}

#[test]
fn every_path_is_the_product_of_what_is_rounded() {
    let mut random = Random(3);
    for rows in [1, 2, 7, 33] {
        for inner in [1, 31, 32, 33, 255, 257, 1024] {
            for outer in [1, 7, 8, 9, 100] {
                let (x, w) =
                    (numbers(&mut random, rows * inner, 1.0), numbers(&mut random, outer * inner, 0.3));
                for precision in BOTH {
                    let mut first: Option<Vec<f32>> = None;
                    for (path, device) in paths(2) {
                        let weight = Tensor::from_slice(&w, &[outer, inner], &device).unwrap();
                        let weight = weight.pack(precision).unwrap();
                        let x_there = Tensor::from_slice(&x, &[rows, inner], &device).unwrap();
                        let y = x_there.linear(&weight).unwrap().to_f32();
                        let label = format!("{rows}×{inner}×{outer} in {precision} with {}", path.name());
                        if let Some(first) = &first {
                            assert!(bits(first) == bits(&y), "{label}: other bits");
                            continue;
                        }
                        let want = product(&x, &weight.unpack().unwrap().to_f64(), inner, outer);
                        for (&found, (want, size)) in y.iter().zip(want) {
                            let error = (f64::from(found) - want).abs();
                            assert!(error <= 1e-6 * size, "{label}: {found}, not {want}");
                        }
                        first = Some(y);
                    }
                }
            }
        }
    }
}

/// A row has the same bits alone and among any number of others, on every path.
#[test]
fn alone_as_among_others() {
    let mut random = Random(4);
    for (inner, outer) in [(20, 9), (333, 70), (1030, 33)] {
        let (x, w) = (numbers(&mut random, 130 * inner, 1.0), numbers(&mut random, outer * inner, 1.0));
        for precision in BOTH {
            for (path, device) in paths(1).into_iter().chain(paths(2)) {
                let x = Tensor::from_slice(&x, &[130, inner], &device).unwrap();
                let w = Tensor::from_slice(&w, &[outer, inner], &device).unwrap().pack(precision).unwrap();
                let run = |from, rows| x.slice(0, from..from + rows).unwrap().linear(&w).unwrap().to_f32();
                let whole = run(0, 130);
                for (from, rows) in
                    [(0, 1), (5, 2), (7, 3), (9, 4), (11, 5), (3, 6), (2, 25), (60, 64), (1, 129)]
                {
                    let same = bits(&run(from, rows)) == bits(&whole[from * outer..(from + rows) * outer]);
                    assert!(same, "{rows} rows from {from} in {precision} with {}", path.name());
                }
            }
        }
    }
}

/// A row with numbers that are not finite gives NaN and leaves the others alone; tiny ones give zero, huge ones count.
#[test]
fn unusual_rows() {
    let inner = 70;
    let rows: [&[(usize, f32)]; 7] = [
        &[(0, 1.0), (69, 2.0)],
        &[(40, f32::NAN)],
        &[(69, f32::INFINITY)],
        &[(3, f32::NEG_INFINITY), (64, 1.0)],
        &[(5, 1e-45), (66, f32::MIN_POSITIVE)],
        &[(1, 3e38), (2, -3e38)],
        &[],
    ];
    let mut x = vec![0.0; rows.len() * inner];
    for (r, row) in rows.iter().enumerate() {
        row.iter().for_each(|&(i, v)| x[r * inner + i] = v);
    }
    let w: Vec<f32> = (0..9 * inner).map(|i| if i % 2 == 0 { 0.5 } else { -0.5 }).collect();
    for precision in BOTH {
        for (path, device) in paths(2) {
            let w = Tensor::from_slice(&w, &[9, inner], &device).unwrap().pack(precision).unwrap();
            let y =
                Tensor::from_slice(&x, &[rows.len(), inner], &device).unwrap().linear(&w).unwrap().to_f32();
            for y in y.chunks_exact(9).enumerate().flat_map(|(r, y)| y.iter().map(move |&v| (r, v))) {
                let good = match y {
                    (0, v) => (v + 0.5).abs() < 0.02,
                    (1..=3, v) => v.is_nan(),
                    (5, v) => (v + 3e38).abs() < 1e37,
                    (_, v) => v == 0.0,
                };
                assert!(good, "row {} gives {} in {precision} with {}", y.0, y.1, path.name());
            }
        }
    }
}

/// q8 is within half a step of each number. q4 is closer than the nearest of 16 numbers between the smallest and the
/// largest of each block.
#[test]
fn rounding() {
    let mut random = Random(5);
    let (rows, width) = (37, 600);
    for scale in [1e-3, 0.05, 30.0] {
        let numbers = numbers(&mut random, rows * width, scale);
        let device = cpu(2);
        let weight = Tensor::from_slice(&numbers, &[rows, width], &device).unwrap();
        let packed = |precision| weight.pack(precision).unwrap().unpack().unwrap().to_f32();
        for (row, found) in numbers.chunks(width).zip(packed(Precision::Q8).chunks(width)) {
            for (block, found) in row.chunks(32).zip(found.chunks(32)) {
                let largest = block.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                for (v, q) in block.iter().zip(found) {
                    assert!((v - q).abs() <= largest / 254.0 * 1.01 + 6e-8, "{v} became {q}");
                }
            }
        }
        let square =
            |found: &[f32]| -> f64 { numbers.iter().zip(found).map(|(v, q)| f64::from(v - q).powi(2)).sum() };
        let mut plain = Vec::new();
        for block in numbers.chunks(width).flat_map(|row| row.chunks(32)) {
            let (low, high) = block.iter().fold((0.0f32, 0.0f32), |(l, h), &v| (l.min(v), h.max(v)));
            let step = (high - low) / 15.0;
            plain.extend(block.iter().map(|v| low + ((v - low) / step).round() * step));
        }
        let (found, plain) = (square(&packed(Precision::Q4)), square(&plain));
        assert!(found < 0.9 * plain, "{found} instead of {plain}");
        let size: f64 = numbers.iter().map(|&v| f64::from(v).powi(2)).sum();
        assert!((found / size).sqrt() < 0.075, "{}", (found / size).sqrt());
    }
}

/// Blocks of equal numbers, of zeros, and with single numbers that differ much.
#[test]
fn unusual_blocks() {
    let blocks: [&dyn Fn(usize) -> f32; 8] = [
        &|_| 0.0,
        &|_| 0.75,
        &|_| -0.75,
        &|i| if i == 7 { 2.0 } else { 0.0 },
        &|i| if i == 7 { -2.0 } else { 0.0 },
        &|i| if i == 31 { 3e6 } else { -3e6 },
        &|i| i as f32 * 1e-42,
        &|i| 1.0 + i as f32 / 32.0,
    ];
    let device = cpu(1);
    for (k, block) in blocks.into_iter().enumerate() {
        let row: Vec<f32> = (0..32).map(block).collect();
        let largest = row.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let weight = Tensor::from_slice(&row, &[1, 32], &device).unwrap();
        for (precision, tolerance) in [(Precision::Q8, 0.004), (Precision::Q4, 0.04)] {
            let found = weight.pack(precision).unwrap().unpack().unwrap().to_f32();
            for (v, q) in row.iter().zip(found) {
                assert!(
                    (v - q).abs() <= tolerance * largest + 1e-7,
                    "block {k} in {precision}: {v} became {q}"
                );
            }
        }
    }
    let message = Tensor::full(&[20, 3], 1e7, &device).unwrap().pack(Precision::Q4).unwrap_err().to_string();
    assert!(message.contains("row 0 holds 1e7, but q4 holds numbers up to 4e6"), "{message}");
}

/// Rows that are read while they are packed give the same bits as a tensor.
#[test]
fn rows_that_are_read() {
    let numbers = numbers(&mut Random(6), 35 * 70, 1.0);
    for device in [Device::reference(), cpu(2)] {
        for precision in Precision::ALL {
            let read = |r: usize, to: &mut [f32]| to.copy_from_slice(&numbers[r * 70..][..70]);
            let packed = Tensor::pack_rows([35, 70], precision, &device, &read).unwrap();
            let same = Tensor::from_slice(&numbers, &[35, 70], &device).unwrap().pack(precision).unwrap();
            assert_eq!(packed.dtype(), same.dtype());
            assert!(packed.unpack().unwrap().to_f64() == same.unpack().unwrap().to_f64(), "{precision}");
        }
    }
}

/// The bytes of a weight give the same weight again, wherever they begin, and stay where they are if that is possible.
#[test]
fn bytes_of_a_file() {
    let mut random = Random(7);
    for [rows, width] in [[1, 1], [16, 32], [17, 33], [35, 300], [100, 512], [0, 5]] {
        let (w, x) = (numbers(&mut random, rows * width, 1.0), numbers(&mut random, 3 * width, 1.0));
        for precision in [Precision::Bf16, Precision::Q8, Precision::Q4] {
            let cpu = cpu(2);
            let packed = Tensor::from_slice(&w, &[rows, width], &cpu).unwrap().pack(precision).unwrap();
            let bytes = packed.file_bytes().unwrap().into_owned();
            assert_eq!(bytes.len(), precision.bytes(rows, width));
            let name = format!("{precision} {rows} × {width}");
            for skip in [0, 1, 2, 32] {
                let mut file = vec![0xAB; bytes.len() + 128];
                let start = file.as_ptr().addr().next_multiple_of(64) - file.as_ptr().addr() + skip;
                file[start..][..bytes.len()].copy_from_slice(&bytes);
                let file = Arc::new(file);
                let range = start..start + bytes.len();
                let from = |device: &Device| {
                    Tensor::from_packed(file.clone(), range.clone(), [rows, width], precision, device)
                        .unwrap()
                };
                let Some(same) = from(&cpu) else {
                    assert!(precision == Precision::Bf16 && skip == 1, "{name}");
                    continue;
                };
                assert_eq!(same.dtype(), packed.dtype());
                assert!(same.file_bytes().unwrap() == bytes, "{name}, {skip} bytes after a line");
                let inside = file.as_ptr_range().contains(&same.file_bytes().unwrap().as_ptr());
                let stays = skip == 0 || precision == Precision::Bf16;
                assert!(inside == stays || bytes.is_empty(), "{name}, {skip} bytes after a line");
                if rows > 0 {
                    let x = Tensor::from_slice(&x, &[3, width], &cpu).unwrap();
                    let product = |w: &Tensor| bits(&x.linear(w).unwrap().to_f32());
                    assert!(product(&same) == product(&packed), "{name}");
                }
                let rounded = from(&Device::reference()).map(|weight| weight.unpack().unwrap().to_f64());
                assert_eq!(rounded.is_some(), precision != Precision::Bf16);
                let values = packed.unpack().unwrap().to_f64();
                assert!(rounded.is_none_or(|rounded| rounded == values), "{name}");
            }
            let short = 0..bytes.len().saturating_sub(1);
            let wrong = Tensor::from_packed(Arc::new(bytes), short, [rows + 1, width], precision, &cpu);
            assert!(wrong.unwrap_err().to_string().contains("bytes for"), "{name}");
        }
    }
    assert_eq!(Precision::Q4.blocks_shape(17, 300), Some([2, 2 * 256 + 10 * 256]));
    assert_eq!(Precision::Q8.blocks_shape(usize::MAX, usize::MAX), None);
    assert_eq!(Precision::Int8.blocks_shape(1, 1), None);
}

/// A factor that is not finite is found by whoever looks at the part in which its super begins, and by nobody else.
#[test]
fn factors_that_are_not_finite() {
    let (rows, width) = (35, 600);
    let w = numbers(&mut Random(8), rows * width, 1.0);
    for (precision, halves) in [(Precision::Q8, 128), (Precision::Q4, 32)] {
        let packed = Tensor::from_slice(&w, &[rows, width], &cpu(1)).unwrap().pack(precision).unwrap();
        let mut bytes = packed.file_bytes().unwrap().into_owned();
        let finite =
            |bytes: &[u8], range| Blocks::new(precision, bytes, [rows, width]).unwrap().are_finite(range);
        assert!(finite(&bytes, 0..usize::MAX));
        let [groups, group] = precision.blocks_shape(rows, width).unwrap();
        let full = Precision::blocks_shape(precision, 1, 256).unwrap()[1];
        for begin in (0..groups).flat_map(|g| [0, full, 2 * full].map(|at| g * group + at)) {
            for half in [0, 17, halves - 1] {
                let own = begin + 2 * half..begin + 2 * half + 2;
                let before = bytes[own.clone()].to_vec();
                bytes[own.clone()].copy_from_slice(&0xFC00u16.to_le_bytes());
                assert!(!finite(&bytes, 0..bytes.len()) && !finite(&bytes, begin..begin + 1));
                assert!(finite(&bytes, 0..begin) && finite(&bytes, begin + 1..bytes.len()));
                bytes[own].copy_from_slice(&before);
            }
        }
    }
}

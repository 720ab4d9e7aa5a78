//! The plain operations: CPU = reference = finite differences on odd shapes, and errors instead of panics.

use march_engine::ops::elementwise::{Map, MapBackward, Zip, ZipBackward};
use march_engine::ops::embedding::EmbeddingBackward;
use march_engine::ops::layout::Place;
use march_engine::ops::matmul::{MatMulBackward, Transpose};
use march_engine::ops::reduce::SumTo;
use march_engine::ops::softmax::SoftmaxBackward;
use march_engine::{CpuOptions, Device, Op, Products, Result, Tape, Tensor};

use crate::common::{self, Input, Program, Random, all_devices, compare, cpus, describe, invariant, outcome};

/// CPU = reference, and for small inputs finite differences.
fn check(label: &str, program: Program<'_>, inputs: &[Input]) {
    common::check(label, program, inputs, 1500, 6);
}

/// The same for a program of one input and one result.
fn check_one(label: &str, program: impl Fn(&Tensor) -> Result<Tensor>, input: &Input) {
    check(label, &|v| Ok(vec![program(&v[0])?]), std::slice::from_ref(input));
}

const MAPS: [Map; 13] = [
    Map::Neg,
    Map::Exp,
    Map::Ln,
    Map::Sigmoid,
    Map::Silu,
    Map::Tanh,
    Map::Relu,
    Map::Softplus,
    Map::Square,
    Map::Sqrt,
    Map::Reciprocal,
    Map::Scale(-1.5),
    Map::Shift(0.75),
];

#[test]
fn maps() {
    let mut random = Random(11);
    for kind in MAPS {
        let map = |x: &Tensor| match kind {
            // ln, √ and 1/x want positive numbers.
            Map::Ln | Map::Sqrt | Map::Reciprocal => x.square()?.shift(0.5)?.map(kind),
            _ => x.map(kind),
        };
        for shape in [vec![], vec![7], vec![0, 4], vec![3, 5, 11], vec![130, 257]] {
            check_one(&format!("{kind:?} {shape:?}"), map, &random.input("x", &shape, 2.0));
        }
    }
}

#[test]
fn maps_by_name() {
    let x = Tensor::from_f64(&[0.7], &[1], &Device::reference()).unwrap();
    for (found, want) in [
        (x.neg(), -0.7),
        (x.exp(), 0.7f64.exp()),
        (x.ln(), 0.7f64.ln()),
        (x.sigmoid(), 1.0 / (1.0 + (-0.7f64).exp())),
        (x.silu(), 0.7 / (1.0 + (-0.7f64).exp())),
        (x.tanh(), 0.7f64.tanh()),
        (x.relu(), 0.7),
        (x.softplus(), 0.7f64.exp().ln_1p()),
        (x.square(), 0.49),
        (x.sqrt(), 0.7f64.sqrt()),
        (x.reciprocal(), 1.0 / 0.7),
        (x.scale(3.0), 2.1),
        (x.shift(3.0), 3.7),
        (x.add(&x), 1.4),
        (x.sub(&x), 0.0),
        (x.mul(&x), 0.49),
        (x.div(&x), 1.0),
        (&x + &x, 1.4),
        (&x - &x, 0.0),
        (&x * &x, 0.49),
        (&x / &x, 1.0),
    ] {
        let found = found.unwrap().to_f64()[0];
        assert!((found - want).abs() < 1e-12, "{found} for {want}");
    }
}

#[test]
fn an_element_of_a_map_has_the_same_bits_anywhere() {
    let mut random = Random(12);
    let x: Vec<f32> = (0..1003).map(|_| random.normal() as f32 * 3.0).collect();
    let bits = |x: &Tensor| x.to_f32().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for cpu in cpus() {
        let x = Tensor::from_slice(&x, &[1003], &cpu).unwrap();
        for kind in MAPS {
            let whole = bits(&x.map(kind).unwrap());
            for range in [0..1, 5..8, 1000..1003, 17..46] {
                let part = x.slice(0, range.clone()).unwrap().map(kind).unwrap();
                assert_eq!(bits(&part), whole[range], "{kind:?} on {}", describe(&cpu));
            }
        }
    }
}

#[test]
fn zips() {
    let mut random = Random(13);
    let shapes: [(&[usize], &[usize]); 15] = [
        (&[5, 7], &[5, 7]),
        (&[], &[]),
        (&[4, 9], &[]),
        (&[], &[3, 2]),
        (&[6, 10], &[10]),
        (&[6, 10], &[6, 1]),
        (&[1, 10], &[6, 1]),
        (&[2, 3, 1, 5], &[4, 1]),
        (&[3, 1, 4, 1], &[2, 1, 6]),
        (&[0, 3], &[1, 3]),
        (&[2, 0], &[]),
        (&[2, 1], &[2, 0]),
        (&[1], &[1, 1, 1]),
        (&[130, 301], &[130, 301]),
        (&[3, 101, 67], &[101, 1]),
    ];
    for kind in [Zip::Add, Zip::Sub, Zip::Mul, Zip::Div] {
        let zip = |v: &[Tensor]| {
            let b = if kind == Zip::Div { v[1].square()?.shift(0.5)? } else { v[1].clone() };
            Ok(vec![v[0].zip(kind, &b)?])
        };
        for (a, b) in shapes {
            let inputs = [random.input("a", a, 1.0), random.input("b", b, 1.0)];
            check(&format!("{kind:?} {a:?} {b:?}"), &zip, &inputs);
        }
    }
}

/// The tape knows the gradients of a sum and does not run the operation's backward pass; they are the same.
#[test]
fn the_tape_and_the_device_agree_on_the_gradients_of_a_sum() {
    let mut random = Random(14);
    let cpu = common::cpu(1);
    let [a, b, dy] = [&[3, 4][..], &[4], &[3, 4]].map(|shape| random.input("x", shape, 1.0).on(&cpu));
    for kind in [Zip::Add, Zip::Sub] {
        let tape = Tape::new();
        let y = tape.parameter(0, &a).zip(kind, &tape.parameter(1, &b)).unwrap();
        let mut found = [Vec::new(), Vec::new()];
        tape.backward_from(&[(&y, dy.clone())], |key, g| found[key] = g.to_f32()).unwrap();
        let (a, b, gradient) = (a.clone(), b.clone(), dy.clone());
        let want = ZipBackward { kind, a, b, gradient, needs: [true, true] }.run().unwrap();
        assert_eq!(found, want.map(|g| g.unwrap().to_f32()));
    }
}

fn matmul_with(transpose: Transpose) -> impl Fn(&[Tensor]) -> Result<Vec<Tensor>> {
    move |v| Ok(vec![v[0].matmul_with(&v[1], transpose)?])
}

fn stored(leading: &[usize], rows: usize, columns: usize, transposed: bool) -> Vec<usize> {
    let mut shape = leading.to_vec();
    shape.extend(if transposed { [columns, rows] } else { [rows, columns] });
    shape
}

#[test]
fn matmul() {
    let mut random = Random(15);
    let cases: [(&[usize], bool, [usize; 3]); 11] = [
        (&[], false, [1, 1, 1]),
        (&[], false, [7, 5, 9]),
        (&[2, 3], false, [4, 5, 3]),
        (&[2, 3], true, [4, 5, 3]),
        (&[5], false, [0, 3, 2]),
        (&[0], true, [3, 3, 2]),
        (&[3], true, [2, 3, 0]),
        (&[2], false, [3, 0, 4]),
        (&[9], false, [33, 17, 65]),
        (&[3], true, [30, 41, 19]),
        (&[], false, [261, 70, 135]),
    ];
    for (leading, shared, [m, n, k]) in cases {
        for flags in 0..4 {
            let transpose = Transpose { a: flags & 1 != 0, b: flags & 2 != 0 };
            let inputs = [
                random.input("a", &stored(leading, m, k, transpose.a), 1.0),
                random.input("b", &stored(if shared { &[] } else { leading }, k, n, transpose.b), 1.0),
            ];
            let label = format!("matmul {leading:?} {m}×{n}×{k} shared {shared} {transpose:?}");
            check(&label, &matmul_with(transpose), &inputs);
        }
    }
}

#[test]
fn large_matmul_uses_all_threads_and_stays_right() {
    let mut random = Random(16);
    let inputs = [random.input("a", &[2, 150, 129], 1.0), random.input("b", &[2, 129, 140], 1.0)];
    compare("matmul", &matmul_with(Transpose::default()), &inputs);
}

#[test]
fn batch_invariant_matmul() {
    let mut random = Random(17);
    let cpu = invariant(2);
    let (batch, m, n, k) = (3, 290, 50, 37);
    let (a, b) =
        (random.input("a", &[batch, m, k], 1.0).on(&cpu), random.input("b", &[batch, k, n], 1.0).on(&cpu));
    let whole = a.matmul(&b).unwrap().to_f32();
    for entry in 0..batch {
        let of_entry = |x: &Tensor| x.slice(0, entry..entry + 1)?.reshape(&x.shape()[1..]);
        let (a, b) = (of_entry(&a).unwrap(), of_entry(&b).unwrap());
        for (row, rows) in [(0, 1), (3, 2), (17, 5), (200, 90)] {
            let found = a.slice(0, row..row + rows).unwrap().matmul(&b).unwrap().to_f32();
            assert_eq!(found, whole[(entry * m + row) * n..][..rows * n], "rows {row}.. of entry {entry}");
        }
    }
}

#[test]
fn softmax() {
    let mut random = Random(18);
    for shape in [vec![1], vec![5, 1], vec![0, 3], vec![3, 0], vec![2, 3, 13], vec![70, 301]] {
        check_one(&format!("softmax {shape:?}"), Tensor::softmax, &random.input("x", &shape, 3.0));
    }
}

#[test]
fn softmax_of_masked_rows() {
    let inf = f64::NEG_INFINITY;
    for width in [3, 8, 11, 20] {
        // One row all masked, one with a single element left, one free.
        let mut data = vec![inf; 2 * width];
        data[width + 1] = 4.0;
        data.extend((0..width).map(|i| i as f64));
        let inputs = [Input { name: "x", shape: vec![3, width], data }];
        let softmax = |v: &[Tensor]| Ok(vec![v[0].softmax()?]);
        compare(&format!("masked softmax {width}"), &softmax, &inputs);
        let found = outcome(&common::cpu(1), &softmax, &inputs).unwrap();
        assert!(found.outputs[0].1[..width].iter().all(|&v| v == 0.0));
        assert_eq!(found.outputs[0].1[width + 1], 1.0);
        assert!(found.gradients[0].as_ref().unwrap()[..width].iter().all(|&v| v == 0.0));
    }
}

#[test]
fn slices() {
    let mut random = Random(19);
    let x = random.input("x", &[3, 5, 7], 1.0);
    for (axis, range) in [(0, 1..2), (0, 0..3), (1, 0..2), (1, 4..5), (2, 2..6), (2, 3..3), (1, 5..5)] {
        check_one(&format!("slice {axis} {range:?}"), |x| x.slice(axis, range.clone()), &x);
    }
    let large = random.input("x", &[37, 90, 33], 1.0);
    for axis in 0..3 {
        check_one("slice", |x| x.slice(axis, 5..30), &large);
    }
    check_one("slice", |x| x.slice(1, 1..3), &random.input("x", &[0, 4], 1.0));
}

#[test]
fn concats() {
    let mut random = Random(20);
    for axis in 0..3 {
        for sizes in [vec![2], vec![1, 3], vec![0, 4, 2], vec![40, 9, 23]] {
            let mut input = |size| {
                let mut shape = [3, 5, 7];
                shape[axis] = size;
                random.input("part", &shape, 1.0)
            };
            let inputs: Vec<Input> = sizes.iter().map(|&size| input(size)).collect();
            let concat = |v: &[Tensor]| Ok(vec![Tensor::concat(&v.iter().collect::<Vec<_>>(), axis)?]);
            check(&format!("concat {axis} {sizes:?}"), &concat, &inputs);
        }
    }
}

#[test]
fn permutations() {
    let mut random = Random(21);
    let cases: [(&[usize], &[usize]); 13] = [
        (&[], &[]),
        (&[5], &[0]),
        (&[3, 4], &[1, 0]),
        (&[17, 29], &[1, 0]),
        (&[2, 3, 4], &[0, 2, 1]),
        (&[2, 3, 4], &[1, 0, 2]),
        (&[2, 1, 4, 3], &[3, 1, 0, 2]),
        (&[3, 9, 2, 10], &[2, 0, 3, 1]),
        (&[0, 3, 2], &[2, 0, 1]),
        (&[2, 40, 3, 24], &[0, 2, 1, 3]),
        (&[2, 40, 3, 24], &[0, 2, 3, 1]),
        (&[161, 203], &[1, 0]),
        (&[128, 2, 64], &[1, 2, 0]),
    ];
    for (shape, axes) in cases {
        let x = random.input("x", shape, 1.0);
        check_one(&format!("permute {shape:?} by {axes:?}"), |x| x.permute(axes), &x);
    }
}

#[test]
fn reshapes() {
    let mut random = Random(22);
    for (from, to) in [(vec![2, 6], vec![3, 4]), (vec![1], vec![]), (vec![0, 5], vec![7, 0])] {
        check_one(&format!("reshape {from:?} {to:?}"), |x| x.reshape(&to), &random.input("x", &from, 1.0));
    }
}

#[test]
fn transposition() {
    let x = Random(26).input("x", &[3, 5, 7], 1.0);
    check_one("t", Tensor::t, &x);
    for device in all_devices() {
        let x = x.on(&device);
        assert_eq!(x.t().unwrap().to_f64(), x.permute(&[0, 2, 1]).unwrap().to_f64());
        assert!(Tensor::full(&[4], 1.0, &device).unwrap().t().is_err());
    }
}

#[test]
fn reductions() {
    let mut random = Random(23);
    for shape in
        [vec![5], vec![1, 1], vec![3, 4, 5], vec![7, 41, 3], vec![2, 900, 43], vec![0, 3], vec![70_001]]
    {
        let x = random.input("x", &shape, 1.0);
        for axis in 0..shape.len() {
            check_one(&format!("sum {shape:?} {axis}"), |x| x.sum(axis), &x);
            if shape[axis] > 0 {
                check_one(&format!("mean {shape:?} {axis}"), |x| x.mean(axis), &x);
            }
        }
        for (axis, count) in (0..=shape.len()).flat_map(|axis| [(axis, 0), (axis, 1), (axis, 3)]) {
            check_one(&format!("expand {shape:?} {axis} {count}"), |x| x.expand(axis, count), &x);
        }
    }
    check_one("expand a number", |x| x.expand(0, 4), &random.input("x", &[], 1.0));
}

#[test]
fn embeddings() {
    let mut random = Random(24);
    for (rows, width, shape) in [
        (1, 1, vec![]),
        (5, 3, vec![7]),
        (4, 9, vec![0]),
        (11, 6, vec![2, 5]),
        (3, 0, vec![2]),
        (0, 4, vec![0]),
        (97, 1030, vec![4, 50]),
    ] {
        let count: usize = shape.iter().product();
        // Half of them are one id.
        let ids = (0..count)
            .map(|i| if i % 2 == 0 { 0 } else { random.between(0, rows - 1) as u32 })
            .collect::<Vec<u32>>();
        let table = random.input("table", &[rows, width], 1.0);
        check_one(&format!("embedding {rows}×{width} {shape:?}"), |x| x.embedding(&ids, &shape), &table);
    }
}

#[test]
fn same_bits_on_any_number_of_threads() {
    let mut random = Random(25);
    let ids: Vec<u32> = (0..600).map(|_| random.between(0, 49) as u32).collect();
    let inputs = [
        random.input("table", &[50, 67], 0.1),
        random.input("bias", &[67], 1.0),
        random.input("gate", &[4, 150, 1], 1.0),
    ];
    let everything = |v: &[Tensor]| {
        let x = v[0].embedding(&ids, &[4, 150])?;
        let y = x.silu()?.add(&v[1])?;
        let scores = y.matmul_with(&x, Transpose { a: false, b: true })?;
        let y = scores.softmax()?.matmul(&y)?.mul(&v[2])?.permute(&[2, 0, 1])?;
        Ok(vec![y.sum(1)?, y.mean(2)?])
    };
    let run = |threads, products| {
        let cpu = Device::cpu(CpuOptions { threads, products, ..Default::default() }).unwrap();
        outcome(&cpu, &everything, &inputs).unwrap()
    };
    for products in [Products::Fastest, Products::BatchInvariant] {
        let want = run(1, products);
        for threads in [2, 3] {
            assert!(run(threads, products) == want, "{threads} threads, {products:?}");
        }
    }
}

/// Every call must be refused.
fn refuses(device: &Device) {
    let tape = Tape::new();
    let plain = |shape: &[usize]| Tensor::full(shape, 1.0, device).unwrap();
    let var = |shape: &[usize]| tape.parameter(0, &plain(shape));
    let bad = |what: &str, found: Result<Tensor>| match found {
        Ok(_) => panic!("{what} was accepted"),
        Err(error) => assert!(!error.to_string().is_empty()),
    };
    let (x, y) = (var(&[2, 3]), var(&[2, 4]));
    bad("add", x.add(&y));
    bad("mul", x.mul(&var(&[2])));
    bad("div", var(&[0]).div(&var(&[2])));
    bad("sum", x.sum(2));
    bad("mean", x.mean(5));
    bad("mean of nothing", var(&[3, 0]).mean(1));
    bad("expand", x.expand(3, 2));
    bad("expand", x.expand(0, usize::MAX));
    bad("slice axis", x.slice(2, 0..1));
    bad("slice range", x.slice(1, 1..4));
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 2..1;
    bad("slice backwards", x.slice(1, backwards));
    bad("concat of nothing", Tensor::concat(&[], 0));
    bad("concat axis", Tensor::concat(&[&x, &x], 2));
    bad("concat sizes", Tensor::concat(&[&x, &y], 0));
    bad("concat rank", Tensor::concat(&[&x, &var(&[3])], 0));
    bad("permute twice", x.permute(&[0, 0]));
    bad("permute few", x.permute(&[0]));
    bad("permute beyond", x.permute(&[0, 2]));
    bad("reshape", x.reshape(&[5]));
    bad("reshape", x.reshape(&[usize::MAX, usize::MAX]));
    bad("softmax", var(&[]).softmax());
    bad("matmul inner", x.matmul(&y));
    bad("matmul rank", x.matmul(&var(&[3])));
    bad("matmul rank", var(&[3]).matmul(&x));
    bad("matmul batch", var(&[2, 2, 3]).matmul(&var(&[3, 3, 4])));
    bad("matmul batch", x.matmul(&var(&[2, 3, 4])));
    bad("embedding id", x.embedding(&[1, 2], &[2]));
    bad("embedding count", x.embedding(&[1, 0], &[3]));
    bad("embedding table", var(&[4]).embedding(&[1], &[1]));
    bad("full", Tensor::full(&[usize::MAX, 2], 0.0, device));
    bad("from_slice", Tensor::from_slice(&[1.0], &[2], device));
    assert!(x.detach().accumulate(&y).is_err() && x.detach().append(&y, 0).is_err());
    assert!(tape.is_empty());

    // Backward passes with gradients of a wrong shape.
    let [x, y] = [&[2, 3], &[2, 4]].map(|shape| plain(shape));
    let wrong = |gradient: &Tensor, kept: &Tensor| {
        let (kind, kept, gradient) = (Map::Exp, kept.clone(), gradient.clone());
        MapBackward { kind, kept, gradient }.run()
    };
    bad("map_backward", wrong(&x, &y));
    bad("map_backward", wrong(&y, &x));
    let (a, b, gradient, needs) = (x.clone(), x.clone(), y.clone(), [true; 2]);
    assert!(ZipBackward { kind: Zip::Mul, a, b, gradient, needs }.run().is_err());
    bad("softmax_backward", SoftmaxBackward { y: x.clone(), gradient: y.clone() }.run());
    let (a, b, transpose, gradient) = (x.clone(), x.clone(), Transpose { a: false, b: true }, y);
    assert!(MatMulBackward { a, b, transpose, gradient, needs }.run().is_err());
    let embedding =
        |ids: &[u32], rows| EmbeddingBackward { ids: ids.to_vec(), rows, gradient: x.clone() }.run();
    bad("embedding_backward", embedding(&[0, 1], 1));
    bad("embedding_backward", embedding(&[0], 4));
    let place = |axis, start| Place { x: x.clone(), axis, start, size: 4 }.run();
    bad("place", place(1, 2));
    bad("place", place(2, 0));
    bad("sum_to", SumTo { x: x.clone(), shape: vec![2] }.run());
    bad("sum_to", SumTo { x: x.clone(), shape: vec![1, 2, 3] }.run());
    let message = x.embedding(&[1, 7], &[2]).unwrap_err().to_string();
    assert_eq!(message, "embedding: id 7 at position 1 is out of range: the table has 2 rows");
}

#[test]
fn wrong_calls_are_errors() {
    all_devices().iter().for_each(refuses);
}

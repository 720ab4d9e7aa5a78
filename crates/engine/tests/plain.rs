//! The plain operations: fast = reference = finite differences on odd shapes, and errors instead of panics.

use march_engine::ops::elementwise::{Map, Zip};
use march_engine::ops::embedding::Embedding;
use march_engine::ops::matmul::{MatMul, Transpose};
use march_engine::{Cpu, CpuOptions, Engine, Products, Reference, Result, Tape, Var};

use crate::common::{self, Input, Program, Random, compare, fast_engines, finite_differences};

/// A test's program, written once for all engines.
macro_rules! program {
    ($name:ident { $($field:ident: $kind:ty),* } |$this:ident, $tape:ident, $v:ident| $body:expr) => {
        struct $name { $($field: $kind),* }
        impl Program for $name {
            fn run<'e, E: Engine>(
                &self,
                $tape: &Tape<'e, E>,
                $v: &[Var<E::Tensor>],
            ) -> Result<Vec<Var<E::Tensor>>> {
                let $this = self;
                $body
            }
        }
    };
}

fn check(label: &str, program: &impl Program, inputs: &[Input]) {
    compare(label, program, inputs);
    if inputs.iter().map(|i| i.data.len()).sum::<usize>() < 1500 {
        finite_differences(label, program, inputs, 6);
    }
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

program! { MapProgram { kind: Map } |this, tape, v| {
    // ln, √ and 1/x want positive numbers.
    let x = match this.kind {
        Map::Ln | Map::Sqrt | Map::Reciprocal => tape.shift(&tape.square(&v[0])?, 0.5)?,
        _ => v[0].clone(),
    };
    Ok(vec![tape.map(this.kind, &x)?])
}}

#[test]
fn maps() {
    let mut random = Random(11);
    for kind in MAPS {
        for shape in [vec![], vec![7], vec![0, 4], vec![3, 5, 11], vec![130, 257]] {
            let inputs = [random.input("x", &shape, 2.0)];
            check(&format!("{kind:?} {shape:?}"), &MapProgram { kind }, &inputs);
        }
    }
}

#[test]
fn maps_by_name() {
    let tape = Tape::inference(&Reference);
    let x = tape.constant(Reference.from_f64(&[0.7], &[1]).unwrap());
    let one = |v: Result<Var<march_engine::Tensor<f64>>>| v.unwrap().value().data()[0];
    for (found, want) in [
        (one(tape.neg(&x)), -0.7),
        (one(tape.exp(&x)), 0.7f64.exp()),
        (one(tape.ln(&x)), 0.7f64.ln()),
        (one(tape.sigmoid(&x)), 1.0 / (1.0 + (-0.7f64).exp())),
        (one(tape.silu(&x)), 0.7 / (1.0 + (-0.7f64).exp())),
        (one(tape.tanh(&x)), 0.7f64.tanh()),
        (one(tape.relu(&x)), 0.7),
        (one(tape.softplus(&x)), 0.7f64.exp().ln_1p()),
        (one(tape.square(&x)), 0.49),
        (one(tape.sqrt(&x)), 0.7f64.sqrt()),
        (one(tape.reciprocal(&x)), 1.0 / 0.7),
        (one(tape.scale(&x, 3.0)), 2.1),
        (one(tape.shift(&x, 3.0)), 3.7),
        (one(tape.add(&x, &x)), 1.4),
        (one(tape.sub(&x, &x)), 0.0),
        (one(tape.mul(&x, &x)), 0.49),
        (one(tape.div(&x, &x)), 1.0),
    ] {
        assert!((found - want).abs() < 1e-12, "{found} for {want}");
    }
}

#[test]
fn an_element_of_a_map_has_the_same_bits_anywhere() {
    let mut random = Random(12);
    let x: Vec<f32> = (0..1003).map(|_| random.normal() as f32 * 3.0).collect();
    for cpu in fast_engines() {
        for kind in MAPS {
            let whole = cpu.to_f32(&cpu.map(kind, &cpu.from_f32(&x, &[1003]).unwrap()).unwrap());
            for (start, len) in [(0, 1), (5, 3), (1000, 3), (17, 29)] {
                let part = cpu.from_f32(&x[start..start + len], &[len]).unwrap();
                let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                let part = cpu.to_f32(&cpu.map(kind, &part).unwrap());
                assert_eq!(bits(&part), bits(&whole[start..start + len]), "{kind:?} on {cpu:?}");
            }
        }
    }
}

program! { ZipProgram { kind: Zip } |this, tape, v| {
    let b = match this.kind {
        Zip::Div => tape.shift(&tape.square(&v[1])?, 0.5)?,
        _ => v[1].clone(),
    };
    Ok(vec![tape.zip(this.kind, &v[0], &b)?])
}}

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
        for (a, b) in shapes {
            let inputs = [random.input("a", a, 1.0), random.input("b", b, 1.0)];
            check(&format!("{kind:?} {a:?} {b:?}"), &ZipProgram { kind }, &inputs);
        }
    }
}

#[test]
fn the_tape_and_the_engine_agree_on_the_gradients_of_a_sum() {
    let mut random = Random(14);
    let cpu = &fast_engines()[0];
    let tensor = |input: Input| cpu.from_f64(&input.data, &input.shape).unwrap();
    let (a, b) = (tensor(random.input("a", &[3, 4], 1.0)), tensor(random.input("b", &[4], 1.0)));
    let dy = tensor(random.input("dy", &[3, 4], 1.0));
    for kind in [Zip::Add, Zip::Sub] {
        let tape = Tape::new(cpu);
        let (va, vb) = (tape.parameter(0, a.clone()), tape.parameter(1, b.clone()));
        let y = tape.zip(kind, &va, &vb).unwrap();
        let mut found = [Vec::new(), Vec::new()];
        tape.backward_from(&[(&y, dy.clone())], |key, g| found[key] = cpu.to_f32(&g)).unwrap();
        let want = cpu.zip_backward(kind, &a, &b, &dy, [true, true]).unwrap();
        assert_eq!(found.to_vec(), want.map(|g| cpu.to_f32(&g.unwrap())).to_vec());
    }
}

program! { MatMulProgram { transpose: Transpose } |this, tape, v| {
    Ok(vec![tape.matmul(MatMul { a: &v[0], b: &v[1] }, this.transpose)?])
}}

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
            check(&label, &MatMulProgram { transpose }, &inputs);
        }
    }
}

#[test]
fn large_matmul_uses_all_threads_and_stays_right() {
    let mut random = Random(16);
    let inputs = [random.input("a", &[2, 150, 129], 1.0), random.input("b", &[2, 129, 140], 1.0)];
    compare("matmul", &MatMulProgram { transpose: Transpose::default() }, &inputs);
}

#[test]
fn batch_invariant_matmul() {
    let mut random = Random(17);
    let options = CpuOptions { threads: 2, portable: false, products: Products::BatchInvariant };
    let cpu = Cpu::new(options).unwrap();
    let (batch, m, n, k) = (3, 290, 50, 37);
    let a: Vec<f32> = (0..batch * m * k).map(|_| random.normal() as f32).collect();
    let b: Vec<f32> = (0..batch * k * n).map(|_| random.normal() as f32).collect();
    let run = |a: &[f32], shape_a: &[usize], b: &[f32], shape_b: &[usize]| {
        let (a, b) = (cpu.from_f32(a, shape_a).unwrap(), cpu.from_f32(b, shape_b).unwrap());
        cpu.to_f32(&cpu.matmul(MatMul { a: &a, b: &b }, Transpose::default()).unwrap())
    };
    let whole = run(&a, &[batch, m, k], &b, &[batch, k, n]);
    for entry in 0..batch {
        let b = &b[entry * k * n..][..k * n];
        for (row, rows) in [(0, 1), (3, 2), (17, 5), (200, 90)] {
            let found = run(&a[(entry * m + row) * k..][..rows * k], &[rows, k], b, &[k, n]);
            assert_eq!(found, whole[(entry * m + row) * n..][..rows * n], "rows {row}.. of entry {entry}");
        }
    }
}

program! { SoftmaxProgram {} |_this, tape, v| Ok(vec![tape.softmax(&v[0])?]) }

#[test]
fn softmax() {
    let mut random = Random(18);
    for shape in [vec![1], vec![5, 1], vec![0, 3], vec![3, 0], vec![2, 3, 13], vec![70, 301]] {
        let inputs = [random.input("x", &shape, 3.0)];
        check(&format!("softmax {shape:?}"), &SoftmaxProgram {}, &inputs);
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
        let input = Input { name: "x", shape: vec![3, width], data };
        compare(&format!("masked softmax {width}"), &SoftmaxProgram {}, std::slice::from_ref(&input));
        let found = common::outcome(&fast_engines()[0], &SoftmaxProgram {}, &[input]).unwrap();
        assert!(found.outputs[0].1[..width].iter().all(|&v| v == 0.0));
        assert_eq!(found.outputs[0].1[width + 1], 1.0);
        assert!(found.gradients[0].as_ref().unwrap()[..width].iter().all(|&v| v == 0.0));
    }
}

program! { SliceProgram { axis: usize, range: std::ops::Range<usize> } |this, tape, v| {
    Ok(vec![tape.slice(&v[0], this.axis, this.range.clone())?])
}}

program! { ConcatProgram { axis: usize } |this, tape, v| {
    let parts: Vec<_> = v.iter().collect();
    Ok(vec![tape.concat(&parts, this.axis)?])
}}

program! { PermuteProgram { axes: Vec<usize> } |this, tape, v| {
    Ok(vec![tape.permute(&v[0], &this.axes)?])
}}

program! { ReshapeProgram { shape: Vec<usize> } |this, tape, v| {
    Ok(vec![tape.reshape(&v[0], &this.shape)?])
}}

#[test]
fn slices() {
    let mut random = Random(19);
    let x = [random.input("x", &[3, 5, 7], 1.0)];
    for (axis, range) in [(0, 1..2), (0, 0..3), (1, 0..2), (1, 4..5), (2, 2..6), (2, 3..3), (1, 5..5)] {
        check(&format!("slice {axis} {range:?}"), &SliceProgram { axis, range }, &x);
    }
    let large = [random.input("x", &[37, 90, 33], 1.0)];
    for axis in 0..3 {
        check("slice", &SliceProgram { axis, range: 5..30 }, &large);
    }
    check("slice", &SliceProgram { axis: 1, range: 1..3 }, &[random.input("x", &[0, 4], 1.0)]);
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
            check(&format!("concat {axis} {sizes:?}"), &ConcatProgram { axis }, &inputs);
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
        let inputs = [random.input("x", shape, 1.0)];
        check(&format!("permute {shape:?} by {axes:?}"), &PermuteProgram { axes: axes.to_vec() }, &inputs);
    }
}

#[test]
fn reshapes() {
    let mut random = Random(22);
    for (from, to) in [(vec![2, 6], vec![3, 4]), (vec![1], vec![]), (vec![0, 5], vec![7, 0])] {
        let inputs = [random.input("x", &from, 1.0)];
        check(&format!("reshape {from:?} {to:?}"), &ReshapeProgram { shape: to }, &inputs);
    }
}

program! { SumProgram { axis: usize } |this, tape, v| Ok(vec![tape.sum(&v[0], this.axis)?]) }
program! { MeanProgram { axis: usize } |this, tape, v| Ok(vec![tape.mean(&v[0], this.axis)?]) }
program! { ExpandProgram { axis: usize, count: usize } |this, tape, v| {
    Ok(vec![tape.expand(&v[0], this.axis, this.count)?])
}}

#[test]
fn reductions() {
    let mut random = Random(23);
    for shape in
        [vec![5], vec![1, 1], vec![3, 4, 5], vec![7, 41, 3], vec![2, 900, 43], vec![0, 3], vec![70_001]]
    {
        let inputs = [random.input("x", &shape, 1.0)];
        for axis in 0..shape.len() {
            check(&format!("sum {shape:?} {axis}"), &SumProgram { axis }, &inputs);
            if shape[axis] > 0 {
                check(&format!("mean {shape:?} {axis}"), &MeanProgram { axis }, &inputs);
            }
        }
        for (axis, count) in (0..=shape.len()).flat_map(|axis| [(axis, 0), (axis, 1), (axis, 3)]) {
            check(&format!("expand {shape:?} {axis} {count}"), &ExpandProgram { axis, count }, &inputs);
        }
    }
    check("expand a number", &ExpandProgram { axis: 0, count: 4 }, &[random.input("x", &[], 1.0)]);
}

program! { EmbeddingProgram { ids: Vec<u32>, shape: Vec<usize> } |this, tape, v| {
    Ok(vec![tape.embedding(Embedding { table: &v[0], ids: &this.ids, shape: &this.shape })?])
}}

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
        let inputs = [random.input("table", &[rows, width], 1.0)];
        check(&format!("embedding {rows}×{width} {shape:?}"), &EmbeddingProgram { ids, shape }, &inputs);
    }
}

program! { Everything { ids: Vec<u32> } |this, tape, v| {
    let x = tape.embedding(Embedding { table: &v[0], ids: &this.ids, shape: &[4, 150] })?;
    let y = tape.add(&tape.silu(&x)?, &v[1])?;
    let scores = tape.matmul(MatMul { a: &y, b: &x }, Transpose { a: false, b: true })?;
    let y = tape.matmul(MatMul { a: &tape.softmax(&scores)?, b: &y }, Transpose::default())?;
    let y = tape.permute(&tape.mul(&y, &v[2])?, &[2, 0, 1])?;
    Ok(vec![tape.sum(&y, 1)?, tape.mean(&y, 2)?])
}}

#[test]
fn same_bits_on_any_number_of_threads() {
    let mut random = Random(25);
    let ids = (0..600).map(|_| random.between(0, 49) as u32).collect();
    let inputs = [
        random.input("table", &[50, 67], 0.1),
        random.input("bias", &[67], 1.0),
        random.input("gate", &[4, 150, 1], 1.0),
    ];
    let run = |threads, products| {
        let cpu = Cpu::new(CpuOptions { threads, portable: false, products }).unwrap();
        common::outcome(&cpu, &Everything { ids: Vec::clone(&ids) }, &inputs).unwrap()
    };
    for products in [Products::Fastest, Products::BatchInvariant] {
        let want = run(1, products);
        for threads in [2, 3] {
            let found = run(threads, products);
            assert_eq!(found.outputs, want.outputs, "outputs on {threads} threads, {products:?}");
            assert_eq!(found.gradients, want.gradients, "gradients on {threads} threads, {products:?}");
        }
    }
}

/// Every call must be refused.
fn refuses<E: Engine>(engine: &E) {
    let tape = Tape::new(engine);
    let var = |shape: &[usize]| tape.parameter(0, engine.full(shape, 1.0).unwrap());
    let bad = |what: &str, found: Result<Var<E::Tensor>>| match found {
        Ok(_) => panic!("{what} was accepted"),
        Err(error) => assert!(!error.to_string().is_empty()),
    };
    let (x, y) = (var(&[2, 3]), var(&[2, 4]));
    bad("add", tape.add(&x, &y));
    bad("mul", tape.mul(&x, &var(&[2])));
    bad("div", tape.div(&var(&[0]), &var(&[2])));
    bad("sum", tape.sum(&x, 2));
    bad("mean", tape.mean(&x, 5));
    bad("mean of nothing", tape.mean(&var(&[3, 0]), 1));
    bad("expand", tape.expand(&x, 3, 2));
    bad("expand", tape.expand(&x, 0, usize::MAX));
    bad("slice axis", tape.slice(&x, 2, 0..1));
    bad("slice range", tape.slice(&x, 1, 1..4));
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 2..1;
    bad("slice backwards", tape.slice(&x, 1, backwards));
    bad("concat of nothing", tape.concat(&[], 0));
    bad("concat axis", tape.concat(&[&x, &x], 2));
    bad("concat sizes", tape.concat(&[&x, &y], 0));
    bad("concat rank", tape.concat(&[&x, &var(&[3])], 0));
    bad("permute twice", tape.permute(&x, &[0, 0]));
    bad("permute few", tape.permute(&x, &[0]));
    bad("permute beyond", tape.permute(&x, &[0, 2]));
    bad("reshape", tape.reshape(&x, &[5]));
    bad("reshape", tape.reshape(&x, &[usize::MAX, usize::MAX]));
    bad("softmax", tape.softmax(&var(&[])));
    let plain = Transpose::default();
    bad("matmul inner", tape.matmul(MatMul { a: &x, b: &y }, plain));
    bad("matmul rank", tape.matmul(MatMul { a: &x, b: &var(&[3]) }, plain));
    bad("matmul rank", tape.matmul(MatMul { a: &var(&[3]), b: &x }, plain));
    bad("matmul batch", tape.matmul(MatMul { a: &var(&[2, 2, 3]), b: &var(&[3, 3, 4]) }, plain));
    bad("matmul batch", tape.matmul(MatMul { a: &x, b: &var(&[2, 3, 4]) }, plain));
    bad("embedding id", tape.embedding(Embedding { table: &x, ids: &[1, 2], shape: &[2] }));
    bad("embedding count", tape.embedding(Embedding { table: &x, ids: &[1, 0], shape: &[3] }));
    bad("embedding table", tape.embedding(Embedding { table: &var(&[4]), ids: &[1], shape: &[1] }));

    let (x, y) = (x.value(), y.value());
    assert!(engine.map_backward(Map::Exp, x, y, x).is_err());
    assert!(engine.map_backward(Map::Exp, x, x, y).is_err());
    assert!(engine.zip_backward(Zip::Mul, x, x, y, [true; 2]).is_err());
    assert!(engine.softmax_backward(x, y).is_err());
    assert!(
        engine.matmul_backward(MatMul { a: x, b: x }, Transpose { a: false, b: true }, y, [true; 2]).is_err()
    );
    assert!(engine.embedding_backward(&[0, 1], 1, x).is_err());
    assert!(engine.embedding_backward(&[0], 4, x).is_err());
    assert!(engine.place(x, 1, 2, 4).is_err());
    assert!(engine.place(x, 2, 0, 4).is_err());
    assert!(engine.sum_to(x, &[2]).is_err());
    assert!(engine.sum_to(x, &[1, 2, 3]).is_err());
    let error = tape.embedding(Embedding { table: &tape.constant(x.clone()), ids: &[1, 7], shape: &[2] });
    assert_eq!(
        error.unwrap_err().to_string(),
        "embedding: id 7 at position 1 is out of range: the table has 2 rows"
    );
}

#[test]
fn wrong_calls_are_errors() {
    refuses(&Reference);
    for cpu in fast_engines() {
        refuses(&cpu);
    }
}

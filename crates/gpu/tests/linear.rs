//! linear: device = reference on sizes that no tile divides, with weights in every precision; and a row has the same
//! bits alone and among others.

use march_engine::ops::linear::{Linear, LinearList, LinearListNeeds, Product};
use march_engine::{Engine, Precision, Reference, Result, Tape, Var, Weight};

use crate::common::{self, Program, Random, assert_close, compare, devices, open_devices};

struct OneProduct;

impl Program for OneProduct {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.linear(Linear { x: &v[0], weight: &v[1], bias: v.get(2) })?])
    }
}

fn check(random: &mut Random, leading: &[usize], inner: usize, outer: usize, bias: bool) {
    let mut shape = leading.to_vec();
    shape.push(inner);
    let mut inputs = vec![random.input("x", &shape, 1.0), random.input("weight", &[outer, inner], 0.5)];
    if bias {
        inputs.push(random.input("bias", &[outer], 1.0));
    }
    compare(&format!("linear {shape:?} → {outer}, bias {bias}"), &OneProduct, &inputs);
}

#[test]
fn device_equals_reference() {
    let mut random = Random(3);
    for (leading, inner, outer, bias) in [
        (vec![1], 1, 1, true),
        (vec![0], 5, 3, true),
        (vec![3], 0, 4, true),
        (vec![2, 3], 7, 5, false),
        (vec![1], 131, 67, true),
        (vec![16], 300, 17, false),
        (vec![17], 129, 65, true),
        (vec![131], 67, 70, true),
        (vec![64], 64, 128, false),
    ] {
        check(&mut random, &leading, inner, outer, bias);
    }
    for _ in 0..15 {
        let [rows, inner, outer] = [70, 150, 90].map(|most| random.between(1, most));
        let bias = random.bits().is_multiple_of(2);
        check(&mut random, &[rows], inner, outer, bias);
    }
}

#[test]
fn many_rows_are_summed_in_pieces() {
    check(&mut Random(5), &[4300], 3, 19, true);
}

#[test]
fn a_row_alone_has_the_same_bits() {
    let mut random = Random(7);
    let (inner, outer) = (203, 77);
    let x = random.input("x", &[70, inner], 1.0);
    let w = random.input("w", &[outer, inner], 0.5);
    for device in devices() {
        let weight = device.from_f64(&w.data, &w.shape).unwrap();
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let packed = device.pack(&weight, precision).unwrap();
            let run = |rows: std::ops::Range<usize>| {
                let part = &x.data[rows.start * inner..rows.end * inner];
                let x = device.from_f64(part, &[rows.len(), inner]).unwrap();
                let y = device.linear(Linear { x: &x, weight: Weight::Packed(&packed), bias: None });
                device.to_f32(&y.unwrap())
            };
            let all = run(0..70);
            for rows in [0..1, 69..70, 5..9, 20..36, 30..47] {
                let want = &all[rows.start * outer..rows.end * outer];
                assert!(run(rows.clone()) == want, "{device:?}: rows {rows:?} in {precision}");
            }
        }
    }
}

#[test]
fn packed_weights() {
    let mut random = Random(11);
    for (rows, inner, outer) in [(1, 1, 1), (3, 130, 18), (20, 37, 66), (0, 5, 2), (33, 259, 20)] {
        let x = random.input("x", &[rows, inner], 1.0);
        let w = random.input("w", &[outer, inner], 0.5);
        let b = random.input("b", &[outer], 1.0);
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let want = packed_outputs(&Reference, precision, &[&x, &w, &b]);
            for device in devices() {
                let found = packed_outputs(&device, precision, &[&x, &w, &b]);
                for (i, (found, want)) in found.iter().zip(&want).enumerate() {
                    let who = format!("{device:?} {rows}×{inner}×{outer} in {precision}, output {i}");
                    assert_close(&who, found, want, 1e-5);
                }
            }
        }
    }
}

/// The product with a bias, the unpacked weight, and products with several weights of mixed precision.
fn packed_outputs<E: Engine>(engine: &E, precision: Precision, inputs: &[&common::Input]) -> Vec<Vec<f64>> {
    let t: Vec<E::Tensor> =
        inputs.iter().map(|input| engine.from_f64(&input.data, &input.shape).unwrap()).collect();
    let [x, w, b] = &t[..] else { unreachable!() };
    let packed = engine.pack(w, precision).unwrap();
    assert_eq!(
        (engine.packed_shape(&packed)[..].to_vec(), engine.packed_precision(&packed)),
        (inputs[1].shape.clone(), precision)
    );
    let weight = Weight::Packed(&packed);
    let mut outputs = vec![engine.linear(Linear { x, weight, bias: Some(b) }).unwrap()];
    outputs.push(engine.unpack(&packed).unwrap());
    let other = engine.pack(w, Precision::Bf16).unwrap();
    let each = [Weight::Full(w), weight, Weight::Packed(&other), weight, weight, weight, weight];
    let products: Vec<_> = (0..each.len()).map(|i| Product::new(0, i)).collect();
    let list = LinearList { x: &[x], weights: &each, products: &products };
    outputs.extend(engine.linear_list(list).unwrap());
    // Two streams with one weight, which is what a block's last product is.
    let residuals = [&outputs[0], &outputs[2]].map(|y| Product { residual: Some(y), ..Product::new(0, 0) });
    let [first, second] = residuals;
    let second = Product { x: 1, ..second };
    let list = LinearList { x: &[x, x], weights: &[weight], products: &[first, second] };
    let both = engine.linear_list(list).unwrap();
    outputs.extend(both);
    outputs.iter().map(|y| engine.to_f64(y)).collect()
}

#[test]
fn several_weights_of_different_sizes() {
    let mut random = Random(13);
    let sizes = [64, 3, 0, 129, 17, 1];
    let weights = sizes.map(|outer| random.input("w", &[outer, 70], 0.5));
    let inputs = [1, 5, 40].map(|rows| random.input("x", &[rows, 70], 1.0));
    for device in open_devices() {
        for x in &inputs {
            let who = format!("{device:?}: {:?}", x.shape);
            let x = device.from_f64(&x.data, &x.shape).unwrap();
            let weights: Vec<_> =
                weights.iter().map(|w| device.from_f64(&w.data, &w.shape).unwrap()).collect();
            let all: Vec<_> = weights.iter().map(Weight::Full).collect();
            let before = device.dispatches();
            let products: Vec<_> = (0..all.len()).map(|i| Product::new(0, i)).collect();
            let list = LinearList { x: &[&x], weights: &all, products: &products };
            let each = device.linear_list(list).unwrap();
            assert_eq!(device.dispatches() - before, 2, "{who}");
            for (weight, each) in weights.iter().zip(&each) {
                let alone = device.linear(Linear { x: &x, weight, bias: None }).unwrap();
                assert_eq!(alone.shape(), each.shape());
                assert!(device.to_f32(&alone) == device.to_f32(each), "{who}");
            }
        }
    }
}

/// Several products of one x, some of which receive no gradient; x has two more consumers, before and after.
struct Several {
    used: Vec<bool>,
}

impl Program for Several {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let [x, w0, w1, w2, w3, w4, w5] = v else { unreachable!() };
        let each = tape.linear_each(x, [w0, w1, w2, w3, w4, w5].map(Weight::Full))?;
        Ok(each.into_iter().zip(&self.used).filter(|(_, used)| **used).map(|(y, _)| y).collect())
    }
}

#[test]
fn gradients_of_several_products() {
    let mut random = Random(17);
    for rows in [1, 37, 80] {
        for used in [0b11_1111, 0b00_0100, 0b10_1011] {
            let used: Vec<bool> = (0..6).map(|i| used >> i & 1 == 1).collect();
            let mut inputs = vec![random.input("x", &[rows, 70], 1.0)];
            let names = ["w0", "w1", "w2", "w3", "w4", "w5"];
            for (name, outer) in names.into_iter().zip([64, 3, 33, 129, 17, 1]) {
                inputs.push(random.input(name, &[outer, 70], 0.5));
            }
            compare(&format!("{rows} rows, used {used:?}"), &Several { used }, &inputs);
        }
    }
}

#[test]
fn the_gradient_of_x_is_added_to_what_it_has() {
    let mut random = Random(19);
    let x = random.input("x", &[21, 30], 1.0);
    let weights = [40, 7, 5, 18, 9].map(|outer| random.input("w", &[outer, 30], 0.5));
    let gradients = [40, 7, 5, 18, 9].map(|outer| random.input("dy", &[21, outer], 1.0));
    fn run<E: Engine>(
        engine: &E,
        x: &common::Input,
        w: &[common::Input],
        dy: &[common::Input],
        shared: bool,
    ) -> Vec<f64> {
        let load = |input: &common::Input| engine.from_f64(&input.data, &input.shape).unwrap();
        let x = load(x);
        let (w, dy): (Vec<_>, Vec<_>) = (w.iter().map(load).collect(), dy.iter().map(load).collect());
        let (w, dy): (Vec<_>, Vec<_>) = (w.iter().collect(), dy.iter().collect());
        let start = engine.full(&[21, 30], 3.0).unwrap();
        let mut dx = [Some(start.clone())];
        let products: Vec<_> = (0..5).map(|i| Product::new(0, i)).collect();
        let list = LinearList { x: &[&x], weights: &w, products: &products };
        let needs = LinearListNeeds { x: vec![true], weights: vec![false; 5], biases: vec![false; 5] };
        if !shared {
            drop(start);
            let found = engine.linear_list_backward(list, &dy, &needs, &mut dx).unwrap();
            assert!(found.weights.iter().chain(&found.biases).all(Option::is_none));
        } else {
            engine.linear_list_backward(list, &dy, &needs, &mut dx).unwrap();
            assert!(engine.to_f64(&start).iter().all(|&v| v == 3.0));
        }
        let [dx] = dx;
        engine.to_f64(&dx.unwrap())
    }
    let want = run(&Reference, &x, &weights, &gradients, false);
    for device in open_devices() {
        for shared in [false, true] {
            let before = device.dispatches();
            let found = run(&device, &x, &weights, &gradients, shared);
            // One fills the start, two add the terms of five weights.
            assert_eq!(device.dispatches() - before, 3, "{device:?}");
            assert_close(&format!("{device:?}, shared {shared}"), &found, &want, 1e-5);
        }
    }
}

/// Two streams take one dispatch forward, one for the gradients of both x and one for those of the weights.
#[test]
fn two_streams_take_one_dispatch() {
    for device in open_devices() {
        let t = |shape: &[usize]| device.full(shape, 0.5).unwrap();
        let (x, y) = ([t(&[75, 32]), t(&[9, 32])], [t(&[75, 48]), t(&[9, 48])]);
        let weight = [t(&[48, 32]), t(&[48, 32])];
        let x = x.each_ref();
        let residual = |s: usize| Product { residual: Some(&y[s]), ..Product::new(s, 0) };
        let lists = [
            (1, vec![residual(0), residual(1)]),
            (2, vec![Product::new(0, 0), Product::new(0, 1), Product::new(1, 0), Product::new(1, 1)]),
        ];
        for (count, products) in &lists {
            let full: Vec<_> = weight[..*count].iter().map(Weight::Full).collect();
            let before = device.dispatches();
            device.linear_list(LinearList { x: &x, weights: &full, products }).unwrap();
            assert_eq!(device.dispatches() - before, 1);
            let dy: Vec<_> = products.iter().map(|product| &y[product.x]).collect();
            let weights: Vec<_> = weight[..*count].iter().collect();
            let needs = LinearListNeeds {
                x: vec![true; 2],
                weights: vec![true; *count],
                biases: vec![false; products.len()],
            };
            let list = LinearList { x: &x, weights: &weights, products };
            device.linear_list_backward(list, &dy, &needs, &mut [None, None]).unwrap();
            assert_eq!(device.dispatches() - before, 3);
        }
    }
}

#[test]
fn int8_rejects_numbers_that_are_not_finite() {
    for device in devices() {
        let weight = device.from_f32(&[0.0, 1.0, f32::INFINITY, 2.0], &[2, 2]).unwrap();
        let error = device.pack(&weight, Precision::Int8).unwrap_err().to_string();
        assert!(error.contains("row 1 holds a number that is not finite"), "{error}");
    }
}

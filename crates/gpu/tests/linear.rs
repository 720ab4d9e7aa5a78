//! linear: device = reference on sizes that no tile divides, with weights in every precision; and a row has the same
//! bits alone and among others.

use march_engine::ops::linear::{LinearListBackward, LinearListNeeds, Product, linear_list};
use march_engine::{Device, Op, Precision, Result, Tensor};

use crate::common::{
    Input, Random, assert_close, compare, devices, dispatches, open_devices, tensors, tests,
};

tests![
    device_equals_reference,
    many_rows_are_summed_in_pieces,
    a_row_alone_has_the_same_bits,
    packed_weights,
    several_weights_of_different_sizes,
    gradients_of_several_products,
    the_gradient_of_x_is_added_to_what_it_has,
    two_streams_take_one_dispatch,
    int8_rejects_numbers_that_are_not_finite,
];

fn linear(v: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![match v {
        [x, weight, bias] => x.linear_bias(weight, bias)?,
        _ => v[0].linear(&v[1])?,
    }])
}

fn check(random: &mut Random, leading: &[usize], inner: usize, outer: usize, bias: bool) {
    let mut shape = leading.to_vec();
    shape.push(inner);
    let mut inputs = vec![random.input("x", &shape, 1.0), random.input("weight", &[outer, inner], 0.5)];
    if bias {
        inputs.push(random.input("bias", &[outer], 1.0));
    }
    compare(&format!("linear {shape:?} → {outer}, bias {bias}"), &linear, &inputs);
}

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

fn many_rows_are_summed_in_pieces() {
    check(&mut Random(5), &[4300], 3, 19, true);
}

fn a_row_alone_has_the_same_bits() {
    let mut random = Random(7);
    let (inner, outer) = (203, 77);
    let x = random.input("x", &[70, inner], 1.0);
    let w = random.input("w", &[outer, inner], 0.5);
    for device in devices() {
        let (x, weight) = (x.on(device), w.on(device));
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let packed = weight.pack(precision).unwrap();
            let all = x.linear(&packed).unwrap().to_f32();
            for rows in [0..1, 69..70, 5..9, 20..36, 30..47] {
                let some = x.slice(0, rows.clone()).unwrap().linear(&packed).unwrap().to_f32();
                let want = &all[rows.start * outer..rows.end * outer];
                assert!(some == want, "{device}: rows {rows:?} in {precision}");
            }
        }
    }
}

fn packed_weights() {
    let mut random = Random(11);
    for (rows, inner, outer) in [(1, 1, 1), (3, 130, 18), (20, 37, 66), (0, 5, 2), (33, 259, 20)] {
        let inputs = [
            random.input("x", &[rows, inner], 1.0),
            random.input("w", &[outer, inner], 0.5),
            random.input("b", &[outer], 1.0),
        ];
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let want = packed_outputs(&Device::reference(), precision, &inputs);
            for device in devices() {
                let found = packed_outputs(device, precision, &inputs);
                for (i, (found, want)) in found.iter().zip(&want).enumerate() {
                    let who = format!("{device} {rows}×{inner}×{outer} in {precision}, output {i}");
                    assert_close(&who, found, want, 1e-5);
                }
            }
        }
    }
}

/// The product with a bias, the unpacked weight, and products with several weights of mixed precision.
fn packed_outputs(device: &Device, precision: Precision, inputs: &[Input]) -> Vec<Vec<f64>> {
    let [x, w, b] = &tensors(inputs, device)[..] else { unreachable!() };
    let packed = &w.pack(precision).unwrap();
    assert_eq!((packed.shape(), packed.dtype()), (w.shape(), precision.into()));
    assert_eq!(packed.bytes(), precision.bytes(w.shape()[0], w.shape()[1]));
    let mut outputs = vec![x.linear_bias(packed, b).unwrap(), packed.unpack().unwrap()];
    let other = &w.pack(Precision::Bf16).unwrap();
    outputs.extend(x.linear_each([w, packed, other, packed, packed, packed, packed]).unwrap());
    // Two streams with one weight, which is what a block's last product is.
    let product = |x: usize, y: usize| Product { residual: Some(&outputs[y]), ..Product::new(x, 0) };
    let both = linear_list(&[x, x], &[packed], &[product(0, 0), product(1, 2)]).unwrap();
    outputs.extend(both);
    outputs.iter().map(Tensor::to_f64).collect()
}

fn several_weights_of_different_sizes() {
    let mut random = Random(13);
    let weights = [64, 3, 0, 129, 17, 1].map(|outer| random.input("w", &[outer, 70], 0.5));
    let inputs = [1, 5, 40].map(|rows| random.input("x", &[rows, 70], 1.0));
    for device in open_devices() {
        for x in &inputs {
            let who = format!("{device}: {:?}", x.shape);
            let (x, weights) = (x.on(&device), weights.each_ref().map(|weight| weight.on(&device)));
            let before = dispatches(&device);
            let each = x.linear_each(weights.each_ref()).unwrap();
            assert_eq!(dispatches(&device) - before, 2, "{who}");
            for (weight, each) in weights.iter().zip(&each) {
                let alone = x.linear(weight).unwrap();
                assert_eq!(alone.shape(), each.shape());
                assert!(alone.to_f32() == each.to_f32(), "{who}");
            }
        }
    }
}

/// Several products of one x, some of which receive no gradient.
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
            let several = |v: &[Tensor]| {
                let each = v[0].linear_each([1, 2, 3, 4, 5, 6].map(|i| &v[i]))?;
                Ok(each.into_iter().zip(&used).filter(|(_, used)| **used).map(|(y, _)| y).collect())
            };
            compare(&format!("{rows} rows, used {used:?}"), &several, &inputs);
        }
    }
}

fn the_gradient_of_x_is_added_to_what_it_has() {
    let mut random = Random(19);
    let x = random.input("x", &[21, 30], 1.0);
    let weights = [40, 7, 5, 18, 9].map(|outer| random.input("w", &[outer, 30], 0.5));
    let gradients = [40, 7, 5, 18, 9].map(|outer| random.input("dy", &[21, outer], 1.0));
    let run = |device: &Device, shared: bool| {
        let start = Tensor::full(&[21, 30], 3.0, device).unwrap();
        let held = shared.then(|| start.clone());
        let op = LinearListBackward {
            x: vec![x.on(device)],
            weights: tensors(&weights, device),
            products: (0..5).map(|i| Product::new(0, i)).collect(),
            gradients: tensors(&gradients, device),
            needs: LinearListNeeds { x: vec![true], weights: vec![false; 5], biases: vec![false; 5] },
            dx: vec![Some(start)],
        };
        let mut found = op.run().unwrap();
        assert!(found.weights.iter().chain(&found.biases).all(Option::is_none));
        assert!(held.is_none_or(|held| held.to_f64().iter().all(|&v| v == 3.0)));
        found.x.remove(0).unwrap().to_f64()
    };
    let want = run(&Device::reference(), false);
    for device in open_devices() {
        for shared in [false, true] {
            let before = dispatches(&device);
            let found = run(&device, shared);
            // One fills the start, two add the terms of five weights.
            assert_eq!(dispatches(&device) - before, 3, "{device}");
            assert_close(&format!("{device}, shared {shared}"), &found, &want, 1e-5);
        }
    }
}

/// Two streams take one dispatch forward, one for the gradients of both x and one for those of the weights.
fn two_streams_take_one_dispatch() {
    for device in open_devices() {
        let t = |shape: &[usize]| Tensor::full(shape, 0.5, &device).unwrap();
        let (x, y) = ([t(&[75, 32]), t(&[9, 32])], [t(&[75, 48]), t(&[9, 48])]);
        let weights = [t(&[48, 32]), t(&[48, 32])];
        let residual = |s: usize| Product { residual: Some(&y[s]), ..Product::new(s, 0) };
        let lists = [
            (1, vec![residual(0), residual(1)]),
            (2, vec![Product::new(0, 0), Product::new(0, 1), Product::new(1, 0), Product::new(1, 1)]),
        ];
        for (count, products) in lists {
            let before = dispatches(&device);
            let used: Vec<&Tensor> = weights[..count].iter().collect();
            linear_list(&[&x[0], &x[1]], &used, &products).unwrap();
            assert_eq!(dispatches(&device) - before, 1);
            let backward = LinearListBackward {
                x: x.to_vec(),
                weights: weights[..count].to_vec(),
                products: products.iter().map(|product| Product::new(product.x, product.weight)).collect(),
                gradients: products.iter().map(|product| y[product.x].clone()).collect(),
                needs: LinearListNeeds {
                    x: vec![true; 2],
                    weights: vec![true; count],
                    biases: vec![false; products.len()],
                },
                dx: vec![None, None],
            };
            backward.run().unwrap();
            assert_eq!(dispatches(&device) - before, 3);
        }
    }
}

fn int8_rejects_numbers_that_are_not_finite() {
    for device in devices() {
        let weight = Tensor::from_slice(&[0.0, 1.0, f32::INFINITY, 2.0], &[2, 2], device).unwrap();
        let error = weight.pack(Precision::Int8).unwrap_err().to_string();
        assert!(error.contains("row 1 holds a number that is not finite"), "{error}");
    }
}

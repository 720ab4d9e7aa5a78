//! Operations that take lists: CPU = reference = finite differences; and the bits of separate operations.

use march_engine::ops::linear::{Product, linear_list};
use march_engine::ops::rms_norm::{RmsNorm, gated_rms_norm_each, rms_norm_each};
use march_engine::ops::short_conv::{ShortConv, ShortConvBackward, short_conv_each};
use march_engine::ops::swiglu::{SwiGlu, SwiGluBackward, swiglu_each};
use march_engine::{Device, Op, Result, Tensor};

use crate::common::{self, Input, Program, Random, compare, cpus, describe, lists, outcome};

/// CPU = reference, and for small cases finite differences.
fn check(label: &str, program: Program<'_>, inputs: &[Input]) {
    common::check(label, program, inputs, 700, 4);
}

#[test]
fn products() {
    lists::products(check);
}

#[test]
fn norms() {
    lists::norms(check);
}

#[test]
fn swiglus() {
    lists::swiglus(check);
}

#[test]
fn convolutions() {
    // No gradient flows through the tails, so there are no finite differences.
    lists::convolutions(compare);
}

const WIDTH: usize = 24;

/// A block of two streams x0, x1 with shared weights, in list operations: norms, projections, convolutions of the first
/// stream, gated norms, a product with residuals, SwiGLU.
fn block_of_lists(v: &[Tensor]) -> Result<Vec<Tensor>> {
    let [x0, x1, norm, o_norm, w0, w1, w2, bias, conv0, conv1, conv2] = v else { unreachable!() };
    let n = rms_norm_each(&[x0, x1], norm, 1e-6)?;
    let products = [
        Product::new(0, 0),
        Product::new(0, 1),
        Product { bias: Some(bias), ..Product::new(0, 2) },
        Product::new(1, 0),
        Product::new(1, 2),
    ];
    let p = linear_list(&[&n[0], &n[1]], &[w0, w1, w2], &products)?;
    let shape = [1, x0.shape()[0], WIDTH];
    let (a, b, c) = (p[0].reshape(&shape)?, p[1].reshape(&shape)?, p[2].reshape(&shape)?);
    let input = |x, weight| ShortConv { x, weight, tail: None };
    let [a, b, c] = short_conv_each([input(&a, conv0), input(&b, conv1), input(&c, conv2)])?;
    let [a, b, c] = [a, b, c].map(|(y, _)| y.reshape(&shape[1..]));
    let g = gated_rms_norm_each(&[&a?, &p[3]], &[&b?, &p[4]], o_norm, 1e-6)?;
    let s = swiglu_each(&[&g[0], &g[1]], &[&c?, &p[4]])?;
    let products = [
        Product { residual: Some(x0), ..Product::new(0, 0) },
        Product { residual: Some(x1), ..Product::new(1, 0) },
    ];
    linear_list(&[&s[0], &s[1]], &[w1], &products)
}

/// The same block with one operation for each result.
fn block(v: &[Tensor]) -> Result<Vec<Tensor>> {
    let [x0, x1, norm, o_norm, w0, w1, w2, bias, conv0, conv1, conv2] = v else { unreachable!() };
    let n1 = x1.rms_norm(norm, 1e-6)?;
    let n0 = x0.rms_norm(norm, 1e-6)?;
    let (a0, b0, c0) = (n0.linear(w0)?, n0.linear(w1)?, n0.linear_bias(w2, bias)?);
    let (a1, c1) = (n1.linear(w0)?, n1.linear(w2)?);
    let shape = [1, x0.shape()[0], WIDTH];
    let conv = |x: &Tensor, weight| x.reshape(&shape)?.short_conv(weight, None)?.0.reshape(&shape[1..]);
    let (a0, b0, c0) = (conv(&a0, conv0)?, conv(&b0, conv1)?, conv(&c0, conv2)?);
    let g0 = a0.gated_rms_norm(&b0, o_norm, 1e-6)?;
    let g1 = a1.gated_rms_norm(&c1, o_norm, 1e-6)?;
    let s1 = g1.swiglu(&c1)?;
    let s0 = g0.swiglu(&c0)?;
    let y1 = x1.add(&s1.linear(w1)?)?;
    let y0 = x0.add(&s0.linear(w1)?)?;
    Ok(vec![y0, y1])
}

/// Values and gradients of the CPU do not depend on whether operations are put together.
#[test]
fn lists_give_the_bits_of_separate_operations() {
    let mut random = Random(41);
    for rows in [[37, 5], [1, 3], [130, 1]] {
        let mut inputs = vec![
            random.input("x0", &[rows[0], WIDTH], 1.0),
            random.input("x1", &[rows[1], WIDTH], 1.0),
            random.input("norm", &[WIDTH], 1.0),
            random.input("o_norm", &[WIDTH], 1.0),
        ];
        inputs.extend([(); 3].map(|()| random.input("weight", &[WIDTH, WIDTH], 0.3)));
        inputs.push(random.input("bias", &[WIDTH], 1.0));
        inputs.extend([(); 3].map(|()| random.input("kernel", &[WIDTH, 4], 0.5)));
        compare("a block of lists", &block_of_lists, &inputs);
        for cpu in cpus() {
            let together = outcome(&cpu, &block_of_lists, &inputs).unwrap();
            let separate = outcome(&cpu, &block, &inputs).unwrap();
            assert!(together == separate, "{rows:?} rows on {}", describe(&cpu));
        }
    }
}

/// An operation names what is wrong with a list.
#[test]
fn refusals() {
    fn messages(device: &Device) -> Vec<String> {
        let t = |shape: &[usize]| Tensor::full(shape, 1.0, device).unwrap();
        let (x, w, r) = (t(&[2, 3]), t(&[4, 3]), t(&[2, 3]));
        let products = |product| linear_list(&[&x], &[&w], &[product]).unwrap_err().to_string();
        let pair = SwiGlu { gates: vec![x.clone()], ups: vec![x.clone()] };
        vec![
            products(Product::new(1, 0)),
            products(Product::new(0, 1)),
            products(Product { residual: Some(&r), ..Product::new(0, 0) }),
            RmsNorm { x: vec![], weight: t(&[3]), eps: 1e-6 }.run().unwrap_err().to_string(),
            SwiGluBackward { forward: pair, gradients: vec![] }.run().err().unwrap().to_string(),
            ShortConvBackward { inputs: vec![], gradients: vec![x.clone()] }.run().err().unwrap().to_string(),
        ]
    }
    let found = messages(&Device::reference());
    let parts = [
        "linear: a product names rows or a weight",
        "linear: a product names rows or a weight",
        "linear: `residual` has shape [2, 3]",
        "rms_norm: got no tensors",
        "swiglu_backward: got lists of 1 and 0",
        "short_conv_backward: got lists of 0 and 1",
    ];
    for (found, part) in found.iter().zip(parts) {
        assert!(found.starts_with(part), "{found}");
    }
    for cpu in cpus() {
        assert_eq!(messages(&cpu), found);
    }
}

//! Operations that take lists: fast = reference = finite differences; and the bits of separate operations.

use march_engine::ops::linear::{Linear, LinearList, Product};
use march_engine::ops::rms_norm::{GatedRmsNorm, GatedRmsNormList, RmsNorm, RmsNormList};
use march_engine::ops::short_conv::ShortConv;
use march_engine::ops::swiglu::SwiGlu;
use march_engine::{Engine, Reference, Result, Tape, Var, Weight};

use crate::common::lists::{Convolutions, Norms, Products, SwiGlus};
use crate::common::{Input, Outcome, Program, Random, compare, fast_engines, finite_differences, outcome};

/// fast = reference, and for small cases finite differences.
fn check(label: &str, program: &impl Program, inputs: &[Input]) {
    compare(label, program, inputs);
    if inputs.iter().map(|input| input.data.len()).sum::<usize>() < 700 {
        finite_differences(label, program, inputs, 4);
    }
}

#[test]
fn products() {
    Products::cases(check);
}

#[test]
fn norms() {
    Norms::cases(check);
}

#[test]
fn swiglus() {
    SwiGlus::cases(check);
}

#[test]
fn convolutions() {
    // No gradient flows through the tails, so there are no finite differences.
    Convolutions::cases(compare);
}

/// A block of two streams x0, x1 with shared weights: norms, projections, convolutions of the first stream, gated norms,
/// a product with residuals, SwiGLU; with list operations, or with one operation for each result.
struct Block {
    lists: bool,
}

const WIDTH: usize = 24;

impl Program for Block {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let [x0, x1, norm, o_norm, w0, w1, w2, bias, conv0, conv1, conv2] = v else { unreachable!() };
        if !self.lists {
            let linear =
                |x: &Var<E::Tensor>, weight: &Var<E::Tensor>| tape.linear(Linear { x, weight, bias: None });
            let n1 = tape.rms_norm(RmsNorm { x: x1, weight: norm }, 1e-6)?;
            let n0 = tape.rms_norm(RmsNorm { x: x0, weight: norm }, 1e-6)?;
            let a0 = linear(&n0, w0)?;
            let b0 = linear(&n0, w1)?;
            let c0 = tape.linear(Linear { x: &n0, weight: w2, bias: Some(bias) })?;
            let a1 = linear(&n1, w0)?;
            let c1 = linear(&n1, w2)?;
            let shape = [1, tape.engine().shape(x0.value())[0], WIDTH];
            let conv = |x: &Var<E::Tensor>, weight: &Var<E::Tensor>| {
                let x = tape.reshape(x, &shape)?;
                let y = tape.short_conv(ShortConv { x: &x, weight, tail: None })?.0;
                tape.reshape(&y, &shape[1..])
            };
            let (a0, b0, c0) = (conv(&a0, conv0)?, conv(&b0, conv1)?, conv(&c0, conv2)?);
            let g0 = tape.gated_rms_norm(GatedRmsNorm { x: &a0, gate: &b0, weight: o_norm }, 1e-6)?;
            let g1 = tape.gated_rms_norm(GatedRmsNorm { x: &a1, gate: &c1, weight: o_norm }, 1e-6)?;
            let s1 = tape.swiglu(SwiGlu { gate: &g1, up: &c1 })?;
            let s0 = tape.swiglu(SwiGlu { gate: &g0, up: &c0 })?;
            let y1 = tape.add(x1, &linear(&s1, w1)?)?;
            let y0 = tape.add(x0, &linear(&s0, w1)?)?;
            return Ok(vec![y0, y1]);
        }
        let n = tape.rms_norm_each(RmsNormList { x: &[x0, x1], weight: norm }, 1e-6)?;
        let weights = [w0, w1, w2].map(Weight::Full);
        let products = [
            Product::new(0, 0),
            Product::new(0, 1),
            Product { bias: Some(bias), ..Product::new(0, 2) },
            Product::new(1, 0),
            Product::new(1, 2),
        ];
        let list = LinearList { x: &[&n[0], &n[1]], weights: &weights, products: &products };
        let p = tape.linear_list(list)?;
        let shape = [1, tape.engine().shape(x0.value())[0], WIDTH];
        let [a, b, c] = [0, 1, 2].map(|i| tape.reshape(&p[i], &shape));
        let (a, b, c) = (a?, b?, c?);
        let input = |x, weight| ShortConv { x, weight, tail: None };
        let [a, b, c] = tape.short_conv_each([input(&a, conv0), input(&b, conv1), input(&c, conv2)])?;
        let [a, b, c] = [a, b, c].map(|(y, _)| tape.reshape(&y, &shape[1..]));
        let (a, b, c) = (a?, b?, c?);
        let gated = GatedRmsNormList { x: &[&a, &p[3]], gates: &[&b, &p[4]], weight: o_norm };
        let g = tape.gated_rms_norm_each(gated, 1e-6)?;
        let both = [SwiGlu { gate: &g[0], up: &c }, SwiGlu { gate: &g[1], up: &p[4] }];
        let s = tape.swiglu_each(&both)?;
        let products = [
            Product { residual: Some(x0), ..Product::new(0, 0) },
            Product { residual: Some(x1), ..Product::new(1, 0) },
        ];
        tape.linear_list(LinearList { x: &[&s[0], &s[1]], weights: &[Weight::Full(w1)], products: &products })
    }
}

/// Values and gradients of the processor do not depend on whether operations are put together.
#[test]
fn lists_give_the_bits_of_separate_operations() {
    let mut random = Random(41);
    for rows in [[37, 5], [1, 3], [130, 1]] {
        let matrix = |random: &mut Random| random.input("weight", &[WIDTH, WIDTH], 0.3);
        let kernel = |random: &mut Random| random.input("kernel", &[WIDTH, 4], 0.5);
        let inputs = vec![
            random.input("x0", &[rows[0], WIDTH], 1.0),
            random.input("x1", &[rows[1], WIDTH], 1.0),
            random.input("norm", &[WIDTH], 1.0),
            random.input("o_norm", &[WIDTH], 1.0),
            matrix(&mut random),
            matrix(&mut random),
            matrix(&mut random),
            random.input("bias", &[WIDTH], 1.0),
            kernel(&mut random),
            kernel(&mut random),
            kernel(&mut random),
        ];
        compare("a block of lists", &Block { lists: true }, &inputs);
        for cpu in fast_engines() {
            let [a, b]: [Outcome; 2] =
                [true, false].map(|lists| outcome(&cpu, &Block { lists }, &inputs).unwrap());
            assert!(a.outputs == b.outputs, "{rows:?} rows on {cpu:?}");
            assert!(a.gradients == b.gradients, "{rows:?} rows on {cpu:?}");
        }
    }
}

/// The engine names what is wrong with a list.
#[test]
fn refusals() {
    fn messages<E: Engine>(engine: &E) -> Vec<String> {
        let t = |shape: &[usize]| engine.full(shape, 1.0).unwrap();
        let (x, w, r) = (t(&[2, 3]), t(&[4, 3]), t(&[2, 3]));
        let products = |product: Product<&E::Tensor>| {
            let list = LinearList { x: &[&x], weights: &[Weight::Full(&w)], products: &[product] };
            engine.linear_list(list).unwrap_err().to_string()
        };
        vec![
            products(Product::new(1, 0)),
            products(Product::new(0, 1)),
            products(Product { residual: Some(&r), ..Product::new(0, 0) }),
            engine.rms_norm(RmsNormList { x: &[], weight: &t(&[3]) }, 1e-6).unwrap_err().to_string(),
            engine.swiglu_backward(&[SwiGlu { gate: &x, up: &x }], &[]).unwrap_err().to_string(),
            engine.short_conv_backward(&[], &[&x]).unwrap_err().to_string(),
        ]
    }
    let found = messages(&Reference);
    let beginnings = [
        "linear: a product names rows or a weight",
        "linear: a product names rows or a weight",
        "linear: `residual` has shape [2, 3]",
        "rms_norm: got no tensors",
        "swiglu: got lists of 1 and 0",
        "short_conv: got lists of 0 and 1",
    ];
    for (found, beginning) in found.iter().zip(beginnings) {
        assert!(found.starts_with(beginning), "{found}");
    }
    for cpu in fast_engines() {
        assert_eq!(messages(&cpu), found);
    }
}

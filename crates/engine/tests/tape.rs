//! The tape itself: regions that run again, the order of finished gradients, memory.

use march_engine::ops::linear::Linear;
use march_engine::ops::rms_norm::RmsNorm;
use march_engine::{Cpu, CpuOptions, Engine, Products, Result, Tape, Tensor, Var, Weight};

use crate::common::{self, Random};

const WIDTH: usize = 24;
const LAYERS: usize = 4;

type T = Tensor<f32>;

fn engine() -> Cpu {
    Cpu::new(CpuOptions { threads: 2, ..Default::default() }).unwrap()
}

/// The weights of one layer: a norm's and a matrix.
struct Weights(Vec<[T; 2]>);

impl Weights {
    fn new(cpu: &Cpu) -> Self {
        let mut random = Random(31);
        let mut tensor = |shape: &[usize]| {
            let input = random.input("", shape, 0.3);
            cpu.from_f64(&input.data, &input.shape).unwrap()
        };
        Self((0..LAYERS).map(|_| [tensor(&[WIDTH]), tensor(&[WIDTH, WIDTH])]).collect())
    }

    /// Keys 2·layer and 2·layer + 1.
    fn on<'e>(&self, tape: &Tape<'e, Cpu>) -> Vec<[Var<T>; 2]> {
        let layers = self.0.iter().enumerate();
        layers
            .map(|(i, w)| [tape.parameter(2 * i, w[0].clone()), tape.parameter(2 * i + 1, w[1].clone())])
            .collect()
    }
}

fn input(cpu: &Cpu) -> T {
    let input = Random(32).input("x", &[3, 7, WIDTH], 1.0);
    cpu.from_f64(&input.data, &input.shape).unwrap()
}

/// x + silu(rms_norm(x) Wᵀ)
fn layer(tape: &Tape<'_, Cpu>, x: &Var<T>, weights: &[Var<T>; 2]) -> Result<Var<T>> {
    let normal = tape.rms_norm(RmsNorm { x, weight: &weights[0] }, 1e-6)?;
    let y = tape.silu(&tape.linear(Linear { x: &normal, weight: &weights[1], bias: None })?)?;
    tape.add(x, &y)
}

fn loss(tape: &Tape<'_, Cpu>, x: &Var<T>) -> Result<Var<T>> {
    let count = tape.engine().shape(x.value()).iter().product();
    tape.sum(&tape.reshape(&tape.square(x)?, &[count])?, 0)
}

/// How the layers are wrapped in regions that run again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Regions {
    None,
    EachLayer,
    /// Two layers in a region, each again in one of its own.
    Nested,
}

/// One step: the loss, and the gradients in the order in which they came.
fn step(cpu: &Cpu, weights: &Weights, x: &T, regions: Regions) -> (Vec<f32>, Vec<(usize, T)>) {
    let tape = Tape::new(cpu);
    let layers = weights.on(&tape);
    let mut x = tape.constant(x.clone());
    let one = |tape: &Tape<'_, Cpu>, x: &Var<T>, weights: &[Var<T>; 2]| -> Result<Var<T>> {
        let kept = weights.clone();
        Ok(tape.recompute(&[x], move |tape, v| Ok(vec![layer(tape, &v[0], &kept)?]))?.remove(0))
    };
    match regions {
        Regions::None => {
            for weights in &layers {
                x = layer(&tape, &x, weights).unwrap();
            }
        }
        Regions::EachLayer => {
            for weights in &layers {
                x = one(&tape, &x, weights).unwrap();
            }
        }
        Regions::Nested => {
            for pair in layers.chunks(2) {
                let pair = pair.to_vec();
                let region = move |tape: &Tape<'_, Cpu>, v: &[Var<T>]| {
                    let mut x = v[0].clone();
                    for weights in &pair {
                        let kept = weights.clone();
                        x = tape
                            .recompute(&[&x], move |tape, v| Ok(vec![layer(tape, &v[0], &kept)?]))?
                            .remove(0);
                    }
                    Ok(vec![x])
                };
                x = tape.recompute(&[&x], region).unwrap().remove(0);
            }
        }
    }
    let total = loss(&tape, &x).unwrap();
    let mut gradients = Vec::new();
    tape.backward(&total, |key, gradient| gradients.push((key, gradient))).unwrap();
    assert!(tape.is_empty());
    (cpu.to_f32(total.value()), gradients)
}

#[test]
fn regions_give_the_same_bits() {
    let cpu = engine();
    let (weights, x) = (Weights::new(&cpu), input(&cpu));
    let by_key = |gradients: Vec<(usize, T)>| {
        let mut found: Vec<(usize, Vec<u32>)> = gradients
            .into_iter()
            .map(|(key, g)| (key, cpu.to_f32(&g).iter().map(|v| v.to_bits()).collect()))
            .collect();
        found.sort();
        found
    };
    let (want_loss, want) = step(&cpu, &weights, &x, Regions::None);
    let want = by_key(want);
    assert_eq!(want.len(), 2 * LAYERS);
    assert!(want.iter().all(|(_, g)| g.iter().any(|&bits| bits != 0)));
    for regions in [Regions::EachLayer, Regions::Nested] {
        let (loss, found) = step(&cpu, &weights, &x, regions);
        assert_eq!(loss, want_loss, "{regions:?}");
        assert_eq!(by_key(found), want, "{regions:?}");
    }
}

#[test]
fn regions_keep_fewer_nodes() {
    let cpu = engine();
    let (weights, x) = (Weights::new(&cpu), input(&cpu));
    let tape = Tape::new(&cpu);
    let layers = weights.on(&tape);
    let mut x = tape.constant(x);
    for weights in &layers {
        let kept = weights.clone();
        x = tape.recompute(&[&x], move |tape, v| Ok(vec![layer(tape, &v[0], &kept)?])).unwrap().remove(0);
    }
    assert_eq!(tape.len(), LAYERS);
}

#[test]
fn an_error_inside_a_region_leaves_the_tape_recording() {
    let cpu = engine();
    let tape = Tape::new(&cpu);
    let x = tape.parameter(0, cpu.full(&[2, 3], 1.0).unwrap());
    assert!(tape.recompute(&[&x], |tape, v| Ok(vec![tape.reshape(&v[0], &[5])?])).is_err());
    tape.neg(&x).unwrap();
    assert_eq!(tape.len(), 1);
}

#[test]
fn the_last_layer_is_ready_first() {
    let cpu = engine();
    let (weights, x) = (Weights::new(&cpu), input(&cpu));
    // The gradients of a region's parameters come together, at its end: nested ones span two layers.
    for (regions, span) in [(Regions::None, 1), (Regions::EachLayer, 1), (Regions::Nested, 2)] {
        let (_, gradients) = step(&cpu, &weights, &x, regions);
        let found: Vec<usize> = gradients.iter().map(|(key, _)| key / (2 * span)).collect();
        let want: Vec<usize> = (0..LAYERS).rev().flat_map(|layer| [layer / span; 2]).collect();
        assert_eq!(found, want, "{regions:?}");
    }
}

#[test]
fn a_gradient_is_ready_before_earlier_layers_run() {
    let cpu = engine();
    let (weights, x) = (Weights::new(&cpu), input(&cpu));
    let tape = Tape::new(&cpu);
    let layers = weights.on(&tape);
    let mut x = tape.constant(x);
    let mut starts = Vec::new();
    for weights in &layers {
        starts.push(tape.len());
        x = layer(&tape, &x, weights).unwrap();
    }
    let total = loss(&tape, &x).unwrap();
    // When a layer's gradients come, the nodes of all layers before it are still on the tape.
    let mut calls = 0;
    tape.backward(&total, |key, _| {
        calls += 1;
        assert!(tape.len() >= starts[key / 2], "{} nodes left, key {key}", tape.len());
    })
    .unwrap();
    assert_eq!(calls, 2 * LAYERS);
}

#[test]
fn a_parameter_used_twice_comes_once_with_the_sum() {
    let cpu = engine();
    let w = cpu.from_f32(&[1.0, -2.0, 3.0], &[3]).unwrap();
    for regions in [false, true] {
        let tape = Tape::new(&cpu);
        let w = tape.parameter(9, w.clone());
        // w² + 5w (the second maybe in a region): the gradient of the sum is 2w + 5.
        let square = tape.square(&w).unwrap();
        let five = if regions {
            tape.recompute(&[&w], |tape, v| Ok(vec![tape.scale(&v[0], 5.0)?])).unwrap().remove(0)
        } else {
            tape.scale(&w, 5.0).unwrap()
        };
        let total = tape.sum(&tape.add(&square, &five).unwrap(), 0).unwrap();
        let mut calls = Vec::new();
        tape.backward(&total, |key, gradient| calls.push((key, cpu.to_f32(&gradient)))).unwrap();
        assert_eq!(calls, [(9, vec![7.0, 1.0, 11.0])], "regions {regions}");
    }
}

#[test]
fn a_residual_gradient_is_handed_on_without_a_copy() {
    let cpu = engine();
    let tape = Tape::new(&cpu);
    let (a, b) = (cpu.full(&[2, 3], 1.0).unwrap(), cpu.full(&[2, 3], 2.0).unwrap());
    let (a, b) = (tape.parameter(0, a), tape.parameter(1, b));
    let y = tape.add(&a, &b).unwrap();
    let dy = cpu.full(&[2, 3], 3.0).unwrap();
    let address = dy.data().as_ptr();
    let mut calls = 0;
    tape.backward_from(&[(&y, dy)], |_, gradient| {
        calls += 1;
        assert_eq!(gradient.data().as_ptr(), address);
    })
    .unwrap();
    assert_eq!(calls, 2);
}

#[test]
fn inference_records_nothing() {
    let cpu = engine();
    let (weights, x) = (Weights::new(&cpu), input(&cpu));
    let tape = Tape::inference(&cpu);
    let layers = weights.on(&tape);
    let mut x = tape.constant(x);
    for weights in &layers {
        x = layer(&tape, &x, weights).unwrap();
    }
    assert!(tape.is_empty());
    let total = loss(&tape, &x).unwrap();
    tape.backward(&total, |key, _| panic!("a gradient for {key}")).unwrap();

    // Nor does a recording tape when nothing has a gradient.
    let tape = Tape::new(&cpu);
    tape.square(&tape.constant(cpu.full(&[3], 1.0).unwrap())).unwrap();
    assert!(tape.is_empty());
}

#[test]
fn a_repeated_step_takes_no_new_memory() {
    let cpu = engine();
    let (weights, x) = (Weights::new(&cpu), input(&cpu));
    for regions in [Regions::None, Regions::EachLayer, Regions::Nested] {
        step(&cpu, &weights, &x, regions);
        let after_one = cpu.free_bytes();
        assert!(after_one > 0);
        for _ in 0..3 {
            step(&cpu, &weights, &x, regions);
            assert_eq!(cpu.free_bytes(), after_one, "{regions:?}");
        }
    }
}

/// Several products as one operation give the bits of separate ones: the gradient of x is the sum of those of later
/// operations, of the products from the last to the first, and of earlier operations, in this order.
#[test]
fn several_products_give_the_bits_of_separate_ones() {
    let mut random = Random(35);
    let x = random.input("x", &[37, 40], 1.0);
    let weights = [50, 40, 3, 17, 64, 9, 33].map(|outer| random.input("w", &[outer, 40], 0.5));
    for products in [Products::Fastest, Products::BatchInvariant] {
        let cpu = Cpu::new(CpuOptions { threads: 2, products, ..Default::default() }).unwrap();
        // Output `unused` receives no gradient.
        let run = |together: bool, unused: usize| {
            let tape = Tape::new(&cpu);
            let variable = |key: usize, input: &common::Input| {
                tape.parameter(key, cpu.from_f64(&input.data, &input.shape).unwrap())
            };
            let x = variable(0, &x);
            let w: Vec<Var<T>> = weights.iter().enumerate().map(|(i, w)| variable(i + 1, w)).collect();
            let product = |weight: &Var<T>| tape.linear(Linear { x: &x, weight, bias: None }).unwrap();
            let mut outputs = vec![product(&w[5])];
            if together {
                let each = [&w[0], &w[1], &w[2], &w[3], &w[4]].map(Weight::Full);
                outputs.extend(tape.linear_each(&x, each).unwrap());
            } else {
                outputs.extend(w[..5].iter().map(product));
            }
            outputs.push(product(&w[6]));
            assert_eq!(tape.len(), if together { 3 } else { 7 });
            let seeds: Vec<(&Var<T>, T)> = outputs
                .iter()
                .enumerate()
                .filter(|&(i, _)| i != unused)
                .map(|(i, y)| {
                    let shape = y.value().shape();
                    (y, cpu.from_f64(&common::cotangent(i, shape), shape).unwrap())
                })
                .collect();
            let mut gradients = vec![None; 8];
            tape.backward_from(&seeds, |key, gradient| gradients[key] = Some(cpu.to_f32(&gradient))).unwrap();
            let values: Vec<Vec<f32>> = outputs.iter().map(|y| cpu.to_f32(y.value())).collect();
            (values, gradients)
        };
        for unused in [0, 2, 5, 6, 7] {
            assert!(run(true, unused) == run(false, unused), "{products:?}, without output {unused}");
        }
    }
}

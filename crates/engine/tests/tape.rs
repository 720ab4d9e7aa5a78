//! The tape itself: what is recorded, regions that run again, the order of finished gradients, memory.

use march_engine::ops::elementwise::{Map, MapForward};
use march_engine::tape::{recompute, record_one, records};
use march_engine::{CpuOptions, Device, Error, Op, Products, Result, Tape, Tensor};

use crate::common::{Input, Random, cotangent, cpu, tensors};

const WIDTH: usize = 24;
const LAYERS: usize = 4;

/// The weights of the layers, each a norm's and a matrix.
fn weights(cpu: &Device) -> Vec<[Tensor; 2]> {
    let mut random = Random(31);
    let mut tensor = |shape: &[usize]| random.input("", shape, 0.3).on(cpu);
    (0..LAYERS).map(|_| [tensor(&[WIDTH]), tensor(&[WIDTH, WIDTH])]).collect()
}

/// The weights as parameters, with keys 2·layer and 2·layer + 1.
fn parameters(tape: &Tape, weights: &[[Tensor; 2]]) -> Vec<[Tensor; 2]> {
    let layers = weights.iter().enumerate();
    layers.map(|(i, w)| [tape.parameter(2 * i, &w[0]), tape.parameter(2 * i + 1, &w[1])]).collect()
}

fn input(cpu: &Device) -> Tensor {
    Random(32).input("x", &[3, 7, WIDTH], 1.0).on(cpu)
}

/// x + silu(rms_norm(x) Wᵀ)
fn layer(x: &Tensor, [norm, matrix]: &[Tensor; 2]) -> Result<Tensor> {
    x.add(&x.rms_norm(norm, 1e-6)?.linear(matrix)?.silu()?)
}

/// Some layers in a region that runs again; with `nested`, each again in one of its own.
fn region(x: &Tensor, layers: &[[Tensor; 2]], nested: bool) -> Result<Tensor> {
    let inputs: Vec<&Tensor> = [x].into_iter().chain(layers.iter().flatten()).collect();
    let run = move |v: &[Tensor]| -> Result<Vec<Tensor>> {
        let mut x = v[0].clone();
        for two in v[1..].chunks(2) {
            let weights = [two[0].clone(), two[1].clone()];
            x = if nested { region(&x, &[weights], false)? } else { layer(&x, &weights)? };
        }
        Ok(vec![x])
    };
    Ok(recompute(&inputs, run)?.remove(0))
}

fn loss(x: &Tensor) -> Result<Tensor> {
    x.square()?.reshape(&[x.len()])?.sum(0)
}

/// How the layers are wrapped in regions that run again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Regions {
    None,
    EachLayer,
    /// Two layers in a region, each again in one of its own.
    Nested,
}

impl Regions {
    fn run(self, x: &Tensor, layers: &[[Tensor; 2]]) -> Result<Tensor> {
        let mut x = x.clone();
        for layers in layers.chunks(if self == Self::Nested { 2 } else { 1 }) {
            x = match self {
                Self::None => layer(&x, &layers[0])?,
                _ => region(&x, layers, self == Self::Nested)?,
            };
        }
        Ok(x)
    }
}

/// One step: the loss, and the gradients in the order in which they came.
fn step(x: &Tensor, weights: &[[Tensor; 2]], regions: Regions) -> (Vec<f32>, Vec<(usize, Vec<f32>)>) {
    let tape = Tape::new();
    let total = loss(&regions.run(x, &parameters(&tape, weights)).unwrap()).unwrap();
    let mut gradients = Vec::new();
    tape.backward(&total, |key, gradient| gradients.push((key, gradient.to_f32()))).unwrap();
    assert!(tape.is_empty());
    (total.to_f32(), gradients)
}

#[test]
fn regions_give_the_same_bits() {
    let cpu = cpu(2);
    let (x, weights) = (input(&cpu), weights(&cpu));
    let bits = |regions| {
        let (loss, gradients) = step(&x, &weights, regions);
        let mut found: Vec<(usize, Vec<u32>)> = gradients
            .into_iter()
            .map(|(key, gradient)| (key, gradient.iter().map(|v| v.to_bits()).collect()))
            .collect();
        found.sort();
        (loss[0].to_bits(), found)
    };
    let want = bits(Regions::None);
    assert_eq!(want.1.len(), 2 * LAYERS);
    assert!(want.1.iter().all(|(_, g)| g.iter().any(|&bits| bits != 0)));
    for regions in [Regions::EachLayer, Regions::Nested] {
        assert_eq!(bits(regions), want, "{regions:?}");
    }
}

/// Parameters that a region captures, instead of taking them as inputs, get the same gradients. The region needs one
/// recorded input to know its tape.
#[test]
fn regions_may_capture_parameters() {
    let cpu = cpu(1);
    let run = |again: bool| {
        let tape = Tape::new();
        let x = tape.parameter(100, &input(&cpu));
        let mut y = x.clone();
        for weights in parameters(&tape, &weights(&cpu)) {
            let run = move |v: &[Tensor]| -> Result<_> { Ok(vec![layer(&v[0], &weights)?]) };
            y = if again { recompute(&[&y], run) } else { run(&[y]) }.unwrap().remove(0);
        }
        assert_eq!(tape.len(), if again { LAYERS } else { 4 * LAYERS });
        let mut gradients = Vec::new();
        let total = loss(&y).unwrap();
        tape.backward(&total, |key, gradient| gradients.push((key, gradient.to_f32()))).unwrap();
        gradients.sort_by_key(|(key, _)| *key);
        gradients
    };
    let want = run(false);
    assert_eq!(want.len(), 2 * LAYERS + 1);
    assert!(run(true) == want);
}

#[test]
fn regions_keep_fewer_nodes() {
    let cpu = cpu(2);
    for (regions, nodes) in [(Regions::None, 4 * LAYERS), (Regions::EachLayer, LAYERS), (Regions::Nested, 2)]
    {
        let tape = Tape::new();
        regions.run(&input(&cpu), &parameters(&tape, &weights(&cpu))).unwrap();
        assert_eq!(tape.len(), nodes, "{regions:?}");
    }
}

#[test]
fn an_error_inside_a_region_leaves_the_tape_recording() {
    let tape = Tape::new();
    let x = tape.parameter(0, &Tensor::full(&[2, 3], 1.0, &cpu(1)).unwrap());
    assert!(recompute(&[&x], |v| Ok::<_, Error>(vec![v[0].reshape(&[5])?])).is_err());
    assert!(x.neg().unwrap().is_recorded());
    assert_eq!(tape.len(), 1);
}

/// A region may have errors of its own kind, in both directions.
#[test]
fn regions_with_another_error() {
    #[derive(Debug, PartialEq)]
    struct Other(String);
    impl From<Error> for Other {
        fn from(error: Error) -> Self {
            Self(error.to_string())
        }
    }
    impl From<Other> for Error {
        fn from(error: Other) -> Self {
            Self::Value { operation: "other", message: error.0 }
        }
    }
    let x = Tape::new().parameter(0, &Tensor::full(&[2], 1.0, &cpu(1)).unwrap());
    let found = recompute(&[&x], |_| Err(Other("mine".into())));
    assert_eq!(found.unwrap_err(), Other("mine".into()));
}

#[test]
fn the_last_layer_is_ready_first() {
    let cpu = cpu(2);
    let (x, weights) = (input(&cpu), weights(&cpu));
    // The gradients of a region's parameters come together, at its end: nested ones span two layers.
    for (regions, span) in [(Regions::None, 1), (Regions::EachLayer, 1), (Regions::Nested, 2)] {
        let (_, gradients) = step(&x, &weights, regions);
        let found: Vec<usize> = gradients.iter().map(|(key, _)| key / (2 * span)).collect();
        let want: Vec<usize> = (0..LAYERS).rev().flat_map(|layer| [layer / span; 2]).collect();
        assert_eq!(found, want, "{regions:?}");
    }
}

#[test]
fn a_gradient_is_ready_before_earlier_layers_run() {
    let cpu = cpu(2);
    let tape = Tape::new();
    let mut x = input(&cpu);
    let mut starts = Vec::new();
    for weights in parameters(&tape, &weights(&cpu)) {
        starts.push(tape.len());
        x = layer(&x, &weights).unwrap();
    }
    let total = loss(&x).unwrap();
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
    let w = Tensor::from_slice(&[1.0, -2.0, 3.0], &[3], &cpu(1)).unwrap();
    for regions in [false, true] {
        let tape = Tape::new();
        let w = tape.parameter(9, &w);
        // w² + 5w (the second maybe in a region): the gradient of the sum is 2w + 5.
        let square = w.square().unwrap();
        let five = match regions {
            true => recompute(&[&w], |v| Ok::<_, Error>(vec![v[0].scale(5.0)?])).unwrap().remove(0),
            false => w.scale(5.0).unwrap(),
        };
        let total = square.add(&five).unwrap().sum(0).unwrap();
        let mut calls = Vec::new();
        tape.backward(&total, |key, gradient| calls.push((key, gradient.to_f32()))).unwrap();
        assert_eq!(calls, [(9, vec![7.0, 1.0, 11.0])], "regions {regions}");
    }
}

#[test]
fn a_residual_gradient_is_handed_on_without_a_copy() {
    let cpu = cpu(1);
    let tape = Tape::new();
    let full = |value| Tensor::full(&[2, 3], value, &cpu).unwrap();
    let y = tape.parameter(0, &full(1.0)).add(&tape.parameter(1, &full(2.0))).unwrap();
    let address = |x: &Tensor| match x.data() {
        march_engine::Data::F32(array) => array.data().as_ptr(),
        _ => panic!("not of the CPU"),
    };
    let dy = full(3.0);
    let want = address(&dy);
    let mut calls = 0;
    tape.backward_from(&[(&y, dy)], |_, gradient| {
        calls += 1;
        assert_eq!(address(&gradient), want);
    })
    .unwrap();
    assert_eq!(calls, 2);
}

#[test]
fn inference_records_nothing() {
    let cpu = cpu(2);
    for regions in [Regions::None, Regions::Nested] {
        let total = loss(&regions.run(&input(&cpu), &weights(&cpu)).unwrap()).unwrap();
        assert!(!total.is_recorded());
        Tape::new().backward(&total, |key, _| panic!("a gradient for {key}")).unwrap();
    }
    // Nor is anything recorded from a parameter's detached value, or by an operation without its method.
    let tape = Tape::new();
    let x = tape.parameter(0, &Tensor::full(&[3], 1.0, &cpu).unwrap());
    assert!(x.is_recorded() && records(&[&x]) && !x.detach().is_recorded() && !records(&[&x.detach()]));
    assert!(!x.detach().square().unwrap().is_recorded());
    assert!(!MapForward { kind: Map::Square, x }.run().unwrap().is_recorded());
    assert!(tape.is_empty());
}

/// Tensors do not keep their tape: once it is dropped, nothing is recorded.
#[test]
fn a_dropped_tape_stops_recording() {
    let cpu = cpu(1);
    let tape = Tape::new();
    let x = tape.parameter(0, &Tensor::full(&[3], 2.0, &cpu).unwrap());
    let before = x.square().unwrap();
    assert!(before.is_recorded());
    drop(tape);
    assert!(!records(&[&x]));
    for y in [x.square(), before.square(), before.add(&x)] {
        assert!(!y.unwrap().is_recorded());
    }
    let again = recompute(&[&x], |v| Ok::<_, Error>(vec![v[0].square()?])).unwrap().remove(0);
    assert!(!again.is_recorded());
    assert_eq!(again.to_f32(), before.to_f32());
    // A clone is the same tape.
    let tape = Tape::new();
    let x = tape.parameter(0, &x);
    let other = tape.clone();
    drop(tape);
    assert!(x.square().unwrap().is_recorded());
    assert_eq!(other.len(), 1);
}

/// A node's tensors live as long as the node: a dropped tape, like a finished one, gives their memory back.
#[test]
fn a_dropped_tape_frees_its_tensors() {
    let cpu = cpu(1);
    let tape = Tape::new();
    let (x, weights) = (input(&cpu), weights(&cpu));
    let before = cpu.live_bytes();
    drop(Regions::None.run(&x, &parameters(&tape, &weights)).unwrap());
    assert!(cpu.live_bytes() >= before + LAYERS * x.bytes());
    drop(tape);
    assert_eq!(cpu.live_bytes(), before);
}

/// While the tape runs backwards, no operation is recorded: neither those of the nodes nor a callback's.
#[test]
fn the_backward_pass_is_not_recorded() {
    let cpu = cpu(1);
    let tape = Tape::new();
    let x = tape.parameter(0, &Tensor::from_slice(&[1.0, 2.0], &[2], &cpu).unwrap());
    let y = x.square().unwrap();
    // A node of the test's own, whose backward pass uses a method on what it kept.
    let kept = y.detach();
    let cube = y.mul(&x.detach()).unwrap().detach();
    let seen = tape.clone();
    let cube = record_one(&[&y], cube, move |gradient| {
        let before = seen.len();
        let product = gradient.mul(&kept)?;
        assert!(!gradient.is_recorded() && !product.is_recorded());
        assert_eq!(seen.len(), before);
        Ok(vec![Some(product)])
    });
    let total = cube.sum(0).unwrap();
    let nodes = tape.len();
    let mut calls = 0;
    tape.backward(&total, |_, gradient| {
        calls += 1;
        // 1 · y · 2x
        assert_eq!(gradient.to_f32(), [2.0, 16.0]);
        assert!(!gradient.is_recorded() && !gradient.square().unwrap().is_recorded());
        assert!(tape.len() < nodes);
    })
    .unwrap();
    assert_eq!((calls, tape.len()), (1, 0));
    // The gradients of a whole step, too.
    for regions in [Regions::None, Regions::EachLayer, Regions::Nested] {
        let tape = Tape::new();
        let total = loss(&regions.run(&input(&cpu), &parameters(&tape, &weights(&cpu))).unwrap()).unwrap();
        tape.backward(&total, |key, gradient| assert!(!gradient.is_recorded(), "{key}")).unwrap();
        assert!(tape.is_empty());
    }
}

/// A tape without nodes takes new parameters: one tape serves several steps.
#[test]
fn a_tape_serves_several_steps() {
    let cpu = cpu(1);
    let tape = Tape::new();
    for value in [1.0, 5.0] {
        let x = tape.parameter(3, &Tensor::full(&[1], value, &cpu).unwrap());
        let mut calls = Vec::new();
        let total = x.square().unwrap();
        tape.backward(&total, |key, gradient| calls.push((key, gradient.to_f64()))).unwrap();
        assert_eq!(calls, [(3, vec![2.0 * value])]);
    }
}

/// A tensor that another tape recorded is not taken for one of this tape.
#[test]
fn tapes_do_not_mix_up_their_tensors() {
    let cpu = cpu(1);
    let (tape, other) = (Tape::new(), Tape::new());
    let x = Tensor::full(&[1], 3.0, &cpu).unwrap();
    let (mine, foreign) = (tape.parameter(1, &x), other.parameter(2, &x));
    let total = mine.square().unwrap().mul(&foreign).unwrap();
    let mut calls = Vec::new();
    tape.backward(&total, |key, gradient| calls.push((key, gradient.to_f64()))).unwrap();
    assert_eq!(calls, [(1, vec![18.0])]);
    assert!(other.is_empty());
}

#[test]
fn wrong_seeds_are_refused() {
    let tape = Tape::new();
    let x = tape.parameter(0, &Tensor::full(&[3], 1.0, &cpu(1)).unwrap());
    let y = x.square().unwrap();
    let message = tape.backward(&y, |_, _| {}).unwrap_err().to_string();
    assert!(message.contains("shape [3]; it must be a scalar"), "{message}");
    let seed = Tensor::full(&[2], 1.0, y.device()).unwrap();
    let message = tape.backward_from(&[(&y, seed)], |_, _| {}).unwrap_err().to_string();
    assert!(message.contains("gradient has shape [2], expected [3]"), "{message}");
}

#[test]
fn a_repeated_step_takes_no_new_memory() {
    let cpu = cpu(2);
    let (x, weights) = (input(&cpu), weights(&cpu));
    for regions in [Regions::None, Regions::EachLayer, Regions::Nested] {
        step(&x, &weights, regions);
        let after_one = cpu.free_bytes();
        assert!(after_one > 0);
        for _ in 0..3 {
            step(&x, &weights, regions);
            assert_eq!(cpu.free_bytes(), after_one, "{regions:?}");
        }
    }
}

/// Several products as one operation give the bits of separate ones: the gradient of x is the sum of those of later
/// operations, of the products from the last to the first, and of earlier operations, in this order.
#[test]
fn several_products_give_the_bits_of_separate_ones() {
    let mut random = Random(35);
    let mut inputs: Vec<Input> = vec![random.input("x", &[37, 40], 1.0)];
    inputs.extend([50, 40, 3, 17, 64, 9, 33].map(|outer| random.input("w", &[outer, 40], 0.5)));
    for products in [Products::Fastest, Products::BatchInvariant] {
        let cpu = Device::cpu(CpuOptions { threads: 2, products, ..Default::default() }).unwrap();
        // Output `unused` receives no gradient.
        let run = |together: bool, unused: usize| {
            let tape = Tape::new();
            let variables = tensors(&inputs, &cpu).into_iter().enumerate();
            let v: Vec<Tensor> = variables.map(|(key, tensor)| tape.parameter(key, &tensor)).collect();
            let (x, w) = (&v[0], &v[1..]);
            let product = |weight: &Tensor| x.linear(weight).unwrap();
            let mut outputs = vec![product(&w[5])];
            match together {
                true => outputs.extend(x.linear_each([&w[0], &w[1], &w[2], &w[3], &w[4]]).unwrap()),
                false => outputs.extend(w[..5].iter().map(product)),
            }
            outputs.push(product(&w[6]));
            assert_eq!(tape.len(), if together { 3 } else { 7 });
            let used = outputs.iter().enumerate().filter(|&(i, _)| i != unused);
            let seeds: Vec<_> = used.map(|(i, y)| (y, cotangent(i, y).on(&cpu))).collect();
            let mut gradients = vec![None; 8];
            tape.backward_from(&seeds, |key, gradient| gradients[key] = Some(gradient.to_f32())).unwrap();
            (outputs.iter().map(Tensor::to_f32).collect::<Vec<_>>(), gradients)
        };
        for unused in [0, 2, 5, 6, 7] {
            assert!(run(true, unused) == run(false, unused), "{products:?}, without output {unused}");
        }
    }
}

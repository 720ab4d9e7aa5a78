//! Runs one program on the f64 references and on every setting of the fast engine, and compares outputs and
//! gradients; and checks the references against finite differences.
#![allow(dead_code, missing_docs)]

pub mod lists;

use march_engine::{Cpu, CpuOptions, Engine, Products, Reference, Result, Tape, Var};

/// Forward agreement, relative to the largest value of the tensor.
pub const FORWARD: f64 = 1e-5;
/// Gradient agreement, relative to the largest value of the tensor.
pub const GRADIENT: f64 = 1e-4;

/// A named input with its contents.
#[derive(Clone, Debug)]
pub struct Input {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

/// A computation on any engine: inputs in, outputs out.
pub trait Program {
    fn run<'e, E: Engine>(
        &self,
        tape: &Tape<'e, E>,
        inputs: &[Var<E::Tensor>],
    ) -> Result<Vec<Var<E::Tensor>>>;
}

/// A small deterministic generator (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    /// In [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
    /// Roughly normal: the sum of twelve uniforms. Rounded to f32, so that both engines see the same number.
    pub fn normal(&mut self) -> f64 {
        let sum: f64 = (0..12).map(|_| self.unit()).sum();
        f64::from((sum - 6.0) as f32)
    }
    /// In low..=high.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + (self.bits() % (high - low + 1) as u64) as usize
    }
    pub fn input(&mut self, name: &'static str, shape: &[usize], scale: f64) -> Input {
        let count = shape.iter().product();
        let data = (0..count).map(|_| f64::from((self.normal() * scale) as f32)).collect();
        Input { name, shape: shape.to_vec(), data }
    }
}

/// Outputs and gradients of one run.
pub struct Outcome {
    pub outputs: Vec<(Vec<usize>, Vec<f64>)>,
    pub gradients: Vec<Option<Vec<f64>>>,
}

/// Runs a program forward and, with fixed pseudo-random output gradients, backward.
pub fn outcome<E: Engine>(engine: &E, program: &impl Program, inputs: &[Input]) -> Result<Outcome> {
    let tape = Tape::new(engine);
    let vars = inputs
        .iter()
        .enumerate()
        .map(|(i, input)| Ok(tape.parameter(i, engine.from_f64(&input.data, &input.shape)?)))
        .collect::<Result<Vec<_>>>()?;
    let outputs = program.run(&tape, &vars)?;
    let mut seeds = Vec::new();
    for (i, output) in outputs.iter().enumerate() {
        let shape = engine.shape(output.value()).to_vec();
        seeds.push((output, engine.from_f64(&cotangent(i, &shape), &shape)?));
    }
    let mut gradients = vec![None; inputs.len()];
    tape.backward_from(&seeds, |key, gradient| gradients[key] = Some(engine.to_f64(&gradient)))?;
    let outputs =
        outputs.iter().map(|o| (engine.shape(o.value()).to_vec(), engine.to_f64(o.value()))).collect();
    Ok(Outcome { outputs, gradients })
}

/// The gradient that a test sends into output `index`.
pub fn cotangent(index: usize, shape: &[usize]) -> Vec<f64> {
    let mut random = Random(77 + index as u64);
    (0..shape.iter().product()).map(|_| random.normal()).collect()
}

/// The fast engine in all its settings.
pub fn fast_engines() -> Vec<Cpu> {
    let mut engines = Vec::new();
    for threads in [1, 2] {
        for portable in [false, true] {
            engines.push(Cpu::new(CpuOptions { threads, portable, products: Products::Fastest }).unwrap());
        }
    }
    engines.push(
        Cpu::new(CpuOptions { threads: 2, portable: false, products: Products::BatchInvariant }).unwrap(),
    );
    engines
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m: f64, v| m.max(v.abs()))
}

/// Panics, naming the tensor, unless `found` is within `tolerance` of `want`, relative to its largest value.
pub fn assert_close(what: &str, found: &[f64], want: &[f64], tolerance: f64) {
    assert_close_above(what, found, want, tolerance, 1e-6);
}

/// [`assert_close`] for a tensor that may be all zero but for rounding: its scale is at least `floor`.
pub fn assert_close_above(what: &str, found: &[f64], want: &[f64], tolerance: f64, floor: f64) {
    assert_eq!(found.len(), want.len(), "{what}: length");
    let scale = largest(want).max(floor);
    for (i, (f, w)) in found.iter().zip(want).enumerate() {
        assert!(f.is_finite(), "{what}[{i}] is {f}, expected {w}");
        let error = (f - w).abs() / scale;
        assert!(
            error <= tolerance,
            "{what}[{i}]: {f}, expected {w}; off by {error:.2e} of the largest, {scale:.3e}"
        );
    }
}

/// fast = reference: every output and every gradient, on every setting of the fast engine.
pub fn compare(label: &str, program: &impl Program, inputs: &[Input]) {
    let want = outcome(&Reference, program, inputs).unwrap();
    let floor = 0.1 * want.gradients.iter().flatten().map(|g| largest(g)).fold(1e-4, f64::max);
    for engine in fast_engines() {
        let found = outcome(&engine, program, inputs).unwrap();
        let who = format!("{label} on {engine:?}");
        for (i, (f, w)) in found.outputs.iter().zip(&want.outputs).enumerate() {
            assert_eq!(f.0, w.0, "{who}: shape of output {i}");
            assert_close(&format!("{who}: output {i}"), &f.1, &w.1, FORWARD);
        }
        for (i, input) in inputs.iter().enumerate() {
            match (&found.gradients[i], &want.gradients[i]) {
                (Some(f), Some(w)) => {
                    assert_close_above(&format!("{who}: gradient of {}", input.name), f, w, GRADIENT, floor)
                }
                (None, None) => {}
                (f, w) => {
                    panic!("{who}: gradient of {}: there {}, here {}", input.name, w.is_some(), f.is_some())
                }
            }
        }
        let again = outcome(&engine, program, inputs).unwrap();
        for (i, (a, b)) in again.outputs.iter().zip(&found.outputs).enumerate() {
            assert!(a.1 == b.1, "{who}: output {i} is not repeatable");
        }
        for (i, input) in inputs.iter().enumerate() {
            assert!(
                again.gradients[i] == found.gradients[i],
                "{who}: gradient of {} is not repeatable",
                input.name
            );
        }
    }
}

/// reference gradients = central differences of the reference forward, in f64, at `samples` places of each input.
pub fn finite_differences(label: &str, program: &impl Program, inputs: &[Input], samples: usize) {
    let found = outcome(&Reference, program, inputs).unwrap();
    let total = |inputs: &[Input]| -> f64 {
        let tape = Tape::inference(&Reference);
        let vars: Vec<_> =
            inputs.iter().map(|i| tape.constant(Reference.from_f64(&i.data, &i.shape).unwrap())).collect();
        let outputs = program.run(&tape, &vars).unwrap();
        let sums = outputs.iter().enumerate().map(|(i, o)| {
            let weights = cotangent(i, o.value().shape());
            o.value().data().iter().zip(weights).map(|(v, w)| v * w).sum::<f64>()
        });
        sums.sum()
    };
    let mut random = Random(5);
    for (which, input) in inputs.iter().enumerate() {
        let Some(gradient) = &found.gradients[which] else { continue };
        if input.data.is_empty() {
            continue;
        }
        let scale = largest(gradient).max(1e-3);
        for _ in 0..samples {
            let at = random.between(0, input.data.len() - 1);
            let step = 1e-5 * (1.0 + input.data[at].abs());
            let mut moved = inputs.to_vec();
            moved[which].data[at] = input.data[at] + step;
            let up = total(&moved);
            moved[which].data[at] = input.data[at] - step;
            let down = total(&moved);
            let want = (up - down) / (2.0 * step);
            let error = (gradient[at] - want).abs() / scale;
            assert!(
                error < 1e-6,
                "{label}: gradient of {}[{at}]: {}, by differences {want}",
                input.name,
                gradient[at]
            );
        }
    }
}

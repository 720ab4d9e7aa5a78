//! Runs a program on the reference device and on others, and compares outputs and gradients; and checks the reference
//! against finite differences. The tests of other devices include this file.
#![allow(dead_code, missing_docs)]

pub mod lists;

use march_engine::{Cpu, CpuOptions, Device, Level, Products, Result, Tape, Tensor};

/// Forward agreement, relative to the largest value of the tensor.
pub const FORWARD: f64 = 1e-5;
/// Gradient agreement, relative to the largest value of the tensor.
pub const GRADIENT: f64 = 1e-4;

/// A computation on any device: inputs in, outputs out.
pub type Program<'a> = &'a dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>;

/// A named input with its contents.
#[derive(Clone, Debug)]
pub struct Input {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

impl Input {
    pub fn on(&self, device: &Device) -> Tensor {
        Tensor::from_f64(&self.data, &self.shape, device).unwrap()
    }
}

/// The inputs as tensors of a device.
pub fn tensors(inputs: &[Input], device: &Device) -> Vec<Tensor> {
    inputs.iter().map(|input| input.on(device)).collect()
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
    /// Roughly normal: the sum of twelve uniforms. Rounded to f32, so that all devices see the same number.
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

/// Shape and values of an output.
pub type Output = (Vec<usize>, Vec<f64>);

fn outputs_of(tensors: &[Tensor]) -> Vec<Output> {
    tensors.iter().map(|tensor| (tensor.shape().to_vec(), tensor.to_f64())).collect()
}

/// Outputs and gradients of one run.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub outputs: Vec<Output>,
    pub gradients: Vec<Option<Vec<f64>>>,
}

/// Runs a program forward and, with fixed pseudo-random output gradients, backward.
pub fn outcome(device: &Device, program: Program<'_>, inputs: &[Input]) -> Result<Outcome> {
    let tape = Tape::new();
    let parameter = |(key, input): (usize, &Input)| tape.parameter(key, &input.on(device));
    let parameters: Vec<Tensor> = inputs.iter().enumerate().map(parameter).collect();
    let outputs = program(&parameters)?;
    let seed = |(i, output)| (output, cotangent(i, output).on(device));
    let seeds: Vec<(&Tensor, Tensor)> = outputs.iter().enumerate().map(seed).collect();
    let mut gradients = vec![None; inputs.len()];
    tape.backward_from(&seeds, |key, gradient| gradients[key] = Some(gradient.to_f64()))?;
    Ok(Outcome { outputs: outputs_of(&outputs), gradients })
}

/// Runs a program forward, without recording it.
pub fn infer(device: &Device, program: Program<'_>, inputs: &[Input]) -> Result<Vec<Output>> {
    Ok(outputs_of(&program(&tensors(inputs, device))?))
}

/// The gradient that a test sends into output `index`.
pub fn cotangent(index: usize, output: &Tensor) -> Input {
    let mut random = Random(77 + index as u64);
    let data = (0..output.len()).map(|_| random.normal()).collect();
    Input { name: "gradient", shape: output.shape().to_vec(), data }
}

/// The CPU with a number of threads.
pub fn cpu(threads: usize) -> Device {
    Device::cpu(CpuOptions { threads, ..Default::default() }).unwrap()
}

/// The CPU for inference: products do not depend on the number of rows.
pub fn invariant(threads: usize) -> Device {
    let products = Products::BatchInvariant;
    Device::cpu(CpuOptions { threads, products, ..Default::default() }).unwrap()
}

/// The CPU in all its settings.
pub fn cpus() -> Vec<Device> {
    let all = [cpu(1), cpu(2), invariant(2)].into_iter().chain(narrow(2));
    all.chain(portable(1)).chain(portable(2)).collect()
}

/// The CPU for inference with 256-bit vectors, if the default has wider ones.
pub fn narrow(threads: usize) -> Option<Device> {
    let (products, level) = (Products::BatchInvariant, Some(Level::Avx2));
    let wider = Level::detect() == Some(Level::Avx512);
    wider.then(|| Device::cpu(CpuOptions { threads, products, level, ..Default::default() }).unwrap())
}

/// The CPU with its portable kernels, if they are part of this build.
pub fn portable(threads: usize) -> Option<Device> {
    Level::portable()
        .map(|_| Device::cpu(CpuOptions { threads, portable: true, ..Default::default() }).unwrap())
}

/// The reference device and the CPU in all its settings.
pub fn all_devices() -> Vec<Device> {
    [vec![Device::reference()], cpus()].concat()
}

/// The device with its settings, for messages.
pub fn describe(device: &Device) -> String {
    device.backend::<Cpu>().map_or(device.to_string(), |cpu| format!("{cpu:?}"))
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

/// CPU = reference: every output and every gradient, on every setting of the CPU.
pub fn compare(label: &str, program: Program<'_>, inputs: &[Input]) {
    compare_on(&cpus(), label, program, inputs, [FORWARD, GRADIENT]);
}

/// device = reference: every output and every gradient, on every device; and twice the same bits. The tolerances of
/// outputs and gradients are relative to the largest value of each tensor.
pub fn compare_on(devices: &[Device], label: &str, program: Program<'_>, inputs: &[Input], within: [f64; 2]) {
    let want = outcome(&Device::reference(), program, inputs).unwrap();
    let floor = 0.1 * want.gradients.iter().flatten().map(|g| largest(g)).fold(1e-4, f64::max);
    for device in devices {
        let who = format!("{label} on {}", describe(device));
        let found = outcome(device, program, inputs).unwrap_or_else(|error| panic!("{who}: {error}"));
        assert_eq!(found.outputs.len(), want.outputs.len(), "{who}: number of outputs");
        for (i, (f, w)) in found.outputs.iter().zip(&want.outputs).enumerate() {
            assert_eq!(f.0, w.0, "{who}: shape of output {i}");
            assert_close(&format!("{who}: output {i}"), &f.1, &w.1, within[0]);
        }
        for (input, pair) in inputs.iter().zip(found.gradients.iter().zip(&want.gradients)) {
            let what = format!("{who}: gradient of {}", input.name);
            match pair {
                (Some(f), Some(w)) => assert_close_above(&what, f, w, within[1], floor),
                (None, None) => {}
                (f, w) => panic!("{what}: there {}, here {}", w.is_some(), f.is_some()),
            }
        }
        let again = outcome(device, program, inputs).unwrap();
        assert!(again == found, "{who}: it is not repeatable");
    }
}

/// reference gradients = central differences of the reference forward, in f64, at `samples` places of each input.
pub fn finite_differences(label: &str, program: Program<'_>, inputs: &[Input], samples: usize) {
    let reference = Device::reference();
    let found = outcome(&reference, program, inputs).unwrap();
    let total = |inputs: &[Input]| -> f64 {
        let outputs = program(&tensors(inputs, &reference)).unwrap();
        let dot = |(i, output): (usize, &Tensor)| -> f64 {
            output.to_f64().iter().zip(cotangent(i, output).data).map(|(v, w)| v * w).sum()
        };
        outputs.iter().enumerate().map(dot).sum()
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

/// [`compare`], and [`finite_differences`] if the inputs have fewer than `small` numbers.
pub fn check(label: &str, program: Program<'_>, inputs: &[Input], small: usize, samples: usize) {
    compare(label, program, inputs);
    if inputs.iter().map(|input| input.data.len()).sum::<usize>() < small {
        finite_differences(label, program, inputs, samples);
    }
}

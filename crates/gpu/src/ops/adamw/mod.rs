//! `adamw` on the device: a step in place, and the squared norm of many tensors with one wait for the device.

use march_engine::ops::adamw::{AdamWStep, SquaredNorm};
use march_engine::{Result, Tensor};

use crate::array::{GpuArray, array, arrays};
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::elementwise::writable;

/// Numbers that a workgroup of the step owns.
const GROUP: usize = 256;

/// Numbers that a workgroup of the norm owns.
const BLOCK: usize = 4096;

/// Tensors that one dispatch of the norm covers, at the most.
const TENSORS: usize = 8;

fn step_kernel() -> Kernel {
    Kernel {
        name: "adamw/step",
        source: include_str!("kernel.wgsl"),
        entry: "step",
        constants: Vec::new(),
        writes: &[false, true, true, true],
    }
}

fn norm_kernel() -> Kernel {
    Kernel {
        name: "adamw/squared_norm",
        source: include_str!("norm.wgsl"),
        entry: "squares",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, false, false, false, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![step_kernel(), norm_kernel()]
}

pub(crate) fn squared_norm(gpu: &Gpu, op: SquaredNorm, (): ()) -> Result<f64> {
    let tensors = arrays(&op.tensors);
    let blocks = |tensor: &GpuArray| tensor.len().div_ceil(BLOCK);
    let total: usize = tensors.iter().map(|tensor| blocks(tensor)).sum();
    let sums = gpu.empty(&[total])?;
    let mut first = 0;
    for some in tensors.chunks(TENSORS) {
        let mut end = 0;
        let mut ends = [0; TENSORS];
        let mut lens = [0; TENSORS];
        for i in 0..TENSORS {
            if let Some(tensor) = some.get(i) {
                end += blocks(tensor);
                lens[i] = tensor.len() as u32;
            }
            ends[i] = end as u32;
        }
        let mut bound = some.to_vec();
        bound.resize(TENSORS, some[0]);
        bound.push(&sums);
        let numbers = [&[first as u32, 0, 0, 0][..], &ends, &lens].concat();
        gpu.run(&norm_kernel(), &bound, &numbers, gpu.list(end))?;
        first += end;
    }
    let sums = gpu.download(&sums);
    gpu.alive()?;
    let mut rest = &sums[..];
    let of_tensor = |tensor: &&GpuArray| {
        let (own, later) = rest.split_at(blocks(tensor));
        rest = later;
        own.iter().map(|&sum| f64::from(sum)).sum::<f64>()
    };
    Ok(tensors.iter().map(of_tensor).sum())
}

pub(crate) fn step(gpu: &Gpu, op: AdamWStep, (): ()) -> Result<[Tensor; 3]> {
    let AdamWStep { parameter, first_moment, second_moment, gradient, step } = op;
    let parameter = writable(gpu, parameter)?;
    let (first, second) = (writable(gpu, first_moment)?, writable(gpu, second_moment)?);
    let [b1, b2] = step.betas;
    let [c1, c2] = step.betas.map(|beta| 1.0 - beta.powf(step.step as f64));
    let keep = 1.0 - (step.learning_rate * step.weight_decay) as f32;
    let factors = [
        step.clip as f32,
        b1 as f32,
        (1.0 - b1) as f32,
        b2 as f32,
        (1.0 - b2) as f32,
        keep,
        (step.learning_rate / c1) as f32,
        (1.0 / c2) as f32,
        step.eps as f32,
    ];
    let mut call = vec![gradient.len() as u32];
    call.extend(factors.map(f32::to_bits));
    let groups = gpu.list(gradient.len().div_ceil(GROUP));
    gpu.run(&step_kernel(), &[array(&gradient), &parameter, &first, &second], &call, groups)?;
    Ok([parameter, first, second].map(|array| gradient.like(array)))
}

//! `rms_norm` on the device, plain and gated.

use march_engine::Result;
use march_engine::ops::rms_norm::{GatedRmsNorm, RmsNorm};

use super::reduce;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// Invocations of a workgroup.
const GROUP: usize = 256;

/// Numbers that a workgroup of the backward pass reads from each tensor, about.
const BLOCK: usize = 16 * 1024;

fn forward_kernel(gated: bool) -> Kernel {
    Kernel {
        name: if gated { "gated_rms_norm/forward" } else { "rms_norm/forward" },
        source: concat!(include_str!("kernel.wgsl"), include_str!("segment.wgsl")),
        entry: if gated { "gated_forward" } else { "forward" },
        constants: Vec::new(),
        writes: &[false, false, false, true],
    }
}

fn backward_kernel(gated: bool) -> Kernel {
    if gated {
        return Kernel {
            name: "gated_rms_norm/backward",
            source: concat!(
                include_str!("backward.wgsl"),
                include_str!("gated.wgsl"),
                include_str!("segment.wgsl")
            ),
            entry: "backward",
            constants: Vec::new(),
            writes: &[false, false, false, true, true, false, true],
        };
    }
    Kernel {
        name: "rms_norm/backward",
        source: concat!(
            include_str!("backward.wgsl"),
            include_str!("plain.wgsl"),
            include_str!("segment.wgsl")
        ),
        entry: "backward",
        constants: Vec::new(),
        writes: &[false, false, false, true, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![forward_kernel(false), forward_kernel(true), backward_kernel(false), backward_kernel(true)]
}

/// Invocations that share a row: about one for every four numbers.
fn lanes(width: usize) -> usize {
    width.div_ceil(4).next_power_of_two().clamp(8, GROUP)
}

/// See [`march_engine::Engine::rms_norm`].
pub(crate) fn forward(gpu: &Gpu, input: RmsNorm<&Tensor>, eps: f64) -> Result<Tensor> {
    normalise(gpu, input.x, None, input.weight, eps)
}

/// See [`march_engine::Engine::gated_rms_norm`].
pub(crate) fn gated_forward(gpu: &Gpu, input: GatedRmsNorm<&Tensor>, eps: f64) -> Result<Tensor> {
    normalise(gpu, input.x, Some(input.gate), input.weight, eps)
}

fn normalise(gpu: &Gpu, x: &Tensor, gate: Option<&Tensor>, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let width = weight.len();
    let (rows, lanes) = (x.len() / width, lanes(width));
    let y = gpu.empty(x.shape())?;
    let call = [rows as u32, width as u32, lanes as u32, (eps as f32).to_bits()];
    let groups = gpu.list(rows.div_ceil(GROUP / lanes));
    gpu.run(&forward_kernel(gate.is_some()), &[x, weight, gate.unwrap_or(x), &y], &call, groups)?;
    Ok(y)
}

/// See [`march_engine::Engine::rms_norm_backward`].
pub(crate) fn backward(
    gpu: &Gpu,
    input: RmsNorm<&Tensor>,
    eps: f64,
    gradient: &Tensor,
) -> Result<RmsNorm<Tensor>> {
    let (x, weight, _) = gradients(gpu, input.x, None, input.weight, eps, gradient)?;
    Ok(RmsNorm { x, weight })
}

/// See [`march_engine::Engine::gated_rms_norm_backward`].
pub(crate) fn gated_backward(
    gpu: &Gpu,
    input: GatedRmsNorm<&Tensor>,
    eps: f64,
    gradient: &Tensor,
) -> Result<GatedRmsNorm<Tensor>> {
    let gate = gpu.empty(input.gate.shape())?;
    let (x, weight, gate) = gradients(gpu, input.x, Some((input.gate, gate)), input.weight, eps, gradient)?;
    let Some(gate) = gate else { unreachable!("it was passed in") };
    Ok(GatedRmsNorm { x, gate, weight })
}

/// dx and dw, and dg if there is a gate, which comes with the tensor for its gradient.
fn gradients(
    gpu: &Gpu,
    x: &Tensor,
    gate: Option<(&Tensor, Tensor)>,
    weight: &Tensor,
    eps: f64,
    gradient: &Tensor,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let width = weight.len();
    let (rows, lanes) = (x.len() / width, lanes(width));
    let block = (BLOCK / width).clamp(16, GROUP);
    let splits = GROUP / width.next_power_of_two().min(GROUP);
    let blocks = rows.div_ceil(block);
    let dx = gpu.empty(x.shape())?;
    let partial = gpu.empty(&[blocks * splits, width])?;
    let [rows, width, lanes, block, splits] = [rows, width, lanes, block, splits].map(|n| n as u32);
    let call = [rows, width, lanes, (eps as f32).to_bits(), block, splits];
    let kernel = backward_kernel(gate.is_some());
    let groups = gpu.list(blocks);
    match &gate {
        Some((gate, d_gate)) => {
            gpu.run(&kernel, &[x, weight, gradient, &dx, &partial, gate, d_gate], &call, groups)?;
        }
        None => gpu.run(&kernel, &[x, weight, gradient, &dx, &partial], &call, groups)?,
    }
    Ok((dx, reduce::sum(gpu, &partial, 0)?, gate.map(|(_, d_gate)| d_gate)))
}

//! `swiglu` on the device.

use march_engine::ops::swiglu::{SwiGlu, SwiGluBackward};
use march_engine::{Result, Tensor};

use crate::array::{GpuArray, arrays, tensors};
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Numbers that a workgroup owns.
const GROUP: usize = 256;

fn forward_kernel() -> Kernel {
    Kernel {
        name: "swiglu/forward",
        source: include_str!("kernel.wgsl"),
        entry: "forward",
        constants: Vec::new(),
        writes: &[false, false, false, false, true, true],
    }
}

fn backward_kernel() -> Kernel {
    Kernel {
        name: "swiglu/backward",
        source: include_str!("backward.wgsl"),
        entry: "backward",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, false, true, true, true, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![forward_kernel(), backward_kernel()]
}

/// Numbers of the gates in a part of a list: of both, and of the first.
fn numbers(gates: &[&GpuArray]) -> [u32; 2] {
    [gates.iter().map(|gate| gate.len()).sum(), gates[0].len()].map(|count| count as u32)
}

/// An array like each of a list.
fn room(gpu: &Gpu, gates: &[&GpuArray]) -> Result<Vec<GpuArray>> {
    gates.iter().map(|gate| gpu.empty(gate.shape())).collect()
}

/// A dispatch takes two of the inputs.
pub(crate) fn forward(gpu: &Gpu, op: SwiGlu, (): ()) -> Result<Vec<Tensor>> {
    let (gates, ups) = (arrays(&op.gates), arrays(&op.ups));
    let outputs = room(gpu, &gates)?;
    let spare = gpu.empty(&[1])?;
    for ((gate, up), y) in gates.chunks(2).zip(ups.chunks(2)).zip(outputs.chunks(2)) {
        let (last, call) = (gate.len() - 1, numbers(gate));
        let tensors = [gate[0], gate[last], up[0], up[last], &y[0], y.get(1).unwrap_or(&spare)];
        gpu.run(&forward_kernel(), &tensors, &call, gpu.list((call[0] as usize).div_ceil(GROUP)))?;
    }
    Ok(tensors(&op.gates[0], outputs))
}

pub(crate) fn backward(gpu: &Gpu, op: SwiGluBackward, (): ()) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let SwiGlu { gates, ups } = &op.forward;
    let (gates, ups, gradients) = (arrays(gates), arrays(ups), arrays(&op.gradients));
    let (d_gates, d_ups) = (room(gpu, &gates)?, room(gpu, &gates)?);
    let spare = [gpu.empty(&[1])?, gpu.empty(&[1])?];
    for (part, gate) in gates.chunks(2).enumerate() {
        let (last, call) = (gate.len() - 1, numbers(gate));
        let here = 2 * part..2 * part + gate.len();
        let (up, dy) = (&ups[here.clone()], &gradients[here.clone()]);
        let (dg, du) = (&d_gates[here.clone()], &d_ups[here]);
        let [dg1, du1] = [dg.get(1).unwrap_or(&spare[0]), du.get(1).unwrap_or(&spare[1])];
        let tensors = [gate[0], gate[last], up[0], up[last], dy[0], dy[last], &dg[0], dg1, &du[0], du1];
        gpu.run(&backward_kernel(), &tensors, &call, gpu.list((call[0] as usize).div_ceil(GROUP)))?;
    }
    let like = &op.forward.gates[0];
    Ok((tensors(like, d_gates), tensors(like, d_ups)))
}

//! `swiglu` on the device.

use march_engine::Result;
use march_engine::ops::swiglu::SwiGlu;

use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// Numbers that a workgroup owns.
const GROUP: usize = 256;

fn forward_kernel() -> Kernel {
    Kernel {
        name: "swiglu/forward",
        source: include_str!("kernel.wgsl"),
        entry: "forward",
        constants: Vec::new(),
        writes: &[false, false, true],
    }
}

fn backward_kernel() -> Kernel {
    Kernel {
        name: "swiglu/backward",
        source: include_str!("backward.wgsl"),
        entry: "backward",
        constants: Vec::new(),
        writes: &[false, false, false, true, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![forward_kernel(), backward_kernel()]
}

/// See [`march_engine::Engine::swiglu`].
pub(crate) fn forward(gpu: &Gpu, input: SwiGlu<&Tensor>) -> Result<Tensor> {
    let SwiGlu { gate, up } = input;
    let y = gpu.empty(gate.shape())?;
    let groups = gpu.list(y.len().div_ceil(GROUP));
    gpu.run(&forward_kernel(), &[gate, up, &y], &[y.len() as u32], groups)?;
    Ok(y)
}

/// See [`march_engine::Engine::swiglu_backward`].
pub(crate) fn backward(gpu: &Gpu, input: SwiGlu<&Tensor>, gradient: &Tensor) -> Result<SwiGlu<Tensor>> {
    let SwiGlu { gate, up } = input;
    let d = SwiGlu { gate: gpu.empty(gate.shape())?, up: gpu.empty(gate.shape())? };
    let groups = gpu.list(gate.len().div_ceil(GROUP));
    gpu.run(&backward_kernel(), &[gate, up, gradient, &d.gate, &d.up], &[gate.len() as u32], groups)?;
    Ok(d)
}

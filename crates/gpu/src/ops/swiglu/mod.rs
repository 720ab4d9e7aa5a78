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

/// Numbers of the tensors in a part of a list: of both, and of the first.
fn numbers(part: &[SwiGlu<&Tensor>]) -> (usize, usize) {
    (part.iter().map(|input| input.gate.len()).sum(), part[0].gate.len())
}

/// See [`march_engine::Engine::swiglu`]. A dispatch takes two of the inputs.
pub(crate) fn forward(gpu: &Gpu, inputs: &[SwiGlu<&Tensor>]) -> Result<Vec<Tensor>> {
    let outputs = inputs.iter().map(|input| gpu.empty(input.gate.shape())).collect::<Result<Vec<_>>>()?;
    let spare = gpu.empty(&[1])?;
    for (part, y) in inputs.chunks(2).zip(outputs.chunks(2)) {
        let (first, last) = (part[0], part[part.len() - 1]);
        let (count, split) = numbers(part);
        let tensors = [first.gate, last.gate, first.up, last.up, &y[0], y.get(1).unwrap_or(&spare)];
        let groups = gpu.list(count.div_ceil(GROUP));
        gpu.run(&forward_kernel(), &tensors, &[count as u32, split as u32], groups)?;
    }
    Ok(outputs)
}

/// See [`march_engine::Engine::swiglu_backward`].
pub(crate) fn backward(
    gpu: &Gpu,
    inputs: &[SwiGlu<&Tensor>],
    gradients: &[&Tensor],
) -> Result<Vec<SwiGlu<Tensor>>> {
    let room = |input: &SwiGlu<&Tensor>| {
        let shape = input.gate.shape();
        Ok(SwiGlu { gate: gpu.empty(shape)?, up: gpu.empty(shape)? })
    };
    let found = inputs.iter().map(room).collect::<Result<Vec<_>>>()?;
    let spare = SwiGlu { gate: gpu.empty(&[1])?, up: gpu.empty(&[1])? };
    for ((part, dy), d) in inputs.chunks(2).zip(gradients.chunks(2)).zip(found.chunks(2)) {
        let (first, last) = (part[0], part[part.len() - 1]);
        let (count, split) = numbers(part);
        let (d0, d1) = (&d[0], d.get(1).unwrap_or(&spare));
        let tensors = [
            first.gate,
            last.gate,
            first.up,
            last.up,
            dy[0],
            dy[dy.len() - 1],
            &d0.gate,
            &d1.gate,
            &d0.up,
            &d1.up,
        ];
        let groups = gpu.list(count.div_ceil(GROUP));
        gpu.run(&backward_kernel(), &tensors, &[count as u32, split as u32], groups)?;
    }
    Ok(found)
}

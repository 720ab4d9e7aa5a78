//! `softmax` on the device: a workgroup for each row.

use march_engine::ops::softmax::{Softmax, SoftmaxBackward};
use march_engine::{Result, Tensor};

use crate::array::array;
use crate::gpu::Gpu;
use crate::kernel::Kernel;

fn forward_kernel() -> Kernel {
    Kernel {
        name: "softmax/forward",
        source: include_str!("kernel.wgsl"),
        entry: "forward",
        constants: Vec::new(),
        writes: &[false, true],
    }
}

fn backward_kernel() -> Kernel {
    Kernel {
        name: "softmax/backward",
        source: include_str!("backward.wgsl"),
        entry: "backward",
        constants: Vec::new(),
        writes: &[false, false, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![forward_kernel(), backward_kernel()]
}

pub(crate) fn forward(gpu: &Gpu, op: Softmax, width: usize) -> Result<Tensor> {
    let x = array(&op.x);
    let y = gpu.empty(x.shape())?;
    let numbers = [x.rows() as u32, width as u32];
    gpu.run(&forward_kernel(), &[x, &y], &numbers, gpu.list(x.rows()))?;
    Ok(op.x.like(y))
}

pub(crate) fn backward(gpu: &Gpu, op: SoftmaxBackward, width: usize) -> Result<Tensor> {
    let (y, gradient) = (array(&op.y), array(&op.gradient));
    let dx = gpu.empty(y.shape())?;
    let numbers = [y.rows() as u32, width as u32];
    gpu.run(&backward_kernel(), &[y, gradient, &dx], &numbers, gpu.list(y.rows()))?;
    Ok(op.y.like(dx))
}

//! `softmax` on the device: a workgroup for each row.

use march_engine::Result;

use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

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

/// See [`march_engine::Engine::softmax`].
pub(crate) fn forward(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let y = gpu.empty(x.shape())?;
    let numbers = [x.rows() as u32, x.width() as u32];
    gpu.run(&forward_kernel(), &[x, &y], &numbers, gpu.list(x.rows()))?;
    Ok(y)
}

/// See [`march_engine::Engine::softmax_backward`].
pub(crate) fn backward(gpu: &Gpu, y: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    let dx = gpu.empty(y.shape())?;
    let numbers = [y.rows() as u32, y.width() as u32];
    gpu.run(&backward_kernel(), &[y, gradient, &dx], &numbers, gpu.list(y.rows()))?;
    Ok(dx)
}

//! `softmax` on the device.

use march_engine::Result;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::softmax`].
pub(crate) fn forward(_gpu: &Gpu, _x: &Tensor) -> Result<Tensor> {
    unsupported("softmax")
}

/// See [`march_engine::Engine::softmax_backward`].
pub(crate) fn backward(_gpu: &Gpu, _y: &Tensor, _gradient: &Tensor) -> Result<Tensor> {
    unsupported("softmax_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

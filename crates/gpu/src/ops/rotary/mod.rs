//! `rotary` on the device.

use march_engine::Result;
use march_engine::ops::rotary::Rotary;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::rotary`].
pub(crate) fn forward(_gpu: &Gpu, _x: &Tensor, _rotary: Rotary) -> Result<Tensor> {
    unsupported("rotary")
}

/// See [`march_engine::Engine::rotary_backward`].
pub(crate) fn backward(_gpu: &Gpu, _gradient: &Tensor, _rotary: Rotary) -> Result<Tensor> {
    unsupported("rotary_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

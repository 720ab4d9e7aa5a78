//! `reduce` on the device.

use march_engine::Result;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::sum`].
pub(crate) fn sum(_gpu: &Gpu, _x: &Tensor, _axis: usize) -> Result<Tensor> {
    unsupported("sum")
}

/// See [`march_engine::Engine::mean`].
pub(crate) fn mean(_gpu: &Gpu, _x: &Tensor, _axis: usize) -> Result<Tensor> {
    unsupported("mean")
}

/// See [`march_engine::Engine::expand`].
pub(crate) fn expand(_gpu: &Gpu, _x: &Tensor, _axis: usize, _count: usize) -> Result<Tensor> {
    unsupported("expand")
}

/// See [`march_engine::Engine::sum_to`].
pub(crate) fn sum_to(_gpu: &Gpu, _x: &Tensor, _shape: &[usize]) -> Result<Tensor> {
    unsupported("sum_to")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

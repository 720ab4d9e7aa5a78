//! `linear` on the device.

use march_engine::ops::linear::Linear;
use march_engine::{Result, WeightOf};

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

mod packed;
pub use packed::Packed;

/// See [`march_engine::Engine::linear`].
pub(crate) fn forward(_gpu: &Gpu, _input: Linear<&Tensor, WeightOf<'_, Gpu>>) -> Result<Tensor> {
    unsupported("linear")
}

/// See [`march_engine::Engine::linear_each`].
pub(crate) fn forward_each(_gpu: &Gpu, _x: &Tensor, _weights: &[WeightOf<'_, Gpu>]) -> Result<Vec<Tensor>> {
    unsupported("linear_each")
}

/// See [`march_engine::Engine::linear_backward`].
pub(crate) fn backward(
    _gpu: &Gpu,
    _input: Linear<&Tensor>,
    _gradient: &Tensor,
    _needs: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    unsupported("linear_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

//! `cross_entropy` on the device.

use march_engine::ops::cross_entropy::CrossEntropy;
use march_engine::ops::cross_entropy::LinearCrossEntropy;
use march_engine::ops::cross_entropy::TokenLosses;
use march_engine::{Result, WeightOf};

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::linear_cross_entropy`].
pub(crate) fn forward(
    _gpu: &Gpu,
    _input: LinearCrossEntropy<&Tensor, WeightOf<'_, Gpu>>,
    _targets: &[u32],
    _normaliser: Option<f64>,
    _needs: [bool; 2],
) -> Result<CrossEntropy<Tensor>> {
    unsupported("linear_cross_entropy")
}

/// See [`march_engine::Engine::linear_cross_entropy_backward`].
pub(crate) fn backward(
    _gpu: &Gpu,
    _kept: [Option<Tensor>; 2],
    _gradient: &Tensor,
) -> Result<[Option<Tensor>; 2]> {
    unsupported("linear_cross_entropy_backward")
}

/// See [`march_engine::Engine::token_losses`].
pub(crate) fn token_losses(
    _gpu: &Gpu,
    _x: &Tensor,
    _weight: WeightOf<'_, Gpu>,
    _targets: &[u32],
) -> Result<TokenLosses> {
    unsupported("token_losses")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

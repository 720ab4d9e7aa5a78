//! `state_read` on the device.

use march_engine::Result;
use march_engine::ops::state_read::StateRead;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::state_read`].
pub(crate) fn forward(_gpu: &Gpu, _input: StateRead<&Tensor>, _key_heads: usize) -> Result<Tensor> {
    unsupported("state_read")
}

/// See [`march_engine::Engine::state_read_backward`].
pub(crate) fn backward(
    _gpu: &Gpu,
    _input: StateRead<&Tensor>,
    _key_heads: usize,
    _gradient: &Tensor,
) -> Result<StateRead<Tensor>> {
    unsupported("state_read_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

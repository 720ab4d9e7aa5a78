//! `attention` on the device.

use march_engine::Result;
use march_engine::ops::attention::Attention;
use march_engine::ops::attention::KeyValues;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::attention`].
pub(crate) fn forward(
    _gpu: &Gpu,
    _input: Attention<&Tensor>,
    _heads: usize,
    _keep: bool,
) -> Result<(Tensor, Vec<Tensor>)> {
    unsupported("attention")
}

/// See [`march_engine::Engine::attention_blocks`].
pub(crate) fn forward_blocks(
    _gpu: &Gpu,
    _query: &Tensor,
    _blocks: &[KeyValues<Tensor>],
    _heads: usize,
) -> Result<Tensor> {
    unsupported("attention_blocks")
}

/// See [`march_engine::Engine::attention_backward`].
pub(crate) fn backward(
    _gpu: &Gpu,
    _input: Attention<&Tensor>,
    _heads: usize,
    _saved: &[Tensor],
    _gradient: &Tensor,
) -> Result<Attention<Tensor>> {
    unsupported("attention_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

//! `embedding` on the device.

use march_engine::ops::embedding::Embedding;
use march_engine::{Result, WeightOf};

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::embedding`].
pub(crate) fn forward(_gpu: &Gpu, _input: Embedding<'_, WeightOf<'_, Gpu>>) -> Result<Tensor> {
    unsupported("embedding")
}

/// See [`march_engine::Engine::embedding_backward`].
pub(crate) fn backward(_gpu: &Gpu, _ids: &[u32], _rows: usize, _gradient: &Tensor) -> Result<Tensor> {
    unsupported("embedding_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

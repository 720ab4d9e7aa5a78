//! `anchor_read` on the device.

use std::sync::Arc;

use march_engine::Result;
use march_engine::ops::anchor_read::AnchorRead;
use march_engine::ops::anchor_read::AnchorReadKept;
use march_engine::ops::anchor_read::AnchorReadOptions;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

mod stored;
pub use stored::Stored;

/// See [`march_engine::Engine::anchor_read`].
pub(crate) fn forward(
    _gpu: &Gpu,
    _input: AnchorRead<&Tensor>,
    _options: &AnchorReadOptions,
    _keep: bool,
) -> Result<(Tensor, Option<AnchorReadKept<Tensor>>)> {
    unsupported("anchor_read")
}

/// See [`march_engine::Engine::anchor_read_backward`].
pub(crate) fn backward(
    _gpu: &Gpu,
    _input: AnchorRead<&Tensor>,
    _options: &AnchorReadOptions,
    _readout: &Tensor,
    _kept: Option<&AnchorReadKept<Tensor>>,
    _gradient: &Tensor,
) -> Result<AnchorRead<Tensor>> {
    unsupported("anchor_read_backward")
}

/// See [`march_engine::Engine::anchor_read_stored`].
pub(crate) fn forward_stored(
    _gpu: &Gpu,
    _input: AnchorRead<&Tensor, &[Arc<Stored>]>,
    _options: &AnchorReadOptions,
) -> Result<Tensor> {
    unsupported("anchor_read_stored")
}

/// See [`march_engine::Engine::routing_weights`].
pub(crate) fn weights(
    _gpu: &Gpu,
    _input: AnchorRead<&Tensor, [usize; 2]>,
    _options: &AnchorReadOptions,
) -> Result<Tensor> {
    unsupported("routing_weights")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

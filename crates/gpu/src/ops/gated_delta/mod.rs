//! `gated_delta` on the device.

use march_engine::Result;
use march_engine::ops::gated_delta::GatedDelta;
use march_engine::ops::gated_delta::GatedDeltaGradient;
use march_engine::ops::gated_delta::GatedDeltaOptions;
use march_engine::ops::gated_delta::GatedDeltaOutput;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::gated_delta`].
pub(crate) fn forward(
    _gpu: &Gpu,
    _input: GatedDelta<&Tensor>,
    _options: &GatedDeltaOptions,
    _keep: bool,
) -> Result<(GatedDeltaOutput<Tensor>, Vec<Tensor>)> {
    unsupported("gated_delta")
}

/// See [`march_engine::Engine::gated_delta_backward`].
pub(crate) fn backward(
    _gpu: &Gpu,
    _input: GatedDelta<&Tensor>,
    _options: &GatedDeltaOptions,
    _kept: &[Tensor],
    _gradient: GatedDeltaGradient<&Tensor>,
) -> Result<GatedDelta<Tensor>> {
    unsupported("gated_delta_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

//! `rms_norm` on the device.

use march_engine::Result;
use march_engine::ops::rms_norm::GatedRmsNorm;
use march_engine::ops::rms_norm::RmsNorm;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::rms_norm`].
pub(crate) fn forward(_gpu: &Gpu, _input: RmsNorm<&Tensor>, _eps: f64) -> Result<Tensor> {
    unsupported("rms_norm")
}

/// See [`march_engine::Engine::rms_norm_backward`].
pub(crate) fn backward(
    _gpu: &Gpu,
    _input: RmsNorm<&Tensor>,
    _eps: f64,
    _gradient: &Tensor,
) -> Result<RmsNorm<Tensor>> {
    unsupported("rms_norm_backward")
}

/// See [`march_engine::Engine::gated_rms_norm`].
pub(crate) fn gated_forward(_gpu: &Gpu, _input: GatedRmsNorm<&Tensor>, _eps: f64) -> Result<Tensor> {
    unsupported("gated_rms_norm")
}

/// See [`march_engine::Engine::gated_rms_norm_backward`].
pub(crate) fn gated_backward(
    _gpu: &Gpu,
    _input: GatedRmsNorm<&Tensor>,
    _eps: f64,
    _gradient: &Tensor,
) -> Result<GatedRmsNorm<Tensor>> {
    unsupported("gated_rms_norm_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

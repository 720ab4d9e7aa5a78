//! `adamw` on the device.

use march_engine::Result;
use march_engine::ops::adamw::AdamW;
use march_engine::ops::adamw::Step;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::squared_norm`].
pub(crate) fn squared_norm(_gpu: &Gpu, _tensors: &[&Tensor]) -> Result<f64> {
    unsupported("squared_norm")
}

/// See [`march_engine::Engine::adamw`].
pub(crate) fn step(_gpu: &Gpu, _state: AdamW<&mut Tensor>, _gradient: &Tensor, _step: &Step) -> Result<()> {
    unsupported("adamw")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

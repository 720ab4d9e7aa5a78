//! `short_conv` on the device.

use march_engine::Result;
use march_engine::ops::short_conv::ShortConv;
use march_engine::ops::short_conv::ShortConvGradients;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::short_conv`].
pub(crate) fn forward(_gpu: &Gpu, _input: ShortConv<&Tensor>) -> Result<(Tensor, Tensor)> {
    unsupported("short_conv")
}

/// See [`march_engine::Engine::short_conv_backward`].
pub(crate) fn backward(
    _gpu: &Gpu,
    _input: ShortConv<&Tensor>,
    _gradient: &Tensor,
) -> Result<ShortConvGradients<Tensor>> {
    unsupported("short_conv_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

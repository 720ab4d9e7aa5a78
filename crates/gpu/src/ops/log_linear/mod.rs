//! `log_linear` on the device.

use march_engine::Result;
use march_engine::ops::log_linear::LogLinear;
use march_engine::ops::log_linear::LogLinearOptions;
use march_engine::ops::log_linear::LogLinearOutput;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::log_linear_delta`].
pub(crate) fn forward(
    _gpu: &Gpu,
    _input: LogLinear<&Tensor>,
    _options: &LogLinearOptions,
    _initial: Option<&Tensor>,
    _keep: bool,
) -> Result<LogLinearOutput<Tensor>> {
    unsupported("log_linear_delta")
}

/// See [`march_engine::Engine::log_linear_delta_backward`].
pub(crate) fn backward(
    _gpu: &Gpu,
    _input: LogLinear<&Tensor>,
    _options: &LogLinearOptions,
    _initial: Option<&Tensor>,
    _saved: Option<&Tensor>,
    _gradient: &Tensor,
) -> Result<LogLinear<Tensor>> {
    unsupported("log_linear_delta_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

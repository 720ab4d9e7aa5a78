//! `matmul` on the device.

use march_engine::Result;
use march_engine::ops::matmul::MatMul;
use march_engine::ops::matmul::Transpose;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::matmul`].
pub(crate) fn forward(_gpu: &Gpu, _input: MatMul<&Tensor>, _transpose: Transpose) -> Result<Tensor> {
    unsupported("matmul")
}

/// See [`march_engine::Engine::matmul_backward`].
pub(crate) fn backward(
    _gpu: &Gpu,
    _input: MatMul<&Tensor>,
    _transpose: Transpose,
    _gradient: &Tensor,
    _needs: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    unsupported("matmul_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

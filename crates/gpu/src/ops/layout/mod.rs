//! `layout` on the device.

use std::ops::Range;

use march_engine::Result;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::append`].
pub(crate) fn append(_gpu: &Gpu, _whole: &mut Tensor, _rows: &Tensor, _axis: usize) -> Result<()> {
    unsupported("append")
}

/// See [`march_engine::Engine::slice`].
pub(crate) fn slice(_gpu: &Gpu, _x: &Tensor, _axis: usize, _range: Range<usize>) -> Result<Tensor> {
    unsupported("slice")
}

/// See [`march_engine::Engine::place`].
pub(crate) fn place(_gpu: &Gpu, _x: &Tensor, _axis: usize, _start: usize, _size: usize) -> Result<Tensor> {
    unsupported("place")
}

/// See [`march_engine::Engine::concat`].
pub(crate) fn concat(_gpu: &Gpu, _parts: &[&Tensor], _axis: usize) -> Result<Tensor> {
    unsupported("concat")
}

/// See [`march_engine::Engine::permute`].
pub(crate) fn permute(_gpu: &Gpu, _x: &Tensor, _axes: &[usize]) -> Result<Tensor> {
    unsupported("permute")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

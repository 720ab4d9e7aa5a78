//! `elementwise` on the device.

use march_engine::Result;
use march_engine::ops::elementwise::Map;
use march_engine::ops::elementwise::Zip;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// See [`march_engine::Engine::full`].
pub(crate) fn full(gpu: &Gpu, shape: &[usize], value: f32) -> Result<Tensor> {
    let y = gpu.empty(shape)?;
    gpu.run(&full_kernel(), &[&y], &[y.len() as u32, value.to_bits()], gpu.list(y.len().div_ceil(256)))?;
    Ok(y)
}

fn full_kernel() -> Kernel {
    Kernel {
        name: "full",
        source: include_str!("full.wgsl"),
        entry: "full",
        constants: Vec::new(),
        writes: &[true],
    }
}

/// See [`march_engine::Engine::accumulate`].
pub(crate) fn accumulate(_gpu: &Gpu, _sum: &mut Tensor, _term: &Tensor) -> Result<()> {
    unsupported("accumulate")
}

/// See [`march_engine::Engine::map`].
pub(crate) fn map(_gpu: &Gpu, _kind: Map, _x: &Tensor) -> Result<Tensor> {
    unsupported("map")
}

/// See [`march_engine::Engine::map_backward`].
pub(crate) fn map_backward(
    _gpu: &Gpu,
    _kind: Map,
    _x: &Tensor,
    _y: &Tensor,
    _gradient: &Tensor,
) -> Result<Tensor> {
    unsupported("map_backward")
}

/// See [`march_engine::Engine::zip`].
pub(crate) fn zip(_gpu: &Gpu, _kind: Zip, _a: &Tensor, _b: &Tensor) -> Result<Tensor> {
    unsupported("zip")
}

/// See [`march_engine::Engine::zip_backward`].
pub(crate) fn zip_backward(
    _gpu: &Gpu,
    _kind: Zip,
    _a: &Tensor,
    _b: &Tensor,
    _gradient: &Tensor,
    _needs: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    unsupported("zip_backward")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![full_kernel()]
}

//! `embedding` on the device: rows of a table by ids that the host knows, and their gradient without atomics.

use march_engine::ops::embedding::{Embedding, EmbeddingBackward};
use march_engine::{Result, Tensor};

use crate::array::{GpuArray, array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::elementwise;
use crate::ops::product::Matrix;

/// Columns that a workgroup of the backward pass owns.
const STRIP: usize = 32;

fn forward_kernel(format: u32) -> Kernel {
    Kernel {
        name: "embedding/forward",
        source: include_str!("kernel.wgsl"),
        entry: "forward",
        constants: vec![("FORMAT", format)],
        writes: &[false, false, true],
    }
}

fn backward_kernel() -> Kernel {
    Kernel {
        name: "embedding/backward",
        source: include_str!("backward.wgsl"),
        entry: "backward",
        constants: Vec::new(),
        writes: &[false, false, false, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    let mut all: Vec<Kernel> = (0..3).map(forward_kernel).collect();
    all.push(backward_kernel());
    all
}

pub(crate) fn forward(gpu: &Gpu, op: Embedding, shape: Vec<usize>) -> Result<Tensor> {
    Ok(op.table.like(rows(gpu, Matrix::of(&op.table), &op.ids, &shape)?))
}

/// The rows of `table` with these ids, as an array of the given shape.
pub(crate) fn rows(gpu: &Gpu, table: Matrix<'_>, ids: &[u32], shape: &[usize]) -> Result<GpuArray> {
    let y = gpu.empty(shape)?;
    let ids = gpu.upload_indices(ids)?;
    let numbers = [y.len(), y.width(), table.stride, table.rows].map(|number| number as u32);
    let groups = gpu.list(y.len().div_ceil(256));
    gpu.run(&forward_kernel(table.format), &[table.words, &ids, &y], &numbers, groups)?;
    Ok(y)
}

pub(crate) fn backward(gpu: &Gpu, op: EmbeddingBackward, _: usize) -> Result<Tensor> {
    Ok(op.gradient.like(sums(gpu, &op.ids, op.rows, array(&op.gradient))?))
}

/// The gradient of a table with so many rows: the sums of the gradients of the rows with the same id.
pub(crate) fn sums(gpu: &Gpu, ids: &[u32], rows: usize, gradient: &GpuArray) -> Result<GpuArray> {
    let width = gradient.width();
    let sums = elementwise::full(gpu, &[rows, width], 0.0)?;
    let mut positions: Vec<u32> = (0..ids.len() as u32).collect();
    // A stable sort: the positions of an id stay in order.
    positions.sort_by_key(|&at| ids[at as usize]);
    let mut lists = Vec::new();
    let mut start = 0;
    for same in positions.chunk_by(|&a, &b| ids[a as usize] == ids[b as usize]) {
        let end = start + same.len() as u32;
        lists.extend([ids[same[0] as usize], start, end]);
        start = end;
    }
    let entries = lists.len() / 3;
    let strips = width.div_ceil(STRIP);
    let numbers = [entries, width, strips].map(|number| number as u32);
    let (lists, positions) = (gpu.upload_indices(&lists)?, gpu.upload_indices(&positions)?);
    let groups = gpu.list(entries * strips);
    gpu.run(&backward_kernel(), &[&lists, &positions, gradient, &sums], &numbers, groups)?;
    Ok(sums)
}

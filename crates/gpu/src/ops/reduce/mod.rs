//! `reduce` on the device: sums and means over dimensions, and repetition along a new one.

use march_engine::ops::layout::AxisView;
use march_engine::ops::reduce::{Expand, Mean, Sum, SumTo};
use march_engine::{Result, Tensor};

use super::elementwise::{broadcast::dims, full};
use crate::array::{GpuArray, array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Numbers that a workgroup of the elementwise kernels owns.
const GROUP: usize = 256;

/// Below this number of neighbouring sums, a workgroup takes one sum instead of an invocation.
const COLUMNS: usize = 16;

fn sum_kernel(columns: bool) -> Kernel {
    Kernel {
        name: if columns { "sum/columns" } else { "sum/rows" },
        source: include_str!("kernel.wgsl"),
        entry: if columns { "columns" } else { "rows" },
        constants: Vec::new(),
        writes: &[false, true],
    }
}

fn expand_kernel() -> Kernel {
    Kernel {
        name: "expand",
        source: include_str!("expand.wgsl"),
        entry: "expand",
        constants: Vec::new(),
        writes: &[false, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![sum_kernel(true), sum_kernel(false), expand_kernel()]
}

/// y[o, i] = factor Σ_n x[o, n, i], with y of the given shape. A sum of many terms is made in parts, whose sums are
/// added in a further turn.
fn sums(
    gpu: &Gpu,
    x: &GpuArray,
    [outer, size, inner]: [usize; 3],
    factor: f32,
    y: &[usize],
) -> Result<GpuArray> {
    let columns = inner >= COLUMNS;
    let limit = if columns { 256 } else { 4096 };
    if size == 0 || outer * inner == 0 {
        return full(gpu, y, 0.0);
    }
    // About as many terms in each part as there are parts, so that two turns take the least time.
    let per_part = match (size <= limit, columns) {
        (true, _) => size,
        (false, true) => limit.min((size as f64).sqrt().ceil() as usize),
        (false, false) => limit,
    };
    let parts = size.div_ceil(per_part);
    let last = parts == 1;
    let found = gpu.empty(if last { y.to_vec() } else { vec![outer, parts, inner] }.as_slice())?;
    let count = outer * parts * inner;
    let groups = gpu.list(if columns { count.div_ceil(GROUP) } else { count });
    let factor_now = if last { factor } else { 1.0 };
    let [o, s, i, p, per] = [outer, size, inner, parts, per_part].map(|n| n as u32);
    gpu.run(&sum_kernel(columns), &[x, &found], &[o, s, i, p, per, factor_now.to_bits()], groups)?;
    if last { Ok(found) } else { sums(gpu, &found, [outer, parts, inner], factor, y) }
}

/// The sizes before `axis`, at it, and after it.
fn around(shape: &[usize], axis: usize) -> [usize; 3] {
    [shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product()]
}

/// The sum of rows [n, ..] over n.
pub(crate) fn sum_of_rows(gpu: &Gpu, x: &GpuArray) -> Result<GpuArray> {
    sums(gpu, x, around(x.shape(), 0), 1.0, &x.shape()[1..])
}

pub(crate) fn sum(gpu: &Gpu, op: Sum, (shape, z): (Vec<usize>, AxisView)) -> Result<Tensor> {
    Ok(op.x.like(sums(gpu, array(&op.x), [z.outer, z.size, z.inner], 1.0, &shape)?))
}

pub(crate) fn mean(gpu: &Gpu, op: Mean, (shape, z): (Vec<usize>, AxisView)) -> Result<Tensor> {
    let factor = 1.0 / z.size as f32;
    Ok(op.x.like(sums(gpu, array(&op.x), [z.outer, z.size, z.inner], factor, &shape)?))
}

pub(crate) fn expand(gpu: &Gpu, op: Expand, (shape, z): (Vec<usize>, AxisView)) -> Result<Tensor> {
    let (x, count) = (array(&op.x), op.count);
    if count == 1 {
        return Ok(op.x.like(x.reshaped(&shape)));
    }
    let y = gpu.empty(&shape)?;
    let call = [y.len(), count, z.inner].map(|n| n as u32);
    gpu.run(&expand_kernel(), &[x, &y], &call, gpu.list(y.len().div_ceil(GROUP)))?;
    Ok(op.x.like(y))
}

pub(crate) fn sum_to(gpu: &Gpu, op: SumTo, (): ()) -> Result<Tensor> {
    Ok(op.x.like(summed_to(gpu, array(&op.x), &op.shape)?))
}

/// The sum of x over the dimensions along which `shape` was repeated.
pub(crate) fn summed_to(gpu: &Gpu, x: &GpuArray, shape: &[usize]) -> Result<GpuArray> {
    if x.len() == shape.iter().product::<usize>() {
        return Ok(x.reshaped(shape));
    }
    // Neighbouring dimensions that are all summed or all kept count as one; the last is summed first.
    let dims = dims(x.shape(), x.shape(), shape);
    let mut sizes: Vec<usize> = dims.iter().map(|d| d.size).collect();
    let mut rest = x.clone();
    for axis in (0..dims.len()).rev().filter(|&i| dims[i].b == 0) {
        let sizes_now = sizes.clone();
        sizes.remove(axis);
        rest = sums(gpu, &rest, around(&sizes_now, axis), 1.0, &sizes)?;
    }
    Ok(rest.reshaped(shape))
}

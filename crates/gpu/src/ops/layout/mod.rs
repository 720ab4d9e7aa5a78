//! `layout` on the device: what is contiguous on both sides is copied, everything else is one dispatch.

use march_engine::ops::accumulate::Append;
use march_engine::ops::layout::{AxisView, Concat, Permute, Place, Reshape, Slice};
use march_engine::{Result, Tensor};

use super::elementwise::broadcast::{Dim, numbers};
use crate::array::{GpuArray, array, arrays, into_array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Numbers that a workgroup owns.
const GROUP: usize = 256;

/// Tensors that one dispatch of `concat` joins, at the most.
const PARTS: usize = 8;

fn kernel(name: &'static str) -> Kernel {
    Kernel {
        name,
        source: include_str!("kernel.wgsl"),
        entry: name,
        constants: Vec::new(),
        writes: &[false, true],
    }
}

fn concat_kernel() -> Kernel {
    Kernel {
        name: "concat",
        source: include_str!("concat.wgsl"),
        entry: "concat",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, false, false, false, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![kernel("slice"), kernel("place"), kernel("permute"), concat_kernel()]
}

/// `shape` with the size of dimension `axis` replaced.
fn resized(shape: &[usize], axis: usize, size: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape[axis] = size;
    shape
}

/// The numbers of a call without dimensions.
fn call(head: [usize; 4]) -> [u32; 4] {
    head.map(|n| n as u32)
}

/// Only dimensions of size one come before the axis, so the rows go behind the numbers that are there. A decoded token
/// appends one row: the buffer grows by doubling, and most calls are one copy.
pub(crate) fn append(gpu: &Gpu, op: Append, shape: Vec<usize>) -> Result<Tensor> {
    let (mut whole, rows) = (into_array(op.whole), array(&op.rows));
    let (old, new) = (whole.len(), rows.len());
    if new > 0 && (!whole.is_unique() || whole.capacity() < old + new) {
        let limits = gpu.limits();
        let largest = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size) / 4;
        let room = (2 * old).min(largest as usize).max(old + new);
        let grown = gpu.empty(&[room])?.reshaped(&shape);
        gpu.copy(&whole, 0, &grown, 0, old);
        whole = grown;
    }
    gpu.copy(rows, 0, &whole, old, new);
    whole.reshape(&shape);
    Ok(op.rows.like(whole))
}

pub(crate) fn slice(gpu: &Gpu, op: Slice, AxisView { outer, size, inner }: AxisView) -> Result<Tensor> {
    let (x, range) = (array(&op.x), op.range);
    if range.len() == size {
        return Ok(op.x);
    }
    let y = gpu.empty(&resized(x.shape(), op.axis, range.len()))?;
    if outer == 1 {
        gpu.copy(x, range.start * inner, &y, 0, y.len());
        return Ok(op.x.like(y));
    }
    let call = call([y.len(), range.len() * inner, size * inner, range.start * inner]);
    gpu.run(&kernel("slice"), &[x, &y], &call, gpu.list(y.len().div_ceil(GROUP)))?;
    Ok(op.x.like(y))
}

pub(crate) fn place(gpu: &Gpu, op: Place, AxisView { size, inner, .. }: AxisView) -> Result<Tensor> {
    let x = array(&op.x);
    let had = x.shape()[op.axis];
    if size == had {
        return Ok(op.x);
    }
    let y = gpu.empty(&resized(x.shape(), op.axis, size))?;
    let call = call([y.len(), had * inner, size * inner, op.start * inner]);
    gpu.run(&kernel("place"), &[x, &y], &call, gpu.list(y.len().div_ceil(GROUP)))?;
    Ok(op.x.like(y))
}

pub(crate) fn reshape(_: &Gpu, op: Reshape, (): ()) -> Result<Tensor> {
    Ok(op.x.like(array(&op.x).reshaped(&op.shape)))
}

pub(crate) fn concat(gpu: &Gpu, op: Concat, shape: Vec<usize>) -> Result<Tensor> {
    let (parts, axis) = (arrays(&op.parts), op.axis);
    Ok(op.parts[0].like(joined(gpu, &parts, axis, &shape)?))
}

/// Arrays one after the other along a dimension, with a result of the given shape.
fn joined(gpu: &Gpu, parts: &[&GpuArray], axis: usize, shape: &[usize]) -> Result<GpuArray> {
    let filled: Vec<&GpuArray> = parts.iter().copied().filter(|part| part.len() > 0).collect();
    match filled[..] {
        [] => return gpu.empty(shape),
        [only] => return Ok(only.reshaped(shape)),
        _ => {}
    }
    let AxisView { outer, size, inner } = AxisView::new("concat", shape, axis)?;
    let y = gpu.empty(shape)?;
    let mut start = 0;
    for some in filled.chunks(PARTS) {
        let mut len = 0;
        let mut ends = [0; PARTS];
        for (i, end) in ends.iter_mut().enumerate() {
            len += some.get(i).map_or(0, |part| part.shape()[axis] * inner);
            *end = len as u32;
        }
        let mut bound = some.to_vec();
        bound.resize(PARTS, some[0]);
        bound.push(&y);
        let numbers = [&call([outer * len, len, size * inner, start])[..], &ends].concat();
        gpu.run(&concat_kernel(), &bound, &numbers, gpu.list((outer * len).div_ceil(GROUP)))?;
        start += len;
    }
    Ok(y)
}

pub(crate) fn permute(gpu: &Gpu, op: Permute, shape: Vec<usize>) -> Result<Tensor> {
    let x = array(&op.x);
    // Dimensions that stay neighbours count as one.
    let mut dims: Vec<Dim> = Vec::new();
    for (&axis, &size) in op.axes.iter().zip(&shape).rev() {
        let stride = x.shape()[axis + 1..].iter().product();
        match dims.last_mut() {
            _ if size == 1 => {}
            Some(last) if stride == last.a * last.size => last.size *= size,
            _ => dims.push(Dim { size, a: stride, b: 0 }),
        }
    }
    dims.reverse();
    if dims.len() <= 1 || x.len() == 0 {
        return Ok(op.x.like(x.reshaped(&shape)));
    }
    let Some(call) = numbers([x.len(), dims.len(), 0, 0], &dims) else {
        return gpu.unsupported("permute of more than six dimensions");
    };
    let y = gpu.empty(&shape)?;
    gpu.run(&kernel("permute"), &[x, &y], &call, gpu.list(y.len().div_ceil(GROUP)))?;
    Ok(op.x.like(y))
}

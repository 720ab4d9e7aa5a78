//! `layout` on the device: what is contiguous on both sides is copied, everything else is one dispatch.

use std::ops::Range;

use march_engine::Result;

use super::elementwise::broadcast::{Dim, numbers};
use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

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

/// The sizes before `axis`, at it, and after it.
fn around(shape: &[usize], axis: usize) -> [usize; 3] {
    [shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product()]
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

/// See [`march_engine::Engine::append`]. Only dimensions of size one come before `axis`, so the rows go behind the
/// numbers that are there. A decoded token appends one row: the buffer grows by doubling, and most calls are one copy.
pub(crate) fn append(gpu: &Gpu, whole: &mut Tensor, rows: &Tensor, axis: usize) -> Result<()> {
    let shape = resized(whole.shape(), axis, whole.shape()[axis] + rows.shape()[axis]);
    let (old, new) = (whole.len(), rows.len());
    if new == 0 {
        *whole = whole.reshaped(&shape);
        return Ok(());
    }
    if !whole.is_unique() || whole.capacity() < old + new {
        let limits = gpu.limits();
        let largest = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size) / 4;
        let room = (2 * old).min(largest as usize).max(old + new);
        let grown = gpu.empty(&[room])?.reshaped(&shape);
        gpu.copy(whole, 0, &grown, 0, old);
        gpu.copy(rows, 0, &grown, old, new);
        *whole = grown;
        return Ok(());
    }
    gpu.copy(rows, 0, whole, old, new);
    whole.reshape(&shape);
    Ok(())
}

/// See [`march_engine::Engine::slice`].
pub(crate) fn slice(gpu: &Gpu, x: &Tensor, axis: usize, range: Range<usize>) -> Result<Tensor> {
    let [outer, size, inner] = around(x.shape(), axis);
    let shape = resized(x.shape(), axis, range.len());
    if range.len() == size {
        return Ok(x.clone());
    }
    let y = gpu.empty(&shape)?;
    if outer == 1 {
        gpu.copy(x, range.start * inner, &y, 0, y.len());
        return Ok(y);
    }
    let call = call([y.len(), range.len() * inner, size * inner, range.start * inner]);
    gpu.run(&kernel("slice"), &[x, &y], &call, gpu.list(y.len().div_ceil(GROUP)))?;
    Ok(y)
}

/// See [`march_engine::Engine::place`].
pub(crate) fn place(gpu: &Gpu, x: &Tensor, axis: usize, start: usize, size: usize) -> Result<Tensor> {
    let [_, had, inner] = around(x.shape(), axis);
    if size == had {
        return Ok(x.clone());
    }
    let y = gpu.empty(&resized(x.shape(), axis, size))?;
    let call = call([y.len(), had * inner, size * inner, start * inner]);
    gpu.run(&kernel("place"), &[x, &y], &call, gpu.list(y.len().div_ceil(GROUP)))?;
    Ok(y)
}

/// See [`march_engine::Engine::concat`].
pub(crate) fn concat(gpu: &Gpu, parts: &[&Tensor], axis: usize) -> Result<Tensor> {
    let first = parts[0];
    let size: usize = parts.iter().map(|part| part.shape()[axis]).sum();
    let shape = resized(first.shape(), axis, size);
    let filled: Vec<&Tensor> = parts.iter().copied().filter(|part| part.len() > 0).collect();
    match filled[..] {
        [] => return gpu.empty(&shape),
        [only] => return Ok(only.reshaped(&shape)),
        _ => {}
    }
    let [outer, _, inner] = around(&shape, axis);
    let y = gpu.empty(&shape)?;
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

/// See [`march_engine::Engine::permute`].
pub(crate) fn permute(gpu: &Gpu, x: &Tensor, axes: &[usize]) -> Result<Tensor> {
    let shape: Vec<usize> = axes.iter().map(|&axis| x.shape()[axis]).collect();
    // Dimensions that stay neighbours count as one.
    let mut dims: Vec<Dim> = Vec::new();
    for (&axis, &size) in axes.iter().zip(&shape).rev() {
        let stride = x.shape()[axis + 1..].iter().product();
        match dims.last_mut() {
            _ if size == 1 => {}
            Some(last) if stride == last.a * last.size => last.size *= size,
            _ => dims.push(Dim { size, a: stride, b: 0 }),
        }
    }
    dims.reverse();
    if dims.len() <= 1 || x.len() == 0 {
        return Ok(x.reshaped(&shape));
    }
    let Some(call) = numbers([x.len(), dims.len(), 0, 0], &dims) else {
        return unsupported("permute");
    };
    let y = gpu.empty(&shape)?;
    gpu.run(&kernel("permute"), &[x, &y], &call, gpu.list(y.len().div_ceil(GROUP)))?;
    Ok(y)
}

//! `elementwise` on the device: functions of one tensor, or of two that broadcast, and sums in place.

pub(crate) mod broadcast;

use march_engine::ops::accumulate::Accumulate;
use march_engine::ops::elementwise::{Map, MapBackward, MapForward, Zip, ZipBackward, ZipForward};
use march_engine::{Result, Tensor};

use self::broadcast::{Dim, dims, numbers};
use super::reduce;
use crate::array::{GpuArray, array, into_array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Numbers that a workgroup owns.
const GROUP: usize = 256;

/// A new array filled with `value`.
pub(crate) fn full(gpu: &Gpu, shape: &[usize], value: f32) -> Result<GpuArray> {
    let y = gpu.empty(shape)?;
    gpu.run(&full_kernel(), &[&y], &[y.len() as u32, value.to_bits()], gpu.list(y.len().div_ceil(GROUP)))?;
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

/// Kernel of map.wgsl, which binds x, dy and y.
fn map_kernel(name: &'static str, entry: &'static str) -> Kernel {
    let source = include_str!("map.wgsl");
    Kernel { name, source, entry, constants: Vec::new(), writes: &[false, false, true] }
}

fn map_forward_kernel() -> Kernel {
    map_kernel("map/forward", "forward")
}

fn map_backward_kernel() -> Kernel {
    map_kernel("map/backward", "backward")
}

fn accumulate_kernel() -> Kernel {
    map_kernel("accumulate", "add_to")
}

/// Kernel of zip.wgsl, which binds a, b, dy and one or two results.
fn zip_kernel(name: &'static str, entry: &'static str, writes: &'static [bool]) -> Kernel {
    Kernel { name, source: include_str!("zip.wgsl"), entry, constants: Vec::new(), writes }
}

fn zip_forward_kernel() -> Kernel {
    zip_kernel("zip/forward", "forward", &[false, false, false, true])
}

fn zip_one_kernel() -> Kernel {
    zip_kernel("zip/backward", "one", &[false, false, false, true])
}

fn zip_both_kernel() -> Kernel {
    zip_kernel("zip/backward_both", "both", &[false, false, false, true, true])
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![
        full_kernel(),
        map_forward_kernel(),
        map_backward_kernel(),
        accumulate_kernel(),
        zip_forward_kernel(),
        zip_one_kernel(),
        zip_both_kernel(),
    ]
}

pub(crate) fn accumulate(gpu: &Gpu, op: Accumulate, (): ()) -> Result<Tensor> {
    let mut sum = into_array(op.sum);
    add(gpu, &mut sum, array(&op.term))?;
    Ok(op.term.like(sum))
}

/// sum += term, in place if no other array shares the buffer of `sum`.
pub(crate) fn add(gpu: &Gpu, sum: &mut GpuArray, term: &GpuArray) -> Result<()> {
    if !sum.is_unique() {
        *sum = zip_arrays(gpu, Zip::Add, [sum, term], term.shape())?;
        return Ok(());
    }
    add_to(gpu, sum, term)
}

/// sum += term, in the buffer of `sum`.
pub(crate) fn add_to(gpu: &Gpu, sum: &GpuArray, term: &GpuArray) -> Result<()> {
    let groups = gpu.list(sum.len().div_ceil(GROUP));
    gpu.run(&accumulate_kernel(), &[term, term, sum], &[sum.len() as u32, 0, 0], groups)
}

/// The array of a tensor that may be changed: itself if no other tensor shares it, otherwise a copy.
pub(crate) fn writable(gpu: &Gpu, tensor: Tensor) -> Result<GpuArray> {
    let there = into_array(tensor);
    if there.is_unique() { Ok(there) } else { copied(gpu, &there) }
}

/// A copy in a buffer of its own.
pub(crate) fn copied(gpu: &Gpu, array: &GpuArray) -> Result<GpuArray> {
    let copy = gpu.empty(array.shape())?;
    gpu.copy(array, 0, &copy, 0, copy.len());
    Ok(copy)
}

/// An array for the gradient of x that may be changed: with the numbers of the one that is there, or with any.
pub(crate) fn room_for(gpu: &Gpu, x: &GpuArray, there: Option<Tensor>) -> Result<GpuArray> {
    there.map_or_else(|| gpu.empty(x.shape()), |there| writable(gpu, there))
}

/// Number of a kind in map.wgsl, and its constant.
fn kind_number(kind: Map) -> (u32, f32) {
    match kind {
        Map::Neg => (0, 0.0),
        Map::Exp => (1, 0.0),
        Map::Ln => (2, 0.0),
        Map::Sigmoid => (3, 0.0),
        Map::Silu => (4, 0.0),
        Map::Tanh => (5, 0.0),
        Map::Relu => (6, 0.0),
        Map::Softplus => (7, 0.0),
        Map::Square => (8, 0.0),
        Map::Sqrt => (9, 0.0),
        Map::Reciprocal => (10, 0.0),
        Map::Scale(c) => (11, c as f32),
        Map::Shift(c) => (12, c as f32),
    }
}

pub(crate) fn map(gpu: &Gpu, op: MapForward, (): ()) -> Result<Tensor> {
    let x = array(&op.x);
    let y = gpu.empty(x.shape())?;
    let (number, c) = kind_number(op.kind);
    let groups = gpu.list(y.len().div_ceil(GROUP));
    gpu.run(&map_forward_kernel(), &[x, x, &y], &[y.len() as u32, number, c.to_bits()], groups)?;
    Ok(op.x.like(y))
}

pub(crate) fn map_backward(gpu: &Gpu, op: MapBackward, (): ()) -> Result<Tensor> {
    if matches!(op.kind, Map::Shift(_)) {
        return Ok(op.gradient);
    }
    let dx = gpu.empty(op.gradient.shape())?;
    let (number, c) = kind_number(op.kind);
    let groups = gpu.list(dx.len().div_ceil(GROUP));
    let call = [dx.len() as u32, number, c.to_bits()];
    gpu.run(&map_backward_kernel(), &[array(&op.kept), array(&op.gradient), &dx], &call, groups)?;
    Ok(op.gradient.like(dx))
}

/// The numbers of a call of zip.wgsl.
fn zip_numbers(gpu: &Gpu, kind: Zip, dims: &[Dim], count: usize, operand: usize) -> Result<Vec<u32>> {
    let kind = match kind {
        Zip::Add => 0,
        Zip::Sub => 1,
        Zip::Mul => 2,
        Zip::Div => 3,
    };
    match numbers([count, kind, dims.len(), operand], dims) {
        Some(numbers) => Ok(numbers),
        None => gpu.unsupported("zip of more than six dimensions"),
    }
}

pub(crate) fn zip(gpu: &Gpu, op: ZipForward, shape: Vec<usize>) -> Result<Tensor> {
    Ok(op.a.like(zip_arrays(gpu, op.kind, [array(&op.a), array(&op.b)], &shape)?))
}

/// A result of the given shape, to which both operands broadcast.
pub(crate) fn zip_arrays(gpu: &Gpu, kind: Zip, [a, b]: [&GpuArray; 2], shape: &[usize]) -> Result<GpuArray> {
    let y = gpu.empty(shape)?;
    let call = zip_numbers(gpu, kind, &dims(shape, a.shape(), b.shape()), y.len(), 0)?;
    gpu.run(&zip_forward_kernel(), &[a, b, a, &y], &call, gpu.list(y.len().div_ceil(GROUP)))?;
    Ok(y)
}

pub(crate) fn zip_backward(gpu: &Gpu, op: ZipBackward, (): ()) -> Result<[Option<Tensor>; 2]> {
    let ZipBackward { kind, needs, .. } = op;
    let operands @ [a, b] = [array(&op.a), array(&op.b)];
    let gradient = array(&op.gradient);
    let shape = gradient.shape();
    let dims = dims(shape, a.shape(), b.shape());
    let groups = gpu.list(gradient.len().div_ceil(GROUP));
    // The gradient of a term with sign +1 is dy itself: no kernel has to compute it.
    let passes = [matches!(kind, Zip::Add | Zip::Sub), kind == Zip::Add];
    let mut whole: [Option<GpuArray>; 2] = [None, None];
    if needs == [true; 2] && passes == [false; 2] {
        let call = zip_numbers(gpu, kind, &dims, gradient.len(), 0)?;
        let (da, db) = (gpu.empty(shape)?, gpu.empty(shape)?);
        gpu.run(&zip_both_kernel(), &[a, b, gradient, &da, &db], &call, groups)?;
        whole = [Some(da), Some(db)];
    } else {
        for i in (0..2).filter(|&i| needs[i]) {
            if passes[i] {
                whole[i] = Some(gradient.clone());
                continue;
            }
            let call = zip_numbers(gpu, kind, &dims, gradient.len(), i)?;
            let d = gpu.empty(shape)?;
            gpu.run(&zip_one_kernel(), &[a, b, gradient, &d], &call, groups)?;
            whole[i] = Some(d);
        }
    }
    let mut found = [None, None];
    for (i, d) in whole.into_iter().enumerate() {
        if let Some(d) = d {
            found[i] = Some(op.gradient.like(reduce::summed_to(gpu, &d, operands[i].shape())?));
        }
    }
    Ok(found)
}

//! Optimised layout operations: contiguous runs are copied, split over threads. A permutation first merges
//! dimensions that stay adjacent. If the last dimension stays last, it copies runs; otherwise it transposes blocks
//! of 64×64, so that whole cache lines are read and written. Reshaping copies nothing.

use super::{AxisView, Concat, Permute, Place, Reshape, Slice, resized};
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::simd::{self, Kernel, LANES, Simd};
use crate::tensor::Tensor;

pub(crate) fn slice(cpu: &Cpu, op: Slice, around: AxisView) -> Result<Tensor> {
    let (x, axis, range) = (op.x.f32(), op.axis, op.range.clone());
    let AxisView { outer, size, inner } = around;
    let shape = resized(x.shape(), axis, range.len());
    if shape == x.shape() {
        return Ok(op.x.like(x.clone()));
    }
    let mut y = cpu.uninit(&shape);
    let len = range.len() * inner;
    let from = Runs { start: range.start * inner, step: size * inner };
    copy(cpu, outer, len, x.data(), from, &Shared::new(y.data_mut()), Runs { start: 0, step: len });
    Ok(op.x.like(y))
}

pub(crate) fn place(cpu: &Cpu, op: Place, around: AxisView) -> Result<Tensor> {
    let (x, axis, start, size) = (op.x.f32(), op.axis, op.start, op.size);
    let AxisView { outer, inner, .. } = around;
    if size == x.shape()[axis] {
        return Ok(op.x.like(x.clone()));
    }
    let mut y = cpu.zeros(&resized(x.shape(), axis, size));
    let len = x.shape()[axis] * inner;
    let to = Runs { start: start * inner, step: size * inner };
    copy(cpu, outer, len, x.data(), Runs { start: 0, step: len }, &Shared::new(y.data_mut()), to);
    Ok(op.x.like(y))
}

pub(crate) fn concat(cpu: &Cpu, op: Concat, shape: Vec<usize>) -> Result<Tensor> {
    let AxisView { outer, size, inner } = AxisView::new("concat", &shape, op.axis)?;
    let mut y = cpu.uninit(&shape);
    let out = Shared::new(y.data_mut());
    let mut start = 0;
    for part in &op.parts {
        let len = part.shape()[op.axis] * inner;
        let (from, to) = (Runs { start: 0, step: len }, Runs { start, step: size * inner });
        copy(cpu, outer, len, part.f32().data(), from, &out, to);
        start += len;
    }
    Ok(op.parts[0].like(y))
}

/// Positions of contiguous runs: run i starts at `start + i·step`.
#[derive(Clone, Copy)]
struct Runs {
    start: usize,
    step: usize,
}

/// Copies `count` runs of `len` elements.
#[allow(unsafe_code)]
fn copy(cpu: &Cpu, count: usize, len: usize, x: &[f32], from: Runs, y: &Shared<'_>, to: Runs) {
    if len == 0 {
        return;
    }
    cpu.for_rows(cpu.row_parts(count * len, 1), |_, range| {
        let mut at = range.start;
        while at < range.end {
            let (run, skip) = (at / len, at % len);
            let n = (len - skip).min(range.end - at);
            // SAFETY: the runs are disjoint, and the parts are disjoint ranges within them.
            let y = unsafe { y.part(to.start + run * to.step + skip, n) };
            y.copy_from_slice(&x[from.start + run * from.step + skip..][..n]);
            at += n;
        }
    });
}

pub(crate) fn reshape(_: &Cpu, op: Reshape, (): ()) -> Result<Tensor> {
    Ok(op.x.like(op.x.f32().with_shape(&op.shape)))
}

/// Dimension of the result: its size, and its strides in x and y.
#[derive(Clone, Copy)]
struct Dim {
    size: usize,
    x: usize,
    y: usize,
}

pub(crate) fn permute(cpu: &Cpu, op: Permute, shape: Vec<usize>) -> Result<Tensor> {
    let x = op.x.f32();
    let mut dims: Vec<Dim> = Vec::new();
    let mut step = 1;
    for (&axis, &size) in op.axes.iter().zip(&shape).rev() {
        let dim = Dim { size, x: x.shape()[axis + 1..].iter().product(), y: step };
        step *= size;
        match dims.last_mut() {
            _ if size == 1 => {}
            Some(last) if dim.x == last.x * last.size => last.size *= size,
            _ => dims.push(dim),
        }
    }
    dims.reverse();
    if dims.len() <= 1 || x.is_empty() {
        return Ok(op.x.like(x.with_shape(&shape)));
    }
    let mut y = cpu.uninit(&shape);
    let out = Shared::new(y.data_mut());
    // One dimension has stride 1 in x: rows of x run along it, rows of y along the last dimension.
    match dims.iter().position(|d| d.x == 1) {
        Some(row) if row + 1 < dims.len() => {
            let row = dims.remove(row);
            blocks(cpu, &dims, row, x.data(), &out);
        }
        _ => runs(cpu, &dims, x.data(), &out),
    }
    Ok(op.x.like(y))
}

/// Offsets in x and y at index `at` of the iteration over `dims`.
#[inline(always)]
fn offsets(dims: &[Dim], mut at: usize) -> [usize; 2] {
    let mut found = [0, 0];
    for dim in dims.iter().rev() {
        found[0] += at % dim.size * dim.x;
        found[1] += at % dim.size * dim.y;
        at /= dim.size;
    }
    found
}

/// Permutation in which the last dimension of y is the last of x.
#[allow(unsafe_code)]
fn runs(cpu: &Cpu, dims: &[Dim], x: &[f32], y: &Shared<'_>) {
    let Some((last, outer)) = dims.split_last() else { return };
    let count = outer.iter().map(|d| d.size).product();
    cpu.for_rows(cpu.row_parts(count, last.size), |_, range| {
        for at in range {
            let from = offsets(outer, at)[0];
            // SAFETY: each run of y is written once.
            let y = unsafe { y.part(at * last.size, last.size) };
            y.copy_from_slice(&x[from..][..last.size]);
        }
    });
}

/// Permutation in which the last of `dims` is the last dimension of y, and `row` the last of x.
fn blocks(cpu: &Cpu, dims: &[Dim], row: Dim, x: &[f32], y: &Shared<'_>) {
    let Some((&last, outer)) = dims.split_last() else { return };
    let count: usize = outer.iter().map(|d| d.size).product();
    let strips = row.size.div_ceil(STRIP);
    cpu.for_rows(cpu.row_parts(count * strips, STRIP * last.size), |_, range| {
        for task in range {
            let [from, to] = offsets(outer, task / strips);
            let first = task % strips * STRIP;
            let rows = STRIP.min(row.size - first);
            cpu.level().run(Strip {
                last,
                rows,
                step: row.y,
                x: &x[from + first..],
                y,
                to: to + first * row.y,
            });
        }
    });
}

/// Rows and columns of y per block.
const STRIP: usize = 64;

/// y[to + r·step + c] = x[r + c·last.x], r < rows ≤ 64, c < last.size.
struct Strip<'a> {
    last: Dim,
    rows: usize,
    step: usize,
    x: &'a [f32],
    y: &'a Shared<'a>,
    to: usize,
}

impl Kernel for Strip<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { last, rows, step, x, y, to } = self;
        let mut block = [0.0; STRIP * STRIP];
        for c in (0..last.size).step_by(STRIP) {
            let columns = STRIP.min(last.size - c);
            let x = &x[c * last.x..];
            let whole = [columns / LANES * LANES, rows / LANES * LANES];
            simd::transpose(s, whole[0], whole[1], x, last.x, &mut block, STRIP);
            for j in 0..columns {
                let done = if j < whole[0] { whole[1] } else { 0 };
                for r in done..rows {
                    block[r * STRIP + j] = x[j * last.x + r];
                }
            }
            for r in 0..rows {
                // SAFETY: each element of y is written once, by one task.
                let y = unsafe { y.part(to + r * step + c, columns) };
                y.copy_from_slice(&block[r * STRIP..][..columns]);
            }
        }
    }
}

//! Optimised reductions. A long sum is split into parts, each part is summed separately, and the parts are added in
//! order. The split depends only on the summed dimension and the dimensions inside it, not on the number of threads
//! or of such sums, so results are reproducible. Sums of contiguous elements use four vector accumulators.

use super::{Expand, Mean, Sum, SumTo};
use crate::array::Array;
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::ops::elementwise::broadcast::dims;
use crate::ops::layout::AxisView;
use crate::simd::{self, Kernel, LANES, Simd};
use crate::tensor::Tensor;

pub(crate) fn sum(cpu: &Cpu, op: Sum, (shape, around): (Vec<usize>, AxisView)) -> Result<Tensor> {
    let mut y = cpu.uninit(&shape);
    sums(cpu, op.x.f32().data(), around, 1.0, y.data_mut());
    Ok(op.x.like(y))
}

pub(crate) fn mean(cpu: &Cpu, op: Mean, (shape, around): (Vec<usize>, AxisView)) -> Result<Tensor> {
    let mut y = cpu.uninit(&shape);
    sums(cpu, op.x.f32().data(), around, 1.0 / around.size as f32, y.data_mut());
    Ok(op.x.like(y))
}

pub(crate) fn sum_to(cpu: &Cpu, op: SumTo, (): ()) -> Result<Tensor> {
    Ok(op.x.like(sum_over(cpu, op.x.f32(), &op.shape)))
}

/// Sum over the dimensions along which broadcasting `shape` to x's shape repeats elements.
pub(crate) fn sum_over(cpu: &Cpu, x: &Array<f32>, shape: &[usize]) -> Array<f32> {
    if x.len() == shape.iter().product::<usize>() {
        return x.with_shape(shape);
    }
    // Adjacent dimensions that are all summed or all kept are merged; sum them starting from the last.
    let dims = dims(x.shape(), x.shape(), shape);
    let mut sizes: Vec<usize> = dims.iter().map(|d| d.size).collect();
    let mut rest = x.clone();
    for axis in (0..dims.len()).rev().filter(|&i| dims[i].b == 0) {
        let inner = sizes[axis + 1..].iter().product();
        let size = sizes.remove(axis);
        let around = AxisView { outer: sizes[..axis].iter().product(), size, inner };
        let mut y = cpu.uninit(&sizes);
        sums(cpu, rest.data(), around, 1.0, y.data_mut());
        rest = y;
    }
    rest.with_shape(shape)
}

/// y[o, i] = factor Σ_n x[o, n, i]
#[allow(unsafe_code)]
fn sums(cpu: &Cpu, x: &[f32], around: AxisView, factor: f32, y: &mut [f32]) {
    const PART: usize = 16 * 1024;
    let AxisView { outer, size, inner } = around;
    if size == 0 || y.is_empty() {
        y.fill(0.0);
        return;
    }
    let per_part = (PART / inner).max(size.div_ceil(64)).max(1);
    let parts = size.div_ceil(per_part);
    let mut partial = if parts > 1 { cpu.uninit(&[outer, parts, inner]) } else { cpu.uninit(&[0]) };
    {
        let out = Shared::new(if parts > 1 { partial.data_mut() } else { &mut *y });
        cpu.for_rows(cpu.row_parts(outer * parts, per_part.min(size) * inner), |_, range| {
            for task in range {
                let (o, part) = (task / parts, task % parts);
                let (n0, n1) = (part * per_part, ((part + 1) * per_part).min(size));
                // SAFETY: each task has its own row of sums.
                let y = unsafe { out.part(task * inner, inner) };
                let x = &x[(o * size + n0) * inner..(o * size + n1) * inner];
                cpu.level().run(Rows { x, y, factor: if parts > 1 { 1.0 } else { factor } });
            }
        });
    }
    if parts > 1 {
        for (rows, y) in partial.data().chunks_exact(parts * inner).zip(y.chunks_exact_mut(inner)) {
            cpu.level().run(Rows { x: rows, y, factor });
        }
    }
}

/// y = factor · (sum of the rows of x); rows have the length of y.
struct Rows<'a> {
    x: &'a [f32],
    y: &'a mut [f32],
    factor: f32,
}

impl Kernel for Rows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, y, factor } = self;
        if let [y] = y {
            *y = factor * sum_row(s, x);
            return;
        }
        let width = y.len();
        let whole = width / LANES * LANES;
        let block = 4 * LANES;
        let mut j = 0;
        // Keep four vectors of columns in registers while iterating over the rows.
        while j + block <= width {
            let mut acc = [s.splat(0.0); 4];
            for row in x.chunks_exact(width) {
                for (h, sum) in acc.iter_mut().enumerate() {
                    *sum = s.add(*sum, s.load(&row[j + h * LANES..]));
                }
            }
            for (h, sum) in acc.into_iter().enumerate() {
                s.store(&mut y[j + h * LANES..], sum);
            }
            j += block;
        }
        while j < whole {
            let mut acc = s.splat(0.0);
            for row in x.chunks_exact(width) {
                acc = s.add(acc, s.load(&row[j..]));
            }
            s.store(&mut y[j..], acc);
            j += LANES;
        }
        if whole < width {
            y[whole..].fill(0.0);
            for row in x.chunks_exact(width) {
                for j in whole..width {
                    y[j] += row[j];
                }
            }
        }
        simd::scale(s, y, factor);
    }
}

#[inline(always)]
fn sum_row<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut acc = [s.splat(0.0); 4];
    let blocks = x.chunks_exact(4 * LANES);
    let tail = blocks.remainder();
    for block in blocks {
        for (h, sum) in acc.iter_mut().enumerate() {
            *sum = s.add(*sum, s.load(&block[h * LANES..]));
        }
    }
    let total = s.sum(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])));
    tail.iter().fold(total, |sum, v| sum + v)
}

#[allow(unsafe_code)]
pub(crate) fn expand(cpu: &Cpu, op: Expand, (shape, around): (Vec<usize>, AxisView)) -> Result<Tensor> {
    let (AxisView { outer, size, inner }, x) = (around, op.x.f32());
    let mut y = cpu.uninit(&shape);
    if y.is_empty() {
        return Ok(op.x.like(y));
    }
    let out = Shared::new(y.data_mut());
    cpu.for_rows(cpu.row_parts(outer * size, inner), |_, range| {
        // SAFETY: parts are disjoint ranges of rows.
        let y = unsafe { out.part(range.start * inner, range.len() * inner) };
        if inner == 1 {
            y.iter_mut().zip(range).for_each(|(y, row)| *y = x.data()[row / size]);
        } else {
            for (y, row) in y.chunks_exact_mut(inner).zip(range) {
                y.copy_from_slice(&x.data()[row / size * inner..][..inner]);
            }
        }
    });
    Ok(op.x.like(y))
}

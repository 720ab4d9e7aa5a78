//! Reference implementation of the reductions: a direct transcription of the equations.

use super::{Expand, Mean, Sum, SumTo};
use crate::array::Array;
use crate::error::Result;
use crate::ops::elementwise::broadcast::{dims, offsets};
use crate::ops::layout::AxisView;
use crate::reference::Reference;
use crate::tensor::Tensor;

fn sums(x: &Tensor, around: AxisView) -> Vec<f64> {
    let (AxisView { outer, size, inner }, x) = (around, x.f64().data());
    let mut y = Vec::with_capacity(outer * inner);
    for o in 0..outer {
        for i in 0..inner {
            y.push((0..size).map(|n| x[(o * size + n) * inner + i]).sum());
        }
    }
    y
}

pub(crate) fn sum(_: &Reference, op: Sum, (shape, around): (Vec<usize>, AxisView)) -> Result<Tensor> {
    Ok(op.x.like(Array::detached(sums(&op.x, around), &shape)))
}

pub(crate) fn mean(_: &Reference, op: Mean, (shape, around): (Vec<usize>, AxisView)) -> Result<Tensor> {
    let means = sums(&op.x, around).into_iter().map(|s| s / around.size as f64).collect();
    Ok(op.x.like(Array::detached(means, &shape)))
}

pub(crate) fn expand(_: &Reference, op: Expand, (shape, around): (Vec<usize>, AxisView)) -> Result<Tensor> {
    let (AxisView { outer, size, inner }, x) = (around, op.x.f64().data());
    let mut y = Vec::with_capacity(outer * size * inner);
    for o in 0..outer {
        for _ in 0..size {
            y.extend_from_slice(&x[o * inner..(o + 1) * inner]);
        }
    }
    Ok(op.x.like(Array::detached(y, &shape)))
}

pub(crate) fn sum_to(_: &Reference, op: SumTo, (): ()) -> Result<Tensor> {
    Ok(op.x.like(sum_over(op.x.f64(), &op.shape)))
}

/// Sum over the dimensions along which broadcasting `shape` to x's shape repeats elements.
pub(crate) fn sum_over(x: &Array<f64>, shape: &[usize]) -> Array<f64> {
    let dims = dims(x.shape(), x.shape(), shape);
    let mut y = vec![0.0; shape.iter().product()];
    for i in 0..x.len() {
        let [from, to] = offsets(&dims, i);
        y[to] += x.data()[from];
    }
    Array::detached(y, shape)
}

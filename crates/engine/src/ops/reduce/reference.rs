//! Reference implementation of the reductions: a direct transcription of the equations.

use super::{check_expand, check_mean, check_sum};
use crate::error::Result;
use crate::ops::elementwise::broadcast::{check_broadcasts_to, dims, offsets};
use crate::ops::layout::AxisView;
use crate::array::{Array, Real};

fn sums<R: Real>(x: &[R], around: AxisView) -> Vec<R> {
    let AxisView { outer, size, inner } = around;
    let mut y = Vec::with_capacity(outer * inner);
    for o in 0..outer {
        for i in 0..inner {
            y.push((0..size).map(|n| x[(o * size + n) * inner + i]).sum());
        }
    }
    y
}

pub(crate) fn sum<R: Real>(x: &Array<R>, axis: usize) -> Result<Array<R>> {
    let (shape, around) = check_sum("sum", x.shape(), axis)?;
    Ok(Array::detached(sums(x.data(), around), &shape))
}

pub(crate) fn mean<R: Real>(x: &Array<R>, axis: usize) -> Result<Array<R>> {
    let (shape, around) = check_mean(x.shape(), axis)?;
    let count = R::of(around.size as f64);
    Ok(Array::detached(sums(x.data(), around).into_iter().map(|s| s / count).collect(), &shape))
}

pub(crate) fn expand<R: Real>(x: &Array<R>, axis: usize, count: usize) -> Result<Array<R>> {
    let (shape, AxisView { outer, size, inner }) = check_expand(x.shape(), axis, count)?;
    let mut y = Vec::with_capacity(outer * size * inner);
    for o in 0..outer {
        for _ in 0..size {
            y.extend_from_slice(&x.data()[o * inner..(o + 1) * inner]);
        }
    }
    Ok(Array::detached(y, &shape))
}

pub(crate) fn sum_to<R: Real>(x: &Array<R>, shape: &[usize]) -> Result<Array<R>> {
    check_broadcasts_to("sum_to", shape, x.shape())?;
    let dims = dims(x.shape(), x.shape(), shape);
    let mut y = vec![R::zero(); shape.iter().product()];
    for i in 0..x.len() {
        let [from, to] = offsets(&dims, i);
        y[to] += x.data()[from];
    }
    Ok(Array::detached(y, shape))
}

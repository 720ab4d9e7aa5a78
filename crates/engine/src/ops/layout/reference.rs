//! Reference implementation of the layout operations: a direct transcription of the definitions.

use super::{AxisView, Concat, Permute, Place, Reshape, Slice, resized};
use crate::array::Array;
use crate::error::Result;
use crate::reference::Reference;
use crate::tensor::Tensor;

pub(crate) fn slice(_: &Reference, op: Slice, around: AxisView) -> Result<Tensor> {
    let (AxisView { outer, size, inner }, x) = (around, op.x.f64());
    let mut y = Vec::new();
    for o in 0..outer {
        let rows = (o * size + op.range.start) * inner..(o * size + op.range.end) * inner;
        y.extend_from_slice(&x.data()[rows]);
    }
    Ok(op.x.like(Array::detached(y, &resized(x.shape(), op.axis, op.range.len()))))
}

pub(crate) fn place(_: &Reference, op: Place, around: AxisView) -> Result<Tensor> {
    let (AxisView { outer, size, inner }, x) = (around, op.x.f64());
    let len = x.shape()[op.axis] * inner;
    let mut y = vec![0.0; outer * size * inner];
    for o in 0..outer {
        y[(o * size + op.start) * inner..][..len].copy_from_slice(&x.data()[o * len..][..len]);
    }
    Ok(op.x.like(Array::detached(y, &resized(x.shape(), op.axis, size))))
}

pub(crate) fn concat(_: &Reference, op: Concat, shape: Vec<usize>) -> Result<Tensor> {
    let AxisView { outer, inner, .. } = AxisView::new("concat", &shape, op.axis)?;
    let mut y = Vec::new();
    for o in 0..outer {
        for part in &op.parts {
            let len = part.shape()[op.axis] * inner;
            y.extend_from_slice(&part.f64().data()[o * len..][..len]);
        }
    }
    Ok(op.parts[0].like(Array::detached(y, &shape)))
}

pub(crate) fn permute(_: &Reference, op: Permute, shape: Vec<usize>) -> Result<Tensor> {
    let x = op.x.f64();
    let steps: Vec<usize> = op.axes.iter().map(|&axis| x.shape()[axis + 1..].iter().product()).collect();
    let y = (0..x.len()).map(|mut at| {
        let mut from = 0;
        for (size, step) in shape.iter().zip(&steps).rev() {
            from += at % size * step;
            at /= size;
        }
        x.data()[from]
    });
    Ok(op.x.like(Array::detached(y.collect(), &shape)))
}

pub(crate) fn reshape(_: &Reference, op: Reshape, (): ()) -> Result<Tensor> {
    Ok(op.x.like(op.x.f64().with_shape(&op.shape)))
}

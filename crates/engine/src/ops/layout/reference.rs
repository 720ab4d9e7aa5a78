//! Reference implementation of the layout operations: a direct transcription of the definitions.

use std::ops::Range;

use super::{AxisView, check_concat, check_permute, check_place, check_reshape, check_slice, resized};
use crate::error::Result;
use crate::tensor::{Real, Tensor};

pub(crate) fn slice<R: Real>(x: &Tensor<R>, axis: usize, range: Range<usize>) -> Result<Tensor<R>> {
    let AxisView { outer, size, inner } = check_slice(x.shape(), axis, &range)?;
    let mut y = Vec::new();
    for o in 0..outer {
        y.extend_from_slice(&x.data()[(o * size + range.start) * inner..(o * size + range.end) * inner]);
    }
    Ok(Tensor::detached(y, &resized(x.shape(), axis, range.len())))
}

pub(crate) fn place<R: Real>(x: &Tensor<R>, axis: usize, start: usize, size: usize) -> Result<Tensor<R>> {
    let AxisView { outer, inner, .. } = check_place(x.shape(), axis, start, size)?;
    let len = x.shape()[axis] * inner;
    let mut y = vec![R::zero(); outer * size * inner];
    for o in 0..outer {
        y[(o * size + start) * inner..][..len].copy_from_slice(&x.data()[o * len..][..len]);
    }
    Ok(Tensor::detached(y, &resized(x.shape(), axis, size)))
}

pub(crate) fn concat<R: Real>(parts: &[&Tensor<R>], axis: usize) -> Result<Tensor<R>> {
    let shapes: Vec<&[usize]> = parts.iter().map(|p| p.shape()).collect();
    let shape = check_concat(&shapes, axis)?;
    let AxisView { outer, inner, .. } = AxisView::new("concat", &shape, axis)?;
    let mut y = Vec::new();
    for o in 0..outer {
        for part in parts {
            let len = part.shape()[axis] * inner;
            y.extend_from_slice(&part.data()[o * len..][..len]);
        }
    }
    Ok(Tensor::detached(y, &shape))
}

pub(crate) fn permute<R: Real>(x: &Tensor<R>, axes: &[usize]) -> Result<Tensor<R>> {
    let shape = check_permute(x.shape(), axes)?;
    let steps: Vec<usize> = axes.iter().map(|&axis| x.shape()[axis + 1..].iter().product()).collect();
    let y = (0..x.len()).map(|mut at| {
        let mut from = 0;
        for (size, step) in shape.iter().zip(&steps).rev() {
            from += at % size * step;
            at /= size;
        }
        x.data()[from]
    });
    Ok(Tensor::detached(y.collect(), &shape))
}

pub(crate) fn reshape<R: Real>(x: &Tensor<R>, shape: &[usize]) -> Result<Tensor<R>> {
    check_reshape(x.shape(), shape)?;
    Ok(x.with_shape(shape))
}

//! Reference implementation of softmax: a direct transcription of the equations.

use super::{Softmax, SoftmaxBackward};
use crate::array::Array;
use crate::error::Result;
use crate::reference::Reference;
use crate::tensor::Tensor;

pub(crate) fn forward(_: &Reference, op: Softmax, width: usize) -> Result<Tensor> {
    let mut y = op.x.f64().data().to_vec();
    for row in y.chunks_exact_mut(width.max(1)) {
        let max = row.iter().fold(f64::NEG_INFINITY, |m, &v| if v > m { v } else { m });
        // Without a shift, a fully masked row is e^−inf = 0 everywhere.
        let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
        row.iter_mut().for_each(|v| *v = (*v - shift).exp());
        let sum = row.iter().sum::<f64>();
        if sum != 0.0 {
            row.iter_mut().for_each(|v| *v /= sum);
        }
    }
    Ok(op.x.like(Array::detached(y, op.x.shape())))
}

pub(crate) fn backward(_: &Reference, op: SoftmaxBackward, width: usize) -> Result<Tensor> {
    let (y, dy) = (op.y.f64().data(), op.gradient.f64().data());
    let mut dx = Vec::with_capacity(y.len());
    for (y, dy) in y.chunks_exact(width.max(1)).zip(dy.chunks_exact(width.max(1))) {
        let mean = y.iter().zip(dy).map(|(y, dy)| y * dy).sum::<f64>();
        dx.extend(y.iter().zip(dy).map(|(y, dy)| y * (dy - mean)));
    }
    Ok(op.y.like(Array::detached(dx, op.y.shape())))
}

//! Reference implementation of AdamW: a direct transcription of the equations.

use super::{AdamWStep, SquaredNorm, Step};
use crate::array::Array;
use crate::error::Result;
use crate::reference::Reference;
use crate::tensor::Tensor;

pub(crate) fn update(_: &Reference, op: AdamWStep, (): ()) -> Result<[Tensor; 3]> {
    let Step { learning_rate, betas: [b1, b2], eps, weight_decay, clip, .. } = op.step;
    let [c1, c2] = op.step.corrections();
    let values = |tensor: &Tensor| tensor.f64().data().to_vec();
    let [mut p, mut m, mut v] = [&op.parameter, &op.first_moment, &op.second_moment].map(values);
    for (i, gradient) in op.gradient.f64().data().iter().enumerate() {
        let g = clip * gradient;
        m[i] = b1 * m[i] + (1.0 - b1) * g;
        v[i] = b2 * v[i] + (1.0 - b2) * g * g;
        let direction = m[i] / c1 / ((v[i] / c2).sqrt() + eps);
        p[i] = p[i] - learning_rate * weight_decay * p[i] - learning_rate * direction;
    }
    Ok([p, m, v].map(|data| op.gradient.like(Array::detached(data, op.gradient.shape()))))
}

pub(crate) fn squared_norm(_: &Reference, op: SquaredNorm, (): ()) -> Result<f64> {
    let squares = |x: &Tensor| x.f64().data().iter().map(|v| v * v).sum::<f64>();
    Ok(op.tensors.iter().fold(0.0, |sum, x| sum + squares(x)))
}

//! Reference implementation of RMS normalisation: a direct transcription of the equations.

use super::{GatedRmsNorm, GatedRmsNormBackward, RmsNorm, RmsNormBackward, backward_each};
use crate::array::Array;
use crate::error::Result;
use crate::reference::Reference;
use crate::tensor::Tensor;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn inverse_rms(row: &[f64], eps: f64) -> f64 {
    1.0 / (row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64 + eps).sqrt()
}

/// n = x / rms(x) ∘ w
fn normed(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let mut n = x.to_vec();
    for row in n.chunks_exact_mut(w.len()) {
        let r = inverse_rms(row, eps);
        row.iter_mut().zip(w).for_each(|(v, w)| *v = *v * r * w);
    }
    n
}

/// dx and dw from dn.
fn gradients(x: &[f64], w: &[f64], eps: f64, dn: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let width = w.len();
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; width]);
    let rows = x.chunks_exact(width).zip(dn.chunks_exact(width));
    for ((x, dn), dx) in rows.zip(dx.chunks_exact_mut(width)) {
        let r = inverse_rms(x, eps);
        let mean = (0..width).map(|i| dn[i] * w[i] * x[i]).sum::<f64>() / width as f64;
        for i in 0..width {
            dw[i] += dn[i] * r * x[i];
            dx[i] = r * (dn[i] * w[i] - r * r * x[i] * mean);
        }
    }
    (dx, dw)
}

fn of(like: &Tensor, data: Vec<f64>) -> Tensor {
    like.like(Array::detached(data, like.shape()))
}

pub(crate) fn forward(_: &Reference, op: RmsNorm, _: usize) -> Result<Vec<Tensor>> {
    let w = op.weight.f64().data();
    Ok(op.x.iter().map(|x| of(x, normed(x.f64().data(), w, op.eps))).collect())
}

pub(crate) fn backward(_: &Reference, op: RmsNormBackward, _: usize) -> Result<(Vec<Tensor>, Tensor)> {
    let RmsNorm { x, weight, eps } = &op.forward;
    backward_each(op.dx, |i| {
        let (dx, dw) = gradients(x[i].f64().data(), weight.f64().data(), *eps, op.gradients[i].f64().data());
        Ok((of(&x[i], dx), of(weight, dw)))
    })
}

pub(crate) fn gated_forward(_: &Reference, op: GatedRmsNorm, _: usize) -> Result<Vec<Tensor>> {
    let one = |(x, gate): (&Tensor, &Tensor)| {
        let n = normed(x.f64().data(), op.weight.f64().data(), op.eps);
        of(x, n.iter().zip(gate.f64().data()).map(|(n, g)| n * g * sigmoid(*g)).collect())
    };
    Ok(op.x.iter().zip(&op.gates).map(one).collect())
}

pub(crate) fn gated_backward(
    _: &Reference,
    op: GatedRmsNormBackward,
    _: usize,
) -> Result<(Vec<Tensor>, Vec<Tensor>, Tensor)> {
    let GatedRmsNorm { x, gates, weight, eps } = &op.forward;
    let mut dgates = vec![weight.clone(); x.len()];
    let (dx, dw) = backward_each(vec![None; x.len()], |i| {
        let (rows, w) = (x[i].f64().data(), weight.f64().data());
        let (g, dy) = (gates[i].f64().data(), op.gradients[i].f64().data());
        let n = normed(rows, w, *eps);
        let slope = |g: f64| sigmoid(g) * (1.0 + g * (1.0 - sigmoid(g)));
        dgates[i] = of(&x[i], (0..g.len()).map(|j| dy[j] * n[j] * slope(g[j])).collect());
        let dn: Vec<f64> = g.iter().zip(dy).map(|(&g, dy)| dy * g * sigmoid(g)).collect();
        let (dx, dw) = gradients(rows, w, *eps, &dn);
        Ok((of(&x[i], dx), of(weight, dw)))
    })?;
    Ok((dx, dgates, dw))
}

//! Reference implementation of RMS normalisation: a direct transcription of the equations.

use super::{GatedRmsNorm, RmsNorm, check, check_gated};
use crate::error::{Result, expect_shape};
use crate::tensor::{Real, Tensor};

fn sigmoid<R: Real>(x: R) -> R {
    R::one() / (R::one() + (-x).exp())
}

fn inverse_rms<R: Real>(row: &[R], eps: f64) -> R {
    let mean = row.iter().map(|&v| v * v).sum::<R>() / R::of(row.len() as f64);
    R::one() / (mean + R::of(eps)).sqrt()
}

pub(crate) fn forward<R: Real>(input: RmsNorm<&Tensor<R>>, eps: f64) -> Result<Tensor<R>> {
    let width = check("rms_norm", input.x.shape(), input.weight.shape())?;
    let w = input.weight.data();
    let mut y = input.x.data().to_vec();
    for row in y.chunks_exact_mut(width) {
        let r = inverse_rms(row, eps);
        for (v, &w) in row.iter_mut().zip(w) {
            *v = *v * r * w;
        }
    }
    Ok(Tensor::detached(y, input.x.shape()))
}

pub(crate) fn backward<R: Real>(
    input: RmsNorm<&Tensor<R>>,
    eps: f64,
    gradient: &Tensor<R>,
) -> Result<RmsNorm<Tensor<R>>> {
    let width = check("rms_norm", input.x.shape(), input.weight.shape())?;
    expect_shape("rms_norm", "gradient", gradient.shape(), input.x.shape(), "the shape of x")?;
    let w = input.weight.data();
    let mut dx = vec![R::zero(); input.x.len()];
    let mut dw = vec![R::zero(); width];
    let rows = input.x.data().chunks_exact(width).zip(gradient.data().chunks_exact(width));
    for ((x, dn), dx) in rows.zip(dx.chunks_exact_mut(width)) {
        let r = inverse_rms(x, eps);
        let mean = (0..width).map(|i| dn[i] * w[i] * x[i]).sum::<R>() / R::of(width as f64);
        for i in 0..width {
            dw[i] += dn[i] * r * x[i];
            dx[i] = r * (dn[i] * w[i] - r * r * x[i] * mean);
        }
    }
    Ok(RmsNorm { x: Tensor::detached(dx, input.x.shape()), weight: Tensor::detached(dw, &[width]) })
}

pub(crate) fn gated_forward<R: Real>(input: GatedRmsNorm<&Tensor<R>>, eps: f64) -> Result<Tensor<R>> {
    check_gated(input.x.shape(), input.gate.shape(), input.weight.shape())?;
    let n = forward(RmsNorm { x: input.x, weight: input.weight }, eps)?;
    let y = n.data().iter().zip(input.gate.data()).map(|(&n, &g)| n * g * sigmoid(g)).collect();
    Ok(Tensor::detached(y, input.x.shape()))
}

pub(crate) fn gated_backward<R: Real>(
    input: GatedRmsNorm<&Tensor<R>>,
    eps: f64,
    gradient: &Tensor<R>,
) -> Result<GatedRmsNorm<Tensor<R>>> {
    check_gated(input.x.shape(), input.gate.shape(), input.weight.shape())?;
    expect_shape("gated_rms_norm", "gradient", gradient.shape(), input.x.shape(), "the shape of x")?;
    let plain = RmsNorm { x: input.x, weight: input.weight };
    let n = forward(plain, eps)?;
    let (g, dy) = (input.gate.data(), gradient.data());
    let dn = g.iter().zip(dy).map(|(&g, &dy)| dy * g * sigmoid(g)).collect();
    let dg = (0..g.len())
        .map(|i| dy[i] * n.data()[i] * sigmoid(g[i]) * (R::one() + g[i] * (R::one() - sigmoid(g[i]))))
        .collect();
    let d = backward(plain, eps, &Tensor::detached(dn, input.x.shape()))?;
    Ok(GatedRmsNorm { x: d.x, gate: Tensor::detached(dg, input.x.shape()), weight: d.weight })
}

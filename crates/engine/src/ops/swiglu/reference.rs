//! Reference implementation of SwiGLU: a direct transcription of the equations.

use super::{SwiGlu, check, check_gradient};
use crate::error::Result;
use crate::tensor::{Real, Tensor};

fn sigmoid<R: Real>(x: R) -> R {
    R::one() / (R::one() + (-x).exp())
}

pub(crate) fn forward<R: Real>(input: SwiGlu<&Tensor<R>>) -> Result<Tensor<R>> {
    check(input.gate.shape(), input.up.shape())?;
    let y = input.gate.data().iter().zip(input.up.data()).map(|(&g, &u)| g * sigmoid(g) * u).collect();
    Ok(Tensor::detached(y, input.gate.shape()))
}

pub(crate) fn backward<R: Real>(
    input: SwiGlu<&Tensor<R>>,
    gradient: &Tensor<R>,
) -> Result<SwiGlu<Tensor<R>>> {
    check(input.gate.shape(), input.up.shape())?;
    check_gradient(input.gate.shape(), gradient.shape())?;
    let (g, u, dy) = (input.gate.data(), input.up.data(), gradient.data());
    let one = R::one();
    let dgate =
        (0..g.len()).map(|i| dy[i] * u[i] * sigmoid(g[i]) * (one + g[i] * (one - sigmoid(g[i])))).collect();
    let dup = (0..g.len()).map(|i| dy[i] * g[i] * sigmoid(g[i])).collect();
    Ok(SwiGlu {
        gate: Tensor::detached(dgate, input.gate.shape()),
        up: Tensor::detached(dup, input.gate.shape()),
    })
}

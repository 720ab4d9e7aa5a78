//! Reference implementation of SwiGLU: a direct transcription of the equations.

use super::{SwiGlu, check, check_gradient};
use crate::error::Result;
use crate::array::{Array, Real};

fn sigmoid<R: Real>(x: R) -> R {
    R::one() / (R::one() + (-x).exp())
}

pub(crate) fn forward<R: Real>(input: SwiGlu<&Array<R>>) -> Result<Array<R>> {
    check(input.gate.shape(), input.up.shape())?;
    let y = input.gate.data().iter().zip(input.up.data()).map(|(&g, &u)| g * sigmoid(g) * u).collect();
    Ok(Array::detached(y, input.gate.shape()))
}

pub(crate) fn backward<R: Real>(
    input: SwiGlu<&Array<R>>,
    gradient: &Array<R>,
) -> Result<SwiGlu<Array<R>>> {
    check(input.gate.shape(), input.up.shape())?;
    check_gradient(input.gate.shape(), gradient.shape())?;
    let (g, u, dy) = (input.gate.data(), input.up.data(), gradient.data());
    let one = R::one();
    let dgate =
        (0..g.len()).map(|i| dy[i] * u[i] * sigmoid(g[i]) * (one + g[i] * (one - sigmoid(g[i])))).collect();
    let dup = (0..g.len()).map(|i| dy[i] * g[i] * sigmoid(g[i])).collect();
    Ok(SwiGlu {
        gate: Array::detached(dgate, input.gate.shape()),
        up: Array::detached(dup, input.gate.shape()),
    })
}

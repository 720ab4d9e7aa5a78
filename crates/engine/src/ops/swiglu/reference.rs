//! Reference implementation of SwiGLU: a direct transcription of the equations.

use super::{SwiGlu, SwiGluBackward};
use crate::array::Array;
use crate::error::Result;
use crate::reference::Reference;
use crate::tensor::Tensor;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn of(like: &Tensor, data: Vec<f64>) -> Tensor {
    like.like(Array::detached(data, like.shape()))
}

pub(crate) fn forward(_: &Reference, op: SwiGlu, (): ()) -> Result<Vec<Tensor>> {
    let one = |(gate, up): (&Tensor, &Tensor)| {
        let pairs = gate.f64().data().iter().zip(up.f64().data());
        of(gate, pairs.map(|(&g, &u)| g * sigmoid(g) * u).collect())
    };
    Ok(op.gates.iter().zip(&op.ups).map(one).collect())
}

pub(crate) fn backward(_: &Reference, op: SwiGluBackward, (): ()) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let SwiGlu { gates, ups } = &op.forward;
    let one = |((gate, up), dy): ((&Tensor, &Tensor), &Tensor)| {
        let (g, u, dy) = (gate.f64().data(), up.f64().data(), dy.f64().data());
        let dgate = |i: usize| dy[i] * u[i] * sigmoid(g[i]) * (1.0 + g[i] * (1.0 - sigmoid(g[i])));
        let dup = |i: usize| dy[i] * g[i] * sigmoid(g[i]);
        (of(gate, (0..g.len()).map(dgate).collect()), of(up, (0..g.len()).map(dup).collect()))
    };
    Ok(gates.iter().zip(ups).zip(&op.gradients).map(one).unzip())
}

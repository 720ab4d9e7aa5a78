//! Reference implementation of the state read: a direct transcription of the equations.

use super::{Sizes, StateRead, StateReadBackward, StateReadForward};
use crate::array::Array;
use crate::error::Result;
use crate::ops::gated_delta::reference::{l2_norm, l2_norm_backward};
use crate::reference::Reference;
use crate::tensor::Tensor;

fn key_at(sizes: &Sizes, row: usize, head: usize) -> usize {
    (row * sizes.key_heads + head / (sizes.value_heads / sizes.key_heads)) * sizes.key_dim
}

pub(crate) fn forward(_: &Reference, op: StateReadForward, sizes: Sizes) -> Result<Tensor> {
    let input = op.input.as_ref().map(Tensor::f64);
    let Sizes { rows, value_heads, key_dim: dk, value_dim: dv, .. } = sizes;
    let scale = 1.0 / (dk as f64).sqrt();
    let mut out = vec![0.0; rows * value_heads * dv];
    for row in 0..rows {
        for h in 0..value_heads {
            let (q, _) = l2_norm(&input.query.data()[key_at(&sizes, row, h)..][..dk]);
            let state = &input.states.data()[(row * value_heads + h) * dk * dv..][..dk * dv];
            for j in 0..dv {
                let read = (0..dk).map(|i| state[i * dv + j] * q[i]).sum::<f64>();
                out[(row * value_heads + h) * dv + j] = scale * read;
            }
        }
    }
    Ok(op.input.query.like(Array::detached(out, &sizes.readout_shape(input.query.shape()))))
}

pub(crate) fn backward(_: &Reference, op: StateReadBackward, sizes: Sizes) -> Result<StateRead<Tensor>> {
    let (input, gradient) = (op.input.as_ref().map(Tensor::f64), op.gradient.f64());
    let Sizes { rows, value_heads, key_dim: dk, value_dim: dv, .. } = sizes;
    let scale = 1.0 / (dk as f64).sqrt();
    let mut dquery = vec![0.0; input.query.len()];
    let mut dstates = vec![0.0; input.states.len()];
    for row in 0..rows {
        for h in 0..value_heads {
            let at = key_at(&sizes, row, h);
            let (q, factor) = l2_norm(&input.query.data()[at..at + dk]);
            let dout = &gradient.data()[(row * value_heads + h) * dv..][..dv];
            let from = (row * value_heads + h) * dk * dv;
            let mut dq = vec![0.0; dk];
            for i in 0..dk {
                for j in 0..dv {
                    dq[i] += scale * input.states.data()[from + i * dv + j] * dout[j];
                    dstates[from + i * dv + j] = scale * q[i] * dout[j];
                }
            }
            l2_norm_backward(&q, factor, &dq, &mut dquery[at..at + dk]);
        }
    }
    let like = |data, tensor: &Tensor| tensor.like(Array::detached(data, tensor.shape()));
    Ok(StateRead { query: like(dquery, &op.input.query), states: like(dstates, &op.input.states) })
}

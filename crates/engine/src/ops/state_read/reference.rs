//! Reference implementation of the state read: a direct transcription of the equations.

use super::{Sizes, StateRead, check, output_shape};
use crate::error::{Result, expect_shape};
use crate::ops::gated_delta::reference::{l2_norm, l2_norm_backward};
use crate::array::{Array, Real};

fn key_at(sizes: &Sizes, row: usize, head: usize) -> usize {
    (row * sizes.key_heads + head / (sizes.value_heads / sizes.key_heads)) * sizes.key_dim
}

pub(crate) fn forward<R: Real>(input: StateRead<&Array<R>>, key_heads: usize) -> Result<Array<R>> {
    let sizes = check(input.query.shape(), input.states.shape(), key_heads)?;
    let Sizes { rows, value_heads, key_dim: dk, value_dim: dv, .. } = sizes;
    let scale = R::of(1.0 / (dk as f64).sqrt());
    let mut out = vec![R::zero(); rows * value_heads * dv];
    for row in 0..rows {
        for h in 0..value_heads {
            let (q, _) = l2_norm(&input.query.data()[key_at(&sizes, row, h)..][..dk]);
            let state = &input.states.data()[(row * value_heads + h) * dk * dv..][..dk * dv];
            for j in 0..dv {
                let read = (0..dk).map(|i| state[i * dv + j] * q[i]).sum::<R>();
                out[(row * value_heads + h) * dv + j] = scale * read;
            }
        }
    }
    Ok(Array::detached(out, &output_shape(input.query.shape(), &sizes)))
}

pub(crate) fn backward<R: Real>(
    input: StateRead<&Array<R>>,
    key_heads: usize,
    gradient: &Array<R>,
) -> Result<StateRead<Array<R>>> {
    let sizes = check(input.query.shape(), input.states.shape(), key_heads)?;
    let shape = output_shape(input.query.shape(), &sizes);
    expect_shape("state_read", "gradient", gradient.shape(), &shape, "[.., value_heads·d_v]")?;
    let Sizes { rows, value_heads, key_dim: dk, value_dim: dv, .. } = sizes;
    let scale = R::of(1.0 / (dk as f64).sqrt());
    let mut dquery = vec![R::zero(); input.query.len()];
    let mut dstates = vec![R::zero(); input.states.len()];
    for row in 0..rows {
        for h in 0..value_heads {
            let at = key_at(&sizes, row, h);
            let (q, factor) = l2_norm(&input.query.data()[at..at + dk]);
            let dout = &gradient.data()[(row * value_heads + h) * dv..][..dv];
            let from = (row * value_heads + h) * dk * dv;
            let mut dq = vec![R::zero(); dk];
            for i in 0..dk {
                for j in 0..dv {
                    dq[i] += scale * input.states.data()[from + i * dv + j] * dout[j];
                    dstates[from + i * dv + j] = scale * q[i] * dout[j];
                }
            }
            l2_norm_backward(&q, factor, &dq, &mut dquery[at..at + dk]);
        }
    }
    Ok(StateRead {
        query: Array::detached(dquery, input.query.shape()),
        states: Array::detached(dstates, input.states.shape()),
    })
}

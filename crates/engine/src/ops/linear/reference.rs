//! Reference implementation of the linear layer: a direct transcription of the equations.

use super::{Linear, check, output_shape};
use crate::error::{Result, expect_shape};
use crate::array::{Array, Real};

pub(crate) fn forward<R: Real>(input: Linear<&Array<R>>) -> Result<Array<R>> {
    let sizes = check(input.x.shape(), input.weight.shape(), input.bias.map(Array::shape))?;
    let (x, w) = (input.x.data(), input.weight.data());
    let mut y = vec![R::zero(); sizes.rows * sizes.outer];
    for r in 0..sizes.rows {
        for o in 0..sizes.outer {
            let mut sum = input.bias.map_or(R::zero(), |b| b.data()[o]);
            for i in 0..sizes.inner {
                sum += x[r * sizes.inner + i] * w[o * sizes.inner + i];
            }
            y[r * sizes.outer + o] = sum;
        }
    }
    Ok(Array::detached(y, &output_shape(input.x.shape(), sizes)))
}

pub(crate) fn backward<R: Real>(
    input: Linear<&Array<R>>,
    gradient: &Array<R>,
    needs: [bool; 3],
) -> Result<[Option<Array<R>>; 3]> {
    let sizes = check(input.x.shape(), input.weight.shape(), input.bias.map(Array::shape))?;
    expect_shape("linear", "gradient", gradient.shape(), &output_shape(input.x.shape(), sizes), "[.., out]")?;
    let (x, w, dy) = (input.x.data(), input.weight.data(), gradient.data());
    let mut dx = vec![R::zero(); x.len()];
    let mut dw = vec![R::zero(); w.len()];
    let mut db = vec![R::zero(); sizes.outer];
    for r in 0..sizes.rows {
        for o in 0..sizes.outer {
            let g = dy[r * sizes.outer + o];
            db[o] += g;
            for i in 0..sizes.inner {
                dx[r * sizes.inner + i] += g * w[o * sizes.inner + i];
                dw[o * sizes.inner + i] += g * x[r * sizes.inner + i];
            }
        }
    }
    Ok([
        needs[0].then(|| Array::detached(dx, input.x.shape())),
        needs[1].then(|| Array::detached(dw, input.weight.shape())),
        needs[2].then(|| Array::detached(db, &[sizes.outer])),
    ])
}

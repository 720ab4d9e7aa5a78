//! Reference implementation of the linear layer: a direct transcription of the equations.

use super::{LinearList, LinearListBackward, LinearListGradients, Product, Sizes, backward_each};
use crate::array::Array;
use crate::error::Result;
use crate::ops::pack;
use crate::reference::Reference;
use crate::tensor::Tensor;

pub(crate) fn forward(_: &Reference, op: LinearList, sizes: Vec<Sizes>) -> Result<Vec<Tensor>> {
    let one = |(product, sizes): (&Product<Tensor>, Sizes)| {
        let x = &op.x[product.x];
        let (rows, w) = (x.f64().data(), pack::numbers(&op.weights[product.weight]).data());
        let mut y = vec![0.0; sizes.rows * sizes.outer];
        for r in 0..sizes.rows {
            for o in 0..sizes.outer {
                let mut sum = product.bias.as_ref().map_or(0.0, |b| b.f64().data()[o]);
                for i in 0..sizes.inner {
                    sum += rows[r * sizes.inner + i] * w[o * sizes.inner + i];
                }
                y[r * sizes.outer + o] = sum;
            }
        }
        if let Some(residual) = &product.residual {
            y.iter_mut().zip(residual.f64().data()).for_each(|(y, r)| *y += r);
        }
        x.like(Array::detached(y, &sizes.output_shape(x.shape())))
    };
    Ok(op.products.iter().zip(sizes).map(one).collect())
}

pub(crate) fn backward(
    _: &Reference,
    op: LinearListBackward,
    sizes: Vec<Sizes>,
) -> Result<LinearListGradients> {
    backward_each(&op.products, &op.needs, op.dx, |i, needs| {
        let (x, weight) = (&op.x[op.products[i].x], &op.weights[op.products[i].weight]);
        let (rows, w, dy) = (x.f64().data(), weight.f64().data(), op.gradients[i].f64().data());
        let sizes = sizes[i];
        let (mut dx, mut dw) = (vec![0.0; rows.len()], vec![0.0; w.len()]);
        let mut db = vec![0.0; sizes.outer];
        for r in 0..sizes.rows {
            for o in 0..sizes.outer {
                let g = dy[r * sizes.outer + o];
                db[o] += g;
                for i in 0..sizes.inner {
                    dx[r * sizes.inner + i] += g * w[o * sizes.inner + i];
                    dw[o * sizes.inner + i] += g * rows[r * sizes.inner + i];
                }
            }
        }
        let of = |data, shape: &[usize]| x.like(Array::detached(data, shape));
        [
            needs[0].then(|| of(dx, x.shape())),
            needs[1].then(|| of(dw, weight.shape())),
            needs[2].then(|| of(db, &[sizes.outer])),
        ]
    })
}

//! Reference implementation of the matrix product: a direct transcription of the equations.

use super::{MatMul, MatMulBackward, Sizes, Transpose};
use crate::array::Array;
use crate::error::Result;
use crate::reference::Reference;
use crate::tensor::Tensor;

/// Offsets of A(i, l) and B(l, j) of batch entry `e`.
fn place(sizes: Sizes, transpose: Transpose, e: usize, i: usize, l: usize, j: usize) -> [usize; 2] {
    let Sizes { m, n, k, shared, .. } = sizes;
    let a = if transpose.a { l * m + i } else { i * k + l };
    let b = if transpose.b { j * k + l } else { l * n + j };
    [e * m * k + a, if shared { b } else { e * k * n + b }]
}

pub(crate) fn forward(_: &Reference, op: MatMul, (sizes, shape): (Sizes, Vec<usize>)) -> Result<Tensor> {
    let (left, right) = (op.a.f64().data(), op.b.f64().data());
    let mut c = Vec::with_capacity(shape.iter().product());
    for e in 0..sizes.batch {
        for i in 0..sizes.m {
            for j in 0..sizes.n {
                let terms = (0..sizes.k).map(|l| {
                    let [a, b] = place(sizes, op.transpose, e, i, l, j);
                    left[a] * right[b]
                });
                c.push(terms.sum::<f64>());
            }
        }
    }
    Ok(op.a.like(Array::detached(c, &shape)))
}

pub(crate) fn backward(_: &Reference, op: MatMulBackward, sizes: Sizes) -> Result<[Option<Tensor>; 2]> {
    let (left, right, dc) = (op.a.f64().data(), op.b.f64().data(), op.gradient.f64().data());
    let (mut da, mut db) = (vec![0.0; left.len()], vec![0.0; right.len()]);
    for e in 0..sizes.batch {
        for i in 0..sizes.m {
            for j in 0..sizes.n {
                let g = dc[(e * sizes.m + i) * sizes.n + j];
                for l in 0..sizes.k {
                    let [a, b] = place(sizes, op.transpose, e, i, l, j);
                    da[a] += g * right[b];
                    db[b] += g * left[a];
                }
            }
        }
    }
    let gradient =
        |needed: bool, of: &Tensor, data| needed.then(|| of.like(Array::detached(data, of.shape())));
    Ok([gradient(op.needs[0], &op.a, da), gradient(op.needs[1], &op.b, db)])
}

//! Reference implementation of the matrix product: a direct transcription of the equations.

use super::{MatMul, Sizes, Transpose, check};
use crate::error::{Result, expect_shape};
use crate::array::{Array, Real};

/// Offsets of A(i, l) and B(l, j) of batch entry `e`.
fn place(sizes: Sizes, transpose: Transpose, e: usize, i: usize, l: usize, j: usize) -> [usize; 2] {
    let Sizes { m, n, k, shared, .. } = sizes;
    let a = if transpose.a { l * m + i } else { i * k + l };
    let b = if transpose.b { j * k + l } else { l * n + j };
    [e * m * k + a, if shared { b } else { e * k * n + b }]
}

pub(crate) fn forward<R: Real>(input: MatMul<&Array<R>>, transpose: Transpose) -> Result<Array<R>> {
    let (sizes, shape) = check(input.a.shape(), input.b.shape(), transpose)?;
    let mut c = Vec::with_capacity(shape.iter().product());
    for e in 0..sizes.batch {
        for i in 0..sizes.m {
            for j in 0..sizes.n {
                let terms = (0..sizes.k).map(|l| {
                    let [a, b] = place(sizes, transpose, e, i, l, j);
                    input.a.data()[a] * input.b.data()[b]
                });
                c.push(terms.sum());
            }
        }
    }
    Ok(Array::detached(c, &shape))
}

pub(crate) fn backward<R: Real>(
    input: MatMul<&Array<R>>,
    transpose: Transpose,
    gradient: &Array<R>,
    needs: [bool; 2],
) -> Result<[Option<Array<R>>; 2]> {
    let (sizes, shape) = check(input.a.shape(), input.b.shape(), transpose)?;
    expect_shape("matmul", "gradient", gradient.shape(), &shape, "[.., m, n]")?;
    let mut da = vec![R::zero(); input.a.len()];
    let mut db = vec![R::zero(); input.b.len()];
    for e in 0..sizes.batch {
        for i in 0..sizes.m {
            for j in 0..sizes.n {
                let g = gradient.data()[(e * sizes.m + i) * sizes.n + j];
                for l in 0..sizes.k {
                    let [a, b] = place(sizes, transpose, e, i, l, j);
                    da[a] += g * input.b.data()[b];
                    db[b] += g * input.a.data()[a];
                }
            }
        }
    }
    Ok([
        needs[0].then(|| Array::detached(da, input.a.shape())),
        needs[1].then(|| Array::detached(db, input.b.shape())),
    ])
}

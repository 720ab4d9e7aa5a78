//! Reference implementation of the elementwise operations: a direct transcription of the equations.

use super::broadcast::{broadcast, dims, offsets};
use super::{Map, Zip};
use crate::error::{Result, expect_shape};
use crate::ops::reduce;
use crate::array::{Array, Real};

fn sigmoid<R: Real>(x: R) -> R {
    R::one() / (R::one() + (-x).exp())
}

/// f(x)
fn value<R: Real>(kind: Map, x: R) -> R {
    match kind {
        Map::Neg => -x,
        Map::Exp => x.exp(),
        Map::Ln => x.ln(),
        Map::Sigmoid => sigmoid(x),
        Map::Silu => x * sigmoid(x),
        Map::Tanh => x.tanh(),
        Map::Relu => {
            if x < R::zero() {
                R::zero()
            } else {
                x
            }
        }
        Map::Softplus => x.max(R::zero()) + (-x.abs()).exp().ln_1p(),
        Map::Square => x * x,
        Map::Sqrt => x.sqrt(),
        Map::Reciprocal => R::one() / x,
        Map::Scale(c) => R::of(c) * x,
        Map::Shift(c) => x + R::of(c),
    }
}

/// f'(x), computed from x or from y = f(x).
fn slope<R: Real>(kind: Map, x: R, y: R) -> R {
    let one = R::one();
    match kind {
        Map::Neg => -one,
        Map::Exp => y,
        Map::Ln => one / x,
        Map::Sigmoid => y * (one - y),
        Map::Silu => sigmoid(x) * (one + x * (one - sigmoid(x))),
        Map::Tanh => one - y * y,
        Map::Relu => {
            if x > R::zero() {
                one
            } else {
                R::zero()
            }
        }
        Map::Softplus => sigmoid(x),
        Map::Square => x + x,
        Map::Sqrt => one / (y + y),
        Map::Reciprocal => -y * y,
        Map::Scale(c) => R::of(c),
        Map::Shift(_) => one,
    }
}

pub(crate) fn map<R: Real>(kind: Map, x: &Array<R>) -> Array<R> {
    Array::detached(x.data().iter().map(|&x| value(kind, x)).collect(), x.shape())
}

pub(crate) fn map_backward<R: Real>(
    kind: Map,
    x: &Array<R>,
    y: &Array<R>,
    gradient: &Array<R>,
) -> Result<Array<R>> {
    expect_shape("map", "y", y.shape(), x.shape(), "the shape of x")?;
    expect_shape("map", "gradient", gradient.shape(), x.shape(), "the shape of x")?;
    let (x, y, dy) = (x.data(), y.data(), gradient.data());
    let dx = (0..dy.len()).map(|i| dy[i] * slope(kind, x[i], y[i])).collect();
    Ok(Array::detached(dx, gradient.shape()))
}

pub(crate) fn zip<R: Real>(kind: Zip, a: &Array<R>, b: &Array<R>) -> Result<Array<R>> {
    pairs(kind, a, b, |a, b| match kind {
        Zip::Add => a + b,
        Zip::Sub => a - b,
        Zip::Mul => a * b,
        Zip::Div => a / b,
    })
}

/// Applies f to every pair of broadcast elements.
fn pairs<R: Real>(kind: Zip, a: &Array<R>, b: &Array<R>, f: impl Fn(R, R) -> R) -> Result<Array<R>> {
    let shape = broadcast(kind.name(), a.shape(), b.shape())?;
    let dims = dims(&shape, a.shape(), b.shape());
    let y = (0..shape.iter().product()).map(|i| {
        let [at_a, at_b] = offsets(&dims, i);
        f(a.data()[at_a], b.data()[at_b])
    });
    Ok(Array::detached(y.collect(), &shape))
}

pub(crate) fn zip_backward<R: Real>(
    kind: Zip,
    a: &Array<R>,
    b: &Array<R>,
    gradient: &Array<R>,
    needs: [bool; 2],
) -> Result<[Option<Array<R>>; 2]> {
    let shape = broadcast(kind.name(), a.shape(), b.shape())?;
    expect_shape(kind.name(), "gradient", gradient.shape(), &shape, "the shape of the result")?;
    let one = R::one();
    let slopes = [
        pairs(kind, a, b, |_, b| match kind {
            Zip::Add | Zip::Sub => one,
            Zip::Mul => b,
            Zip::Div => one / b,
        })?,
        pairs(kind, a, b, |a, b| match kind {
            Zip::Add => one,
            Zip::Sub => -one,
            Zip::Mul => a,
            Zip::Div => -a / (b * b),
        })?,
    ];
    let mut found = [None, None];
    for (i, operand) in [a, b].into_iter().enumerate() {
        if needs[i] {
            found[i] =
                Some(reduce::reference::sum_to(&zip(Zip::Mul, gradient, &slopes[i])?, operand.shape())?);
        }
    }
    Ok(found)
}

//! Reference implementation of the elementwise operations: a direct transcription of the equations.

use super::broadcast::{dims, offsets};
use super::{Map, MapBackward, MapForward, Zip, ZipBackward, ZipForward};
use crate::array::Array;
use crate::error::Result;
use crate::ops::reduce::reference::sum_over;
use crate::reference::Reference;
use crate::tensor::Tensor;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// f(x)
fn value(kind: Map, x: f64) -> f64 {
    match kind {
        Map::Neg => -x,
        Map::Exp => x.exp(),
        Map::Ln => x.ln(),
        Map::Sigmoid => sigmoid(x),
        Map::Silu => x * sigmoid(x),
        Map::Tanh => x.tanh(),
        Map::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
        Map::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
        Map::Square => x * x,
        Map::Sqrt => x.sqrt(),
        Map::Reciprocal => 1.0 / x,
        Map::Scale(c) => c * x,
        Map::Shift(c) => x + c,
    }
}

/// f'(x), computed from x or from y = f(x).
fn slope(kind: Map, x: f64, y: f64) -> f64 {
    match kind {
        Map::Neg => -1.0,
        Map::Exp => y,
        Map::Ln => 1.0 / x,
        Map::Sigmoid => y * (1.0 - y),
        Map::Silu => sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))),
        Map::Tanh => 1.0 - y * y,
        Map::Relu => {
            if x > 0.0 {
                1.0
            } else {
                0.0
            }
        }
        Map::Softplus => sigmoid(x),
        Map::Square => x + x,
        Map::Sqrt => 1.0 / (y + y),
        Map::Reciprocal => -y * y,
        Map::Scale(c) => c,
        Map::Shift(_) => 1.0,
    }
}

pub(crate) fn map(_: &Reference, op: MapForward, (): ()) -> Result<Tensor> {
    let x = op.x.f64();
    let y = x.data().iter().map(|&x| value(op.kind, x)).collect();
    Ok(op.x.like(Array::detached(y, x.shape())))
}

pub(crate) fn map_backward(_: &Reference, op: MapBackward, (): ()) -> Result<Tensor> {
    let (kept, dy) = (op.kept.f64(), op.gradient.f64());
    // The slope reads at most one of x and y, and that is the one that was kept.
    let dx = dy.data().iter().zip(kept.data()).map(|(dy, &kept)| dy * slope(op.kind, kept, kept)).collect();
    Ok(op.gradient.like(Array::detached(dx, dy.shape())))
}

/// f of every pair of elements, broadcast to `shape`.
fn pairs(a: &Array<f64>, b: &Array<f64>, shape: &[usize], f: impl Fn(f64, f64) -> f64) -> Array<f64> {
    let dims = dims(shape, a.shape(), b.shape());
    let y = (0..shape.iter().product()).map(|i| {
        let [at_a, at_b] = offsets(&dims, i);
        f(a.data()[at_a], b.data()[at_b])
    });
    Array::detached(y.collect(), shape)
}

pub(crate) fn zip(_: &Reference, op: ZipForward, shape: Vec<usize>) -> Result<Tensor> {
    let y = pairs(op.a.f64(), op.b.f64(), &shape, |a, b| match op.kind {
        Zip::Add => a + b,
        Zip::Sub => a - b,
        Zip::Mul => a * b,
        Zip::Div => a / b,
    });
    Ok(op.a.like(y))
}

pub(crate) fn zip_backward(_: &Reference, op: ZipBackward, (): ()) -> Result<[Option<Tensor>; 2]> {
    let (a, b, dy) = (op.a.f64(), op.b.f64(), op.gradient.f64());
    let slopes = |slope: &dyn Fn(f64, f64) -> f64| {
        let slopes = pairs(a, b, dy.shape(), slope);
        pairs(dy, &slopes, dy.shape(), |dy, slope| dy * slope)
    };
    let da = op.needs[0].then(|| {
        let whole = slopes(&|_, b| match op.kind {
            Zip::Add | Zip::Sub => 1.0,
            Zip::Mul => b,
            Zip::Div => 1.0 / b,
        });
        op.a.like(sum_over(&whole, a.shape()))
    });
    let db = op.needs[1].then(|| {
        let whole = slopes(&|a, b| match op.kind {
            Zip::Add => 1.0,
            Zip::Sub => -1.0,
            Zip::Mul => a,
            Zip::Div => -a / (b * b),
        });
        op.b.like(sum_over(&whole, b.shape()))
    });
    Ok([da, db])
}

//! Reference implementation of the short convolution: a direct transcription of the equations.

use super::{ShortConv, ShortConvBackward, ShortConvForward, ShortConvGradients, Sizes};
use crate::array::Array;
use crate::error::Result;
use crate::reference::Reference;
use crate::tensor::Tensor;

/// Inputs by token and channel; tokens −K + 1 .. 0 are the tail.
struct Call<'a> {
    sizes: Sizes,
    x: &'a [f64],
    weight: &'a [f64],
    tail: Option<&'a [f64]>,
}

impl<'a> Call<'a> {
    fn new(input: &'a ShortConv<Tensor>, sizes: Sizes) -> Self {
        let ShortConv { x, weight, tail } = input.map(|tensor| tensor.f64().data());
        Self { sizes, x, weight, tail }
    }

    /// x[t − K + 1 + j, d]
    fn x(&self, b: usize, t: usize, j: usize, d: usize) -> f64 {
        let Sizes { tokens, width, kernel, .. } = self.sizes;
        if t + j >= kernel - 1 {
            self.x[(b * tokens + t + j - (kernel - 1)) * width + d]
        } else {
            self.tail.map_or(0.0, |tail| tail[(b * (kernel - 1) + t + j) * width + d])
        }
    }

    fn z(&self, b: usize, t: usize, d: usize) -> f64 {
        let kernel = self.sizes.kernel;
        (0..kernel).map(|j| self.weight[d * kernel + j] * self.x(b, t, j, d)).sum()
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn forward(
    _: &Reference,
    op: ShortConvForward,
    sizes: Vec<Sizes>,
) -> Result<Vec<(Tensor, Tensor)>> {
    Ok(op.inputs.iter().zip(sizes).map(|(input, sizes)| convolve(input, sizes)).collect())
}

fn convolve(input: &ShortConv<Tensor>, sizes: Sizes) -> (Tensor, Tensor) {
    let call = Call::new(input, sizes);
    let Sizes { batch, tokens, width, kernel } = sizes;
    let mut y = Vec::with_capacity(batch * tokens * width);
    let mut tail = Vec::with_capacity(batch * (kernel - 1) * width);
    for b in 0..batch {
        for t in 0..tokens {
            y.extend((0..width).map(|d| call.z(b, t, d)).map(|z| z * sigmoid(z)));
        }
        for j in 0..kernel - 1 {
            tail.extend((0..width).map(|d| call.x(b, tokens, j, d)));
        }
    }
    let x = &input.x;
    (x.like(Array::detached(y, x.shape())), x.like(Array::detached(tail, &[batch, kernel - 1, width])))
}

pub(crate) fn backward(
    _: &Reference,
    op: ShortConvBackward,
    sizes: Vec<Sizes>,
) -> Result<Vec<ShortConvGradients>> {
    let one = |((input, gradient), sizes): ((&ShortConv<Tensor>, &Tensor), Sizes)| {
        gradients(input, gradient.f64().data(), sizes)
    };
    Ok(op.inputs.iter().zip(&op.gradients).zip(sizes).map(one).collect())
}

fn gradients(input: &ShortConv<Tensor>, dy: &[f64], sizes: Sizes) -> ShortConvGradients {
    let call = Call::new(input, sizes);
    let Sizes { batch, tokens, width, kernel } = sizes;
    let mut dx = vec![0.0; call.x.len()];
    let mut dw = vec![0.0; call.weight.len()];
    for b in 0..batch {
        for t in 0..tokens {
            for d in 0..width {
                let z = call.z(b, t, d);
                let slope = sigmoid(z) * (1.0 + z * (1.0 - sigmoid(z)));
                let dz = dy[(b * tokens + t) * width + d] * slope;
                for j in 0..kernel {
                    dw[d * kernel + j] += dz * call.x(b, t, j, d);
                    if t + j >= kernel - 1 {
                        dx[(b * tokens + t + j - (kernel - 1)) * width + d] +=
                            dz * call.weight[d * kernel + j];
                    }
                }
            }
        }
    }
    let of = |like: &Tensor, data| like.like(Array::detached(data, like.shape()));
    ShortConvGradients { x: of(&input.x, dx), weight: of(&input.weight, dw) }
}

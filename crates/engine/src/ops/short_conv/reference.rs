//! Reference implementation of the short convolution: a direct transcription of the equations.

use super::{ShortConv, ShortConvGradients, Sizes, check, check_gradient};
use crate::error::Result;
use crate::array::{Array, Real};

/// Inputs by token and channel; tokens −K + 1 .. 0 are the tail.
struct Call<'a, R> {
    sizes: Sizes,
    x: &'a [R],
    weight: &'a [R],
    tail: Option<&'a [R]>,
}

impl<'a, R: Real> Call<'a, R> {
    fn new(input: ShortConv<&'a Array<R>>) -> Result<Self> {
        let sizes = check(input.x.shape(), input.weight.shape(), input.tail.map(Array::shape))?;
        Ok(Self { sizes, x: input.x.data(), weight: input.weight.data(), tail: input.tail.map(Array::data) })
    }

    /// x[t − K + 1 + j, d]
    fn x(&self, b: usize, t: usize, j: usize, d: usize) -> R {
        let Sizes { tokens, width, kernel, .. } = self.sizes;
        if t + j >= kernel - 1 {
            self.x[(b * tokens + t + j - (kernel - 1)) * width + d]
        } else {
            self.tail.map_or(R::zero(), |tail| tail[(b * (kernel - 1) + t + j) * width + d])
        }
    }

    fn z(&self, b: usize, t: usize, d: usize) -> R {
        let kernel = self.sizes.kernel;
        (0..kernel).map(|j| self.weight[d * kernel + j] * self.x(b, t, j, d)).sum()
    }
}

fn sigmoid<R: Real>(x: R) -> R {
    R::one() / (R::one() + (-x).exp())
}

pub(crate) fn forward<R: Real>(input: ShortConv<&Array<R>>) -> Result<(Array<R>, Array<R>)> {
    let call = Call::new(input)?;
    let Sizes { batch, tokens, width, kernel } = call.sizes;
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
    Ok((Array::detached(y, input.x.shape()), Array::detached(tail, &[batch, kernel - 1, width])))
}

pub(crate) fn backward<R: Real>(
    input: ShortConv<&Array<R>>,
    gradient: &Array<R>,
) -> Result<ShortConvGradients<Array<R>>> {
    let call = Call::new(input)?;
    check_gradient(input.x.shape(), gradient.shape())?;
    let Sizes { batch, tokens, width, kernel } = call.sizes;
    let mut dx = vec![R::zero(); call.x.len()];
    let mut dw = vec![R::zero(); call.weight.len()];
    for b in 0..batch {
        for t in 0..tokens {
            for d in 0..width {
                let z = call.z(b, t, d);
                let slope = sigmoid(z) * (R::one() + z * (R::one() - sigmoid(z)));
                let dz = gradient.data()[(b * tokens + t) * width + d] * slope;
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
    Ok(ShortConvGradients {
        x: Array::detached(dx, input.x.shape()),
        weight: Array::detached(dw, input.weight.shape()),
    })
}

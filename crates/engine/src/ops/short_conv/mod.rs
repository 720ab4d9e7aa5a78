//! Depthwise causal convolution with a short kernel, followed by SiLU.
//!
//! ```text
//! z[t, d] = Σ_j w[d, j] x[t − K + 1 + j, d],   y = SiLU(z)        x, y [B, T, D]   w [D, K] or [D, 1, K]
//! x[−K + 1 .. 0] = tail                                           tail [B, K − 1, D], none = zeros
//!
//! dz = dy ∘ SiLU'(z),   dx[t, d] = Σ_j w[d, j] dz[t + K − 1 − j, d]   (dz = 0 past the end)
//! dw[d, j] = Σ_t dz[t, d] x[t − K + 1 + j, d]
//! ```
//!
//! The operation also returns the new tail: the last K − 1 inputs, including those of the old tail if needed. A
//! sequence split into several calls, each given the previous call's tail, gives results bit-identical to a single
//! call. The tail is a constant: no gradient flows through it into an earlier call.

mod any_kernel;
pub(crate) mod fast;
pub(crate) mod reference;

use crate::error::{Result, bad_shape, expect_lengths, expect_shape};
use crate::op::Op;
use crate::tape::record;
use crate::tensor::Tensor;

/// Inputs of [`short_conv_each`].
#[derive(Clone, Copy, Debug)]
pub struct ShortConv<T> {
    /// Input tokens, [B, T, D].
    pub x: T,
    /// Kernel of each channel, oldest token first, [D, K] or [D, 1, K].
    pub weight: T,
    /// Last K − 1 inputs before this call, [B, K − 1, D]; `None` means zeros.
    pub tail: Option<T>,
}

impl<T> ShortConv<T> {
    /// Applies `f` to every input.
    pub(crate) fn map<'a, U>(&'a self, f: impl Fn(&'a T) -> U) -> ShortConv<U> {
        ShortConv { x: f(&self.x), weight: f(&self.weight), tail: self.tail.as_ref().map(f) }
    }
}

/// Several convolutions; the result is the output y of each, and the tail for the next call.
pub struct ShortConvForward {
    /// The inputs.
    pub inputs: Vec<ShortConv<Tensor>>,
}

/// Gradients of [`ShortConvForward`]; tails are treated as constants.
pub struct ShortConvBackward {
    /// The inputs.
    pub inputs: Vec<ShortConv<Tensor>>,
    /// Gradient of each y.
    pub gradients: Vec<Tensor>,
}

/// Gradients of one convolution.
#[derive(Clone, Debug)]
pub struct ShortConvGradients {
    /// Gradient of `x`.
    pub x: Tensor,
    /// Gradient of `weight`.
    pub weight: Tensor,
}

/// Validated dimensions of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// B.
    pub batch: usize,
    /// T.
    pub tokens: usize,
    /// Number of channels, D.
    pub width: usize,
    /// K.
    pub kernel: usize,
}

impl Op for ShortConvForward {
    const NAME: &'static str = "short_conv";
    /// Those of each convolution.
    type Sizes = Vec<Sizes>;
    type Output = Vec<(Tensor, Tensor)>;

    fn inputs(&self) -> Vec<&Tensor> {
        tensors(&self.inputs).collect()
    }
    fn check(&self) -> Result<Vec<Sizes>> {
        self.inputs.iter().map(check).collect()
    }
}

impl Op for ShortConvBackward {
    const NAME: &'static str = "short_conv_backward";
    /// Those of each convolution.
    type Sizes = Vec<Sizes>;
    type Output = Vec<ShortConvGradients>;

    fn inputs(&self) -> Vec<&Tensor> {
        tensors(&self.inputs).chain(&self.gradients).collect()
    }
    fn check(&self) -> Result<Vec<Sizes>> {
        expect_lengths(Self::NAME, self.inputs.len(), &[self.gradients.len()])?;
        for (input, gradient) in self.inputs.iter().zip(&self.gradients) {
            expect_shape(Self::NAME, "gradient", gradient.shape(), input.x.shape(), "the shape of x")?;
        }
        self.inputs.iter().map(check).collect()
    }
}

fn tensors(inputs: &[ShortConv<Tensor>]) -> impl Iterator<Item = &Tensor> {
    inputs.iter().flat_map(|input| [&input.x, &input.weight].into_iter().chain(&input.tail))
}

fn check(input: &ShortConv<Tensor>) -> Result<Sizes> {
    let ShortConv { x, weight, tail } = input.map(Tensor::shape);
    let &[batch, tokens, width] = x else {
        return bad_shape("short_conv", "x", x, "three dimensions [B, T, D]");
    };
    let (&[channels, kernel] | &[channels, 1, kernel]) = weight else {
        return bad_shape("short_conv", "weight", weight, "[D, K] or [D, 1, K]");
    };
    if channels != width || kernel == 0 {
        let expected = format!("[{width}, K] or [{width}, 1, K] with K ≥ 1 (x has {width} channels)");
        return bad_shape("short_conv", "weight", weight, expected);
    }
    if let Some(tail) = tail {
        expect_shape("short_conv", "tail", tail, &[batch, kernel - 1, width], "B, K − 1, D")?;
    }
    Ok(Sizes { batch, tokens, width, kernel })
}

impl Tensor {
    /// y = SiLU(w ∗ x), and the tail for the next call. Neither tail is differentiable.
    pub fn short_conv(&self, weight: &Tensor, tail: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let [found] = short_conv_each([ShortConv { x: self, weight, tail }])?;
        Ok(found)
    }
}

/// Several convolutions, as one operation in both directions: [`Tensor::short_conv`] for each of the inputs.
pub fn short_conv_each<const N: usize>(inputs: [ShortConv<&Tensor>; N]) -> Result<[(Tensor, Tensor); N]> {
    let kept: Vec<ShortConv<Tensor>> = inputs.iter().map(|input| input.map(|&t| t.clone())).collect();
    let (ys, tails): (Vec<_>, Vec<_>) = ShortConvForward { inputs: kept.clone() }.run()?.into_iter().unzip();
    let variables: Vec<&Tensor> = inputs.iter().flat_map(|input| [input.x, input.weight]).collect();
    let ys = record(&variables, ys, move |_, gradients| {
        // A convolution whose result received no gradient contributes nothing.
        let used: Vec<usize> = (0..N).filter(|&i| gradients[i].is_some()).collect();
        let inputs = used.iter().map(|&i| kept[i].clone()).collect();
        let gradients = gradients.into_iter().flatten().collect();
        let found = ShortConvBackward { inputs, gradients }.run()?;
        let mut result = vec![None; 2 * N];
        for (i, d) in used.into_iter().zip(found) {
            result[2 * i] = Some(d.x);
            result[2 * i + 1] = Some(d.weight);
        }
        Ok(result)
    });
    let Ok(all) = ys.into_iter().zip(tails).collect::<Vec<_>>().try_into() else {
        unreachable!("one for each convolution")
    };
    Ok(all)
}

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

use crate::engine::Engine;
use crate::error::{Result, bad_shape, expect_shape};
use crate::tape::{Tape, Var};

/// Inputs of [`Tape::short_conv`].
#[derive(Clone, Copy, Debug)]
pub struct ShortConv<T> {
    /// Input tokens, [B, T, D].
    pub x: T,
    /// Kernel of each channel, oldest token first, [D, K] or [D, 1, K].
    pub weight: T,
    /// Last K − 1 inputs before this call, [B, K − 1, D]; `None` means zeros.
    pub tail: Option<T>,
}

/// Gradients of [`Tape::short_conv`].
#[derive(Clone, Debug)]
pub struct ShortConvGradients<T> {
    /// Gradient of `x`.
    pub x: T,
    /// Gradient of `weight`.
    pub weight: T,
}

/// Output y, and the tail for the next call.
pub type OutputAndTail<T> = (Var<T>, Var<T>);

/// Validated dimensions of a call.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub tokens: usize,
    pub width: usize,
    pub kernel: usize,
}

pub(crate) fn check(x: &[usize], weight: &[usize], tail: Option<&[usize]>) -> Result<Sizes> {
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

pub(crate) fn check_gradient(x: &[usize], gradient: &[usize]) -> Result<()> {
    expect_shape("short_conv", "gradient", gradient, x, "the shape of x")
}

impl<'e, E: Engine> Tape<'e, E> {
    /// y = SiLU(w ∗ x), and the tail for the next call. Neither tail is differentiable.
    pub fn short_conv(&self, input: ShortConv<&Var<E::Tensor>>) -> Result<OutputAndTail<E::Tensor>> {
        let [found] = self.short_conv_each([input])?;
        Ok(found)
    }

    /// Several convolutions, as one operation in both directions.
    pub fn short_conv_each<const N: usize>(
        &self,
        inputs: [ShortConv<&Var<E::Tensor>>; N],
    ) -> Result<[OutputAndTail<E::Tensor>; N]> {
        let values = inputs.map(|input| ShortConv {
            x: input.x.value().clone(),
            weight: input.weight.value().clone(),
            tail: input.tail.map(|tail| tail.value().clone()),
        });
        let found = self.engine().short_conv(&values.each_ref().map(ShortConv::as_ref))?;
        let (ys, tails): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        let variables: Vec<&Var<E::Tensor>> =
            inputs.iter().flat_map(|input| [input.x, input.weight]).collect();
        let ys = self.record(&variables, ys, move |tape, gradients| {
            let given: Vec<&E::Tensor> = gradients.iter().flatten().collect();
            let used = values.iter().zip(&gradients).filter(|(_, gradient)| gradient.is_some());
            let used: Vec<ShortConv<&E::Tensor>> = used.map(|(input, _)| input.as_ref()).collect();
            let mut found = tape.engine().short_conv_backward(&used, &given)?.into_iter();
            let mut result = Vec::with_capacity(2 * N);
            for gradient in &gradients {
                let d = if gradient.is_some() { found.next() } else { None };
                let (x, weight) = d.map(|d| (d.x, d.weight)).unzip();
                result.extend([x, weight]);
            }
            Ok(result)
        });
        let all: Vec<_> = ys.into_iter().zip(tails).map(|(y, tail)| (y, self.constant(tail))).collect();
        let Ok(all) = all.try_into() else { unreachable!("one for each convolution") };
        Ok(all)
    }
}

impl<T> ShortConv<T> {
    /// The same inputs, borrowed.
    pub(crate) fn as_ref(&self) -> ShortConv<&T> {
        ShortConv { x: &self.x, weight: &self.weight, tail: self.tail.as_ref() }
    }
}

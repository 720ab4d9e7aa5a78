//! Softmax over the last dimension.
//!
//! ```text
//! y_i = e^(x_i − max x) / Σ_j e^(x_j − max x)          x, y [.., n]
//! dx = y ∘ (dy − Σ_j y_j dy_j)
//! ```
//! An element of −inf gets weight 0. A row of only −inf (fully masked) gives zeros and a zero gradient, never NaN.

pub(crate) mod fast;
pub(crate) mod reference;

use crate::error::{Result, bad_shape, expect_shape};
use crate::op::Op;
use crate::tape::record_one;
use crate::tensor::Tensor;

/// Softmax over the last dimension.
pub struct Softmax {
    /// Rows, [.., n].
    pub x: Tensor,
}

/// Gradient of [`Softmax`].
pub struct SoftmaxBackward {
    /// The result, [.., n].
    pub y: Tensor,
    /// Gradient of y.
    pub gradient: Tensor,
}

/// Validates the shape and returns the row width.
fn check(x: &Tensor) -> Result<usize> {
    match x.shape().last() {
        Some(&width) => Ok(width),
        None => bad_shape("softmax", "x", x.shape(), "at least one dimension [.., n]"),
    }
}

impl Op for Softmax {
    const NAME: &'static str = "softmax";
    /// Row width n.
    type Sizes = usize;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<usize> {
        check(&self.x)
    }
}

impl Op for SoftmaxBackward {
    const NAME: &'static str = "softmax_backward";
    /// Row width n.
    type Sizes = usize;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.y, &self.gradient]
    }
    fn check(&self) -> Result<usize> {
        expect_shape(Self::NAME, "gradient", self.gradient.shape(), self.y.shape(), "the shape of x")?;
        check(&self.y)
    }
}

impl Tensor {
    /// Softmax over the last dimension; a row of only −inf gives zeros.
    pub fn softmax(&self) -> Result<Tensor> {
        let y = Softmax { x: self.clone() }.run()?;
        let kept = y.clone();
        Ok(record_one(&[self], y, move |gradient| {
            Ok(vec![Some(SoftmaxBackward { y: kept, gradient }.run()?)])
        }))
    }
}

//! Batched matrix product: one product per index of the leading dimensions.
//!
//! ```text
//! C = A B           A [.., m, k] (stored [.., k, m] if `transpose.a`)        C [.., m, n]
//!                   B [.., k, n] (stored [.., n, k] if `transpose.b`), or one B of two dimensions for all
//! dA = dC Bᵀ,   dB = Aᵀ dC (summed over the leading dimensions if B is shared), each as its input is stored
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::array::element_count;
use crate::error::{Result, bad_shape, expect_shape};
use crate::op::Op;
use crate::tape::record_one;
use crate::tensor::Tensor;

/// C = A B for each index of the leading dimensions.
pub struct MatMul {
    /// Left operand, [.., m, k].
    pub a: Tensor,
    /// Right operand, [.., k, n] with the leading dimensions of `a`, or [k, n] shared by all.
    pub b: Tensor,
    /// How they are stored.
    pub transpose: Transpose,
}

/// Gradients of [`MatMul`].
pub struct MatMulBackward {
    /// Left operand.
    pub a: Tensor,
    /// Right operand.
    pub b: Tensor,
    /// How they are stored.
    pub transpose: Transpose,
    /// Gradient of C, [.., m, n].
    pub gradient: Tensor,
    /// Which of the gradients of a and b are computed.
    pub needs: [bool; 2],
}

/// Which operands are stored with their last two dimensions swapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transpose {
    /// `a` is [.., k, m].
    pub a: bool,
    /// `b` is [.., n, k].
    pub b: bool,
}

/// Validated dimensions of a call.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Number of products.
    pub batch: usize,
    /// Rows of A.
    pub m: usize,
    /// Columns of B.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// Whether one B is shared by the whole batch.
    pub shared: bool,
}

/// Validates a call; returns its dimensions and the shape of the result.
fn check(a: &[usize], b: &[usize], transpose: Transpose) -> Result<(Sizes, Vec<usize>)> {
    let ([leading @ .., a0, a1], [others @ .., b0, b1]) = (a, b) else {
        let (argument, found) = if a.len() < 2 { ("a", a) } else { ("b", b) };
        return bad_shape("matmul", argument, found, "at least two dimensions");
    };
    let (m, k) = if transpose.a { (*a1, *a0) } else { (*a0, *a1) };
    let (n, inner) = if transpose.b { (*b0, *b1) } else { (*b1, *b0) };
    if inner != k {
        let place = if transpose.b { "last" } else { "last but one" };
        return bad_shape("matmul", "b", b, format!("{k} as its {place} dimension, to match a's {a:?}"));
    }
    if !others.is_empty() && others != leading {
        return bad_shape("matmul", "b", b, format!("the leading dimensions {leading:?} of a, or none"));
    }
    let mut shape = leading.to_vec();
    shape.extend([m, n]);
    element_count("matmul", &shape)?;
    let batch = leading.iter().product();
    Ok((Sizes { batch, m, n, k, shared: others.is_empty() && !leading.is_empty() }, shape))
}

impl Op for MatMul {
    const NAME: &'static str = "matmul";
    /// Dimensions, and the shape of the result.
    type Sizes = (Sizes, Vec<usize>);
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.a, &self.b]
    }
    fn check(&self) -> Result<(Sizes, Vec<usize>)> {
        check(self.a.shape(), self.b.shape(), self.transpose)
    }
}

impl Op for MatMulBackward {
    const NAME: &'static str = "matmul_backward";
    type Sizes = Sizes;
    type Output = [Option<Tensor>; 2];
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.a, &self.b, &self.gradient]
    }
    fn check(&self) -> Result<Sizes> {
        let (sizes, shape) = check(self.a.shape(), self.b.shape(), self.transpose)?;
        expect_shape(Self::NAME, "gradient", self.gradient.shape(), &shape, "[.., m, n]")?;
        Ok(sizes)
    }
}

impl Tensor {
    /// C = A B for each index of the leading dimensions.
    pub fn matmul(&self, b: &Tensor) -> Result<Tensor> {
        self.matmul_with(b, Transpose::default())
    }

    /// [`Tensor::matmul`] of operands whose last two dimensions may be swapped.
    pub fn matmul_with(&self, b: &Tensor, transpose: Transpose) -> Result<Tensor> {
        let inputs = [self, b];
        let (a, b) = (self.clone(), b.clone());
        let c = MatMul { a: a.clone(), b: b.clone(), transpose }.run()?;
        let needs = inputs.map(Tensor::is_recorded);
        Ok(record_one(&inputs, c, move |gradient| {
            Ok(MatMulBackward { a, b, transpose, gradient, needs }.run()?.into())
        }))
    }
}

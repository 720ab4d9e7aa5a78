//! Batched matrix product: one product per index of the leading dimensions.
//!
//! ```text
//! C = A B           A [.., m, k] (stored [.., k, m] if `transpose.a`)        C [.., m, n]
//!                   B [.., k, n] (stored [.., n, k] if `transpose.b`), or one B of two dimensions for all
//! dA = dC Bᵀ,   dB = Aᵀ dC (summed over the leading dimensions if B is shared), each as its input is stored
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::{Result, bad_shape};
use crate::tape::{Tape, Var};
use crate::array::element_count;

/// Inputs of [`Tape::matmul`].
#[derive(Clone, Copy, Debug)]
pub struct MatMul<T> {
    /// Left operand, [.., m, k].
    pub a: T,
    /// Right operand, [.., k, n] with the leading dimensions of `a`, or [k, n] shared by all.
    pub b: T,
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
pub(crate) struct Sizes {
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Whether one B is shared by the whole batch.
    pub shared: bool,
}

/// Validates a call; returns its dimensions and the shape of the result.
pub(crate) fn check(a: &[usize], b: &[usize], transpose: Transpose) -> Result<(Sizes, Vec<usize>)> {
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

impl<'e, E: Engine> Tape<'e, E> {
    /// C = A B for each index of the leading dimensions.
    pub fn matmul(&self, input: MatMul<&Var<E::Tensor>>, transpose: Transpose) -> Result<Var<E::Tensor>> {
        let (a, b) = (input.a.value().clone(), input.b.value().clone());
        let c = self.engine().matmul(MatMul { a: &a, b: &b }, transpose)?;
        let needs = [self.records(&[input.a]), self.records(&[input.b])];
        Ok(self.record_one(&[input.a, input.b], c, move |tape, dc| {
            Ok(tape.engine().matmul_backward(MatMul { a: &a, b: &b }, transpose, &dc, needs)?.into())
        }))
    }
}

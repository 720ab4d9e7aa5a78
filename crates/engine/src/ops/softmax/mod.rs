//! Softmax over the last dimension.
//!
//! ```text
//! y_i = e^(x_i − max x) / Σ_j e^(x_j − max x)          x, y [.., n]
//! dx = y ∘ (dy − Σ_j y_j dy_j)
//! ```
//! An element of −inf gets weight 0. A row of only −inf (fully masked) gives zeros and a zero gradient, never NaN.

pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::{Result, bad_shape};
use crate::tape::{Tape, Var};

/// Validates the shape and returns the row width.
pub(crate) fn check(x: &[usize]) -> Result<usize> {
    match x.last() {
        Some(&width) => Ok(width),
        None => bad_shape("softmax", "x", x, "at least one dimension [.., n]"),
    }
}

impl<'e, E: Engine> Tape<'e, E> {
    /// Softmax over the last dimension; a row of only −inf gives zeros.
    pub fn softmax(&self, x: &Var<E::Tensor>) -> Result<Var<E::Tensor>> {
        let y = self.engine().softmax(x.value())?;
        let kept = y.clone();
        Ok(self
            .record_one(&[x], y, move |tape, dy| Ok(vec![Some(tape.engine().softmax_backward(&kept, &dy)?)])))
    }
}

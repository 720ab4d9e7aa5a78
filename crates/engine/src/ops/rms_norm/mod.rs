//! Root-mean-square normalisation, plain and gated.
//!
//! ```text
//! r = 1 / sqrt(mean(x²) + eps),   n = r x ∘ w            x [.., D]   w [d], d divides D: each d numbers are
//! rms_norm:        y = n                                 a row of their own (d = D, or one head's width)
//! gated_rms_norm:  y = n ∘ SiLU(g)                       g [.., D]
//!
//! dn = dy (∘ SiLU(g)),   dg = dy ∘ n ∘ SiLU'(g)
//! dw = Σ dn ∘ r x,   dx = r (dn ∘ w − r² x mean(dn ∘ w ∘ x))
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::{Result, bad_shape, expect_shape};
use crate::tape::{Tape, Var};

/// Inputs of [`Tape::rms_norm`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<T> {
    /// Rows to normalise, [.., D].
    pub x: T,
    /// Weights, [d]; d must divide D.
    pub weight: T,
}

/// Inputs of [`Tape::gated_rms_norm`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct GatedRmsNorm<T> {
    /// Rows to normalise, [.., D].
    pub x: T,
    /// Gates before the SiLU activation, [.., D].
    pub gate: T,
    /// Weights, [d]; d must divide D.
    pub weight: T,
}

/// Validates the shapes and returns the row width d.
pub(crate) fn check(operation: &'static str, x: &[usize], weight: &[usize]) -> Result<usize> {
    let &[width] = weight else {
        return bad_shape(operation, "weight", weight, "one dimension [d]");
    };
    let last = x.last().copied().unwrap_or(1);
    if width == 0 || !last.is_multiple_of(width) {
        return bad_shape(
            operation,
            "x",
            x,
            format!("a last dimension that is a multiple of {width}, the weight's width"),
        );
    }
    Ok(width)
}

pub(crate) fn check_gated(x: &[usize], gate: &[usize], weight: &[usize]) -> Result<usize> {
    expect_shape("gated_rms_norm", "gate", gate, x, "the shape of x")?;
    check("gated_rms_norm", x, weight)
}

impl<'e, E: Engine> Tape<'e, E> {
    /// y = x / rms(x) ∘ w.
    pub fn rms_norm(&self, input: RmsNorm<&Var<E::Tensor>>, eps: f64) -> Result<Var<E::Tensor>> {
        let (x, weight) = (input.x.value().clone(), input.weight.value().clone());
        let y = self.engine().rms_norm(RmsNorm { x: &x, weight: &weight }, eps)?;
        Ok(self.record_one(&[input.x, input.weight], y, move |tape, dy| {
            let d = tape.engine().rms_norm_backward(RmsNorm { x: &x, weight: &weight }, eps, &dy)?;
            Ok(vec![Some(d.x), Some(d.weight)])
        }))
    }

    /// y = x / rms(x) ∘ w ∘ SiLU(gate).
    pub fn gated_rms_norm(&self, input: GatedRmsNorm<&Var<E::Tensor>>, eps: f64) -> Result<Var<E::Tensor>> {
        let (x, gate, weight) =
            (input.x.value().clone(), input.gate.value().clone(), input.weight.value().clone());
        let y = self.engine().gated_rms_norm(GatedRmsNorm { x: &x, gate: &gate, weight: &weight }, eps)?;
        Ok(self.record_one(&[input.x, input.gate, input.weight], y, move |tape, dy| {
            let input = GatedRmsNorm { x: &x, gate: &gate, weight: &weight };
            let d = tape.engine().gated_rms_norm_backward(input, eps, &dy)?;
            Ok(vec![Some(d.x), Some(d.gate), Some(d.weight)])
        }))
    }
}

//! SwiGLU: the gated activation of a feed-forward layer.
//!
//! ```text
//! y = SiLU(gate) ∘ up,   SiLU(g) = g σ(g)                    gate, up, y of one shape
//! d up = dy ∘ SiLU(gate),   d gate = dy ∘ up ∘ SiLU'(gate),   SiLU'(g) = σ(g) (1 + g (1 − σ(g)))
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::{Result, expect_shape};
use crate::tape::{Tape, Var};

/// Inputs of [`Tape::swiglu`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct SwiGlu<T> {
    /// Gates before the SiLU activation, any shape.
    pub gate: T,
    /// Values that are multiplied by the gates, with the same shape.
    pub up: T,
}

pub(crate) fn check(gate: &[usize], up: &[usize]) -> Result<()> {
    expect_shape("swiglu", "up", up, gate, "the shape of gate")
}

pub(crate) fn check_gradient(gate: &[usize], gradient: &[usize]) -> Result<()> {
    expect_shape("swiglu", "gradient", gradient, gate, "the shape of gate")
}

impl<'e, E: Engine> Tape<'e, E> {
    /// y = SiLU(gate) ∘ up.
    pub fn swiglu(&self, input: SwiGlu<&Var<E::Tensor>>) -> Result<Var<E::Tensor>> {
        let (gate, up) = (input.gate.value().clone(), input.up.value().clone());
        let y = self.engine().swiglu(SwiGlu { gate: &gate, up: &up })?;
        Ok(self.record_one(&[input.gate, input.up], y, move |tape, dy| {
            let d = tape.engine().swiglu_backward(SwiGlu { gate: &gate, up: &up }, &dy)?;
            Ok(vec![Some(d.gate), Some(d.up)])
        }))
    }
}

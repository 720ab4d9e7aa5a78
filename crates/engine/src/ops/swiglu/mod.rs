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
        Ok(self.swiglu_each(&[input])?.remove(0))
    }

    /// y = SiLU(gate) ∘ up for each of the inputs, as one operation in both directions.
    pub fn swiglu_each(&self, inputs: &[SwiGlu<&Var<E::Tensor>>]) -> Result<Vec<Var<E::Tensor>>> {
        let value = |input: &SwiGlu<&Var<E::Tensor>>| SwiGlu {
            gate: input.gate.value().clone(),
            up: input.up.value().clone(),
        };
        let values: Vec<SwiGlu<E::Tensor>> = inputs.iter().map(value).collect();
        let y = self.engine().swiglu(&values.iter().map(SwiGlu::as_ref).collect::<Vec<_>>())?;
        let variables: Vec<&Var<E::Tensor>> =
            inputs.iter().flat_map(|input| [input.gate, input.up]).collect();
        Ok(self.record(&variables, y, move |tape, gradients| {
            let used = values.iter().zip(&gradients).filter(|(_, gradient)| gradient.is_some());
            let used: Vec<SwiGlu<&E::Tensor>> = used.map(|(input, _)| input.as_ref()).collect();
            let dy: Vec<&E::Tensor> = gradients.iter().flatten().collect();
            let mut found = tape.engine().swiglu_backward(&used, &dy)?.into_iter();
            let mut result = Vec::with_capacity(2 * gradients.len());
            for gradient in &gradients {
                let d = if gradient.is_some() { found.next() } else { None };
                let (gate, up) = d.map(|d| (d.gate, d.up)).unzip();
                result.extend([gate, up]);
            }
            Ok(result)
        }))
    }
}

impl<T> SwiGlu<T> {
    /// The same inputs, borrowed.
    pub(crate) fn as_ref(&self) -> SwiGlu<&T> {
        SwiGlu { gate: &self.gate, up: &self.up }
    }
}

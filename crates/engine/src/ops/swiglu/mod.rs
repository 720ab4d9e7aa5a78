//! SwiGLU: the gated activation of a feed-forward layer.
//!
//! ```text
//! y = SiLU(gate) ∘ up,   SiLU(g) = g σ(g)                    gate, up, y of one shape
//! d up = dy ∘ SiLU(gate),   d gate = dy ∘ up ∘ SiLU'(gate),   SiLU'(g) = σ(g) (1 + g (1 − σ(g)))
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::error::{Result, expect_lengths, expect_shape};
use crate::op::{Op, chosen, owned};
use crate::tape::{record, records};
use crate::tensor::Tensor;

/// y = SiLU(gate) ∘ up for each gate and its up; see [`swiglu_each`].
pub struct SwiGlu {
    /// Gates before the SiLU activation, of any shapes.
    pub gates: Vec<Tensor>,
    /// Values that are multiplied by the gates, each of the shape of its gate.
    pub ups: Vec<Tensor>,
}

/// Gradients of [`SwiGlu`]: those of the gates, and those of the ups.
pub struct SwiGluBackward {
    /// The inputs.
    pub forward: SwiGlu,
    /// Gradient of each result.
    pub gradients: Vec<Tensor>,
}

/// Returns an error unless each of `others` has the shape of its gate.
fn expect_alike(
    operation: &'static str,
    name: &'static str,
    gates: &[Tensor],
    others: &[Tensor],
) -> Result<()> {
    expect_lengths(operation, gates.len(), &[others.len()])?;
    let same = |(gate, other): (&Tensor, &Tensor)| {
        expect_shape(operation, name, other.shape(), gate.shape(), "the shape of gate")
    };
    gates.iter().zip(others).try_for_each(same)
}

impl Op for SwiGlu {
    const NAME: &'static str = "swiglu";
    type Sizes = ();
    type Output = Vec<Tensor>;
    fn inputs(&self) -> Vec<&Tensor> {
        self.gates.iter().chain(&self.ups).collect()
    }
    fn check(&self) -> Result<()> {
        expect_alike(Self::NAME, "up", &self.gates, &self.ups)
    }
}

impl Op for SwiGluBackward {
    const NAME: &'static str = "swiglu_backward";
    type Sizes = ();
    type Output = (Vec<Tensor>, Vec<Tensor>);
    fn inputs(&self) -> Vec<&Tensor> {
        self.forward.inputs().into_iter().chain(&self.gradients).collect()
    }
    fn check(&self) -> Result<()> {
        self.forward.check()?;
        expect_alike(Self::NAME, "gradient", &self.forward.gates, &self.gradients)
    }
}

impl Tensor {
    /// y = SiLU(gate) ∘ up; this tensor is the gate.
    pub fn swiglu(&self, up: &Tensor) -> Result<Tensor> {
        Ok(swiglu_each(&[self], &[up])?.remove(0))
    }
}

/// y = SiLU(gate) ∘ up for each gate and its up, as one operation in both directions.
pub fn swiglu_each(gates: &[&Tensor], ups: &[&Tensor]) -> Result<Vec<Tensor>> {
    let y = SwiGlu { gates: owned(gates), ups: owned(ups) }.run()?;
    let inputs: Vec<&Tensor> = gates.iter().zip(ups).flat_map(|(&gate, &up)| [gate, up]).collect();
    if !records(&inputs) {
        return Ok(y);
    }
    let (gates, ups) = (owned(gates), owned(ups));
    Ok(record(&inputs, y, move |_, gradients| {
        let used: Vec<usize> = (0..gates.len()).filter(|&i| gradients[i].is_some()).collect();
        let forward = SwiGlu { gates: chosen(&gates, &used), ups: chosen(&ups, &used) };
        let gradients = gradients.into_iter().flatten().collect();
        let (dgates, dups) = SwiGluBackward { forward, gradients }.run()?;
        let mut result = vec![None; 2 * gates.len()];
        for ((i, dgate), dup) in used.into_iter().zip(dgates).zip(dups) {
            result[2 * i] = Some(dgate);
            result[2 * i + 1] = Some(dup);
        }
        Ok(result)
    }))
}

//! One step of the AdamW optimiser, and the gradient norm needed for clipping.
//!
//! ```text
//! g ← clip · g
//! m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
//! p ← p − lr · decay · p − lr · (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + eps)
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::error::{Result, bad_value, expect_shape};
use crate::op::{Op, owned, run_in_place};
use crate::tensor::Tensor;

/// Parameter and its moments.
#[derive(Debug)]
pub struct AdamW<T> {
    /// Parameter p.
    pub parameter: T,
    /// First moment m.
    pub first_moment: T,
    /// Second moment v.
    pub second_moment: T,
}

/// Hyperparameters of one step; all but the weight decay are the same for all parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Learning rate.
    pub learning_rate: f64,
    /// β₁ and β₂.
    pub betas: [f64; 2],
    /// Epsilon added to the square root of the second moment.
    pub eps: f64,
    /// Weight decay, scaled only by the learning rate.
    pub weight_decay: f64,
    /// Factor applied to the gradient, from global-norm clipping (see [`clip_factor`]).
    pub clip: f64,
    /// Step number, starting at 1.
    pub step: u64,
}

/// Factor that reduces a global norm to `limit`; 1 if the norm is not above it.
pub fn clip_factor(squared_norm: f64, limit: f64) -> f64 {
    let norm = squared_norm.sqrt();
    if norm > limit { limit / norm } else { 1.0 }
}

impl Step {
    /// Bias corrections 1 − βᵗ of both moments.
    pub(crate) fn corrections(&self) -> [f64; 2] {
        self.betas.map(|beta| 1.0 - beta.powf(self.step as f64))
    }
}

/// One step on a parameter and its moments; returns all three, in place where no other tensor shares the buffer.
pub struct AdamWStep {
    /// Parameter p.
    pub parameter: Tensor,
    /// First moment m.
    pub first_moment: Tensor,
    /// Second moment v.
    pub second_moment: Tensor,
    /// Gradient g.
    pub gradient: Tensor,
    /// Hyperparameters.
    pub step: Step,
}

/// Σ x² over all elements of all tensors; see [`squared_norm`].
pub struct SquaredNorm {
    /// The tensors, at least one.
    pub tensors: Vec<Tensor>,
}

impl Op for AdamWStep {
    const NAME: &'static str = "adamw";
    type Sizes = ();
    type Output = [Tensor; 3];
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.parameter, &self.first_moment, &self.second_moment, &self.gradient]
    }
    fn check(&self) -> Result<()> {
        let others = [
            ("first_moment", &self.first_moment),
            ("second_moment", &self.second_moment),
            ("gradient", &self.gradient),
        ];
        for (name, tensor) in others {
            let expected = self.parameter.shape();
            expect_shape(Self::NAME, name, tensor.shape(), expected, "the shape of the parameter")?;
        }
        if self.step.step == 0 {
            return bad_value(Self::NAME, "step is 0; step numbers start at 1");
        }
        Ok(())
    }
}

impl Op for SquaredNorm {
    const NAME: &'static str = "squared_norm";
    type Sizes = ();
    type Output = f64;
    fn inputs(&self) -> Vec<&Tensor> {
        self.tensors.iter().collect()
    }
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// One AdamW step on a parameter and its two moments, in place where no other tensor shares the buffer.
pub fn update(state: AdamW<&mut Tensor>, gradient: &Tensor, step: &Step) -> Result<()> {
    let AdamW { parameter, first_moment, second_moment } = state;
    // Buffers must not be shared while the kernel runs, so the tensors are moved into the operation.
    let take = |tensor: &mut Tensor| std::mem::replace(tensor, gradient.clone());
    let op = AdamWStep {
        parameter: take(parameter),
        first_moment: take(first_moment),
        second_moment: take(second_moment),
        gradient: gradient.clone(),
        step: *step,
    };
    let mut put = |[p, m, v]: [Tensor; 3]| (*parameter, *first_moment, *second_moment) = (p, m, v);
    let updated = run_in_place(op, |op| put([op.parameter, op.first_moment, op.second_moment]))?;
    put(updated);
    Ok(())
}

/// Σ x² over all elements of all tensors, in f64: per-tensor sums, added in list order. One call covers all parameters
/// of a model, so a device synchronises once instead of once per parameter.
pub fn squared_norm(tensors: &[&Tensor]) -> Result<f64> {
    if tensors.is_empty() { Ok(0.0) } else { SquaredNorm { tensors: owned(tensors) }.run() }
}

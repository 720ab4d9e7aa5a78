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

pub(crate) fn check(shapes: [&[usize]; 3], gradient: &[usize], step: &Step) -> Result<()> {
    let names = "the shape of the parameter";
    expect_shape("adamw", "first_moment", shapes[1], shapes[0], names)?;
    expect_shape("adamw", "second_moment", shapes[2], shapes[0], names)?;
    expect_shape("adamw", "gradient", gradient, shapes[0], names)?;
    if step.step == 0 {
        return bad_value("adamw", "step is 0; step numbers start at 1");
    }
    Ok(())
}

impl Step {
    /// Bias corrections 1 − βᵗ of both moments.
    pub(crate) fn corrections(&self) -> [f64; 2] {
        self.betas.map(|beta| 1.0 - beta.powf(self.step as f64))
    }
}

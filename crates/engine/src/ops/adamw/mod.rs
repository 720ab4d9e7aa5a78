//! One step of AdamW, and the norm that clipping needs.
//!
//! ```text
//! g ← clip · g
//! m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
//! p ← p − lr · decay · p − lr · (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + eps)
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::error::{Result, bad_value, expect_shape};

/// A parameter and its moments.
#[derive(Debug)]
pub struct AdamW<T> {
    /// The parameter, p.
    pub parameter: T,
    /// The first moment, m.
    pub first_moment: T,
    /// The second moment, v.
    pub second_moment: T,
}

/// What one step does, the same for all parameters but for the decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Learning rate.
    pub learning_rate: f64,
    /// β₁ and β₂.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay, not scaled by anything but the learning rate.
    pub weight_decay: f64,
    /// Factor on the gradient, from the global-norm clip (see [`clip_factor`]).
    pub clip: f64,
    /// The step's number, from 1.
    pub step: u64,
}

/// The factor that brings a global norm down to `limit`; 1 where it is below.
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
        return bad_value("adamw", "the step's number starts at 1, and 0 came");
    }
    Ok(())
}

impl Step {
    /// 1 − βᵗ for both moments.
    pub(crate) fn corrections(&self) -> [f64; 2] {
        self.betas.map(|beta| 1.0 - beta.powf(self.step as f64))
    }
}

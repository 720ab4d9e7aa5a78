//! Rotary position embedding; element i of a head is paired with element i + d/2.
//!
//! ```text
//! x [B, T, H·d], d even;  token t is at position p = offset + t;  pair i < d/2 of each head is (x[i], x[i + d/2])
//! a = p · theta^(−2i/d)
//! y[i]       = x[i] cos a − x[i + d/2] sin a
//! y[i + d/2] = x[i + d/2] cos a + x[i] sin a
//!
//! dx is dy rotated by −a.
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::error::{Result, bad_shape, bad_value};
use crate::op::Op;
use crate::tape::record_one;
use crate::tensor::Tensor;

/// Rotates each pair of each head of x; see [`Tensor::rotary`].
pub struct RotaryForward {
    /// Heads of all tokens, [B, T, H·d].
    pub x: Tensor,
    /// Heads, frequencies and positions.
    pub rotary: Rotary,
}

/// Gradient of [`RotaryForward`].
pub struct RotaryBackward {
    /// Gradient of y, [B, T, H·d].
    pub gradient: Tensor,
    /// Heads, frequencies and positions.
    pub rotary: Rotary,
}

/// Options of [`Tensor::rotary`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Number of heads; all are rotated alike.
    pub heads: usize,
    /// Base of the geometric progression of frequencies.
    pub theta: f64,
    /// Position of the first token.
    pub offset: usize,
}

impl Rotary {
    /// Angle per position of pair `i` of a head of width `head`.
    pub(crate) fn frequency(&self, i: usize, head: usize) -> f64 {
        self.theta.powf(-((2 * i) as f64) / head as f64)
    }
}

/// Validated dimensions of a call.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Tokens T of a sequence.
    pub tokens: usize,
    /// Width d of a head.
    pub head: usize,
}

fn check(argument: &'static str, x: &[usize], rotary: &Rotary) -> Result<Sizes> {
    let Rotary { heads, theta, offset } = *rotary;
    let &[_, tokens, width] = x else {
        return bad_shape("rotary", argument, x, "three dimensions [B, T, H·d]");
    };
    if heads == 0 || width == 0 || !width.is_multiple_of(2 * heads) {
        let expected = format!("a last dimension of {heads} heads, each of the same even width");
        return bad_shape("rotary", argument, x, expected);
    }
    if !(theta.is_finite() && theta > 0.0) {
        return bad_value("rotary", format!("theta is {theta}; it must be a positive number"));
    }
    // f64 represents positions up to 2^53 exactly.
    if offset.checked_add(tokens).is_none_or(|end| end > 1 << 53) {
        return bad_value("rotary", format!("offset {offset} with {tokens} tokens is beyond position 2^53"));
    }
    Ok(Sizes { tokens, head: width / heads })
}

impl Op for RotaryForward {
    const NAME: &'static str = "rotary";
    type Sizes = Sizes;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<Sizes> {
        check("x", self.x.shape(), &self.rotary)
    }
}

impl Op for RotaryBackward {
    const NAME: &'static str = "rotary_backward";
    type Sizes = Sizes;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.gradient]
    }
    fn check(&self) -> Result<Sizes> {
        check("gradient", self.gradient.shape(), &self.rotary)
    }
}

impl Tensor {
    /// Rotates each pair of each head of x [B, T, H·d] by an angle proportional to the token's position.
    pub fn rotary(&self, rotary: Rotary) -> Result<Tensor> {
        let y = RotaryForward { x: self.clone(), rotary }.run()?;
        Ok(record_one(&[self], y, move |gradient| Ok(vec![Some(RotaryBackward { gradient, rotary }.run()?)])))
    }
}

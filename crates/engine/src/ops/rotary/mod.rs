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

use crate::engine::Engine;
use crate::error::{Result, bad_shape, bad_value};
use crate::tape::{Tape, Var};

/// Options of [`Tape::rotary`].
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
pub(crate) struct Sizes {
    pub tokens: usize,
    pub head: usize,
}

pub(crate) fn check(argument: &'static str, x: &[usize], rotary: &Rotary) -> Result<Sizes> {
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

impl<'e, E: Engine> Tape<'e, E> {
    /// Rotates each pair of each head by an angle proportional to the token's position.
    pub fn rotary(&self, x: &Var<E::Tensor>, rotary: Rotary) -> Result<Var<E::Tensor>> {
        let y = self.engine().rotary(x.value(), rotary)?;
        Ok(self
            .record_one(&[x], y, move |tape, dy| Ok(vec![Some(tape.engine().rotary_backward(&dy, rotary)?)])))
    }
}

//! Rotary position embedding; element i of a head is paired with element i + r/2.
//!
//! ```text
//! x [B, T, H·d];  token t is at position p = offset + t;  the first r elements of each head turn, r even and d unless
//! said otherwise;  pair i < r/2 is (x[i], x[i + r/2])
//! a = p f_i,   f_i = theta^(−2i/r), or a scaled form of it
//! y[i]       = x[i] cos a − x[i + r/2] sin a
//! y[i + r/2] = x[i + r/2] cos a + x[i] sin a
//! y[j]       = x[j] from j = r on
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
    /// Position of the first token.
    pub offset: usize,
    /// The angles.
    pub frequencies: Frequencies,
}

/// The angle by which each pair turns from one position to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frequencies {
    /// Base of the geometric progression.
    pub theta: f64,
    /// r, the elements of a head that turn; `None` for all.
    pub turned: Option<usize>,
    /// How the frequencies of a model are changed for longer texts.
    pub scaling: Scaling,
}

/// Changes of the frequencies, under the names that checkpoints have for them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Scaling {
    /// None.
    #[default]
    Default,
    /// f / factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// With n = original · f / 2π, the turns of a pair in the original length: f / factor for n below `low`, f for n
    /// above `high`, and in between their mean with weights that change linearly with n.
    Llama3 {
        /// The factor.
        factor: f64,
        /// Fewer turns than this: the frequency is divided.
        low: f64,
        /// More turns than this: it stays.
        high: f64,
        /// The length, in tokens, for which the model was trained first.
        original: f64,
    },
}

impl Rotary {
    /// Whole heads, and frequencies as they are.
    pub fn new(heads: usize, theta: f64, offset: usize) -> Self {
        Self { heads, offset, frequencies: Frequencies { theta, turned: None, scaling: Scaling::Default } }
    }
}

impl Frequencies {
    /// Angle per position of each pair of a head with `turned` elements that turn.
    pub fn list(&self, turned: usize) -> Vec<f64> {
        let plain = |i: usize| self.theta.powf(-((2 * i) as f64) / turned as f64);
        (0..turned / 2).map(|i| self.scaling.apply(plain(i))).collect()
    }
}

impl Scaling {
    fn apply(self, f: f64) -> f64 {
        match self {
            Self::Default => f,
            Self::Linear { factor } => f / factor,
            Self::Llama3 { factor, low, high, original } => {
                let turns = original * f / std::f64::consts::TAU;
                let share = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - share) * f / factor + share * f
            }
        }
    }
}

/// Validated dimensions of a call.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Tokens T of a sequence.
    pub tokens: usize,
    /// Width d of a head.
    pub head: usize,
    /// r, its elements that turn.
    pub turned: usize,
}

fn check(argument: &'static str, x: &[usize], rotary: &Rotary) -> Result<Sizes> {
    let Rotary { heads, offset, frequencies: Frequencies { theta, turned, .. } } = *rotary;
    let &[_, tokens, width] = x else {
        return bad_shape("rotary", argument, x, "three dimensions [B, T, H·d]");
    };
    if heads == 0 || width == 0 || !width.is_multiple_of(heads) {
        let expected = format!("a last dimension of {heads} heads, each of the same width");
        return bad_shape("rotary", argument, x, expected);
    }
    let head = width / heads;
    let turned = turned.unwrap_or(head);
    if turned == 0 || turned > head || !turned.is_multiple_of(2) {
        let expected = format!("heads of which {turned} elements can turn, an even number of at least 2");
        return bad_shape("rotary", argument, x, expected);
    }
    if !(theta.is_finite() && theta > 0.0) {
        return bad_value("rotary", format!("theta is {theta}; it must be a positive number"));
    }
    // f64 represents positions up to 2^53 exactly.
    if offset.checked_add(tokens).is_none_or(|end| end > 1 << 53) {
        return bad_value("rotary", format!("offset {offset} with {tokens} tokens is beyond position 2^53"));
    }
    Ok(Sizes { tokens, head, turned })
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
    /// Rotates pairs of each head of x [B, T, H·d] by angles proportional to the token's position.
    pub fn rotary(&self, rotary: Rotary) -> Result<Tensor> {
        let y = RotaryForward { x: self.clone(), rotary }.run()?;
        Ok(record_one(&[self], y, move |gradient| Ok(vec![Some(RotaryBackward { gradient, rotary }.run()?)])))
    }
}

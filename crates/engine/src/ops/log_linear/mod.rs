//! Log-linear gated delta rule: every token reads a logarithmic number of states, each with its own weight.
//!
//! A single recurrent state mixes the whole past. Here the past is split into blocks of power-of-two size, each with
//! its own state, so a token can weight recent and distant blocks differently, at a cost per token (time and memory)
//! that grows only logarithmically with the length of the sequence.
//!
//! A token at position t sees an earlier (or its own) position s through level bit_length(t XOR s): level 0 is the
//! token itself, level m ≥ 1 is a completed block of 2^(m−1) tokens. For each value head h, which uses key head h /
//! (Hv / Hk), with states S⁰, S¹, … [d_k, d_v]:
//!
//! ```text
//! q, k ← x / sqrt(Σx² + 1e-6)  (q unscaled),   β = σ(write)  (· 2 with allow_neg_eigval)
//! log α = −exp(a_log) · softplus(retention + dt_bias),   λ = softplus(L ∘ level)
//! before token t > 0, z = trailing zeros of t:   S^(z+1) += S⁰ + … + S^z,   S⁰ = … = S^z = 0
//! m ≥ 1:  S^m ← α S^m,   S^m ← S^m − β k (S^mᵀ k)ᵀ;        S⁰ = β k vᵀ
//! o_t = Σ_m λ_t[min(m, NL − 1)] S^mᵀ q
//! ```
//!
//! Shapes: query, key [B, T, Hk·d_k]; value and readouts [B, T, Hv·d_v]; retention, write [B, T, Hv]; a_log,
//! dt_bias [Hv]; level [B, T, Hv·NL]; L [Hv, NL].
//!
//! Level states passed between calls are [B, Hv, LV, d_k, d_v], merged for the token at `position`: LV =
//! bit_length(position) + 1, level m ≥ 1 is non-empty if bit m − 1 of `position` is set, and all other levels are 0
//! (level 0 always). States from immediately after the last token, before merging, are equivalent and also
//! accepted.

mod chunk;
pub(crate) mod fast;
mod fast_backward;
mod fast_levels;
pub(crate) mod reference;

#[doc(hidden)]
pub use chunk::{Chunk, chunks, filled};

use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::op::Op;
use crate::ops::gated_delta::{self, GatedDelta, check_heads};
use crate::tape::{record_one, records};
use crate::tensor::Tensor;

const NAME: &str = "log_linear_delta";

/// Inputs of [`LogLinear::log_linear_delta`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct LogLinear<T> {
    /// Unnormalised queries, [B, T, Hk·d_k].
    pub query: T,
    /// Unnormalised keys, [B, T, Hk·d_k].
    pub key: T,
    /// Values, [B, T, Hv·d_v].
    pub value: T,
    /// Input of the decay gate, W_a x, [B, T, Hv].
    pub retention_input: T,
    /// Input of the write gate, W_b x (before the sigmoid), [B, T, Hv].
    pub write_input: T,
    /// Logarithm of the decay rate, [Hv].
    pub a_log: T,
    /// Bias added to `retention_input`, [Hv].
    pub dt_bias: T,
    /// Level inputs W_l x, [B, T, Hv·NL].
    pub level_input: T,
    /// Factor L of `level_input`, [Hv, NL].
    pub level_scale: T,
}

impl<T> LogLinear<T> {
    /// Borrows every input.
    pub fn as_ref(&self) -> LogLinear<&T> {
        LogLinear {
            query: &self.query,
            key: &self.key,
            value: &self.value,
            retention_input: &self.retention_input,
            write_input: &self.write_input,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            level_input: &self.level_input,
            level_scale: &self.level_scale,
        }
    }

    /// Applies `f` to every input, in field order.
    pub fn map<U>(self, f: impl FnMut(T) -> U) -> LogLinear<U> {
        let [query, key, value, retention_input, write_input, a_log, dt_bias, level_input, level_scale] =
            self.into_array().map(f);
        LogLinear {
            query,
            key,
            value,
            retention_input,
            write_input,
            a_log,
            dt_bias,
            level_input,
            level_scale,
        }
    }

    /// Applies `f` to a reference to every input, in field order.
    pub fn each<'a, U>(&'a self, f: impl FnMut(&'a T) -> U) -> LogLinear<U> {
        self.as_ref().map(f)
    }

    /// Inputs shared with the plain gated delta rule.
    pub(crate) fn gated_delta(&self) -> GatedDelta<T>
    where
        T: Copy,
    {
        GatedDelta {
            query: self.query,
            key: self.key,
            value: self.value,
            retention_input: self.retention_input,
            write_input: self.write_input,
            a_log: self.a_log,
            dt_bias: self.dt_bias,
            initial_state: None,
        }
    }

    /// Inputs in field order.
    pub fn into_array(self) -> [T; 9] {
        [
            self.query,
            self.key,
            self.value,
            self.retention_input,
            self.write_input,
            self.a_log,
            self.dt_bias,
            self.level_input,
            self.level_scale,
        ]
    }
}

/// Options of [`LogLinear::log_linear_delta`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLinearOptions {
    /// Number of query and key heads, Hk.
    pub key_heads: usize,
    /// Number of value heads, Hv; must be a multiple of Hk.
    pub value_heads: usize,
    /// Doubles the write strength β to the range 0 to 2.
    pub allow_neg_eigval: bool,
    /// Number of tokens of the sequence before this call.
    pub position: usize,
    /// Whether to return the level states after the last token.
    pub want_state: bool,
}

/// Result of the forward pass.
#[derive(Clone, Debug)]
pub struct LogLinearOutput<T> {
    /// Readouts o, [B, T, Hv·d_v].
    pub readouts: T,
    /// Level states for position + T, [B, Hv, LV, d_k, d_v], if requested.
    pub state: Option<T>,
    /// Data for the device's own backward pass, if requested.
    pub saved: Option<T>,
}

/// Validated dimensions of a call.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Dimensions in common with the plain gated delta rule.
    pub heads: gated_delta::Sizes,
    /// Number of level scales NL, the columns of L.
    pub scales: usize,
    /// Number of tokens of the sequence before this call.
    pub position: usize,
    /// Number of levels LV before the first token and after the last.
    pub levels: [usize; 2],
}

impl Sizes {
    /// Shape of the level states after the last token, [B, Hv, LV, d_k, d_v].
    pub fn state_shape(&self) -> [usize; 5] {
        let gated_delta::Sizes { batch, value_heads, key_dim, value_dim, .. } = self.heads;
        [batch, value_heads, self.levels[1], key_dim, value_dim]
    }
}

/// Number of bits needed to represent `x`; 0 for 0.
pub(crate) fn bit_length(x: usize) -> usize {
    (usize::BITS - x.leading_zeros()) as usize
}

fn check(input: LogLinear<&[usize]>, options: &LogLinearOptions, initial: Option<&[usize]>) -> Result<Sizes> {
    let position = options.position;
    let heads = check_heads(NAME, &input.gated_delta(), options.key_heads, options.value_heads)?;
    expect_shape(NAME, "query", input.query, input.key, "the shape of key")?;
    let gated_delta::Sizes { batch, tokens, value_heads, key_dim, value_dim, .. } = heads;
    let scales = match input.level_scale {
        &[h, scales] if h == value_heads && scales > 0 => scales,
        found => {
            let expected = format!("[{value_heads}, NL] (value_heads, at least one level)");
            return bad_shape(NAME, "level_scale", found, expected);
        }
    };
    let level_shape = [batch, tokens, value_heads * scales];
    expect_shape(NAME, "level_input", input.level_input, &level_shape, "batch, tokens, value_heads·NL")?;
    let Some(end) = position.checked_add(tokens).filter(|&end| end <= isize::MAX as usize) else {
        return bad_value(NAME, format!("position {position} is too large"));
    };
    let levels = [bit_length(position) + 1, bit_length(end) + 1];
    if let Some(initial) = initial {
        let expected = [batch, value_heads, levels[0], key_dim, value_dim];
        let names = "batch, value_heads, bit_length(position) + 1, d_k, d_v";
        expect_shape(NAME, "initial", initial, &expected, names)?;
    }
    Ok(Sizes { heads, scales, position, levels })
}

/// The forward pass as a device runs it.
pub struct LogLinearForward {
    /// The inputs.
    pub input: LogLinear<Tensor>,
    /// The options.
    pub options: LogLinearOptions,
    /// Level states before the first token; `None` means 0.
    pub initial: Option<Tensor>,
    /// Whether a backward pass will follow.
    pub keep: bool,
}

/// Gradients of [`LogLinearForward`] with respect to its inputs.
pub struct LogLinearBackward {
    /// The inputs.
    pub input: LogLinear<Tensor>,
    /// The options.
    pub options: LogLinearOptions,
    /// Level states before the first token; `None` means 0.
    pub initial: Option<Tensor>,
    /// What the forward pass saved.
    pub saved: Option<Tensor>,
    /// Gradient of the readouts.
    pub gradient: Tensor,
}

impl Op for LogLinearForward {
    const NAME: &'static str = NAME;
    type Sizes = Sizes;
    type Output = LogLinearOutput<Tensor>;

    fn inputs(&self) -> Vec<&Tensor> {
        self.input.as_ref().into_array().into_iter().chain(&self.initial).collect()
    }
    fn check(&self) -> Result<Sizes> {
        check(self.input.each(Tensor::shape), &self.options, self.initial.as_ref().map(Tensor::shape))
    }
}

impl Op for LogLinearBackward {
    const NAME: &'static str = "log_linear_delta_backward";
    type Sizes = Sizes;
    type Output = LogLinear<Tensor>;

    fn inputs(&self) -> Vec<&Tensor> {
        let input = self.input.as_ref().into_array().into_iter();
        input.chain(&self.initial).chain(&self.saved).chain([&self.gradient]).collect()
    }
    fn check(&self) -> Result<Sizes> {
        let input = self.input.each(Tensor::shape);
        expect_shape(NAME, "gradient", self.gradient.shape(), input.value, "the shape of value")?;
        check(input, &self.options, self.initial.as_ref().map(Tensor::shape))
    }
}

impl LogLinear<&Tensor> {
    /// Returns the readouts o, and the level states after the last token if the options request them. `initial`
    /// holds the level states before the first token (`None` means 0). States are not differentiable.
    pub fn log_linear_delta(
        self,
        options: &LogLinearOptions,
        initial: Option<&Tensor>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (tensors, options) = (self.into_array(), *options);
        let (input, initial) = (self.map(Tensor::detach), initial.map(Tensor::detach));
        let keep = records(&tensors);
        let op = LogLinearForward { input: input.clone(), options, initial: initial.clone(), keep };
        let LogLinearOutput { readouts, state, saved } = op.run()?;
        let readouts = record_one(&tensors, readouts, move |gradient| {
            let d = LogLinearBackward { input, options, initial, saved, gradient }.run()?;
            Ok(d.into_array().into_iter().map(Some).collect())
        });
        Ok((readouts, state))
    }
}

//! Gated delta rule: a recurrent layer whose state S is a matrix that decays and is corrected at every token.
//!
//! The operation includes the L2 normalisation of queries and keys and the gate activations, so that their results
//! need not be stored as tensors. It can also return the state at chosen token positions ("boundaries"); the anchor
//! reader (`anchor_read`) reads these snapshots.
//!
//! ```text
//! per value head h (key head h / (value_heads / key_heads)), S [d_k, d_v], s = d_k^-½
//! q ← q / sqrt(Σq² + 1e-6),   k ← k / sqrt(Σk² + 1e-6)
//! β = σ(write_input)  (doubled with allow_neg_eigval)
//! log α = −exp(a_log) · softplus(retention_input + dt_bias)
//! S ← α S,   S ← S + β k (v − Sᵀk)ᵀ,   o = s Sᵀq
//!
//! key [B, T, key_heads·d_k]          value [B, T, value_heads·d_v]   retention_input, write_input [B, T, value_heads]
//! query [B, n, key_heads·d_k] of the last n tokens; n = T when gradients are needed, n ≤ T otherwise
//! a_log, dt_bias [value_heads]       initial_state [B, value_heads, d_k, d_v], or None for zero
//! readout [B, n, value_heads·d_v]    final_state [B, value_heads, d_k, d_v]
//! boundary_states [N, value_heads, d_k, d_v]: all boundaries of row 0, then those of row 1, …
//! ```
//! Boundary b of a batch row is the state after the first b tokens of the call, 1 ≤ b ≤ T.

pub(crate) mod chunk;
pub(crate) mod fast;
mod fast_backward;
pub(crate) mod reference;

use std::sync::Arc;

#[doc(hidden)]
pub use chunk::{Chunk, chunks};

use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::op::Op;
use crate::tape::{record, records};
use crate::tensor::Tensor;

/// Number of tokens in a full chunk. Chunks start at multiples of this, counted from the call's first token; a
/// boundary also ends a chunk. A token's readout is bit-identical wherever its chunk ends. A long sequence may
/// therefore be split at multiples of this into several calls with the same boundaries, and the results are
/// bit-identical to those of a single call.
pub const CHUNK_TOKENS: usize = chunk::CHUNK;

/// Epsilon added to the squared L2 norm of queries and keys before the square root.
pub const L2_EPS: f64 = 1e-6;

/// Inputs of [`GatedDelta::gated_delta`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct GatedDelta<T> {
    /// Unnormalised queries of the last n ≤ T tokens, [B, n, key_heads·d_k].
    pub query: T,
    /// Unnormalised keys, [B, T, key_heads·d_k].
    pub key: T,
    /// Values, [B, T, value_heads·d_v].
    pub value: T,
    /// Input of the decay gate, W_a x, [B, T, value_heads].
    pub retention_input: T,
    /// Input of the write gate, W_b x, [B, T, value_heads].
    pub write_input: T,
    /// Logarithm of the decay rate, [value_heads].
    pub a_log: T,
    /// Bias added to `retention_input`, [value_heads].
    pub dt_bias: T,
    /// State before the first token, [B, value_heads, d_k, d_v]; `None` means zero.
    pub initial_state: Option<T>,
}

/// Non-differentiable options of [`GatedDelta::gated_delta`].
#[derive(Clone, Debug)]
pub struct GatedDeltaOptions {
    /// Number of query and key heads.
    pub key_heads: usize,
    /// Number of value heads; must be a multiple of `key_heads`.
    pub value_heads: usize,
    /// Doubles the write strength β to the range 0 to 2, which allows negative eigenvalues of the state transition.
    pub allow_neg_eigval: bool,
    /// Boundaries of each batch row, strictly ascending. An empty outer list means no boundaries in any row.
    pub boundaries: Arc<Vec<Vec<usize>>>,
    /// Whether to return the state after the last token.
    pub final_state: bool,
    /// Position of the call's first token within its chunk: its distance from the previous multiple of
    /// [`CHUNK_TOKENS`]. A call that resumes a sequence in the middle of a chunk sets this so that results are
    /// bit-identical to a single long call; otherwise it is 0. Calls with a non-zero offset are not differentiable.
    pub chunk_offset: usize,
}

/// Results of [`GatedDelta::gated_delta`].
#[derive(Clone, Debug)]
pub struct GatedDeltaOutput<T> {
    /// Outputs o of the tokens that have a query, [B, n, value_heads·d_v].
    pub readout: T,
    /// State after the last token, [B, value_heads, d_k, d_v]; shape [0, ..] if it was not requested.
    pub final_state: T,
    /// States at the boundaries, [N, value_heads, d_k, d_v].
    pub boundary_states: T,
}

/// Gradients with respect to the outputs; `None` means zero.
#[derive(Clone, Copy, Debug)]
pub struct GatedDeltaGradient<T> {
    /// Gradient of `readout`.
    pub readout: Option<T>,
    /// Gradient of `final_state`.
    pub final_state: Option<T>,
    /// Gradient of `boundary_states`.
    pub boundary_states: Option<T>,
}

impl<T> GatedDeltaGradient<T> {
    /// Borrows every gradient that is present.
    pub fn as_ref(&self) -> GatedDeltaGradient<&T> {
        GatedDeltaGradient {
            readout: self.readout.as_ref(),
            final_state: self.final_state.as_ref(),
            boundary_states: self.boundary_states.as_ref(),
        }
    }

    /// Applies `f` to every gradient that is present.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> GatedDeltaGradient<U> {
        GatedDeltaGradient {
            readout: self.readout.map(&mut f),
            final_state: self.final_state.map(&mut f),
            boundary_states: self.boundary_states.map(f),
        }
    }
}

impl<T> GatedDeltaOutput<T> {
    /// Applies `f` to every result.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> GatedDeltaOutput<U> {
        GatedDeltaOutput {
            readout: f(self.readout),
            final_state: f(self.final_state),
            boundary_states: f(self.boundary_states),
        }
    }
}

impl<T> GatedDelta<T> {
    /// Applies `f` to every input.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> GatedDelta<U> {
        GatedDelta {
            query: f(self.query),
            key: f(self.key),
            value: f(self.value),
            retention_input: f(self.retention_input),
            write_input: f(self.write_input),
            a_log: f(self.a_log),
            dt_bias: f(self.dt_bias),
            initial_state: self.initial_state.map(f),
        }
    }

    /// Borrows every input.
    pub fn as_ref(&self) -> GatedDelta<&T> {
        GatedDelta {
            query: &self.query,
            key: &self.key,
            value: &self.value,
            retention_input: &self.retention_input,
            write_input: &self.write_input,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            initial_state: self.initial_state.as_ref(),
        }
    }

    pub(crate) fn into_list(self) -> Vec<T> {
        let mut list = vec![
            self.query,
            self.key,
            self.value,
            self.retention_input,
            self.write_input,
            self.a_log,
            self.dt_bias,
        ];
        list.extend(self.initial_state);
        list
    }
}

/// Validated dimensions of a call.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Number of sequences.
    pub batch: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Number of trailing tokens that have a query.
    pub asking: usize,
    /// Number of query and key heads.
    pub key_heads: usize,
    /// Number of value heads.
    pub value_heads: usize,
    /// d_k
    pub key_dim: usize,
    /// d_v
    pub value_dim: usize,
    /// Boundaries of all sequences together.
    pub boundaries: usize,
    /// Whether the state after the last token is returned.
    pub final_state: bool,
    /// Position of the first token within its chunk.
    pub chunk_offset: usize,
}

impl Sizes {
    /// Key head that value head `value_head` uses.
    pub(crate) fn key_head(&self, value_head: usize) -> usize {
        value_head / (self.value_heads / self.key_heads)
    }
    /// Number of leading tokens that have no query.
    pub(crate) fn silent(&self) -> usize {
        self.tokens - self.asking
    }
    /// Number of elements in one head's state.
    pub(crate) fn state(&self) -> usize {
        self.key_dim * self.value_dim
    }
    pub(crate) fn readout_shape(&self) -> [usize; 3] {
        [self.batch, self.asking, self.value_heads * self.value_dim]
    }
    pub(crate) fn state_shape(&self) -> [usize; 4] {
        [self.batch, self.value_heads, self.key_dim, self.value_dim]
    }
    pub(crate) fn final_shape(&self) -> [usize; 4] {
        let [batch, rest @ ..] = self.state_shape();
        let [heads, key, value] = rest;
        [if self.final_state { batch } else { 0 }, heads, key, value]
    }
    pub(crate) fn boundary_shape(&self) -> [usize; 4] {
        [self.boundaries, self.value_heads, self.key_dim, self.value_dim]
    }
}

/// Validates the input shapes that `gated_delta` and `log_linear_delta` have in common.
pub(crate) fn check_heads(
    operation: &'static str,
    input: &GatedDelta<&[usize]>,
    key_heads: usize,
    value_heads: usize,
) -> Result<Sizes> {
    if key_heads == 0 || value_heads == 0 || !value_heads.is_multiple_of(key_heads) {
        return bad_value(
            operation,
            format!(
                "{value_heads} value heads are not a multiple of {key_heads} key heads, or one of the two numbers is 0"
            ),
        );
    }
    let &[batch, tokens, width] = input.key else {
        return bad_shape(operation, "key", input.key, "[batch, tokens, key_heads·d_k]");
    };
    if width == 0 || !width.is_multiple_of(key_heads) {
        return bad_shape(
            operation,
            "key",
            input.key,
            format!("a last dimension divisible by {key_heads} key heads"),
        );
    }
    let asking = match input.query {
        &[b, n, w] if b == batch && n <= tokens && w == width => n,
        _ => {
            let expected =
                format!("[{batch}, n, {width}] with n ≤ {tokens}: the shape of key, or its last n tokens");
            return bad_shape(operation, "query", input.query, expected);
        }
    };
    let value_width = match input.value {
        &[b, t, w] if b == batch && t == tokens && w > 0 && w.is_multiple_of(value_heads) => w,
        _ => {
            return bad_shape(
                operation,
                "value",
                input.value,
                format!("[{batch}, {tokens}, value_heads·d_v] with {value_heads} value heads"),
            );
        }
    };
    let gate = [batch, tokens, value_heads];
    expect_shape(operation, "retention_input", input.retention_input, &gate, "batch, tokens, value_heads")?;
    expect_shape(operation, "write_input", input.write_input, &gate, "batch, tokens, value_heads")?;
    expect_shape(operation, "a_log", input.a_log, &[value_heads], "value_heads")?;
    expect_shape(operation, "dt_bias", input.dt_bias, &[value_heads], "value_heads")?;
    let (key_dim, value_dim) = (width / key_heads, value_width / value_heads);
    Ok(Sizes {
        batch,
        tokens,
        asking,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        boundaries: 0,
        final_state: true,
        chunk_offset: 0,
    })
}

pub(crate) fn check(input: &GatedDelta<&[usize]>, options: &GatedDeltaOptions) -> Result<Sizes> {
    const NAME: &str = "gated_delta";
    let mut sizes = check_heads(NAME, input, options.key_heads, options.value_heads)?;
    sizes.final_state = options.final_state;
    sizes.chunk_offset = options.chunk_offset;
    if let Some(state) = input.initial_state {
        expect_shape(NAME, "initial_state", state, &sizes.state_shape(), "batch, value_heads, d_k, d_v")?;
    }
    let lists = &options.boundaries;
    if !lists.is_empty() && lists.len() != sizes.batch {
        return bad_value(
            NAME,
            format!("got {} boundary lists, expected one per batch row ({})", lists.len(), sizes.batch),
        );
    }
    for (row, list) in lists.iter().enumerate() {
        let mut last = 0;
        for &boundary in list {
            if boundary <= last || boundary > sizes.tokens {
                return bad_value(
                    NAME,
                    format!(
                        "boundary {boundary} of row {row} must be greater than the previous ({last}) and at most {}",
                        sizes.tokens
                    ),
                );
            }
            last = boundary;
        }
        sizes.boundaries += list.len();
    }
    Ok(sizes)
}

/// Rejects calls that have no backward pass.
pub(crate) fn check_differentiable(sizes: &Sizes) -> Result<()> {
    if sizes.chunk_offset != 0 {
        let message =
            "chunk_offset must be 0 for a differentiable call, which has to start at a chunk boundary";
        return bad_value("gated_delta", message);
    }
    if sizes.asking == sizes.tokens {
        return Ok(());
    }
    let message = format!(
        "{} of {} tokens have a query; a differentiable call needs one for each",
        sizes.asking, sizes.tokens
    );
    bad_value("gated_delta", message)
}

pub(crate) fn check_gradient(sizes: &Sizes, gradient: &GatedDeltaGradient<&[usize]>) -> Result<()> {
    check_differentiable(sizes)?;
    if let Some(g) = gradient.readout {
        let readout = sizes.readout_shape();
        expect_shape("gated_delta", "gradient of readout", g, &readout, "batch, tokens, value_heads·d_v")?;
    }
    if let Some(g) = gradient.final_state {
        expect_shape("gated_delta", "gradient of final_state", g, &sizes.state_shape(), "the state's")?;
    }
    if let Some(g) = gradient.boundary_states {
        expect_shape(
            "gated_delta",
            "gradient of boundary_states",
            g,
            &sizes.boundary_shape(),
            "the states'",
        )?;
    }
    Ok(())
}

/// The forward pass as a device runs it. Its result is the output and, with `keep`, what the backward pass needs.
pub struct GatedDeltaForward {
    /// The inputs.
    pub input: GatedDelta<Tensor>,
    /// The options.
    pub options: GatedDeltaOptions,
    /// Whether a backward pass will follow.
    pub keep: bool,
}

/// Gradients of [`GatedDeltaForward`] with respect to its inputs.
pub struct GatedDeltaBackward {
    /// The inputs.
    pub input: GatedDelta<Tensor>,
    /// The options.
    pub options: GatedDeltaOptions,
    /// What the forward pass kept.
    pub kept: Vec<Tensor>,
    /// Gradients of the output.
    pub gradient: GatedDeltaGradient<Tensor>,
}

impl Op for GatedDeltaForward {
    const NAME: &'static str = "gated_delta";
    type Sizes = Sizes;
    type Output = (GatedDeltaOutput<Tensor>, Vec<Tensor>);

    fn inputs(&self) -> Vec<&Tensor> {
        self.input.as_ref().into_list()
    }
    fn check(&self) -> Result<Sizes> {
        let sizes = check(&self.input.as_ref().map(Tensor::shape), &self.options)?;
        if self.keep {
            check_differentiable(&sizes)?;
        }
        Ok(sizes)
    }
}

impl Op for GatedDeltaBackward {
    const NAME: &'static str = "gated_delta_backward";
    type Sizes = Sizes;
    type Output = GatedDelta<Tensor>;

    fn inputs(&self) -> Vec<&Tensor> {
        let GatedDeltaGradient { readout, final_state, boundary_states } = &self.gradient;
        let gradients = [readout, final_state, boundary_states].into_iter().flatten();
        self.input.as_ref().into_list().into_iter().chain(&self.kept).chain(gradients).collect()
    }
    fn check(&self) -> Result<Sizes> {
        let sizes = check(&self.input.as_ref().map(Tensor::shape), &self.options)?;
        check_gradient(&sizes, &self.gradient.as_ref().map(Tensor::shape))?;
        Ok(sizes)
    }
}

impl GatedDelta<&Tensor> {
    /// Applies the gated delta rule to a sequence and returns the readouts and the requested states.
    pub fn gated_delta(self, options: &GatedDeltaOptions) -> Result<GatedDeltaOutput<Tensor>> {
        let (tensors, input) = (self.into_list(), self.map(Tensor::clone));
        if !records(&tensors) {
            return Ok(GatedDeltaForward { input, options: options.clone(), keep: false }.run()?.0);
        }
        let keep = records(&tensors);
        let op = GatedDeltaForward { input: input.clone(), options: options.clone(), keep };
        let (GatedDeltaOutput { readout, final_state, boundary_states }, kept) = op.run()?;
        let options = options.clone();
        let mut outputs =
            record(&tensors, vec![readout, final_state, boundary_states], move |_, mut gradients| {
                let boundary_states = gradients.pop().flatten();
                let final_state = gradients.pop().flatten();
                let readout = gradients.pop().flatten();
                let gradient = GatedDeltaGradient { readout, final_state, boundary_states };
                let d = GatedDeltaBackward { input, options, kept, gradient }.run()?;
                Ok(d.into_list().into_iter().map(Some).collect())
            });
        let boundary_states = outputs.remove(2);
        let final_state = outputs.remove(1);
        Ok(GatedDeltaOutput { readout: outputs.remove(0), final_state, boundary_states })
    }
}

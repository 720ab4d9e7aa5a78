//! The seam between model code and a device: every operation, on one associated tensor type.
//!
//! Model code holds a [`crate::Tape`] over an `Engine` and never names a concrete tensor. [`crate::Cpu`] is
//! the fast f32 engine; [`crate::Reference`] computes the same in f64 by the equations themselves. Forward
//! and backward come in pairs; the tape joins them.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::ops::adamw::AdamW;
use crate::ops::anchor_read::{AnchorRead, AnchorReadOptions, Storage, StoredStates};
use crate::ops::attention::{Attention, KeyValues};
use crate::ops::cross_entropy::{CrossEntropy, LinearCrossEntropy, TokenLosses};
use crate::ops::elementwise::{Map, Zip};
use crate::ops::embedding::Embedding;
use crate::ops::gated_delta::{GatedDelta, GatedDeltaGradient, GatedDeltaOptions, GatedDeltaOutput};
use crate::ops::linear::Linear;
use crate::ops::log_linear::{LogLinear, LogLinearOptions, LogLinearOutput};
use crate::ops::matmul::{MatMul, Transpose};
use crate::ops::rms_norm::{GatedRmsNorm, RmsNorm};
use crate::ops::rotary::Rotary;
use crate::ops::short_conv::{ShortConv, ShortConvGradients};
use crate::ops::state_read::StateRead;
use crate::ops::swiglu::SwiGlu;
use crate::precision::Precision;

/// A device that can run every operation of the models, forward and backward.
pub trait Engine: Sized + Send + Sync + 'static {
    /// A tensor on this device. Cloning one is cheap: it copies a handle.
    type Tensor: Clone + std::fmt::Debug + Send + Sync + 'static;

    /// Anchor states at the precision that a bank stores them in.
    type Stored: Clone + std::fmt::Debug + Send + Sync + 'static;

    // ---- the engine itself ----

    /// Tokens of a chunk of [`Engine::gated_delta`]: a call that begins on a multiple of it gives each token the bits
    /// that one long call gives it.
    const CHUNK_TOKENS: usize;
    /// Runs `task(0)` to `task(count - 1)`, each once, side by side where the engine has threads. Operations inside a
    /// task run on the task's own thread. Tasks must be independent of each other.
    fn side_by_side(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(task);
    }

    // ---- data in and out ----

    /// A tensor from numbers in row-major order.
    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<Self::Tensor>;
    /// A tensor from numbers in row-major order, rounded to the device's type.
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<Self::Tensor>;
    /// A tensor of one repeated number.
    fn full(&self, shape: &[usize], value: f64) -> Result<Self::Tensor>;
    /// The dimensions.
    fn shape<'a>(&self, tensor: &'a Self::Tensor) -> &'a [usize];
    /// The numbers in row-major order.
    fn to_f32(&self, tensor: &Self::Tensor) -> Vec<f32>;
    /// The numbers in row-major order.
    fn to_f64(&self, tensor: &Self::Tensor) -> Vec<f64>;

    // ---- weights of inference ----

    /// A weight [rows, width] in fewer bits, a scale for each row where there are scales. `linear`, `embedding` and
    /// the losses read it in a weight's place, without gradients; all other operations refuse it.
    fn quantize(&self, weight: &Self::Tensor, precision: Precision) -> Result<Self::Tensor>;
    /// How a tensor's numbers are stored; f32 for all but quantised weights, also where the engine computes in f64.
    fn precision(&self, tensor: &Self::Tensor) -> Precision;

    // ---- gradients and parameters ----

    /// `sum += term`, in place where nobody else holds `sum`.
    fn accumulate(&self, sum: &mut Self::Tensor, term: &Self::Tensor) -> Result<()>;
    /// Adds `rows` to the end of `whole` along dimension `axis`, before which all dimensions are 1; in place where
    /// nobody else holds `whole` and its buffer has room, so that many small calls cost no more than one large one.
    fn append(&self, whole: &mut Self::Tensor, rows: &Self::Tensor, axis: usize) -> Result<()>;
    /// Σ x², in f64.
    fn squared_norm(&self, x: &Self::Tensor) -> Result<f64>;
    /// One step of AdamW on a parameter and its two moments.
    fn adamw(
        &self,
        state: AdamW<&mut Self::Tensor>,
        gradient: &Self::Tensor,
        step: &crate::ops::adamw::Step,
    ) -> Result<()>;

    // ---- layers ----

    /// y = x Wᵀ (+ bias).
    fn linear(&self, input: Linear<&Self::Tensor>) -> Result<Self::Tensor>;
    /// x Wᵀ for each of several W, with the bits of [`Engine::linear`]; for inference.
    fn linear_each(&self, x: &Self::Tensor, weights: &[&Self::Tensor]) -> Result<Vec<Self::Tensor>> {
        weights.iter().map(|weight| self.linear(Linear { x, weight, bias: None })).collect()
    }
    /// Gradients of [`Engine::linear`]; `needs` says which of x, W, bias are wanted.
    fn linear_backward(
        &self,
        input: Linear<&Self::Tensor>,
        gradient: &Self::Tensor,
        needs: [bool; 3],
    ) -> Result<[Option<Self::Tensor>; 3]>;
    /// y = x / rms(x) · w over the last dimension.
    fn rms_norm(&self, input: RmsNorm<&Self::Tensor>, eps: f64) -> Result<Self::Tensor>;
    /// Gradients of [`Engine::rms_norm`].
    fn rms_norm_backward(
        &self,
        input: RmsNorm<&Self::Tensor>,
        eps: f64,
        gradient: &Self::Tensor,
    ) -> Result<RmsNorm<Self::Tensor>>;
    /// y = rms_norm(x) · SiLU(gate), per head.
    fn gated_rms_norm(&self, input: GatedRmsNorm<&Self::Tensor>, eps: f64) -> Result<Self::Tensor>;
    /// Gradients of [`Engine::gated_rms_norm`].
    fn gated_rms_norm_backward(
        &self,
        input: GatedRmsNorm<&Self::Tensor>,
        eps: f64,
        gradient: &Self::Tensor,
    ) -> Result<GatedRmsNorm<Self::Tensor>>;

    // ---- the gated delta rule ----

    /// The gated delta rule; with `keep`, also what its backward pass needs.
    fn gated_delta(
        &self,
        input: GatedDelta<&Self::Tensor>,
        options: &GatedDeltaOptions,
        keep: bool,
    ) -> Result<(GatedDeltaOutput<Self::Tensor>, Vec<Self::Tensor>)>;
    /// Gradients of [`Engine::gated_delta`] from what it kept.
    fn gated_delta_backward(
        &self,
        input: GatedDelta<&Self::Tensor>,
        options: &GatedDeltaOptions,
        kept: &[Self::Tensor],
        gradient: GatedDeltaGradient<&Self::Tensor>,
    ) -> Result<GatedDelta<Self::Tensor>>;

    // ---- the historical reader ----

    /// Reads the anchors that each token sees; with `keep`, also what its backward pass needs.
    fn anchor_read(
        &self,
        input: AnchorRead<&Self::Tensor>,
        options: &AnchorReadOptions,
        keep: bool,
    ) -> Result<(Self::Tensor, Vec<Self::Tensor>)>;
    /// Gradients of [`Engine::anchor_read`] from its readout and what it kept.
    fn anchor_read_backward(
        &self,
        input: AnchorRead<&Self::Tensor>,
        options: &AnchorReadOptions,
        readout: &Self::Tensor,
        kept: &[Self::Tensor],
        gradient: &Self::Tensor,
    ) -> Result<AnchorRead<Self::Tensor>>;
    /// Stores anchor states [n, value_heads, d_k, d_v].
    fn store_states(&self, states: &Self::Tensor, storage: Storage) -> Result<Self::Stored>;
    /// [`Engine::anchor_read`] on stored states that stand one after the other; for inference. Where there are as many
    /// of them as anchors, each holds one.
    fn anchor_read_stored(
        &self,
        input: AnchorRead<&Self::Tensor, &[Arc<Self::Stored>]>,
        options: &AnchorReadOptions,
    ) -> Result<Self::Tensor>;
    /// Stored states as they are in the machine's memory: what a file holds.
    fn stored_to_host<'a>(&self, states: &'a Self::Stored) -> Result<Cow<'a, StoredStates>>;
    /// Stored states from the machine's memory, or from a file that is mapped into it.
    fn stored_from_host(&self, states: StoredStates) -> Result<Self::Stored>;
    /// Bytes of stored states.
    fn stored_bytes(&self, states: &Self::Stored) -> usize;
    /// The routing weights themselves, [rows, value_heads, anchors], zero where unseen or not chosen: to look at.
    /// The states are not read; [d_k, d_v] stands in their place.
    fn routing_weights(
        &self,
        input: AnchorRead<&Self::Tensor, [usize; 2]>,
        options: &AnchorReadOptions,
    ) -> Result<Self::Tensor>;

    /// Each row reads its own state.
    fn state_read(&self, input: StateRead<&Self::Tensor>, key_heads: usize) -> Result<Self::Tensor>;
    /// Gradients of [`Engine::state_read`].
    fn state_read_backward(
        &self,
        input: StateRead<&Self::Tensor>,
        key_heads: usize,
        gradient: &Self::Tensor,
    ) -> Result<StateRead<Self::Tensor>>;
    // ---- plain operations ----

    /// y = f(x) on every element.
    fn map(&self, kind: Map, x: &Self::Tensor) -> Result<Self::Tensor>;
    /// Gradient of [`Engine::map`], from its input x and its output y.
    fn map_backward(
        &self,
        kind: Map,
        x: &Self::Tensor,
        y: &Self::Tensor,
        gradient: &Self::Tensor,
    ) -> Result<Self::Tensor>;
    /// y = f(a, b) on every element, broadcasting as numpy does.
    fn zip(&self, kind: Zip, a: &Self::Tensor, b: &Self::Tensor) -> Result<Self::Tensor>;
    /// Gradients of [`Engine::zip`]; `needs` says which of a, b are wanted.
    fn zip_backward(
        &self,
        kind: Zip,
        a: &Self::Tensor,
        b: &Self::Tensor,
        gradient: &Self::Tensor,
        needs: [bool; 2],
    ) -> Result<[Option<Self::Tensor>; 2]>;
    /// C = A B for each index of the leading dimensions.
    fn matmul(&self, input: MatMul<&Self::Tensor>, transpose: Transpose) -> Result<Self::Tensor>;
    /// Gradients of [`Engine::matmul`]; `needs` says which of a, b are wanted.
    fn matmul_backward(
        &self,
        input: MatMul<&Self::Tensor>,
        transpose: Transpose,
        gradient: &Self::Tensor,
        needs: [bool; 2],
    ) -> Result<[Option<Self::Tensor>; 2]>;
    /// Softmax over the last dimension; a row of −inf gives zeros.
    fn softmax(&self, x: &Self::Tensor) -> Result<Self::Tensor>;
    /// Gradient of [`Engine::softmax`], from its output y.
    fn softmax_backward(&self, y: &Self::Tensor, gradient: &Self::Tensor) -> Result<Self::Tensor>;
    /// x[.., range, ..] along dimension `axis`.
    fn slice(&self, x: &Self::Tensor, axis: usize, range: Range<usize>) -> Result<Self::Tensor>;
    /// x from `start` on along dimension `axis` of size `size`, zeros around it.
    fn place(&self, x: &Self::Tensor, axis: usize, start: usize, size: usize) -> Result<Self::Tensor>;
    /// Joins tensors along dimension `axis`.
    fn concat(&self, parts: &[&Self::Tensor], axis: usize) -> Result<Self::Tensor>;
    /// Dimension i of the result is dimension `axes[i]` of x.
    fn permute(&self, x: &Self::Tensor, axes: &[usize]) -> Result<Self::Tensor>;
    /// The same numbers under another shape.
    fn reshape(&self, x: &Self::Tensor, shape: &[usize]) -> Result<Self::Tensor>;
    /// Σ over dimension `axis`, which is gone from the result.
    fn sum(&self, x: &Self::Tensor, axis: usize) -> Result<Self::Tensor>;
    /// The mean over dimension `axis`, which is gone from the result and must not be empty.
    fn mean(&self, x: &Self::Tensor, axis: usize) -> Result<Self::Tensor>;
    /// Repeats x `count` times along a new dimension `axis`.
    fn expand(&self, x: &Self::Tensor, axis: usize, count: usize) -> Result<Self::Tensor>;
    /// Sums x over the dimensions that broadcasting `shape` to x's shape repeats.
    fn sum_to(&self, x: &Self::Tensor, shape: &[usize]) -> Result<Self::Tensor>;
    /// The rows of a table that `ids` name.
    fn embedding(&self, input: Embedding<'_, &Self::Tensor>) -> Result<Self::Tensor>;
    /// Gradient of [`Engine::embedding`] with respect to its table of `rows` rows.
    fn embedding_backward(&self, ids: &[u32], rows: usize, gradient: &Self::Tensor) -> Result<Self::Tensor>;
    // ---- fused layers ----

    /// y = SiLU(gate) ∘ up.
    fn swiglu(&self, input: SwiGlu<&Self::Tensor>) -> Result<Self::Tensor>;
    /// Gradients of [`Engine::swiglu`].
    fn swiglu_backward(
        &self,
        input: SwiGlu<&Self::Tensor>,
        gradient: &Self::Tensor,
    ) -> Result<SwiGlu<Self::Tensor>>;
    /// Depthwise causal convolution, then SiLU; also the tail for the next call.
    fn short_conv(&self, input: ShortConv<&Self::Tensor>) -> Result<(Self::Tensor, Self::Tensor)>;
    /// Gradients of [`Engine::short_conv`]; the tail is a constant.
    fn short_conv_backward(
        &self,
        input: ShortConv<&Self::Tensor>,
        gradient: &Self::Tensor,
    ) -> Result<ShortConvGradients<Self::Tensor>>;
    /// Σ nll / normaliser of softmax(x Wᵀ), and at once the gradients of x and W that `needs` asks for.
    fn linear_cross_entropy(
        &self,
        input: LinearCrossEntropy<&Self::Tensor>,
        targets: &[u32],
        normaliser: Option<f64>,
        needs: [bool; 2],
    ) -> Result<CrossEntropy<Self::Tensor>>;
    /// The kept gradients of [`Engine::linear_cross_entropy`] times the gradient of the loss.
    fn linear_cross_entropy_backward(
        &self,
        kept: [Option<Self::Tensor>; 2],
        gradient: &Self::Tensor,
    ) -> Result<[Option<Self::Tensor>; 2]>;
    /// The loss of each token and its most probable target, for evaluation.
    fn token_losses(&self, x: &Self::Tensor, weight: &Self::Tensor, targets: &[u32]) -> Result<TokenLosses>;
    // ---- attention ----

    /// Each pair of each head of x [B, T, H·d] turned by an angle proportional to the position.
    fn rotary(&self, x: &Self::Tensor, rotary: Rotary) -> Result<Self::Tensor>;
    /// Gradient of [`Engine::rotary`].
    fn rotary_backward(&self, gradient: &Self::Tensor, rotary: Rotary) -> Result<Self::Tensor>;
    /// Causal softmax attention: the output and, with `keep`, what [`Engine::attention_backward`] reads.
    fn attention(
        &self,
        input: Attention<&Self::Tensor>,
        heads: usize,
        keep: bool,
    ) -> Result<(Self::Tensor, Vec<Self::Tensor>)>;
    /// [`Engine::attention`] of a query [1, Tq, H·d] over a cache in blocks, with the same bits; for inference.
    fn attention_blocks(
        &self,
        query: &Self::Tensor,
        blocks: &[KeyValues<Self::Tensor>],
        heads: usize,
    ) -> Result<Self::Tensor>;
    /// Gradients of [`Engine::attention`]; `saved` is what it kept.
    fn attention_backward(
        &self,
        input: Attention<&Self::Tensor>,
        heads: usize,
        saved: &[Self::Tensor],
        gradient: &Self::Tensor,
    ) -> Result<Attention<Self::Tensor>>;
    // ---- log-linear gated delta rule ----

    /// Readouts of the log-linear gated delta rule, the level states after the last token if wanted, and, with
    /// `keep`, what the backward pass wants to see again.
    fn log_linear_delta(
        &self,
        input: LogLinear<&Self::Tensor>,
        options: &LogLinearOptions,
        initial: Option<&Self::Tensor>,
        keep: bool,
    ) -> Result<LogLinearOutput<Self::Tensor>>;
    /// Gradients of [`Engine::log_linear_delta`].
    fn log_linear_delta_backward(
        &self,
        input: LogLinear<&Self::Tensor>,
        options: &LogLinearOptions,
        initial: Option<&Self::Tensor>,
        saved: Option<&Self::Tensor>,
        gradient: &Self::Tensor,
    ) -> Result<LogLinear<Self::Tensor>>;
}

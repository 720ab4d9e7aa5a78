//! The seam between model code and a device: every operation, on one associated tensor type.
//!
//! Model code holds a [`crate::Tape`] over an `Engine` and never names a concrete tensor. [`crate::Cpu`] is
//! the fast f32 engine; [`crate::Reference`] computes the same in f64 by the equations themselves. Forward
//! and backward come in pairs; the tape joins them.

use crate::error::Result;
use crate::ops::adamw::AdamW;
use crate::ops::anchor_read::{AnchorRead, AnchorReadOptions, Storage};
use crate::ops::gated_delta::{GatedDelta, GatedDeltaGradient, GatedDeltaOptions, GatedDeltaOutput};
use crate::ops::linear::Linear;
use crate::ops::log_linear::{LogLinear, LogLinearOptions, LogLinearOutput};
use crate::ops::rms_norm::{GatedRmsNorm, RmsNorm};

/// A device that can run every operation of the models, forward and backward.
pub trait Engine: Sized + 'static {
    /// A tensor on this device. Cloning one is cheap: it copies a handle.
    type Tensor: Clone + std::fmt::Debug + 'static;

    /// Anchor states at the precision that a bank stores them in.
    type Stored: Clone + std::fmt::Debug + 'static;

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

    // ---- gradients and parameters ----

    /// `sum += term`, in place where nobody else holds `sum`.
    fn accumulate(&self, sum: &mut Self::Tensor, term: &Self::Tensor) -> Result<()>;
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
    /// [`Engine::anchor_read`] on stored states that stand one after the other; for inference.
    fn anchor_read_stored(
        &self,
        input: AnchorRead<&Self::Tensor, &[&Self::Stored]>,
        options: &AnchorReadOptions,
    ) -> Result<Self::Tensor>;
    /// The routing weights themselves, [rows, value_heads, anchors], zero where unseen or not chosen: to look at.
    fn routing_weights(
        &self,
        input: AnchorRead<&Self::Tensor>,
        options: &AnchorReadOptions,
    ) -> Result<Self::Tensor>;

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

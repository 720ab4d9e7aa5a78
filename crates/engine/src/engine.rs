//! The seam between model code and a device: every operation, on one associated tensor type.
//!
//! Model code holds a [`crate::Tape`] over an `Engine` and never names a concrete tensor. [`crate::Cpu`] is
//! the fast f32 engine; [`crate::Reference`] computes the same in f64 by the equations themselves. Forward
//! and backward come in pairs; the tape joins them.

use crate::error::Result;
use crate::ops::adamw::AdamW;
use crate::ops::cross_entropy::{CrossEntropy, LinearCrossEntropy, TokenLosses};
use crate::ops::linear::Linear;
use crate::ops::rms_norm::{GatedRmsNorm, RmsNorm};
use crate::ops::short_conv::{ShortConv, ShortConvGradients};
use crate::ops::swiglu::SwiGlu;

/// A device that can run every operation of the models, forward and backward.
pub trait Engine: Sized + 'static {
    /// A tensor on this device. Cloning one is cheap: it copies a handle.
    type Tensor: Clone + std::fmt::Debug + 'static;

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
    fn adamw(&self, state: AdamW<&mut Self::Tensor>, gradient: &Self::Tensor, step: &crate::ops::adamw::Step) -> Result<()>;

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
}

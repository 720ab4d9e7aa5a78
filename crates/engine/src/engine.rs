//! The seam between model code and a device: every operation, on one associated tensor type.
//!
//! Model code holds a [`crate::Tape`] over an `Engine` and never names a concrete tensor. [`crate::Cpu`] is
//! the fast f32 engine; [`crate::Reference`] computes the same in f64 by the equations themselves. Forward
//! and backward come in pairs; the tape joins them.

use crate::error::Result;
use crate::ops::adamw::AdamW;
use crate::ops::attention::Attention;
use crate::ops::linear::Linear;
use crate::ops::rms_norm::{GatedRmsNorm, RmsNorm};
use crate::ops::rotary::Rotary;

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
    /// Gradients of [`Engine::attention`]; `saved` is what it kept.
    fn attention_backward(
        &self,
        input: Attention<&Self::Tensor>,
        heads: usize,
        saved: &[Self::Tensor],
        gradient: &Self::Tensor,
    ) -> Result<Attention<Self::Tensor>>;
}

//! Interface that a device implements: tensor storage, and the operations it supports.
//!
//! Model code never calls these methods. It calls [`crate::Engine`], which validates the arguments of every call in
//! one place for all devices and then calls the method of the same name here. A device therefore needs no
//! validation, with one exception: if `anchor_read_stored` gets one entry per anchor, a decoding step may read few
//! of many entries, so the kernel checks the shapes of those that it reads.
//!
//! The CPU kernels still derive the dimensions of a call with the same `check` functions, because the soundness of
//! their unsafe code must not depend on the caller.
//!
//! Only the methods that store tensors are required. Every operation has a default implementation that returns
//! [`Error::Unsupported`], so a new device can start with a few operations and leave the others to a complete
//! engine; see [`crate::Fallback`].
//!
//! Two rules apply to operations that belong together:
//! - A device that implements a forward operation with saved values (`gated_delta`, `anchor_read`, `attention`,
//!   `log_linear_delta`) must also implement its backward operation, because the format of saved values is its own.
//! - A device that implements `pack` must also implement all operations that read packed weights (`unpack`,
//!   `linear`, `embedding`, `linear_cross_entropy`, `token_losses`); one that implements `store_states` or
//!   `stored_from_host` must implement all operations on stored states.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ops::adamw::{AdamW, Step};
use crate::ops::anchor_read::{AnchorRead, AnchorReadKept, AnchorReadOptions, Storage, StoredStates};
use crate::ops::attention::{Attention, KeyValues};
use crate::ops::cross_entropy::{CrossEntropy, LinearCrossEntropy, TokenLosses};
use crate::ops::elementwise::{Map, Zip};
use crate::ops::embedding::Embedding;
use crate::ops::gated_delta::{GatedDelta, GatedDeltaGradient, GatedDeltaOptions, GatedDeltaOutput};
use crate::ops::linear::{Linear, LinearList, LinearListGradients, LinearListNeeds, Product};
use crate::ops::log_linear::{LogLinear, LogLinearOptions, LogLinearOutput};
use crate::ops::matmul::{MatMul, Transpose};
use crate::ops::rms_norm::{GatedRmsNormGradients, GatedRmsNormList, RmsNormList};
use crate::ops::rotary::Rotary;
use crate::ops::short_conv::{ShortConv, ShortConvGradients};
use crate::ops::state_read::StateRead;
use crate::ops::swiglu::SwiGlu;
use crate::precision::Precision;
use crate::weight::Weight;

/// Weight as passed to a kernel of device `K`.
pub type WeightOf<'a, K> = Weight<&'a <K as Kernels>::Tensor, &'a <K as Kernels>::Packed>;

/// Result of an operation that a device does not implement.
fn unsupported<T>(operation: &'static str) -> Result<T> {
    Err(Error::Unsupported { operation })
}

/// Adds a term to a sum of which there may be no terms yet.
pub(crate) fn add_gradient<K: Kernels>(
    kernels: &K,
    sum: &mut Option<K::Tensor>,
    term: Option<K::Tensor>,
) -> Result<()> {
    match (sum, term) {
        (Some(sum), Some(term)) => kernels.accumulate(sum, &term),
        (sum @ None, term) => {
            *sum = term;
            Ok(())
        }
        (Some(_), None) => Ok(()),
    }
}

/// [`Kernels::linear_list`] as one `linear` per product.
pub(crate) fn list_forward<K: Kernels>(
    kernels: &K,
    input: LinearList<'_, &K::Tensor, WeightOf<'_, K>>,
) -> Result<Vec<K::Tensor>> {
    let one = |product: &Product<&K::Tensor>| {
        let (x, weight) = (input.x[product.x], input.weights[product.weight]);
        let mut y = kernels.linear(Linear { x, weight, bias: product.bias })?;
        if let Some(residual) = product.residual {
            kernels.accumulate(&mut y, residual)?;
        }
        Ok(y)
    };
    input.products.iter().map(one).collect()
}

/// [`Kernels::linear_list_backward`] as one `linear_backward` per product, from the last to the first: the order in
/// which a tape would process separate products.
pub(crate) fn list_backward<K: Kernels>(
    kernels: &K,
    input: LinearList<'_, &K::Tensor>,
    gradients: &[&K::Tensor],
    needs: &LinearListNeeds,
    dx: &mut [Option<K::Tensor>],
) -> Result<LinearListGradients<K::Tensor>> {
    let LinearList { x, weights, products } = input;
    let mut found =
        LinearListGradients { weights: vec![None; weights.len()], biases: vec![None; products.len()] };
    for (i, product) in products.iter().enumerate().rev() {
        let input = Linear { x: x[product.x], weight: weights[product.weight], bias: product.bias };
        let needed = [needs.x[product.x], needs.weights[product.weight], needs.biases[i]];
        let [rows, weight, bias] = kernels.linear_backward(input, gradients[i], needed)?;
        add_gradient(kernels, &mut dx[product.x], rows)?;
        add_gradient(kernels, &mut found.weights[product.weight], weight)?;
        found.biases[i] = bias;
    }
    Ok(found)
}

/// Operations of a device, without argument validation. [`crate::Engine`] documents each of them.
#[allow(missing_docs, unused_variables)]
pub trait Kernels: Send + Sync + Sized + 'static {
    /// Tensor on this device. Cloning is cheap: it copies a handle.
    type Tensor: Clone + Debug + Send + Sync + 'static;
    /// Weight matrix in reduced precision. Cloning is cheap.
    type Packed: Clone + Debug + Send + Sync + 'static;
    /// Anchor states in storage precision.
    type Stored: Clone + Debug + Send + Sync + 'static;

    // ---- required: tensors in and out ----

    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<Self::Tensor>;
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<Self::Tensor>;
    fn full(&self, shape: &[usize], value: f64) -> Result<Self::Tensor>;
    fn shape<'a>(&self, tensor: &'a Self::Tensor) -> &'a [usize];
    fn to_f32(&self, tensor: &Self::Tensor) -> Vec<f32>;
    fn to_f64(&self, tensor: &Self::Tensor) -> Vec<f64>;
    fn packed_shape<'a>(&self, packed: &'a Self::Packed) -> &'a [usize; 2];
    fn packed_precision(&self, packed: &Self::Packed) -> Precision;
    fn stored_shape(&self, states: &Self::Stored) -> [usize; 4];
    fn stored_bytes(&self, states: &Self::Stored) -> usize;

    /// Tokens per chunk of the recurrent operations; 1 for a device that has no chunks or no recurrent operations.
    const CHUNK_TOKENS: usize = 1;

    /// Whether the device implements `gated_delta`, so that [`crate::Fallback`] takes the device's chunks as they are.
    const RECURRENT: bool = false;

    /// By default the device cannot be lost.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// By default the device keeps no unused memory.
    fn trim(&self) {}
    /// By default the device does not count its memory.
    fn live_bytes(&self) -> usize {
        0
    }
    fn free_bytes(&self) -> usize {
        0
    }

    /// Runs the tasks sequentially by default.
    fn side_by_side(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(task);
    }

    // ---- packed weights ----

    fn pack(&self, weight: &Self::Tensor, precision: Precision) -> Result<Self::Packed> {
        unsupported("pack")
    }
    fn unpack(&self, packed: &Self::Packed) -> Result<Self::Tensor> {
        unsupported("unpack")
    }

    // ---- gradients and parameters ----

    fn accumulate(&self, sum: &mut Self::Tensor, term: &Self::Tensor) -> Result<()> {
        unsupported("accumulate")
    }
    fn append(&self, whole: &mut Self::Tensor, rows: &Self::Tensor, axis: usize) -> Result<()> {
        unsupported("append")
    }
    fn squared_norm(&self, tensors: &[&Self::Tensor]) -> Result<f64> {
        unsupported("squared_norm")
    }
    fn adamw(&self, state: AdamW<&mut Self::Tensor>, gradient: &Self::Tensor, step: &Step) -> Result<()> {
        unsupported("adamw")
    }

    // ---- layers ----

    fn linear(&self, input: Linear<&Self::Tensor, WeightOf<'_, Self>>) -> Result<Self::Tensor> {
        unsupported("linear")
    }
    /// Calls `linear` and `accumulate` for each product by default.
    fn linear_list(
        &self,
        input: LinearList<'_, &Self::Tensor, WeightOf<'_, Self>>,
    ) -> Result<Vec<Self::Tensor>> {
        list_forward(self, input)
    }
    fn linear_backward(
        &self,
        input: Linear<&Self::Tensor>,
        gradient: &Self::Tensor,
        needs: [bool; 3],
    ) -> Result<[Option<Self::Tensor>; 3]> {
        unsupported("linear_backward")
    }
    /// Calls `linear_backward` for each product by default, from the last to the first. If a device returns
    /// [`Error::Unsupported`], what `dx` holds must be unchanged.
    fn linear_list_backward(
        &self,
        input: LinearList<'_, &Self::Tensor>,
        gradients: &[&Self::Tensor],
        needs: &LinearListNeeds,
        dx: &mut [Option<Self::Tensor>],
    ) -> Result<LinearListGradients<Self::Tensor>> {
        list_backward(self, input, gradients, needs, dx)
    }
    fn rms_norm(&self, input: RmsNormList<'_, &Self::Tensor>, eps: f64) -> Result<Vec<Self::Tensor>> {
        unsupported("rms_norm")
    }
    /// If a device returns [`Error::Unsupported`], what `dx` holds must be unchanged.
    fn rms_norm_backward(
        &self,
        input: RmsNormList<'_, &Self::Tensor>,
        eps: f64,
        gradients: &[&Self::Tensor],
        dx: &mut [Option<Self::Tensor>],
    ) -> Result<Self::Tensor> {
        unsupported("rms_norm_backward")
    }
    fn gated_rms_norm(
        &self,
        input: GatedRmsNormList<'_, &Self::Tensor>,
        eps: f64,
    ) -> Result<Vec<Self::Tensor>> {
        unsupported("gated_rms_norm")
    }
    fn gated_rms_norm_backward(
        &self,
        input: GatedRmsNormList<'_, &Self::Tensor>,
        eps: f64,
        gradients: &[&Self::Tensor],
    ) -> Result<GatedRmsNormGradients<Self::Tensor>> {
        unsupported("gated_rms_norm_backward")
    }

    // ---- gated delta rule ----

    fn gated_delta(
        &self,
        input: GatedDelta<&Self::Tensor>,
        options: &GatedDeltaOptions,
        keep: bool,
    ) -> Result<(GatedDeltaOutput<Self::Tensor>, Vec<Self::Tensor>)> {
        unsupported("gated_delta")
    }
    fn gated_delta_backward(
        &self,
        input: GatedDelta<&Self::Tensor>,
        options: &GatedDeltaOptions,
        kept: &[Self::Tensor],
        gradient: GatedDeltaGradient<&Self::Tensor>,
    ) -> Result<GatedDelta<Self::Tensor>> {
        unsupported("gated_delta_backward")
    }

    // ---- anchor reader ----

    fn anchor_read(
        &self,
        input: AnchorRead<&Self::Tensor>,
        options: &AnchorReadOptions,
        keep: bool,
    ) -> Result<(Self::Tensor, Option<AnchorReadKept<Self::Tensor>>)> {
        unsupported("anchor_read")
    }
    fn anchor_read_backward(
        &self,
        input: AnchorRead<&Self::Tensor>,
        options: &AnchorReadOptions,
        readout: &Self::Tensor,
        kept: Option<&AnchorReadKept<Self::Tensor>>,
        gradient: &Self::Tensor,
    ) -> Result<AnchorRead<Self::Tensor>> {
        unsupported("anchor_read_backward")
    }
    fn store_states(&self, states: &Self::Tensor, storage: Storage) -> Result<Self::Stored> {
        unsupported("store_states")
    }
    fn anchor_read_stored(
        &self,
        input: AnchorRead<&Self::Tensor, &[Arc<Self::Stored>]>,
        options: &AnchorReadOptions,
    ) -> Result<Self::Tensor> {
        unsupported("anchor_read_stored")
    }
    fn stored_to_host<'a>(&self, states: &'a Self::Stored) -> Result<Cow<'a, StoredStates>> {
        unsupported("stored_to_host")
    }
    fn stored_from_host(&self, states: StoredStates) -> Result<Self::Stored> {
        unsupported("stored_from_host")
    }
    fn routing_weights(
        &self,
        input: AnchorRead<&Self::Tensor, [usize; 2]>,
        options: &AnchorReadOptions,
    ) -> Result<Self::Tensor> {
        unsupported("routing_weights")
    }
    fn state_read(&self, input: StateRead<&Self::Tensor>, key_heads: usize) -> Result<Self::Tensor> {
        unsupported("state_read")
    }
    fn state_read_backward(
        &self,
        input: StateRead<&Self::Tensor>,
        key_heads: usize,
        gradient: &Self::Tensor,
    ) -> Result<StateRead<Self::Tensor>> {
        unsupported("state_read_backward")
    }

    // ---- basic operations ----

    fn map(&self, kind: Map, x: &Self::Tensor) -> Result<Self::Tensor> {
        unsupported("map")
    }
    fn map_backward(
        &self,
        kind: Map,
        x: &Self::Tensor,
        y: &Self::Tensor,
        gradient: &Self::Tensor,
    ) -> Result<Self::Tensor> {
        unsupported("map_backward")
    }
    fn zip(&self, kind: Zip, a: &Self::Tensor, b: &Self::Tensor) -> Result<Self::Tensor> {
        unsupported("zip")
    }
    fn zip_backward(
        &self,
        kind: Zip,
        a: &Self::Tensor,
        b: &Self::Tensor,
        gradient: &Self::Tensor,
        needs: [bool; 2],
    ) -> Result<[Option<Self::Tensor>; 2]> {
        unsupported("zip_backward")
    }
    fn matmul(&self, input: MatMul<&Self::Tensor>, transpose: Transpose) -> Result<Self::Tensor> {
        unsupported("matmul")
    }
    fn matmul_backward(
        &self,
        input: MatMul<&Self::Tensor>,
        transpose: Transpose,
        gradient: &Self::Tensor,
        needs: [bool; 2],
    ) -> Result<[Option<Self::Tensor>; 2]> {
        unsupported("matmul_backward")
    }
    fn softmax(&self, x: &Self::Tensor) -> Result<Self::Tensor> {
        unsupported("softmax")
    }
    fn softmax_backward(&self, y: &Self::Tensor, gradient: &Self::Tensor) -> Result<Self::Tensor> {
        unsupported("softmax_backward")
    }
    fn slice(&self, x: &Self::Tensor, axis: usize, range: Range<usize>) -> Result<Self::Tensor> {
        unsupported("slice")
    }
    fn place(&self, x: &Self::Tensor, axis: usize, start: usize, size: usize) -> Result<Self::Tensor> {
        unsupported("place")
    }
    fn concat(&self, parts: &[&Self::Tensor], axis: usize) -> Result<Self::Tensor> {
        unsupported("concat")
    }
    fn permute(&self, x: &Self::Tensor, axes: &[usize]) -> Result<Self::Tensor> {
        unsupported("permute")
    }
    fn reshape(&self, x: &Self::Tensor, shape: &[usize]) -> Result<Self::Tensor> {
        unsupported("reshape")
    }
    fn sum(&self, x: &Self::Tensor, axis: usize) -> Result<Self::Tensor> {
        unsupported("sum")
    }
    fn mean(&self, x: &Self::Tensor, axis: usize) -> Result<Self::Tensor> {
        unsupported("mean")
    }
    fn expand(&self, x: &Self::Tensor, axis: usize, count: usize) -> Result<Self::Tensor> {
        unsupported("expand")
    }
    fn sum_to(&self, x: &Self::Tensor, shape: &[usize]) -> Result<Self::Tensor> {
        unsupported("sum_to")
    }
    fn embedding(&self, input: Embedding<'_, WeightOf<'_, Self>>) -> Result<Self::Tensor> {
        unsupported("embedding")
    }
    fn embedding_backward(&self, ids: &[u32], rows: usize, gradient: &Self::Tensor) -> Result<Self::Tensor> {
        unsupported("embedding_backward")
    }

    // ---- fused layers ----

    fn swiglu(&self, inputs: &[SwiGlu<&Self::Tensor>]) -> Result<Vec<Self::Tensor>> {
        unsupported("swiglu")
    }
    fn swiglu_backward(
        &self,
        inputs: &[SwiGlu<&Self::Tensor>],
        gradients: &[&Self::Tensor],
    ) -> Result<Vec<SwiGlu<Self::Tensor>>> {
        unsupported("swiglu_backward")
    }
    fn short_conv(&self, inputs: &[ShortConv<&Self::Tensor>]) -> Result<Vec<(Self::Tensor, Self::Tensor)>> {
        unsupported("short_conv")
    }
    fn short_conv_backward(
        &self,
        inputs: &[ShortConv<&Self::Tensor>],
        gradients: &[&Self::Tensor],
    ) -> Result<Vec<ShortConvGradients<Self::Tensor>>> {
        unsupported("short_conv_backward")
    }
    fn linear_cross_entropy(
        &self,
        input: LinearCrossEntropy<&Self::Tensor, WeightOf<'_, Self>>,
        targets: &[u32],
        normaliser: Option<f64>,
        needs: [bool; 2],
    ) -> Result<CrossEntropy<Self::Tensor>> {
        unsupported("linear_cross_entropy")
    }
    fn linear_cross_entropy_backward(
        &self,
        kept: [Option<Self::Tensor>; 2],
        gradient: &Self::Tensor,
    ) -> Result<[Option<Self::Tensor>; 2]> {
        unsupported("linear_cross_entropy_backward")
    }
    fn token_losses(
        &self,
        x: &Self::Tensor,
        weight: WeightOf<'_, Self>,
        targets: &[u32],
    ) -> Result<TokenLosses> {
        unsupported("token_losses")
    }

    // ---- attention ----

    fn rotary(&self, x: &Self::Tensor, rotary: Rotary) -> Result<Self::Tensor> {
        unsupported("rotary")
    }
    fn rotary_backward(&self, gradient: &Self::Tensor, rotary: Rotary) -> Result<Self::Tensor> {
        unsupported("rotary_backward")
    }
    fn attention(
        &self,
        input: Attention<&Self::Tensor>,
        heads: usize,
        keep: bool,
    ) -> Result<(Self::Tensor, Vec<Self::Tensor>)> {
        unsupported("attention")
    }
    fn attention_blocks(
        &self,
        query: &Self::Tensor,
        blocks: &[KeyValues<Self::Tensor>],
        heads: usize,
    ) -> Result<Self::Tensor> {
        unsupported("attention_blocks")
    }
    fn attention_backward(
        &self,
        input: Attention<&Self::Tensor>,
        heads: usize,
        saved: &[Self::Tensor],
        gradient: &Self::Tensor,
    ) -> Result<Attention<Self::Tensor>> {
        unsupported("attention_backward")
    }

    // ---- log-linear gated delta rule ----

    fn log_linear_delta(
        &self,
        input: LogLinear<&Self::Tensor>,
        options: &LogLinearOptions,
        initial: Option<&Self::Tensor>,
        keep: bool,
    ) -> Result<LogLinearOutput<Self::Tensor>> {
        unsupported("log_linear_delta")
    }
    fn log_linear_delta_backward(
        &self,
        input: LogLinear<&Self::Tensor>,
        options: &LogLinearOptions,
        initial: Option<&Self::Tensor>,
        saved: Option<&Self::Tensor>,
        gradient: &Self::Tensor,
    ) -> Result<LogLinear<Self::Tensor>> {
        unsupported("log_linear_delta_backward")
    }
}

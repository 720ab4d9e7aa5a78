//! Kernels of [`Gpu`]: each method calls the function of its operation.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use march_engine::ops::adamw::{AdamW, Step};
use march_engine::ops::anchor_read::{
    AnchorRead, AnchorReadKept, AnchorReadOptions, Storage, StoredStates as HostStates,
};
use march_engine::ops::attention::{Attention, KeyValues};
use march_engine::ops::cross_entropy::{CrossEntropy, LinearCrossEntropy, TokenLosses};
use march_engine::ops::elementwise::{Map, Zip};
use march_engine::ops::embedding::Embedding;
use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaGradient, GatedDeltaOptions, GatedDeltaOutput};
use march_engine::ops::linear::{Linear, LinearList, LinearListGradients, LinearListNeeds};
use march_engine::ops::log_linear::{LogLinear, LogLinearOptions, LogLinearOutput};
use march_engine::ops::matmul::{MatMul, Transpose};
use march_engine::ops::rms_norm::{GatedRmsNormGradients, GatedRmsNormList, RmsNormList};
use march_engine::ops::rotary::Rotary;
use march_engine::ops::short_conv::{ShortConv, ShortConvGradients};
use march_engine::ops::state_read::StateRead;
use march_engine::ops::swiglu::SwiGlu;
use march_engine::{Kernels, Precision, Result, WeightOf};

use crate::gpu::Gpu;
use crate::ops::anchor_read::Stored;
use crate::ops::linear::Packed;
use crate::ops::{
    adamw, anchor_read, attention, cross_entropy, elementwise, embedding, gated_delta, layout, linear,
    log_linear, matmul, reduce, rms_norm, rotary, short_conv, softmax, state_read, swiglu,
};
use crate::tensor::Tensor;

type T = Tensor;

impl Kernels for Gpu {
    type Tensor = Tensor;
    type Packed = Packed;
    type Stored = Stored;

    /// The recurrences of this engine run token by token, so calls may be split anywhere.
    const CHUNK_TOKENS: usize = 1;
    const RECURRENT: bool = true;

    fn check(&self) -> Result<()> {
        self.alive()
    }
    fn trim(&self) {
        Gpu::trim(self);
    }
    fn live_bytes(&self) -> usize {
        self.memory().saturating_sub(self.unused()) as usize
    }
    fn free_bytes(&self) -> usize {
        self.unused() as usize
    }

    // ---- tensors in and out ----

    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<T> {
        self.upload(data, shape)
    }
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<T> {
        self.upload(&data.iter().map(|&v| v as f32).collect::<Vec<_>>(), shape)
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<T> {
        elementwise::full(self, shape, value as f32)
    }
    fn shape<'a>(&self, tensor: &'a T) -> &'a [usize] {
        tensor.shape()
    }
    fn to_f32(&self, tensor: &T) -> Vec<f32> {
        self.download(tensor)
    }
    fn to_f64(&self, tensor: &T) -> Vec<f64> {
        self.download(tensor).into_iter().map(f64::from).collect()
    }

    // ---- packed weights ----

    fn pack(&self, weight: &T, precision: Precision) -> Result<Packed> {
        Packed::new(self, weight, precision)
    }
    fn unpack(&self, packed: &Packed) -> Result<T> {
        packed.unpack(self)
    }
    fn packed_shape<'a>(&self, packed: &'a Packed) -> &'a [usize; 2] {
        packed.shape()
    }
    fn packed_precision(&self, packed: &Packed) -> Precision {
        packed.precision()
    }

    // ---- gradients and parameters ----

    fn accumulate(&self, sum: &mut T, term: &T) -> Result<()> {
        elementwise::accumulate(self, sum, term)
    }
    fn append(&self, whole: &mut T, rows: &T, axis: usize) -> Result<()> {
        layout::append(self, whole, rows, axis)
    }
    fn squared_norm(&self, tensors: &[&T]) -> Result<f64> {
        adamw::squared_norm(self, tensors)
    }
    fn adamw(&self, state: AdamW<&mut T>, gradient: &T, step: &Step) -> Result<()> {
        adamw::step(self, state, gradient, step)
    }

    fn linear(&self, input: Linear<&T, WeightOf<'_, Self>>) -> Result<T> {
        linear::forward(self, input)
    }
    fn linear_list(&self, input: LinearList<'_, &T, WeightOf<'_, Self>>) -> Result<Vec<T>> {
        linear::forward_list(self, input)
    }
    fn linear_backward(&self, input: Linear<&T>, gradient: &T, needs: [bool; 3]) -> Result<[Option<T>; 3]> {
        linear::backward(self, input, gradient, needs)
    }
    fn linear_list_backward(
        &self,
        input: LinearList<'_, &T>,
        gradients: &[&T],
        needs: &LinearListNeeds,
        dx: &mut [Option<T>],
    ) -> Result<LinearListGradients<T>> {
        linear::backward_list(self, input, gradients, needs, dx)
    }
    fn rms_norm(&self, input: RmsNormList<'_, &T>, eps: f64) -> Result<Vec<T>> {
        rms_norm::forward(self, input, eps)
    }
    fn rms_norm_backward(
        &self,
        input: RmsNormList<'_, &T>,
        eps: f64,
        gradients: &[&T],
        dx: &mut [Option<T>],
    ) -> Result<T> {
        rms_norm::backward(self, input, eps, gradients, dx)
    }
    fn gated_rms_norm(&self, input: GatedRmsNormList<'_, &T>, eps: f64) -> Result<Vec<T>> {
        rms_norm::gated_forward(self, input, eps)
    }
    fn gated_rms_norm_backward(
        &self,
        input: GatedRmsNormList<'_, &T>,
        eps: f64,
        gradients: &[&T],
    ) -> Result<GatedRmsNormGradients<T>> {
        rms_norm::gated_backward(self, input, eps, gradients)
    }

    // ---- gated delta rule ----

    fn gated_delta(
        &self,
        input: GatedDelta<&T>,
        options: &GatedDeltaOptions,
        keep: bool,
    ) -> Result<(GatedDeltaOutput<T>, Vec<T>)> {
        gated_delta::forward(self, input, options, keep)
    }
    fn gated_delta_backward(
        &self,
        input: GatedDelta<&T>,
        options: &GatedDeltaOptions,
        kept: &[T],
        gradient: GatedDeltaGradient<&T>,
    ) -> Result<GatedDelta<T>> {
        gated_delta::backward(self, input, options, kept, gradient)
    }

    // ---- anchor reader ----

    fn anchor_read(
        &self,
        input: AnchorRead<&T>,
        options: &AnchorReadOptions,
        keep: bool,
    ) -> Result<(T, Option<AnchorReadKept<T>>)> {
        anchor_read::forward(self, input, options, keep)
    }
    fn anchor_read_backward(
        &self,
        input: AnchorRead<&T>,
        options: &AnchorReadOptions,
        readout: &T,
        kept: Option<&AnchorReadKept<T>>,
        gradient: &T,
    ) -> Result<AnchorRead<T>> {
        anchor_read::backward(self, input, options, readout, kept, gradient)
    }
    fn store_states(&self, states: &T, storage: Storage) -> Result<Stored> {
        Stored::new(self, states, storage)
    }
    fn anchor_read_stored(
        &self,
        input: AnchorRead<&T, &[Arc<Stored>]>,
        options: &AnchorReadOptions,
    ) -> Result<T> {
        anchor_read::forward_stored(self, input, options)
    }
    fn stored_to_host<'a>(&self, states: &'a Stored) -> Result<Cow<'a, HostStates>> {
        Ok(Cow::Owned(states.to_host(self)?))
    }
    fn stored_from_host(&self, states: HostStates) -> Result<Stored> {
        Stored::from_host(self, &states)
    }
    fn stored_shape(&self, states: &Stored) -> [usize; 4] {
        states.shape()
    }
    fn stored_bytes(&self, states: &Stored) -> usize {
        states.bytes()
    }
    fn routing_weights(&self, input: AnchorRead<&T, [usize; 2]>, options: &AnchorReadOptions) -> Result<T> {
        anchor_read::weights(self, input, options)
    }
    fn state_read(&self, input: StateRead<&T>, key_heads: usize) -> Result<T> {
        state_read::forward(self, input, key_heads)
    }
    fn state_read_backward(
        &self,
        input: StateRead<&T>,
        key_heads: usize,
        gradient: &T,
    ) -> Result<StateRead<T>> {
        state_read::backward(self, input, key_heads, gradient)
    }

    // ---- basic operations ----

    fn map(&self, kind: Map, x: &T) -> Result<T> {
        elementwise::map(self, kind, x)
    }
    fn map_backward(&self, kind: Map, x: &T, y: &T, gradient: &T) -> Result<T> {
        elementwise::map_backward(self, kind, x, y, gradient)
    }
    fn zip(&self, kind: Zip, a: &T, b: &T) -> Result<T> {
        elementwise::zip(self, kind, a, b)
    }
    fn zip_backward(
        &self,
        kind: Zip,
        a: &T,
        b: &T,
        gradient: &T,
        needs: [bool; 2],
    ) -> Result<[Option<T>; 2]> {
        elementwise::zip_backward(self, kind, a, b, gradient, needs)
    }
    fn matmul(&self, input: MatMul<&T>, transpose: Transpose) -> Result<T> {
        matmul::forward(self, input, transpose)
    }
    fn matmul_backward(
        &self,
        input: MatMul<&T>,
        transpose: Transpose,
        gradient: &T,
        needs: [bool; 2],
    ) -> Result<[Option<T>; 2]> {
        matmul::backward(self, input, transpose, gradient, needs)
    }
    fn softmax(&self, x: &T) -> Result<T> {
        softmax::forward(self, x)
    }
    fn softmax_backward(&self, y: &T, gradient: &T) -> Result<T> {
        softmax::backward(self, y, gradient)
    }
    fn slice(&self, x: &T, axis: usize, range: Range<usize>) -> Result<T> {
        layout::slice(self, x, axis, range)
    }
    fn place(&self, x: &T, axis: usize, start: usize, size: usize) -> Result<T> {
        layout::place(self, x, axis, start, size)
    }
    fn concat(&self, parts: &[&T], axis: usize) -> Result<T> {
        layout::concat(self, parts, axis)
    }
    fn permute(&self, x: &T, axes: &[usize]) -> Result<T> {
        layout::permute(self, x, axes)
    }
    fn reshape(&self, x: &T, shape: &[usize]) -> Result<T> {
        Ok(x.reshaped(shape))
    }
    fn sum(&self, x: &T, axis: usize) -> Result<T> {
        reduce::sum(self, x, axis)
    }
    fn mean(&self, x: &T, axis: usize) -> Result<T> {
        reduce::mean(self, x, axis)
    }
    fn expand(&self, x: &T, axis: usize, count: usize) -> Result<T> {
        reduce::expand(self, x, axis, count)
    }
    fn sum_to(&self, x: &T, shape: &[usize]) -> Result<T> {
        reduce::sum_to(self, x, shape)
    }
    fn embedding(&self, input: Embedding<'_, WeightOf<'_, Self>>) -> Result<T> {
        embedding::forward(self, input)
    }
    fn embedding_backward(&self, ids: &[u32], rows: usize, gradient: &T) -> Result<T> {
        embedding::backward(self, ids, rows, gradient)
    }

    // ---- fused layers ----

    fn swiglu(&self, inputs: &[SwiGlu<&T>]) -> Result<Vec<T>> {
        swiglu::forward(self, inputs)
    }
    fn swiglu_backward(&self, inputs: &[SwiGlu<&T>], gradients: &[&T]) -> Result<Vec<SwiGlu<T>>> {
        swiglu::backward(self, inputs, gradients)
    }
    fn short_conv(&self, inputs: &[ShortConv<&T>]) -> Result<Vec<(T, T)>> {
        short_conv::forward(self, inputs)
    }
    fn short_conv_backward(
        &self,
        inputs: &[ShortConv<&T>],
        gradients: &[&T],
    ) -> Result<Vec<ShortConvGradients<T>>> {
        short_conv::backward(self, inputs, gradients)
    }
    fn linear_cross_entropy(
        &self,
        input: LinearCrossEntropy<&T, WeightOf<'_, Self>>,
        targets: &[u32],
        normaliser: Option<f64>,
        needs: [bool; 2],
    ) -> Result<CrossEntropy<T>> {
        cross_entropy::forward(self, input, targets, normaliser, needs)
    }
    fn linear_cross_entropy_backward(&self, kept: [Option<T>; 2], gradient: &T) -> Result<[Option<T>; 2]> {
        cross_entropy::backward(self, kept, gradient)
    }
    fn token_losses(&self, x: &T, weight: WeightOf<'_, Self>, targets: &[u32]) -> Result<TokenLosses> {
        cross_entropy::token_losses(self, x, weight, targets)
    }

    // ---- attention ----

    fn rotary(&self, x: &T, rotary: Rotary) -> Result<T> {
        rotary::forward(self, x, rotary)
    }
    fn rotary_backward(&self, gradient: &T, rotary: Rotary) -> Result<T> {
        rotary::backward(self, gradient, rotary)
    }
    fn attention(&self, input: Attention<&T>, heads: usize, keep: bool) -> Result<(T, Vec<T>)> {
        attention::forward(self, input, heads, keep)
    }
    fn attention_blocks(&self, query: &T, blocks: &[KeyValues<T>], heads: usize) -> Result<T> {
        attention::forward_blocks(self, query, blocks, heads)
    }
    fn attention_backward(
        &self,
        input: Attention<&T>,
        heads: usize,
        saved: &[T],
        gradient: &T,
    ) -> Result<Attention<T>> {
        attention::backward(self, input, heads, saved, gradient)
    }

    // ---- log-linear gated delta rule ----

    fn log_linear_delta(
        &self,
        input: LogLinear<&T>,
        options: &LogLinearOptions,
        initial: Option<&T>,
        keep: bool,
    ) -> Result<LogLinearOutput<T>> {
        log_linear::forward(self, input, options, initial, keep)
    }
    fn log_linear_delta_backward(
        &self,
        input: LogLinear<&T>,
        options: &LogLinearOptions,
        initial: Option<&T>,
        saved: Option<&T>,
        gradient: &T,
    ) -> Result<LogLinear<T>> {
        log_linear::backward(self, input, options, initial, saved, gradient)
    }
}

//! Reference engine: each method calls the `reference` function of its operation, in f64.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::kernels::{Kernels, WeightOf};
use crate::ops::adamw::{self, AdamW, Step};
use crate::ops::anchor_read::{self, AnchorRead, AnchorReadKept, AnchorReadOptions, Storage, StoredStates};
use crate::ops::attention::{self, Attention, KeyValues};
use crate::ops::cross_entropy::{self, CrossEntropy, LinearCrossEntropy, TokenLosses};
use crate::ops::elementwise::{self, Map, Zip};
use crate::ops::embedding::{self, Embedding};
use crate::ops::gated_delta::{self, GatedDelta, GatedDeltaGradient, GatedDeltaOptions, GatedDeltaOutput};
use crate::ops::layout;
use crate::ops::linear::{self, Linear};
use crate::ops::log_linear::{self, LogLinear, LogLinearOptions, LogLinearOutput};
use crate::ops::matmul::{self, MatMul, Transpose};
use crate::ops::reduce;
use crate::ops::rms_norm::{
    self, GatedRmsNorm, GatedRmsNormGradients, GatedRmsNormList, RmsNorm, RmsNormList,
};
use crate::ops::rotary::{self, Rotary};
use crate::ops::short_conv::{self, ShortConv, ShortConvGradients};
use crate::ops::softmax;
use crate::ops::state_read::{self, StateRead};
use crate::ops::swiglu::{self, SwiGlu};
use crate::precision::Precision;
use crate::tensor::Tensor;
use crate::weight::RoundedWeight;

/// Engine that computes in f64 directly from the equations. It is slow and serves as ground truth for the other
/// engines.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reference;

type T = Tensor<f64>;

impl Kernels for Reference {
    type Tensor = T;
    type Packed = RoundedWeight;
    type Stored = StoredStates;

    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<T> {
        let data: Vec<f64> = data.iter().map(|&v| f64::from(v)).collect();
        self.from_f64(&data, shape)
    }
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<T> {
        Ok(Tensor::detached(data.to_vec(), shape))
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<T> {
        Ok(Tensor::detached(vec![value; shape.iter().product()], shape))
    }
    fn shape<'a>(&self, tensor: &'a T) -> &'a [usize] {
        tensor.shape()
    }
    fn to_f32(&self, tensor: &T) -> Vec<f32> {
        tensor.data().iter().map(|&v| v as f32).collect()
    }
    fn to_f64(&self, tensor: &T) -> Vec<f64> {
        tensor.data().to_vec()
    }

    fn pack(&self, weight: &T, precision: Precision) -> Result<RoundedWeight> {
        RoundedWeight::new(weight, precision)
    }
    fn unpack(&self, packed: &RoundedWeight) -> Result<T> {
        Ok(packed.numbers().clone())
    }
    fn packed_shape<'a>(&self, packed: &'a RoundedWeight) -> &'a [usize; 2] {
        packed.shape()
    }
    fn packed_precision(&self, packed: &RoundedWeight) -> Precision {
        packed.precision()
    }
    const CHUNK_TOKENS: usize = gated_delta::CHUNK_TOKENS;
    const RECURRENT: bool = true;

    fn accumulate(&self, sum: &mut T, term: &T) -> Result<()> {
        let data = sum.data().iter().zip(term.data()).map(|(a, b)| a + b).collect();
        *sum = Tensor::detached(data, sum.shape());
        Ok(())
    }
    fn append(&self, whole: &mut T, rows: &T, axis: usize) -> Result<()> {
        let shape = layout::appended(whole.shape(), rows.shape(), axis)?;
        *whole = Tensor::detached([whole.data(), rows.data()].concat(), &shape);
        Ok(())
    }
    fn squared_norm(&self, tensors: &[&T]) -> Result<f64> {
        Ok(tensors.iter().fold(0.0, |sum, x| sum + adamw::reference::squared_norm(x)))
    }
    fn adamw(&self, state: AdamW<&mut T>, gradient: &T, step: &Step) -> Result<()> {
        adamw::reference::step(state, gradient, step)
    }

    fn linear(&self, input: Linear<&T, WeightOf<'_, Self>>) -> Result<T> {
        let Linear { x, weight, bias } = input;
        linear::reference::forward(Linear { x, weight: weight.numbers(), bias })
    }
    fn linear_backward(&self, input: Linear<&T>, gradient: &T, needs: [bool; 3]) -> Result<[Option<T>; 3]> {
        linear::reference::backward(input, gradient, needs)
    }
    fn rms_norm(&self, input: RmsNormList<'_, &T>, eps: f64) -> Result<Vec<T>> {
        let one = |&x: &&T| rms_norm::reference::forward(RmsNorm { x, weight: input.weight }, eps);
        input.x.iter().map(one).collect()
    }
    fn rms_norm_backward(
        &self,
        input: RmsNormList<'_, &T>,
        eps: f64,
        gradients: &[&T],
        dx: &mut [Option<T>],
    ) -> Result<T> {
        rms_norm::backward_each(self, dx, |i| {
            let input = RmsNorm { x: input.x[i], weight: input.weight };
            rms_norm::reference::backward(input, eps, gradients[i])
        })
    }
    fn gated_rms_norm(&self, input: GatedRmsNormList<'_, &T>, eps: f64) -> Result<Vec<T>> {
        let one = |(&x, &gate): (&&T, &&T)| {
            rms_norm::reference::gated_forward(GatedRmsNorm { x, gate, weight: input.weight }, eps)
        };
        input.x.iter().zip(input.gates).map(one).collect()
    }
    fn gated_rms_norm_backward(
        &self,
        input: GatedRmsNormList<'_, &T>,
        eps: f64,
        gradients: &[&T],
    ) -> Result<GatedRmsNormGradients<T>> {
        rms_norm::gated_backward_each(self, input.x.len(), |i| {
            let input = GatedRmsNorm { x: input.x[i], gate: input.gates[i], weight: input.weight };
            rms_norm::reference::gated_backward(input, eps, gradients[i])
        })
    }

    // ---- gated delta rule ----

    fn gated_delta(
        &self,
        input: GatedDelta<&T>,
        options: &GatedDeltaOptions,
        _keep: bool,
    ) -> Result<(GatedDeltaOutput<T>, Vec<T>)> {
        Ok((gated_delta::reference::forward(input, options)?, Vec::new()))
    }
    fn gated_delta_backward(
        &self,
        input: GatedDelta<&T>,
        options: &GatedDeltaOptions,
        _kept: &[T],
        gradient: GatedDeltaGradient<&T>,
    ) -> Result<GatedDelta<T>> {
        gated_delta::reference::backward(input, options, gradient)
    }

    // ---- anchor reader ----

    fn anchor_read(
        &self,
        input: AnchorRead<&T>,
        options: &AnchorReadOptions,
        _keep: bool,
    ) -> Result<(T, Option<AnchorReadKept<T>>)> {
        Ok((anchor_read::reference::forward(input, options)?, None))
    }
    fn anchor_read_backward(
        &self,
        input: AnchorRead<&T>,
        options: &AnchorReadOptions,
        readout: &T,
        _kept: Option<&AnchorReadKept<T>>,
        gradient: &T,
    ) -> Result<AnchorRead<T>> {
        anchor_read::reference::backward(input, options, readout, gradient)
    }
    fn store_states(&self, states: &T, storage: Storage) -> Result<StoredStates> {
        StoredStates::new(&self.to_f32(states), states.shape(), storage)
    }
    fn anchor_read_stored(
        &self,
        input: AnchorRead<&T, &[Arc<StoredStates>]>,
        options: &AnchorReadOptions,
    ) -> Result<T> {
        anchor_read::reference::forward_stored(input, options)
    }
    fn stored_to_host<'a>(&self, states: &'a StoredStates) -> Result<Cow<'a, StoredStates>> {
        Ok(Cow::Borrowed(states))
    }
    fn stored_from_host(&self, states: StoredStates) -> Result<StoredStates> {
        Ok(states)
    }
    fn stored_shape(&self, states: &StoredStates) -> [usize; 4] {
        states.shape()
    }
    fn stored_bytes(&self, states: &StoredStates) -> usize {
        states.bytes()
    }
    fn routing_weights(&self, input: AnchorRead<&T, [usize; 2]>, options: &AnchorReadOptions) -> Result<T> {
        anchor_read::reference::weights(input, options)
    }
    fn state_read(&self, input: StateRead<&T>, key_heads: usize) -> Result<T> {
        state_read::reference::forward(input, key_heads)
    }
    fn state_read_backward(
        &self,
        input: StateRead<&T>,
        key_heads: usize,
        gradient: &T,
    ) -> Result<StateRead<T>> {
        state_read::reference::backward(input, key_heads, gradient)
    }

    // ---- basic operations ----

    fn map(&self, kind: Map, x: &T) -> Result<T> {
        Ok(elementwise::reference::map(kind, x))
    }
    fn map_backward(&self, kind: Map, x: &T, y: &T, gradient: &T) -> Result<T> {
        elementwise::reference::map_backward(kind, x, y, gradient)
    }
    fn zip(&self, kind: Zip, a: &T, b: &T) -> Result<T> {
        elementwise::reference::zip(kind, a, b)
    }
    fn zip_backward(
        &self,
        kind: Zip,
        a: &T,
        b: &T,
        gradient: &T,
        needs: [bool; 2],
    ) -> Result<[Option<T>; 2]> {
        elementwise::reference::zip_backward(kind, a, b, gradient, needs)
    }
    fn matmul(&self, input: MatMul<&T>, transpose: Transpose) -> Result<T> {
        matmul::reference::forward(input, transpose)
    }
    fn matmul_backward(
        &self,
        input: MatMul<&T>,
        transpose: Transpose,
        gradient: &T,
        needs: [bool; 2],
    ) -> Result<[Option<T>; 2]> {
        matmul::reference::backward(input, transpose, gradient, needs)
    }
    fn softmax(&self, x: &T) -> Result<T> {
        softmax::reference::forward(x)
    }
    fn softmax_backward(&self, y: &T, gradient: &T) -> Result<T> {
        softmax::reference::backward(y, gradient)
    }
    fn slice(&self, x: &T, axis: usize, range: Range<usize>) -> Result<T> {
        layout::reference::slice(x, axis, range)
    }
    fn place(&self, x: &T, axis: usize, start: usize, size: usize) -> Result<T> {
        layout::reference::place(x, axis, start, size)
    }
    fn concat(&self, parts: &[&T], axis: usize) -> Result<T> {
        layout::reference::concat(parts, axis)
    }
    fn permute(&self, x: &T, axes: &[usize]) -> Result<T> {
        layout::reference::permute(x, axes)
    }
    fn reshape(&self, x: &T, shape: &[usize]) -> Result<T> {
        layout::reference::reshape(x, shape)
    }
    fn sum(&self, x: &T, axis: usize) -> Result<T> {
        reduce::reference::sum(x, axis)
    }
    fn mean(&self, x: &T, axis: usize) -> Result<T> {
        reduce::reference::mean(x, axis)
    }
    fn expand(&self, x: &T, axis: usize, count: usize) -> Result<T> {
        reduce::reference::expand(x, axis, count)
    }
    fn sum_to(&self, x: &T, shape: &[usize]) -> Result<T> {
        reduce::reference::sum_to(x, shape)
    }
    fn embedding(&self, input: Embedding<'_, WeightOf<'_, Self>>) -> Result<T> {
        let Embedding { table, ids, shape } = input;
        embedding::reference::forward(Embedding { table: table.numbers(), ids, shape })
    }
    fn embedding_backward(&self, ids: &[u32], rows: usize, gradient: &T) -> Result<T> {
        embedding::reference::backward(ids, rows, gradient)
    }

    // ---- fused layers ----

    fn swiglu(&self, inputs: &[SwiGlu<&T>]) -> Result<Vec<T>> {
        inputs.iter().map(|&input| swiglu::reference::forward(input)).collect()
    }
    fn swiglu_backward(&self, inputs: &[SwiGlu<&T>], gradients: &[&T]) -> Result<Vec<SwiGlu<T>>> {
        let one = |(&input, &gradient): (&SwiGlu<&T>, &&T)| swiglu::reference::backward(input, gradient);
        inputs.iter().zip(gradients).map(one).collect()
    }
    fn short_conv(&self, inputs: &[ShortConv<&T>]) -> Result<Vec<(T, T)>> {
        inputs.iter().map(|&input| short_conv::reference::forward(input)).collect()
    }
    fn short_conv_backward(
        &self,
        inputs: &[ShortConv<&T>],
        gradients: &[&T],
    ) -> Result<Vec<ShortConvGradients<T>>> {
        let one =
            |(&input, &gradient): (&ShortConv<&T>, &&T)| short_conv::reference::backward(input, gradient);
        inputs.iter().zip(gradients).map(one).collect()
    }
    fn linear_cross_entropy(
        &self,
        input: LinearCrossEntropy<&T, WeightOf<'_, Self>>,
        targets: &[u32],
        normaliser: Option<f64>,
        needs: [bool; 2],
    ) -> Result<CrossEntropy<T>> {
        let input = LinearCrossEntropy { x: input.x, weight: input.weight.numbers() };
        cross_entropy::reference::forward(input, targets, normaliser, needs)
    }
    fn linear_cross_entropy_backward(&self, kept: [Option<T>; 2], gradient: &T) -> Result<[Option<T>; 2]> {
        cross_entropy::reference::backward(kept, gradient)
    }
    fn token_losses(&self, x: &T, weight: WeightOf<'_, Self>, targets: &[u32]) -> Result<TokenLosses> {
        cross_entropy::reference::token_losses(x, weight.numbers(), targets)
    }

    // ---- attention ----

    fn rotary(&self, x: &T, rotary: Rotary) -> Result<T> {
        rotary::reference::forward(x, rotary)
    }
    fn rotary_backward(&self, gradient: &T, rotary: Rotary) -> Result<T> {
        rotary::reference::backward(gradient, rotary)
    }
    fn attention(&self, input: Attention<&T>, heads: usize, _keep: bool) -> Result<(T, Vec<T>)> {
        Ok((attention::reference::forward(input, heads)?, Vec::new()))
    }
    fn attention_blocks(&self, query: &T, blocks: &[KeyValues<T>], heads: usize) -> Result<T> {
        let join = |part: fn(&KeyValues<T>) -> &T| {
            Kernels::concat(self, &blocks.iter().map(part).collect::<Vec<_>>(), 1)
        };
        let (key, value) = (join(|block| &block.key)?, join(|block| &block.value)?);
        attention::reference::forward(Attention { query, key: &key, value: &value }, heads)
    }
    fn attention_backward(
        &self,
        input: Attention<&T>,
        heads: usize,
        _saved: &[T],
        gradient: &T,
    ) -> Result<Attention<T>> {
        attention::reference::backward(input, heads, gradient)
    }

    // ---- log-linear gated delta rule ----

    fn log_linear_delta(
        &self,
        input: LogLinear<&T>,
        options: &LogLinearOptions,
        initial: Option<&T>,
        _keep: bool,
    ) -> Result<LogLinearOutput<T>> {
        log_linear::reference::forward(input, options, initial)
    }
    fn log_linear_delta_backward(
        &self,
        input: LogLinear<&T>,
        options: &LogLinearOptions,
        initial: Option<&T>,
        _saved: Option<&T>,
        gradient: &T,
    ) -> Result<LogLinear<T>> {
        log_linear::reference::backward(input, options, initial, gradient)
    }
}

//! Kernels of [`Cpu`]: each method calls the `fast` function of its operation.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::cpu::{Cpu, Shared};
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
use crate::ops::linear::{self, Linear, LinearList};
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
use crate::simd::{self, Kernel, Simd};
use crate::tensor::Tensor;
use crate::weight::{self, PackedWeight};

type T = Tensor<f32>;

impl Kernels for Cpu {
    type Tensor = T;
    type Packed = PackedWeight;
    type Stored = StoredStates;

    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<T> {
        self.from_slice(data, shape)
    }
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<T> {
        let data: Vec<f32> = data.iter().map(|&v| v as f32).collect();
        self.from_slice(&data, shape)
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<T> {
        let mut tensor = self.uninit(shape);
        tensor.data_mut().fill(value as f32);
        Ok(tensor)
    }
    fn shape<'a>(&self, tensor: &'a T) -> &'a [usize] {
        tensor.shape()
    }
    fn to_f32(&self, tensor: &T) -> Vec<f32> {
        tensor.data().to_vec()
    }
    fn to_f64(&self, tensor: &T) -> Vec<f64> {
        tensor.data().iter().map(|&v| f64::from(v)).collect()
    }

    fn pack(&self, weight: &T, precision: Precision) -> Result<PackedWeight> {
        weight::pack(self, weight, precision)
    }
    fn unpack(&self, packed: &PackedWeight) -> Result<T> {
        self.from_slice(&packed.numbers(), packed.shape())
    }
    fn packed_shape<'a>(&self, packed: &'a PackedWeight) -> &'a [usize; 2] {
        packed.shape()
    }
    fn packed_precision(&self, packed: &PackedWeight) -> Precision {
        packed.precision()
    }
    const CHUNK_TOKENS: usize = gated_delta::CHUNK_TOKENS;
    const RECURRENT: bool = true;

    fn trim(&self) {
        Cpu::trim(self);
    }
    fn live_bytes(&self) -> usize {
        Cpu::live_bytes(self)
    }
    fn free_bytes(&self) -> usize {
        Cpu::free_bytes(self)
    }

    fn side_by_side(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        self.parallel(count, task);
    }

    fn accumulate(&self, sum: &mut T, term: &T) -> Result<()> {
        accumulate(self, sum, term)
    }
    fn append(&self, whole: &mut T, rows: &T, axis: usize) -> Result<()> {
        let shape = layout::appended(whole.shape(), rows.shape(), axis)?;
        if !whole.extend(rows, &shape) {
            let mut grown = self.uninit_with_room(&shape);
            grown.data_mut()[..whole.len()].copy_from_slice(whole.data());
            grown.data_mut()[whole.len()..].copy_from_slice(rows.data());
            *whole = grown;
        }
        Ok(())
    }
    fn squared_norm(&self, tensors: &[&T]) -> Result<f64> {
        Ok(tensors.iter().fold(0.0, |sum, x| sum + adamw::fast::squared_norm(self, x)))
    }
    fn adamw(&self, state: AdamW<&mut T>, gradient: &T, step: &Step) -> Result<()> {
        adamw::fast::step(self, state, gradient, step)
    }

    fn linear(&self, input: Linear<&T, WeightOf<'_, Self>>) -> Result<T> {
        linear::fast::forward(self, input)
    }
    fn linear_list(&self, input: LinearList<'_, &T, WeightOf<'_, Self>>) -> Result<Vec<T>> {
        linear::fast::forward_list(self, input)
    }
    fn linear_backward(&self, input: Linear<&T>, gradient: &T, needs: [bool; 3]) -> Result<[Option<T>; 3]> {
        linear::fast::backward(self, input, gradient, needs)
    }
    fn rms_norm(&self, input: RmsNormList<'_, &T>, eps: f64) -> Result<Vec<T>> {
        let one = |&x: &&T| rms_norm::fast::forward(self, RmsNorm { x, weight: input.weight }, eps);
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
            rms_norm::fast::backward(self, input, eps, gradients[i])
        })
    }
    fn gated_rms_norm(&self, input: GatedRmsNormList<'_, &T>, eps: f64) -> Result<Vec<T>> {
        let one = |(&x, &gate): (&&T, &&T)| {
            rms_norm::fast::gated_forward(self, GatedRmsNorm { x, gate, weight: input.weight }, eps)
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
            rms_norm::fast::gated_backward(self, input, eps, gradients[i])
        })
    }

    // ---- gated delta rule ----

    fn gated_delta(
        &self,
        input: GatedDelta<&T>,
        options: &GatedDeltaOptions,
        keep: bool,
    ) -> Result<(GatedDeltaOutput<T>, Vec<T>)> {
        gated_delta::fast::forward(self, input, options, keep)
    }
    fn gated_delta_backward(
        &self,
        input: GatedDelta<&T>,
        options: &GatedDeltaOptions,
        kept: &[T],
        gradient: GatedDeltaGradient<&T>,
    ) -> Result<GatedDelta<T>> {
        gated_delta::fast::backward(self, input, options, kept, gradient)
    }

    // ---- anchor reader ----

    fn anchor_read(
        &self,
        input: AnchorRead<&T>,
        options: &AnchorReadOptions,
        keep: bool,
    ) -> Result<(T, Option<AnchorReadKept<T>>)> {
        anchor_read::fast::forward(self, input, options, keep)
    }
    fn anchor_read_backward(
        &self,
        input: AnchorRead<&T>,
        options: &AnchorReadOptions,
        readout: &T,
        kept: Option<&AnchorReadKept<T>>,
        gradient: &T,
    ) -> Result<AnchorRead<T>> {
        anchor_read::fast::backward(self, input, options, readout, kept, gradient)
    }
    fn store_states(&self, states: &T, storage: Storage) -> Result<StoredStates> {
        StoredStates::new(states.data(), states.shape(), storage)
    }
    fn anchor_read_stored(
        &self,
        input: AnchorRead<&T, &[Arc<StoredStates>]>,
        options: &AnchorReadOptions,
    ) -> Result<T> {
        anchor_read::fast::forward_stored(self, input, options)
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
        anchor_read::fast::weights(self, input, options)
    }
    fn state_read(&self, input: StateRead<&T>, key_heads: usize) -> Result<T> {
        state_read::fast::forward(self, input, key_heads)
    }
    fn state_read_backward(
        &self,
        input: StateRead<&T>,
        key_heads: usize,
        gradient: &T,
    ) -> Result<StateRead<T>> {
        state_read::fast::backward(self, input, key_heads, gradient)
    }

    // ---- basic operations ----

    fn map(&self, kind: Map, x: &T) -> Result<T> {
        Ok(elementwise::fast::map(self, kind, x))
    }
    fn map_backward(&self, kind: Map, x: &T, y: &T, gradient: &T) -> Result<T> {
        elementwise::fast::map_backward(self, kind, x, y, gradient)
    }
    fn zip(&self, kind: Zip, a: &T, b: &T) -> Result<T> {
        elementwise::fast::zip(self, kind, a, b)
    }
    fn zip_backward(
        &self,
        kind: Zip,
        a: &T,
        b: &T,
        gradient: &T,
        needs: [bool; 2],
    ) -> Result<[Option<T>; 2]> {
        elementwise::fast::zip_backward(self, kind, a, b, gradient, needs)
    }
    fn matmul(&self, input: MatMul<&T>, transpose: Transpose) -> Result<T> {
        matmul::fast::forward(self, input, transpose)
    }
    fn matmul_backward(
        &self,
        input: MatMul<&T>,
        transpose: Transpose,
        gradient: &T,
        needs: [bool; 2],
    ) -> Result<[Option<T>; 2]> {
        matmul::fast::backward(self, input, transpose, gradient, needs)
    }
    fn softmax(&self, x: &T) -> Result<T> {
        softmax::fast::forward(self, x)
    }
    fn softmax_backward(&self, y: &T, gradient: &T) -> Result<T> {
        softmax::fast::backward(self, y, gradient)
    }
    fn slice(&self, x: &T, axis: usize, range: Range<usize>) -> Result<T> {
        layout::fast::slice(self, x, axis, range)
    }
    fn place(&self, x: &T, axis: usize, start: usize, size: usize) -> Result<T> {
        layout::fast::place(self, x, axis, start, size)
    }
    fn concat(&self, parts: &[&T], axis: usize) -> Result<T> {
        layout::fast::concat(self, parts, axis)
    }
    fn permute(&self, x: &T, axes: &[usize]) -> Result<T> {
        layout::fast::permute(self, x, axes)
    }
    fn reshape(&self, x: &T, shape: &[usize]) -> Result<T> {
        layout::fast::reshape(x, shape)
    }
    fn sum(&self, x: &T, axis: usize) -> Result<T> {
        reduce::fast::sum(self, x, axis)
    }
    fn mean(&self, x: &T, axis: usize) -> Result<T> {
        reduce::fast::mean(self, x, axis)
    }
    fn expand(&self, x: &T, axis: usize, count: usize) -> Result<T> {
        reduce::fast::expand(self, x, axis, count)
    }
    fn sum_to(&self, x: &T, shape: &[usize]) -> Result<T> {
        reduce::fast::sum_to(self, x, shape)
    }
    fn embedding(&self, input: Embedding<'_, WeightOf<'_, Self>>) -> Result<T> {
        embedding::fast::forward(self, input)
    }
    fn embedding_backward(&self, ids: &[u32], rows: usize, gradient: &T) -> Result<T> {
        embedding::fast::backward(self, ids, rows, gradient)
    }

    // ---- fused layers ----

    fn swiglu(&self, inputs: &[SwiGlu<&T>]) -> Result<Vec<T>> {
        inputs.iter().map(|&input| swiglu::fast::forward(self, input)).collect()
    }
    fn swiglu_backward(&self, inputs: &[SwiGlu<&T>], gradients: &[&T]) -> Result<Vec<SwiGlu<T>>> {
        let one = |(&input, &gradient): (&SwiGlu<&T>, &&T)| swiglu::fast::backward(self, input, gradient);
        inputs.iter().zip(gradients).map(one).collect()
    }
    fn short_conv(&self, inputs: &[ShortConv<&T>]) -> Result<Vec<(T, T)>> {
        inputs.iter().map(|&input| short_conv::fast::forward(self, input)).collect()
    }
    fn short_conv_backward(
        &self,
        inputs: &[ShortConv<&T>],
        gradients: &[&T],
    ) -> Result<Vec<ShortConvGradients<T>>> {
        let one =
            |(&input, &gradient): (&ShortConv<&T>, &&T)| short_conv::fast::backward(self, input, gradient);
        inputs.iter().zip(gradients).map(one).collect()
    }
    fn linear_cross_entropy(
        &self,
        input: LinearCrossEntropy<&T, WeightOf<'_, Self>>,
        targets: &[u32],
        normaliser: Option<f64>,
        needs: [bool; 2],
    ) -> Result<CrossEntropy<T>> {
        cross_entropy::fast::forward(self, input, targets, normaliser, needs)
    }
    fn linear_cross_entropy_backward(&self, kept: [Option<T>; 2], gradient: &T) -> Result<[Option<T>; 2]> {
        cross_entropy::fast::backward(self, kept, gradient)
    }
    fn token_losses(&self, x: &T, weight: WeightOf<'_, Self>, targets: &[u32]) -> Result<TokenLosses> {
        cross_entropy::fast::token_losses(self, x, weight, targets)
    }

    // ---- attention ----

    fn rotary(&self, x: &T, rotary: Rotary) -> Result<T> {
        rotary::fast::forward(self, x, rotary)
    }
    fn rotary_backward(&self, gradient: &T, rotary: Rotary) -> Result<T> {
        rotary::fast::backward(self, gradient, rotary)
    }
    fn attention(&self, input: Attention<&T>, heads: usize, keep: bool) -> Result<(T, Vec<T>)> {
        attention::fast::forward(self, input, heads, keep)
    }
    fn attention_blocks(&self, query: &T, blocks: &[KeyValues<T>], heads: usize) -> Result<T> {
        attention::fast::forward_blocks(self, query, blocks, heads)
    }
    fn attention_backward(
        &self,
        input: Attention<&T>,
        heads: usize,
        saved: &[T],
        gradient: &T,
    ) -> Result<Attention<T>> {
        attention::fast::backward(self, input, heads, saved, gradient)
    }

    // ---- log-linear gated delta rule ----

    fn log_linear_delta(
        &self,
        input: LogLinear<&T>,
        options: &LogLinearOptions,
        initial: Option<&T>,
        keep: bool,
    ) -> Result<LogLinearOutput<T>> {
        log_linear::fast::forward(self, input, options, initial, keep)
    }
    fn log_linear_delta_backward(
        &self,
        input: LogLinear<&T>,
        options: &LogLinearOptions,
        initial: Option<&T>,
        saved: Option<&T>,
        gradient: &T,
    ) -> Result<LogLinear<T>> {
        log_linear::fast::backward(self, input, options, initial, saved, gradient)
    }
}

struct AddTo<'a>(&'a mut [f32], &'a [f32]);
impl Kernel for AddTo<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        simd::add_scaled(s, self.0, 1.0, self.1);
    }
}

#[allow(unsafe_code)]
fn accumulate(cpu: &Cpu, sum: &mut T, term: &T) -> Result<()> {
    if !sum.is_unique() {
        *sum = cpu.from_slice(sum.data(), sum.shape())?;
    }
    let len = sum.len();
    let out = Shared::new(sum.data_mut());
    cpu.for_rows(cpu.row_parts(len, 1), |_, range| {
        // SAFETY: parts are disjoint ranges.
        let part = unsafe { out.part(range.start, range.len()) };
        cpu.level().run(AddTo(part, &term.data()[range]));
    });
    Ok(())
}

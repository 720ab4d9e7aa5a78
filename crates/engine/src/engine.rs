//! Interface between model code and devices: every operation, on one associated tensor type.
//!
//! Model code holds a [`crate::Tape`] over an `Engine` and never names a concrete tensor type. [`crate::Cpu`] is
//! the fast f32 engine; [`crate::Reference`] computes the same operations in f64 directly from the equations.
//! Operations come as pairs of forward and backward methods; the tape connects them.
//!
//! This trait is not implemented directly. A device implements [`Kernels`], which makes it an engine; the methods
//! here validate the arguments of each call and forward it. Every engine therefore rejects the same calls with the
//! same messages and needs no validation of its own.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::kernels::Kernels;
use crate::ops::adamw::{self, AdamW};
use crate::ops::anchor_read::{self, AnchorRead, AnchorReadKept, AnchorReadOptions, Storage, StoredStates};
use crate::ops::attention::{self, Attention, KeyValues};
use crate::ops::cross_entropy::{self, CrossEntropy, LinearCrossEntropy, TokenLosses};
use crate::ops::elementwise::broadcast::{broadcast, check_broadcasts_to};
use crate::ops::elementwise::{Map, Zip};
use crate::ops::embedding::{self, Embedding};
use crate::ops::gated_delta::{self, GatedDelta, GatedDeltaGradient, GatedDeltaOptions, GatedDeltaOutput};
use crate::ops::linear::{self, Linear, LinearList, LinearListGradients, LinearListNeeds, Product};
use crate::ops::log_linear::{self, LogLinear, LogLinearOptions, LogLinearOutput};
use crate::ops::matmul::{self, MatMul, Transpose};
use crate::ops::rms_norm::{self, GatedRmsNormGradients, GatedRmsNormList, RmsNormList};
use crate::ops::rotary::{self, Rotary};
use crate::ops::short_conv::{self, ShortConv, ShortConvGradients};
use crate::ops::state_read::{self, StateRead};
use crate::ops::swiglu::{self, SwiGlu};
use crate::ops::{layout, reduce, softmax};
use crate::precision::Precision;
use crate::tensor::element_count;
use crate::weight::{self, Weight};

/// Weight argument of an operation of engine `E`: in full, or packed in reduced precision.
pub type WeightRef<'a, E> = Weight<&'a <E as Engine>::Tensor, &'a <E as Engine>::Packed>;

/// Device that can run every operation of the models, forward and backward. An engine can be shared between
/// threads.
pub trait Engine: Send + Sync + Sized + 'static {
    /// Tensor on this device. Cloning is cheap: it copies a handle.
    type Tensor: Clone + Debug + Send + Sync + 'static;

    /// Weight matrix in reduced precision, for inference. Cloning is cheap: it copies a handle.
    type Packed: Clone + Debug + Send + Sync + 'static;

    /// Anchor states in storage precision.
    type Stored: Clone + Debug + Send + Sync + 'static;

    /// Device implementation, whose methods do not validate their arguments.
    type Kernels: Kernels<Tensor = Self::Tensor, Packed = Self::Packed, Stored = Self::Stored>;

    /// Device implementation of this engine.
    fn kernels(&self) -> &Self::Kernels;

    /// Tokens per chunk of the recurrent operations (`gated_delta`, `log_linear_delta`). Chunks start at multiples
    /// of this, counted from the call's first token. A sequence split at multiples of this into several calls gives
    /// results bit-identical to a single call.
    const CHUNK_TOKENS: usize = <Self::Kernels as Kernels>::CHUNK_TOKENS;

    /// Runs `task(0)` to `task(count - 1)`, each once, in parallel if the engine has threads. Operations inside a
    /// task run on the task's own thread. Tasks must be independent of each other.
    fn side_by_side(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        Kernels::side_by_side(self.kernels(), count, task);
    }

    // ---- the device ----

    /// Fails if the device was lost. [`Engine::to_f32`] and [`Engine::to_f64`] cannot report that: call this before
    /// their values are trusted, for example before they replace a file.
    fn check(&self) -> Result<()> {
        Kernels::check(self.kernels())
    }
    /// Returns unused buffers to the system.
    fn trim(&self) {
        Kernels::trim(self.kernels());
    }
    /// Bytes currently held by this engine's tensors; 0 if it does not count them.
    fn live_bytes(&self) -> usize {
        Kernels::live_bytes(self.kernels())
    }
    /// Bytes of unused buffers kept for reuse; 0 if the engine does not count them.
    fn free_bytes(&self) -> usize {
        Kernels::free_bytes(self.kernels())
    }

    // ---- data in and out ----

    /// Creates a tensor from values in row-major order.
    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<Self::Tensor> {
        check_count(data.len(), shape)?;
        Kernels::from_f32(self.kernels(), data, shape)
    }
    /// Creates a tensor from values in row-major order, rounded to the device's number type.
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<Self::Tensor> {
        check_count(data.len(), shape)?;
        Kernels::from_f64(self.kernels(), data, shape)
    }
    /// Creates a tensor filled with `value`.
    fn full(&self, shape: &[usize], value: f64) -> Result<Self::Tensor> {
        element_count("full", shape)?;
        Kernels::full(self.kernels(), shape, value)
    }
    /// Dimensions of a tensor.
    fn shape<'a>(&self, tensor: &'a Self::Tensor) -> &'a [usize] {
        Kernels::shape(self.kernels(), tensor)
    }
    /// Values in row-major order, as f32.
    fn to_f32(&self, tensor: &Self::Tensor) -> Vec<f32> {
        Kernels::to_f32(self.kernels(), tensor)
    }
    /// Values in row-major order, as f64.
    fn to_f64(&self, tensor: &Self::Tensor) -> Vec<f64> {
        Kernels::to_f64(self.kernels(), tensor)
    }

    // ---- packed weights ----

    /// Packs a weight [rows, width] in reduced precision, with one scale per row if the precision has scales.
    /// `linear`, `embedding` and the losses accept it in place of the full weight, without gradients
    /// ([`Weight::Packed`]).
    fn pack(&self, weight: &Self::Tensor, precision: Precision) -> Result<Self::Packed> {
        weight::check_shape(self.shape(weight))?;
        Kernels::pack(self.kernels(), weight, precision)
    }
    /// Dequantised values of a packed weight, [rows, width].
    fn unpack(&self, packed: &Self::Packed) -> Result<Self::Tensor> {
        Kernels::unpack(self.kernels(), packed)
    }
    /// Dimensions of a packed weight, [rows, width].
    fn packed_shape<'a>(&self, packed: &'a Self::Packed) -> &'a [usize; 2] {
        Kernels::packed_shape(self.kernels(), packed)
    }
    /// Precision of a packed weight.
    fn packed_precision(&self, packed: &Self::Packed) -> Precision {
        Kernels::packed_precision(self.kernels(), packed)
    }

    // ---- gradients and parameters ----

    /// `sum += term`, in place if the buffer of `sum` is not shared.
    fn accumulate(&self, sum: &mut Self::Tensor, term: &Self::Tensor) -> Result<()> {
        expect_shape("accumulate", "term", self.shape(term), self.shape(sum), "the shape of the sum")?;
        Kernels::accumulate(self.kernels(), sum, term)
    }
    /// Appends `rows` to `whole` along dimension `axis`; all dimensions before it must be 1. Works in place if the
    /// buffer of `whole` is not shared and has capacity, so many small calls cost no more than one large one.
    fn append(&self, whole: &mut Self::Tensor, rows: &Self::Tensor, axis: usize) -> Result<()> {
        layout::appended(self.shape(whole), self.shape(rows), axis)?;
        Kernels::append(self.kernels(), whole, rows, axis)
    }
    /// Σ x² over all elements of all tensors, in f64: per-tensor sums, added in list order. One call covers all
    /// parameters of a model, so a device synchronises once instead of once per parameter.
    fn squared_norm(&self, tensors: &[&Self::Tensor]) -> Result<f64> {
        Kernels::squared_norm(self.kernels(), tensors)
    }
    /// One AdamW step on a parameter and its two moments.
    fn adamw(
        &self,
        state: AdamW<&mut Self::Tensor>,
        gradient: &Self::Tensor,
        step: &adamw::Step,
    ) -> Result<()> {
        let AdamW { parameter, first_moment, second_moment } = &state;
        let shapes = [self.shape(parameter), self.shape(first_moment), self.shape(second_moment)];
        adamw::check(shapes, self.shape(gradient), step)?;
        Kernels::adamw(self.kernels(), state, gradient, step)
    }

    // ---- layers ----

    /// y = x Wᵀ (+ bias). W is a tensor, or a [`Weight`] that may be packed.
    fn linear<'a>(
        &self,
        input: Linear<&'a Self::Tensor, impl Into<WeightRef<'a, Self>>>,
    ) -> Result<Self::Tensor> {
        let Linear { x, weight, bias } = input;
        let weight = weight.into();
        let bias_shape = bias.map(|bias| self.shape(bias));
        linear::check(self.shape(x), self.weight_shape(weight), bias_shape)?;
        Kernels::linear(self.kernels(), Linear { x, weight, bias })
    }
    /// x Wᵀ (+ bias) (+ residual) for a list of products; each result is bit-identical to [`Engine::linear`], to which
    /// the residual is then added.
    fn linear_list(
        &self,
        input: LinearList<'_, &Self::Tensor, WeightRef<'_, Self>>,
    ) -> Result<Vec<Self::Tensor>> {
        let LinearList { x, weights, products } = input;
        let rows = |i: usize| Some(self.shape(x.get(i)?));
        check_list(self, products, rows, |i| Some(self.weight_shape(*weights.get(i)?)))?;
        Kernels::linear_list(self.kernels(), input)
    }
    /// Gradients of [`Engine::linear`]; `needs` selects which of x, W, bias are computed.
    fn linear_backward(
        &self,
        input: Linear<&Self::Tensor>,
        gradient: &Self::Tensor,
        needs: [bool; 3],
    ) -> Result<[Option<Self::Tensor>; 3]> {
        let x = self.shape(input.x);
        let bias = input.bias.map(|bias| self.shape(bias));
        let sizes = linear::check(x, self.shape(input.weight), bias)?;
        let expected = linear::output_shape(x, sizes);
        expect_shape("linear", "gradient", self.shape(gradient), &expected, "[.., out]")?;
        Kernels::linear_backward(self.kernels(), input, gradient, needs)
    }
    /// Gradients of [`Engine::linear_list`], one of `gradients` for each product, as far as `needs` selects them. A
    /// gradient of input rows is added to `dx`, or becomes `dx` if that is `None`. Those of residuals are `gradients`.
    fn linear_list_backward(
        &self,
        input: LinearList<'_, &Self::Tensor>,
        gradients: &[&Self::Tensor],
        needs: &LinearListNeeds,
        dx: &mut [Option<Self::Tensor>],
    ) -> Result<LinearListGradients<Self::Tensor>> {
        let LinearList { x, weights, products } = input;
        check_lengths("linear", products.len(), &[gradients.len(), needs.biases.len()])?;
        check_lengths("linear", x.len(), &[needs.x.len(), dx.len()])?;
        check_lengths("linear", weights.len(), &[needs.weights.len()])?;
        let rows = |i: usize| Some(self.shape(x.get(i)?));
        let sizes = check_list(self, products, rows, |i| Some(self.shape(weights.get(i)?)))?;
        for ((product, sizes), &gradient) in products.iter().zip(sizes).zip(gradients) {
            let expected = linear::output_shape(self.shape(x[product.x]), sizes);
            expect_shape("linear", "gradient", self.shape(gradient), &expected, "[.., out]")?;
        }
        for (x, dx) in x.iter().zip(&*dx) {
            if let Some(dx) = dx {
                expect_shape("linear", "dx", self.shape(dx), self.shape(x), "the shape of x")?;
            }
        }
        Kernels::linear_list_backward(self.kernels(), input, gradients, needs, dx)
    }
    /// y = x / rms(x) · w over the last dimension, for each x.
    fn rms_norm(&self, input: RmsNormList<'_, &Self::Tensor>, eps: f64) -> Result<Vec<Self::Tensor>> {
        let x = input.x.iter().map(|x| self.shape(x));
        rms_norm::check_list("rms_norm", x, self.shape(input.weight))?;
        Kernels::rms_norm(self.kernels(), input, eps)
    }
    /// Gradients of [`Engine::rms_norm`], one of `gradients` for each x. Returns that of the weights; that of an x is
    /// added to `dx`, or becomes `dx` if that is `None`.
    fn rms_norm_backward(
        &self,
        input: RmsNormList<'_, &Self::Tensor>,
        eps: f64,
        gradients: &[&Self::Tensor],
        dx: &mut [Option<Self::Tensor>],
    ) -> Result<Self::Tensor> {
        const NAME: &str = "rms_norm";
        check_lengths(NAME, input.x.len(), &[gradients.len(), dx.len()])?;
        let x = input.x.iter().map(|x| self.shape(x));
        rms_norm::check_list(NAME, x.clone(), self.shape(input.weight))?;
        for ((x, gradient), dx) in x.zip(gradients).zip(&*dx) {
            expect_shape(NAME, "gradient", self.shape(gradient), x, "the shape of x")?;
            if let Some(dx) = dx {
                expect_shape(NAME, "dx", self.shape(dx), x, "the shape of x")?;
            }
        }
        Kernels::rms_norm_backward(self.kernels(), input, eps, gradients, dx)
    }
    /// y = rms_norm(x) · SiLU(gate), per head, for each x and its gate.
    fn gated_rms_norm(
        &self,
        input: GatedRmsNormList<'_, &Self::Tensor>,
        eps: f64,
    ) -> Result<Vec<Self::Tensor>> {
        check_gated(self, &input)?;
        Kernels::gated_rms_norm(self.kernels(), input, eps)
    }
    /// Gradients of [`Engine::gated_rms_norm`], one of `gradients` for each x.
    fn gated_rms_norm_backward(
        &self,
        input: GatedRmsNormList<'_, &Self::Tensor>,
        eps: f64,
        gradients: &[&Self::Tensor],
    ) -> Result<GatedRmsNormGradients<Self::Tensor>> {
        check_gated(self, &input)?;
        check_lengths("gated_rms_norm", input.x.len(), &[gradients.len()])?;
        for (x, gradient) in input.x.iter().zip(gradients) {
            let (found, x) = (self.shape(gradient), self.shape(x));
            expect_shape("gated_rms_norm", "gradient", found, x, "the shape of x")?;
        }
        Kernels::gated_rms_norm_backward(self.kernels(), input, eps, gradients)
    }

    // ---- gated delta rule ----

    /// Gated delta rule; with `keep`, also returns what its backward pass needs.
    fn gated_delta(
        &self,
        input: GatedDelta<&Self::Tensor>,
        options: &GatedDeltaOptions,
        keep: bool,
    ) -> Result<(GatedDeltaOutput<Self::Tensor>, Vec<Self::Tensor>)> {
        let sizes = gated_delta::check(&input.map(|t| self.shape(t)), options)?;
        if keep {
            gated_delta::check_differentiable(&sizes)?;
        }
        Kernels::gated_delta(self.kernels(), input, options, keep)
    }
    /// Gradients of [`Engine::gated_delta`], from the values it saved.
    fn gated_delta_backward(
        &self,
        input: GatedDelta<&Self::Tensor>,
        options: &GatedDeltaOptions,
        kept: &[Self::Tensor],
        gradient: GatedDeltaGradient<&Self::Tensor>,
    ) -> Result<GatedDelta<Self::Tensor>> {
        let sizes = gated_delta::check(&input.map(|t| self.shape(t)), options)?;
        gated_delta::check_gradient(&sizes, &gradient.map(|t| self.shape(t)))?;
        Kernels::gated_delta_backward(self.kernels(), input, options, kept, gradient)
    }

    // ---- anchor reader ----

    /// Reads the anchors visible to each token; with `keep`, also returns what its backward pass needs.
    fn anchor_read(
        &self,
        input: AnchorRead<&Self::Tensor>,
        options: &AnchorReadOptions,
        keep: bool,
    ) -> Result<(Self::Tensor, Option<AnchorReadKept<Self::Tensor>>)> {
        anchor_read::check(&input.map(|t| self.shape(t)), options)?;
        Kernels::anchor_read(self.kernels(), input, options, keep)
    }
    /// Gradients of [`Engine::anchor_read`], from its readout and the values it saved.
    fn anchor_read_backward(
        &self,
        input: AnchorRead<&Self::Tensor>,
        options: &AnchorReadOptions,
        readout: &Self::Tensor,
        kept: Option<&AnchorReadKept<Self::Tensor>>,
        gradient: &Self::Tensor,
    ) -> Result<AnchorRead<Self::Tensor>> {
        let shapes = input.map(|t| self.shape(t));
        let sizes = anchor_read::check(&shapes, options)?;
        let expected = anchor_read::output_shape(shapes.query, &sizes);
        for (name, tensor) in [("gradient", gradient), ("readout", readout)] {
            expect_shape("anchor_read", name, self.shape(tensor), &expected, "[.., value_heads·d_v]")?;
        }
        Kernels::anchor_read_backward(self.kernels(), input, options, readout, kept, gradient)
    }
    /// Converts anchor states [n, value_heads, d_k, d_v] to storage precision.
    fn store_states(&self, states: &Self::Tensor, storage: Storage) -> Result<Self::Stored> {
        let &[_, _, _, _] = self.shape(states) else {
            let expected = "[anchors, value_heads, d_k, d_v]";
            return bad_shape("store_states", "states", self.shape(states), expected);
        };
        Kernels::store_states(self.kernels(), states, storage)
    }
    /// Variant of [`Engine::anchor_read`] for a list of stored states, in anchor order; for inference. If the list
    /// has as many entries as there are anchors, each entry must hold one anchor.
    fn anchor_read_stored(
        &self,
        input: AnchorRead<&Self::Tensor, &[Arc<Self::Stored>]>,
        options: &AnchorReadOptions,
    ) -> Result<Self::Tensor> {
        let AnchorRead { query, routing_query, routing_keys, anchor_states: list, null_score } = input;
        let keys = self.shape(routing_keys);
        let states =
            anchor_read::stored_list_shape(keys, list, |s| Kernels::stored_shape(self.kernels(), s))?;
        let shapes = AnchorRead {
            query: self.shape(query),
            routing_query: self.shape(routing_query),
            routing_keys: keys,
            anchor_states: &states[..],
            null_score: null_score.map(|t| self.shape(t)),
        };
        anchor_read::check(&shapes, options)?;
        Kernels::anchor_read_stored(self.kernels(), input, options)
    }
    /// Copies stored states to host memory, in the format that is written to files.
    fn stored_to_host<'a>(&self, states: &'a Self::Stored) -> Result<Cow<'a, StoredStates>> {
        Kernels::stored_to_host(self.kernels(), states)
    }
    /// Creates stored states from host memory, or from a source that is read on first use.
    fn stored_from_host(&self, states: StoredStates) -> Result<Self::Stored> {
        Kernels::stored_from_host(self.kernels(), states)
    }
    /// Size of stored states in bytes.
    fn stored_bytes(&self, states: &Self::Stored) -> usize {
        Kernels::stored_bytes(self.kernels(), states)
    }
    /// Routing weights for inspection, [rows, value_heads, anchors]; zero where an anchor is not visible or not
    /// selected. The states are not read; their dimensions [d_k, d_v] are passed instead.
    fn routing_weights(
        &self,
        input: AnchorRead<&Self::Tensor, [usize; 2]>,
        options: &AnchorReadOptions,
    ) -> Result<Self::Tensor> {
        let AnchorRead { query, routing_query, routing_keys, anchor_states, null_score } = input;
        let shapes = AnchorRead {
            query: self.shape(query),
            routing_query: self.shape(routing_query),
            routing_keys: self.shape(routing_keys),
            anchor_states,
            null_score: null_score.map(|t| self.shape(t)),
        };
        anchor_read::check_weights(shapes, options)?;
        Kernels::routing_weights(self.kernels(), input, options)
    }

    /// Reads one state per row with that row's query.
    fn state_read(&self, input: StateRead<&Self::Tensor>, key_heads: usize) -> Result<Self::Tensor> {
        state_read::check(self.shape(input.query), self.shape(input.states), key_heads)?;
        Kernels::state_read(self.kernels(), input, key_heads)
    }
    /// Gradients of [`Engine::state_read`].
    fn state_read_backward(
        &self,
        input: StateRead<&Self::Tensor>,
        key_heads: usize,
        gradient: &Self::Tensor,
    ) -> Result<StateRead<Self::Tensor>> {
        let query = self.shape(input.query);
        let sizes = state_read::check(query, self.shape(input.states), key_heads)?;
        let expected = state_read::output_shape(query, &sizes);
        expect_shape("state_read", "gradient", self.shape(gradient), &expected, "[.., value_heads·d_v]")?;
        Kernels::state_read_backward(self.kernels(), input, key_heads, gradient)
    }

    // ---- basic operations ----

    /// y = f(x) for every element.
    fn map(&self, kind: Map, x: &Self::Tensor) -> Result<Self::Tensor> {
        Kernels::map(self.kernels(), kind, x)
    }
    /// Gradient of [`Engine::map`], from its input x and its output y.
    fn map_backward(
        &self,
        kind: Map,
        x: &Self::Tensor,
        y: &Self::Tensor,
        gradient: &Self::Tensor,
    ) -> Result<Self::Tensor> {
        for (name, tensor) in [("y", y), ("gradient", gradient)] {
            expect_shape("map", name, self.shape(tensor), self.shape(x), "the shape of x")?;
        }
        Kernels::map_backward(self.kernels(), kind, x, y, gradient)
    }
    /// y = f(a, b) for every element, with numpy broadcasting.
    fn zip(&self, kind: Zip, a: &Self::Tensor, b: &Self::Tensor) -> Result<Self::Tensor> {
        broadcast(kind.name(), self.shape(a), self.shape(b))?;
        Kernels::zip(self.kernels(), kind, a, b)
    }
    /// Gradients of [`Engine::zip`]; `needs` selects which of a, b are computed.
    fn zip_backward(
        &self,
        kind: Zip,
        a: &Self::Tensor,
        b: &Self::Tensor,
        gradient: &Self::Tensor,
        needs: [bool; 2],
    ) -> Result<[Option<Self::Tensor>; 2]> {
        let expected = broadcast(kind.name(), self.shape(a), self.shape(b))?;
        expect_shape(kind.name(), "gradient", self.shape(gradient), &expected, "the shape of the result")?;
        Kernels::zip_backward(self.kernels(), kind, a, b, gradient, needs)
    }
    /// C = A B for each index of the leading dimensions.
    fn matmul(&self, input: MatMul<&Self::Tensor>, transpose: Transpose) -> Result<Self::Tensor> {
        matmul::check(self.shape(input.a), self.shape(input.b), transpose)?;
        Kernels::matmul(self.kernels(), input, transpose)
    }
    /// Gradients of [`Engine::matmul`]; `needs` selects which of a, b are computed.
    fn matmul_backward(
        &self,
        input: MatMul<&Self::Tensor>,
        transpose: Transpose,
        gradient: &Self::Tensor,
        needs: [bool; 2],
    ) -> Result<[Option<Self::Tensor>; 2]> {
        let (_, expected) = matmul::check(self.shape(input.a), self.shape(input.b), transpose)?;
        expect_shape("matmul", "gradient", self.shape(gradient), &expected, "[.., m, n]")?;
        Kernels::matmul_backward(self.kernels(), input, transpose, gradient, needs)
    }
    /// Softmax over the last dimension; a row of only −inf gives zeros.
    fn softmax(&self, x: &Self::Tensor) -> Result<Self::Tensor> {
        softmax::check(self.shape(x))?;
        Kernels::softmax(self.kernels(), x)
    }
    /// Gradient of [`Engine::softmax`], from its output y.
    fn softmax_backward(&self, y: &Self::Tensor, gradient: &Self::Tensor) -> Result<Self::Tensor> {
        softmax::check(self.shape(y))?;
        expect_shape("softmax", "gradient", self.shape(gradient), self.shape(y), "the shape of x")?;
        Kernels::softmax_backward(self.kernels(), y, gradient)
    }
    /// x[.., range, ..] along dimension `axis`.
    fn slice(&self, x: &Self::Tensor, axis: usize, range: Range<usize>) -> Result<Self::Tensor> {
        layout::check_slice(self.shape(x), axis, &range)?;
        Kernels::slice(self.kernels(), x, axis, range)
    }
    /// Embeds x in zeros: dimension `axis` gets size `size`, with x at `start`.
    fn place(&self, x: &Self::Tensor, axis: usize, start: usize, size: usize) -> Result<Self::Tensor> {
        layout::check_place(self.shape(x), axis, start, size)?;
        Kernels::place(self.kernels(), x, axis, start, size)
    }
    /// Concatenates tensors along dimension `axis`.
    fn concat(&self, parts: &[&Self::Tensor], axis: usize) -> Result<Self::Tensor> {
        let shapes: Vec<&[usize]> = parts.iter().map(|part| self.shape(part)).collect();
        layout::check_concat(&shapes, axis)?;
        Kernels::concat(self.kernels(), parts, axis)
    }
    /// Permutes dimensions: dimension i of the result is dimension `axes[i]` of x.
    fn permute(&self, x: &Self::Tensor, axes: &[usize]) -> Result<Self::Tensor> {
        layout::check_permute(self.shape(x), axes)?;
        Kernels::permute(self.kernels(), x, axes)
    }
    /// Changes the shape; elements keep their row-major order.
    fn reshape(&self, x: &Self::Tensor, shape: &[usize]) -> Result<Self::Tensor> {
        layout::check_reshape(self.shape(x), shape)?;
        Kernels::reshape(self.kernels(), x, shape)
    }
    /// Σ over dimension `axis`, which is removed from the result.
    fn sum(&self, x: &Self::Tensor, axis: usize) -> Result<Self::Tensor> {
        reduce::check_sum("sum", self.shape(x), axis)?;
        Kernels::sum(self.kernels(), x, axis)
    }
    /// Mean over dimension `axis`, which is removed from the result and must not be empty.
    fn mean(&self, x: &Self::Tensor, axis: usize) -> Result<Self::Tensor> {
        reduce::check_mean(self.shape(x), axis)?;
        Kernels::mean(self.kernels(), x, axis)
    }
    /// Repeats x `count` times along a new dimension `axis`.
    fn expand(&self, x: &Self::Tensor, axis: usize, count: usize) -> Result<Self::Tensor> {
        reduce::check_expand(self.shape(x), axis, count)?;
        Kernels::expand(self.kernels(), x, axis, count)
    }
    /// Sums x over the dimensions along which broadcasting `shape` to x's shape repeats elements.
    fn sum_to(&self, x: &Self::Tensor, shape: &[usize]) -> Result<Self::Tensor> {
        check_broadcasts_to("sum_to", shape, self.shape(x))?;
        Kernels::sum_to(self.kernels(), x, shape)
    }
    /// Rows of a table selected by `ids`. The table is a tensor, or a [`Weight`] that may be packed.
    fn embedding<'a>(&self, input: Embedding<'_, impl Into<WeightRef<'a, Self>>>) -> Result<Self::Tensor> {
        let Embedding { table, ids, shape } = input;
        let table = table.into();
        embedding::check(self.weight_shape(table), ids, shape)?;
        Kernels::embedding(self.kernels(), Embedding { table, ids, shape })
    }
    /// Gradient of [`Engine::embedding`] with respect to its table of `rows` rows.
    fn embedding_backward(&self, ids: &[u32], rows: usize, gradient: &Self::Tensor) -> Result<Self::Tensor> {
        embedding::check_backward(ids, rows, self.shape(gradient))?;
        Kernels::embedding_backward(self.kernels(), ids, rows, gradient)
    }

    // ---- fused layers ----

    /// y = SiLU(gate) ∘ up, for each of the inputs.
    fn swiglu(&self, inputs: &[SwiGlu<&Self::Tensor>]) -> Result<Vec<Self::Tensor>> {
        for input in inputs {
            swiglu::check(self.shape(input.gate), self.shape(input.up))?;
        }
        Kernels::swiglu(self.kernels(), inputs)
    }
    /// Gradients of [`Engine::swiglu`], one of `gradients` for each of the inputs.
    fn swiglu_backward(
        &self,
        inputs: &[SwiGlu<&Self::Tensor>],
        gradients: &[&Self::Tensor],
    ) -> Result<Vec<SwiGlu<Self::Tensor>>> {
        check_lengths("swiglu", inputs.len(), &[gradients.len()])?;
        for (input, gradient) in inputs.iter().zip(gradients) {
            swiglu::check(self.shape(input.gate), self.shape(input.up))?;
            swiglu::check_gradient(self.shape(input.gate), self.shape(gradient))?;
        }
        Kernels::swiglu_backward(self.kernels(), inputs, gradients)
    }
    /// Depthwise causal convolutions, each followed by SiLU; also returns the tails for the next call.
    fn short_conv(&self, inputs: &[ShortConv<&Self::Tensor>]) -> Result<Vec<(Self::Tensor, Self::Tensor)>> {
        for input in inputs {
            let tail = input.tail.map(|tail| self.shape(tail));
            short_conv::check(self.shape(input.x), self.shape(input.weight), tail)?;
        }
        Kernels::short_conv(self.kernels(), inputs)
    }
    /// Gradients of [`Engine::short_conv`], one of `gradients` for each convolution; tails are treated as constants.
    fn short_conv_backward(
        &self,
        inputs: &[ShortConv<&Self::Tensor>],
        gradients: &[&Self::Tensor],
    ) -> Result<Vec<ShortConvGradients<Self::Tensor>>> {
        check_lengths("short_conv", inputs.len(), &[gradients.len()])?;
        for (input, &gradient) in inputs.iter().zip(gradients) {
            let tail = input.tail.map(|tail| self.shape(tail));
            short_conv::check(self.shape(input.x), self.shape(input.weight), tail)?;
            short_conv::check_gradient(self.shape(input.x), self.shape(gradient))?;
        }
        Kernels::short_conv_backward(self.kernels(), inputs, gradients)
    }
    /// Σ nll / normaliser of softmax(x Wᵀ), together with the gradients of x and W that `needs` selects. W is a
    /// tensor or a [`Weight`]; a packed one has no gradient.
    fn linear_cross_entropy<'a>(
        &self,
        input: LinearCrossEntropy<&'a Self::Tensor, impl Into<WeightRef<'a, Self>>>,
        targets: &[u32],
        normaliser: Option<f64>,
        needs: [bool; 2],
    ) -> Result<CrossEntropy<Self::Tensor>> {
        const NAME: &str = "linear_cross_entropy";
        let (x, weight) = (input.x, input.weight.into());
        let call = cross_entropy::check(NAME, self.shape(x), self.weight_shape(weight), targets)?;
        cross_entropy::factor(&call, normaliser)?;
        if let (Weight::Packed(packed), true) = (weight, needs.contains(&true)) {
            return no_gradient(NAME, self.packed_precision(packed));
        }
        Kernels::linear_cross_entropy(
            self.kernels(),
            LinearCrossEntropy { x, weight },
            targets,
            normaliser,
            needs,
        )
    }
    /// Saved gradients of [`Engine::linear_cross_entropy`], multiplied by the gradient of the loss.
    fn linear_cross_entropy_backward(
        &self,
        kept: [Option<Self::Tensor>; 2],
        gradient: &Self::Tensor,
    ) -> Result<[Option<Self::Tensor>; 2]> {
        cross_entropy::check_gradient(self.shape(gradient))?;
        Kernels::linear_cross_entropy_backward(self.kernels(), kept, gradient)
    }
    /// Loss and most probable target of each token, for evaluation.
    fn token_losses<'a>(
        &self,
        x: &'a Self::Tensor,
        weight: impl Into<WeightRef<'a, Self>>,
        targets: &[u32],
    ) -> Result<TokenLosses> {
        let weight = weight.into();
        cross_entropy::check("token_losses", self.shape(x), self.weight_shape(weight), targets)?;
        Kernels::token_losses(self.kernels(), x, weight, targets)
    }

    // ---- attention ----

    /// Rotates each pair of each head of x [B, T, H·d] by an angle proportional to the position.
    fn rotary(&self, x: &Self::Tensor, rotary: Rotary) -> Result<Self::Tensor> {
        rotary::check("x", self.shape(x), &rotary)?;
        Kernels::rotary(self.kernels(), x, rotary)
    }
    /// Gradient of [`Engine::rotary`].
    fn rotary_backward(&self, gradient: &Self::Tensor, rotary: Rotary) -> Result<Self::Tensor> {
        rotary::check("gradient", self.shape(gradient), &rotary)?;
        Kernels::rotary_backward(self.kernels(), gradient, rotary)
    }
    /// Causal softmax attention; with `keep`, also returns what [`Engine::attention_backward`] needs.
    fn attention(
        &self,
        input: Attention<&Self::Tensor>,
        heads: usize,
        keep: bool,
    ) -> Result<(Self::Tensor, Vec<Self::Tensor>)> {
        attention::check(input.map(|t| self.shape(t)), heads)?;
        Kernels::attention(self.kernels(), input, heads, keep)
    }
    /// Attention of a query [1, Tq, H·d] over a key-value cache in blocks, bit-identical to [`Engine::attention`];
    /// for inference.
    fn attention_blocks(
        &self,
        query: &Self::Tensor,
        blocks: &[KeyValues<Self::Tensor>],
        heads: usize,
    ) -> Result<Self::Tensor> {
        let shapes: Vec<_> = blocks.iter().map(|block| block.map(|t| self.shape(t))).collect();
        attention::check_blocks(self.shape(query), &shapes, heads)?;
        Kernels::attention_blocks(self.kernels(), query, blocks, heads)
    }
    /// Gradients of [`Engine::attention`]; `saved` holds the values it saved.
    fn attention_backward(
        &self,
        input: Attention<&Self::Tensor>,
        heads: usize,
        saved: &[Self::Tensor],
        gradient: &Self::Tensor,
    ) -> Result<Attention<Self::Tensor>> {
        let sizes = attention::check(input.map(|t| self.shape(t)), heads)?;
        expect_shape("attention", "gradient", self.shape(gradient), &sizes.output(), "[B, Tq, H·e]")?;
        Kernels::attention_backward(self.kernels(), input, heads, saved, gradient)
    }

    // ---- log-linear gated delta rule ----

    /// Readouts of the log-linear gated delta rule, the level states after the last token if requested, and, with
    /// `keep`, what the backward pass needs.
    fn log_linear_delta(
        &self,
        input: LogLinear<&Self::Tensor>,
        options: &LogLinearOptions,
        initial: Option<&Self::Tensor>,
        keep: bool,
    ) -> Result<LogLinearOutput<Self::Tensor>> {
        log_linear::check(input.each(|t| self.shape(t)), options, initial.map(|t| self.shape(t)))?;
        Kernels::log_linear_delta(self.kernels(), input, options, initial, keep)
    }
    /// Gradients of [`Engine::log_linear_delta`].
    fn log_linear_delta_backward(
        &self,
        input: LogLinear<&Self::Tensor>,
        options: &LogLinearOptions,
        initial: Option<&Self::Tensor>,
        saved: Option<&Self::Tensor>,
        gradient: &Self::Tensor,
    ) -> Result<LogLinear<Self::Tensor>> {
        let shapes = input.each(|t| self.shape(t));
        log_linear::check(shapes, options, initial.map(|t| self.shape(t)))?;
        log_linear::check_gradient(shapes, self.shape(gradient))?;
        Kernels::log_linear_delta_backward(self.kernels(), input, options, initial, saved, gradient)
    }

    /// Dimensions of a weight, packed or not.
    fn weight_shape<'a>(&self, weight: WeightRef<'a, Self>) -> &'a [usize] {
        match weight {
            Weight::Full(tensor) => self.shape(tensor),
            Weight::Packed(packed) => self.packed_shape(packed),
        }
    }
}

impl<K: Kernels> Engine for K {
    type Tensor = K::Tensor;
    type Packed = K::Packed;
    type Stored = K::Stored;
    type Kernels = K;

    fn kernels(&self) -> &K {
        self
    }
}

/// Returns an error unless the number of values matches the shape.
fn check_count(found: usize, shape: &[usize]) -> Result<()> {
    let expected = element_count("tensor", shape)?;
    if found == expected {
        return Ok(());
    }
    bad_value("tensor", format!("got {found} values for shape {shape:?}, expected {expected}"))
}

/// Returns an error unless all lists that belong to another have its length.
fn check_lengths(operation: &'static str, expected: usize, found: &[usize]) -> Result<()> {
    match found.iter().find(|&&found| found != expected) {
        Some(found) => {
            bad_value(operation, format!("got lists of {expected} and {found} that belong to each other"))
        }
        None => Ok(()),
    }
}

fn check_gated<E: Engine>(engine: &E, input: &GatedRmsNormList<'_, &E::Tensor>) -> Result<()> {
    let weight = engine.shape(input.weight);
    check_lengths("gated_rms_norm", input.x.len(), &[input.gates.len()])?;
    rms_norm::check_list("gated_rms_norm", input.x.iter().map(|x| engine.shape(x)), weight)?;
    for (x, gate) in input.x.iter().zip(input.gates) {
        rms_norm::check_gated(engine.shape(x), engine.shape(gate), weight)?;
    }
    Ok(())
}

/// Validates the products of a list and returns their dimensions.
fn check_list<'a, E: Engine>(
    engine: &E,
    products: &[Product<&E::Tensor>],
    x: impl Fn(usize) -> Option<&'a [usize]>,
    weight: impl Fn(usize) -> Option<&'a [usize]>,
) -> Result<Vec<linear::Sizes>> {
    let one = |product: &Product<&E::Tensor>| {
        let [bias, residual] = [product.bias, product.residual].map(|t| t.map(|t| engine.shape(t)));
        linear::check_product(x(product.x), weight(product.weight), bias, residual)
    };
    products.iter().map(one).collect()
}

/// Error for a gradient of a packed weight.
pub(crate) fn no_gradient<T>(operation: &'static str, precision: Precision) -> Result<T> {
    let message =
        format!("a weight in {precision} has no gradient: train with f32 weights, or use Tape::inference");
    bad_value(operation, message)
}

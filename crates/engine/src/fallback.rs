//! Engine that delegates unimplemented operations to another engine.
//!
//! A new device needs some sixty operations before it can run a model. With [`Fallback`] it can start with a few:
//! each operation that the device does not implement runs on a complete engine, and its tensors are copied there
//! and back. Results are therefore correct from the start, and become fast as operations are added. Every transfer
//! copies all values through host memory, so this is meant for developing a device, not for production.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result, bad_value};
use crate::kernels::{Kernels, WeightOf, list_backward, list_forward};
use crate::ops::adamw::{AdamW, Step};
use crate::ops::anchor_read::{AnchorRead, AnchorReadKept, AnchorReadOptions, Storage, StoredStates};
use crate::ops::attention::{Attention, KeyValues};
use crate::ops::cross_entropy::{CrossEntropy, LinearCrossEntropy, TokenLosses};
use crate::ops::elementwise::{Map, Zip};
use crate::ops::embedding::Embedding;
use crate::ops::gated_delta::{GatedDelta, GatedDeltaGradient, GatedDeltaOptions, GatedDeltaOutput};
use crate::ops::linear::{Linear, LinearList, LinearListGradients, LinearListNeeds};
use crate::ops::log_linear::{LogLinear, LogLinearOptions, LogLinearOutput};
use crate::ops::matmul::{MatMul, Transpose};
use crate::ops::rms_norm::{GatedRmsNormGradients, GatedRmsNormList, RmsNormList};
use crate::ops::rotary::Rotary;
use crate::ops::short_conv::{ShortConv, ShortConvGradients};
use crate::ops::state_read::StateRead;
use crate::ops::swiglu::SwiGlu;
use crate::precision::Precision;
use crate::weight::Weight;

/// Runs an operation on `device` if it implements it, otherwise on `rest`. Tensors are those of the device.
#[derive(Clone, Debug, Default)]
pub struct Fallback<D, R> {
    /// Device that implements some of the operations.
    pub device: D,
    /// Engine that runs all other operations.
    pub rest: R,
}

/// Packed weight of either engine.
#[derive(Clone, Debug)]
pub enum FallbackPacked<D, R> {
    /// Packed by the device.
    Device(D),
    /// Packed by the fallback engine.
    Rest(R),
}

/// Stored states of either engine.
#[derive(Clone, Debug)]
pub enum FallbackStored<D, R> {
    /// Stored by the device.
    Device(Arc<D>),
    /// Stored by the fallback engine.
    Rest(Arc<R>),
}

type Packed<D, R> = FallbackPacked<<D as Kernels>::Packed, <R as Kernels>::Packed>;
type Stored<D, R> = FallbackStored<<D as Kernels>::Stored, <R as Kernels>::Stored>;

/// Result of the device; `None` if it does not implement the operation.
fn answer<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Error::Unsupported { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

const fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// Returns the device's result from the enclosing function, unless the device does not implement the operation.
macro_rules! try_device {
    ($result:expr) => {
        if let Some(value) = answer($result)? {
            return Ok(value);
        }
    };
}

impl<D: Kernels, R: Kernels> Fallback<D, R> {
    /// Combines a device with the engine that runs what the device does not implement.
    pub fn new(device: D, rest: R) -> Self {
        Self { device, rest }
    }

    /// Copies a tensor to the fallback engine, as f64, which represents the values of both engines exactly.
    fn there(&self, tensor: &D::Tensor) -> Result<R::Tensor> {
        self.rest.from_f64(&self.device.to_f64(tensor), self.device.shape(tensor))
    }

    /// Copies a tensor back to the device.
    fn back(&self, tensor: &R::Tensor) -> Result<D::Tensor> {
        self.device.from_f64(&self.rest.to_f64(tensor), self.rest.shape(tensor))
    }

    fn all_there(&self, tensors: &[D::Tensor]) -> Result<Vec<R::Tensor>> {
        tensors.iter().map(|tensor| self.there(tensor)).collect()
    }

    fn all_back(&self, tensors: &[R::Tensor]) -> Result<Vec<D::Tensor>> {
        tensors.iter().map(|tensor| self.back(tensor)).collect()
    }

    fn some_there(&self, tensor: Option<&D::Tensor>) -> Result<Option<R::Tensor>> {
        tensor.map(|tensor| self.there(tensor)).transpose()
    }

    fn some_back<const N: usize>(&self, tensors: &[Option<R::Tensor>; N]) -> Result<[Option<D::Tensor>; N]> {
        let mut moved = [const { None }; N];
        for (to, from) in moved.iter_mut().zip(tensors) {
            *to = from.as_ref().map(|tensor| self.back(tensor)).transpose()?;
        }
        Ok(moved)
    }

    fn list_there(&self, tensors: &[&D::Tensor]) -> Result<Vec<R::Tensor>> {
        tensors.iter().map(|tensor| self.there(tensor)).collect()
    }

    fn swiglu_there(&self, input: &SwiGlu<&D::Tensor>) -> Result<SwiGlu<R::Tensor>> {
        Ok(SwiGlu { gate: self.there(input.gate)?, up: self.there(input.up)? })
    }

    fn conv_there(&self, input: &ShortConv<&D::Tensor>) -> Result<ShortConv<R::Tensor>> {
        let tail = self.some_there(input.tail)?;
        Ok(ShortConv { x: self.there(input.x)?, weight: self.there(input.weight)?, tail })
    }

    /// Runs `operation` on the fallback engine; a full weight is copied there first.
    fn with_weight<T>(
        &self,
        weight: WeightOf<'_, Self>,
        operation: impl FnOnce(WeightOf<'_, R>) -> Result<T>,
    ) -> Result<T> {
        match weight {
            Weight::Full(tensor) => operation(Weight::Full(&self.there(tensor)?)),
            Weight::Packed(FallbackPacked::Rest(packed)) => operation(Weight::Packed(packed)),
            Weight::Packed(FallbackPacked::Device(_)) => bad_value(
                "Fallback",
                "the device packed this weight, so it must implement every operation that reads packed weights",
            ),
        }
    }

    /// Weight in the device's form; `None` if it was packed by the fallback engine.
    fn device_weight<'a>(weight: WeightOf<'a, Self>) -> Option<WeightOf<'a, D>> {
        match weight {
            Weight::Full(tensor) => Some(Weight::Full(tensor)),
            Weight::Packed(FallbackPacked::Device(packed)) => Some(Weight::Packed(packed)),
            Weight::Packed(FallbackPacked::Rest(_)) => None,
        }
    }

    /// List of stored states in the device's form; `None` unless the device stored all of them.
    fn device_states(list: &[Arc<Stored<D, R>>]) -> Option<Vec<Arc<D::Stored>>> {
        let own = |states: &Arc<Stored<D, R>>| match &**states {
            FallbackStored::Device(states) => Some(Arc::clone(states)),
            FallbackStored::Rest(_) => None,
        };
        list.iter().map(own).collect()
    }

    /// List of stored states in the fallback engine's form; those that the device stored are copied through host
    /// memory.
    fn rest_states(&self, list: &[Arc<Stored<D, R>>]) -> Result<Vec<Arc<R::Stored>>> {
        let moved = |states: &Arc<Stored<D, R>>| match &**states {
            FallbackStored::Rest(states) => Ok(Arc::clone(states)),
            FallbackStored::Device(states) => {
                let host = self.device.stored_to_host(states)?.into_owned();
                Ok(Arc::new(self.rest.stored_from_host(host)?))
            }
        };
        list.iter().map(moved).collect()
    }
}

impl<D: Kernels, R: Kernels> Kernels for Fallback<D, R> {
    type Tensor = D::Tensor;
    type Packed = Packed<D, R>;
    type Stored = Stored<D, R>;

    // ---- tensors in and out ----

    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<D::Tensor> {
        self.device.from_f32(data, shape)
    }
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<D::Tensor> {
        self.device.from_f64(data, shape)
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<D::Tensor> {
        self.device.full(shape, value)
    }
    fn shape<'a>(&self, tensor: &'a D::Tensor) -> &'a [usize] {
        self.device.shape(tensor)
    }
    fn to_f32(&self, tensor: &D::Tensor) -> Vec<f32> {
        self.device.to_f32(tensor)
    }
    fn to_f64(&self, tensor: &D::Tensor) -> Vec<f64> {
        self.device.to_f64(tensor)
    }
    fn packed_shape<'a>(&self, packed: &'a Self::Packed) -> &'a [usize; 2] {
        match packed {
            FallbackPacked::Device(packed) => self.device.packed_shape(packed),
            FallbackPacked::Rest(packed) => self.rest.packed_shape(packed),
        }
    }
    fn packed_precision(&self, packed: &Self::Packed) -> Precision {
        match packed {
            FallbackPacked::Device(packed) => self.device.packed_precision(packed),
            FallbackPacked::Rest(packed) => self.rest.packed_precision(packed),
        }
    }
    fn stored_shape(&self, states: &Self::Stored) -> [usize; 4] {
        match states {
            FallbackStored::Device(states) => self.device.stored_shape(states),
            FallbackStored::Rest(states) => self.rest.stored_shape(states),
        }
    }
    fn stored_bytes(&self, states: &Self::Stored) -> usize {
        match states {
            FallbackStored::Device(states) => self.device.stored_bytes(states),
            FallbackStored::Rest(states) => self.rest.stored_bytes(states),
        }
    }

    /// The device's chunk size if it runs the recurrence; otherwise the least common multiple of both engines' chunk
    /// sizes, which is valid whichever of them runs it.
    const CHUNK_TOKENS: usize = match D::RECURRENT {
        true => D::CHUNK_TOKENS,
        false => least_common_multiple(D::CHUNK_TOKENS, R::CHUNK_TOKENS),
    };
    const RECURRENT: bool = D::RECURRENT || R::RECURRENT;

    fn check(&self) -> Result<()> {
        self.device.check()?;
        self.rest.check()
    }
    fn trim(&self) {
        self.device.trim();
        self.rest.trim();
    }
    fn live_bytes(&self) -> usize {
        self.device.live_bytes() + self.rest.live_bytes()
    }
    fn free_bytes(&self) -> usize {
        self.device.free_bytes() + self.rest.free_bytes()
    }

    fn side_by_side(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        self.device.side_by_side(count, task);
    }

    // ---- packed weights ----

    fn pack(&self, weight: &D::Tensor, precision: Precision) -> Result<Self::Packed> {
        try_device!(self.device.pack(weight, precision).map(FallbackPacked::Device));
        Ok(FallbackPacked::Rest(self.rest.pack(&self.there(weight)?, precision)?))
    }
    fn unpack(&self, packed: &Self::Packed) -> Result<D::Tensor> {
        match packed {
            FallbackPacked::Device(packed) => self.device.unpack(packed),
            FallbackPacked::Rest(packed) => self.back(&self.rest.unpack(packed)?),
        }
    }

    // ---- gradients and parameters ----

    fn accumulate(&self, sum: &mut D::Tensor, term: &D::Tensor) -> Result<()> {
        try_device!(self.device.accumulate(sum, term));
        let mut moved = self.there(sum)?;
        self.rest.accumulate(&mut moved, &self.there(term)?)?;
        *sum = self.back(&moved)?;
        Ok(())
    }
    fn append(&self, whole: &mut D::Tensor, rows: &D::Tensor, axis: usize) -> Result<()> {
        try_device!(self.device.append(whole, rows, axis));
        let mut moved = self.there(whole)?;
        self.rest.append(&mut moved, &self.there(rows)?, axis)?;
        *whole = self.back(&moved)?;
        Ok(())
    }
    fn squared_norm(&self, tensors: &[&D::Tensor]) -> Result<f64> {
        try_device!(self.device.squared_norm(tensors));
        let moved = tensors.iter().map(|tensor| self.there(tensor)).collect::<Result<Vec<_>>>()?;
        self.rest.squared_norm(&moved.iter().collect::<Vec<_>>())
    }
    fn adamw(&self, state: AdamW<&mut D::Tensor>, gradient: &D::Tensor, step: &Step) -> Result<()> {
        let AdamW { parameter, first_moment, second_moment } = state;
        let state = AdamW {
            parameter: &mut *parameter,
            first_moment: &mut *first_moment,
            second_moment: &mut *second_moment,
        };
        try_device!(self.device.adamw(state, gradient, step));
        let mut moved = [self.there(parameter)?, self.there(first_moment)?, self.there(second_moment)?];
        let [p, m, v] = &mut moved;
        let state = AdamW { parameter: p, first_moment: m, second_moment: v };
        self.rest.adamw(state, &self.there(gradient)?, step)?;
        *parameter = self.back(&moved[0])?;
        *first_moment = self.back(&moved[1])?;
        *second_moment = self.back(&moved[2])?;
        Ok(())
    }

    // ---- layers ----

    fn linear(&self, input: Linear<&D::Tensor, WeightOf<'_, Self>>) -> Result<D::Tensor> {
        let Linear { x, weight, bias } = input;
        if let Some(weight) = Self::device_weight(weight) {
            try_device!(self.device.linear(Linear { x, weight, bias }));
        }
        let (x, bias) = (self.there(x)?, self.some_there(bias)?);
        self.with_weight(weight, |weight| {
            self.back(&self.rest.linear(Linear { x: &x, weight, bias: bias.as_ref() })?)
        })
    }
    fn linear_list(&self, input: LinearList<'_, &D::Tensor, WeightOf<'_, Self>>) -> Result<Vec<D::Tensor>> {
        let LinearList { x, weights, products } = input;
        let own: Option<Vec<_>> = weights.iter().map(|&weight| Self::device_weight(weight)).collect();
        if let Some(weights) = own {
            try_device!(self.device.linear_list(LinearList { x, weights: &weights, products }));
        }
        list_forward(self, input)
    }
    fn linear_backward(
        &self,
        input: Linear<&D::Tensor>,
        gradient: &D::Tensor,
        needs: [bool; 3],
    ) -> Result<[Option<D::Tensor>; 3]> {
        try_device!(self.device.linear_backward(input, gradient, needs));
        let (x, weight, bias) =
            (self.there(input.x)?, self.there(input.weight)?, self.some_there(input.bias)?);
        let input = Linear { x: &x, weight: &weight, bias: bias.as_ref() };
        self.some_back(&self.rest.linear_backward(input, &self.there(gradient)?, needs)?)
    }
    fn linear_list_backward(
        &self,
        input: LinearList<'_, &D::Tensor>,
        gradients: &[&D::Tensor],
        needs: &LinearListNeeds,
        dx: &mut [Option<D::Tensor>],
    ) -> Result<LinearListGradients<D::Tensor>> {
        let empty: Vec<bool> = dx.iter().map(Option::is_none).collect();
        try_device!(self.device.linear_list_backward(input, gradients, needs, dx));
        // A device that gave up may have left gradients where none were.
        dx.iter_mut().zip(empty).filter(|(_, empty)| *empty).for_each(|(dx, _)| *dx = None);
        list_backward(self, input, gradients, needs, dx)
    }
    fn rms_norm(&self, input: RmsNormList<'_, &D::Tensor>, eps: f64) -> Result<Vec<D::Tensor>> {
        try_device!(self.device.rms_norm(input, eps));
        let (x, weight) = (self.list_there(input.x)?, self.there(input.weight)?);
        let input = RmsNormList { x: &x.iter().collect::<Vec<_>>(), weight: &weight };
        self.all_back(&self.rest.rms_norm(input, eps)?)
    }
    fn rms_norm_backward(
        &self,
        input: RmsNormList<'_, &D::Tensor>,
        eps: f64,
        gradients: &[&D::Tensor],
        dx: &mut [Option<D::Tensor>],
    ) -> Result<D::Tensor> {
        try_device!(self.device.rms_norm_backward(input, eps, gradients, dx));
        let (x, weight) = (self.list_there(input.x)?, self.there(input.weight)?);
        let input = RmsNormList { x: &x.iter().collect::<Vec<_>>(), weight: &weight };
        let dy = self.list_there(gradients)?;
        let mut moved = dx.iter().map(|dx| self.some_there(dx.as_ref())).collect::<Result<Vec<_>>>()?;
        let weight = self.rest.rms_norm_backward(input, eps, &dy.iter().collect::<Vec<_>>(), &mut moved)?;
        for (dx, moved) in dx.iter_mut().zip(moved) {
            *dx = moved.map(|moved| self.back(&moved)).transpose()?;
        }
        self.back(&weight)
    }
    fn gated_rms_norm(&self, input: GatedRmsNormList<'_, &D::Tensor>, eps: f64) -> Result<Vec<D::Tensor>> {
        try_device!(self.device.gated_rms_norm(input, eps));
        let (x, gates) = (self.list_there(input.x)?, self.list_there(input.gates)?);
        let (x, gates) = (x.iter().collect::<Vec<_>>(), gates.iter().collect::<Vec<_>>());
        let input = GatedRmsNormList { x: &x, gates: &gates, weight: &self.there(input.weight)? };
        self.all_back(&self.rest.gated_rms_norm(input, eps)?)
    }
    fn gated_rms_norm_backward(
        &self,
        input: GatedRmsNormList<'_, &D::Tensor>,
        eps: f64,
        gradients: &[&D::Tensor],
    ) -> Result<GatedRmsNormGradients<D::Tensor>> {
        try_device!(self.device.gated_rms_norm_backward(input, eps, gradients));
        let (x, gates) = (self.list_there(input.x)?, self.list_there(input.gates)?);
        let (x, gates) = (x.iter().collect::<Vec<_>>(), gates.iter().collect::<Vec<_>>());
        let input = GatedRmsNormList { x: &x, gates: &gates, weight: &self.there(input.weight)? };
        let dy = self.list_there(gradients)?;
        let d = self.rest.gated_rms_norm_backward(input, eps, &dy.iter().collect::<Vec<_>>())?;
        let (x, gates) = (self.all_back(&d.x)?, self.all_back(&d.gates)?);
        Ok(GatedRmsNormGradients { x, gates, weight: self.back(&d.weight)? })
    }

    // ---- gated delta rule ----

    fn gated_delta(
        &self,
        input: GatedDelta<&D::Tensor>,
        options: &GatedDeltaOptions,
        keep: bool,
    ) -> Result<(GatedDeltaOutput<D::Tensor>, Vec<D::Tensor>)> {
        try_device!(self.device.gated_delta(input, options, keep));
        let input = input.try_map(|tensor| self.there(tensor))?;
        let (output, kept) = self.rest.gated_delta(input.as_ref(), options, keep)?;
        let output = GatedDeltaOutput {
            readout: self.back(&output.readout)?,
            final_state: self.back(&output.final_state)?,
            boundary_states: self.back(&output.boundary_states)?,
        };
        Ok((output, self.all_back(&kept)?))
    }
    fn gated_delta_backward(
        &self,
        input: GatedDelta<&D::Tensor>,
        options: &GatedDeltaOptions,
        kept: &[D::Tensor],
        gradient: GatedDeltaGradient<&D::Tensor>,
    ) -> Result<GatedDelta<D::Tensor>> {
        try_device!(self.device.gated_delta_backward(input, options, kept, gradient));
        let input = input.try_map(|tensor| self.there(tensor))?;
        let kept = self.all_there(kept)?;
        let GatedDeltaGradient { readout, final_state, boundary_states } = gradient;
        let moved = [readout, final_state, boundary_states].map(|gradient| self.some_there(gradient));
        let [readout, final_state, boundary_states] = moved;
        let (readout, final_state, boundary_states) = (readout?, final_state?, boundary_states?);
        let gradient = GatedDeltaGradient {
            readout: readout.as_ref(),
            final_state: final_state.as_ref(),
            boundary_states: boundary_states.as_ref(),
        };
        let d = self.rest.gated_delta_backward(input.as_ref(), options, &kept, gradient)?;
        d.try_map(|tensor| self.back(&tensor))
    }

    // ---- anchor reader ----

    fn anchor_read(
        &self,
        input: AnchorRead<&D::Tensor>,
        options: &AnchorReadOptions,
        keep: bool,
    ) -> Result<(D::Tensor, Option<AnchorReadKept<D::Tensor>>)> {
        try_device!(self.device.anchor_read(input, options, keep));
        let input = input.try_map(|tensor| self.there(tensor))?;
        let (readout, kept) = self.rest.anchor_read(input.as_ref(), options, keep)?;
        let kept = kept.map(|kept| kept.try_map(|tensor| self.back(tensor))).transpose()?;
        Ok((self.back(&readout)?, kept))
    }
    fn anchor_read_backward(
        &self,
        input: AnchorRead<&D::Tensor>,
        options: &AnchorReadOptions,
        readout: &D::Tensor,
        kept: Option<&AnchorReadKept<D::Tensor>>,
        gradient: &D::Tensor,
    ) -> Result<AnchorRead<D::Tensor>> {
        try_device!(self.device.anchor_read_backward(input, options, readout, kept, gradient));
        let input = input.try_map(|tensor| self.there(tensor))?;
        let kept = kept.map(|kept| kept.try_map(|tensor| self.there(tensor))).transpose()?;
        let (readout, gradient) = (self.there(readout)?, self.there(gradient)?);
        let d =
            self.rest.anchor_read_backward(input.as_ref(), options, &readout, kept.as_ref(), &gradient)?;
        d.try_map(|tensor| self.back(&tensor))
    }
    fn store_states(&self, states: &D::Tensor, storage: Storage) -> Result<Self::Stored> {
        try_device!(
            self.device.store_states(states, storage).map(|stored| FallbackStored::Device(Arc::new(stored)))
        );
        Ok(FallbackStored::Rest(Arc::new(self.rest.store_states(&self.there(states)?, storage)?)))
    }
    fn anchor_read_stored(
        &self,
        input: AnchorRead<&D::Tensor, &[Arc<Self::Stored>]>,
        options: &AnchorReadOptions,
    ) -> Result<D::Tensor> {
        if let Some(states) = Self::device_states(input.anchor_states) {
            try_device!(self.device.anchor_read_stored(input.with_states(&states[..]), options));
        }
        let states = self.rest_states(input.anchor_states)?;
        let (query, routing_query, routing_keys) =
            (self.there(input.query)?, self.there(input.routing_query)?, self.there(input.routing_keys)?);
        let null_score = self.some_there(input.null_score)?;
        let input = AnchorRead {
            query: &query,
            routing_query: &routing_query,
            routing_keys: &routing_keys,
            anchor_states: &states[..],
            null_score: null_score.as_ref(),
        };
        self.back(&self.rest.anchor_read_stored(input, options)?)
    }
    fn stored_to_host<'a>(&self, states: &'a Self::Stored) -> Result<Cow<'a, StoredStates>> {
        match states {
            FallbackStored::Device(states) => self.device.stored_to_host(states),
            FallbackStored::Rest(states) => self.rest.stored_to_host(states),
        }
    }
    fn stored_from_host(&self, states: StoredStates) -> Result<Self::Stored> {
        let own = self.device.stored_from_host(states.clone());
        try_device!(own.map(|stored| FallbackStored::Device(Arc::new(stored))));
        Ok(FallbackStored::Rest(Arc::new(self.rest.stored_from_host(states)?)))
    }
    fn routing_weights(
        &self,
        input: AnchorRead<&D::Tensor, [usize; 2]>,
        options: &AnchorReadOptions,
    ) -> Result<D::Tensor> {
        try_device!(self.device.routing_weights(input, options));
        let (query, routing_query, routing_keys) =
            (self.there(input.query)?, self.there(input.routing_query)?, self.there(input.routing_keys)?);
        let null_score = self.some_there(input.null_score)?;
        let input = AnchorRead {
            query: &query,
            routing_query: &routing_query,
            routing_keys: &routing_keys,
            anchor_states: input.anchor_states,
            null_score: null_score.as_ref(),
        };
        self.back(&self.rest.routing_weights(input, options)?)
    }
    fn state_read(&self, input: StateRead<&D::Tensor>, key_heads: usize) -> Result<D::Tensor> {
        try_device!(self.device.state_read(input, key_heads));
        let (query, states) = (self.there(input.query)?, self.there(input.states)?);
        self.back(&self.rest.state_read(StateRead { query: &query, states: &states }, key_heads)?)
    }
    fn state_read_backward(
        &self,
        input: StateRead<&D::Tensor>,
        key_heads: usize,
        gradient: &D::Tensor,
    ) -> Result<StateRead<D::Tensor>> {
        try_device!(self.device.state_read_backward(input, key_heads, gradient));
        let (query, states) = (self.there(input.query)?, self.there(input.states)?);
        let input = StateRead { query: &query, states: &states };
        let d = self.rest.state_read_backward(input, key_heads, &self.there(gradient)?)?;
        Ok(StateRead { query: self.back(&d.query)?, states: self.back(&d.states)? })
    }

    // ---- basic operations ----

    fn map(&self, kind: Map, x: &D::Tensor) -> Result<D::Tensor> {
        try_device!(self.device.map(kind, x));
        self.back(&self.rest.map(kind, &self.there(x)?)?)
    }
    fn map_backward(
        &self,
        kind: Map,
        x: &D::Tensor,
        y: &D::Tensor,
        gradient: &D::Tensor,
    ) -> Result<D::Tensor> {
        try_device!(self.device.map_backward(kind, x, y, gradient));
        let (x, y, gradient) = (self.there(x)?, self.there(y)?, self.there(gradient)?);
        self.back(&self.rest.map_backward(kind, &x, &y, &gradient)?)
    }
    fn zip(&self, kind: Zip, a: &D::Tensor, b: &D::Tensor) -> Result<D::Tensor> {
        try_device!(self.device.zip(kind, a, b));
        self.back(&self.rest.zip(kind, &self.there(a)?, &self.there(b)?)?)
    }
    fn zip_backward(
        &self,
        kind: Zip,
        a: &D::Tensor,
        b: &D::Tensor,
        gradient: &D::Tensor,
        needs: [bool; 2],
    ) -> Result<[Option<D::Tensor>; 2]> {
        try_device!(self.device.zip_backward(kind, a, b, gradient, needs));
        let (a, b, gradient) = (self.there(a)?, self.there(b)?, self.there(gradient)?);
        self.some_back(&self.rest.zip_backward(kind, &a, &b, &gradient, needs)?)
    }
    fn matmul(&self, input: MatMul<&D::Tensor>, transpose: Transpose) -> Result<D::Tensor> {
        try_device!(self.device.matmul(input, transpose));
        let (a, b) = (self.there(input.a)?, self.there(input.b)?);
        self.back(&self.rest.matmul(MatMul { a: &a, b: &b }, transpose)?)
    }
    fn matmul_backward(
        &self,
        input: MatMul<&D::Tensor>,
        transpose: Transpose,
        gradient: &D::Tensor,
        needs: [bool; 2],
    ) -> Result<[Option<D::Tensor>; 2]> {
        try_device!(self.device.matmul_backward(input, transpose, gradient, needs));
        let (a, b, gradient) = (self.there(input.a)?, self.there(input.b)?, self.there(gradient)?);
        self.some_back(&self.rest.matmul_backward(MatMul { a: &a, b: &b }, transpose, &gradient, needs)?)
    }
    fn softmax(&self, x: &D::Tensor) -> Result<D::Tensor> {
        try_device!(self.device.softmax(x));
        self.back(&self.rest.softmax(&self.there(x)?)?)
    }
    fn softmax_backward(&self, y: &D::Tensor, gradient: &D::Tensor) -> Result<D::Tensor> {
        try_device!(self.device.softmax_backward(y, gradient));
        self.back(&self.rest.softmax_backward(&self.there(y)?, &self.there(gradient)?)?)
    }
    fn slice(&self, x: &D::Tensor, axis: usize, range: Range<usize>) -> Result<D::Tensor> {
        try_device!(self.device.slice(x, axis, range.clone()));
        self.back(&self.rest.slice(&self.there(x)?, axis, range)?)
    }
    fn place(&self, x: &D::Tensor, axis: usize, start: usize, size: usize) -> Result<D::Tensor> {
        try_device!(self.device.place(x, axis, start, size));
        self.back(&self.rest.place(&self.there(x)?, axis, start, size)?)
    }
    fn concat(&self, parts: &[&D::Tensor], axis: usize) -> Result<D::Tensor> {
        try_device!(self.device.concat(parts, axis));
        let moved = parts.iter().map(|part| self.there(part)).collect::<Result<Vec<_>>>()?;
        self.back(&self.rest.concat(&moved.iter().collect::<Vec<_>>(), axis)?)
    }
    fn permute(&self, x: &D::Tensor, axes: &[usize]) -> Result<D::Tensor> {
        try_device!(self.device.permute(x, axes));
        self.back(&self.rest.permute(&self.there(x)?, axes)?)
    }
    fn reshape(&self, x: &D::Tensor, shape: &[usize]) -> Result<D::Tensor> {
        try_device!(self.device.reshape(x, shape));
        self.back(&self.rest.reshape(&self.there(x)?, shape)?)
    }
    fn sum(&self, x: &D::Tensor, axis: usize) -> Result<D::Tensor> {
        try_device!(self.device.sum(x, axis));
        self.back(&self.rest.sum(&self.there(x)?, axis)?)
    }
    fn mean(&self, x: &D::Tensor, axis: usize) -> Result<D::Tensor> {
        try_device!(self.device.mean(x, axis));
        self.back(&self.rest.mean(&self.there(x)?, axis)?)
    }
    fn expand(&self, x: &D::Tensor, axis: usize, count: usize) -> Result<D::Tensor> {
        try_device!(self.device.expand(x, axis, count));
        self.back(&self.rest.expand(&self.there(x)?, axis, count)?)
    }
    fn sum_to(&self, x: &D::Tensor, shape: &[usize]) -> Result<D::Tensor> {
        try_device!(self.device.sum_to(x, shape));
        self.back(&self.rest.sum_to(&self.there(x)?, shape)?)
    }
    fn embedding(&self, input: Embedding<'_, WeightOf<'_, Self>>) -> Result<D::Tensor> {
        let Embedding { table, ids, shape } = input;
        if let Some(table) = Self::device_weight(table) {
            try_device!(self.device.embedding(Embedding { table, ids, shape }));
        }
        self.with_weight(table, |table| self.back(&self.rest.embedding(Embedding { table, ids, shape })?))
    }
    fn embedding_backward(&self, ids: &[u32], rows: usize, gradient: &D::Tensor) -> Result<D::Tensor> {
        try_device!(self.device.embedding_backward(ids, rows, gradient));
        self.back(&self.rest.embedding_backward(ids, rows, &self.there(gradient)?)?)
    }

    // ---- fused layers ----

    fn swiglu(&self, inputs: &[SwiGlu<&D::Tensor>]) -> Result<Vec<D::Tensor>> {
        try_device!(self.device.swiglu(inputs));
        let moved = inputs.iter().map(|input| self.swiglu_there(input)).collect::<Result<Vec<_>>>()?;
        self.all_back(&self.rest.swiglu(&moved.iter().map(SwiGlu::as_ref).collect::<Vec<_>>())?)
    }
    fn swiglu_backward(
        &self,
        inputs: &[SwiGlu<&D::Tensor>],
        gradients: &[&D::Tensor],
    ) -> Result<Vec<SwiGlu<D::Tensor>>> {
        try_device!(self.device.swiglu_backward(inputs, gradients));
        let moved = inputs.iter().map(|input| self.swiglu_there(input)).collect::<Result<Vec<_>>>()?;
        let moved: Vec<SwiGlu<&R::Tensor>> = moved.iter().map(SwiGlu::as_ref).collect();
        let dy = self.list_there(gradients)?;
        let found = self.rest.swiglu_backward(&moved, &dy.iter().collect::<Vec<_>>())?;
        found.iter().map(|d| Ok(SwiGlu { gate: self.back(&d.gate)?, up: self.back(&d.up)? })).collect()
    }
    fn short_conv(&self, inputs: &[ShortConv<&D::Tensor>]) -> Result<Vec<(D::Tensor, D::Tensor)>> {
        try_device!(self.device.short_conv(inputs));
        let moved = inputs.iter().map(|input| self.conv_there(input)).collect::<Result<Vec<_>>>()?;
        let found = self.rest.short_conv(&moved.iter().map(ShortConv::as_ref).collect::<Vec<_>>())?;
        found.iter().map(|(y, tail)| Ok((self.back(y)?, self.back(tail)?))).collect()
    }
    fn short_conv_backward(
        &self,
        inputs: &[ShortConv<&D::Tensor>],
        gradients: &[&D::Tensor],
    ) -> Result<Vec<ShortConvGradients<D::Tensor>>> {
        try_device!(self.device.short_conv_backward(inputs, gradients));
        let moved = inputs.iter().map(|input| self.conv_there(input)).collect::<Result<Vec<_>>>()?;
        let moved: Vec<ShortConv<&R::Tensor>> = moved.iter().map(ShortConv::as_ref).collect();
        let dy = self.list_there(gradients)?;
        let found = self.rest.short_conv_backward(&moved, &dy.iter().collect::<Vec<_>>())?;
        let back = |d: &ShortConvGradients<R::Tensor>| {
            Ok(ShortConvGradients { x: self.back(&d.x)?, weight: self.back(&d.weight)? })
        };
        found.iter().map(back).collect()
    }
    fn linear_cross_entropy(
        &self,
        input: LinearCrossEntropy<&D::Tensor, WeightOf<'_, Self>>,
        targets: &[u32],
        normaliser: Option<f64>,
        needs: [bool; 2],
    ) -> Result<CrossEntropy<D::Tensor>> {
        let LinearCrossEntropy { x, weight } = input;
        if let Some(weight) = Self::device_weight(weight) {
            let input = LinearCrossEntropy { x, weight };
            try_device!(self.device.linear_cross_entropy(input, targets, normaliser, needs));
        }
        let x = self.there(x)?;
        self.with_weight(weight, |weight| {
            let input = LinearCrossEntropy { x: &x, weight };
            let result = self.rest.linear_cross_entropy(input, targets, normaliser, needs)?;
            let gradients = self.some_back(&result.gradients)?;
            Ok(CrossEntropy { loss: self.back(&result.loss)?, gradients })
        })
    }
    fn linear_cross_entropy_backward(
        &self,
        kept: [Option<D::Tensor>; 2],
        gradient: &D::Tensor,
    ) -> Result<[Option<D::Tensor>; 2]> {
        // Asked without tensors first: a second handle on them would keep the device from working in place.
        if answer(self.device.linear_cross_entropy_backward([None, None], gradient))?.is_some() {
            return self.device.linear_cross_entropy_backward(kept, gradient);
        }
        let moved = [self.some_there(kept[0].as_ref())?, self.some_there(kept[1].as_ref())?];
        self.some_back(&self.rest.linear_cross_entropy_backward(moved, &self.there(gradient)?)?)
    }
    fn token_losses(
        &self,
        x: &D::Tensor,
        weight: WeightOf<'_, Self>,
        targets: &[u32],
    ) -> Result<TokenLosses> {
        if let Some(weight) = Self::device_weight(weight) {
            try_device!(self.device.token_losses(x, weight, targets));
        }
        let x = self.there(x)?;
        self.with_weight(weight, |weight| self.rest.token_losses(&x, weight, targets))
    }

    // ---- attention ----

    fn rotary(&self, x: &D::Tensor, rotary: Rotary) -> Result<D::Tensor> {
        try_device!(self.device.rotary(x, rotary));
        self.back(&self.rest.rotary(&self.there(x)?, rotary)?)
    }
    fn rotary_backward(&self, gradient: &D::Tensor, rotary: Rotary) -> Result<D::Tensor> {
        try_device!(self.device.rotary_backward(gradient, rotary));
        self.back(&self.rest.rotary_backward(&self.there(gradient)?, rotary)?)
    }
    fn attention(
        &self,
        input: Attention<&D::Tensor>,
        heads: usize,
        keep: bool,
    ) -> Result<(D::Tensor, Vec<D::Tensor>)> {
        try_device!(self.device.attention(input, heads, keep));
        let (query, key, value) =
            (self.there(input.query)?, self.there(input.key)?, self.there(input.value)?);
        let input = Attention { query: &query, key: &key, value: &value };
        let (output, saved) = self.rest.attention(input, heads, keep)?;
        Ok((self.back(&output)?, self.all_back(&saved)?))
    }
    fn attention_blocks(
        &self,
        query: &D::Tensor,
        blocks: &[KeyValues<D::Tensor>],
        heads: usize,
    ) -> Result<D::Tensor> {
        try_device!(self.device.attention_blocks(query, blocks, heads));
        let mut moved = Vec::with_capacity(blocks.len());
        for block in blocks {
            moved.push(KeyValues { key: self.there(&block.key)?, value: self.there(&block.value)? });
        }
        self.back(&self.rest.attention_blocks(&self.there(query)?, &moved, heads)?)
    }
    fn attention_backward(
        &self,
        input: Attention<&D::Tensor>,
        heads: usize,
        saved: &[D::Tensor],
        gradient: &D::Tensor,
    ) -> Result<Attention<D::Tensor>> {
        try_device!(self.device.attention_backward(input, heads, saved, gradient));
        let (query, key, value) =
            (self.there(input.query)?, self.there(input.key)?, self.there(input.value)?);
        let input = Attention { query: &query, key: &key, value: &value };
        let saved = self.all_there(saved)?;
        let d = self.rest.attention_backward(input, heads, &saved, &self.there(gradient)?)?;
        Ok(Attention { query: self.back(&d.query)?, key: self.back(&d.key)?, value: self.back(&d.value)? })
    }

    // ---- log-linear gated delta rule ----

    fn log_linear_delta(
        &self,
        input: LogLinear<&D::Tensor>,
        options: &LogLinearOptions,
        initial: Option<&D::Tensor>,
        keep: bool,
    ) -> Result<LogLinearOutput<D::Tensor>> {
        try_device!(self.device.log_linear_delta(input, options, initial, keep));
        let input = input.try_each(|tensor| self.there(tensor))?;
        let initial = self.some_there(initial)?;
        let output = self.rest.log_linear_delta(input.as_ref(), options, initial.as_ref(), keep)?;
        let [state, saved] = self.some_back(&[output.state, output.saved])?;
        Ok(LogLinearOutput { readouts: self.back(&output.readouts)?, state, saved })
    }
    fn log_linear_delta_backward(
        &self,
        input: LogLinear<&D::Tensor>,
        options: &LogLinearOptions,
        initial: Option<&D::Tensor>,
        saved: Option<&D::Tensor>,
        gradient: &D::Tensor,
    ) -> Result<LogLinear<D::Tensor>> {
        try_device!(self.device.log_linear_delta_backward(input, options, initial, saved, gradient));
        let input = input.try_each(|tensor| self.there(tensor))?;
        let (initial, saved) = (self.some_there(initial)?, self.some_there(saved)?);
        let d = self.rest.log_linear_delta_backward(
            input.as_ref(),
            options,
            initial.as_ref(),
            saved.as_ref(),
            &self.there(gradient)?,
        )?;
        d.try_each(|tensor| self.back(tensor))
    }
}

//! The engine of the equations: every operation as its `reference` states it, in f64.

use crate::engine::Engine;
use crate::error::{Result, bad_value, expect_shape};
use crate::ops::adamw::{self, AdamW, Step};
use crate::ops::anchor_read::{self, AnchorRead, AnchorReadOptions, Storage, StoredStates};
use crate::ops::gated_delta::{self, GatedDelta, GatedDeltaGradient, GatedDeltaOptions, GatedDeltaOutput};
use crate::ops::linear::{self, Linear};
use crate::ops::log_linear::{self, LogLinear, LogLinearOptions, LogLinearOutput};
use crate::ops::rms_norm::{self, GatedRmsNorm, RmsNorm};
use crate::tensor::{Tensor, element_count};

/// Computes in f64 by the equations themselves: slow, exact, the judge of every other engine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reference;

type T = Tensor<f64>;

impl Engine for Reference {
    type Tensor = T;
    type Stored = StoredStates;

    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<T> {
        let data: Vec<f64> = data.iter().map(|&v| f64::from(v)).collect();
        self.from_f64(&data, shape)
    }
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<T> {
        let len = element_count("tensor", shape)?;
        if len != data.len() {
            return bad_value(
                "tensor",
                format!("{} numbers came for shape {shape:?}, which holds {len}", data.len()),
            );
        }
        Ok(Tensor::detached(data.to_vec(), shape))
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<T> {
        Ok(Tensor::detached(vec![value; element_count("full", shape)?], shape))
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

    fn accumulate(&self, sum: &mut T, term: &T) -> Result<()> {
        expect_shape("accumulate", "term", term.shape(), sum.shape(), "the shape of the sum")?;
        let data = sum.data().iter().zip(term.data()).map(|(a, b)| a + b).collect();
        *sum = Tensor::detached(data, &sum.shape().to_vec());
        Ok(())
    }
    fn squared_norm(&self, x: &T) -> Result<f64> {
        Ok(adamw::reference::squared_norm(x))
    }
    fn adamw(&self, state: AdamW<&mut T>, gradient: &T, step: &Step) -> Result<()> {
        adamw::reference::step(state, gradient, step)
    }

    fn linear(&self, input: Linear<&T>) -> Result<T> {
        linear::reference::forward(input)
    }
    fn linear_backward(&self, input: Linear<&T>, gradient: &T, needs: [bool; 3]) -> Result<[Option<T>; 3]> {
        linear::reference::backward(input, gradient, needs)
    }
    fn rms_norm(&self, input: RmsNorm<&T>, eps: f64) -> Result<T> {
        rms_norm::reference::forward(input, eps)
    }
    fn rms_norm_backward(&self, input: RmsNorm<&T>, eps: f64, gradient: &T) -> Result<RmsNorm<T>> {
        rms_norm::reference::backward(input, eps, gradient)
    }
    fn gated_rms_norm(&self, input: GatedRmsNorm<&T>, eps: f64) -> Result<T> {
        rms_norm::reference::gated_forward(input, eps)
    }
    fn gated_rms_norm_backward(
        &self,
        input: GatedRmsNorm<&T>,
        eps: f64,
        gradient: &T,
    ) -> Result<GatedRmsNorm<T>> {
        rms_norm::reference::gated_backward(input, eps, gradient)
    }

    // ---- the gated delta rule ----

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

    // ---- the historical reader ----

    fn anchor_read(
        &self,
        input: AnchorRead<&T>,
        options: &AnchorReadOptions,
        _keep: bool,
    ) -> Result<(T, Vec<T>)> {
        Ok((anchor_read::reference::forward(input, options)?, Vec::new()))
    }
    fn anchor_read_backward(
        &self,
        input: AnchorRead<&T>,
        options: &AnchorReadOptions,
        readout: &T,
        _kept: &[T],
        gradient: &T,
    ) -> Result<AnchorRead<T>> {
        anchor_read::reference::backward(input, options, readout, gradient)
    }
    fn store_states(&self, states: &T, storage: Storage) -> Result<StoredStates> {
        StoredStates::new(&self.to_f32(states), states.shape(), storage)
    }
    fn anchor_read_stored(
        &self,
        input: AnchorRead<&T, &[&StoredStates]>,
        options: &AnchorReadOptions,
    ) -> Result<T> {
        anchor_read::reference::forward_stored(input, options)
    }
    fn routing_weights(&self, input: AnchorRead<&T>, options: &AnchorReadOptions) -> Result<T> {
        anchor_read::reference::weights(input, options)
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

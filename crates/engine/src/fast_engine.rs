//! [`Cpu`] as an [`Engine`]: each method is the `fast` function of its operation.

use crate::cpu::{Cpu, Shared};
use crate::engine::Engine;
use crate::error::{Result, expect_shape};
use crate::ops::adamw::{self, AdamW, Step};
use crate::ops::anchor_read::{self, AnchorRead, AnchorReadOptions, Storage, StoredStates};
use crate::ops::gated_delta::{self, GatedDelta, GatedDeltaGradient, GatedDeltaOptions, GatedDeltaOutput};
use crate::ops::linear::{self, Linear};
use crate::ops::log_linear::{self, LogLinear, LogLinearOptions, LogLinearOutput};
use crate::ops::rms_norm::{self, GatedRmsNorm, RmsNorm};
use crate::simd::{self, Kernel, Simd};
use crate::tensor::{Tensor, element_count};

type T = Tensor<f32>;

impl Engine for Cpu {
    type Tensor = T;
    type Stored = StoredStates;

    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<T> {
        self.from_slice(data, shape)
    }
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<T> {
        let data: Vec<f32> = data.iter().map(|&v| v as f32).collect();
        self.from_slice(&data, shape)
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<T> {
        element_count("full", shape)?;
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

    fn accumulate(&self, sum: &mut T, term: &T) -> Result<()> {
        accumulate(self, sum, term)
    }
    fn squared_norm(&self, x: &T) -> Result<f64> {
        Ok(adamw::fast::squared_norm(self, x))
    }
    fn adamw(&self, state: AdamW<&mut T>, gradient: &T, step: &Step) -> Result<()> {
        adamw::fast::step(self, state, gradient, step)
    }

    fn linear(&self, input: Linear<&T>) -> Result<T> {
        linear::fast::forward(self, input)
    }
    fn linear_backward(&self, input: Linear<&T>, gradient: &T, needs: [bool; 3]) -> Result<[Option<T>; 3]> {
        linear::fast::backward(self, input, gradient, needs)
    }
    fn rms_norm(&self, input: RmsNorm<&T>, eps: f64) -> Result<T> {
        rms_norm::fast::forward(self, input, eps)
    }
    fn rms_norm_backward(&self, input: RmsNorm<&T>, eps: f64, gradient: &T) -> Result<RmsNorm<T>> {
        rms_norm::fast::backward(self, input, eps, gradient)
    }
    fn gated_rms_norm(&self, input: GatedRmsNorm<&T>, eps: f64) -> Result<T> {
        rms_norm::fast::gated_forward(self, input, eps)
    }
    fn gated_rms_norm_backward(
        &self,
        input: GatedRmsNorm<&T>,
        eps: f64,
        gradient: &T,
    ) -> Result<GatedRmsNorm<T>> {
        rms_norm::fast::gated_backward(self, input, eps, gradient)
    }

    // ---- the gated delta rule ----

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

    // ---- the historical reader ----

    fn anchor_read(
        &self,
        input: AnchorRead<&T>,
        options: &AnchorReadOptions,
        keep: bool,
    ) -> Result<(T, Vec<T>)> {
        anchor_read::fast::forward(self, input, options, keep)
    }
    fn anchor_read_backward(
        &self,
        input: AnchorRead<&T>,
        options: &AnchorReadOptions,
        readout: &T,
        kept: &[T],
        gradient: &T,
    ) -> Result<AnchorRead<T>> {
        anchor_read::fast::backward(self, input, options, readout, kept, gradient)
    }
    fn store_states(&self, states: &T, storage: Storage) -> Result<StoredStates> {
        StoredStates::new(states.data(), states.shape(), storage)
    }
    fn anchor_read_stored(
        &self,
        input: AnchorRead<&T, &[&StoredStates]>,
        options: &AnchorReadOptions,
    ) -> Result<T> {
        anchor_read::fast::forward_stored(self, input, options)
    }
    fn routing_weights(&self, input: AnchorRead<&T>, options: &AnchorReadOptions) -> Result<T> {
        anchor_read::fast::weights(self, input, options)
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
    expect_shape("accumulate", "term", term.shape(), sum.shape(), "the shape of the sum")?;
    if !sum.is_unique() {
        *sum = cpu.from_slice(sum.data(), &sum.shape().to_vec())?;
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

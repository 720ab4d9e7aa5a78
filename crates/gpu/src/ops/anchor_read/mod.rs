//! `anchor_read` on the device.

use std::sync::Arc;

use march_engine::Result;
use march_engine::ops::anchor_read::AnchorRead;
use march_engine::ops::anchor_read::AnchorReadKept;
use march_engine::ops::anchor_read::AnchorReadOptions;

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

mod call;
mod dense;
mod plan;
mod stored;

use call::{Sizes, States};
pub use stored::Stored;

/// See [`march_engine::Engine::anchor_read`].
pub(crate) fn forward(
    gpu: &Gpu,
    input: AnchorRead<&Tensor>,
    options: &AnchorReadOptions,
    keep: bool,
) -> Result<(Tensor, Option<AnchorReadKept<Tensor>>)> {
    let sizes = sizes(&input, options);
    let states = States::whole(input.anchor_states, &sizes);
    let (readout, log_sum) = dense::forward(gpu, &dense::with_states(&input, &states), options, &sizes)?;
    let kept = AnchorReadKept { weights: log_sum.clone(), log_sum, chosen: Vec::new() };
    Ok((readout, keep.then_some(kept)))
}

fn sizes(input: &AnchorRead<&Tensor>, options: &AnchorReadOptions) -> Sizes {
    let shape = input.anchor_states.shape();
    Sizes::new(input, [shape[2], shape[3]], options)
}

/// See [`march_engine::Engine::anchor_read_backward`].
pub(crate) fn backward(
    gpu: &Gpu,
    input: AnchorRead<&Tensor>,
    options: &AnchorReadOptions,
    readout: &Tensor,
    kept: Option<&AnchorReadKept<Tensor>>,
    gradient: &Tensor,
) -> Result<AnchorRead<Tensor>> {
    let Some(kept) = kept else {
        let (_, kept) = forward(gpu, input, options, true)?;
        return backward(gpu, input, options, readout, kept.as_ref(), gradient);
    };
    let sizes = sizes(&input, options);
    dense::backward(gpu, &input, options, &sizes, readout, kept, gradient)
}

/// See [`march_engine::Engine::anchor_read_stored`].
pub(crate) fn forward_stored(
    _gpu: &Gpu,
    _input: AnchorRead<&Tensor, &[Arc<Stored>]>,
    _options: &AnchorReadOptions,
) -> Result<Tensor> {
    unsupported("anchor_read_stored")
}

/// See [`march_engine::Engine::routing_weights`].
pub(crate) fn weights(
    _gpu: &Gpu,
    _input: AnchorRead<&Tensor, [usize; 2]>,
    _options: &AnchorReadOptions,
) -> Result<Tensor> {
    unsupported("routing_weights")
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    dense::kernels()
}

//! `anchor_read` on the device.

use std::sync::Arc;

use march_engine::Result;
use march_engine::ops::anchor_read::AnchorRead;
use march_engine::ops::anchor_read::AnchorReadKept;
use march_engine::ops::anchor_read::AnchorReadOptions;

use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

mod arena;
mod call;
mod dense;
mod plan;
mod sparse;
mod stored;

pub(crate) use arena::Arenas;
use call::{Sizes, States};
use dense::with_states;
pub use stored::Stored;

/// See [`march_engine::Engine::anchor_read`].
pub(crate) fn forward(
    gpu: &Gpu,
    input: AnchorRead<&Tensor>,
    options: &AnchorReadOptions,
    keep: bool,
) -> Result<(Tensor, Option<AnchorReadKept<Tensor>>)> {
    let sizes = Sizes::of(&input, options);
    let states = States::whole(input.anchor_states, &sizes);
    read(gpu, &with_states(&input, &states), options, &sizes, keep)
}

fn read(
    gpu: &Gpu,
    input: &AnchorRead<&Tensor, &States>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
    keep: bool,
) -> Result<(Tensor, Option<AnchorReadKept<Tensor>>)> {
    if let Some(k) = chosen(options) {
        let (readout, kept) = sparse::forward(gpu, input, options, sizes, k)?;
        return Ok((readout, keep.then_some(kept)));
    }
    if !keep && sparse::is_few(sizes, options) {
        return Ok((sparse::forward_tokens(gpu, input, options, sizes)?, None));
    }
    let (readout, log_sum) = dense::forward(gpu, input, options, sizes)?;
    let kept = AnchorReadKept { weights: log_sum.clone(), log_sum, chosen: Vec::new() };
    Ok((readout, keep.then_some(kept)))
}

/// Number of anchors that tokens choose; `None` if every token reads all its anchors.
fn chosen(options: &AnchorReadOptions) -> Option<usize> {
    let most = options.plan.segments.iter().map(|segment| segment.visible.len()).max().unwrap_or(0);
    options.top_k.filter(|&k| k < most)
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
    match chosen(options) {
        Some(k) => sparse::backward(gpu, &input, options, k, readout, kept, gradient),
        None => dense::backward(gpu, &input, options, readout, kept, gradient),
    }
}

/// See [`march_engine::Engine::anchor_read_stored`].
pub(crate) fn forward_stored(
    gpu: &Gpu,
    input: AnchorRead<&Tensor, &[Arc<Stored>]>,
    options: &AnchorReadOptions,
) -> Result<Tensor> {
    let Some(first) = input.anchor_states.first() else { unreachable!("the list was checked") };
    let [_, _, key_dim, value_dim] = first.shape();
    let sizes = Sizes::new(&input, [key_dim, value_dim], options);
    let states = stored::together(gpu, input.anchor_states, &sizes, &options.plan)?;
    Ok(read(gpu, &with_states(&input, &states), options, &sizes, false)?.0)
}

/// See [`march_engine::Engine::routing_weights`].
pub(crate) fn weights(
    gpu: &Gpu,
    input: AnchorRead<&Tensor, [usize; 2]>,
    options: &AnchorReadOptions,
) -> Result<Tensor> {
    let sizes = Sizes::new(&input, input.anchor_states, options);
    sparse::weights(gpu, &input, options, &sizes, chosen(options))
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    [dense::kernels(), sparse::kernels(), stored::kernels()].concat()
}

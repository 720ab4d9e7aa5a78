//! `anchor_read` on the device.

use march_engine::ops::anchor_read::{
    AnchorRead, AnchorReadBackward, AnchorReadForward, AnchorReadKept, AnchorReadOptions, AnchorReadStored,
    RoutingWeights, Sizes,
};
use march_engine::{Result, Tensor};

use crate::array::{GpuArray, array, into_array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;

mod arena;
mod call;
mod dense;
mod plan;
mod sparse;
mod stored;

pub(crate) use arena::Arenas;
use call::States;
pub(crate) use stored::{Stored, store, to_host};

/// Bytes of weights that the backward pass holds at a time, unless one tile needs more.
const MATRIX_BYTES: usize = 64 << 20;

pub(crate) fn forward(
    gpu: &Gpu,
    op: AnchorReadForward,
    sizes: Sizes,
) -> Result<(Tensor, Option<AnchorReadKept<Tensor>>)> {
    let (readout, kept) = read_whole(gpu, op.input.as_ref().map(array), &op.options, &sizes, op.keep)?;
    let wrapped = |array| op.input.query.like(array);
    Ok((wrapped(readout), kept.map(|kept| kept.map(wrapped))))
}

/// Reads a tensor of states.
fn read_whole(
    gpu: &Gpu,
    input: AnchorRead<&GpuArray>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
    keep: bool,
) -> Result<(GpuArray, Option<AnchorReadKept<GpuArray>>)> {
    let states = States::whole(input.anchor_states, sizes);
    read(gpu, &input.map_with(|x| x, |_| &states), options, sizes, keep)
}

fn read(
    gpu: &Gpu,
    input: &AnchorRead<&GpuArray, &States>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
    keep: bool,
) -> Result<(GpuArray, Option<AnchorReadKept<GpuArray>>)> {
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

pub(crate) fn backward(gpu: &Gpu, op: AnchorReadBackward, sizes: Sizes) -> Result<AnchorRead<Tensor>> {
    backward_within(gpu, op, sizes, MATRIX_BYTES)
}

/// The backward pass, with at most so many bytes of weights at a time, unless one tile needs more.
pub fn backward_within(
    gpu: &Gpu,
    op: AnchorReadBackward,
    sizes: Sizes,
    bytes: usize,
) -> Result<AnchorRead<Tensor>> {
    let (input, options) = (op.input.as_ref().map(array), &op.options);
    let kept = match op.kept {
        Some(kept) => Some(kept.map(into_array)),
        None => read_whole(gpu, input, options, &sizes, true)?.1,
    };
    let Some(kept) = kept else { unreachable!("it was asked for") };
    let both = [array(&op.readout), array(&op.gradient)];
    let d = match chosen(options) {
        Some(k) => sparse::backward(gpu, &input, options, &sizes, k, both, &kept)?,
        None => dense::backward(gpu, &input, options, &sizes, both, &kept, bytes)?,
    };
    Ok(d.map(|d| op.gradient.like(d)))
}

pub(crate) fn forward_stored(gpu: &Gpu, op: AnchorReadStored, sizes: Sizes) -> Result<Tensor> {
    let states = stored::together(gpu, &op.input.anchor_states, &sizes, &op.options.plan)?;
    let input = op.input.as_ref().map_with(array, |_| &states);
    Ok(op.input.query.like(read(gpu, &input, &op.options, &sizes, false)?.0))
}

pub(crate) fn weights(gpu: &Gpu, op: RoutingWeights, sizes: Sizes) -> Result<Tensor> {
    let input = op.input.as_ref().map_with(array, |_| ());
    Ok(op.input.query.like(sparse::weights(gpu, &input, &op.options, &sizes, chosen(&op.options))?))
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    [dense::kernels(), sparse::kernels(), stored::kernels()].concat()
}

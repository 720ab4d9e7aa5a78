//! Reading all visible anchors, forward and backward.

use march_engine::Result;
use march_engine::ops::anchor_read::{AnchorRead, AnchorReadKept, AnchorReadOptions};

use super::call::{Call, Sizes, States, too_wide};
use super::plan::Tiles;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// Anchors whose scores are held at a time; see `score.wgsl`.
const HELD: u32 = 16;

/// Bytes of weights that the backward pass holds at a time, unless one tile needs more.
const MATRIX_BYTES: usize = 64 << 20;

/// Workgroup memory in bytes that every device has.
const WORKGROUP_BYTES: usize = 32 << 10;

/// Room for a dimension in workgroup memory: rounded up, so that few kernels serve all sizes.
pub(super) fn room(size: usize) -> u32 {
    size.next_multiple_of(32) as u32
}

/// The largest tile, in quads of tokens, whose workgroup memory is there.
pub(super) fn quads(fixed: usize, each_quad: usize) -> Option<usize> {
    [4, 2, 1].into_iter().find(|quads| fixed + quads * each_quad <= WORKGROUP_BYTES)
}

fn read_kernel(sizes: &Sizes, storage: u32, slots: bool) -> Result<(Kernel, usize)> {
    let lanes = if sizes.value_dim <= 32 { 32 } else { 64 };
    let each = 16 * (room(sizes.key_dim) + room(sizes.routing_dim) + HELD + 3) as usize;
    let Some(quads) = quads(0, each) else { return too_wide(sizes) };
    let kernel = Kernel {
        name: "anchor_read/read",
        source: concat!(
            include_str!("read.wgsl"),
            include_str!("numbers.wgsl"),
            include_str!("common.wgsl"),
            include_str!("score.wgsl"),
            include_str!("weigh.wgsl"),
            include_str!("softmax.wgsl"),
            include_str!("tile_softmax.wgsl"),
            include_str!("query.wgsl"),
            include_str!("states.wgsl"),
        ),
        entry: "read_all",
        constants: vec![
            ("LANES", lanes),
            ("QUADS", quads as u32),
            ("HELD", HELD),
            ("DK", room(sizes.key_dim)),
            ("DR", room(sizes.routing_dim)),
            ("STORAGE", storage),
            ("SLOTS", u32::from(slots)),
        ],
        writes: &[false, false, false, false, false, false, true, true],
    };
    Ok((kernel, 4 * quads))
}

pub(super) fn delta_kernel() -> Kernel {
    Kernel {
        name: "anchor_read/delta",
        source: include_str!("delta.wgsl"),
        entry: "delta",
        constants: Vec::new(),
        writes: &[false, false, false, true, true],
    }
}

/// The kernel that owns tokens, and the tokens of its tiles.
fn tokens_kernel(sizes: &Sizes) -> Result<(Kernel, usize)> {
    let lanes = sizes.key_dim.max(sizes.routing_dim).next_power_of_two().clamp(64, 256);
    let each = 16 * (room(sizes.value_dim) + room(sizes.routing_dim) + 2 * HELD + 3) as usize;
    let Some(quads) = quads(4 * lanes * 18, each) else { return too_wide(sizes) };
    let kernel = Kernel {
        name: "anchor_read/tokens",
        source: concat!(
            include_str!("tokens.wgsl"),
            include_str!("numbers.wgsl"),
            include_str!("common.wgsl"),
            include_str!("score.wgsl"),
            include_str!("weigh.wgsl"),
            include_str!("states.wgsl"),
        ),
        entry: "tokens",
        constants: vec![
            ("LANES", lanes as u32),
            ("QUADS", quads as u32),
            ("HELD", HELD),
            ("DK", room(sizes.key_dim)),
            ("DV", room(sizes.value_dim)),
            ("DR", room(sizes.routing_dim)),
            ("STORAGE", 0),
            ("SLOTS", 0),
        ],
        writes: &[false, false, false, false, false, false, false, true, true, true],
    };
    Ok((kernel, 4 * quads))
}

fn anchors_kernel(tile: usize) -> Kernel {
    Kernel {
        name: "anchor_read/anchors",
        source: concat!(
            include_str!("anchors.wgsl"),
            include_str!("numbers.wgsl"),
            include_str!("common.wgsl"),
            include_str!("outer.wgsl")
        ),
        entry: "anchors",
        constants: vec![("QUADS", (tile / 4) as u32)],
        writes: &[false, false, false, false, false, false, false, true, true],
    }
}

pub(super) fn kernels() -> Vec<Kernel> {
    let sizes = Sizes::example();
    let mut list = vec![delta_kernel(), anchors_kernel(16)];
    for storage in 0..3 {
        list.extend(read_kernel(&sizes, storage, storage != 0).map(|(kernel, _)| kernel));
    }
    list.extend(tokens_kernel(&sizes).map(|(kernel, _)| kernel));
    list
}

/// Readout, and what the backward pass needs of each token and head.
pub(super) fn forward(
    gpu: &Gpu,
    input: &AnchorRead<&Tensor, &States>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
) -> Result<(Tensor, Tensor)> {
    let states = input.anchor_states;
    let (kernel, size) = read_kernel(sizes, states.storage, states.slots.is_some())?;
    let tiles = Tiles::new(&options.plan, sizes.rows, size);
    let mut words = tiles.words();
    let mut call = Call::new(sizes, options, input);
    call.tiles = tiles.len();
    call.strips = sizes.value_dim.div_ceil(if sizes.value_dim <= 32 { 32 } else { 64 });
    call.slots = words.len();
    words.extend(states.slots.iter().flatten());
    let plan = gpu.upload_indices(&words)?;
    let readout = gpu.empty(&sizes.readout_shape(input.query))?;
    let kept = gpu.empty(&[sizes.rows, sizes.value_heads, 4])?;
    let tensors = [
        &plan,
        input.query,
        input.routing_query,
        input.routing_keys,
        &states.tensor,
        input.null_score.unwrap_or(input.query),
        &readout,
        &kept,
    ];
    let groups = gpu.list(call.tiles * sizes.value_heads * call.strips);
    gpu.run(&kernel, &tensors, &call.words(), groups)?;
    Ok((readout, kept))
}

/// Four numbers of each token and head for the kernels of the backward pass, and the gradient of the null.
pub(super) fn numbers(
    gpu: &Gpu,
    sizes: &Sizes,
    null: Option<&Tensor>,
    readout: &Tensor,
    kept: &AnchorReadKept<Tensor>,
    gradient: &Tensor,
) -> Result<(Tensor, Option<Tensor>)> {
    let numbers = gpu.empty(&[sizes.rows, sizes.value_heads, 4])?;
    let d_null = gpu.empty(null.map_or(&[1], |null| null.shape()))?;
    let count = sizes.rows * sizes.value_heads;
    let words = [count, sizes.value_dim, usize::from(null.is_some())].map(|n| n as u32);
    let tensors = [readout, gradient, &kept.log_sum, &numbers, &d_null];
    gpu.run(&delta_kernel(), &tensors, &words, gpu.list(count.div_ceil(64)))?;
    Ok((numbers, null.is_some().then_some(d_null)))
}

/// Gradients of [`forward`].
pub(super) fn backward(
    gpu: &Gpu,
    input: &AnchorRead<&Tensor>,
    options: &AnchorReadOptions,
    readout: &Tensor,
    kept: &AnchorReadKept<Tensor>,
    gradient: &Tensor,
) -> Result<AnchorRead<Tensor>> {
    backward_within(gpu, input, options, [readout, gradient], kept, MATRIX_BYTES)
}

/// [`backward`] in slices of tiles whose weights take `bytes` bytes at the most.
fn backward_within(
    gpu: &Gpu,
    input: &AnchorRead<&Tensor>,
    options: &AnchorReadOptions,
    [readout, gradient]: [&Tensor; 2],
    kept: &AnchorReadKept<Tensor>,
    bytes: usize,
) -> Result<AnchorRead<Tensor>> {
    let sizes = &Sizes::of(input, options);
    let (numbers, null_score) = numbers(gpu, sizes, input.null_score, readout, kept, gradient)?;
    let d = AnchorRead {
        query: gpu.empty(input.query.shape())?,
        routing_query: gpu.empty(input.routing_query.shape())?,
        routing_keys: gpu.empty(input.routing_keys.shape())?,
        anchor_states: gpu.empty(input.anchor_states.shape())?,
        null_score,
    };
    let (tokens, size) = tokens_kernel(sizes)?;
    let anchors = anchors_kernel(size);
    let mut tiles = Tiles::new(&options.plan, sizes.rows, size);
    let (ends, rows) = tiles.slices(sizes.value_heads, bytes / (8 * size));
    let plan = gpu.upload_indices(&tiles.words())?;
    let matrix = gpu.empty(&[rows, size, 2])?;
    let states = States::whole(input.anchor_states, sizes);
    let mut call = Call::new(sizes, options, &with_states(input, &states));
    call.strips = sizes.key_dim.div_ceil(64) * sizes.value_dim.div_ceil(64) + 1;
    let mut first = 0;
    for end in ends {
        call.first_tile = first;
        call.tiles = end - first;
        let tensors = [
            &plan,
            input.query,
            input.routing_query,
            input.routing_keys,
            input.anchor_states,
            &numbers,
            gradient,
            &d.query,
            &d.routing_query,
            &matrix,
        ];
        gpu.run(&tokens, &tensors, &call.words(), gpu.list(call.tiles * sizes.key_heads))?;
        let seen = gpu.upload_indices(&tiles.seen(sizes.anchors, first, end))?;
        let tensors = [
            &plan,
            &seen,
            input.query,
            input.routing_query,
            &numbers,
            gradient,
            &matrix,
            &d.anchor_states,
            &d.routing_keys,
        ];
        let groups = gpu.list(sizes.anchors * sizes.value_heads * call.strips);
        gpu.run(&anchors, &tensors, &call.words(), groups)?;
        call.add = true;
        first = end;
    }
    Ok(d)
}

/// The same inputs with other states.
pub(super) fn with_states<'a, A, B>(
    input: &AnchorRead<&'a Tensor, A>,
    states: B,
) -> AnchorRead<&'a Tensor, B> {
    AnchorRead {
        query: input.query,
        routing_query: input.routing_query,
        routing_keys: input.routing_keys,
        anchor_states: states,
        null_score: input.null_score,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use march_engine::ops::anchor_read::ReadPlan;

    use super::*;

    /// Gradients do not depend on how many slices the backward pass takes.
    #[test]
    fn slices_add_up() {
        for adapter in crate::adapters().iter().filter(|adapter| adapter.usable.is_ok()) {
            let gpu = Gpu::open(Some(adapter.index)).unwrap();
            let wave = |shape: &[usize], step: f32| {
                let values: Vec<f32> =
                    (0..shape.iter().product()).map(|i: usize| (i as f32 * step).sin()).collect();
                gpu.upload(&values, shape).unwrap()
            };
            let boundaries: Vec<usize> = (1..10).map(|m| m * 5).collect();
            let options = AnchorReadOptions {
                key_heads: 1,
                value_heads: 2,
                top_k: None,
                routing_scale: 0.5,
                plan: Arc::new(ReadPlan::from_boundaries(50, &[boundaries])),
            };
            let (query, routing) = (wave(&[50, 4], 0.7), wave(&[50, 6], 0.9));
            let (keys, states) = (wave(&[9, 6], 1.1), wave(&[9, 2, 4, 5], 1.3));
            let input = AnchorRead {
                query: &query,
                routing_query: &routing,
                routing_keys: &keys,
                anchor_states: &states,
                null_score: None,
            };
            let (readout, kept) = crate::ops::anchor_read::forward(&gpu, input, &options, true).unwrap();
            let (kept, gradient) = (kept.unwrap(), wave(&[50, 10], 1.7));
            let all = |bytes: usize| -> Vec<f32> {
                let both = [&readout, &gradient];
                let d = backward_within(&gpu, &input, &options, both, &kept, bytes).unwrap();
                let parts = [&d.query, &d.routing_query, &d.routing_keys, &d.anchor_states];
                parts.into_iter().flat_map(|part| gpu.download(part)).collect()
            };
            let whole = all(MATRIX_BYTES);
            for bytes in [0, 2000] {
                for (a, b) in all(bytes).iter().zip(&whole) {
                    assert!((a - b).abs() < 1e-5, "{gpu:?}, {bytes} bytes: {a} and {b}");
                }
            }
        }
    }
}

//! Reading all visible anchors, forward and backward.

use march_engine::Result;
use march_engine::ops::anchor_read::{AnchorRead, AnchorReadKept, AnchorReadOptions, Sizes};

use super::call::{Call, States, example, too_wide};
use super::plan::Tiles;
use crate::array::GpuArray;
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Anchors whose scores are held at a time; see `score.wgsl`.
const HELD: u32 = 16;

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
    let sizes = example();
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
    input: &AnchorRead<&GpuArray, &States>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
) -> Result<(GpuArray, GpuArray)> {
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
    let readout = gpu.empty(&sizes.readout_shape(input.query.shape()))?;
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
    null: Option<&GpuArray>,
    readout: &GpuArray,
    kept: &AnchorReadKept<GpuArray>,
    gradient: &GpuArray,
) -> Result<(GpuArray, Option<GpuArray>)> {
    let numbers = gpu.empty(&[sizes.rows, sizes.value_heads, 4])?;
    let d_null = gpu.empty(null.map_or(&[1], |null| null.shape()))?;
    let count = sizes.rows * sizes.value_heads;
    let words = [count, sizes.value_dim, usize::from(null.is_some())].map(|n| n as u32);
    let tensors = [readout, gradient, &kept.log_sum, &numbers, &d_null];
    gpu.run(&delta_kernel(), &tensors, &words, gpu.list(count.div_ceil(64)))?;
    Ok((numbers, null.is_some().then_some(d_null)))
}

/// Gradients of [`forward`], in slices of tiles whose weights take `bytes` bytes at the most.
pub(super) fn backward(
    gpu: &Gpu,
    input: &AnchorRead<&GpuArray>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
    [readout, gradient]: [&GpuArray; 2],
    kept: &AnchorReadKept<GpuArray>,
    bytes: usize,
) -> Result<AnchorRead<GpuArray>> {
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
    let mut call = Call::new(sizes, options, &input.map_with(|x| x, |_| &states));
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

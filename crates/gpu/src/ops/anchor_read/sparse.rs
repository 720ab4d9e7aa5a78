//! Reading the K best anchors of each token, forward and backward; and reading all anchors of a few tokens, token by
//! token.

use march_engine::Result;
use march_engine::ops::anchor_read::{AnchorRead, AnchorReadKept, AnchorReadOptions, Sizes};

use super::call::{Call, States, example, too_wide};
use super::dense::{numbers, quads, room};
use super::plan::Tiles;
use crate::array::GpuArray;
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Tokens of a call up to which a tile has one quad of tokens, so that more anchors are scored at a time.
const FEW: usize = 8;

/// Constants of the kernels that score for themselves, and the tokens of their tiles.
fn scoring(sizes: &Sizes) -> Result<(Vec<(&'static str, u32)>, usize)> {
    let few = sizes.rows <= FEW;
    let (lanes, held) = if few { (256, 256) } else { (64, 16) };
    let each = 16 * (room(sizes.routing_dim) + held + 2) as usize;
    let Some(most) = quads(0, each) else { return too_wide(sizes) };
    let quads = if few { 1 } else { most };
    let constants =
        vec![("LANES", lanes), ("HELD", held), ("QUADS", quads as u32), ("DR", room(sizes.routing_dim))];
    Ok((constants, 4 * quads))
}

fn choose_kernel(sizes: &Sizes) -> Result<(Kernel, usize)> {
    let (constants, size) = scoring(sizes)?;
    let kernel = Kernel {
        name: "anchor_read/choose",
        source: concat!(
            include_str!("choose.wgsl"),
            include_str!("numbers.wgsl"),
            include_str!("common.wgsl"),
            include_str!("score.wgsl"),
            include_str!("softmax.wgsl"),
        ),
        entry: "choose",
        constants,
        writes: &[false, false, false, false, false, true, true],
    };
    Ok((kernel, size))
}

fn weights_kernel(sizes: &Sizes) -> Result<(Kernel, usize)> {
    let (constants, size) = scoring(sizes)?;
    let kernel = Kernel {
        name: "anchor_read/weights",
        source: concat!(
            include_str!("weights.wgsl"),
            include_str!("numbers.wgsl"),
            include_str!("common.wgsl"),
            include_str!("score.wgsl"),
            include_str!("weigh.wgsl"),
            include_str!("softmax.wgsl"),
            include_str!("tile_softmax.wgsl"),
        ),
        entry: "all_weights",
        constants,
        writes: &[false, false, false, false, true],
    };
    Ok((kernel, size))
}

fn chosen_weights_kernel() -> Kernel {
    Kernel {
        name: "anchor_read/chosen_weights",
        source: include_str!("chosen_weights.wgsl"),
        entry: "chosen_weights",
        constants: Vec::new(),
        writes: &[false, true],
    }
}

/// Columns that a workgroup of [`list_kernel`] owns, and anchors that it reads at a time.
fn list_shape(chosen: bool) -> (usize, usize) {
    if chosen { (64, 4) } else { (16, 16) }
}

fn list_kernel(sizes: &Sizes, storage: u32, slots: bool, chosen: bool) -> Kernel {
    let (columns, readers) = list_shape(chosen);
    Kernel {
        name: "anchor_read/list",
        source: concat!(
            include_str!("list.wgsl"),
            include_str!("numbers.wgsl"),
            include_str!("common.wgsl"),
            include_str!("query.wgsl"),
            include_str!("states.wgsl"),
        ),
        entry: "read_list",
        constants: vec![
            ("COLUMNS", columns as u32),
            ("READERS", readers as u32),
            ("CHOSEN", u32::from(chosen)),
            ("QUADS", 1),
            ("DK", room(sizes.key_dim)),
            ("STORAGE", storage),
            ("SLOTS", u32::from(slots)),
        ],
        writes: &[false, false, false, false, true],
    }
}

fn chosen_tokens_kernel(sizes: &Sizes) -> Kernel {
    Kernel {
        name: "anchor_read/chosen_tokens",
        source: concat!(include_str!("chosen_tokens.wgsl"), include_str!("numbers.wgsl")),
        entry: "chosen_tokens",
        constants: vec![("DK", room(sizes.key_dim)), ("DR", room(sizes.routing_dim))],
        writes: &[false, false, false, false, false, false, true, true, true],
    }
}

fn chosen_anchors_kernel() -> Kernel {
    Kernel {
        name: "anchor_read/chosen_anchors",
        source: concat!(
            include_str!("chosen_anchors.wgsl"),
            include_str!("numbers.wgsl"),
            include_str!("outer.wgsl")
        ),
        entry: "chosen_anchors",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, false, false, true, true],
    }
}

pub(super) fn kernels() -> Vec<Kernel> {
    let many = Sizes { rows: 100, ..example() };
    let mut list = vec![chosen_weights_kernel(), chosen_tokens_kernel(&many), chosen_anchors_kernel()];
    for sizes in [example(), many] {
        list.extend(choose_kernel(&sizes).map(|(kernel, _)| kernel));
        list.extend(weights_kernel(&sizes).map(|(kernel, _)| kernel));
    }
    for storage in 0..3 {
        for chosen in [false, true] {
            list.push(list_kernel(&many, storage, storage != 0, chosen));
        }
    }
    list
}

/// What [`choose`] returns: weights and anchors of every token and head, and what the backward pass needs of them.
struct Chosen {
    lists: GpuArray,
    kept: GpuArray,
    plan: GpuArray,
    /// Where the slots of the states start in the plan.
    slots: usize,
}

/// Chooses `k` anchors for every token and head.
fn choose<A>(
    gpu: &Gpu,
    input: &AnchorRead<&GpuArray, A>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
    k: usize,
    slots: &[u32],
) -> Result<Chosen> {
    let (kernel, size) = choose_kernel(sizes)?;
    let tiles = Tiles::new(&options.plan, sizes.rows, size);
    let mut words = tiles.words();
    let at = words.len();
    words.extend(slots);
    let plan = gpu.upload_indices(&words)?;
    let mut call = Call::without_states(sizes, options, input.null_score.is_some());
    call.tiles = tiles.len();
    call.k = k;
    let lists = gpu.empty(&[2, sizes.rows * sizes.value_heads * k])?;
    let kept = gpu.empty(&[sizes.rows, sizes.value_heads, 4])?;
    let null = input.null_score.unwrap_or(input.query);
    let tensors = [&plan, input.query, input.routing_query, input.routing_keys, null, &lists, &kept];
    gpu.run(&kernel, &tensors, &call.words(), gpu.list(call.tiles * sizes.value_heads))?;
    Ok(Chosen { lists, kept, plan, slots: at })
}

/// Readout of the `k` best anchors, and what the backward pass needs.
pub(super) fn forward(
    gpu: &Gpu,
    input: &AnchorRead<&GpuArray, &States>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
    k: usize,
) -> Result<(GpuArray, AnchorReadKept<GpuArray>)> {
    let states = input.anchor_states;
    let slots = states.slots.as_deref().unwrap_or_default();
    let chosen = choose(gpu, input, options, sizes, k, slots)?;
    let mut call = Call::new(sizes, options, input);
    call.tiles = sizes.rows;
    call.k = k;
    call.slots = chosen.slots;
    let readout = read_list(gpu, input, sizes, call, &chosen.plan, &chosen.lists, true)?;
    Ok((readout, AnchorReadKept { log_sum: chosen.kept, chosen: Vec::new(), weights: chosen.lists }))
}

fn read_list(
    gpu: &Gpu,
    input: &AnchorRead<&GpuArray, &States>,
    sizes: &Sizes,
    mut call: Call,
    plan: &GpuArray,
    weights: &GpuArray,
    chosen: bool,
) -> Result<GpuArray> {
    let states = input.anchor_states;
    let readout = gpu.empty(&sizes.readout_shape(input.query.shape()))?;
    call.strips = sizes.value_dim.div_ceil(list_shape(chosen).0);
    let kernel = list_kernel(sizes, states.storage, states.slots.is_some(), chosen);
    let tensors = [plan, input.query, &states.tensor, weights, &readout];
    let groups = gpu.list(call.tiles * sizes.value_heads * call.strips);
    gpu.run(&kernel, &tensors, &call.words(), groups)?;
    Ok(readout)
}

/// Whether [`forward_tokens`] suits a call: few tokens, most of them alone with their anchors.
pub(super) fn is_few(sizes: &Sizes, options: &AnchorReadOptions) -> bool {
    sizes.rows <= FEW && options.plan.segments.iter().all(|segment| segment.len <= 2)
}

/// Readout of all visible anchors for a few tokens, with the bits of [`super::dense::forward`]: a workgroup for each
/// token, head and few columns, so that a single token occupies more of the device.
pub(super) fn forward_tokens(
    gpu: &Gpu,
    input: &AnchorRead<&GpuArray, &States>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
) -> Result<GpuArray> {
    let (kernel, _) = weights_kernel(sizes)?;
    let tiles = Tiles::new(&options.plan, sizes.rows, 1);
    let mut words = tiles.words();
    let mut call = Call::new(sizes, options, input);
    call.tiles = tiles.len();
    call.slots = words.len();
    words.extend(input.anchor_states.slots.iter().flatten());
    let plan = gpu.upload_indices(&words)?;
    let weights = gpu.empty(&[sizes.rows, sizes.value_heads, sizes.anchors])?;
    let null = input.null_score.unwrap_or(input.query);
    let tensors = [&plan, input.routing_query, input.routing_keys, null, &weights];
    gpu.run(&kernel, &tensors, &call.words(), gpu.list(call.tiles * sizes.value_heads))?;
    read_list(gpu, input, sizes, call, &plan, &weights, false)
}

/// Weights of all anchors, or of the `k` best, for every token and head; zero for the others.
pub(super) fn weights<A>(
    gpu: &Gpu,
    input: &AnchorRead<&GpuArray, A>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
    k: Option<usize>,
) -> Result<GpuArray> {
    let shape = [sizes.rows, sizes.value_heads, sizes.anchors];
    if let Some(k) = k {
        let chosen = choose(gpu, input, options, sizes, k, &[])?;
        let weights = gpu.empty(&shape)?;
        let words = [sizes.rows * sizes.value_heads, sizes.anchors, k].map(|n| n as u32);
        let groups = gpu.list(weights.len().div_ceil(64));
        gpu.run(&chosen_weights_kernel(), &[&chosen.lists, &weights], &words, groups)?;
        return Ok(weights);
    }
    let weights = crate::ops::elementwise::full(gpu, &shape, 0.0)?;
    let (kernel, size) = weights_kernel(sizes)?;
    let tiles = Tiles::new(&options.plan, sizes.rows, size);
    let plan = gpu.upload_indices(&tiles.words())?;
    let mut call = Call::without_states(sizes, options, input.null_score.is_some());
    call.tiles = tiles.len();
    let null = input.null_score.unwrap_or(input.query);
    let tensors = [&plan, input.routing_query, input.routing_keys, null, &weights];
    gpu.run(&kernel, &tensors, &call.words(), gpu.list(call.tiles * sizes.value_heads))?;
    Ok(weights)
}

/// Gradients of [`forward`].
pub(super) fn backward(
    gpu: &Gpu,
    input: &AnchorRead<&GpuArray>,
    options: &AnchorReadOptions,
    sizes: &Sizes,
    k: usize,
    [readout, gradient]: [&GpuArray; 2],
    kept: &AnchorReadKept<GpuArray>,
) -> Result<AnchorRead<GpuArray>> {
    let (numbers, null_score) = numbers(gpu, sizes, input.null_score, readout, kept, gradient)?;
    let d = AnchorRead {
        query: gpu.empty(input.query.shape())?,
        routing_query: gpu.empty(input.routing_query.shape())?,
        routing_keys: gpu.empty(input.routing_keys.shape())?,
        anchor_states: gpu.empty(input.anchor_states.shape())?,
        null_score,
    };
    let states = States::whole(input.anchor_states, sizes);
    let mut call = Call::new(sizes, options, &input.map_with(|x| x, |_| &states));
    call.k = k;
    call.strips = sizes.key_dim.div_ceil(64) * sizes.value_dim.div_ceil(64) + 1;
    let d_scores = gpu.empty(&[sizes.rows * sizes.value_heads * k])?;
    let lists = &kept.weights;
    let tensors = [
        input.query,
        input.routing_keys,
        input.anchor_states,
        &numbers,
        gradient,
        lists,
        &d.query,
        &d.routing_query,
        &d_scores,
    ];
    let kernel = chosen_tokens_kernel(sizes);
    gpu.run(&kernel, &tensors, &call.words(), gpu.list(sizes.rows * sizes.key_heads))?;
    let seen = gpu.upload_indices(&Tiles::seen_rows(&options.plan, sizes.anchors))?;
    let tensors = [
        &seen,
        input.query,
        input.routing_query,
        &numbers,
        gradient,
        lists,
        &d_scores,
        &d.anchor_states,
        &d.routing_keys,
    ];
    let groups = gpu.list(sizes.anchors * sizes.value_heads * call.strips);
    gpu.run(&chosen_anchors_kernel(), &tensors, &call.words(), groups)?;
    Ok(d)
}

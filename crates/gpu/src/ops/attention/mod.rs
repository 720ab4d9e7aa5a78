//! `attention` on the device.
//!
//! The forward pass keeps its output for the backward pass; the buffer of the output continues with the log-sums
//! [B, Tq, H], and a second such array that is used only between the calls of `forward_blocks`.

use march_engine::ops::attention::{
    Attention, AttentionBackward, AttentionBlocks, AttentionForward, BLOCK_TOKENS, Sizes,
};
use march_engine::{Result, Tensor};

use crate::array::{GpuArray, array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Blocks of a cache that one dispatch reads: with the query and the output they take all ten bindings.
const BLOCKS: usize = 4;

/// Widest head: wider ones do not fit into workgroup memory.
const WIDEST: usize = 256;

/// Fewest queries for which a workgroup owns a tile of them; with fewer, it owns one query.
const TILED: usize = 16;

/// Rows that a workgroup owns: a tile of scores, and the widest operand, must fit into workgroup memory.
fn tile_rows(z: &Sizes) -> usize {
    if z.dk.max(z.dv) <= 128 { 64 } else { 32 }
}

/// Output [B, Tq, H·e], in a buffer with room for two numbers per query and head behind it.
fn output(gpu: &Gpu, z: &Sizes) -> Result<GpuArray> {
    if z.dk.max(z.dv) > WIDEST {
        return gpu.unsupported("attention with heads wider than 256");
    }
    let rows = z.batch * z.queries * z.heads;
    Ok(gpu.empty(&[rows * (z.dv + 2)])?.reshaped(&z.output()))
}

/// Constants of a kernel whose workgroups own `rows` rows.
fn constants(z: &Sizes, rows: usize) -> Vec<(&'static str, u32)> {
    let [ty, tx] = if rows == 1 { [1, 64] } else { [16, 16] };
    let constants = [
        ("TY", ty),
        ("TX", tx),
        ("R", rows / ty),
        ("C", 64 / tx),
        ("WIDEST", z.dk.max(z.dv).next_multiple_of(tx)),
        ("BLOCK_TOKENS", BLOCK_TOKENS),
    ];
    constants.map(|(name, value)| (name, value as u32)).to_vec()
}

fn whole_kernel(z: &Sizes, rows: usize) -> Kernel {
    Kernel {
        name: "attention/forward",
        source: concat!(include_str!("kernel.wgsl"), include_str!("whole.wgsl"), include_str!("tiles.wgsl")),
        entry: "forward",
        constants: constants(z, rows),
        writes: &[false, false, false, true],
    }
}

fn blocks_kernel(z: &Sizes, rows: usize) -> Kernel {
    Kernel {
        name: "attention/forward_blocks",
        source: concat!(include_str!("kernel.wgsl"), include_str!("blocks.wgsl"), include_str!("tiles.wgsl")),
        entry: "forward",
        constants: constants(z, rows),
        writes: &[false, false, false, false, false, false, false, false, false, true],
    }
}

fn query_kernel(z: &Sizes) -> Kernel {
    Kernel {
        name: "attention/backward_query",
        source: concat!(include_str!("backward_query.wgsl"), include_str!("tiles.wgsl")),
        entry: "backward_query",
        constants: constants(z, tile_rows(z)),
        writes: &[false, false, false, false, false, true, true],
    }
}

fn key_kernel(z: &Sizes) -> Kernel {
    Kernel {
        name: "attention/backward_key",
        source: concat!(include_str!("backward_key.wgsl"), include_str!("tiles.wgsl")),
        entry: "backward_key",
        constants: constants(z, tile_rows(z)),
        writes: &[false, false, false, false, false, false, true, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for (dk, dv) in [(8, 12), (64, 64), (128, 128), (256, 200)] {
        let z = Sizes { batch: 1, queries: 64, keys: 64, heads: 1, kv_heads: 1, window: usize::MAX, dk, dv };
        for rows in [1, tile_rows(&z)] {
            kernels.extend([whole_kernel(&z, rows), blocks_kernel(&z, rows)]);
        }
        kernels.extend([query_kernel(&z), key_kernel(&z)]);
    }
    kernels
}

/// The keys of one dispatch of the forward pass.
struct Part {
    /// Position of the first.
    start: usize,
    keys: usize,
    first: bool,
    last: bool,
}

/// The window as the kernels take it.
fn window(z: &Sizes) -> u32 {
    u32::try_from(z.window).unwrap_or(u32::MAX)
}

fn dispatch(
    gpu: &Gpu,
    kernel: &Kernel,
    tensors: &[&GpuArray],
    z: &Sizes,
    rows: usize,
    part: &Part,
) -> Result<()> {
    let query_tiles = z.queries.div_ceil(rows);
    let groups = z.batch * z.heads * query_tiles;
    let numbers = [
        groups as u32,
        query_tiles as u32,
        z.queries as u32,
        z.heads as u32,
        z.offset() as u32,
        part.start as u32,
        part.keys as u32,
        part.first.into(),
        part.last.into(),
        (z.scale() as f32).to_bits(),
        z.dk as u32,
        z.dv as u32,
        z.kv_heads as u32,
        window(z),
    ];
    gpu.run(kernel, tensors, &numbers, gpu.list(groups))
}

/// Rows that a workgroup owns in the forward pass.
fn forward_rows(z: &Sizes) -> usize {
    if z.queries < TILED { 1 } else { tile_rows(z) }
}

pub(crate) fn forward(gpu: &Gpu, op: AttentionForward, z: Sizes) -> Result<(Tensor, Vec<Tensor>)> {
    let Attention { query, key, value } = &op.input;
    let out = output(gpu, &z)?;
    let rows = forward_rows(&z);
    let part = Part { start: 0, keys: z.keys, first: true, last: true };
    let tensors = [array(query), array(key), array(value), &out];
    dispatch(gpu, &whole_kernel(&z, rows), &tensors, &z, rows, &part)?;
    let out = query.like(out);
    let kept = if op.keep { vec![out.clone()] } else { Vec::new() };
    Ok((out, kept))
}

pub(crate) fn forward_blocks(gpu: &Gpu, op: AttentionBlocks, z: Sizes) -> Result<Tensor> {
    let out = output(gpu, &z)?;
    let rows = forward_rows(&z);
    let kernel = blocks_kernel(&z, rows);
    let count = op.blocks.len().div_ceil(BLOCKS);
    for (i, group) in op.blocks.chunks(BLOCKS).enumerate() {
        let mut tensors = vec![array(&op.query)];
        // Bindings of blocks that are not there are never read.
        for n in 0..BLOCKS {
            let block = group.get(n).unwrap_or(&group[0]);
            tensors.extend([array(&block.key), array(&block.value)]);
        }
        tensors.push(&out);
        let here = group.iter().map(|block| block.key.shape()[1]).sum();
        let part = Part { start: i * BLOCKS * BLOCK_TOKENS, keys: here, first: i == 0, last: i + 1 == count };
        dispatch(gpu, &kernel, &tensors, &z, rows, &part)?;
    }
    Ok(op.query.like(out))
}

pub(crate) fn backward(gpu: &Gpu, op: AttentionBackward, z: Sizes) -> Result<Attention<Tensor>> {
    let [query, key, value] = [&op.input.query, &op.input.key, &op.input.value].map(array);
    let gradient = array(&op.gradient);
    let [out] = &op.kept[..] else { return gpu.unsupported("attention_backward without the kept output") };
    let out = array(out);
    let (d_query, d_key, d_value) =
        (gpu.empty(query.shape())?, gpu.empty(key.shape())?, gpu.empty(value.shape())?);
    let deltas = gpu.empty(&[z.batch, z.queries, z.heads])?;
    let rows = tile_rows(&z);
    let numbers = |heads: usize, tiles: usize, sums: &[usize]| {
        let groups = z.batch * heads * tiles;
        let (numbers, kv_heads) = ([groups, tiles, z.queries, z.keys, z.heads, 0, z.dk, z.dv], [z.kv_heads]);
        let numbers = numbers.iter().chain(sums).chain(&kv_heads).map(|&number| number as u32);
        let mut numbers: Vec<u32> = numbers.chain([window(&z)]).collect();
        numbers[5] = (z.scale() as f32).to_bits();
        (numbers, gpu.list(groups))
    };
    let (of_queries, groups) = numbers(z.heads, z.queries.div_ceil(rows), &[]);
    let tensors = [query, key, value, out, gradient, &deltas, &d_query];
    gpu.run(&query_kernel(&z), &tensors, &of_queries, groups)?;
    let sums = z.batch * z.queries * z.heads * z.dv;
    let (of_keys, groups) = numbers(z.kv_heads, z.keys.div_ceil(rows), &[sums]);
    let tensors = [query, key, value, out, gradient, &deltas, &d_key, &d_value];
    gpu.run(&key_kernel(&z), &tensors, &of_keys, groups)?;
    let [query, key, value] = [d_query, d_key, d_value].map(|d| op.gradient.like(d));
    Ok(Attention { query, key, value })
}

//! `attention` on the device.
//!
//! The forward pass keeps its output for the backward pass; the buffer of the output continues with the log-sums
//! [B, Tq, H], and a second such array that is used only between the calls of `forward_blocks`.

use march_engine::Result;
use march_engine::ops::attention::{Attention, BLOCK_TOKENS, KeyValues};

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// Blocks of a cache that one dispatch reads: with the query and the output they take all ten bindings.
const BLOCKS: usize = 4;

/// Widest head: wider ones do not fit into workgroup memory.
const WIDEST: usize = 256;

/// Fewest queries for which a workgroup owns a tile of them; with fewer, it owns one query.
const TILED: usize = 16;

/// Dimensions of a call.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    dk: usize,
    dv: usize,
}

impl Sizes {
    fn of(query: &Tensor, key: &Tensor, value: &Tensor, heads: usize) -> Self {
        let [batch, queries] = [query.shape()[0], query.shape()[1]];
        let (dk, dv) = (query.width() / heads, value.width() / heads);
        Self { batch, queries, keys: key.shape()[1], heads, dk, dv }
    }

    /// Rows that a workgroup owns: a tile of scores, and the widest operand, must fit into workgroup memory.
    fn tile_rows(&self) -> usize {
        if self.dk.max(self.dv) <= 128 { 64 } else { 32 }
    }

    fn scale(&self) -> f32 {
        (1.0 / (self.dk as f64).sqrt()) as f32
    }

    /// Output [B, Tq, H·e], in a buffer with room for two numbers per query and head behind it.
    fn output(&self, gpu: &Gpu) -> Result<Tensor> {
        let rows = self.batch * self.queries * self.heads;
        Ok(gpu.empty(&[rows * (self.dv + 2)])?.reshaped(&[self.batch, self.queries, self.heads * self.dv]))
    }

    /// Constants of a kernel whose workgroups own `rows` rows.
    fn constants(&self, rows: usize) -> Vec<(&'static str, u32)> {
        let [ty, tx] = if rows == 1 { [1, 64] } else { [16, 16] };
        let constants = [
            ("TY", ty),
            ("TX", tx),
            ("R", rows / ty),
            ("C", 64 / tx),
            ("WIDEST", self.dk.max(self.dv).next_multiple_of(tx)),
            ("BLOCK_TOKENS", BLOCK_TOKENS),
        ];
        constants.map(|(name, value)| (name, value as u32)).to_vec()
    }

    /// Returns an error if the device has no kernel for heads of this width.
    fn supported(&self) -> Result<()> {
        if self.dk.max(self.dv) > WIDEST {
            unsupported("attention with heads wider than 256")
        } else {
            Ok(())
        }
    }
}

fn whole_kernel(z: &Sizes, rows: usize) -> Kernel {
    Kernel {
        name: "attention/forward",
        source: concat!(include_str!("kernel.wgsl"), include_str!("whole.wgsl"), include_str!("tiles.wgsl")),
        entry: "forward",
        constants: z.constants(rows),
        writes: &[false, false, false, true],
    }
}

fn blocks_kernel(z: &Sizes, rows: usize) -> Kernel {
    Kernel {
        name: "attention/forward_blocks",
        source: concat!(include_str!("kernel.wgsl"), include_str!("blocks.wgsl"), include_str!("tiles.wgsl")),
        entry: "forward",
        constants: z.constants(rows),
        writes: &[false, false, false, false, false, false, false, false, false, true],
    }
}

fn query_kernel(z: &Sizes) -> Kernel {
    Kernel {
        name: "attention/backward_query",
        source: concat!(include_str!("backward_query.wgsl"), include_str!("tiles.wgsl")),
        entry: "backward_query",
        constants: z.constants(z.tile_rows()),
        writes: &[false, false, false, false, false, true, true],
    }
}

fn key_kernel(z: &Sizes) -> Kernel {
    Kernel {
        name: "attention/backward_key",
        source: concat!(include_str!("backward_key.wgsl"), include_str!("tiles.wgsl")),
        entry: "backward_key",
        constants: z.constants(z.tile_rows()),
        writes: &[false, false, false, false, false, false, true, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for (dk, dv) in [(8, 12), (64, 64), (128, 128), (256, 200)] {
        let z = Sizes { batch: 1, queries: 64, keys: 64, heads: 1, dk, dv };
        for rows in [1, z.tile_rows()] {
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

fn dispatch(
    gpu: &Gpu,
    kernel: &Kernel,
    tensors: &[&Tensor],
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
        (z.keys - z.queries) as u32,
        part.start as u32,
        part.keys as u32,
        part.first.into(),
        part.last.into(),
        z.scale().to_bits(),
        z.dk as u32,
        z.dv as u32,
    ];
    gpu.run(kernel, tensors, &numbers, gpu.list(groups))
}

/// Rows that a workgroup owns in the forward pass.
fn forward_rows(z: &Sizes) -> usize {
    if z.queries < TILED { 1 } else { z.tile_rows() }
}

/// See [`march_engine::Engine::attention`].
pub(crate) fn forward(
    gpu: &Gpu,
    input: Attention<&Tensor>,
    heads: usize,
    keep: bool,
) -> Result<(Tensor, Vec<Tensor>)> {
    let Attention { query, key, value } = input;
    let z = Sizes::of(query, key, value, heads);
    z.supported()?;
    let out = z.output(gpu)?;
    let rows = forward_rows(&z);
    let part = Part { start: 0, keys: z.keys, first: true, last: true };
    dispatch(gpu, &whole_kernel(&z, rows), &[query, key, value, &out], &z, rows, &part)?;
    let kept = if keep { vec![out.clone()] } else { Vec::new() };
    Ok((out, kept))
}

/// See [`march_engine::Engine::attention_blocks`].
pub(crate) fn forward_blocks(
    gpu: &Gpu,
    query: &Tensor,
    blocks: &[KeyValues<Tensor>],
    heads: usize,
) -> Result<Tensor> {
    let Some(head) = blocks.first() else {
        // Without keys there are no queries, and the width of the values is unknown.
        return gpu.empty(&[1, 0, 0]);
    };
    let keys = blocks.iter().map(|block| block.key.shape()[1]).sum();
    let z = Sizes { keys, ..Sizes::of(query, &head.key, &head.value, heads) };
    z.supported()?;
    let out = z.output(gpu)?;
    let rows = forward_rows(&z);
    let kernel = blocks_kernel(&z, rows);
    let count = blocks.len().div_ceil(BLOCKS);
    for (i, group) in blocks.chunks(BLOCKS).enumerate() {
        let mut tensors = vec![query];
        // Bindings of blocks that are not there are never read.
        for n in 0..BLOCKS {
            let block = group.get(n).unwrap_or(&group[0]);
            tensors.extend([&block.key, &block.value]);
        }
        tensors.push(&out);
        let here = group.iter().map(|block| block.key.shape()[1]).sum();
        let part = Part { start: i * BLOCKS * BLOCK_TOKENS, keys: here, first: i == 0, last: i + 1 == count };
        dispatch(gpu, &kernel, &tensors, &z, rows, &part)?;
    }
    Ok(out)
}

/// See [`march_engine::Engine::attention_backward`].
pub(crate) fn backward(
    gpu: &Gpu,
    input: Attention<&Tensor>,
    heads: usize,
    saved: &[Tensor],
    gradient: &Tensor,
) -> Result<Attention<Tensor>> {
    let Attention { query, key, value } = input;
    let z = Sizes::of(query, key, value, heads);
    let [out] = saved else { return unsupported("attention_backward without the kept output") };
    let d = Attention {
        query: gpu.empty(query.shape())?,
        key: gpu.empty(key.shape())?,
        value: gpu.empty(value.shape())?,
    };
    let deltas = gpu.empty(&[z.batch, z.queries, z.heads])?;
    let rows = z.tile_rows();
    let numbers = |tiles: usize| {
        let groups = z.batch * z.heads * tiles;
        let sums = z.batch * z.queries * z.heads * z.dv;
        let numbers = [groups, tiles, z.queries, z.keys, z.heads, 0, z.dk, z.dv, sums];
        let mut numbers = numbers.map(|number| number as u32);
        numbers[5] = z.scale().to_bits();
        (numbers, gpu.list(groups))
    };
    let (numbers_query, groups) = numbers(z.queries.div_ceil(rows));
    let tensors = [query, key, value, out, gradient, &deltas, &d.query];
    gpu.run(&query_kernel(&z), &tensors, &numbers_query[..8], groups)?;
    let (numbers_key, groups) = numbers(z.keys.div_ceil(rows));
    let tensors = [query, key, value, out, gradient, &deltas, &d.key, &d.value];
    gpu.run(&key_kernel(&z), &tensors, &numbers_key, groups)?;
    Ok(d)
}

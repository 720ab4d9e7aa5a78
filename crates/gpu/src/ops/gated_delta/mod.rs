//! `gated_delta` on the device.
//!
//! The forward pass is a scan token by token, each column of a state in one invocation. For the backward pass it keeps
//! the errors of all tokens and the state before each chunk of [`CHUNK`] tokens. The backward pass scans from the last
//! token to the first for what needs an order (the gradient of the state and of the values), then computes all other
//! gradients for all chunks at once.

mod backward;
mod plan;

pub(crate) use backward::{backward, finish};
pub(crate) use plan::TURNS;

use std::ops::Range;

use march_engine::ops::gated_delta::{
    self, GatedDelta, GatedDeltaForward, GatedDeltaOptions, GatedDeltaOutput,
};
use march_engine::{Result, Tensor};

use crate::array::{GpuArray, array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use plan::Plan;

/// Tokens of a chunk of the backward pass, at the most; chunk.wgsl has arrays of this size.
pub(crate) const CHUNK: usize = 32;

/// Numbers of keys that a workgroup holds at once.
const TILE_NUMBERS: usize = 2048;

/// Dimensions of a call.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    tokens: usize,
    asking: usize,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
}

impl From<gated_delta::Sizes> for Sizes {
    fn from(sizes: gated_delta::Sizes) -> Self {
        let gated_delta::Sizes { batch, tokens, asking, key_heads, value_heads, key_dim, value_dim, .. } =
            sizes;
        Self { batch, tokens, asking, key_heads, value_heads, key_dim, value_dim }
    }
}

impl Sizes {
    /// Numbers of one state.
    fn state(&self) -> usize {
        self.key_dim * self.value_dim
    }

    fn rows(&self) -> usize {
        self.batch * self.tokens
    }

    /// Columns of a state that one workgroup owns.
    fn columns(&self) -> usize {
        if self.value_dim <= 32 { 32 } else { 64 }
    }

    fn strips(&self) -> usize {
        self.value_dim.div_ceil(self.columns())
    }

    /// Tokens whose keys and queries a workgroup holds at once.
    fn tile(&self) -> usize {
        (TILE_NUMBERS / self.key_dim.next_multiple_of(4)).clamp(1, 16)
    }

    /// Constants of the scans.
    fn constants(&self) -> Vec<(&'static str, u32)> {
        let fours = self.key_dim.div_ceil(4);
        vec![("D4", fours as u32), ("TILE", self.tile() as u32), ("GROUP", self.columns() as u32)]
    }

    fn scale(&self) -> u32 {
        (1.0 / (self.key_dim as f64).sqrt() as f32).to_bits()
    }
}

/// Factor of the write gate, as the kernels take it.
fn strength(options: &GatedDeltaOptions) -> u32 {
    (if options.allow_neg_eigval { 2.0_f32 } else { 1.0 }).to_bits()
}

fn gates_kernel() -> Kernel {
    Kernel {
        name: "gated_delta/gates",
        source: include_str!("gates.wgsl"),
        entry: "gate",
        constants: Vec::new(),
        writes: &[false, false, false, false, true],
    }
}

fn plain_kernel(sizes: &Sizes) -> Kernel {
    Kernel {
        name: "gated_delta/forward",
        source: concat!(include_str!("plain.wgsl"), include_str!("kernel.wgsl")),
        entry: "scan",
        constants: sizes.constants(),
        writes: &[false, false, false, false, false, false, false, false, true, true],
    }
}

fn full_kernel(sizes: &Sizes) -> Kernel {
    Kernel {
        name: "gated_delta/forward with boundaries",
        source: concat!(include_str!("full.wgsl"), include_str!("kernel.wgsl")),
        entry: "scan",
        constants: sizes.constants(),
        writes: &[false, false, false, false, false, false, true, true, true, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    let size = |key_dim, value_dim| Sizes {
        batch: 1,
        tokens: 1,
        asking: 1,
        key_heads: 1,
        value_heads: 1,
        key_dim,
        value_dim,
    };
    let mut list = vec![gates_kernel()];
    for sizes in [size(3, 5), size(64, 64), size(128, 128), size(256, 256)] {
        list.extend([plain_kernel(&sizes), full_kernel(&sizes)]);
        list.extend(backward::kernels(&sizes));
    }
    list
}

/// Gates of all tokens, [B, T, value_heads, 4].
fn gates(gpu: &Gpu, input: &GatedDelta<&GpuArray>, options: &GatedDeltaOptions) -> Result<GpuArray> {
    let count = input.write_input.len();
    let heads = options.value_heads;
    let gates = gpu.empty(&[count / heads, heads, 4])?;
    let tensors = [input.retention_input, input.write_input, input.a_log, input.dt_bias, &gates];
    let numbers = [count as u32, heads as u32, strength(options)];
    gpu.run(&gates_kernel(), &tensors, &numbers, gpu.list(count.div_ceil(256)))?;
    Ok(gates)
}

/// Kept are the gates, and the errors followed by the states of the chunks.
pub(crate) fn forward(
    gpu: &Gpu,
    op: GatedDeltaForward,
    sizes: gated_delta::Sizes,
) -> Result<(GatedDeltaOutput<Tensor>, Vec<Tensor>)> {
    let (out, kept) = scan(gpu, op.input.as_ref().map(array), &op.options, op.keep, sizes)?;
    let wrapped = |array| op.input.key.like(array);
    Ok((out.map(wrapped), kept.into_iter().map(wrapped).collect()))
}

fn scan(
    gpu: &Gpu,
    input: GatedDelta<&GpuArray>,
    options: &GatedDeltaOptions,
    keep: bool,
    sizes: gated_delta::Sizes,
) -> Result<(GatedDeltaOutput<GpuArray>, Vec<GpuArray>)> {
    let boundaries = sizes.boundaries;
    let sizes = Sizes::from(sizes);
    let Sizes { batch, tokens, asking, key_heads, value_heads, key_dim, value_dim } = sizes;
    let out = GatedDeltaOutput {
        readout: gpu.empty(&[batch, asking, value_heads * value_dim])?,
        final_state: gpu.empty(&[
            if options.final_state { batch } else { 0 },
            value_heads,
            key_dim,
            value_dim,
        ])?,
        boundary_states: gpu.empty(&[boundaries, value_heads, key_dim, value_dim])?,
    };
    let errors = sizes.rows() * value_heads * value_dim;
    // Boundaries at the end of every row are the final state, which the scan without boundaries writes as well.
    let at_end = !keep
        && !options.final_state
        && options.boundaries.len() == batch
        && options.boundaries.iter().all(|row| row[..] == [tokens]);
    let plan = (!at_end && (boundaries > 0 || keep)).then(|| Plan::new(&sizes, options));
    let segments = sizes.segments(plan.as_ref());
    // The state passes from one segment to the next here.
    let carried = if at_end {
        out.boundary_states.clone()
    } else if options.final_state || segments.len() == 1 {
        out.final_state.clone()
    } else {
        gpu.empty(&[batch, value_heads, key_dim, value_dim])?
    };
    let numbers = |segment: &Range<usize>| {
        [
            batch as u32,
            tokens as u32,
            asking as u32,
            key_heads as u32,
            value_heads as u32,
            key_dim as u32,
            value_dim as u32,
            key_dim.div_ceil(4) as u32,
            sizes.strips() as u32,
            u32::from(input.initial_state.is_some()),
            u32::from(options.final_state || at_end || segment.end < tokens),
            u32::from(keep),
            errors as u32,
            strength(options),
            sizes.scale(),
            segment.start as u32,
            segment.end as u32,
        ]
    };
    let groups = gpu.list(batch * value_heads * sizes.strips());
    let GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, initial_state } = input;
    // Any tensor may stand for an initial state that is not read.
    let initial = initial_state.unwrap_or(value);
    let Some(plan) = plan else {
        let tensors = [
            query,
            key,
            value,
            retention_input,
            write_input,
            a_log,
            dt_bias,
            initial,
            &out.readout,
            &carried,
        ];
        for segment in &segments {
            gpu.run(&plain_kernel(&sizes), &tensors, &numbers(segment), groups)?;
        }
        return Ok((out, Vec::new()));
    };
    let list = gpu.upload_indices(&plan.list)?;
    let gates = gates(gpu, &input, options)?;
    let kept = if keep { errors + plan.chunks * value_heads * sizes.state() } else { 0 };
    let kept = gpu.empty(&[kept])?;
    let tensors =
        [query, key, value, &gates, &list, initial, &out.readout, &carried, &out.boundary_states, &kept];
    for segment in &segments {
        gpu.run(&full_kernel(&sizes), &tensors, &numbers(segment), groups)?;
    }
    Ok((out, if keep { vec![gates, kept] } else { Vec::new() }))
}

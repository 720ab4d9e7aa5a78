//! The backward pass of `gated_delta` on the device.

use std::ops::Range;

use march_engine::ops::gated_delta::{self, GatedDelta, GatedDeltaBackward};
use march_engine::{Result, Tensor};

use super::Sizes;
use super::plan::Plan;
use crate::array::{GpuArray, array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::elementwise;

/// Columns of a state in workgroup memory, at the most; chunk.wgsl has arrays of this size.
const COLUMNS: u32 = 16;

fn reverse_kernel(sizes: &Sizes) -> Kernel {
    Kernel {
        name: "gated_delta/reverse",
        source: include_str!("reverse.wgsl"),
        entry: "reverse",
        constants: sizes.constants(),
        writes: &[false, false, false, false, false, false, false, true, true, true],
    }
}

fn chunk_kernel() -> Kernel {
    Kernel {
        name: "gated_delta/chunk",
        source: include_str!("chunk.wgsl"),
        entry: "chunk",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, false, false, true, true, true],
    }
}

fn finish_kernel() -> Kernel {
    Kernel {
        name: "gated_delta/finish",
        source: include_str!("finish.wgsl"),
        entry: "finish",
        constants: Vec::new(),
        writes: &[false, false, false, true, true],
    }
}

fn finish_all_kernel() -> Kernel {
    Kernel {
        name: "gated_delta/finish_all",
        source: include_str!("finish.wgsl"),
        entry: "finish_all",
        constants: Vec::new(),
        writes: &[false, false, false, true, true, false, true, true],
    }
}

pub(super) fn kernels(sizes: &Sizes) -> Vec<Kernel> {
    vec![reverse_kernel(sizes), chunk_kernel(), finish_kernel(), finish_all_kernel()]
}

/// Gradients of unnormalised queries and keys [.., heads·d_k] from `d_heads`, which starts with those of the normalised
/// ones, dq and dk [rows, shares, d_k]. The shares of a head follow each other and are added.
pub(crate) fn finish(
    gpu: &Gpu,
    inputs: [&GpuArray; 2],
    d_heads: &GpuArray,
    gradients: [&GpuArray; 2],
    [heads, shares]: [usize; 2],
) -> Result<()> {
    let (rows, dim) = (inputs[1].rows(), inputs[1].width() / heads);
    let numbers = [rows, heads, shares, dim].map(|number| number as u32);
    let tensors = [inputs[0], inputs[1], d_heads, gradients[0], gradients[1]];
    gpu.run(&finish_kernel(), &tensors, &numbers, gpu.list(rows * heads))
}

pub(crate) fn backward(
    gpu: &Gpu,
    op: GatedDeltaBackward,
    sizes: gated_delta::Sizes,
) -> Result<GatedDelta<Tensor>> {
    let [gates, states] = &op.kept[..] else { unreachable!("the forward pass keeps two tensors") };
    let (gates, states) = (array(gates), array(states));
    let gradient = op.gradient.as_ref().map(array);
    let sizes = Sizes::from(sizes);
    let Sizes { batch, tokens, key_heads, value_heads, key_dim, value_dim, .. } = sizes;
    let (rows, errors) = (sizes.rows(), sizes.rows() * value_heads * value_dim);
    let plan = Plan::new(&sizes, &op.options);
    let list = gpu.upload_indices(&plan.list)?;
    let GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, initial_state } =
        op.input.as_ref().map(array);
    let d = GatedDelta {
        query: gpu.empty(query.shape())?,
        key: gpu.empty(key.shape())?,
        value: gpu.empty(value.shape())?,
        retention_input: gpu.empty(retention_input.shape())?,
        write_input: gpu.empty(write_input.shape())?,
        a_log: gpu.empty(a_log.shape())?,
        dt_bias: gpu.empty(dt_bias.shape())?,
        initial_state: initial_state.map(|state| gpu.empty(state.shape())).transpose()?,
    };
    let zero;
    let d_readout = match gradient.readout {
        Some(gradient) => gradient,
        None => {
            zero = elementwise::full(gpu, value.shape(), 0.0)?;
            &zero
        }
    };
    let back = gpu.empty(&[errors + plan.chunks * value_heads * sizes.state()])?;
    let segments = sizes.segments(Some(&plan));
    // G passes from one segment to the one before here.
    let carried = match &d.initial_state {
        Some(state) => state.clone(),
        None if segments.len() == 1 => gpu.empty(&[0])?,
        None => gpu.empty(&[batch, value_heads, key_dim, value_dim])?,
    };
    let tensors = [
        query,
        key,
        gates,
        &list,
        d_readout,
        gradient.boundary_states.unwrap_or(key),
        gradient.final_state.unwrap_or(key),
        &back,
        &d.value,
        &carried,
    ];
    let numbers = |segment: &Range<usize>| {
        [
            batch as u32,
            tokens as u32,
            key_heads as u32,
            value_heads as u32,
            key_dim as u32,
            value_dim as u32,
            key_dim.div_ceil(4) as u32,
            sizes.strips() as u32,
            u32::from(gradient.boundary_states.is_some()),
            u32::from(gradient.final_state.is_some()),
            u32::from(initial_state.is_some() || segment.start > 0),
            errors as u32,
            sizes.scale(),
            segment.start as u32,
            segment.end as u32,
        ]
    };
    let groups = gpu.list(batch * value_heads * sizes.strips());
    for segment in segments.iter().rev() {
        gpu.run(&reverse_kernel(&sizes), &tensors, &numbers(segment), groups)?;
    }

    let d_heads = gpu.empty(&[(2 * key_dim + 1) * rows * value_heads])?;
    let tensors =
        [query, key, gates, &list, d_readout, states, &back, &d_heads, &d.retention_input, &d.write_input];
    let numbers = [
        plan.chunks as u32,
        batch as u32,
        tokens as u32,
        key_heads as u32,
        value_heads as u32,
        key_dim as u32,
        value_dim as u32,
        errors as u32,
        COLUMNS,
        sizes.scale(),
    ];
    gpu.run(&chunk_kernel(), &tensors, &numbers, gpu.list(plan.chunks * value_heads))?;

    let numbers = [rows, key_heads, value_heads, key_dim].map(|number| number as u32);
    let tensors = [query, key, &d_heads, &d.query, &d.key, &d.retention_input, &d.dt_bias, &d.a_log];
    gpu.run(&finish_all_kernel(), &tensors, &numbers, gpu.list(rows * key_heads + value_heads))?;
    Ok(d.map(|d| op.input.key.like(d)))
}

//! The backward pass of `log_linear_delta` on the device.

use march_engine::ops::log_linear::{self, LogLinear, LogLinearBackward};
use march_engine::{Result, Tensor};

use super::{Sizes, gates};
use crate::array::array;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::gated_delta::{TURNS, finish};

/// Bytes for recomputed states, if one head does not need more. With more heads than fit, they run in several
/// dispatches.
const SCRATCH: usize = 512 << 20;

fn backward_kernel(sizes: &Sizes) -> Kernel {
    let mut constants = sizes.constants();
    constants.push(("SCALES", sizes.scales.next_multiple_of(8) as u32));
    Kernel {
        name: "log_linear_delta/backward",
        source: concat!(include_str!("step.wgsl"), include_str!("backward.wgsl")),
        entry: "backward",
        constants,
        writes: &[false, false, false, false, false, false, false, true, true, true],
    }
}

fn scalars_kernel() -> Kernel {
    Kernel {
        name: "log_linear_delta/scalars",
        source: include_str!("scalars.wgsl"),
        entry: "scalars",
        constants: Vec::new(),
        writes: &[false, false, false, false, true, true, true, true],
    }
}

fn totals_kernel() -> Kernel {
    Kernel {
        name: "log_linear_delta/totals",
        source: include_str!("totals.wgsl"),
        entry: "totals",
        constants: Vec::new(),
        writes: &[false, false, true, true, true],
    }
}

pub(super) fn kernels(sizes: &Sizes) -> Vec<Kernel> {
    vec![backward_kernel(sizes), scalars_kernel(), totals_kernel()]
}

pub(crate) fn backward(
    gpu: &Gpu,
    op: LogLinearBackward,
    sizes: log_linear::Sizes,
) -> Result<LogLinear<Tensor>> {
    let sizes = Sizes::new(gpu, sizes)?;
    let (input, initial) = (op.input.each(array), op.initial.as_ref().map(array));
    let gradient = array(&op.gradient);
    let [gates, weights] = gates(gpu, &input, &op.options, &sizes)?;
    let LogLinear { query, key, value, retention_input, write_input, .. } = input;
    let d = LogLinear {
        query: gpu.empty(query.shape())?,
        key: gpu.empty(key.shape())?,
        value: gpu.empty(value.shape())?,
        retention_input: gpu.empty(retention_input.shape())?,
        write_input: gpu.empty(write_input.shape())?,
        a_log: gpu.empty(input.a_log.shape())?,
        dt_bias: gpu.empty(input.dt_bias.shape())?,
        level_input: gpu.empty(input.level_input.shape())?,
        level_scale: gpu.empty(input.level_scale.shape())?,
    };
    let (rows, heads, strips) = (sizes.rows(), sizes.value_heads, sizes.strips());
    let shares = rows * heads * strips;
    let d_heads = gpu.empty(&[shares * (2 * sizes.key_dim + 2 + sizes.scales)])?;

    // States before each tile, before each token of one tile, and the gradient.
    let tiles = sizes.tokens.div_ceil(sizes.tile());
    let slots = tiles + sizes.tile() + 1;
    let all = sizes.batch * heads;
    let limits = gpu.limits();
    let bytes = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size) as usize;
    let at_once = (bytes.min(SCRATCH) / (4 * slots * sizes.states())).clamp(1, all.max(1));
    let scratch = gpu.empty(&[at_once, slots, sizes.states()])?;
    // The second pass has two steps for each token, and adds columns.
    let sums = (2 * sizes.key_dim + 2 + sizes.scales).div_ceil(32) * 26;
    let each = [sizes.turns(), 2 * sizes.turns() + sizes.scales + sums];
    let [quick, slow] = each.map(|turns| (TURNS / (turns * sizes.tile())).max(1));
    for first in (0..all).step_by(at_once) {
        let count = at_once.min(all - first);
        let tensors = [
            query,
            key,
            value,
            &gates,
            &weights,
            // Any tensor may stand for initial states that are not read.
            initial.unwrap_or(value),
            gradient,
            &scratch,
            &d_heads,
            &d.value,
        ];
        let run = |phase, range| {
            let numbers = sizes.numbers(initial.is_some(), [first, count, slots], phase, range);
            gpu.run(&backward_kernel(&sizes), &tensors, &numbers, gpu.list(count * strips))
        };
        // The states before the last tile are the last that the first pass writes; there is at least one dispatch,
        // which prepares the scratch.
        for begin in (0..tiles.max(2) - 1).step_by(quick) {
            run(0, begin..(tiles.max(1) - 1).min(begin + quick))?;
        }
        for begin in (0..tiles).step_by(slow).rev() {
            run(1, begin..tiles.min(begin + slow))?;
        }
    }
    finish(gpu, [query, key], &d_heads, [&d.query, &d.key], [sizes.key_heads, heads * strips])?;

    let terms = gpu.empty(&[rows, heads, 1 + sizes.scales])?;
    let tensors = [
        &d_heads,
        &gates,
        input.level_input,
        input.level_scale,
        &d.retention_input,
        &d.write_input,
        &d.level_input,
        &terms,
    ];
    let numbers = [rows * heads, heads, sizes.scales, strips, 2 * shares * sizes.key_dim];
    let groups = gpu.list((rows * heads).div_ceil(256));
    gpu.run(&scalars_kernel(), &tensors, &numbers.map(|number| number as u32), groups)?;

    let tensors = [&d.retention_input, &terms, &d.dt_bias, &d.a_log, &d.level_scale];
    let numbers = [rows, heads, sizes.scales].map(|number| number as u32);
    gpu.run(&totals_kernel(), &tensors, &numbers, gpu.list(heads * (2 + sizes.scales)))?;
    Ok(d.map(|d| op.gradient.like(d)))
}

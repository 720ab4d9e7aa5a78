//! `state_read` on the device.

use march_engine::ops::state_read::{Sizes, StateRead, StateReadBackward, StateReadForward};
use march_engine::{Result, Tensor};

use crate::array::array;
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Columns that a workgroup of the forward pass owns.
const COLUMNS: usize = 64;

fn forward_kernel(key_dim: usize) -> Kernel {
    Kernel {
        name: "state_read/forward",
        source: include_str!("kernel.wgsl"),
        entry: "forward",
        constants: vec![("DK", key_dim.next_multiple_of(32) as u32)],
        writes: &[false, false, true],
    }
}

fn backward_kernel(key_dim: usize) -> Kernel {
    Kernel {
        name: "state_read/backward",
        source: include_str!("backward.wgsl"),
        entry: "backward",
        constants: vec![("DK", key_dim.next_multiple_of(32) as u32)],
        writes: &[false, false, false, true, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![forward_kernel(64), backward_kernel(64)]
}

/// Numbers of a dispatch, in the order of `kernel.wgsl`.
fn numbers(z: &Sizes) -> [u32; 7] {
    let strips = z.value_dim.div_ceil(COLUMNS);
    let scale = ((1.0 / (z.key_dim as f64).sqrt()) as f32).to_bits();
    let counts = [z.value_heads, z.value_heads / z.key_heads, z.key_dim, z.value_dim, strips, z.rows];
    let [a, b, c, d, e, f] = counts.map(|count| count as u32);
    [a, b, c, d, e, f, scale]
}

pub(crate) fn forward(gpu: &Gpu, op: StateReadForward, z: Sizes) -> Result<Tensor> {
    let StateRead { query, states } = &op.input;
    let readout = gpu.empty(&z.readout_shape(query.shape()))?;
    let groups = gpu.list(z.rows * z.value_heads * z.value_dim.div_ceil(COLUMNS));
    let tensors = [array(query), array(states), &readout];
    gpu.run(&forward_kernel(z.key_dim), &tensors, &numbers(&z), groups)?;
    Ok(query.like(readout))
}

pub(crate) fn backward(gpu: &Gpu, op: StateReadBackward, z: Sizes) -> Result<StateRead<Tensor>> {
    let StateRead { query, states } = &op.input;
    let (d_query, d_states) = (gpu.empty(query.shape())?, gpu.empty(states.shape())?);
    let tensors = [array(query), array(states), array(&op.gradient), &d_query, &d_states];
    gpu.run(&backward_kernel(z.key_dim), &tensors, &numbers(&z), gpu.list(z.rows * z.key_heads))?;
    Ok(StateRead { query: query.like(d_query), states: query.like(d_states) })
}

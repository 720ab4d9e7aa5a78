//! `state_read` on the device.

use march_engine::Result;
use march_engine::ops::state_read::StateRead;

use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

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

/// Rows, value heads, d_k and d_v of states that were checked.
fn sizes(states: &Tensor) -> [usize; 4] {
    let shape = states.shape();
    [shape[0], shape[1], shape[2], shape[3]]
}

/// Numbers of a dispatch, in the order of `kernel.wgsl`.
fn numbers(states: &Tensor, key_heads: usize) -> [u32; 7] {
    let [rows, heads, key_dim, value_dim] = sizes(states);
    let counts = [heads, heads / key_heads, key_dim, value_dim, value_dim.div_ceil(COLUMNS), rows];
    let mut numbers = [0; 7];
    numbers.iter_mut().zip(counts).for_each(|(number, count)| *number = count as u32);
    numbers[6] = ((1.0 / (key_dim as f64).sqrt()) as f32).to_bits();
    numbers
}

/// See [`march_engine::Engine::state_read`].
pub(crate) fn forward(gpu: &Gpu, input: StateRead<&Tensor>, key_heads: usize) -> Result<Tensor> {
    let [rows, heads, key_dim, value_dim] = sizes(input.states);
    let mut shape = input.query.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = heads * value_dim;
    }
    let readout = gpu.empty(&shape)?;
    let groups = gpu.list(rows * heads * value_dim.div_ceil(COLUMNS));
    let tensors = [input.query, input.states, &readout];
    gpu.run(&forward_kernel(key_dim), &tensors, &numbers(input.states, key_heads), groups)?;
    Ok(readout)
}

/// See [`march_engine::Engine::state_read_backward`].
pub(crate) fn backward(
    gpu: &Gpu,
    input: StateRead<&Tensor>,
    key_heads: usize,
    gradient: &Tensor,
) -> Result<StateRead<Tensor>> {
    let [rows, _, key_dim, _] = sizes(input.states);
    let d = StateRead { query: gpu.empty(input.query.shape())?, states: gpu.empty(input.states.shape())? };
    let tensors = [input.query, input.states, gradient, &d.query, &d.states];
    let groups = gpu.list(rows * key_heads);
    gpu.run(&backward_kernel(key_dim), &tensors, &numbers(input.states, key_heads), groups)?;
    Ok(d)
}

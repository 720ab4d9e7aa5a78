//! `short_conv` on the device.

use march_engine::Result;
use march_engine::ops::short_conv::{ShortConv, ShortConvGradients};

use super::reduce;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// Numbers that a workgroup owns.
const GROUP: usize = 256;

/// Tokens that an invocation of the backward pass owns.
const BLOCK: usize = 32;

fn forward_kernel() -> Kernel {
    Kernel {
        name: "short_conv/forward",
        source: include_str!("kernel.wgsl"),
        entry: "forward",
        constants: Vec::new(),
        writes: &[false, false, false, true, true],
    }
}

fn slopes_kernel() -> Kernel {
    Kernel {
        name: "short_conv/slopes",
        source: include_str!("kernel.wgsl"),
        entry: "slopes",
        constants: Vec::new(),
        writes: &[false, false, false, true, true, false],
    }
}

fn backward_kernel() -> Kernel {
    Kernel {
        name: "short_conv/backward",
        source: include_str!("backward.wgsl"),
        entry: "backward",
        constants: Vec::new(),
        writes: &[false, false, false, false, true, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![forward_kernel(), slopes_kernel(), backward_kernel()]
}

/// B, T, D and K of a call.
fn sizes(input: &ShortConv<&Tensor>) -> [usize; 4] {
    let &[batch, tokens, width] = input.x.shape() else { unreachable!("x has three dimensions") };
    [batch, tokens, width, input.weight.width()]
}

/// See [`march_engine::Engine::short_conv`].
pub(crate) fn forward(gpu: &Gpu, input: ShortConv<&Tensor>) -> Result<(Tensor, Tensor)> {
    let [batch, tokens, width, kernel] = sizes(&input);
    let ShortConv { x, weight, tail } = input;
    let y = gpu.empty(x.shape())?;
    let new_tail = gpu.empty(&[batch, kernel - 1, width])?;
    let call = [batch, tokens, width, kernel, usize::from(tail.is_some())].map(|n| n as u32);
    let groups = gpu.list((y.len() + new_tail.len()).div_ceil(GROUP));
    gpu.run(&forward_kernel(), &[x, weight, tail.unwrap_or(x), &y, &new_tail], &call, groups)?;
    Ok((y, new_tail))
}

/// See [`march_engine::Engine::short_conv_backward`].
pub(crate) fn backward(
    gpu: &Gpu,
    input: ShortConv<&Tensor>,
    gradient: &Tensor,
) -> Result<ShortConvGradients<Tensor>> {
    let [batch, tokens, width, kernel] = sizes(&input);
    let ShortConv { x, weight, tail } = input;
    let blocks = tokens.div_ceil(BLOCK);
    let dx = gpu.empty(x.shape())?;
    let dz = gpu.empty(x.shape())?;
    let partial = gpu.empty(&[batch * blocks, width * kernel])?;
    let has_tail = usize::from(tail.is_some());
    let call = [batch, tokens, width, kernel, has_tail, BLOCK, blocks].map(|n| n as u32);
    let tail = tail.unwrap_or(x);
    let groups = gpu.list(dz.len().div_ceil(GROUP));
    // The kernel shares its bindings with the forward pass; the slot of the new tail is not used.
    gpu.run(&slopes_kernel(), &[x, weight, tail, &dz, &dx, gradient], &call[..5], groups)?;
    let groups = gpu.list((batch * blocks * width).div_ceil(GROUP));
    gpu.run(&backward_kernel(), &[x, weight, tail, &dz, &dx, &partial], &call, groups)?;
    let weight = reduce::sum(gpu, &partial, 0)?.reshaped(weight.shape());
    Ok(ShortConvGradients { x: dx, weight })
}

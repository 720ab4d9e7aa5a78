//! `rotary` on the device.

use march_engine::ops::rotary::{Rotary, RotaryBackward, RotaryForward, Sizes};
use march_engine::{Result, Tensor};

use crate::array::array;
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Pairs, and elements that do not turn, that a workgroup owns.
const GROUP: usize = 256;

/// Number of positions that share one coarse angle.
const SPAN: usize = 64;

fn kernel() -> Kernel {
    Kernel {
        name: "rotary/turn",
        source: include_str!("kernel.wgsl"),
        entry: "turn",
        constants: Vec::new(),
        writes: &[false, false, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![kernel()]
}

pub(crate) fn forward(gpu: &Gpu, op: RotaryForward, z: Sizes) -> Result<Tensor> {
    turn(gpu, &op.x, z, op.rotary, 1.0)
}

pub(crate) fn backward(gpu: &Gpu, op: RotaryBackward, z: Sizes) -> Result<Tensor> {
    turn(gpu, &op.gradient, z, op.rotary, -1.0)
}

fn turn(gpu: &Gpu, tensor: &Tensor, z: Sizes, rotary: Rotary, direction: f32) -> Result<Tensor> {
    let x = array(tensor);
    let y = gpu.empty(x.shape())?;
    let (tokens, half) = (z.tokens, z.turned / 2);
    // A pair, or an element that does not turn.
    let items = half + z.head - z.turned;
    let all = x.len() / z.head * items;
    if all == 0 {
        return Ok(tensor.like(y));
    }
    // Positions in multiples of SPAN, and the distances from these that occur: one, for one token.
    let (first, last) = (rotary.offset, rotary.offset + tokens - 1);
    let spans = first / SPAN..last / SPAN + 1;
    let distances = if spans.len() == 1 { first % SPAN..last % SPAN + 1 } else { 0..SPAN };
    let frequencies = rotary.frequencies.list(z.turned);
    let mut table = Vec::with_capacity((spans.len() + distances.len()) * 2 * half);
    for position in spans.clone().map(|span| span * SPAN).chain(distances.clone()) {
        table.extend(frequencies.iter().map(|f| (position as f64 * f).cos() as f32));
        table.extend(frequencies.iter().map(|f| (position as f64 * f).sin() as f32));
    }
    let table = gpu.upload(&table, &[spans.len() + distances.len(), 2 * half])?;
    let numbers =
        [all, tokens, rotary.heads, half, first % SPAN, spans.len(), distances.start].map(|n| n as u32);
    let numbers = [&numbers[..], &[direction.to_bits(), items as u32]].concat();
    gpu.run(&kernel(), &[x, &table, &y], &numbers, gpu.list(all.div_ceil(GROUP)))?;
    Ok(tensor.like(y))
}

//! `rotary` on the device.

use march_engine::ops::rotary::{Rotary, RotaryBackward, RotaryForward, Sizes};
use march_engine::{Result, Tensor};

use crate::array::array;
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Pairs that a workgroup owns.
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

pub(crate) fn forward(gpu: &Gpu, op: RotaryForward, _: Sizes) -> Result<Tensor> {
    turn(gpu, &op.x, op.rotary, 1.0)
}

pub(crate) fn backward(gpu: &Gpu, op: RotaryBackward, _: Sizes) -> Result<Tensor> {
    turn(gpu, &op.gradient, op.rotary, -1.0)
}

fn turn(gpu: &Gpu, tensor: &Tensor, rotary: Rotary, direction: f32) -> Result<Tensor> {
    let x = array(tensor);
    let y = gpu.empty(x.shape())?;
    let (tokens, half) = (x.shape()[1], x.width() / rotary.heads / 2);
    let pairs = x.len() / 2;
    if pairs == 0 {
        return Ok(tensor.like(y));
    }
    // Positions in multiples of SPAN, and the distances from these that occur: one, for one token.
    let (first, last) = (rotary.offset, rotary.offset + tokens - 1);
    let spans = first / SPAN..last / SPAN + 1;
    let distances = if spans.len() == 1 { first % SPAN..last % SPAN + 1 } else { 0..SPAN };
    let frequencies: Vec<f64> =
        (0..half).map(|i| rotary.theta.powf(-((2 * i) as f64) / (2 * half) as f64)).collect();
    let mut table = Vec::with_capacity((spans.len() + distances.len()) * 2 * half);
    for position in spans.clone().map(|span| span * SPAN).chain(distances.clone()) {
        table.extend(frequencies.iter().map(|f| (position as f64 * f).cos() as f32));
        table.extend(frequencies.iter().map(|f| (position as f64 * f).sin() as f32));
    }
    let table = gpu.upload(&table, &[spans.len() + distances.len(), 2 * half])?;
    let numbers =
        [pairs, tokens, rotary.heads, half, first % SPAN, spans.len(), distances.start].map(|n| n as u32);
    let numbers = [&numbers[..], &[direction.to_bits()]].concat();
    gpu.run(&kernel(), &[x, &table, &y], &numbers, gpu.list(pairs.div_ceil(GROUP)))?;
    Ok(tensor.like(y))
}

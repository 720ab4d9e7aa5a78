//! Reference implementation of the rotary embedding: a direct transcription of the equations.

use super::{Rotary, RotaryBackward, RotaryForward, Sizes};
use crate::array::Array;
use crate::error::Result;
use crate::reference::Reference;
use crate::tensor::Tensor;

pub(crate) fn forward(_: &Reference, op: RotaryForward, sizes: Sizes) -> Result<Tensor> {
    Ok(turn(&op.x, sizes, op.rotary, 1.0))
}

pub(crate) fn backward(_: &Reference, op: RotaryBackward, sizes: Sizes) -> Result<Tensor> {
    Ok(turn(&op.gradient, sizes, op.rotary, -1.0))
}

fn turn(x: &Tensor, Sizes { tokens, head, turned }: Sizes, rotary: Rotary, direction: f64) -> Tensor {
    let half = turned / 2;
    let frequencies = rotary.frequencies.list(turned);
    let mut y = x.f64().data().to_vec();
    for (row, y) in y.chunks_exact_mut(rotary.heads * head).enumerate() {
        let position = (rotary.offset + row % tokens) as f64;
        for y in y.chunks_exact_mut(head) {
            for i in 0..half {
                let angle = direction * position * frequencies[i];
                let (sin, cos) = (angle.sin(), angle.cos());
                let (x1, x2) = (y[i], y[i + half]);
                y[i] = x1 * cos - x2 * sin;
                y[i + half] = x2 * cos + x1 * sin;
            }
        }
    }
    x.like(Array::detached(y, x.shape()))
}

//! Reference implementation of the rotary embedding: a direct transcription of the equations.

use super::{Rotary, Sizes, check};
use crate::error::Result;
use crate::array::{Array, Real};

pub(crate) fn forward<R: Real>(x: &Array<R>, rotary: Rotary) -> Result<Array<R>> {
    turn("x", x, rotary, 1.0)
}

pub(crate) fn backward<R: Real>(gradient: &Array<R>, rotary: Rotary) -> Result<Array<R>> {
    turn("gradient", gradient, rotary, -1.0)
}

fn turn<R: Real>(argument: &'static str, x: &Array<R>, rotary: Rotary, direction: f64) -> Result<Array<R>> {
    let Sizes { tokens, head } = check(argument, x.shape(), &rotary)?;
    let half = head / 2;
    let mut y = x.data().to_vec();
    for (row, y) in y.chunks_exact_mut(rotary.heads * head).enumerate() {
        let position = (rotary.offset + row % tokens) as f64;
        for y in y.chunks_exact_mut(head) {
            for i in 0..half {
                let angle = direction * position * rotary.frequency(i, head);
                let (sin, cos) = (R::of(angle.sin()), R::of(angle.cos()));
                let (x1, x2) = (y[i], y[i + half]);
                y[i] = x1 * cos - x2 * sin;
                y[i + half] = x2 * cos + x1 * sin;
            }
        }
    }
    Ok(Array::detached(y, x.shape()))
}

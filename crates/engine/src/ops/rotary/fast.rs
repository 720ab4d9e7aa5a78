//! Optimised rotary embedding: a table of cosines and sines of all positions is computed first, then every row is
//! rotated in a single pass.
//!
//! The table is computed in f64 and rounded to f32. To save evaluations of sine and cosine, a position p = 64a + b
//! uses e^(ip) = e^(i64a)·e^(ib), so they are evaluated only for each a and each b. An entry depends only on its
//! position, so it is bit-identical in every call.

use super::{Rotary, RotaryBackward, RotaryForward, Sizes};
use crate::array::Array;
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::simd::{Kernel, LANES, Simd};
use crate::tensor::Tensor;

/// Number of positions that share one coarse angle.
const SPAN: usize = 64;

pub(crate) fn forward(cpu: &Cpu, op: RotaryForward, sizes: Sizes) -> Result<Tensor> {
    Ok(op.x.like(turn(cpu, sizes, op.x.f32(), op.rotary, 1.0)))
}

pub(crate) fn backward(cpu: &Cpu, op: RotaryBackward, sizes: Sizes) -> Result<Tensor> {
    Ok(op.gradient.like(turn(cpu, sizes, op.gradient.f32(), op.rotary, -1.0)))
}

#[allow(unsafe_code)]
fn turn(cpu: &Cpu, sizes: Sizes, x: &Array<f32>, rotary: Rotary, direction: f64) -> Array<f32> {
    let Sizes { tokens, head, turned } = sizes;
    let mut y = cpu.uninit(x.shape());
    if x.is_empty() {
        return y;
    }
    let table = table(cpu, tokens, turned, rotary, direction);
    let width = rotary.heads * head;
    let out = Shared::new(y.data_mut());
    cpu.for_rows(cpu.row_parts(x.len() / width, width), |_, range| {
        let (start, len) = (range.start * width, range.len() * width);
        // SAFETY: parts are disjoint row ranges.
        let y = unsafe { out.part(start, len) };
        let x = &x.data()[start..start + len];
        let (first, table) = (range.start % tokens, table.data());
        cpu.level().run(Turn { width, head, turned, first, table, x, y });
    });
    y
}

/// Table [T, r]: the cosines of a position's r/2 angles, followed by their sines.
#[allow(unsafe_code)]
fn table(cpu: &Cpu, tokens: usize, turned: usize, rotary: Rotary, direction: f64) -> Array<f32> {
    let half = turned / 2;
    let frequencies: Vec<f64> = rotary.frequencies.list(turned).iter().map(|f| direction * f).collect();
    let unit = |position: usize| frequencies.iter().map(move |f| (position as f64 * f).sin_cos());
    let mut fine = vec![(0.0, 0.0); SPAN * half];
    // Of a short text, such as the next token, only its own.
    for b in (rotary.offset..rotary.offset + tokens.min(SPAN)).map(|p| p % SPAN) {
        fine[b * half..][..half].iter_mut().zip(unit(b)).for_each(|(to, angle)| *to = angle);
    }
    let mut table = cpu.uninit(&[tokens, turned]);
    let out = Shared::new(table.data_mut());
    let first_span = rotary.offset / SPAN;
    let spans = (rotary.offset + tokens).div_ceil(SPAN) - first_span;
    cpu.parallel(spans, |span| {
        let base = (first_span + span) * SPAN;
        let coarse: Vec<(f64, f64)> = unit(base).collect();
        let positions = base.max(rotary.offset)..(base + SPAN).min(rotary.offset + tokens);
        // SAFETY: spans are disjoint ranges of positions.
        let rows = unsafe { out.part((positions.start - rotary.offset) * turned, positions.len() * turned) };
        for (row, p) in rows.chunks_exact_mut(turned).zip(positions) {
            let fine = &fine[(p - base) * half..][..half];
            let (cos, sin) = row.split_at_mut(half);
            for i in 0..half {
                let ((s1, c1), (s2, c2)) = (coarse[i], fine[i]);
                cos[i] = (c1 * c2 - s1 * s2) as f32;
                sin[i] = (s1 * c2 + c1 * s2) as f32;
            }
        }
    });
    table
}

struct Turn<'a> {
    width: usize,
    head: usize,
    turned: usize,
    /// Table row of the first row of x.
    first: usize,
    table: &'a [f32],
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Turn<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (head, turned, half) = (self.head, self.turned, self.turned / 2);
        let whole = half / LANES * LANES;
        let mut angles = self.table.chunks_exact(turned).cycle().skip(self.first);
        for (x, y) in self.x.chunks_exact(self.width).zip(self.y.chunks_exact_mut(self.width)) {
            let Some(angle) = angles.next() else { return };
            let (cos, sin) = angle.split_at(half);
            for (x, y) in x.chunks_exact(head).zip(y.chunks_exact_mut(head)) {
                y[turned..].copy_from_slice(&x[turned..]);
                let ((x1, x2), (y1, y2)) = (x[..turned].split_at(half), y[..turned].split_at_mut(half));
                let mut i = 0;
                while i < whole {
                    let (c, n) = (s.load(&cos[i..]), s.load(&sin[i..]));
                    let (a, b) = (s.load(&x1[i..]), s.load(&x2[i..]));
                    s.store(&mut y1[i..], s.sub(s.mul(a, c), s.mul(b, n)));
                    s.store(&mut y2[i..], s.fma(b, c, s.mul(a, n)));
                    i += LANES;
                }
                for i in whole..half {
                    y1[i] = x1[i] * cos[i] - x2[i] * sin[i];
                    y2[i] = x2[i] * cos[i] + x1[i] * sin[i];
                }
            }
        }
    }
}

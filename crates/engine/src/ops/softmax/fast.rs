//! Optimised softmax, with rows distributed over threads. Each row takes three passes: maximum, exponentials and
//! their sum, multiplication by the inverse of the sum.

use super::{Softmax, SoftmaxBackward};
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::simd::{self, Kernel, LANES, Simd};
use crate::tensor::Tensor;

#[allow(unsafe_code)]
pub(crate) fn forward(cpu: &Cpu, op: Softmax, width: usize) -> Result<Tensor> {
    let x = op.x.f32();
    let mut y = cpu.uninit(x.shape());
    if x.is_empty() {
        return Ok(op.x.like(y));
    }
    let out = Shared::new(y.data_mut());
    cpu.for_rows(cpu.row_parts(x.len() / width, 4 * width), |_, range| {
        let (start, len) = (range.start * width, range.len() * width);
        // SAFETY: parts are disjoint row ranges.
        let y = unsafe { out.part(start, len) };
        cpu.level().run(Forward { width, x: &x.data()[start..start + len], y });
    });
    Ok(op.x.like(y))
}

struct Forward<'a> {
    width: usize,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let whole = self.width / LANES * LANES;
        for (x, y) in self.x.chunks_exact(self.width).zip(self.y.chunks_exact_mut(self.width)) {
            let max = simd::largest(s, x);
            // Without a shift, a fully masked row is e^−inf = 0 everywhere.
            let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
            y.copy_from_slice(x);
            let (body, tail) = y.split_at_mut(whole);
            let mut sum = simd::exp_minus(s, body, shift);
            if !tail.is_empty() {
                let mut last = [f32::NEG_INFINITY; LANES];
                last[..tail.len()].copy_from_slice(tail);
                sum += simd::exp_minus(s, &mut last, shift);
                tail.copy_from_slice(&last[..tail.len()]);
            }
            if sum != 0.0 {
                simd::scale(s, y, 1.0 / sum);
            }
        }
    }
}

#[allow(unsafe_code)]
pub(crate) fn backward(cpu: &Cpu, op: SoftmaxBackward, width: usize) -> Result<Tensor> {
    let (y, gradient) = (op.y.f32(), op.gradient.f32());
    let mut dx = cpu.uninit(y.shape());
    if y.is_empty() {
        return Ok(op.y.like(dx));
    }
    let out = Shared::new(dx.data_mut());
    cpu.for_rows(cpu.row_parts(y.len() / width, 2 * width), |_, range| {
        let (start, len) = (range.start * width, range.len() * width);
        // SAFETY: parts are disjoint row ranges.
        let dx = unsafe { out.part(start, len) };
        let (y, dy) = (&y.data()[start..start + len], &gradient.data()[start..start + len]);
        cpu.level().run(Backward { width, y, dy, dx });
    });
    Ok(op.y.like(dx))
}

struct Backward<'a> {
    width: usize,
    y: &'a [f32],
    dy: &'a [f32],
    dx: &'a mut [f32],
}

impl Kernel for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.width;
        let whole = width / LANES * LANES;
        for (row, dx) in self.dx.chunks_exact_mut(width).enumerate() {
            let (y, dy) = (&self.y[row * width..][..width], &self.dy[row * width..][..width]);
            let mean = simd::dot(s, y, dy);
            let mv = s.splat(mean);
            let mut i = 0;
            while i < whole {
                s.store(&mut dx[i..], s.mul(s.load(&y[i..]), s.sub(s.load(&dy[i..]), mv)));
                i += LANES;
            }
            for i in whole..width {
                dx[i] = y[i] * (dy[i] - mean);
            }
        }
    }
}

//! Optimised RMS normalisation, with rows distributed over threads. Weight gradients are summed per part of the
//! rows, then over the parts in order; the parts depend only on the shape, so results do not depend on the number
//! of threads.

use super::{GatedRmsNorm, GatedRmsNormBackward, RmsNorm, RmsNormBackward, backward_each};
use crate::array::Array;
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::simd::{self, Kernel, LANES, Simd};
use crate::tensor::Tensor;

pub(crate) fn forward(cpu: &Cpu, op: RmsNorm, width: usize) -> Result<Vec<Tensor>> {
    let weight = op.weight.f32();
    Ok(op.x.iter().map(|x| x.like(run_forward(cpu, width, x.f32(), None, weight, op.eps))).collect())
}

pub(crate) fn gated_forward(cpu: &Cpu, op: GatedRmsNorm, width: usize) -> Result<Vec<Tensor>> {
    let weight = op.weight.f32();
    let one = |(x, gate): (&Tensor, &Tensor)| {
        x.like(run_forward(cpu, width, x.f32(), Some(gate.f32()), weight, op.eps))
    };
    Ok(op.x.iter().zip(&op.gates).map(one).collect())
}

pub(crate) fn backward(cpu: &Cpu, op: RmsNormBackward, width: usize) -> Result<(Vec<Tensor>, Tensor)> {
    let RmsNorm { x, weight, eps } = &op.forward;
    backward_each(op.dx, |i| {
        let dy = op.gradients[i].f32();
        let (dx, _, dw) = run_backward(cpu, width, x[i].f32(), None, weight.f32(), *eps, dy);
        Ok((weight.like(dx), weight.like(dw)))
    })
}

pub(crate) fn gated_backward(
    cpu: &Cpu,
    op: GatedRmsNormBackward,
    width: usize,
) -> Result<(Vec<Tensor>, Vec<Tensor>, Tensor)> {
    let GatedRmsNorm { x, gates, weight, eps } = &op.forward;
    let mut dgates = vec![weight.clone(); x.len()];
    let (dx, dw) = backward_each(vec![None; x.len()], |i| {
        let (gate, dy) = (Some(gates[i].f32()), op.gradients[i].f32());
        let (dx, dgate, dw) = run_backward(cpu, width, x[i].f32(), gate, weight.f32(), *eps, dy);
        dgates[i] = weight.like(dgate.unwrap_or_else(|| cpu.zeros(x[i].shape())));
        Ok((weight.like(dx), weight.like(dw)))
    })?;
    Ok((dx, dgates, dw))
}

#[allow(unsafe_code)]
fn run_forward(
    cpu: &Cpu,
    width: usize,
    x: &Array<f32>,
    gate: Option<&Array<f32>>,
    weight: &Array<f32>,
    eps: f64,
) -> Array<f32> {
    let mut y = cpu.uninit(x.shape());
    let rows = x.len() / width;
    let out = Shared::new(y.data_mut());
    cpu.for_rows(cpu.row_parts(rows, width), |_, range| {
        let (start, len) = (range.start * width, range.len() * width);
        // SAFETY: parts are disjoint row ranges.
        let y = unsafe { out.part(start, len) };
        let x = &x.data()[start..start + len];
        let gate = gate.map(|g| &g.data()[start..start + len]);
        cpu.level().run(Forward { width, x, gate, weight: weight.data(), eps: eps as f32, y });
    });
    y
}

struct Forward<'a> {
    width: usize,
    x: &'a [f32],
    gate: Option<&'a [f32]>,
    weight: &'a [f32],
    eps: f32,
    y: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.width;
        for (row, y) in self.y.chunks_exact_mut(width).enumerate() {
            let x = &self.x[row * width..][..width];
            let r = inverse_rms(s, x, self.eps);
            let gate = self.gate.map(|g| &g[row * width..][..width]);
            let rv = s.splat(r);
            let whole = width / LANES * LANES;
            let mut i = 0;
            while i < whole {
                let mut v = s.mul(s.mul(s.load(&x[i..]), rv), s.load(&self.weight[i..]));
                if let Some(gate) = gate {
                    let g = s.load(&gate[i..]);
                    v = s.mul(v, s.mul(g, simd::sigmoid(s, g)));
                }
                s.store(&mut y[i..], v);
                i += LANES;
            }
            for i in whole..width {
                let silu = gate.map_or(1.0, |g| g[i] / (1.0 + (-g[i]).exp()));
                y[i] = x[i] * r * self.weight[i] * silu;
            }
        }
    }
}

#[inline(always)]
fn inverse_rms<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    1.0 / (simd::dot(s, x, x) / x.len() as f32 + eps).sqrt()
}

#[allow(unsafe_code)]
fn run_backward(
    cpu: &Cpu,
    width: usize,
    x: &Array<f32>,
    gate: Option<&Array<f32>>,
    weight: &Array<f32>,
    eps: f64,
    gradient: &Array<f32>,
) -> (Array<f32>, Option<Array<f32>>, Array<f32>) {
    let rows = x.len() / width;
    let parts = cpu.row_parts(rows, width);
    let mut dx = cpu.uninit(x.shape());
    let mut dgate = gate.map(|g| cpu.uninit(g.shape()));
    let mut partial = cpu.zeros(&[parts.count(), width]);
    {
        let dx = Shared::new(dx.data_mut());
        let dgate = dgate.as_mut().map(|g| Shared::new(g.data_mut()));
        let sums = Shared::new(partial.data_mut());
        cpu.for_rows(parts, |part, range| {
            let (start, len) = (range.start * width, range.len() * width);
            // SAFETY: parts are disjoint row ranges, and each has its own row of sums.
            let (dx, dgate, dw) = unsafe {
                (
                    dx.part(start, len),
                    dgate.as_ref().map(|g| g.part(start, len)),
                    sums.part(part * width, width),
                )
            };
            cpu.level().run(Backward {
                width,
                x: &x.data()[start..start + len],
                gate: gate.map(|g| &g.data()[start..start + len]),
                weight: weight.data(),
                eps: eps as f32,
                dy: &gradient.data()[start..start + len],
                dx,
                dgate,
                dw,
            });
        });
    }
    let mut dw = cpu.zeros(&[width]);
    for row in partial.data().chunks_exact(width) {
        dw.data_mut().iter_mut().zip(row).for_each(|(s, v)| *s += v);
    }
    (dx, dgate, dw)
}

struct Backward<'a> {
    width: usize,
    x: &'a [f32],
    gate: Option<&'a [f32]>,
    weight: &'a [f32],
    eps: f32,
    dy: &'a [f32],
    dx: &'a mut [f32],
    dgate: Option<&'a mut [f32]>,
    dw: &'a mut [f32],
}

impl Kernel for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let width = self.width;
        let whole = width / LANES * LANES;
        let one = s.splat(1.0);
        for row in 0..self.x.len() / width {
            let at = row * width;
            let x = &self.x[at..at + width];
            let dy = &self.dy[at..at + width];
            let dx = &mut self.dx[at..at + width];
            let w = self.weight;
            let r = inverse_rms(s, x, self.eps);
            let rv = s.splat(r);
            // First pass: dn (stored in dx), the gradient of the gate, dw, and Σ dn·w·x.
            let mut acc = s.splat(0.0);
            let mut i = 0;
            while i < whole {
                let xv = s.load(&x[i..]);
                let wv = s.load(&w[i..]);
                let mut dn = s.load(&dy[i..]);
                let xr = s.mul(xv, rv);
                if let (Some(gate), Some(dgate)) = (self.gate, self.dgate.as_mut()) {
                    let g = s.load(&gate[at + i..]);
                    let sig = simd::sigmoid(s, g);
                    let slope = s.mul(sig, s.fma(g, s.sub(one, sig), one));
                    s.store(&mut dgate[at + i..], s.mul(s.mul(dn, s.mul(xr, wv)), slope));
                    dn = s.mul(dn, s.mul(g, sig));
                }
                let sum = s.fma(dn, xr, s.load(&self.dw[i..]));
                s.store(&mut self.dw[i..], sum);
                let dnw = s.mul(dn, wv);
                acc = s.fma(dnw, xv, acc);
                s.store(&mut dx[i..], dnw);
                i += LANES;
            }
            let mut total = s.sum(acc);
            for i in whole..width {
                let mut dn = dy[i];
                if let (Some(gate), Some(dgate)) = (self.gate, self.dgate.as_mut()) {
                    let g = gate[at + i];
                    let sig = 1.0 / (1.0 + (-g).exp());
                    dgate[at + i] = dn * x[i] * r * w[i] * sig * (1.0 + g * (1.0 - sig));
                    dn *= g * sig;
                }
                self.dw[i] += dn * x[i] * r;
                dx[i] = dn * w[i];
                total += dn * w[i] * x[i];
            }
            // Second pass: dx = r (dn·w − r² x mean).
            let factor = -r * r * total / width as f32;
            let fv = s.splat(factor);
            let mut i = 0;
            while i < whole {
                let v = s.mul(rv, s.fma(s.load(&x[i..]), fv, s.load(&dx[i..])));
                s.store(&mut dx[i..], v);
                i += LANES;
            }
            for i in whole..width {
                dx[i] = r * (dx[i] + x[i] * factor);
            }
        }
    }
}

//! Optimised SwiGLU: a single pass, forward and backward, eight elements at a time, in parts distributed over
//! threads.

use super::{SwiGlu, SwiGluBackward};
use crate::array::Array;
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::simd::{self, Kernel, LANES, Simd, load_or_part, store_or_part};
use crate::tensor::Tensor;

pub(crate) fn forward(cpu: &Cpu, op: SwiGlu, (): ()) -> Result<Vec<Tensor>> {
    let one = |(gate, up): (&Tensor, &Tensor)| gate.like(run_forward(cpu, gate.f32(), up.f32()));
    Ok(op.gates.iter().zip(&op.ups).map(one).collect())
}

pub(crate) fn backward(cpu: &Cpu, op: SwiGluBackward, (): ()) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let SwiGlu { gates, ups } = &op.forward;
    let one = |((gate, up), dy): ((&Tensor, &Tensor), &Tensor)| {
        let (dgate, dup) = run_backward(cpu, gate.f32(), up.f32(), dy.f32());
        (gate.like(dgate), up.like(dup))
    };
    Ok(gates.iter().zip(ups).zip(&op.gradients).map(one).unzip())
}

#[allow(unsafe_code)]
fn run_forward(cpu: &Cpu, gate: &Array<f32>, up: &Array<f32>) -> Array<f32> {
    let mut y = cpu.uninit(gate.shape());
    let (gate, up) = (gate.data(), up.data());
    let out = Shared::new(y.data_mut());
    cpu.for_rows(cpu.row_parts(gate.len(), 1), |_, range| {
        // SAFETY: parts are disjoint ranges.
        let y = unsafe { out.part(range.start, range.len()) };
        cpu.level().run(Forward { gate: &gate[range.clone()], up: &up[range], y });
    });
    y
}

#[allow(unsafe_code)]
fn run_backward(
    cpu: &Cpu,
    gate: &Array<f32>,
    up: &Array<f32>,
    gradient: &Array<f32>,
) -> (Array<f32>, Array<f32>) {
    let (mut dgate, mut dup) = (cpu.uninit(gate.shape()), cpu.uninit(gate.shape()));
    let (gate, up, dy) = (gate.data(), up.data(), gradient.data());
    {
        let (dgate, dup) = (Shared::new(dgate.data_mut()), Shared::new(dup.data_mut()));
        cpu.for_rows(cpu.row_parts(gate.len(), 1), |_, range| {
            // SAFETY: parts are disjoint ranges.
            let (dgate, dup) =
                unsafe { (dgate.part(range.start, range.len()), dup.part(range.start, range.len())) };
            let (gate, up, dy) = (&gate[range.clone()], &up[range.clone()], &dy[range]);
            cpu.level().run(Backward { gate, up, dy, dgate, dup });
        });
    }
    (dgate, dup)
}

struct Forward<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    y: &'a mut [f32],
}

impl Forward<'_> {
    #[inline(always)]
    fn lanes<S: Simd, const PART: bool>(&mut self, s: S, i: usize) {
        let g = load_or_part::<S, PART>(s, &self.gate[i..]);
        let u = load_or_part::<S, PART>(s, &self.up[i..]);
        store_or_part::<S, PART>(s, &mut self.y[i..], s.mul(simd::silu(s, g), u));
    }
}

impl Kernel for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut i = 0;
        while i + LANES <= self.y.len() {
            self.lanes::<S, false>(s, i);
            i += LANES;
        }
        if i < self.y.len() {
            self.lanes::<S, true>(s, i);
        }
    }
}

struct Backward<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    dy: &'a [f32],
    dgate: &'a mut [f32],
    dup: &'a mut [f32],
}

impl Backward<'_> {
    #[inline(always)]
    fn lanes<S: Simd, const PART: bool>(&mut self, s: S, i: usize) {
        let g = load_or_part::<S, PART>(s, &self.gate[i..]);
        let u = load_or_part::<S, PART>(s, &self.up[i..]);
        let dy = load_or_part::<S, PART>(s, &self.dy[i..]);
        let (silu, slope) = simd::silu_and_slope(s, g);
        store_or_part::<S, PART>(s, &mut self.dgate[i..], s.mul(s.mul(dy, u), slope));
        store_or_part::<S, PART>(s, &mut self.dup[i..], s.mul(dy, silu));
    }
}

impl Kernel for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut i = 0;
        while i + LANES <= self.dy.len() {
            self.lanes::<S, false>(s, i);
            i += LANES;
        }
        if i < self.dy.len() {
            self.lanes::<S, true>(s, i);
        }
    }
}

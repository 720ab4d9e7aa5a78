//! Optimised SwiGLU: a single pass, forward and backward, eight elements at a time, in parts distributed over
//! threads.

use super::{SwiGlu, check, check_gradient};
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::simd::{self, Kernel, LANES, Simd, load_or_part, store_or_part};
use crate::array::Array;

#[allow(unsafe_code)]
pub(crate) fn forward(cpu: &Cpu, input: SwiGlu<&Array<f32>>) -> Result<Array<f32>> {
    check(input.gate.shape(), input.up.shape())?;
    let (gate, up) = (input.gate.data(), input.up.data());
    let mut y = cpu.uninit(input.gate.shape());
    let out = Shared::new(y.data_mut());
    cpu.for_rows(cpu.row_parts(gate.len(), 1), |_, range| {
        // SAFETY: parts are disjoint ranges.
        let y = unsafe { out.part(range.start, range.len()) };
        cpu.level().run(Forward { gate: &gate[range.clone()], up: &up[range], y });
    });
    Ok(y)
}

#[allow(unsafe_code)]
pub(crate) fn backward(
    cpu: &Cpu,
    input: SwiGlu<&Array<f32>>,
    gradient: &Array<f32>,
) -> Result<SwiGlu<Array<f32>>> {
    check(input.gate.shape(), input.up.shape())?;
    check_gradient(input.gate.shape(), gradient.shape())?;
    let (gate, up, dy) = (input.gate.data(), input.up.data(), gradient.data());
    let mut dgate = cpu.uninit(input.gate.shape());
    let mut dup = cpu.uninit(input.gate.shape());
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
    Ok(SwiGlu { gate: dgate, up: dup })
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

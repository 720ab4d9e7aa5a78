//! Optimised AdamW step. It is limited by memory bandwidth, so it makes one in-place pass over the four arrays, in
//! parts distributed over threads. The norm is summed in f32 within blocks of 4,096 elements and in f64 over the
//! blocks, in order.

use super::{AdamWStep, SquaredNorm, Step};
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::simd::{self, Kernel, LANES, Simd};
use crate::tensor::Tensor;

const BLOCK: usize = 4096;

#[allow(unsafe_code)]
pub(crate) fn update(cpu: &Cpu, op: AdamWStep, (): ()) -> Result<[Tensor; 3]> {
    let (gradient, step) = (op.gradient.f32(), &op.step);
    let mut state = [op.parameter, op.first_moment, op.second_moment].map(Tensor::into_f32);
    for array in &mut state {
        if !array.is_unique() {
            *array = cpu.from_slice(array.data(), array.shape())?;
        }
    }
    let len = gradient.len();
    let [p, m, v] = state.each_mut().map(|array| Shared::new(array.data_mut()));
    cpu.for_rows(cpu.row_parts(len, 1), |_, range| {
        let (at, n) = (range.start, range.len());
        // SAFETY: parts are disjoint ranges.
        let (p, m, v) = unsafe { (p.part(at, n), m.part(at, n), v.part(at, n)) };
        cpu.level().run(Update { p, m, v, g: &gradient.data()[range], step });
    });
    Ok(state.map(|array| op.gradient.like(array)))
}

struct Update<'a> {
    p: &'a mut [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
    g: &'a [f32],
    step: &'a Step,
}

impl Kernel for Update<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { p, m, v, g, step } = self;
        let [c1, c2] = step.corrections();
        let [b1, b2] = step.betas;
        let keep = 1.0 - (step.learning_rate * step.weight_decay) as f32;
        let rate = (step.learning_rate / c1) as f32;
        let root = (1.0 / c2) as f32;
        let (eps, clip) = (step.eps as f32, step.clip as f32);
        let (b1, a1, b2, a2) = (b1 as f32, (1.0 - b1) as f32, b2 as f32, (1.0 - b2) as f32);
        let whole = p.len() / LANES * LANES;
        let mut i = 0;
        while i < whole {
            let gv = s.mul(s.splat(clip), s.load(&g[i..]));
            let mv = s.fma(s.splat(b1), s.load(&m[i..]), s.mul(s.splat(a1), gv));
            let vv = s.fma(s.splat(b2), s.load(&v[i..]), s.mul(s.splat(a2), s.mul(gv, gv)));
            let denominator = s.add(s.sqrt(s.mul(vv, s.splat(root))), s.splat(eps));
            let move_by = s.div(s.mul(mv, s.splat(rate)), denominator);
            let pv = s.sub(s.mul(s.splat(keep), s.load(&p[i..])), move_by);
            s.store(&mut m[i..], mv);
            s.store(&mut v[i..], vv);
            s.store(&mut p[i..], pv);
            i += LANES;
        }
        for i in whole..p.len() {
            let gi = clip * g[i];
            m[i] = b1 * m[i] + a1 * gi;
            v[i] = b2 * v[i] + a2 * gi * gi;
            p[i] = keep * p[i] - rate * m[i] / ((v[i] * root).sqrt() + eps);
        }
    }
}

pub(crate) fn squared_norm(cpu: &Cpu, op: SquaredNorm, (): ()) -> Result<f64> {
    Ok(op.tensors.iter().fold(0.0, |sum, x| sum + sum_of_squares(cpu, x.f32().data())))
}

#[allow(unsafe_code)]
fn sum_of_squares(cpu: &Cpu, x: &[f32]) -> f64 {
    struct Sum<'a>(&'a [f32]);
    impl Kernel for Sum<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> f32 {
            simd::dot(s, self.0, self.0)
        }
    }
    let blocks = x.len().div_ceil(BLOCK);
    let mut sums = vec![0.0f32; blocks];
    let out = Shared::new(&mut sums);
    cpu.for_rows(cpu.row_parts(blocks, BLOCK), |_, range| {
        // SAFETY: parts are disjoint ranges of blocks.
        let out = unsafe { out.part(range.start, range.len()) };
        for (slot, b) in out.iter_mut().zip(range) {
            *slot = cpu.level().run(Sum(&x[b * BLOCK..((b + 1) * BLOCK).min(x.len())]));
        }
    });
    sums.iter().map(|&v| f64::from(v)).sum()
}

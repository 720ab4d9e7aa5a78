//! Optimised AdamW step. It is limited by memory bandwidth, so it makes one in-place pass over the four arrays, in
//! parts distributed over threads. The norm is summed in f32 within blocks of 4,096 elements and in f64 over the
//! blocks, in order.

use super::{AdamW, Step, check};
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::simd::{self, Kernel, LANES, Simd};
use crate::array::Array;

const BLOCK: usize = 4096;

#[allow(unsafe_code)]
pub(crate) fn step(
    cpu: &Cpu,
    state: AdamW<&mut Array<f32>>,
    gradient: &Array<f32>,
    step: &Step,
) -> Result<()> {
    let shapes = [state.parameter.shape(), state.first_moment.shape(), state.second_moment.shape()];
    check(shapes, gradient.shape(), step)?;
    for tensor in [&mut *state.parameter, &mut *state.first_moment, &mut *state.second_moment] {
        if !tensor.is_unique() {
            *tensor = cpu.from_slice(tensor.data(), tensor.shape())?;
        }
    }
    let len = gradient.len();
    let p = Shared::new(state.parameter.data_mut());
    let m = Shared::new(state.first_moment.data_mut());
    let v = Shared::new(state.second_moment.data_mut());
    cpu.for_rows(cpu.row_parts(len, 1), |_, range| {
        let (at, n) = (range.start, range.len());
        // SAFETY: parts are disjoint ranges.
        let (p, m, v) = unsafe { (p.part(at, n), m.part(at, n), v.part(at, n)) };
        cpu.level().run(Update { p, m, v, g: &gradient.data()[range], step });
    });
    Ok(())
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

#[allow(unsafe_code)]
pub(crate) fn squared_norm(cpu: &Cpu, x: &Array<f32>) -> f64 {
    struct Sum<'a>(&'a [f32]);
    impl Kernel for Sum<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> f32 {
            simd::dot(s, self.0, self.0)
        }
    }
    let x = x.data();
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

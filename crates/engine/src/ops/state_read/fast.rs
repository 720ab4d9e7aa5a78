//! Optimised state read, with rows distributed over threads. Reading the states dominates the cost, so each is read
//! once.

use super::{Sizes, StateRead, StateReadBackward, StateReadForward};
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::ops::gated_delta::L2_EPS;
use crate::simd::{self, Kernel, Simd};
use crate::tensor::Tensor;

#[allow(unsafe_code)]
pub(crate) fn forward(cpu: &Cpu, op: StateReadForward, sizes: Sizes) -> Result<Tensor> {
    let input = op.input.as_ref().map(Tensor::f32);
    let mut out = cpu.uninit(&sizes.readout_shape(input.query.shape()));
    let width = sizes.value_heads * sizes.value_dim;
    let shared = Shared::new(out.data_mut());
    cpu.for_rows(cpu.row_parts(sizes.rows, width * sizes.key_dim), |_, range| {
        // SAFETY: parts are disjoint row ranges.
        let out = unsafe { shared.part(range.start * width, range.len() * width) };
        cpu.level().run(Forward {
            sizes,
            query: input.query.data(),
            states: input.states.data(),
            first: range.start,
            out,
        });
    });
    Ok(op.input.query.like(out))
}

/// Offset and values of a head's query, its factor 1 / |q|, and d_k^-½.
#[inline(always)]
fn query<'a, S: Simd>(
    s: S,
    sizes: &Sizes,
    query: &'a [f32],
    row: usize,
    head: usize,
) -> (usize, &'a [f32], f32, f32) {
    let at = (row * sizes.key_heads + head / (sizes.value_heads / sizes.key_heads)) * sizes.key_dim;
    let q = &query[at..at + sizes.key_dim];
    let factor = 1.0 / (simd::dot(s, q, q) + L2_EPS as f32).sqrt();
    (at, q, factor, 1.0 / (sizes.key_dim as f32).sqrt())
}

struct Forward<'a> {
    sizes: Sizes,
    query: &'a [f32],
    states: &'a [f32],
    first: usize,
    out: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Sizes { value_heads, value_dim, key_dim, .. } = self.sizes;
        for (i, out) in self.out.chunks_exact_mut(value_dim.max(1)).enumerate() {
            let (row, head) = (self.first + i / value_heads, i % value_heads);
            let (_, q, factor, scale) = query(s, &self.sizes, self.query, row, head);
            let state = &self.states[(row * value_heads + head) * key_dim * value_dim..];
            out.fill(0.0);
            for (k, &q) in q.iter().enumerate() {
                simd::add_scaled(s, out, q * factor * scale, &state[k * value_dim..][..value_dim]);
            }
        }
    }
}

#[allow(unsafe_code)]
pub(crate) fn backward(cpu: &Cpu, op: StateReadBackward, sizes: Sizes) -> Result<StateRead<Tensor>> {
    let (input, gradient) = (op.input.as_ref().map(Tensor::f32), op.gradient.f32());
    let mut d = StateRead { query: cpu.zeros(input.query.shape()), states: cpu.uninit(input.states.shape()) };
    {
        let (dquery, dstates) = (Shared::new(d.query.data_mut()), Shared::new(d.states.data_mut()));
        let (q_width, s_width) =
            (sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.key_dim * sizes.value_dim);
        cpu.for_rows(cpu.row_parts(sizes.rows, s_width), |_, range| {
            // SAFETY: parts are disjoint row ranges.
            let (dquery, dstates) = unsafe {
                (
                    dquery.part(range.start * q_width, range.len() * q_width),
                    dstates.part(range.start * s_width, range.len() * s_width),
                )
            };
            let (query, states, gradient) = (input.query.data(), input.states.data(), gradient.data());
            cpu.level().run(Backward { sizes, query, states, gradient, range, dquery, dstates });
        });
    }
    Ok(d.map(|array| op.gradient.like(array)))
}

struct Backward<'a> {
    sizes: Sizes,
    query: &'a [f32],
    states: &'a [f32],
    gradient: &'a [f32],
    range: std::ops::Range<usize>,
    dquery: &'a mut [f32],
    dstates: &'a mut [f32],
}

impl Kernel for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Sizes { key_heads, value_heads, value_dim, key_dim, .. } = self.sizes;
        for row in self.range.clone() {
            for head in 0..value_heads {
                let (at, q, factor, scale) = query(s, &self.sizes, self.query, row, head);
                let dq = &mut self.dquery[at - self.range.start * key_heads * key_dim..][..key_dim];
                let dout = &self.gradient[(row * value_heads + head) * value_dim..][..value_dim];
                let from = (row * value_heads + head) * key_dim * value_dim;
                let to = from - self.range.start * value_heads * key_dim * value_dim;
                // y = q / |q|: dx = r (dy − y <dy, y>), in two steps, the sum first.
                let mut along = 0.0;
                for k in 0..key_dim {
                    let span = k * value_dim..(k + 1) * value_dim;
                    let dy = scale * simd::dot(s, &self.states[from..][span.clone()], dout);
                    let y = factor * q[k];
                    simd::scale_to(s, &mut self.dstates[to..][span], scale * y, dout);
                    along += dy * y;
                    dq[k] += factor * dy;
                }
                simd::add_scaled(s, dq, -factor * factor * along, q);
            }
        }
    }
}

//! `matmul` on the device: a batch of products in one dispatch.

use march_engine::ops::matmul::{self, MatMul, MatMulBackward, Transpose};
use march_engine::{Result, Tensor};

use crate::array::array;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::product::{self, Sizes, View};

/// The operands as matrices A (m, k) and B (k, n), however they are stored.
fn operands<'a>(a: &'a Tensor, b: &'a Tensor, transpose: Transpose, z: &matmul::Sizes) -> [View<'a>; 2] {
    let [a, b] = [a, b].map(array);
    let [a_entry, b_entry] = [z.m * z.k, if z.shared { 0 } else { z.k * z.n }];
    let a = View { tensor: a, entry: a_entry, row: a.width(), column: 1 };
    let b = View { tensor: b, entry: b_entry, row: b.width(), column: 1 };
    [if transpose.a { a.t() } else { a }, if transpose.b { b.t() } else { b }]
}

pub(crate) fn forward(gpu: &Gpu, op: MatMul, (z, shape): (matmul::Sizes, Vec<usize>)) -> Result<Tensor> {
    let [a, b] = operands(&op.a, &op.b, op.transpose, &z);
    let c = gpu.empty(&shape)?;
    product::batched(gpu, a, b, Sizes { batch: z.batch, m: z.m, n: z.n, depth: z.k }, false, &c)?;
    Ok(op.a.like(c))
}

pub(crate) fn backward(gpu: &Gpu, op: MatMulBackward, z: matmul::Sizes) -> Result<[Option<Tensor>; 2]> {
    let MatMulBackward { transpose, needs, .. } = op;
    let [a, b] = operands(&op.a, &op.b, transpose, &z);
    let matmul::Sizes { batch, m, n, k: depth, shared } = z;
    let dc = View { tensor: array(&op.gradient), entry: m * n, row: n, column: 1 };
    let da = match needs[0] {
        false => None,
        true => {
            let da = gpu.empty(op.a.shape())?;
            if transpose.a {
                let sizes = Sizes { batch, m: depth, n: m, depth: n };
                product::batched(gpu, b, dc.t(), sizes, false, &da)?;
            } else {
                let sizes = Sizes { batch, m, n: depth, depth: n };
                product::batched(gpu, dc, b.t(), sizes, false, &da)?;
            }
            Some(da)
        }
    };
    let db = match needs[1] {
        false => None,
        true => {
            let db = gpu.empty(op.b.shape())?;
            if transpose.b {
                let sizes = Sizes { batch, m: n, n: depth, depth: m };
                product::batched(gpu, dc.t(), a, sizes, shared, &db)?;
            } else {
                let sizes = Sizes { batch, m: depth, n, depth: m };
                product::batched(gpu, a.t(), dc, sizes, shared, &db)?;
            }
            Some(db)
        }
    };
    Ok([da, db].map(|d| d.map(|d| op.gradient.like(d))))
}

/// The kernels of this operation are those of `product`.
pub(crate) fn kernels() -> Vec<Kernel> {
    product::kernels()
}

//! `matmul` on the device: a batch of products in one dispatch.

use march_engine::Result;
use march_engine::ops::matmul::MatMul;
use march_engine::ops::matmul::Transpose;

use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::product::{self, Sizes, View};
use crate::tensor::Tensor;

/// The operands as matrices A (m, depth) and B (depth, n), however they are stored, and whether B is shared.
struct Operands<'a> {
    a: View<'a>,
    b: View<'a>,
    sizes: Sizes,
    shared: bool,
}

fn operands<'a>(input: MatMul<&'a Tensor>, transpose: Transpose) -> Operands<'a> {
    let ([leading @ .., a0, a1], [others @ .., b0, b1]) = (input.a.shape(), input.b.shape()) else {
        unreachable!("the engine checks that operands have two dimensions")
    };
    let shared = others.is_empty() && !leading.is_empty();
    let a = View { tensor: input.a, entry: a0 * a1, row: *a1, column: 1 };
    let b = View { tensor: input.b, entry: if shared { 0 } else { b0 * b1 }, row: *b1, column: 1 };
    let (m, depth) = if transpose.a { (*a1, *a0) } else { (*a0, *a1) };
    let n = if transpose.b { *b0 } else { *b1 };
    let sizes = Sizes { batch: leading.iter().product(), m, n, depth };
    let (a, b) = (if transpose.a { a.t() } else { a }, if transpose.b { b.t() } else { b });
    Operands { a, b, sizes, shared }
}

/// See [`march_engine::Engine::matmul`].
pub(crate) fn forward(gpu: &Gpu, input: MatMul<&Tensor>, transpose: Transpose) -> Result<Tensor> {
    let Operands { a, b, sizes, .. } = operands(input, transpose);
    let mut shape = input.a.shape().to_vec();
    let last = shape.len() - 2;
    shape[last..].copy_from_slice(&[sizes.m, sizes.n]);
    let c = gpu.empty(&shape)?;
    product::batched(gpu, a, b, sizes, false, &c)?;
    Ok(c)
}

/// See [`march_engine::Engine::matmul_backward`].
pub(crate) fn backward(
    gpu: &Gpu,
    input: MatMul<&Tensor>,
    transpose: Transpose,
    gradient: &Tensor,
    needs: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    let Operands { a, b, sizes, shared } = operands(input, transpose);
    let Sizes { batch, m, n, depth } = sizes;
    let dc = View { tensor: gradient, entry: m * n, row: n, column: 1 };
    let da = match needs[0] {
        false => None,
        true => {
            let da = gpu.empty(input.a.shape())?;
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
            let db = gpu.empty(input.b.shape())?;
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
    Ok([da, db])
}

/// The kernels of this operation are those of `product`.
pub(crate) fn kernels() -> Vec<Kernel> {
    product::kernels()
}

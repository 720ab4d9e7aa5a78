//! `linear` on the device: products with weights in full or reduced precision.

use march_engine::ops::linear::Linear;
use march_engine::{Result, WeightOf};

use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::product::{self, Matrix, Rows};
use crate::tensor::Tensor;

mod packed;
pub use packed::Packed;

/// See [`march_engine::Engine::linear`].
pub(crate) fn forward(gpu: &Gpu, input: Linear<&Tensor, WeightOf<'_, Gpu>>) -> Result<Tensor> {
    let weight = Matrix::from(input.weight);
    let y = gpu.empty(&output_shape(input.x, weight))?;
    product::each(gpu, Rows::all(input.x), &[weight], input.bias, &[&y])?;
    Ok(y)
}

/// See [`march_engine::Engine::linear_each`].
pub(crate) fn forward_each(gpu: &Gpu, x: &Tensor, weights: &[WeightOf<'_, Gpu>]) -> Result<Vec<Tensor>> {
    let weights: Vec<Matrix<'_>> = weights.iter().map(|&weight| weight.into()).collect();
    let outputs =
        weights.iter().map(|&weight| gpu.empty(&output_shape(x, weight))).collect::<Result<Vec<_>>>()?;
    product::each(gpu, Rows::all(x), &weights, None, &outputs.iter().collect::<Vec<_>>())?;
    Ok(outputs)
}

/// See [`march_engine::Engine::linear_backward`].
pub(crate) fn backward(
    gpu: &Gpu,
    input: Linear<&Tensor>,
    gradient: &Tensor,
    needs: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let Linear { x, weight, bias } = input;
    let mut d = [None, None, None];
    if needs[0] {
        let dx = gpu.empty(x.shape())?;
        product::sum(gpu, &[(gradient, weight)], Rows::all(&dx), false)?;
        d[0] = Some(dx);
    }
    if needs[1] {
        let dw = gpu.empty(weight.shape())?;
        product::outer(gpu, Rows::all(x), &[(gradient, &dw)], false)?;
        d[1] = Some(dw);
    }
    if let (true, Some(bias)) = (needs[2], bias) {
        let db = gpu.empty(bias.shape())?;
        let numbers = [Rows::all(x).count as u32, db.len() as u32];
        gpu.run(&bias_kernel(), &[gradient, &db], &numbers, gpu.list(db.len().div_ceil(16)))?;
        d[2] = Some(db);
    }
    Ok(d)
}

fn output_shape(x: &Tensor, weight: Matrix<'_>) -> Vec<usize> {
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = weight.rows;
    }
    shape
}

fn bias_kernel() -> Kernel {
    Kernel {
        name: "linear/bias",
        source: include_str!("bias.wgsl"),
        entry: "bias",
        constants: Vec::new(),
        writes: &[false, true],
    }
}

/// The kernels of this operation beside those of `product`.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![bias_kernel()]
}

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
        add_input_gradient(gpu, x, &[weight], &[gradient], &mut d[0])?;
    }
    d[1] = weight_gradients(gpu, x, &[weight], &[gradient], &needs[1..2])?.remove(0);
    if let (true, Some(bias)) = (needs[2], bias) {
        let db = gpu.empty(bias.shape())?;
        let numbers = [Rows::all(x).count as u32, db.len() as u32];
        gpu.run(&bias_kernel(), &[gradient, &db], &numbers, gpu.list(db.len().div_ceil(16)))?;
        d[2] = Some(db);
    }
    Ok(d)
}

/// dx = Σ dy_q W_q (+ dx) of [`march_engine::Engine::linear_each_backward`], four weights in a dispatch.
pub(crate) fn add_input_gradient(
    gpu: &Gpu,
    x: &Tensor,
    weights: &[&Tensor],
    gradients: &[&Tensor],
    dx: &mut Option<Tensor>,
) -> Result<()> {
    if weights.is_empty() {
        return Ok(());
    }
    let add = dx.is_some();
    let sum = match dx.take() {
        Some(sum) if sum.is_unique() => sum,
        Some(shared) => {
            let sum = gpu.empty(x.shape())?;
            gpu.copy(&shared, 0, &sum, 0, sum.len());
            sum
        }
        None => gpu.empty(x.shape())?,
    };
    let terms: Vec<(&Tensor, &Tensor)> = gradients.iter().copied().zip(weights.iter().copied()).collect();
    product::sum(gpu, &terms, Rows::all(&sum), add)?;
    *dx = Some(sum);
    Ok(())
}

/// dW_q = dy_qᵀ x of [`march_engine::Engine::linear_each_backward`] for the weights that need it, four in a dispatch.
pub(crate) fn weight_gradients(
    gpu: &Gpu,
    x: &Tensor,
    weights: &[&Tensor],
    gradients: &[&Tensor],
    needs: &[bool],
) -> Result<Vec<Option<Tensor>>> {
    let found = weights
        .iter()
        .zip(needs)
        .map(|(weight, &needed)| needed.then(|| gpu.empty(weight.shape())).transpose())
        .collect::<Result<Vec<_>>>()?;
    let terms: Vec<(&Tensor, &Tensor)> =
        gradients.iter().zip(&found).filter_map(|(&gradient, dw)| Some((gradient, dw.as_ref()?))).collect();
    product::outer(gpu, Rows::all(x), &terms, false)?;
    Ok(found)
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

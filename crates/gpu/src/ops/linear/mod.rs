//! `linear` on the device: products with weights in full or reduced precision.

use march_engine::ops::linear::{Linear, LinearList, LinearListGradients, LinearListNeeds, Product};
use march_engine::{Result, WeightOf};

use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::elementwise;
use crate::ops::product::{self, Addend, Each, Matrix, Rows};
use crate::tensor::Tensor;

mod packed;
pub use packed::Packed;

/// See [`march_engine::Engine::linear`].
pub(crate) fn forward(gpu: &Gpu, input: Linear<&Tensor, WeightOf<'_, Gpu>>) -> Result<Tensor> {
    let weight = Matrix::from(input.weight);
    let y = gpu.empty(&output_shape(input.x, weight))?;
    let added = input.bias.map_or(Addend::Nothing, Addend::Bias);
    product::each(gpu, Rows::all(input.x), &[(weight, added, &y)])?;
    Ok(y)
}

/// See [`march_engine::Engine::linear_list`].
pub(crate) fn forward_list(
    gpu: &Gpu,
    input: LinearList<'_, &Tensor, WeightOf<'_, Gpu>>,
) -> Result<Vec<Tensor>> {
    let LinearList { x, products, .. } = input;
    let weights: Vec<Matrix<'_>> = input.weights.iter().map(|&weight| weight.into()).collect();
    let outputs = products
        .iter()
        .map(|product| gpu.empty(&output_shape(x[product.x], weights[product.weight])))
        .collect::<Result<Vec<_>>>()?;
    if let Some(order) = pairs(x.len(), weights.len(), products)
        && weights.iter().all(|weight| weight.format == weights[0].format)
    {
        let residuals = match [products[order[0]].residual, products[order[1]].residual] {
            [Some(first), Some(second)] => Some([first, second]),
            _ => None,
        };
        let y: Vec<&Tensor> = order.iter().map(|&i| &outputs[i]).collect();
        product::each_pair(gpu, [Rows::all(x[0]), Rows::all(x[1])], &weights, residuals, &y)?;
        return Ok(outputs);
    }
    for (i, &rows) in x.iter().enumerate() {
        let own: Vec<_> = products.iter().zip(&outputs).filter(|(product, _)| product.x == i).collect();
        let each: Vec<Each<'_>> = own
            .iter()
            .map(|(product, y)| {
                let added = match (product.bias, product.residual) {
                    (Some(bias), _) => Addend::Bias(bias),
                    (None, Some(residual)) => Addend::Residual(residual),
                    (None, None) => Addend::Nothing,
                };
                (weights[product.weight], added, *y)
            })
            .collect();
        product::each(gpu, Rows::all(rows), &each)?;
        // A product with a bias and a residual.
        for (product, y) in own {
            if let (Some(_), Some(residual)) = (product.bias, product.residual) {
                elementwise::add_to(gpu, y, residual)?;
            }
        }
    }
    Ok(outputs)
}

/// If the products are those of two x with each of one or two weights, their order for the kernels of pairs: both x with
/// the first weight, then with the second.
fn pairs(x: usize, weights: usize, products: &[Product<&Tensor>]) -> Option<Vec<usize>> {
    if x != 2 || !(1..=2).contains(&weights) || products.len() != 2 * weights {
        return None;
    }
    let residuals = products.iter().filter(|product| product.residual.is_some()).count();
    if products.iter().any(|product| product.bias.is_some())
        || !(residuals == 0 || (residuals, weights) == (2, 1))
    {
        return None;
    }
    let place = |q: usize| products.iter().position(|product| (product.x, product.weight) == (q % 2, q / 2));
    (0..products.len()).map(place).collect()
}

/// See [`march_engine::Engine::linear_backward`].
pub(crate) fn backward(
    gpu: &Gpu,
    input: Linear<&Tensor>,
    gradient: &Tensor,
    needs: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let Linear { x, weight, bias } = input;
    let product = Product { x: 0, weight: 0, bias, residual: None };
    let list = LinearList { x: &[x], weights: &[weight], products: &[product] };
    let needs = LinearListNeeds { x: vec![needs[0]], weights: vec![needs[1]], biases: vec![needs[2]] };
    let mut dx = [None];
    let mut found = backward_list(gpu, list, &[gradient], &needs, &mut dx)?;
    let [dx] = dx;
    Ok([dx, found.weights.remove(0), found.biases.remove(0)])
}

/// See [`march_engine::Engine::linear_list_backward`].
pub(crate) fn backward_list(
    gpu: &Gpu,
    input: LinearList<'_, &Tensor>,
    gradients: &[&Tensor],
    needs: &LinearListNeeds,
    dx: &mut [Option<Tensor>],
) -> Result<LinearListGradients<Tensor>> {
    let LinearList { x, weights, products } = input;
    let order = pairs(x.len(), weights.len(), products).filter(|order| !order.is_empty());
    let ordered: Option<Vec<&Tensor>> = order.map(|order| order.iter().map(|&i| gradients[i]).collect());
    match &ordered {
        Some(dy) if needs.x.iter().all(|&needed| needed) => {
            let add = [dx[0].is_some(), dx[1].is_some()];
            let own = [
                elementwise::room_for(gpu, x[0], dx[0].take())?,
                elementwise::room_for(gpu, x[1], dx[1].take())?,
            ];
            product::sum_pair(gpu, dy, weights, own.each_ref(), add)?;
            dx.iter_mut().zip(own).for_each(|(dx, own)| *dx = Some(own));
        }
        _ => {
            for (i, &rows) in x.iter().enumerate().filter(|&(i, _)| needs.x[i]) {
                let terms: Vec<(&Tensor, &Tensor)> = std::iter::zip(products, gradients)
                    .filter(|(product, _)| product.x == i)
                    .map(|(product, &dy)| (dy, weights[product.weight]))
                    .collect();
                if terms.is_empty() {
                    continue;
                }
                let add = dx[i].is_some();
                let own = elementwise::room_for(gpu, rows, dx[i].take())?;
                product::sum(gpu, &terms, Rows::all(&own), add)?;
                dx[i] = Some(own);
            }
        }
    }
    let mut biases = vec![None; products.len()];
    for (bias, (product, &needed)) in biases.iter_mut().zip(products.iter().zip(&needs.biases)) {
        if let (true, Some(like)) = (needed, product.bias) {
            *bias = Some(gpu.empty(like.shape())?);
        }
    }
    let weights = weight_gradients(gpu, input, gradients, needs, ordered.as_deref(), &biases)?;
    Ok(LinearListGradients { weights, biases })
}

/// dW = Σ dyᵀ x over the products with W, for the weights that need it, and db = Σ dy for the `biases` that are there.
/// `ordered` are the gradients in the order of [`pairs`], if the products are such; then there are no biases.
fn weight_gradients(
    gpu: &Gpu,
    input: LinearList<'_, &Tensor>,
    gradients: &[&Tensor],
    needs: &LinearListNeeds,
    ordered: Option<&[&Tensor]>,
    biases: &[Option<Tensor>],
) -> Result<Vec<Option<Tensor>>> {
    let LinearList { x, weights, products } = input;
    let mut found = vec![None; weights.len()];
    for product in products.iter().filter(|product| needs.weights[product.weight]) {
        let dw: &mut Option<Tensor> = &mut found[product.weight];
        if dw.is_none() {
            *dw = Some(gpu.empty(weights[product.weight].shape())?);
        }
    }
    if let (Some(dy), true) = (ordered, needs.weights.iter().all(|&needed| needed)) {
        let rows = [Rows::all(x[0]), Rows::all(x[1])];
        if product::fits_outer_pair(rows.map(|rows| rows.count), weights) {
            let dw: Vec<&Tensor> = found.iter().flatten().collect();
            product::outer_pair(gpu, rows, dy, &dw)?;
            return Ok(found);
        }
    }
    let mut begun = vec![false; weights.len()];
    for (i, &rows) in x.iter().enumerate() {
        let rows = Rows::all(rows);
        // A dispatch writes each dW once, and one bias.
        let mut later: Vec<(&Tensor, &Tensor, bool)> = Vec::new();
        let mut terms: Vec<(&Tensor, &Tensor, bool)> = Vec::new();
        let mut here = vec![false; weights.len()];
        let (mut first_bias, mut more) = (None, Vec::new());
        for ((product, &dy), db) in products.iter().zip(gradients).zip(biases) {
            if product.x != i {
                continue;
            }
            let dw = found[product.weight].as_ref();
            match (db, dw) {
                (Some(db), Some(_)) if first_bias.is_none() && !here[product.weight] => {
                    first_bias = Some((terms.len(), dy, db));
                }
                (Some(db), _) => more.push((dy, db)),
                (None, _) => {}
            }
            let Some(dw) = dw else { continue };
            let list = if here[product.weight] { &mut later } else { &mut terms };
            list.push((dy, dw, begun[product.weight]));
            here[product.weight] = true;
            begun[product.weight] = true;
        }
        let done = product::outer(gpu, rows, &terms, first_bias.map(|(term, _, db)| (term, db)))?;
        more.extend(first_bias.filter(|_| !done).map(|(_, dy, db)| (dy, db)));
        for term in later {
            product::outer(gpu, rows, &[term], None)?;
        }
        for (dy, db) in more {
            let numbers = [rows.count as u32, db.len() as u32];
            gpu.run(&bias_kernel(), &[dy, db], &numbers, gpu.list(db.len().div_ceil(16)))?;
        }
    }
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

//! `linear` on the device: products with weights in full or reduced precision.

use march_engine::ops::linear::{
    LinearList, LinearListBackward, LinearListGradients, LinearListNeeds, Product, Sizes,
};
use march_engine::{Result, Tensor};

use crate::array::{GpuArray, array, arrays, tensors};
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::elementwise;
use crate::ops::product::{self, Addend, Each, Matrix, Rows};

mod packed;
pub(crate) use packed::{Packed, pack, unpack};

pub(crate) fn forward(gpu: &Gpu, op: LinearList, _: Vec<Sizes>) -> Result<Vec<Tensor>> {
    let products: Vec<Product<&GpuArray>> = op.products.iter().map(of_product).collect();
    let weights: Vec<Matrix<'_>> = op.weights.iter().map(Matrix::of).collect();
    Ok(tensors(&op.x[0], outputs(gpu, &arrays(&op.x), &weights, &products)?))
}

/// The arrays of a product.
fn of_product(product: &Product<Tensor>) -> Product<&GpuArray> {
    let Product { x, weight, bias, residual } = product;
    Product { x: *x, weight: *weight, bias: bias.as_ref().map(array), residual: residual.as_ref().map(array) }
}

fn outputs(
    gpu: &Gpu,
    x: &[&GpuArray],
    weights: &[Matrix<'_>],
    products: &[Product<&GpuArray>],
) -> Result<Vec<GpuArray>> {
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
        let y: Vec<&GpuArray> = order.iter().map(|&i| &outputs[i]).collect();
        product::each_pair(gpu, [Rows::all(x[0]), Rows::all(x[1])], weights, residuals, &y)?;
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
fn pairs(x: usize, weights: usize, products: &[Product<&GpuArray>]) -> Option<Vec<usize>> {
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

pub(crate) fn backward(gpu: &Gpu, op: LinearListBackward, _: Vec<Sizes>) -> Result<LinearListGradients> {
    let LinearListBackward { x: inputs, weights, products, gradients, needs, mut dx } = op;
    let products: Vec<Product<&GpuArray>> = products.iter().map(of_product).collect();
    let (x, weights, gradients) = (&arrays(&inputs), &arrays(&weights), &arrays(&gradients));
    let products = &products[..];
    let order = pairs(x.len(), weights.len(), products).filter(|order| !order.is_empty());
    let ordered: Option<Vec<&GpuArray>> = order.map(|order| order.iter().map(|&i| gradients[i]).collect());
    match &ordered {
        Some(dy) if needs.x.iter().all(|&needed| needed) => {
            let add = [dx[0].is_some(), dx[1].is_some()];
            let own = [
                elementwise::room_for(gpu, x[0], dx[0].take())?,
                elementwise::room_for(gpu, x[1], dx[1].take())?,
            ];
            product::sum_pair(gpu, dy, weights, own.each_ref(), add)?;
            dx.iter_mut().zip(own).for_each(|(dx, own)| *dx = Some(inputs[0].like(own)));
        }
        _ => {
            for (i, &rows) in x.iter().enumerate().filter(|&(i, _)| needs.x[i]) {
                let terms: Vec<(&GpuArray, &GpuArray)> = std::iter::zip(products, gradients)
                    .filter(|(product, _)| product.x == i)
                    .map(|(product, &dy)| (dy, weights[product.weight]))
                    .collect();
                if terms.is_empty() {
                    continue;
                }
                let add = dx[i].is_some();
                let own = elementwise::room_for(gpu, rows, dx[i].take())?;
                product::sum(gpu, &terms, Rows::all(&own), add)?;
                dx[i] = Some(inputs[0].like(own));
            }
        }
    }
    let mut biases = vec![None; products.len()];
    for (bias, (product, &needed)) in biases.iter_mut().zip(products.iter().zip(&needs.biases)) {
        if let (true, Some(like)) = (needed, product.bias) {
            *bias = Some(gpu.empty(like.shape())?);
        }
    }
    let input = Products { x, weights, products };
    let weights = weight_gradients(gpu, input, gradients, &needs, ordered.as_deref(), &biases)?;
    let wrapped = |list: Vec<Option<GpuArray>>| {
        list.into_iter().map(|found| found.map(|found| inputs[0].like(found))).collect()
    };
    Ok(LinearListGradients { x: dx, weights: wrapped(weights), biases: wrapped(biases) })
}

/// The inputs of a list.
struct Products<'a> {
    x: &'a [&'a GpuArray],
    weights: &'a [&'a GpuArray],
    products: &'a [Product<&'a GpuArray>],
}

/// dW = Σ dyᵀ x over the products with W, for the weights that need it, and db = Σ dy for the `biases` that are there.
/// `ordered` are the gradients in the order of [`pairs`], if the products are such; then there are no biases.
fn weight_gradients(
    gpu: &Gpu,
    input: Products<'_>,
    gradients: &[&GpuArray],
    needs: &LinearListNeeds,
    ordered: Option<&[&GpuArray]>,
    biases: &[Option<GpuArray>],
) -> Result<Vec<Option<GpuArray>>> {
    let Products { x, weights, products } = input;
    let mut found = vec![None; weights.len()];
    for product in products.iter().filter(|product| needs.weights[product.weight]) {
        let dw: &mut Option<GpuArray> = &mut found[product.weight];
        if dw.is_none() {
            *dw = Some(gpu.empty(weights[product.weight].shape())?);
        }
    }
    if let (Some(dy), true) = (ordered, needs.weights.iter().all(|&needed| needed)) {
        let rows = [Rows::all(x[0]), Rows::all(x[1])];
        if product::fits_outer_pair(rows.map(|rows| rows.count), weights) {
            let dw: Vec<&GpuArray> = found.iter().flatten().collect();
            product::outer_pair(gpu, rows, dy, &dw)?;
            return Ok(found);
        }
    }
    let mut begun = vec![false; weights.len()];
    for (i, &rows) in x.iter().enumerate() {
        let rows = Rows::all(rows);
        // A dispatch writes each dW once, and one bias.
        let mut later: Vec<(&GpuArray, &GpuArray, bool)> = Vec::new();
        let mut terms: Vec<(&GpuArray, &GpuArray, bool)> = Vec::new();
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

fn output_shape(x: &GpuArray, weight: Matrix<'_>) -> Vec<usize> {
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

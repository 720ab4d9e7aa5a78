//! Linear layer: product with a weight matrix.
//!
//! ```text
//! y = x Wᵀ + b        x [.., in]   W [out, in]   b [out] or None   y [.., out]
//! dx = dy W,   dW = dyᵀ x,   db = Σ dy
//!
//! several at once:   y_i = x_i W_iᵀ (+ b_i) (+ r_i)           r_i of y_i's shape
//! dx = Σ dy_i W_i over the products of x,   dW = Σ dy_iᵀ x_i over those with W,   dr_i = dy_i
//! ```
//! W may be packed in reduced precision ([`Tensor::pack`]); then the layer is not differentiable.

mod dots;
pub(crate) mod fast;
mod integer;
pub(crate) mod reference;
mod rounded;
mod source;
mod turned;

use crate::error::{Result, bad_shape, bad_value, expect_lengths, expect_shape, no_gradient};
use crate::op::{Op, owned};
use crate::ops::accumulate::add_gradient;
use crate::tape::{record, records};
use crate::tensor::Tensor;

/// One of the products of a [`LinearList`].
#[derive(Clone, Copy, Debug)]
pub struct Product<T> {
    /// Index of the input rows.
    pub x: usize,
    /// Index of the weight.
    pub weight: usize,
    /// Bias added to every row, [out].
    pub bias: Option<T>,
    /// Tensor added to the result, with its shape.
    pub residual: Option<T>,
}

impl<T> Product<T> {
    /// x Wᵀ of the rows and the weight with these indices.
    pub fn new(x: usize, weight: usize) -> Self {
        Self { x, weight, bias: None, residual: None }
    }
}

/// Products that may share their rows and their weights; see [`linear_list`].
pub struct LinearList {
    /// Input rows, each [.., in].
    pub x: Vec<Tensor>,
    /// Weights, each [out, in]; they may be packed.
    pub weights: Vec<Tensor>,
    /// What is multiplied with what.
    pub products: Vec<Product<Tensor>>,
}

/// Gradients of [`LinearList`]. Those of residuals are `gradients` themselves.
pub struct LinearListBackward {
    /// Input rows, each [.., in].
    pub x: Vec<Tensor>,
    /// Weights, each [out, in].
    pub weights: Vec<Tensor>,
    /// What was multiplied with what; residuals are not read.
    pub products: Vec<Product<Tensor>>,
    /// Gradient of each product.
    pub gradients: Vec<Tensor>,
    /// Which gradients are computed.
    pub needs: LinearListNeeds,
    /// What the gradient of each x is added to, if anything.
    pub dx: Vec<Option<Tensor>>,
}

/// Which gradients of a [`LinearList`] are computed.
#[derive(Clone, Debug)]
pub struct LinearListNeeds {
    /// For each of the input rows.
    pub x: Vec<bool>,
    /// For each weight.
    pub weights: Vec<bool>,
    /// For the bias of each product.
    pub biases: Vec<bool>,
}

/// Gradients of a [`LinearList`]; `None` where none was asked for.
#[derive(Clone, Debug)]
pub struct LinearListGradients {
    /// One for each of the input rows: `dx` with the gradient added.
    pub x: Vec<Option<Tensor>>,
    /// One for each weight.
    pub weights: Vec<Option<Tensor>>,
    /// One for each product.
    pub biases: Vec<Option<Tensor>>,
}

/// Validated dimensions of a product.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Number of rows of x.
    pub rows: usize,
    /// Width of x.
    pub inner: usize,
    /// Width of the result.
    pub outer: usize,
}

impl Sizes {
    /// Shape of the result, given that of x.
    pub fn output_shape(&self, x: &[usize]) -> Vec<usize> {
        let mut shape = x.to_vec();
        shape.pop();
        shape.push(self.outer);
        shape
    }
}

impl Op for LinearList {
    const NAME: &'static str = "linear";
    /// Those of each product.
    type Sizes = Vec<Sizes>;
    type Output = Vec<Tensor>;

    fn inputs(&self) -> Vec<&Tensor> {
        let added = self.products.iter().flat_map(|product| [&product.bias, &product.residual]);
        self.x.iter().chain(added.flatten()).collect()
    }
    fn weights(&self) -> Vec<&Tensor> {
        self.weights.iter().collect()
    }
    fn check(&self) -> Result<Vec<Sizes>> {
        self.products.iter().map(|product| check(&self.x, &self.weights, product)).collect()
    }
}

impl Op for LinearListBackward {
    const NAME: &'static str = "linear_backward";
    /// Those of each product.
    type Sizes = Vec<Sizes>;
    type Output = LinearListGradients;

    fn inputs(&self) -> Vec<&Tensor> {
        let all = self.x.iter().chain(&self.weights).chain(&self.gradients);
        all.chain(self.dx.iter().flatten()).collect()
    }
    fn check(&self) -> Result<Vec<Sizes>> {
        let Self { x, weights, products, gradients, needs, dx } = self;
        expect_lengths(Self::NAME, products.len(), &[gradients.len(), needs.biases.len()])?;
        expect_lengths(Self::NAME, x.len(), &[needs.x.len(), dx.len()])?;
        expect_lengths(Self::NAME, weights.len(), &[needs.weights.len()])?;
        for (x, dx) in x.iter().zip(dx) {
            if let Some(dx) = dx {
                expect_shape(Self::NAME, "dx", dx.shape(), x.shape(), "the shape of x")?;
            }
        }
        let one = |(product, gradient): (&Product<Tensor>, &Tensor)| {
            let sizes = check(x, weights, product)?;
            let expected = sizes.output_shape(x[product.x].shape());
            expect_shape(Self::NAME, "gradient", gradient.shape(), &expected, "[.., out]")?;
            Ok(sizes)
        };
        products.iter().zip(gradients).map(one).collect()
    }
}

/// Validates one product of a list.
fn check(x: &[Tensor], weights: &[Tensor], product: &Product<Tensor>) -> Result<Sizes> {
    let (Some(x), Some(weight)) = (x.get(product.x), weights.get(product.weight)) else {
        return bad_value("linear", "a product names rows or a weight that the list does not have");
    };
    let (x, weight) = (x.shape(), weight.shape());
    let &[outer, inner] = weight else {
        return bad_shape("linear", "weight", weight, "two dimensions [out, in]");
    };
    let Some((&width, rows)) = x.split_last() else {
        return bad_shape("linear", "x", x, format!("[.., {inner}]"));
    };
    if width != inner {
        return bad_shape("linear", "x", x, format!("[.., {inner}] (the weight's second dimension)"));
    }
    let sizes = Sizes { rows: rows.iter().product(), inner, outer };
    if let Some(bias) = &product.bias {
        expect_shape("linear", "bias", bias.shape(), &[outer], "out")?;
    }
    if let Some(residual) = &product.residual {
        expect_shape("linear", "residual", residual.shape(), &sizes.output_shape(x), "[.., out]")?;
    }
    Ok(sizes)
}

impl Tensor {
    /// x Wᵀ. W may be packed if nothing is recorded.
    pub fn linear(&self, weight: &Tensor) -> Result<Tensor> {
        Ok(linear_list(&[self], &[weight], &[Product::new(0, 0)])?.remove(0))
    }

    /// x Wᵀ + bias.
    pub fn linear_bias(&self, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let product = Product { bias: Some(bias), ..Product::new(0, 0) };
        Ok(linear_list(&[self], &[weight], &[product])?.remove(0))
    }

    /// x Wᵀ for several weights W, as one operation in both directions.
    pub fn linear_each<const N: usize>(&self, weights: [&Tensor; N]) -> Result<[Tensor; N]> {
        let products: [Product<&Tensor>; N] = std::array::from_fn(|i| Product::new(0, i));
        let Ok(outputs) = linear_list(&[self], &weights, &products)?.try_into() else {
            unreachable!("one for each weight")
        };
        Ok(outputs)
    }
}

/// x Wᵀ (+ bias) (+ residual) for a list of products, as one operation in both directions. Each result is bit-identical
/// to that of a separate product to which the residual is then added. Weights may be packed if nothing is recorded.
pub fn linear_list(x: &[&Tensor], weights: &[&Tensor], products: &[Product<&Tensor>]) -> Result<Vec<Tensor>> {
    let biases = products.iter().filter_map(|product| product.bias);
    let residuals = products.iter().filter_map(|product| product.residual);
    let inputs: Vec<&Tensor> = x.iter().chain(weights).copied().chain(biases).chain(residuals).collect();
    if records(&inputs)
        && records(&inputs)
        && let Some(packed) = weights.iter().find(|weight| !weight.is_plain())
    {
        return no_gradient(LinearList::NAME, packed.dtype());
    }
    let (x, weights) = (owned(x), owned(weights));
    let mut products: Vec<Product<Tensor>> = products
        .iter()
        .map(|p| Product { x: p.x, weight: p.weight, bias: p.bias.cloned(), residual: p.residual.cloned() })
        .collect();
    if !records(&inputs) {
        return LinearList { x, weights, products }.run();
    }
    let y = LinearList { x: x.clone(), weights: weights.clone(), products: products.clone() }.run()?;
    // The backward pass needs to know which products have a residual, but not the residual.
    let residuals: Vec<bool> = products.iter_mut().map(|product| product.residual.take().is_some()).collect();
    Ok(record(&inputs, y, move |tape, gradients| {
        // A product whose result received no gradient contributes nothing.
        let used: Vec<usize> = (0..products.len()).filter(|&i| gradients[i].is_some()).collect();
        let needed = |tensor: &Tensor| tensor.is_recorded();
        let needs = LinearListNeeds {
            x: x.iter().map(needed).collect(),
            weights: weights.iter().map(needed).collect(),
            biases: used.iter().map(|&i| products[i].bias.as_ref().is_some_and(needed)).collect(),
        };
        let dx = x.iter().map(|x| tape.take_gradient(x)).collect();
        let terms = used.iter().map(|&i| products[i].clone()).collect();
        let dy = gradients.iter().flatten().cloned().collect();
        let found = LinearListBackward { x, weights, products: terms, gradients: dy, needs, dx }.run()?;
        let mut biases = vec![None; products.len()];
        used.into_iter().zip(found.biases).for_each(|(i, bias)| biases[i] = bias);
        let biases = products.iter().zip(biases).filter(|(product, _)| product.bias.is_some());
        let residuals = residuals.into_iter().zip(gradients).filter(|(residual, _)| *residual);
        let mut result = found.x;
        result.extend(found.weights);
        result.extend(biases.map(|(_, gradient)| gradient));
        result.extend(residuals.map(|(_, gradient)| gradient));
        Ok(result)
    }))
}

/// Gradients of a list from a function that computes those of x, weight and bias for one product, as far as they are
/// needed. It goes from the last to the first: the order in which a tape would process separate products.
pub(crate) fn backward_each(
    products: &[Product<Tensor>],
    needs: &LinearListNeeds,
    dx: Vec<Option<Tensor>>,
    one: impl Fn(usize, [bool; 3]) -> [Option<Tensor>; 3],
) -> Result<LinearListGradients> {
    let (weights, biases) = (vec![None; needs.weights.len()], vec![None; products.len()]);
    let mut found = LinearListGradients { x: dx, weights, biases };
    for (i, product) in products.iter().enumerate().rev() {
        let [x, weight, bias] = one(i, [needs.x[product.x], needs.weights[product.weight], needs.biases[i]]);
        add_gradient(&mut found.x[product.x], x)?;
        add_gradient(&mut found.weights[product.weight], weight)?;
        found.biases[i] = bias;
    }
    Ok(found)
}

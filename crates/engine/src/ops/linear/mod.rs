//! Linear layer: product with a weight matrix.
//!
//! ```text
//! y = x Wᵀ + b        x [.., in]   W [out, in]   b [out] or None   y [.., out]
//! dx = dy W,   dW = dyᵀ x,   db = Σ dy
//!
//! several at once:   y_i = x_i W_iᵀ (+ b_i) (+ r_i)           r_i of y_i's shape
//! dx = Σ dy_i W_i over the products of x,   dW = Σ dy_iᵀ x_i over those with W,   dr_i = dy_i
//! ```
//! W may be packed in reduced precision ([`Engine::pack`]); then the layer is not differentiable.

mod dots;
pub(crate) mod fast;
pub(crate) mod reference;
mod source;

use crate::engine::{Engine, WeightRef};
use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::tape::{Tape, Var};
use crate::weight::Weight;

/// Inputs of [`Tape::linear`].
#[derive(Clone, Copy, Debug)]
pub struct Linear<T, W = T> {
    /// Input rows, [.., in].
    pub x: T,
    /// Weights, [out, in]: a tensor, or for inference a [`Weight`] that may be packed.
    pub weight: W,
    /// Bias added to every row, [out].
    pub bias: Option<T>,
}

/// Inputs of [`Tape::linear_list`]: products that may share their rows and their weights.
#[derive(Clone, Copy, Debug)]
pub struct LinearList<'a, T, W = T> {
    /// Input rows, each [.., in].
    pub x: &'a [T],
    /// Weights, each [out, in]: tensors, or for inference [`Weight`]s that may be packed.
    pub weights: &'a [W],
    /// What is multiplied with what.
    pub products: &'a [Product<T>],
}

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

/// Gradients of [`Tape::linear_list`] beside those of the input rows; `None` where none was asked for.
#[derive(Clone, Debug)]
pub struct LinearListGradients<T> {
    /// One for each weight.
    pub weights: Vec<Option<T>>,
    /// One for each product.
    pub biases: Vec<Option<T>>,
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

/// Validated dimensions of a call.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub rows: usize,
    pub inner: usize,
    pub outer: usize,
}

pub(crate) fn check(x: &[usize], weight: &[usize], bias: Option<&[usize]>) -> Result<Sizes> {
    let &[outer, inner] = weight else {
        return bad_shape("linear", "weight", weight, "two dimensions [out, in]");
    };
    let Some((&width, rows)) = x.split_last() else {
        return bad_shape("linear", "x", x, format!("[.., {inner}]"));
    };
    if width != inner {
        return bad_shape("linear", "x", x, format!("[.., {inner}] (the weight's second dimension)"));
    }
    if let Some(bias) = bias {
        expect_shape("linear", "bias", bias, &[outer], "out")?;
    }
    Ok(Sizes { rows: rows.iter().product(), inner, outer })
}

/// Validates one product of a list, given its shapes.
pub(crate) fn check_product(
    x: Option<&[usize]>,
    weight: Option<&[usize]>,
    bias: Option<&[usize]>,
    residual: Option<&[usize]>,
) -> Result<Sizes> {
    let (Some(x), Some(weight)) = (x, weight) else {
        return bad_value("linear", "a product names rows or a weight that the list does not have");
    };
    let sizes = check(x, weight, bias)?;
    if let Some(residual) = residual {
        expect_shape("linear", "residual", residual, &output_shape(x, sizes), "[.., out]")?;
    }
    Ok(sizes)
}

/// Shape of the result.
pub(crate) fn output_shape(x: &[usize], sizes: Sizes) -> Vec<usize> {
    let mut shape = x.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = sizes.outer;
    }
    shape
}

impl<'e, E: Engine> Tape<'e, E> {
    /// Computes x Wᵀ for several weights W, as one operation in both directions. A recording tape rejects packed
    /// weights.
    pub fn linear_each<const N: usize>(
        &self,
        x: &Var<E::Tensor>,
        weights: [Weight<&Var<E::Tensor>, &E::Packed>; N],
    ) -> Result<[Var<E::Tensor>; N]> {
        let products: [Product<&Var<E::Tensor>>; N] = std::array::from_fn(|i| Product::new(0, i));
        let outputs = self.linear_list(LinearList { x: &[x], weights: &weights, products: &products })?;
        let Ok(outputs) = outputs.try_into() else { unreachable!("one for each weight") };
        Ok(outputs)
    }

    /// Computes several products, as one operation in both directions. A recording tape rejects packed weights.
    pub fn linear_list(
        &self,
        input: LinearList<'_, &Var<E::Tensor>, Weight<&Var<E::Tensor>, &E::Packed>>,
    ) -> Result<Vec<Var<E::Tensor>>> {
        let LinearList { x, weights, products } = input;
        let values: Vec<WeightRef<'_, E>> = weights.iter().map(|weight| weight.map(Var::value)).collect();
        self.refuse_packed("linear", &values)?;
        let rows: Vec<&E::Tensor> = x.iter().map(|x| x.value()).collect();
        let own = values_of(products);
        let outputs = self.engine().linear_list(LinearList { x: &rows, weights: &values, products: &own })?;
        let mut inputs: Vec<&Var<E::Tensor>> = x.to_vec();
        inputs.extend(weights.iter().filter_map(|weight| weight.full().copied()));
        inputs.extend(products.iter().filter_map(|product| product.bias));
        inputs.extend(products.iter().filter_map(|product| product.residual));
        if self.is_constant(&inputs) {
            return Ok(outputs.into_iter().map(|y| self.constant(y)).collect());
        }
        let needs = LinearListNeeds {
            x: x.iter().map(|x| self.records(&[x])).collect(),
            weights: weights.iter().map(|w| w.full().is_some_and(|w| self.records(&[w]))).collect(),
            biases: products.iter().map(|p| p.bias.is_some_and(|bias| self.records(&[bias]))).collect(),
        };
        let x: Vec<Var<E::Tensor>> = x.iter().map(|&x| x.clone()).collect();
        let weights: Vec<E::Tensor> =
            weights.iter().filter_map(|weight| Some((*weight.full()?).value().clone())).collect();
        let products: Vec<Product<Var<E::Tensor>>> = products.iter().map(Product::cloned).collect();
        Ok(self.record(&inputs, outputs, move |tape, gradients| {
            // A product whose result received no gradient contributes nothing.
            let used: Vec<usize> = (0..products.len()).filter(|&i| gradients[i].is_some()).collect();
            let dy: Vec<&E::Tensor> = gradients.iter().flatten().collect();
            let refs: Vec<Product<&Var<E::Tensor>>> = used.iter().map(|&i| products[i].as_ref()).collect();
            let needs = LinearListNeeds { biases: used.iter().map(|&i| needs.biases[i]).collect(), ..needs };
            let mut dx: Vec<Option<E::Tensor>> = std::iter::zip(&x, &needs.x)
                .map(|(x, &needed)| if needed { tape.take_gradient(x) } else { None })
                .collect();
            let rows: Vec<&E::Tensor> = x.iter().map(Var::value).collect();
            let list = LinearList {
                x: &rows,
                weights: &weights.iter().collect::<Vec<_>>(),
                products: &values_of(&refs),
            };
            let found = tape.engine().linear_list_backward(list, &dy, &needs, &mut dx)?;
            let mut result = dx;
            result.extend(found.weights);
            let mut biases = found.biases.into_iter();
            for (product, gradient) in products.iter().zip(&gradients) {
                let bias = if gradient.is_some() { biases.next().flatten() } else { None };
                if product.bias.is_some() {
                    result.push(bias);
                }
            }
            let with_residual =
                products.iter().zip(gradients).filter(|(product, _)| product.residual.is_some());
            result.extend(with_residual.map(|(_, gradient)| gradient));
            Ok(result)
        }))
    }

    /// Computes y = x Wᵀ (+ bias). W is a variable, or a [`Weight`] that may be packed; a recording tape rejects
    /// packed weights.
    pub fn linear<'a>(
        &self,
        input: Linear<&'a Var<E::Tensor>, impl Into<Weight<&'a Var<E::Tensor>, &'a E::Packed>>>,
    ) -> Result<Var<E::Tensor>> {
        let Linear { x, weight, bias } = input;
        let weight = match weight.into() {
            Weight::Full(weight) => weight,
            Weight::Packed(packed) => {
                let weight = Weight::Packed(packed);
                self.refuse_packed("linear", &[weight])?;
                let input = Linear { x: x.value(), weight, bias: bias.map(Var::value) };
                return Ok(self.constant(self.engine().linear(input)?));
            }
        };
        let values = Linear { x: x.value(), weight: weight.value(), bias: bias.map(Var::value) };
        let all = [x, weight, bias.unwrap_or(x)];
        let inputs = &all[..2 + usize::from(bias.is_some())];
        let y = self.engine().linear(values)?;
        if self.is_constant(inputs) {
            return Ok(self.constant(y));
        }
        let needs = [self.records(&[x]), self.records(&[weight]), bias.is_some_and(|b| self.records(&[b]))];
        let (x, weight, bias) = (values.x.clone(), values.weight.clone(), values.bias.cloned());
        Ok(self.record_one(inputs, y, move |tape, dy| {
            let input = Linear { x: &x, weight: &weight, bias: bias.as_ref() };
            Ok(tape.engine().linear_backward(input, &dy, needs)?.into())
        }))
    }
}

impl<T> Product<T> {
    /// The same product with borrowed tensors.
    fn as_ref(&self) -> Product<&T> {
        let Self { x, weight, bias, residual } = self;
        Product { x: *x, weight: *weight, bias: bias.as_ref(), residual: residual.as_ref() }
    }
}

impl<T: Clone> Product<&T> {
    fn cloned(&self) -> Product<T> {
        let Self { x, weight, bias, residual } = *self;
        Product { x, weight, bias: bias.cloned(), residual: residual.cloned() }
    }
}

/// The same products with the tensors of their variables.
fn values_of<'a, T>(products: &[Product<&'a Var<T>>]) -> Vec<Product<&'a T>> {
    let value = |&Product { x, weight, bias, residual }: &Product<&'a Var<T>>| Product {
        x,
        weight,
        bias: bias.map(Var::value),
        residual: residual.map(Var::value),
    };
    products.iter().map(value).collect()
}

//! Linear layer: product with a weight matrix.
//!
//! ```text
//! y = x Wᵀ + b        x [.., in]   W [out, in]   b [out] or None   y [.., out]
//! dx = dy W,   dW = dyᵀ x,   db = Σ dy
//! ```
//! W may be packed in reduced precision ([`Engine::pack`]); then the layer is not differentiable.

mod dots;
pub(crate) mod fast;
pub(crate) mod reference;
mod source;

use crate::engine::Engine;
use crate::error::{Result, bad_shape, expect_shape};
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
        let values = weights.map(|weight| weight.map(Var::value));
        self.refuse_packed("linear", &values)?;
        let outputs = self.engine().linear_each(x.value(), &values)?;
        let mut inputs = vec![x];
        inputs.extend(weights.iter().filter_map(|weight| weight.full().copied()));
        let outputs: Vec<Var<E::Tensor>> = if self.is_constant(&inputs) {
            outputs.into_iter().map(|y| self.constant(y)).collect()
        } else {
            let needs_x = self.records(&[x]);
            let needs: Vec<bool> = inputs[1..].iter().map(|weight| self.records(&[weight])).collect();
            let all: Vec<Var<E::Tensor>> = inputs.iter().map(|&input| input.clone()).collect();
            self.record(&inputs, outputs, move |tape, gradients| {
                let (x, weights) = (&all[0], &all[1..]);
                // A weight whose output received no gradient contributes nothing.
                let (mut used, mut dy, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
                for (i, gradient) in gradients.iter().enumerate() {
                    let Some(gradient) = gradient else { continue };
                    used.push(weights[i].value());
                    dy.push(gradient);
                    wanted.push(needs[i]);
                }
                let mut dx = if needs_x { tape.take_gradient(x) } else { None };
                let engine = tape.engine();
                let found = engine.linear_each_backward(x.value(), &used, &dy, needs_x, &wanted, &mut dx)?;
                let mut found = found.into_iter();
                let mut result = vec![dx];
                for gradient in &gradients {
                    result.push(if gradient.is_some() { found.next().flatten() } else { None });
                }
                Ok(result)
            })
        };
        let Ok(outputs) = outputs.try_into() else { unreachable!("one for each weight") };
        Ok(outputs)
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

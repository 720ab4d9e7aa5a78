//! A product with a weight matrix.
//!
//! ```text
//! y = x Wᵀ + b        x [.., in]   W [out, in]   b [out] or none   y [.., out]
//! dx = dy W,   dW = dyᵀ x,   db = Σ dy
//! ```
//! W may be in fewer bits ([`Engine::quantize`]); then there are no gradients.

mod dots;
pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::{Result, bad_shape, expect_shape};
use crate::tape::{Tape, Var};

/// Inputs of [`Tape::linear`].
#[derive(Clone, Copy, Debug)]
pub struct Linear<T> {
    /// Rows to multiply, [.., in].
    pub x: T,
    /// Weights, [out, in].
    pub weight: T,
    /// Added to every row, [out].
    pub bias: Option<T>,
}

/// Sizes of a call, once they are known to fit.
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

/// The shape of the result.
pub(crate) fn output_shape(x: &[usize], sizes: Sizes) -> Vec<usize> {
    let mut shape = x.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = sizes.outer;
    }
    shape
}

impl<'e, E: Engine> Tape<'e, E> {
    /// x Wᵀ for each of several W.
    pub fn linear_each<const N: usize>(
        &self,
        x: &Var<E::Tensor>,
        weights: [&Var<E::Tensor>; N],
    ) -> Result<[Var<E::Tensor>; N]> {
        let outputs: Vec<Var<E::Tensor>> = if self.is_constant(&[x]) && self.is_constant(&weights) {
            let outputs = self.engine().linear_each(x.value(), &weights.map(Var::value))?;
            outputs.into_iter().map(|y| self.constant(y)).collect()
        } else {
            let each = weights.into_iter().map(|weight| self.linear(Linear { x, weight, bias: None }));
            each.collect::<Result<_>>()?
        };
        let Ok(outputs) = outputs.try_into() else { unreachable!("one for each weight") };
        Ok(outputs)
    }

    /// y = x Wᵀ (+ bias).
    pub fn linear(&self, input: Linear<&Var<E::Tensor>>) -> Result<Var<E::Tensor>> {
        let values =
            Linear { x: input.x.value(), weight: input.weight.value(), bias: input.bias.map(Var::value) };
        let all = [input.x, input.weight, input.bias.unwrap_or(input.x)];
        let inputs = &all[..2 + usize::from(input.bias.is_some())];
        self.refuse_gradient("linear", values.weight, inputs)?;
        let y = self.engine().linear(values)?;
        if self.is_constant(inputs) {
            return Ok(self.constant(y));
        }
        let needs = [
            self.records(&[input.x]),
            self.records(&[input.weight]),
            input.bias.is_some_and(|b| self.records(&[b])),
        ];
        let (x, weight, bias) = (values.x.clone(), values.weight.clone(), values.bias.cloned());
        Ok(self.record_one(inputs, y, move |tape, dy| {
            let input = Linear { x: &x, weight: &weight, bias: bias.as_ref() };
            Ok(tape.engine().linear_backward(input, &dy, needs)?.into())
        }))
    }
}

//! Output layer and cross-entropy loss in one operation, so that the logits of all tokens never exist at once.
//!
//! ```text
//! L = x Wᵀ,   nll_t = ln Σ_v exp(L_tv) − L_t,target          x [.., D]   W [V, D]   one target per row of x
//! loss = Σ nll_t / n                                         over the tokens that have a target
//! dL = (softmax(L) − onehot(target)) / n,   dx = dL W,   dW = dLᵀ x
//! ```
//!
//! n is the given normaliser or, without one, the number of tokens that have a target ([`IGNORE`] marks those
//! without). If no token has a target, the loss and all gradients are 0. The gradients depend on later layers only
//! through a scalar factor, so the forward pass computes them while it has the logits, and the backward pass scales
//! them.

pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::tape::{Tape, Var};
use crate::weight::Weight;

/// Target value that marks a token without a target.
pub const IGNORE: u32 = u32::MAX;

/// Inputs of [`Tape::linear_cross_entropy`].
#[derive(Clone, Copy, Debug)]
pub struct LinearCrossEntropy<T, W = T> {
    /// Outputs of the last layer, [.., D].
    pub x: T,
    /// Weights of the output layer, [V, D]: a tensor, or for inference a [`Weight`] that may be packed.
    pub weight: W,
}

/// Result of [`Engine::linear_cross_entropy`].
#[derive(Clone, Debug)]
pub struct CrossEntropy<T> {
    /// Loss, a scalar.
    pub loss: T,
    /// Gradients of the loss with respect to x and the weights, if requested.
    pub gradients: [Option<T>; 2],
}

/// Result of [`Engine::token_losses`], one entry per token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLosses {
    /// Negative log-probability of the target; 0 for a token without a target.
    pub nll: Vec<f32>,
    /// Most probable target (the first one in case of a tie); [`IGNORE`] for a token without a target.
    pub greedy: Vec<u32>,
}

/// Validated call.
pub(crate) struct Call {
    pub width: usize,
    pub vocabulary: usize,
    /// Rows of x that have a target.
    pub counted: Vec<usize>,
}

pub(crate) fn check(operation: &'static str, x: &[usize], weight: &[usize], targets: &[u32]) -> Result<Call> {
    let &[vocabulary, width] = weight else {
        return bad_shape(operation, "weight", weight, "two dimensions [V, D]");
    };
    let Some((&last, rows)) = x.split_last() else {
        return bad_shape(operation, "x", x, format!("[.., {width}]"));
    };
    if last != width {
        return bad_shape(operation, "x", x, format!("[.., {width}] (the weight's second dimension)"));
    }
    let rows: usize = rows.iter().product();
    if targets.len() != rows {
        return bad_value(operation, format!("got {} targets, expected {rows} (rows of x)", targets.len()));
    }
    let bad = targets.iter().position(|&t| t != IGNORE && t as usize >= vocabulary);
    if let Some(at) = bad {
        let message = format!(
            "target {} at position {at} is out of range for a vocabulary of {vocabulary} ids",
            targets[at]
        );
        return bad_value(operation, message);
    }
    let counted = (0..rows).filter(|&row| targets[row] != IGNORE).collect();
    Ok(Call { width, vocabulary, counted })
}

/// Loss scale 1 / n.
pub(crate) fn factor(call: &Call, normaliser: Option<f64>) -> Result<f64> {
    match normaliser {
        Some(n) if n.is_finite() && n > 0.0 => Ok(1.0 / n),
        Some(n) => {
            bad_value("linear_cross_entropy", format!("the normaliser is {n}; it must be above 0 and finite"))
        }
        None => Ok(1.0 / (call.counted.len().max(1) as f64)),
    }
}

/// Rejects an upstream gradient that is not a scalar.
pub(crate) fn check_gradient(gradient: &[usize]) -> Result<()> {
    expect_shape("linear_cross_entropy", "gradient", gradient, &[], "a scalar")
}

impl<'e, E: Engine> Tape<'e, E> {
    /// Σ nll / normaliser over the tokens that have a target; the normaliser defaults to their number. A recording
    /// tape rejects a packed weight.
    pub fn linear_cross_entropy<'a>(
        &self,
        input: LinearCrossEntropy<&'a Var<E::Tensor>, impl Into<Weight<&'a Var<E::Tensor>, &'a E::Packed>>>,
        targets: &[u32],
        normaliser: Option<f64>,
    ) -> Result<Var<E::Tensor>> {
        let (x, weight) = (input.x, input.weight.into());
        let values = LinearCrossEntropy { x: x.value(), weight: weight.map(Var::value) };
        self.refuse_packed("linear_cross_entropy", &[values.weight])?;
        let mut inputs = vec![x];
        inputs.extend(weight.full());
        let needs = [self.records(&[x]), self.records(&inputs[1..])];
        let CrossEntropy { loss, gradients } =
            self.engine().linear_cross_entropy(values, targets, normaliser, needs)?;
        Ok(self.record_one(&inputs, loss, move |tape, gradient| {
            Ok(tape.engine().linear_cross_entropy_backward(gradients, &gradient)?.into())
        }))
    }
}

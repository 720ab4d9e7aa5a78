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

use crate::error::{Result, bad_shape, bad_value, expect_shape, no_gradient};
use crate::op::Op;
use crate::tape::{record_one, records};
use crate::tensor::Tensor;

/// Target value that marks a token without a target.
pub const IGNORE: u32 = u32::MAX;

/// Loss and, because they depend on later layers only through a factor, its gradients; see
/// [`Tensor::linear_cross_entropy`].
pub struct LinearCrossEntropy {
    /// Outputs of the last layer, [.., D].
    pub x: Tensor,
    /// Weights of the output layer, [V, D]; they may be packed if no gradient is needed.
    pub weight: Tensor,
    /// Target of each row of x, or [`IGNORE`].
    pub targets: Vec<u32>,
    /// What the sum is divided by; `None` means the number of targets.
    pub normaliser: Option<f64>,
    /// Whether the gradients of x and of the weights are computed.
    pub needs: [bool; 2],
}

/// Result of [`LinearCrossEntropy`].
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// Loss, a scalar.
    pub loss: Tensor,
    /// Gradients of the loss with respect to x and the weights, if requested.
    pub gradients: [Option<Tensor>; 2],
}

/// The gradients of [`CrossEntropy`], multiplied by that of the loss.
pub struct LinearCrossEntropyBackward {
    /// Gradients that the forward pass computed.
    pub kept: [Option<Tensor>; 2],
    /// Gradient of the loss, a scalar.
    pub gradient: Tensor,
}

/// Loss and most probable target of each token; see [`Tensor::token_losses`].
pub struct TokenLossesOf {
    /// Outputs of the last layer, [.., D].
    pub x: Tensor,
    /// Weights of the output layer, [V, D]; they may be packed.
    pub weight: Tensor,
    /// Target of each row of x, or [`IGNORE`].
    pub targets: Vec<u32>,
}

/// Result of [`Tensor::token_losses`], one entry per token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLosses {
    /// Negative log-probability of the target; 0 for a token without a target.
    pub nll: Vec<f32>,
    /// Most probable target (the first one in case of a tie); [`IGNORE`] for a token without a target.
    pub greedy: Vec<u32>,
}

/// Validated call.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Width of x, D.
    pub width: usize,
    /// Number of ids, V.
    pub vocabulary: usize,
    /// Rows of x that have a target.
    pub counted: Vec<usize>,
}

impl Op for LinearCrossEntropy {
    const NAME: &'static str = "linear_cross_entropy";
    /// And the scale of the loss, 1 / n.
    type Sizes = (Sizes, f64);
    type Output = CrossEntropy;

    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn weights(&self) -> Vec<&Tensor> {
        vec![&self.weight]
    }
    fn check(&self) -> Result<(Sizes, f64)> {
        let sizes = check(Self::NAME, self.x.shape(), self.weight.shape(), &self.targets)?;
        let n = self.normaliser.unwrap_or(sizes.counted.len().max(1) as f64);
        if !n.is_finite() || n <= 0.0 {
            return bad_value(Self::NAME, format!("the normaliser is {n}; it must be above 0 and finite"));
        }
        if self.needs.contains(&true) && !self.weight.is_plain() {
            return no_gradient(Self::NAME, self.weight.dtype());
        }
        Ok((sizes, 1.0 / n))
    }
}

impl Op for LinearCrossEntropyBackward {
    const NAME: &'static str = "linear_cross_entropy_backward";
    type Sizes = ();
    type Output = [Option<Tensor>; 2];

    fn inputs(&self) -> Vec<&Tensor> {
        self.kept.iter().flatten().chain([&self.gradient]).collect()
    }
    fn check(&self) -> Result<()> {
        expect_shape(Self::NAME, "gradient", self.gradient.shape(), &[], "a scalar")
    }
}

impl Op for TokenLossesOf {
    const NAME: &'static str = "token_losses";
    type Sizes = Sizes;
    type Output = TokenLosses;

    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn weights(&self) -> Vec<&Tensor> {
        vec![&self.weight]
    }
    fn check(&self) -> Result<Sizes> {
        check(Self::NAME, self.x.shape(), self.weight.shape(), &self.targets)
    }
}

fn check(operation: &'static str, x: &[usize], weight: &[usize], targets: &[u32]) -> Result<Sizes> {
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
    Ok(Sizes { width, vocabulary, counted })
}

impl Tensor {
    /// Σ nll / normaliser of softmax(x Wᵀ) over the tokens that have a target; the normaliser defaults to their number.
    /// W may be packed if nothing is recorded.
    pub fn linear_cross_entropy(
        &self,
        weight: &Tensor,
        targets: &[u32],
        normaliser: Option<f64>,
    ) -> Result<Tensor> {
        let needs = [records(&[self]), records(&[weight])];
        let (x, targets) = (self.clone(), targets.to_vec());
        let op = LinearCrossEntropy { x, weight: weight.clone(), targets, normaliser, needs };
        let CrossEntropy { loss, gradients: kept } = op.run()?;
        Ok(record_one(&[self, weight], loss, move |gradient| {
            Ok(LinearCrossEntropyBackward { kept, gradient }.run()?.into())
        }))
    }

    /// Loss and most probable target of each token, for evaluation. It is not recorded.
    pub fn token_losses(&self, weight: &Tensor, targets: &[u32]) -> Result<TokenLosses> {
        TokenLossesOf { x: self.clone(), weight: weight.clone(), targets: targets.to_vec() }.run()
    }
}

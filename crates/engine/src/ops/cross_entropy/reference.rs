//! Reference implementation of the cross-entropy loss: a direct transcription of the equations.

use super::{
    CrossEntropy, IGNORE, LinearCrossEntropy, LinearCrossEntropyBackward, Sizes, TokenLosses, TokenLossesOf,
};
use crate::array::Array;
use crate::error::Result;
use crate::ops::pack;
use crate::reference::Reference;
use crate::tensor::Tensor;

/// Logits of one row.
fn logits(sizes: &Sizes, x: &[f64], weight: &[f64], row: usize) -> Vec<f64> {
    let x = &x[row * sizes.width..][..sizes.width];
    let dot = |v: usize| x.iter().zip(&weight[v * sizes.width..]).map(|(a, b)| a * b).sum();
    (0..sizes.vocabulary).map(dot).collect()
}

/// ln Σ exp.
fn log_sum(logits: &[f64]) -> f64 {
    let top = logits.iter().fold(f64::NEG_INFINITY, |m, &v| m.max(v));
    logits.iter().map(|v| (v - top).exp()).sum::<f64>().ln() + top
}

fn of(like: &Tensor, data: Vec<f64>) -> Tensor {
    like.like(Array::detached(data, like.shape()))
}

pub(crate) fn forward(
    _: &Reference,
    op: LinearCrossEntropy,
    (sizes, factor): (Sizes, f64),
) -> Result<CrossEntropy> {
    let (x, w) = (op.x.f64().data(), pack::numbers(&op.weight).data());
    let mut loss = 0.0;
    let mut dx = vec![0.0; x.len()];
    let mut dw = vec![0.0; w.len()];
    for &row in &sizes.counted {
        let target = op.targets[row] as usize;
        let logits = logits(&sizes, x, w, row);
        let total = log_sum(&logits);
        loss += total - logits[target];
        for v in 0..sizes.vocabulary {
            let hit = if v == target { 1.0 } else { 0.0 };
            let d = ((logits[v] - total).exp() - hit) * factor;
            for i in 0..sizes.width {
                dx[row * sizes.width + i] += d * w[v * sizes.width + i];
                dw[v * sizes.width + i] += d * x[row * sizes.width + i];
            }
        }
    }
    let gradients = [op.needs[0].then(|| of(&op.x, dx)), op.needs[1].then(|| of(&op.weight, dw))];
    Ok(CrossEntropy { loss: op.x.like(Array::detached(vec![loss * factor], &[])), gradients })
}

pub(crate) fn backward(_: &Reference, op: LinearCrossEntropyBackward, (): ()) -> Result<[Option<Tensor>; 2]> {
    let factor = op.gradient.f64().data()[0];
    Ok(op.kept.map(|kept| kept.map(|t| of(&t, t.f64().data().iter().map(|v| v * factor).collect()))))
}

pub(crate) fn token_losses(_: &Reference, op: TokenLossesOf, sizes: Sizes) -> Result<TokenLosses> {
    let count = op.targets.len();
    let mut result = TokenLosses { nll: vec![0.0; count], greedy: vec![IGNORE; count] };
    for &row in &sizes.counted {
        let logits = logits(&sizes, op.x.f64().data(), pack::numbers(&op.weight).data(), row);
        result.nll[row] = (log_sum(&logits) - logits[op.targets[row] as usize]) as f32;
        let best = (0..logits.len()).fold(0, |best, v| if logits[v] > logits[best] { v } else { best });
        result.greedy[row] = best as u32;
    }
    Ok(result)
}

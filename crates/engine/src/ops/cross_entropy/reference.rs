//! Reference implementation of the cross-entropy loss: a direct transcription of the equations.

use super::{Call, CrossEntropy, IGNORE, LinearCrossEntropy, TokenLosses, check, check_gradient, factor};
use crate::error::Result;
use crate::array::{Array, Real};

/// Logits of one row.
fn logits<R: Real>(call: &Call, x: &[R], weight: &[R], row: usize) -> Vec<R> {
    let x = &x[row * call.width..][..call.width];
    let dot = |v: usize| x.iter().zip(&weight[v * call.width..]).map(|(&a, &b)| a * b).sum();
    (0..call.vocabulary).map(dot).collect()
}

/// ln Σ exp.
fn log_sum<R: Real>(logits: &[R]) -> R {
    let top = logits.iter().fold(R::neg_infinity(), |m, &v| m.max(v));
    logits.iter().map(|&v| (v - top).exp()).sum::<R>().ln() + top
}

pub(crate) fn forward<R: Real>(
    input: LinearCrossEntropy<&Array<R>>,
    targets: &[u32],
    normaliser: Option<f64>,
    needs: [bool; 2],
) -> Result<CrossEntropy<Array<R>>> {
    let call = check("linear_cross_entropy", input.x.shape(), input.weight.shape(), targets)?;
    let factor = R::of(factor(&call, normaliser)?);
    let (x, w) = (input.x.data(), input.weight.data());
    let mut loss = R::zero();
    let mut dx = vec![R::zero(); x.len()];
    let mut dw = vec![R::zero(); w.len()];
    for &row in &call.counted {
        let target = targets[row] as usize;
        let logits = logits(&call, x, w, row);
        let total = log_sum(&logits);
        loss += total - logits[target];
        for v in 0..call.vocabulary {
            let hit = if v == target { R::one() } else { R::zero() };
            let d = ((logits[v] - total).exp() - hit) * factor;
            for i in 0..call.width {
                dx[row * call.width + i] += d * w[v * call.width + i];
                dw[v * call.width + i] += d * x[row * call.width + i];
            }
        }
    }
    let gradients = [
        needs[0].then(|| Array::detached(dx, input.x.shape())),
        needs[1].then(|| Array::detached(dw, input.weight.shape())),
    ];
    Ok(CrossEntropy { loss: Array::detached(vec![loss * factor], &[]), gradients })
}

pub(crate) fn backward<R: Real>(
    kept: [Option<Array<R>>; 2],
    gradient: &Array<R>,
) -> Result<[Option<Array<R>>; 2]> {
    check_gradient(gradient.shape())?;
    let factor = gradient.data()[0];
    let scale = |t: Array<R>| Array::detached(t.data().iter().map(|&v| v * factor).collect(), t.shape());
    Ok(kept.map(|t| t.map(scale)))
}

pub(crate) fn token_losses<R: Real>(
    x: &Array<R>,
    weight: &Array<R>,
    targets: &[u32],
) -> Result<TokenLosses> {
    let call = check("token_losses", x.shape(), weight.shape(), targets)?;
    let mut result = TokenLosses { nll: vec![0.0; targets.len()], greedy: vec![IGNORE; targets.len()] };
    for &row in &call.counted {
        let logits = logits(&call, x.data(), weight.data(), row);
        result.nll[row] = (log_sum(&logits) - logits[targets[row] as usize]).as_f64() as f32;
        let best = (0..logits.len()).fold(0, |best, v| if logits[v] > logits[best] { v } else { best });
        result.greedy[row] = best as u32;
    }
    Ok(result)
}

//! Reference implementation of attention: a direct transcription of the equations, one query at a time.

use super::{Attention, Sizes, check};
use crate::error::{Result, expect_shape};
use crate::array::{Array, Real};

fn shapes<R: Real>(input: Attention<&Array<R>>) -> Attention<&[usize]> {
    Attention { query: input.query.shape(), key: input.key.shape(), value: input.value.shape() }
}

fn dot<R: Real>(a: &[R], b: &[R]) -> R {
    a.iter().zip(b).map(|(&a, &b)| a * b).sum()
}

/// Attention weights P_i of the keys visible to query `i`.
fn probabilities<R: Real>(input: Attention<&Array<R>>, z: Sizes, b: usize, h: usize, i: usize) -> Vec<R> {
    let q = row(input.query, z.queries, z.heads, b, i, h);
    let scores: Vec<R> = (0..=z.offset() + i)
        .map(|j| dot(q, row(input.key, z.keys, z.heads, b, j, h)) * R::of(z.scale()))
        .collect();
    let largest = scores.iter().fold(R::neg_infinity(), |m, &s| m.max(s));
    let sum: R = scores.iter().map(|&s| (s - largest).exp()).sum();
    scores.iter().map(|&s| (s - largest).exp() / sum).collect()
}

/// Head `h` of token `t` of batch entry `b` of x [B, T, H·width].
fn row<R: Real>(x: &Array<R>, tokens: usize, heads: usize, b: usize, t: usize, h: usize) -> &[R] {
    let width = x.width() / heads;
    &x.data()[((b * tokens + t) * heads + h) * width..][..width]
}

pub(crate) fn forward<R: Real>(input: Attention<&Array<R>>, heads: usize) -> Result<Array<R>> {
    let z = check(shapes(input), heads)?;
    let mut out = vec![R::zero(); z.output().iter().product()];
    for (at, o) in out.chunks_exact_mut(z.dv).enumerate() {
        let (b, i, h) = (at / heads / z.queries, at / heads % z.queries, at % heads);
        for (j, p) in probabilities(input, z, b, h, i).into_iter().enumerate() {
            let v = row(input.value, z.keys, heads, b, j, h);
            o.iter_mut().zip(v).for_each(|(o, &v)| *o += p * v);
        }
    }
    Ok(Array::detached(out, &z.output()))
}

pub(crate) fn backward<R: Real>(
    input: Attention<&Array<R>>,
    heads: usize,
    gradient: &Array<R>,
) -> Result<Attention<Array<R>>> {
    let z = check(shapes(input), heads)?;
    expect_shape("attention", "gradient", gradient.shape(), &z.output(), "[B, Tq, H·e]")?;
    let scale = R::of(z.scale());
    let mut dq = vec![R::zero(); input.query.len()];
    let mut dk = vec![R::zero(); input.key.len()];
    let mut dv = vec![R::zero(); input.value.len()];
    for (at, dq) in dq.chunks_exact_mut(z.dk).enumerate() {
        let (b, i, h) = (at / heads / z.queries, at / heads % z.queries, at % heads);
        let q = row(input.query, z.queries, heads, b, i, h);
        let d_out = row(gradient, z.queries, heads, b, i, h);
        let p = probabilities(input, z, b, h, i);
        let dp: Vec<R> = (0..p.len()).map(|j| dot(d_out, row(input.value, z.keys, heads, b, j, h))).collect();
        // Σ_j P_ij dP_ij = dO_i · O_i
        let d = dot(&p, &dp);
        for j in 0..p.len() {
            let ds = p[j] * (dp[j] - d) * scale;
            let k = row(input.key, z.keys, heads, b, j, h);
            let at = (b * z.keys + j) * heads + h;
            for c in 0..z.dk {
                dq[c] += ds * k[c];
                dk[at * z.dk + c] += ds * q[c];
            }
            for c in 0..z.dv {
                dv[at * z.dv + c] += p[j] * d_out[c];
            }
        }
    }
    Ok(Attention {
        query: Array::detached(dq, input.query.shape()),
        key: Array::detached(dk, input.key.shape()),
        value: Array::detached(dv, input.value.shape()),
    })
}

//! Reference implementation of attention: a direct transcription of the equations, one query at a time.

use std::ops::Range;

use super::{Attention, AttentionBackward, AttentionBlocks, AttentionForward, KeyValues, Sizes};
use crate::array::Array;
use crate::error::Result;
use crate::reference::Reference;
use crate::tensor::Tensor;

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| a * b).sum()
}

/// The keys visible to query `i`.
fn visible(z: Sizes, i: usize) -> Range<usize> {
    let position = z.offset() + i;
    z.first_key(position)..position + 1
}

/// Attention weights P_i of the keys visible to query `i`.
fn probabilities(input: Attention<&Array<f64>>, z: Sizes, b: usize, h: usize, i: usize) -> Vec<f64> {
    let q = row(input.query, z.queries, z.heads, b, i, h);
    let score = |j| dot(q, row(input.key, z.keys, z.kv_heads, b, j, z.kv_head(h))) * z.scale();
    let scores: Vec<f64> = visible(z, i).map(score).collect();
    let largest = scores.iter().fold(f64::NEG_INFINITY, |m, &s| m.max(s));
    let sum: f64 = scores.iter().map(|&s| (s - largest).exp()).sum();
    scores.iter().map(|&s| (s - largest).exp() / sum).collect()
}

/// Head `h` of token `t` of batch entry `b` of x [B, T, H·width].
fn row(x: &Array<f64>, tokens: usize, heads: usize, b: usize, t: usize, h: usize) -> &[f64] {
    let width = x.width() / heads;
    &x.data()[((b * tokens + t) * heads + h) * width..][..width]
}

pub(crate) fn forward(_: &Reference, op: AttentionForward, z: Sizes) -> Result<(Tensor, Vec<Tensor>)> {
    let output = attend(op.input.as_ref().map(Tensor::f64), z);
    Ok((op.input.query.like(output), Vec::new()))
}

pub(crate) fn forward_blocks(_: &Reference, op: AttentionBlocks, z: Sizes) -> Result<Tensor> {
    let join = |part: fn(&KeyValues<Tensor>) -> &Tensor, width: usize| {
        let data: Vec<f64> = op.blocks.iter().flat_map(|block| part(block).f64().data()).copied().collect();
        Array::detached(data, &[1, z.keys, z.kv_heads * width])
    };
    let (key, value) = (join(|block| &block.key, z.dk), join(|block| &block.value, z.dv));
    let input = Attention { query: op.query.f64(), key: &key, value: &value };
    Ok(op.query.like(attend(input, z)))
}

fn attend(input: Attention<&Array<f64>>, z: Sizes) -> Array<f64> {
    let heads = z.heads;
    let mut out = vec![0.0; z.output().iter().product()];
    for (at, o) in out.chunks_exact_mut(z.dv).enumerate() {
        let (b, i, h) = (at / heads / z.queries, at / heads % z.queries, at % heads);
        for (j, p) in visible(z, i).zip(probabilities(input, z, b, h, i)) {
            let v = row(input.value, z.keys, z.kv_heads, b, j, z.kv_head(h));
            o.iter_mut().zip(v).for_each(|(o, &v)| *o += p * v);
        }
    }
    Array::detached(out, &z.output())
}

pub(crate) fn backward(_: &Reference, op: AttentionBackward, z: Sizes) -> Result<Attention<Tensor>> {
    let (input, heads, gradient) = (op.input.as_ref().map(Tensor::f64), z.heads, op.gradient.f64());
    let scale = z.scale();
    let mut dq = vec![0.0; input.query.len()];
    let mut dk = vec![0.0; input.key.len()];
    let mut dv = vec![0.0; input.value.len()];
    for (at, dq) in dq.chunks_exact_mut(z.dk).enumerate() {
        let (b, i, h) = (at / heads / z.queries, at / heads % z.queries, at % heads);
        let q = row(input.query, z.queries, heads, b, i, h);
        let d_out = row(gradient, z.queries, heads, b, i, h);
        let p = probabilities(input, z, b, h, i);
        let g = z.kv_head(h);
        let dp: Vec<f64> =
            visible(z, i).map(|j| dot(d_out, row(input.value, z.keys, z.kv_heads, b, j, g))).collect();
        // Σ_j P_ij dP_ij = dO_i · O_i
        let d = dot(&p, &dp);
        for (j, (p, dp)) in visible(z, i).zip(p.into_iter().zip(dp)) {
            let ds = p * (dp - d) * scale;
            let k = row(input.key, z.keys, z.kv_heads, b, j, g);
            let at = (b * z.keys + j) * z.kv_heads + g;
            for c in 0..z.dk {
                dq[c] += ds * k[c];
                dk[at * z.dk + c] += ds * q[c];
            }
            for c in 0..z.dv {
                dv[at * z.dv + c] += p * d_out[c];
            }
        }
    }
    let of = |like: &Tensor, data| like.like(Array::detached(data, like.shape()));
    let Attention { query, key, value } = &op.input;
    Ok(Attention { query: of(query, dq), key: of(key, dk), value: of(value, dv) })
}

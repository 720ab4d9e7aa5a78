//! Reference implementation of the anchor reader: a direct transcription of the equations, token by token.

use std::sync::Arc;

use super::{
    AnchorRead, AnchorReadOptions, Sizes, StoredStates, check, check_stored, check_weights, output_shape,
};
use crate::error::{Result, expect_shape};
use crate::ops::gated_delta::reference::{l2_norm, l2_norm_backward};
use crate::array::{Array, Real};

/// Anchors that a token reads with their weights, and the weight of the null entry.
struct Routing<R> {
    chosen: Vec<(usize, R)>,
    null: R,
}

/// Softmax over the selected anchors and the null, for one token and head.
fn route<R: Real, A>(
    sizes: &Sizes,
    input: &AnchorRead<&Array<R>, A>,
    options: &AnchorReadOptions,
    visible: &[usize],
    row: usize,
    head: usize,
) -> Routing<R> {
    let dr = sizes.routing_dim;
    let width = sizes.value_heads * dr;
    let rho = &input.routing_query.data()[row * width + head * dr..][..dr];
    let mut scores: Vec<(usize, R)> = visible
        .iter()
        .map(|&m| {
            let kappa = &input.routing_keys.data()[m * width + head * dr..][..dr];
            let dot = rho.iter().zip(kappa).map(|(&a, &b)| a * b).sum::<R>();
            (m, R::of(options.routing_scale) * dot)
        })
        .collect();
    if let Some(k) = options.top_k {
        // Highest score first; the newer anchor wins ties. NaN ranks highest, so that it is never dropped.
        let rank = |score: R| if score.is_nan() { R::infinity() } else { score };
        let order = |a: &(usize, R), b: &(usize, R)| rank(b.1).partial_cmp(&rank(a.1));
        scores.sort_by(|a, b| order(a, b).unwrap_or(std::cmp::Ordering::Equal).then(b.0.cmp(&a.0)));
        scores.truncate(k);
        scores.sort_by_key(|&(m, _)| m);
    }
    let null = input.null_score.map(|n| n.data()[row * sizes.value_heads + head]);
    let largest = scores.iter().map(|s| s.1).chain(null).fold(R::neg_infinity(), R::max);
    let null = null.map_or(R::zero(), |n| (n - largest).exp());
    let chosen: Vec<(usize, R)> = scores.into_iter().map(|(m, a)| (m, (a - largest).exp())).collect();
    let total = chosen.iter().map(|c| c.1).sum::<R>() + null;
    Routing { chosen: chosen.into_iter().map(|(m, e)| (m, e / total)).collect(), null: null / total }
}

/// Calls `f(row, visible)` for every token of the plan.
fn for_tokens(options: &AnchorReadOptions, mut f: impl FnMut(usize, &[usize])) {
    for segment in &options.plan.segments {
        let visible: Vec<usize> = (0..segment.visible.len()).map(|i| segment.visible.get(i)).collect();
        for row in segment.start..segment.start + segment.len {
            f(row, &visible);
        }
    }
}

/// Returns s q / |q|, q / |q| and 1 / |q|.
fn query<R: Real>(
    sizes: &Sizes,
    input: &AnchorRead<&Array<R>>,
    row: usize,
    head: usize,
) -> (Vec<R>, Vec<R>, R) {
    let dk = sizes.key_dim;
    let at = (row * sizes.key_heads + head / sizes.group()) * dk;
    let (unit, factor) = l2_norm(&input.query.data()[at..at + dk]);
    let scale = R::of(1.0 / (dk as f64).sqrt());
    (unit.iter().map(|&v| scale * v).collect(), unit, factor)
}

pub(crate) fn forward<R: Real>(
    input: AnchorRead<&Array<R>>,
    options: &AnchorReadOptions,
) -> Result<Array<R>> {
    let sizes = check(&input.map(Array::shape), options)?;
    let (dk, dv, heads) = (sizes.key_dim, sizes.value_dim, sizes.value_heads);
    let mut out = vec![R::zero(); sizes.rows * heads * dv];
    for_tokens(options, |row, visible| {
        for h in 0..heads {
            let (q, _, _) = query(&sizes, &input, row, h);
            for (m, weight) in route(&sizes, &input, options, visible, row, h).chosen {
                let state = &input.anchor_states.data()[(m * heads + h) * dk * dv..][..dk * dv];
                for j in 0..dv {
                    let read = (0..dk).map(|i| state[i * dv + j] * q[i]).sum::<R>();
                    out[(row * heads + h) * dv + j] += weight * read;
                }
            }
        }
    });
    Ok(Array::detached(out, &output_shape(input.query.shape(), &sizes)))
}

pub(crate) fn backward<R: Real>(
    input: AnchorRead<&Array<R>>,
    options: &AnchorReadOptions,
    output: &Array<R>,
    gradient: &Array<R>,
) -> Result<AnchorRead<Array<R>>> {
    let sizes = check(&input.map(Array::shape), options)?;
    let shape = output_shape(input.query.shape(), &sizes);
    expect_shape("anchor_read", "gradient", gradient.shape(), &shape, "[.., value_heads·d_v]")?;
    let (dk, dv, dr, heads) = (sizes.key_dim, sizes.value_dim, sizes.routing_dim, sizes.value_heads);
    let scale = R::of(1.0 / (dk as f64).sqrt());
    let routing_scale = R::of(options.routing_scale);
    let mut d = input.map(|t| vec![R::zero(); t.len()]);
    for_tokens(options, |row, visible| {
        for h in 0..heads {
            let (q, unit, factor) = query(&sizes, &input, row, h);
            let at = (row * heads + h) * dv;
            let (o, dout) = (&output.data()[at..at + dv], &gradient.data()[at..at + dv]);
            let delta = o.iter().zip(dout).map(|(&a, &b)| a * b).sum::<R>();
            let mut dq = vec![R::zero(); dk];
            let routing = route(&sizes, &input, options, visible, row, h);
            for (m, weight) in routing.chosen {
                let from = (m * heads + h) * dk * dv;
                let state = &input.anchor_states.data()[from..from + dk * dv];
                let mut along = R::zero();
                for i in 0..dk {
                    for j in 0..dv {
                        along += q[i] * state[i * dv + j] * dout[j];
                        dq[i] += weight * state[i * dv + j] * dout[j];
                        d.anchor_states[from + i * dv + j] += weight * q[i] * dout[j];
                    }
                }
                let dscore = routing_scale * weight * (along - delta);
                let (rho, kappa) = ((row * heads + h) * dr, (m * heads + h) * dr);
                for i in 0..dr {
                    d.routing_query[rho + i] += dscore * input.routing_keys.data()[kappa + i];
                    d.routing_keys[kappa + i] += dscore * input.routing_query.data()[rho + i];
                }
            }
            if let Some(null) = &mut d.null_score {
                null[row * heads + h] = -routing.null * delta;
            }
            let dunit: Vec<R> = dq.iter().map(|&v| scale * v).collect();
            let at = (row * sizes.key_heads + h / sizes.group()) * dk;
            l2_norm_backward(&unit, factor, &dunit, &mut d.query[at..at + dk]);
        }
    });
    let shapes = input.map(Array::shape);
    Ok(AnchorRead {
        query: Array::detached(d.query, shapes.query),
        routing_query: Array::detached(d.routing_query, shapes.routing_query),
        routing_keys: Array::detached(d.routing_keys, shapes.routing_keys),
        anchor_states: Array::detached(d.anchor_states, shapes.anchor_states),
        null_score: d.null_score.zip(shapes.null_score).map(|(v, s)| Array::detached(v, s)),
    })
}

/// Variant of [`forward`] for stored states, which it dequantises first.
pub(crate) fn forward_stored<R: Real>(
    input: AnchorRead<&Array<R>, &[Arc<StoredStates>]>,
    options: &AnchorReadOptions,
) -> Result<Array<R>> {
    let list = input.anchor_states;
    let [_, rest @ ..] = list.first().map_or([0; 4], |s| s.shape());
    let mut states = Vec::new();
    for stored in list {
        check_stored(stored.shape(), None, rest)?;
        states.extend(stored.to_f32()?.into_iter().map(|v| R::of(f64::from(v))));
    }
    let count = list.iter().map(|s| s.shape()[0]).sum();
    let states = Array::detached(states, &[count, rest[0], rest[1], rest[2]]);
    let AnchorRead { query, routing_query, routing_keys, null_score, .. } = input;
    forward(AnchorRead { query, routing_query, routing_keys, anchor_states: &states, null_score }, options)
}

/// Softmax weights π for every token, head and anchor, [rows, value_heads, N]; zero if not visible or not selected.
pub(crate) fn weights<R: Real>(
    input: AnchorRead<&Array<R>, [usize; 2]>,
    options: &AnchorReadOptions,
) -> Result<Array<R>> {
    let shapes = AnchorRead {
        query: input.query.shape(),
        routing_query: input.routing_query.shape(),
        routing_keys: input.routing_keys.shape(),
        anchor_states: input.anchor_states,
        null_score: input.null_score.map(Array::shape),
    };
    let sizes = check_weights(shapes, options)?;
    let mut out = vec![R::zero(); sizes.rows * sizes.value_heads * sizes.anchors];
    for_tokens(options, |row, visible| {
        for h in 0..sizes.value_heads {
            for (m, weight) in route(&sizes, &input, options, visible, row, h).chosen {
                out[(row * sizes.value_heads + h) * sizes.anchors + m] = weight;
            }
        }
    });
    Ok(Array::detached(out, &[sizes.rows, sizes.value_heads, sizes.anchors]))
}

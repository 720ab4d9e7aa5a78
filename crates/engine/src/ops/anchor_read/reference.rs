//! Reference implementation of the anchor reader: a direct transcription of the equations, token by token.

use super::{
    AnchorRead, AnchorReadBackward, AnchorReadForward, AnchorReadKept, AnchorReadOptions, AnchorReadStored,
    RoutingWeights, Sizes, stored,
};
use crate::array::Array;
use crate::error::Result;
use crate::ops::gated_delta::reference::{l2_norm, l2_norm_backward};
use crate::reference::Reference;
use crate::tensor::Tensor;

/// Anchors that a token reads with their weights, and the weight of the null entry.
struct Routing {
    chosen: Vec<(usize, f64)>,
    null: f64,
}

/// Softmax over the selected anchors and the null, for one token and head.
fn route<A>(
    sizes: &Sizes,
    input: &AnchorRead<&Array<f64>, A>,
    options: &AnchorReadOptions,
    visible: &[usize],
    row: usize,
    head: usize,
) -> Routing {
    let dr = sizes.routing_dim;
    let width = sizes.value_heads * dr;
    let rho = &input.routing_query.data()[row * width + head * dr..][..dr];
    let mut scores: Vec<(usize, f64)> = visible
        .iter()
        .map(|&m| {
            let kappa = &input.routing_keys.data()[m * width + head * dr..][..dr];
            let dot = rho.iter().zip(kappa).map(|(&a, &b)| a * b).sum::<f64>();
            (m, options.routing_scale * dot)
        })
        .collect();
    if let Some(k) = options.top_k {
        // Highest score first; the newer anchor wins ties. NaN ranks highest, so that it is never dropped.
        let rank = |score: f64| if score.is_nan() { f64::INFINITY } else { score };
        let order = |a: &(usize, f64), b: &(usize, f64)| rank(b.1).partial_cmp(&rank(a.1));
        scores.sort_by(|a, b| order(a, b).unwrap_or(std::cmp::Ordering::Equal).then(b.0.cmp(&a.0)));
        scores.truncate(k);
        scores.sort_by_key(|&(m, _)| m);
    }
    let null = input.null_score.map(|n| n.data()[row * sizes.value_heads + head]);
    let largest = scores.iter().map(|s| s.1).chain(null).fold(f64::NEG_INFINITY, f64::max);
    let null = null.map_or(0.0, |n| (n - largest).exp());
    let chosen: Vec<(usize, f64)> = scores.into_iter().map(|(m, a)| (m, (a - largest).exp())).collect();
    let total = chosen.iter().map(|c| c.1).sum::<f64>() + null;
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
fn query(sizes: &Sizes, query: &Array<f64>, row: usize, head: usize) -> (Vec<f64>, Vec<f64>, f64) {
    let dk = sizes.key_dim;
    let at = (row * sizes.key_heads + head / sizes.group()) * dk;
    let (unit, factor) = l2_norm(&query.data()[at..at + dk]);
    let scale = 1.0 / (dk as f64).sqrt();
    (unit.iter().map(|&v| scale * v).collect(), unit, factor)
}

pub(crate) fn forward(
    _: &Reference,
    op: AnchorReadForward,
    sizes: Sizes,
) -> Result<(Tensor, Option<AnchorReadKept<Tensor>>)> {
    let input = op.input.as_ref().map(Tensor::f64);
    Ok((op.input.query.like(read(sizes, input, input.anchor_states.data(), &op.options)), None))
}

/// Readouts from the states [N, value_heads, d_k, d_v].
fn read<A>(
    sizes: Sizes,
    input: AnchorRead<&Array<f64>, A>,
    states: &[f64],
    options: &AnchorReadOptions,
) -> Array<f64> {
    let (dk, dv, heads) = (sizes.key_dim, sizes.value_dim, sizes.value_heads);
    let mut out = vec![0.0; sizes.rows * heads * dv];
    for_tokens(options, |row, visible| {
        for h in 0..heads {
            let (q, _, _) = query(&sizes, input.query, row, h);
            for (m, weight) in route(&sizes, &input, options, visible, row, h).chosen {
                let state = &states[(m * heads + h) * dk * dv..][..dk * dv];
                for j in 0..dv {
                    let read = (0..dk).map(|i| state[i * dv + j] * q[i]).sum::<f64>();
                    out[(row * heads + h) * dv + j] += weight * read;
                }
            }
        }
    });
    Array::detached(out, &sizes.readout_shape(input.query.shape()))
}

pub(crate) fn backward(_: &Reference, op: AnchorReadBackward, sizes: Sizes) -> Result<AnchorRead<Tensor>> {
    let (input, options) = (op.input.as_ref().map(Tensor::f64), &op.options);
    let (output, gradient) = (op.readout.f64(), op.gradient.f64());
    let (dk, dv, dr, heads) = (sizes.key_dim, sizes.value_dim, sizes.routing_dim, sizes.value_heads);
    let scale = 1.0 / (dk as f64).sqrt();
    let routing_scale = options.routing_scale;
    let mut d = input.map(|t| vec![0.0; t.len()]);
    for_tokens(options, |row, visible| {
        for h in 0..heads {
            let (q, unit, factor) = query(&sizes, input.query, row, h);
            let at = (row * heads + h) * dv;
            let (o, dout) = (&output.data()[at..at + dv], &gradient.data()[at..at + dv]);
            let delta = o.iter().zip(dout).map(|(&a, &b)| a * b).sum::<f64>();
            let mut dq = vec![0.0; dk];
            let routing = route(&sizes, &input, options, visible, row, h);
            for (m, weight) in routing.chosen {
                let from = (m * heads + h) * dk * dv;
                let state = &input.anchor_states.data()[from..from + dk * dv];
                let mut along = 0.0;
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
            let dunit: Vec<f64> = dq.iter().map(|&v| scale * v).collect();
            let at = (row * sizes.key_heads + h / sizes.group()) * dk;
            l2_norm_backward(&unit, factor, &dunit, &mut d.query[at..at + dk]);
        }
    });
    let shapes = input.map(Array::shape);
    let d = AnchorRead {
        query: Array::detached(d.query, shapes.query),
        routing_query: Array::detached(d.routing_query, shapes.routing_query),
        routing_keys: Array::detached(d.routing_keys, shapes.routing_keys),
        anchor_states: Array::detached(d.anchor_states, shapes.anchor_states),
        null_score: d.null_score.zip(shapes.null_score).map(|(v, s)| Array::detached(v, s)),
    };
    Ok(d.map(|array| op.gradient.like(array)))
}

/// Variant of [`forward`] for stored states, which it dequantises first.
pub(crate) fn forward_stored(_: &Reference, op: AnchorReadStored, sizes: Sizes) -> Result<Tensor> {
    let list = &op.input.anchor_states;
    let one_each = (list.len() == sizes.anchors).then_some(1);
    let mut states = Vec::new();
    for tensor in &**list {
        sizes.check_stored(tensor.shape(), one_each)?;
        states.extend(stored::host(tensor)?.to_f32()?.into_iter().map(f64::from));
    }
    let input = op.input.as_ref().map_with(Tensor::f64, |_| ());
    Ok(op.input.query.like(read(sizes, input, &states, &op.options)))
}

pub(crate) fn weights(_: &Reference, op: RoutingWeights, sizes: Sizes) -> Result<Tensor> {
    let input = op.input.as_ref().map_with(Tensor::f64, |_| ());
    let mut out = vec![0.0; sizes.rows * sizes.value_heads * sizes.anchors];
    for_tokens(&op.options, |row, visible| {
        for h in 0..sizes.value_heads {
            for (m, weight) in route(&sizes, &input, &op.options, visible, row, h).chosen {
                out[(row * sizes.value_heads + h) * sizes.anchors + m] = weight;
            }
        }
    });
    Ok(op.input.query.like(Array::detached(out, &[sizes.rows, sizes.value_heads, sizes.anchors])))
}

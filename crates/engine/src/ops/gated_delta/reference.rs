//! Reference implementation of the gated delta rule: the recurrence token by token, and its reverse.

use super::{GatedDelta, GatedDeltaBackward, GatedDeltaForward, GatedDeltaOutput, L2_EPS, Sizes};
use crate::array::Array;
use crate::error::Result;
use crate::reference::Reference;
use crate::tensor::Tensor;

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Returns x / sqrt(Σx² + eps) and the factor 1 / sqrt(Σx² + eps).
pub(crate) fn l2_norm(x: &[f64]) -> (Vec<f64>, f64) {
    let r = 1.0 / (x.iter().map(|&v| v * v).sum::<f64>() + L2_EPS).sqrt();
    (x.iter().map(|&v| r * v).collect(), r)
}

/// Adds dx = r (dy − y <dy, y>), the gradient through the L2 norm, to `dx`.
pub(crate) fn l2_norm_backward(y: &[f64], r: f64, dy: &[f64], dx: &mut [f64]) {
    let along = y.iter().zip(dy).map(|(&y, &d)| y * d).sum::<f64>();
    for i in 0..y.len() {
        dx[i] += r * (dy[i] - y[i] * along);
    }
}

/// Inputs of one token for one head: normalised query and key, value, and gates.
struct Token {
    q: Vec<f64>,
    q_factor: f64,
    k: Vec<f64>,
    k_factor: f64,
    v: Vec<f64>,
    write_strength: f64,
    write_slope: f64,
    log_retention: f64,
    /// d log α / d retention_input
    retention_slope: f64,
}

fn token(
    sizes: &Sizes,
    input: &GatedDelta<&Array<f64>>,
    neg: bool,
    [b, t]: [usize; 2],
    head: usize,
) -> Token {
    let (dk, dv) = (sizes.key_dim, sizes.value_dim);
    let at = b * sizes.tokens + t;
    let of_head = |row: usize| (row * sizes.key_heads + sizes.key_head(head)) * dk;
    // The leading tokens may have no query.
    let (q, q_factor) = match t.checked_sub(sizes.silent()) {
        Some(t) => l2_norm(&input.query.data()[of_head(b * sizes.asking + t)..][..dk]),
        None => (Vec::new(), 0.0),
    };
    let (k, k_factor) = l2_norm(&input.key.data()[of_head(at)..][..dk]);
    let v = input.value.data()[(at * sizes.value_heads + head) * dv..][..dv].to_vec();
    let gate = at * sizes.value_heads + head;
    let double = if neg { 2.0 } else { 1.0 };
    let write = sigmoid(input.write_input.data()[gate]);
    let z = input.retention_input.data()[gate] + input.dt_bias.data()[head];
    let rate = -input.a_log.data()[head].exp();
    Token {
        q,
        q_factor,
        k,
        k_factor,
        v,
        write_strength: double * write,
        write_slope: double * write * (1.0 - write),
        log_retention: rate * softplus(z),
        retention_slope: rate * sigmoid(z),
    }
}

/// S ← α S + β k (v − α Sᵀk)ᵀ
fn update(state: &mut [f64], t: &Token) {
    let dv = t.v.len();
    let alpha = t.log_retention.exp();
    state.iter_mut().for_each(|s| *s *= alpha);
    for j in 0..dv {
        let held = (0..t.k.len()).map(|i| state[i * dv + j] * t.k[i]).sum::<f64>();
        let write = t.write_strength * (t.v[j] - held);
        for i in 0..t.k.len() {
            state[i * dv + j] += t.k[i] * write;
        }
    }
}

pub(crate) fn forward(
    _: &Reference,
    op: GatedDeltaForward,
    sizes: Sizes,
) -> Result<(GatedDeltaOutput<Tensor>, Vec<Tensor>)> {
    let (input, options) = (op.input.as_ref().map(Tensor::f64), &op.options);
    let (dv, heads) = (sizes.value_dim, sizes.value_heads);
    let scale = 1.0 / (sizes.key_dim as f64).sqrt();
    let mut readout = vec![0.0; sizes.readout_shape().iter().product()];
    let mut final_state = vec![0.0; sizes.final_shape().iter().product()];
    let mut boundary_states = vec![0.0; sizes.boundaries * heads * sizes.state()];
    let mut first = 0;
    for b in 0..sizes.batch {
        let boundaries = options.boundaries.get(b).map_or(&[][..], Vec::as_slice);
        for h in 0..heads {
            let mut state = initial(&input, &sizes, b, h);
            for t in 0..sizes.tokens {
                let token = token(&sizes, &input, options.allow_neg_eigval, [b, t], h);
                update(&mut state, &token);
                if let Some(t) = t.checked_sub(sizes.silent()) {
                    let at = b * sizes.asking + t;
                    for j in 0..dv {
                        let read = (0..sizes.key_dim).map(|i| state[i * dv + j] * token.q[i]).sum::<f64>();
                        readout[(at * heads + h) * dv + j] = scale * read;
                    }
                }
                if let Ok(m) = boundaries.binary_search(&(t + 1)) {
                    let to = ((first + m) * heads + h) * sizes.state();
                    boundary_states[to..to + sizes.state()].copy_from_slice(&state);
                }
            }
            if sizes.final_state {
                final_state[(b * heads + h) * sizes.state()..][..sizes.state()].copy_from_slice(&state);
            }
        }
        first += boundaries.len();
    }
    let output = GatedDeltaOutput {
        readout: Array::detached(readout, &sizes.readout_shape()),
        final_state: Array::detached(final_state, &sizes.final_shape()),
        boundary_states: Array::detached(boundary_states, &sizes.boundary_shape()),
    };
    Ok((output.map(|array| op.input.key.like(array)), Vec::new()))
}

fn initial(input: &GatedDelta<&Array<f64>>, sizes: &Sizes, b: usize, h: usize) -> Vec<f64> {
    let at = (b * sizes.value_heads + h) * sizes.state();
    input.initial_state.map_or(vec![0.0; sizes.state()], |s| s.data()[at..at + sizes.state()].to_vec())
}

pub(crate) fn backward(_: &Reference, op: GatedDeltaBackward, sizes: Sizes) -> Result<GatedDelta<Tensor>> {
    let (input, options) = (op.input.as_ref().map(Tensor::f64), &op.options);
    let gradient = op.gradient.as_ref().map(Tensor::f64);
    let (dk, dv, heads) = (sizes.key_dim, sizes.value_dim, sizes.value_heads);
    let scale = 1.0 / (dk as f64).sqrt();
    let mut d = input.map(|t| vec![0.0; t.len()]);
    let mut first = 0;
    for b in 0..sizes.batch {
        let boundaries = options.boundaries.get(b).map_or(&[][..], Vec::as_slice);
        for h in 0..heads {
            let tokens: Vec<Token> = (0..sizes.tokens)
                .map(|t| token(&sizes, &input, options.allow_neg_eigval, [b, t], h))
                .collect();
            let mut states = vec![initial(&input, &sizes, b, h)];
            for token in &tokens {
                let mut next = states[states.len() - 1].clone();
                update(&mut next, token);
                states.push(next);
            }
            let state_at = (b * heads + h) * sizes.state();
            let mut ds = gradient
                .final_state
                .map_or(vec![0.0; sizes.state()], |g| g.data()[state_at..state_at + sizes.state()].to_vec());
            for t in (0..sizes.tokens).rev() {
                let at = b * sizes.tokens + t;
                let token = &tokens[t];
                if let (Ok(m), Some(g)) = (boundaries.binary_search(&(t + 1)), gradient.boundary_states) {
                    let from = ((first + m) * heads + h) * sizes.state();
                    for (s, &g) in ds.iter_mut().zip(&g.data()[from..]) {
                        *s += g;
                    }
                }
                let (mut dq, mut dkey) = (vec![0.0; dk], vec![0.0; dk]);
                // o = s Sᵀq
                if let Some(g) = gradient.readout {
                    let g = &g.data()[(at * heads + h) * dv..][..dv];
                    for i in 0..dk {
                        for j in 0..dv {
                            dq[i] += scale * states[t + 1][i * dv + j] * g[j];
                            ds[i * dv + j] += scale * token.q[i] * g[j];
                        }
                    }
                }
                // S = D + β k eᵀ with D = α S₋, e = v − Dᵀk
                let alpha = token.log_retention.exp();
                let decayed: Vec<f64> = states[t].iter().map(|&s| alpha * s).collect();
                let mut dwrite = 0.0;
                for j in 0..dv {
                    let held = (0..dk).map(|i| decayed[i * dv + j] * token.k[i]).sum::<f64>();
                    let error = token.v[j] - held;
                    let along = (0..dk).map(|i| ds[i * dv + j] * token.k[i]).sum::<f64>();
                    dwrite += along * error;
                    let derror = token.write_strength * along;
                    d.value[(at * heads + h) * dv + j] += derror;
                    for i in 0..dk {
                        dkey[i] +=
                            token.write_strength * ds[i * dv + j] * error - decayed[i * dv + j] * derror;
                        ds[i * dv + j] -= token.k[i] * derror;
                    }
                }
                let dlog = alpha * ds.iter().zip(&states[t]).map(|(&a, &b)| a * b).sum::<f64>();
                ds.iter_mut().for_each(|s| *s *= alpha);
                let gate = at * heads + h;
                let dz = dlog * token.retention_slope;
                d.retention_input[gate] += dz;
                d.dt_bias[h] += dz;
                d.a_log[h] += dlog * token.log_retention;
                d.write_input[gate] += dwrite * token.write_slope;
                let key_at = (at * sizes.key_heads + sizes.key_head(h)) * dk;
                l2_norm_backward(&token.q, token.q_factor, &dq, &mut d.query[key_at..key_at + dk]);
                l2_norm_backward(&token.k, token.k_factor, &dkey, &mut d.key[key_at..key_at + dk]);
            }
            if let Some(initial) = &mut d.initial_state {
                initial[state_at..state_at + sizes.state()].copy_from_slice(&ds);
            }
        }
        first += boundaries.len();
    }
    let shapes = input.map(Array::shape);
    let d = GatedDelta {
        query: Array::detached(d.query, shapes.query),
        key: Array::detached(d.key, shapes.key),
        value: Array::detached(d.value, shapes.value),
        retention_input: Array::detached(d.retention_input, shapes.retention_input),
        write_input: Array::detached(d.write_input, shapes.write_input),
        a_log: Array::detached(d.a_log, shapes.a_log),
        dt_bias: Array::detached(d.dt_bias, shapes.dt_bias),
        initial_state: d.initial_state.map(|v| Array::detached(v, &sizes.state_shape())),
    };
    Ok(d.map(|array| op.input.key.like(array)))
}

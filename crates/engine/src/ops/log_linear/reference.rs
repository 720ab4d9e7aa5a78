//! Reference implementation: the recurrence token by token, and its derivative from the last token to the first.

use super::{LogLinear, LogLinearBackward, LogLinearForward, LogLinearOptions, LogLinearOutput, Sizes};
use crate::array::Array;
use crate::error::Result;
use crate::ops::gated_delta::reference::{l2_norm, l2_norm_backward, sigmoid, softplus};
use crate::reference::Reference;
use crate::tensor::Tensor;

/// Offsets of the inputs of one token of one value head.
struct Place {
    key: usize,
    value: usize,
    gate: usize,
    level: usize,
}

impl Sizes {
    fn place(&self, b: usize, h: usize, t: usize) -> Place {
        let n = &self.heads;
        let row = b * n.tokens + t;
        Place {
            key: (row * n.key_heads + n.key_head(h)) * n.key_dim,
            value: (row * n.value_heads + h) * n.value_dim,
            gate: row * n.value_heads + h,
            level: (row * n.value_heads + h) * self.scales,
        }
    }
}

/// Inputs of one token for one head: query, key, value, gates and level weights.
struct Token {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    q_factor: f64,
    k_factor: f64,
    log_alpha: f64,
    alpha: f64,
    beta: f64,
    lambda: Vec<f64>,
}

struct Head<'a> {
    input: LogLinear<&'a Array<f64>>,
    sizes: Sizes,
    beta_factor: f64,
    b: usize,
    h: usize,
}

impl Head<'_> {
    fn token(&self, t: usize) -> Token {
        let (n, i) = (&self.sizes, &self.input);
        let at = n.place(self.b, self.h, t);
        let (q, q_factor) = l2_norm(&i.query.data()[at.key..][..n.heads.key_dim]);
        let (k, k_factor) = l2_norm(&i.key.data()[at.key..][..n.heads.key_dim]);
        let z = i.retention_input.data()[at.gate] + i.dt_bias.data()[self.h];
        let log_alpha = -i.a_log.data()[self.h].exp() * softplus(z);
        let levels = i.level_input.data()[at.level..][..n.scales].iter();
        let scales = &i.level_scale.data()[self.h * n.scales..][..n.scales];
        Token {
            q,
            k,
            v: i.value.data()[at.value..][..n.heads.value_dim].to_vec(),
            q_factor,
            k_factor,
            log_alpha,
            alpha: log_alpha.exp(),
            beta: self.beta_factor * sigmoid(i.write_input.data()[at.gate]),
            lambda: levels.zip(scales).map(|(&w, &l)| softplus(l * w)).collect(),
        }
    }

    /// States before the first token, with space for all levels of the call, [level][d_k·d_v].
    fn start(&self, initial: Option<&Array<f64>>) -> Vec<Vec<f64>> {
        let n = &self.sizes;
        let size = n.heads.key_dim * n.heads.value_dim;
        let mut states = vec![vec![0.0; size]; n.levels[1]];
        if let Some(initial) = initial {
            let at = (self.b * n.heads.value_heads + self.h) * n.levels[0] * size;
            for (m, state) in states.iter_mut().take(n.levels[0]).enumerate() {
                state.copy_from_slice(&initial.data()[at + m * size..][..size]);
            }
        }
        states
    }

    /// Processes one token: decay and delta update of all levels, the new write, and the readout.
    fn step(&self, token: &Token, states: &mut [Vec<f64>], out: &mut [f64]) {
        let (dk, dv) = (self.sizes.heads.key_dim, self.sizes.heads.value_dim);
        for (m, s) in states.iter_mut().enumerate() {
            s.iter_mut().for_each(|v| *v *= token.alpha);
            let seen = if m == 0 { token.v.clone() } else { transposed_times(s, &token.k, dv) };
            let strength = if m == 0 { token.beta } else { -token.beta };
            for i in 0..dk {
                for j in 0..dv {
                    s[i * dv + j] += strength * token.k[i] * seen[j];
                }
            }
            let lambda = token.lambda[m.min(token.lambda.len() - 1)];
            for (o, r) in out.iter_mut().zip(transposed_times(s, &token.q, dv)) {
                *o += lambda * r;
            }
        }
    }
}

/// Computes Sᵀ x.
fn transposed_times(s: &[f64], x: &[f64], width: usize) -> Vec<f64> {
    (0..width).map(|j| x.iter().enumerate().map(|(i, &x)| s[i * width + j] * x).sum()).collect()
}

/// Computes S y.
fn times(s: &[f64], y: &[f64]) -> Vec<f64> {
    s.chunks_exact(y.len()).map(|row| dot(row, y)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| a * b).sum()
}

/// Merges all levels below the one that position `t` fills into it.
fn merge(t: usize, states: &mut [Vec<f64>]) {
    if t == 0 {
        return;
    }
    let z = t.trailing_zeros() as usize;
    for m in 0..=z {
        let low = std::mem::take(&mut states[m]);
        states[z + 1].iter_mut().zip(&low).for_each(|(s, &v)| *s += v);
        states[m] = vec![0.0; low.len()];
    }
}

fn heads<'a>(
    input: LogLinear<&'a Array<f64>>,
    sizes: Sizes,
    options: &LogLinearOptions,
) -> impl Iterator<Item = Head<'a>> {
    let beta_factor = if options.allow_neg_eigval { 2.0 } else { 1.0 };
    let pairs = (0..sizes.heads.batch).flat_map(move |b| (0..sizes.heads.value_heads).map(move |h| (b, h)));
    pairs.map(move |(b, h)| Head { input, sizes, beta_factor, b, h })
}

pub(crate) fn forward(_: &Reference, op: LogLinearForward, n: Sizes) -> Result<LogLinearOutput<Tensor>> {
    let (input, initial) = (op.input.each(Tensor::f64), op.initial.as_ref().map(Tensor::f64));
    let mut out = vec![0.0; input.value.len()];
    let mut last = Vec::new();
    for head in heads(input, n, &op.options) {
        let mut states = head.start(initial);
        for t in 0..n.heads.tokens {
            merge(n.position + t, &mut states);
            let at = n.place(head.b, head.h, t).value;
            head.step(&head.token(t), &mut states, &mut out[at..at + n.heads.value_dim]);
        }
        merge(n.position + n.heads.tokens, &mut states);
        last.extend(states.concat());
    }
    let like = |data, shape: &[usize]| op.input.value.like(Array::detached(data, shape));
    Ok(LogLinearOutput {
        readouts: like(out, input.value.shape()),
        state: op.options.want_state.then(|| like(last, &n.state_shape())),
        saved: None,
    })
}

pub(crate) fn backward(_: &Reference, op: LogLinearBackward, n: Sizes) -> Result<LogLinear<Tensor>> {
    let (input, initial) = (op.input.each(Tensor::f64), op.initial.as_ref().map(Tensor::f64));
    let gradient = op.gradient.f64();
    let mut d = input.each(|t| vec![0.0; t.len()]);
    for head in heads(input, n, &op.options) {
        let mut states = head.start(initial);
        let mut before = Vec::new();
        for t in 0..n.heads.tokens {
            merge(n.position + t, &mut states);
            before.push(states.clone());
            head.step(&head.token(t), &mut states, &mut vec![0.0; n.heads.value_dim]);
        }
        // Gradient of the states after token t.
        let mut ds = vec![vec![0.0; n.heads.key_dim * n.heads.value_dim]; n.levels[1]];
        for t in (0..n.heads.tokens).rev() {
            token_backward(&head, t, &before[t], gradient.data(), &mut ds, &mut d);
            if n.position + t > 0 {
                let z = (n.position + t).trailing_zeros() as usize;
                for m in 0..=z {
                    ds[m] = ds[z + 1].clone();
                }
            }
        }
    }
    let mut shapes = input.each(|t| t.shape()).into_array().into_iter();
    Ok(d.map(|v| op.gradient.like(Array::detached(v, shapes.next().unwrap_or(&[])))))
}

/// Backward step of one token. `before` holds the merged states before the token. `ds` is the gradient of the
/// states after it on entry, and of `before` on return.
fn token_backward(
    head: &Head<'_>,
    t: usize,
    before: &[Vec<f64>],
    gradient: &[f64],
    ds: &mut [Vec<f64>],
    d: &mut LogLinear<Vec<f64>>,
) {
    let (n, h) = (&head.sizes, head.h);
    let (dk, dv) = (n.heads.key_dim, n.heads.value_dim);
    let at = n.place(head.b, h, t);
    let x = head.token(t);
    let d_out = &gradient[at.value..][..dv];
    let mut after = before.to_vec();
    head.step(&x, &mut after, &mut vec![0.0; dv]);

    let (mut dq, mut d_key) = (vec![0.0; dk], vec![0.0; dk]);
    let (mut d_alpha, mut d_beta) = (0.0, 0.0);
    let mut d_lambda = vec![0.0; n.scales];
    for m in 0..ds.len() {
        // o += λ Sᵀ q
        let l = m.min(n.scales - 1);
        let read = times(&after[m], d_out);
        d_lambda[l] += dot(&read, &x.q);
        for i in 0..dk {
            dq[i] += x.lambda[l] * read[i];
            for j in 0..dv {
                ds[m][i * dv + j] += x.lambda[l] * x.q[i] * d_out[j];
            }
        }
        let back = transposed_times(&ds[m], &x.k, dv);
        if m == 0 {
            // S⁰ = β k vᵀ
            let forth = times(&ds[m], &x.v);
            d_beta += dot(&x.k, &forth);
            for i in 0..dk {
                d_key[i] += x.beta * forth[i];
            }
            for j in 0..dv {
                d.value[at.value + j] += x.beta * back[j];
            }
            ds[m].fill(0.0);
        } else {
            // A = α X,  u = Aᵀ k,  S = A − β k uᵀ;  du = −β dSᵀ k,  dA = dS + k duᵀ
            let a: Vec<f64> = before[m].iter().map(|&v| x.alpha * v).collect();
            let u = transposed_times(&a, &x.k, dv);
            let forth = times(&ds[m], &u);
            d_beta -= dot(&x.k, &forth);
            let du: Vec<f64> = back.iter().map(|&v| -x.beta * v).collect();
            let a_du = times(&a, &du);
            for i in 0..dk {
                d_key[i] += a_du[i] - x.beta * forth[i];
                for j in 0..dv {
                    ds[m][i * dv + j] += x.k[i] * du[j];
                }
            }
            d_alpha += dot(&ds[m], &before[m]);
            ds[m].iter_mut().for_each(|v| *v *= x.alpha);
        }
    }

    l2_norm_backward(&x.q, x.q_factor, &dq, &mut d.query[at.key..at.key + dk]);
    l2_norm_backward(&x.k, x.k_factor, &d_key, &mut d.key[at.key..at.key + dk]);
    let d_log_alpha = d_alpha * x.alpha;
    let z = head.input.retention_input.data()[at.gate] + head.input.dt_bias.data()[h];
    let dz = -d_log_alpha * head.input.a_log.data()[h].exp() * sigmoid(z);
    d.retention_input[at.gate] += dz;
    d.dt_bias[h] += dz;
    d.a_log[h] += d_log_alpha * x.log_alpha;
    d.write_input[at.gate] += d_beta * x.beta * sigmoid(-head.input.write_input.data()[at.gate]);
    for l in 0..n.scales {
        let (w, scale) =
            (head.input.level_input.data()[at.level + l], head.input.level_scale.data()[h * n.scales + l]);
        let dp = d_lambda[l] * sigmoid(scale * w);
        d.level_input[at.level + l] += dp * scale;
        d.level_scale[h * n.scales + l] += dp * w;
    }
}

//! Reference implementation: the recurrence token by token, and its derivative from the last token to the first.

use super::{LogLinear, LogLinearOptions, LogLinearOutput, Sizes, check, check_gradient};
use crate::error::Result;
use crate::array::{Array, Real};

/// Returns y = r x with r = 1 / sqrt(Σx² + 1e-6), and r.
fn l2_norm<R: Real>(x: &[R]) -> (Vec<R>, R) {
    let r = R::one() / (x.iter().map(|&v| v * v).sum::<R>() + R::of(1e-6)).sqrt();
    (x.iter().map(|&v| r * v).collect(), r)
}

fn sigmoid<R: Real>(x: R) -> R {
    R::one() / (R::one() + (-x).exp())
}

fn softplus<R: Real>(x: R) -> R {
    x.max(R::zero()) + (-x.abs()).exp().ln_1p()
}

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
struct Token<R> {
    q: Vec<R>,
    k: Vec<R>,
    v: Vec<R>,
    q_factor: R,
    k_factor: R,
    log_alpha: R,
    alpha: R,
    beta: R,
    lambda: Vec<R>,
}

struct Head<'a, R: Real> {
    input: LogLinear<&'a Array<R>>,
    sizes: Sizes,
    beta_factor: R,
    b: usize,
    h: usize,
}

impl<R: Real> Head<'_, R> {
    fn token(&self, t: usize) -> Token<R> {
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
    fn start(&self, initial: Option<&Array<R>>) -> Vec<Vec<R>> {
        let n = &self.sizes;
        let size = n.heads.key_dim * n.heads.value_dim;
        let mut states = vec![vec![R::zero(); size]; n.levels[1]];
        if let Some(initial) = initial {
            let at = (self.b * n.heads.value_heads + self.h) * n.levels[0] * size;
            for (m, state) in states.iter_mut().take(n.levels[0]).enumerate() {
                state.copy_from_slice(&initial.data()[at + m * size..][..size]);
            }
        }
        states
    }

    /// Processes one token: decay and delta update of all levels, the new write, and the readout.
    fn step(&self, token: &Token<R>, states: &mut [Vec<R>], out: &mut [R]) {
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
fn transposed_times<R: Real>(s: &[R], x: &[R], width: usize) -> Vec<R> {
    (0..width).map(|j| x.iter().enumerate().map(|(i, &x)| s[i * width + j] * x).sum()).collect()
}

/// Computes S y.
fn times<R: Real>(s: &[R], y: &[R]) -> Vec<R> {
    s.chunks_exact(y.len()).map(|row| dot(row, y)).collect()
}

fn dot<R: Real>(a: &[R], b: &[R]) -> R {
    a.iter().zip(b).map(|(&a, &b)| a * b).sum()
}

/// Merges all levels below the one that position `t` fills into it.
fn merge<R: Real>(t: usize, states: &mut [Vec<R>]) {
    if t == 0 {
        return;
    }
    let z = t.trailing_zeros() as usize;
    for m in 0..=z {
        let low = std::mem::take(&mut states[m]);
        states[z + 1].iter_mut().zip(&low).for_each(|(s, &v)| *s += v);
        states[m] = vec![R::zero(); low.len()];
    }
}

fn heads<'a, R: Real>(
    input: LogLinear<&'a Array<R>>,
    sizes: Sizes,
    options: &LogLinearOptions,
) -> impl Iterator<Item = Head<'a, R>> {
    let beta_factor = if options.allow_neg_eigval { R::of(2.0) } else { R::one() };
    let pairs = (0..sizes.heads.batch).flat_map(move |b| (0..sizes.heads.value_heads).map(move |h| (b, h)));
    pairs.map(move |(b, h)| Head { input, sizes, beta_factor, b, h })
}

pub(crate) fn forward<R: Real>(
    input: LogLinear<&Array<R>>,
    options: &LogLinearOptions,
    initial: Option<&Array<R>>,
) -> Result<LogLinearOutput<Array<R>>> {
    let n = check(input.each(|t| t.shape()), options, initial.map(Array::shape))?;
    let mut out = vec![R::zero(); input.value.len()];
    let mut last = Vec::new();
    for head in heads(input, n, options) {
        let mut states = head.start(initial);
        for t in 0..n.heads.tokens {
            merge(n.position + t, &mut states);
            let at = n.place(head.b, head.h, t).value;
            head.step(&head.token(t), &mut states, &mut out[at..at + n.heads.value_dim]);
        }
        merge(n.position + n.heads.tokens, &mut states);
        last.extend(states.concat());
    }
    let shape = [n.heads.batch, n.heads.value_heads, n.levels[1], n.heads.key_dim, n.heads.value_dim];
    Ok(LogLinearOutput {
        readouts: Array::detached(out, input.value.shape()),
        state: options.want_state.then(|| Array::detached(last, &shape)),
        saved: None,
    })
}

pub(crate) fn backward<R: Real>(
    input: LogLinear<&Array<R>>,
    options: &LogLinearOptions,
    initial: Option<&Array<R>>,
    gradient: &Array<R>,
) -> Result<LogLinear<Array<R>>> {
    let n = check(input.each(|t| t.shape()), options, initial.map(Array::shape))?;
    check_gradient(input.each(|t| t.shape()), gradient.shape())?;
    let mut d = input.each(|t| vec![R::zero(); t.len()]);
    for head in heads(input, n, options) {
        let mut states = head.start(initial);
        let mut before = Vec::new();
        for t in 0..n.heads.tokens {
            merge(n.position + t, &mut states);
            before.push(states.clone());
            head.step(&head.token(t), &mut states, &mut vec![R::zero(); n.heads.value_dim]);
        }
        // Gradient of the states after token t.
        let mut ds = vec![vec![R::zero(); n.heads.key_dim * n.heads.value_dim]; n.levels[1]];
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
    Ok(d.each(|v| Array::detached(v.clone(), shapes.next().unwrap_or(&[]))))
}

/// Backward step of one token. `before` holds the merged states before the token. `ds` is the gradient of the
/// states after it on entry, and of `before` on return.
fn token_backward<R: Real>(
    head: &Head<'_, R>,
    t: usize,
    before: &[Vec<R>],
    gradient: &[R],
    ds: &mut [Vec<R>],
    d: &mut LogLinear<Vec<R>>,
) {
    let (n, h) = (&head.sizes, head.h);
    let (dk, dv) = (n.heads.key_dim, n.heads.value_dim);
    let at = n.place(head.b, h, t);
    let x = head.token(t);
    let d_out = &gradient[at.value..][..dv];
    let mut after = before.to_vec();
    head.step(&x, &mut after, &mut vec![R::zero(); dv]);

    let (mut dq, mut d_key) = (vec![R::zero(); dk], vec![R::zero(); dk]);
    let (mut d_alpha, mut d_beta) = (R::zero(), R::zero());
    let mut d_lambda = vec![R::zero(); n.scales];
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
            ds[m].fill(R::zero());
        } else {
            // A = α X,  u = Aᵀ k,  S = A − β k uᵀ;  du = −β dSᵀ k,  dA = dS + k duᵀ
            let a: Vec<R> = before[m].iter().map(|&v| x.alpha * v).collect();
            let u = transposed_times(&a, &x.k, dv);
            let forth = times(&ds[m], &u);
            d_beta -= dot(&x.k, &forth);
            let du: Vec<R> = back.iter().map(|&v| -x.beta * v).collect();
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

    // y = r x:  dx = r (dy − y <dy, y>)
    let (qq, kk) = (dot(&dq, &x.q), dot(&d_key, &x.k));
    for i in 0..dk {
        d.query[at.key + i] += x.q_factor * (dq[i] - x.q[i] * qq);
        d.key[at.key + i] += x.k_factor * (d_key[i] - x.k[i] * kk);
    }
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

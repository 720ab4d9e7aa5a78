//! Reference implementation of AdamW: a direct transcription of the equations.

use super::{AdamW, Step, check};
use crate::error::Result;
use crate::array::{Array, Real};

pub(crate) fn step<R: Real>(state: AdamW<&mut Array<R>>, gradient: &Array<R>, step: &Step) -> Result<()> {
    let shapes = [state.parameter.shape(), state.first_moment.shape(), state.second_moment.shape()];
    check(shapes, gradient.shape(), step)?;
    let [c1, c2] = step.corrections();
    let [b1, b2] = step.betas;
    let (mut p, mut m, mut v) = (
        state.parameter.data().to_vec(),
        state.first_moment.data().to_vec(),
        state.second_moment.data().to_vec(),
    );
    for i in 0..p.len() {
        let g = R::of(step.clip) * gradient.data()[i];
        m[i] = R::of(b1) * m[i] + R::of(1.0 - b1) * g;
        v[i] = R::of(b2) * v[i] + R::of(1.0 - b2) * g * g;
        let direction = m[i] / R::of(c1) / ((v[i] / R::of(c2)).sqrt() + R::of(step.eps));
        p[i] = p[i]
            - R::of(step.learning_rate * step.weight_decay) * p[i]
            - R::of(step.learning_rate) * direction;
    }
    let shape = state.parameter.shape().to_vec();
    *state.parameter = Array::detached(p, &shape);
    *state.first_moment = Array::detached(m, &shape);
    *state.second_moment = Array::detached(v, &shape);
    Ok(())
}

pub(crate) fn squared_norm<R: Real>(x: &Array<R>) -> f64 {
    x.data().iter().map(|v| v.as_f64() * v.as_f64()).sum()
}

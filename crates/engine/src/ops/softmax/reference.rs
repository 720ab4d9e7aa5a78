//! Reference implementation of softmax: a direct transcription of the equations.

use super::check;
use crate::error::{Result, expect_shape};
use crate::array::{Array, Real};

pub(crate) fn forward<R: Real>(x: &Array<R>) -> Result<Array<R>> {
    let width = check(x.shape())?;
    let mut y = x.data().to_vec();
    for row in y.chunks_exact_mut(width.max(1)) {
        let max = row.iter().fold(R::neg_infinity(), |m, &v| if v > m { v } else { m });
        // Without a shift, a fully masked row is e^−inf = 0 everywhere.
        let shift = if max == R::neg_infinity() { R::zero() } else { max };
        row.iter_mut().for_each(|v| *v = (*v - shift).exp());
        let sum = row.iter().copied().sum::<R>();
        if sum != R::zero() {
            row.iter_mut().for_each(|v| *v /= sum);
        }
    }
    Ok(Array::detached(y, x.shape()))
}

pub(crate) fn backward<R: Real>(y: &Array<R>, gradient: &Array<R>) -> Result<Array<R>> {
    let width = check(y.shape())?.max(1);
    expect_shape("softmax", "gradient", gradient.shape(), y.shape(), "the shape of x")?;
    let mut dx = Vec::with_capacity(y.len());
    for (y, dy) in y.data().chunks_exact(width).zip(gradient.data().chunks_exact(width)) {
        let mean = y.iter().zip(dy).map(|(&y, &dy)| y * dy).sum::<R>();
        dx.extend(y.iter().zip(dy).map(|(&y, &dy)| y * (dy - mean)));
    }
    Ok(Array::detached(dx, y.shape()))
}

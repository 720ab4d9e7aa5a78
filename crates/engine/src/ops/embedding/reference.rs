//! Reference implementation of the embedding: a direct transcription of the equations.

use super::{Embedding, check, check_backward};
use crate::error::Result;
use crate::array::{Array, Real};

pub(crate) fn forward<R: Real>(input: Embedding<'_, &Array<R>>) -> Result<Array<R>> {
    let shape = check(input.table.shape(), input.ids, input.shape)?;
    let width = input.table.width();
    let rows = input.ids.iter().map(|&id| &input.table.data()[id as usize * width..][..width]);
    Ok(Array::detached(rows.flatten().copied().collect(), &shape))
}

pub(crate) fn backward<R: Real>(ids: &[u32], rows: usize, gradient: &Array<R>) -> Result<Array<R>> {
    let width = check_backward(ids, rows, gradient.shape())?;
    let mut sums = vec![R::zero(); rows * width];
    for (i, &id) in ids.iter().enumerate() {
        for j in 0..width {
            sums[id as usize * width + j] += gradient.data()[i * width + j];
        }
    }
    Ok(Array::detached(sums, &[rows, width]))
}

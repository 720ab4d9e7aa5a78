//! Reference implementation of the embedding: a direct transcription of the equations.

use super::{Embedding, EmbeddingBackward};
use crate::array::Array;
use crate::error::Result;
use crate::ops::pack::numbers;
use crate::reference::Reference;
use crate::tensor::Tensor;

pub(crate) fn forward(_: &Reference, op: Embedding, shape: Vec<usize>) -> Result<Tensor> {
    let table = numbers(&op.table);
    let rows = op.ids.iter().map(|&id| &table.data()[id as usize * table.width()..][..table.width()]);
    Ok(op.table.like(Array::detached(rows.flatten().copied().collect(), &shape)))
}

pub(crate) fn backward(_: &Reference, op: EmbeddingBackward, width: usize) -> Result<Tensor> {
    let mut sums = vec![0.0; op.rows * width];
    for (i, &id) in op.ids.iter().enumerate() {
        for j in 0..width {
            sums[id as usize * width + j] += op.gradient.f64().data()[i * width + j];
        }
    }
    Ok(op.gradient.like(Array::detached(sums, &[op.rows, width])))
}

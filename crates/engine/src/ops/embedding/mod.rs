//! Embedding: selects rows of a table by id.
//!
//! ```text
//! y[i..] = table[ids[i..]]        table [V, D]   ids of any shape, each below V   y [ids' shape, D]
//! dtable[v] = Σ_{i: ids[i] = v} dy[i]
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::array::element_count;
use crate::error::{Result, bad_shape, bad_value, no_gradient};
use crate::op::Op;
use crate::tape::record_one;
use crate::tensor::Tensor;

/// Rows of a table selected by ids.
pub struct Embedding {
    /// Table rows, [V, D]; they may be packed.
    pub table: Tensor,
    /// Ids of the rows to select, in row-major order.
    pub ids: Vec<u32>,
    /// Shape of `ids`.
    pub shape: Vec<usize>,
}

/// Gradient of [`Embedding`] with respect to its table.
pub struct EmbeddingBackward {
    /// Ids of the selected rows.
    pub ids: Vec<u32>,
    /// Rows V of the table.
    pub rows: usize,
    /// Gradient of the result, [ids' shape, D].
    pub gradient: Tensor,
}

/// Validates a call and returns the shape of the result.
fn check(table: &[usize], ids: &[u32], shape: &[usize]) -> Result<Vec<usize>> {
    let &[rows, width] = table else {
        return bad_shape("embedding", "table", table, "two dimensions [V, D]");
    };
    let count = element_count("embedding", shape)?;
    if count != ids.len() {
        return bad_value(
            "embedding",
            format!("got {} ids for shape {shape:?}, expected {count}", ids.len()),
        );
    }
    if let Some(at) = ids.iter().position(|&id| id as usize >= rows) {
        return bad_value(
            "embedding",
            format!("id {} at position {at} is out of range: the table has {rows} rows", ids[at]),
        );
    }
    let mut result = shape.to_vec();
    result.push(width);
    element_count("embedding", &result)?;
    Ok(result)
}

impl Op for Embedding {
    const NAME: &'static str = "embedding";
    /// Shape of the result.
    type Sizes = Vec<usize>;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        Vec::new()
    }
    fn weights(&self) -> Vec<&Tensor> {
        vec![&self.table]
    }
    fn check(&self) -> Result<Vec<usize>> {
        check(self.table.shape(), &self.ids, &self.shape)
    }
}

impl Op for EmbeddingBackward {
    const NAME: &'static str = "embedding_backward";
    /// Row width D.
    type Sizes = usize;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.gradient]
    }
    fn check(&self) -> Result<usize> {
        let gradient = self.gradient.shape();
        let Some((&width, shape)) = gradient.split_last() else {
            return bad_shape(Self::NAME, "gradient", gradient, "[ids' shape, D]");
        };
        element_count(Self::NAME, &[self.rows, width])?;
        check(&[self.rows, width], &self.ids, shape)?;
        Ok(width)
    }
}

impl Tensor {
    /// Rows of this table [V, D] selected by `ids`, which have shape `shape`. A packed table has no gradient.
    pub fn embedding(&self, ids: &[u32], shape: &[usize]) -> Result<Tensor> {
        if self.is_recorded() && !self.is_plain() {
            return no_gradient("embedding", self.dtype());
        }
        let y = Embedding { table: self.clone(), ids: ids.to_vec(), shape: shape.to_vec() }.run()?;
        let (ids, rows) = (ids.to_vec(), self.shape()[0]);
        Ok(record_one(&[self], y, move |gradient| {
            Ok(vec![Some(EmbeddingBackward { ids, rows, gradient }.run()?)])
        }))
    }
}

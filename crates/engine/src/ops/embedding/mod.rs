//! Embedding: selects rows of a table by id.
//!
//! ```text
//! y[i..] = table[ids[i..]]        table [V, D]   ids of any shape, each below V   y [ids' shape, D]
//! dtable[v] = Σ_{i: ids[i] = v} dy[i]
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::tape::{Tape, Var};
use crate::array::element_count;
use crate::weight::Weight;

/// Inputs of [`Tape::embedding`].
#[derive(Clone, Copy, Debug)]
pub struct Embedding<'a, T> {
    /// Table rows, [V, D]: a tensor, or for inference a [`Weight`] that may be packed.
    pub table: T,
    /// Ids of the rows to select, in row-major order.
    pub ids: &'a [u32],
    /// Shape of `ids`.
    pub shape: &'a [usize],
}

/// Validates a call and returns the shape of the result.
pub(crate) fn check(table: &[usize], ids: &[u32], shape: &[usize]) -> Result<Vec<usize>> {
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

/// Rejects gradients and ids that do not match a table of `rows` rows; returns the row width.
pub(crate) fn check_backward(ids: &[u32], rows: usize, gradient: &[usize]) -> Result<usize> {
    let Some((&width, shape)) = gradient.split_last() else {
        return bad_shape("embedding", "gradient", gradient, "[ids' shape, D]");
    };
    let result = check(&[rows, width], ids, shape)?;
    element_count("embedding", &[rows, width])?;
    expect_shape("embedding", "gradient", gradient, &result, "[ids' shape, D]")?;
    Ok(width)
}

impl<'e, E: Engine> Tape<'e, E> {
    /// Rows of a table selected by `ids`. The table is a variable, or a [`Weight`] that may be packed; a recording
    /// tape rejects packed tables.
    pub fn embedding<'a>(
        &self,
        input: Embedding<'_, impl Into<Weight<&'a Var<E::Tensor>, &'a E::Packed>>>,
    ) -> Result<Var<E::Tensor>> {
        let Embedding { table, ids, shape } = input;
        let table = table.into();
        let values = table.map(Var::value);
        self.refuse_packed("embedding", &[values])?;
        let y = self.engine().embedding(Embedding { table: values, ids, shape })?;
        let Weight::Full(table) = table else { return Ok(self.constant(y)) };
        let rows = self.engine().shape(table.value())[0];
        let ids = if self.records(&[table]) { ids.to_vec() } else { Vec::new() };
        Ok(self.record_one(&[table], y, move |tape, dy| {
            Ok(vec![Some(tape.engine().embedding_backward(&ids, rows, &dy)?)])
        }))
    }
}

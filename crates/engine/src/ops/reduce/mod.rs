//! Sums and means over one dimension, and their adjoint, which repeats elements.
//!
//! ```text
//! sum:     y[.., ..]    = Σ_i x[.., i, ..]        the dimension `axis` is gone;      dx = expand(dy)
//! mean:    y            = sum / n                 n ≥ 1;                             dx = expand(dy / n)
//! expand:  y[.., i, ..] = x[.., ..]               a dimension of `count` is new;     dx = sum(dy)
//! sum_to:  sums over what broadcasting the smaller shape to the larger repeats;      dx = dy, broadcast
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::{Result, bad_value};
use crate::ops::elementwise::Map;
use crate::ops::layout::AxisView;
use crate::tape::{Tape, Var};
use crate::array::element_count;

/// Validates a sum; returns the shape without `axis`, and the sizes around it.
pub(crate) fn check_sum(
    operation: &'static str,
    shape: &[usize],
    axis: usize,
) -> Result<(Vec<usize>, AxisView)> {
    let around = AxisView::new(operation, shape, axis)?;
    let mut result = shape.to_vec();
    result.remove(axis);
    Ok((result, around))
}

/// Like [`check_sum`], but rejects an empty dimension.
pub(crate) fn check_mean(shape: &[usize], axis: usize) -> Result<(Vec<usize>, AxisView)> {
    let found = check_sum("mean", shape, axis)?;
    if found.1.size == 0 {
        return bad_value("mean", format!("dimension {axis} of shape {shape:?} is empty and has no mean"));
    }
    Ok(found)
}

/// Validates an `expand`; returns the shape with a new dimension of size `count` at `axis`, and the sizes around
/// it.
pub(crate) fn check_expand(shape: &[usize], axis: usize, count: usize) -> Result<(Vec<usize>, AxisView)> {
    if axis > shape.len() {
        return bad_value(
            "expand",
            format!("axis {axis} is out of range for shape {shape:?}; it must be at most {}", shape.len()),
        );
    }
    let mut result = shape.to_vec();
    result.insert(axis, count);
    element_count("expand", &result)?;
    let around = AxisView::new("expand", &result, axis)?;
    Ok((result, around))
}

impl<'e, E: Engine> Tape<'e, E> {
    /// Σ over dimension `axis`, which is removed from the result.
    pub fn sum(&self, x: &Var<E::Tensor>, axis: usize) -> Result<Var<E::Tensor>> {
        let y = self.engine().sum(x.value(), axis)?;
        let count = self.engine().shape(x.value())[axis];
        Ok(self.record_one(&[x], y, move |tape, dy| Ok(vec![Some(tape.engine().expand(&dy, axis, count)?)])))
    }

    /// Mean over dimension `axis`, which is removed from the result and must not be empty.
    pub fn mean(&self, x: &Var<E::Tensor>, axis: usize) -> Result<Var<E::Tensor>> {
        let y = self.engine().mean(x.value(), axis)?;
        let count = self.engine().shape(x.value())[axis];
        Ok(self.record_one(&[x], y, move |tape, dy| {
            let dy = tape.engine().map(Map::Scale(1.0 / count as f64), &dy)?;
            Ok(vec![Some(tape.engine().expand(&dy, axis, count)?)])
        }))
    }

    /// Repeats x `count` times along a new dimension `axis`.
    pub fn expand(&self, x: &Var<E::Tensor>, axis: usize, count: usize) -> Result<Var<E::Tensor>> {
        let y = self.engine().expand(x.value(), axis, count)?;
        Ok(self.record_one(&[x], y, move |tape, dy| Ok(vec![Some(tape.engine().sum(&dy, axis)?)])))
    }
}

//! Layout operations: slicing, concatenating, permuting and reshaping.
//!
//! ```text
//! slice:    y = x[.., start..end, ..]                               dx = place(dy) among zeros
//! place:    y[.., start..start + n, ..] = x, 0 elsewhere            dx = slice(dy)
//! concat:   y = [x₁, x₂, ..] along `axis`                           dxᵢ = slice(dy)
//! permute:  dimension i of y is dimension axes[i] of x              dx = permute(dy) by the inverse
//! reshape:  the same elements in the same order                     dx = reshape(dy)
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use std::ops::Range;

use crate::engine::Engine;
use crate::error::{Result, bad_shape, bad_value};
use crate::tape::{Tape, Var};
use crate::tensor::element_count;

/// View of a shape around one of its dimensions: [outer, size, inner].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AxisView {
    pub outer: usize,
    pub size: usize,
    pub inner: usize,
}

impl AxisView {
    pub(crate) fn new(operation: &'static str, shape: &[usize], axis: usize) -> Result<Self> {
        let Some(&size) = shape.get(axis) else {
            return bad_value(
                operation,
                format!("axis {axis} is out of range for shape {shape:?} of {} dimensions", shape.len()),
            );
        };
        Ok(Self { outer: shape[..axis].iter().product(), size, inner: shape[axis + 1..].iter().product() })
    }
}

/// `shape` with the size of dimension `axis` replaced.
pub(crate) fn resized(shape: &[usize], axis: usize, size: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape[axis] = size;
    shape
}

/// Shape of `whole` after appending `rows` along `axis`.
pub(crate) fn appended(whole: &[usize], rows: &[usize], axis: usize) -> Result<Vec<usize>> {
    let around = AxisView::new("append", whole, axis)?;
    let size = rows.get(axis).copied().unwrap_or(0);
    if around.outer != 1 || rows.len() != whole.len() || resized(rows, axis, around.size) != whole {
        let expected = format!("{whole:?} except for dimension {axis}, and only 1 in dimensions before it");
        return bad_shape("append", "rows", rows, expected);
    }
    Ok(resized(whole, axis, around.size + size))
}

pub(crate) fn check_slice(shape: &[usize], axis: usize, range: &Range<usize>) -> Result<AxisView> {
    let around = AxisView::new("slice", shape, axis)?;
    if range.start > range.end || range.end > around.size {
        return bad_value(
            "slice",
            format!("range {range:?} is out of bounds: dimension {axis} has size {}", around.size),
        );
    }
    Ok(around)
}

/// Validates a `place`; the returned [`AxisView`] describes the result.
pub(crate) fn check_place(shape: &[usize], axis: usize, start: usize, size: usize) -> Result<AxisView> {
    let around = AxisView::new("place", shape, axis)?;
    if start.checked_add(around.size).is_none_or(|end| end > size) {
        return bad_value(
            "place",
            format!("{} elements starting at {start} do not fit in size {size}", around.size),
        );
    }
    element_count("place", &resized(shape, axis, size))?;
    Ok(AxisView { size, ..around })
}

/// Validates a `concat` and returns the shape of the result.
pub(crate) fn check_concat(shapes: &[&[usize]], axis: usize) -> Result<Vec<usize>> {
    let Some(&first) = shapes.first() else {
        return bad_value("concat", "at least one tensor is required");
    };
    AxisView::new("concat", first, axis)?;
    let mut total = 0usize;
    for shape in shapes {
        if shape.len() != first.len() || resized(shape, axis, first[axis]) != first {
            return bad_shape("concat", "x", shape, format!("{first:?} except for dimension {axis}"));
        }
        total = total.saturating_add(shape[axis]);
    }
    let shape = resized(first, axis, total);
    element_count("concat", &shape)?;
    Ok(shape)
}

/// Validates a `permute` and returns the shape of the result.
pub(crate) fn check_permute(shape: &[usize], axes: &[usize]) -> Result<Vec<usize>> {
    let mut sorted = axes.to_vec();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(0..shape.len()) {
        return bad_value(
            "permute",
            format!("axes {axes:?} do not permute shape {shape:?}: each dimension must occur once"),
        );
    }
    Ok(axes.iter().map(|&axis| shape[axis]).collect())
}

pub(crate) fn check_reshape(from: &[usize], to: &[usize]) -> Result<()> {
    if element_count("reshape", to)? != from.iter().product::<usize>() {
        return bad_shape("reshape", "x", from, format!("as many elements as {to:?}"));
    }
    Ok(())
}

impl<'e, E: Engine> Tape<'e, E> {
    /// x[.., range, ..] along dimension `axis`.
    pub fn slice(&self, x: &Var<E::Tensor>, axis: usize, range: Range<usize>) -> Result<Var<E::Tensor>> {
        let y = self.engine().slice(x.value(), axis, range.clone())?;
        let size = self.engine().shape(x.value())[axis];
        Ok(self.record_one(&[x], y, move |tape, dy| {
            Ok(vec![Some(tape.engine().place(&dy, axis, range.start, size)?)])
        }))
    }

    /// Concatenates tensors along dimension `axis`; their other dimensions must be equal.
    pub fn concat(&self, parts: &[&Var<E::Tensor>], axis: usize) -> Result<Var<E::Tensor>> {
        let values: Vec<&E::Tensor> = parts.iter().map(|v| v.value()).collect();
        let y = self.engine().concat(&values, axis)?;
        let mut start = 0;
        let ranges: Vec<Option<Range<usize>>> = parts
            .iter()
            .map(|part| {
                let range = start..start + self.engine().shape(part.value())[axis];
                start = range.end;
                self.records(&[part]).then_some(range)
            })
            .collect();
        Ok(self.record_one(parts, y, move |tape, dy| {
            let cut =
                |range: Option<Range<usize>>| range.map(|r| tape.engine().slice(&dy, axis, r)).transpose();
            ranges.into_iter().map(cut).collect()
        }))
    }

    /// Permutes dimensions: dimension i of the result is dimension `axes[i]` of x.
    pub fn permute(&self, x: &Var<E::Tensor>, axes: &[usize]) -> Result<Var<E::Tensor>> {
        let y = self.engine().permute(x.value(), axes)?;
        let mut inverse = vec![0; axes.len()];
        axes.iter().enumerate().for_each(|(i, &axis)| inverse[axis] = i);
        Ok(self.record_one(&[x], y, move |tape, dy| Ok(vec![Some(tape.engine().permute(&dy, &inverse)?)])))
    }

    /// Changes the shape; elements keep their row-major order.
    pub fn reshape(&self, x: &Var<E::Tensor>, shape: &[usize]) -> Result<Var<E::Tensor>> {
        let y = self.engine().reshape(x.value(), shape)?;
        let before = self.engine().shape(x.value()).to_vec();
        Ok(self.record_one(&[x], y, move |tape, dy| Ok(vec![Some(tape.engine().reshape(&dy, &before)?)])))
    }
}

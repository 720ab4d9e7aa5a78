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

use crate::array::element_count;
use crate::error::{Result, bad_shape, bad_value};
use crate::op::{Op, owned};
use crate::tape::record_one;
use crate::tensor::Tensor;

/// View of a shape around one of its dimensions: [outer, size, inner].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisView {
    /// Product of the dimensions before it.
    pub outer: usize,
    /// Its size.
    pub size: usize,
    /// Product of the dimensions after it.
    pub inner: usize,
}

impl AxisView {
    /// Fails if the shape has no such dimension.
    pub fn new(operation: &'static str, shape: &[usize], axis: usize) -> Result<Self> {
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

fn check_slice(shape: &[usize], axis: usize, range: &Range<usize>) -> Result<AxisView> {
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
fn check_place(shape: &[usize], axis: usize, start: usize, size: usize) -> Result<AxisView> {
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
fn check_concat(shapes: &[&[usize]], axis: usize) -> Result<Vec<usize>> {
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
fn check_permute(shape: &[usize], axes: &[usize]) -> Result<Vec<usize>> {
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

fn check_reshape(from: &[usize], to: &[usize]) -> Result<()> {
    if element_count("reshape", to)? != from.iter().product::<usize>() {
        return bad_shape("reshape", "x", from, format!("as many elements as {to:?}"));
    }
    Ok(())
}

/// x[.., range, ..] along dimension `axis`.
pub struct Slice {
    /// The whole.
    pub x: Tensor,
    /// The dimension that is cut.
    pub axis: usize,
    /// What remains of it.
    pub range: Range<usize>,
}

/// x among zeros: dimension `axis` gets size `size`, with x at `start`.
pub struct Place {
    /// The part.
    pub x: Tensor,
    /// The dimension that is extended.
    pub axis: usize,
    /// Where x begins.
    pub start: usize,
    /// Size of the result.
    pub size: usize,
}

/// Tensors one after the other along dimension `axis`; their other dimensions must be equal.
pub struct Concat {
    /// The parts, at least one.
    pub parts: Vec<Tensor>,
    /// The dimension along which they follow each other.
    pub axis: usize,
}

/// Dimension i of the result is dimension `axes[i]` of x.
pub struct Permute {
    /// The tensor.
    pub x: Tensor,
    /// The new order of its dimensions.
    pub axes: Vec<usize>,
}

/// The same elements in another shape.
pub struct Reshape {
    /// The tensor.
    pub x: Tensor,
    /// The new shape.
    pub shape: Vec<usize>,
}

impl Op for Slice {
    const NAME: &'static str = "slice";
    type Sizes = AxisView;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<AxisView> {
        check_slice(self.x.shape(), self.axis, &self.range)
    }
}

impl Op for Place {
    const NAME: &'static str = "place";
    /// That of the result.
    type Sizes = AxisView;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<AxisView> {
        check_place(self.x.shape(), self.axis, self.start, self.size)
    }
}

impl Op for Concat {
    const NAME: &'static str = "concat";
    /// Shape of the result.
    type Sizes = Vec<usize>;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        self.parts.iter().collect()
    }
    fn check(&self) -> Result<Vec<usize>> {
        check_concat(&self.parts.iter().map(Tensor::shape).collect::<Vec<_>>(), self.axis)
    }
}

impl Op for Permute {
    const NAME: &'static str = "permute";
    /// Shape of the result.
    type Sizes = Vec<usize>;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<Vec<usize>> {
        check_permute(self.x.shape(), &self.axes)
    }
}

impl Op for Reshape {
    const NAME: &'static str = "reshape";
    type Sizes = ();
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<()> {
        check_reshape(self.x.shape(), &self.shape)
    }
}

impl Tensor {
    /// x[.., range, ..] along dimension `axis`.
    pub fn slice(&self, axis: usize, range: Range<usize>) -> Result<Tensor> {
        let y = Slice { x: self.clone(), axis, range: range.clone() }.run()?;
        let size = self.shape()[axis];
        Ok(record_one(&[self], y, move |dy| {
            Ok(vec![Some(Place { x: dy, axis, start: range.start, size }.run()?)])
        }))
    }

    /// Concatenates tensors along dimension `axis`; their other dimensions must be equal.
    pub fn concat(parts: &[&Tensor], axis: usize) -> Result<Tensor> {
        let y = Concat { parts: owned(parts), axis }.run()?;
        let mut start = 0;
        let range = |part: &&Tensor| {
            let range = start..start + part.shape()[axis];
            start = range.end;
            part.is_recorded().then_some(range)
        };
        let ranges: Vec<Option<Range<usize>>> = parts.iter().map(range).collect();
        Ok(record_one(parts, y, move |dy| {
            let cut = |range| Slice { x: dy.clone(), axis, range }.run();
            ranges.into_iter().map(|range| range.map(cut).transpose()).collect()
        }))
    }

    /// Permutes dimensions: dimension i of the result is dimension `axes[i]` of x.
    pub fn permute(&self, axes: &[usize]) -> Result<Tensor> {
        let y = Permute { x: self.clone(), axes: axes.to_vec() }.run()?;
        let mut inverse = vec![0; axes.len()];
        axes.iter().enumerate().for_each(|(i, &axis)| inverse[axis] = i);
        Ok(record_one(&[self], y, move |dy| Ok(vec![Some(Permute { x: dy, axes: inverse }.run()?)])))
    }

    /// Swaps the last two dimensions.
    pub fn t(&self) -> Result<Tensor> {
        let mut axes: Vec<usize> = (0..self.shape().len()).collect();
        let [.., last_but_one, last] = &mut axes[..] else {
            return bad_shape("t", "x", self.shape(), "at least two dimensions");
        };
        std::mem::swap(last_but_one, last);
        self.permute(&axes)
    }

    /// Changes the shape; elements keep their row-major order.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        let y = Reshape { x: self.clone(), shape: shape.to_vec() }.run()?;
        let shape = self.shape().to_vec();
        Ok(record_one(&[self], y, move |dy| Ok(vec![Some(Reshape { x: dy, shape }.run()?)])))
    }
}

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

use crate::array::element_count;
use crate::error::{Result, bad_value};
use crate::op::Op;
use crate::ops::elementwise::broadcast::check_broadcasts_to;
use crate::ops::elementwise::{Map, MapForward};
use crate::ops::layout::AxisView;
use crate::tape::record_one;
use crate::tensor::Tensor;

/// Σ over dimension `axis`, which is removed.
pub struct Sum {
    /// Terms.
    pub x: Tensor,
    /// Dimension to sum over.
    pub axis: usize,
}

/// Mean over dimension `axis`, which is removed and must not be empty.
pub struct Mean {
    /// Terms.
    pub x: Tensor,
    /// Dimension to average over.
    pub axis: usize,
}

/// x repeated `count` times along a new dimension `axis`.
pub struct Expand {
    /// What is repeated.
    pub x: Tensor,
    /// Place of the new dimension.
    pub axis: usize,
    /// Its size.
    pub count: usize,
}

/// Sum of x over the dimensions along which broadcasting `shape` to x's shape repeats elements.
pub struct SumTo {
    /// Terms.
    pub x: Tensor,
    /// Shape of the result.
    pub shape: Vec<usize>,
}

/// Validates a sum; returns the shape without `axis`, and the sizes around it.
fn check_sum(operation: &'static str, shape: &[usize], axis: usize) -> Result<(Vec<usize>, AxisView)> {
    let around = AxisView::new(operation, shape, axis)?;
    let mut result = shape.to_vec();
    result.remove(axis);
    Ok((result, around))
}

impl Op for Sum {
    const NAME: &'static str = "sum";
    /// Shape of the result, and the sizes around the dimension in x.
    type Sizes = (Vec<usize>, AxisView);
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<Self::Sizes> {
        check_sum(Self::NAME, self.x.shape(), self.axis)
    }
}

impl Op for Mean {
    const NAME: &'static str = "mean";
    /// Shape of the result, and the sizes around the dimension in x.
    type Sizes = (Vec<usize>, AxisView);
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<Self::Sizes> {
        let (shape, axis) = (self.x.shape(), self.axis);
        let sizes = check_sum(Self::NAME, shape, axis)?;
        if sizes.1.size == 0 {
            let message = format!("dimension {axis} of shape {shape:?} is empty and has no mean");
            return bad_value(Self::NAME, message);
        }
        Ok(sizes)
    }
}

impl Op for Expand {
    const NAME: &'static str = "expand";
    /// Shape of the result, and the sizes around its new dimension.
    type Sizes = (Vec<usize>, AxisView);
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<Self::Sizes> {
        let (shape, axis) = (self.x.shape(), self.axis);
        if axis > shape.len() {
            let most = shape.len();
            let message =
                format!("axis {axis} is out of range for shape {shape:?}; it must be at most {most}");
            return bad_value(Self::NAME, message);
        }
        let mut result = shape.to_vec();
        result.insert(axis, self.count);
        element_count(Self::NAME, &result)?;
        let around = AxisView::new(Self::NAME, &result, axis)?;
        Ok((result, around))
    }
}

impl Op for SumTo {
    const NAME: &'static str = "sum_to";
    type Sizes = ();
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<()> {
        check_broadcasts_to(Self::NAME, &self.shape, self.x.shape())
    }
}

impl Tensor {
    /// Σ over dimension `axis`, which is removed from the result.
    pub fn sum(&self, axis: usize) -> Result<Tensor> {
        let y = Sum { x: self.clone(), axis }.run()?;
        let count = self.shape()[axis];
        Ok(record_one(&[self], y, move |dy| Ok(vec![Some(Expand { x: dy, axis, count }.run()?)])))
    }

    /// Mean over dimension `axis`, which is removed from the result and must not be empty.
    pub fn mean(&self, axis: usize) -> Result<Tensor> {
        let y = Mean { x: self.clone(), axis }.run()?;
        let count = self.shape()[axis];
        Ok(record_one(&[self], y, move |dy| {
            let dy = MapForward { kind: Map::Scale(1.0 / count as f64), x: dy }.run()?;
            Ok(vec![Some(Expand { x: dy, axis, count }.run()?)])
        }))
    }

    /// Repeats x `count` times along a new dimension `axis`.
    pub fn expand(&self, axis: usize, count: usize) -> Result<Tensor> {
        let y = Expand { x: self.clone(), axis, count }.run()?;
        Ok(record_one(&[self], y, move |dy| Ok(vec![Some(Sum { x: dy, axis }.run()?)])))
    }
}

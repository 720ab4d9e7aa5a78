//! Sum of gradients, and rows appended to a tensor; both in place where no other tensor shares the buffer.
//!
//! ```text
//! accumulate:  sum += term
//! append:      whole = concat(whole, rows) along `axis`, all dimensions before which are 1
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::error::{Result, expect_shape};
use crate::op::{Op, run_in_place};
use crate::ops::layout;
use crate::tensor::Tensor;

/// `sum + term`, computed in the buffer of `sum` if that is not shared.
pub struct Accumulate {
    /// First term.
    pub sum: Tensor,
    /// Second term, of the same shape.
    pub term: Tensor,
}

impl Op for Accumulate {
    const NAME: &'static str = "accumulate";
    type Sizes = ();
    type Output = Tensor;

    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.sum, &self.term]
    }
    fn check(&self) -> Result<()> {
        expect_shape(Self::NAME, "term", self.term.shape(), self.sum.shape(), "the shape of the sum")
    }
}

/// `whole` with `rows` appended, in the buffer of `whole` if that is not shared and has room.
pub struct Append {
    /// What is there.
    pub whole: Tensor,
    /// What is appended.
    pub rows: Tensor,
    /// The dimension that grows; all dimensions before it must be 1.
    pub axis: usize,
}

impl Op for Append {
    const NAME: &'static str = "append";
    /// Shape of the result.
    type Sizes = Vec<usize>;
    type Output = Tensor;

    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.whole, &self.rows]
    }
    fn check(&self) -> Result<Vec<usize>> {
        layout::appended(self.whole.shape(), self.rows.shape(), self.axis)
    }
}

impl Tensor {
    /// Appends `rows` along dimension `axis`; all dimensions before it must be 1. Works in place if the buffer is not
    /// shared and has room, so many small calls cost no more than one large one. It is not recorded.
    pub fn append(&mut self, rows: &Tensor, axis: usize) -> Result<()> {
        // The buffer must not be shared while the kernel runs, so the tensor is moved into the operation.
        let whole = std::mem::replace(self, rows.clone());
        *self = run_in_place(Append { whole, rows: rows.clone(), axis }, |op| *self = op.whole)?;
        Ok(())
    }

    /// Adds `term`, in place if the buffer is not shared. It is not recorded.
    pub fn accumulate(&mut self, term: &Tensor) -> Result<()> {
        let sum = std::mem::replace(self, term.clone());
        *self = run_in_place(Accumulate { sum, term: term.clone() }, |op| *self = op.sum)?;
        Ok(())
    }
}

/// `sum += term` for a sum that may not have begun.
pub fn add_gradient(sum: &mut Option<Tensor>, term: Option<Tensor>) -> Result<()> {
    match (&mut *sum, term) {
        (Some(sum), Some(term)) => sum.accumulate(&term),
        (None, Some(term)) => {
            *sum = Some(term);
            Ok(())
        }
        (_, None) => Ok(()),
    }
}

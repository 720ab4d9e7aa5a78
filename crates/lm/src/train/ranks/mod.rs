//! The processes that train one model together: each computes gradients for its share of every batch, and the gradients
//! are summed before the update, so that all processes make the same update.

#[cfg(feature = "mpi")]
mod mpi;

use std::ops::Range;

use crate::error::Result;

#[cfg(feature = "mpi")]
pub use mpi::{Job, Mpi};

/// Called with each gradient, as numbers, when it becomes final.
pub type HandOver<'a> = dyn FnMut(&[f32]) + 'a;

/// The group of processes, seen from one of them. All must make the same calls in the same order.
pub trait Ranks {
    /// This process's number, from 0. Number 0 writes files and prints messages.
    fn rank(&self) -> usize;

    /// The number of processes.
    fn count(&self) -> usize;

    /// Sums elementwise over all processes; all get bit-identical results.
    fn sum(&mut self, values: &mut [f64]) -> Result<()>;

    /// Runs `backward`, which hands over at most `numbers` numbers as they become final, and sums them while it is
    /// still running. Returns the sums in the same order.
    fn sum_during(
        &mut self,
        numbers: usize,
        backward: &mut dyn FnMut(&mut HandOver<'_>) -> Result<()>,
    ) -> Result<(&[f32], Overlap)>;

    /// This process's share of the rows of a batch; the shares differ by at most one row.
    fn share(&self, rows: usize) -> Range<usize> {
        let at = |rank: usize| rank * rows / self.count();
        at(self.rank())..at(self.rank() + 1)
    }
}

/// How long sums were in progress, in seconds, and how much of that was spent waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overlap {
    /// From the first hand-over sent to the last sum received.
    pub sending: f64,
    /// The part of that time after the backward pass had finished.
    pub waiting: f64,
}

impl Overlap {
    /// The fraction of the time that overlapped with the backward pass.
    pub fn hidden(&self) -> f64 {
        if self.sending > 0.0 { 1.0 - self.waiting / self.sending } else { 1.0 }
    }
}

/// A single process.
#[derive(Debug, Default)]
pub struct SingleProcess {
    numbers: Vec<f32>,
}

impl Ranks for SingleProcess {
    fn rank(&self) -> usize {
        0
    }

    fn count(&self) -> usize {
        1
    }

    fn sum(&mut self, _: &mut [f64]) -> Result<()> {
        Ok(())
    }

    fn sum_during(
        &mut self,
        _: usize,
        backward: &mut dyn FnMut(&mut HandOver<'_>) -> Result<()>,
    ) -> Result<(&[f32], Overlap)> {
        self.numbers.clear();
        backward(&mut |part| self.numbers.extend_from_slice(part))?;
        Ok((&self.numbers, Overlap::default()))
    }
}

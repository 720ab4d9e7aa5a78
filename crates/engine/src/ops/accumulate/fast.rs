//! Sums in parallel, and appending into spare room.

use super::{Accumulate, Append};
use crate::array::Array;
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::simd::{self, Kernel, Simd};
use crate::tensor::Tensor;

pub(crate) fn accumulate(cpu: &Cpu, op: Accumulate, (): ()) -> Result<Tensor> {
    let device = op.term.device().clone();
    let mut sum = op.sum.into_f32();
    add_to(cpu, &mut sum, op.term.f32())?;
    Ok(Tensor::new(sum, &device))
}

pub(crate) fn append(cpu: &Cpu, op: Append, shape: Vec<usize>) -> Result<Tensor> {
    let (mut whole, rows) = (op.whole.into_f32(), op.rows.f32());
    if !whole.extend(rows, &shape) {
        let mut grown = cpu.uninit_with_room(&shape);
        grown.data_mut()[..whole.len()].copy_from_slice(whole.data());
        grown.data_mut()[whole.len()..].copy_from_slice(rows.data());
        whole = grown;
    }
    Ok(op.rows.like(whole))
}

struct AddTo<'a>(&'a mut [f32], &'a [f32]);
impl Kernel for AddTo<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        simd::add_scaled(s, self.0, 1.0, self.1);
    }
}

/// `sum += term`, in place if no other tensor shares the buffer of `sum`.
#[allow(unsafe_code)]
pub(crate) fn add_to(cpu: &Cpu, sum: &mut Array<f32>, term: &Array<f32>) -> Result<()> {
    if !sum.is_unique() {
        *sum = cpu.from_slice(sum.data(), sum.shape())?;
    }
    let len = sum.len();
    let out = Shared::new(sum.data_mut());
    cpu.for_rows(cpu.row_parts(len, 1), |_, range| {
        // SAFETY: parts are disjoint ranges.
        let part = unsafe { out.part(range.start, range.len()) };
        cpu.level().run(AddTo(part, &term.data()[range]));
    });
    Ok(())
}

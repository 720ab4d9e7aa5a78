//! Optimised embedding: rows are copied by all threads.
//!
//! Several positions may add to the same row of the table's gradient. The backward pass therefore first sorts the
//! positions by id (stably), then distributes ranges of table rows with about equal work, split into strips of
//! columns, over threads. Each table row sums its positions in ascending order, so the result does not depend on
//! the split.

use super::{Embedding, EmbeddingBackward};
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::ops::pack::{RawWeight, place, raw};
use crate::precision::from_bf16;
use crate::simd::{self, Kernel, Simd};
use crate::tensor::Tensor;

#[allow(unsafe_code)]
pub(crate) fn forward(cpu: &Cpu, op: Embedding, shape: Vec<usize>) -> Result<Tensor> {
    let Embedding { table, ids, .. } = op;
    let mut y = cpu.uninit(&shape);
    let width = y.width();
    if y.is_empty() {
        return Ok(table.like(y));
    }
    let (weight, out) = (raw(&table), Shared::new(y.data_mut()));
    cpu.for_rows(cpu.row_parts(ids.len(), width), |_, range| {
        // SAFETY: parts are disjoint row ranges.
        let y = unsafe { out.part(range.start * width, range.len() * width) };
        for (y, &id) in y.chunks_exact_mut(width).zip(&ids[range]) {
            let row = id as usize * width..(id as usize + 1) * width;
            match weight {
                RawWeight::F32(table) => y.copy_from_slice(&table[row]),
                RawWeight::Bf16(table) => y.iter_mut().zip(&table[row]).for_each(|(y, &v)| *y = from_bf16(v)),
                RawWeight::Int8 { codes, scales } => {
                    let scale = scales[id as usize];
                    let codes = &codes[row];
                    for (i, y) in y.iter_mut().enumerate() {
                        *y = f32::from(codes[place(i, width)]) * scale;
                    }
                }
                RawWeight::Blocks(blocks) => blocks.row(id as usize, y),
            }
        }
    });
    Ok(table.like(y))
}

pub(crate) fn backward(cpu: &Cpu, op: EmbeddingBackward, width: usize) -> Result<Tensor> {
    /// Columns per strip; splitting columns distributes the work of a very frequent id over several threads.
    const STRIP: usize = 512;
    let EmbeddingBackward { ids, rows, gradient } = op;
    let mut sums = cpu.uninit(&[rows, width]);
    if sums.is_empty() {
        return Ok(gradient.like(sums));
    }
    let sorted = Sorted::new(&ids, rows);
    let ranges = sorted.even_ranges(if ids.len() + rows < 64 { 1 } else { 32 });
    let strips = width.div_ceil(STRIP);
    let (dy, out) = (gradient.f32().data(), Shared::new(sums.data_mut()));
    cpu.parallel(ranges.len() * strips, |task| {
        let strip = task % strips;
        let columns = strip * STRIP..((strip + 1) * STRIP).min(width);
        let rows = ranges[task / strips].clone();
        cpu.level().run(Gather { sorted: &sorted, rows, columns, width, dy, sums: &out });
    });
    Ok(gradient.like(sums))
}

/// Positions grouped by id: those of id v are `positions[starts[v]..starts[v + 1]]`, ascending.
struct Sorted {
    starts: Vec<usize>,
    positions: Vec<usize>,
}

impl Sorted {
    fn new(ids: &[u32], rows: usize) -> Self {
        let mut starts = vec![0; rows + 1];
        ids.iter().for_each(|&id| starts[id as usize + 1] += 1);
        for v in 0..rows {
            starts[v + 1] += starts[v];
        }
        let mut next = starts.clone();
        let mut positions = vec![0; ids.len()];
        for (i, &id) in ids.iter().enumerate() {
            positions[next[id as usize]] = i;
            next[id as usize] += 1;
        }
        Self { starts, positions }
    }

    /// Splits the ids into at most `count` ranges with about equal work (rows to write plus rows to add).
    fn even_ranges(&self, count: usize) -> Vec<std::ops::Range<usize>> {
        let rows = self.starts.len() - 1;
        let target = (rows + self.positions.len()).div_ceil(count);
        let mut ranges = Vec::with_capacity(count);
        let mut start = 0;
        for v in 0..rows {
            let work = v + 1 - start + self.starts[v + 1] - self.starts[start];
            if work >= target || v + 1 == rows {
                ranges.push(start..v + 1);
                start = v + 1;
            }
        }
        ranges
    }
}

struct Gather<'a> {
    sorted: &'a Sorted,
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
    width: usize,
    dy: &'a [f32],
    sums: &'a Shared<'a>,
}

impl Kernel for Gather<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Sorted { starts, positions } = self.sorted;
        for v in self.rows {
            // SAFETY: these rows and columns belong to this task only.
            let sum = unsafe { self.sums.part(v * self.width + self.columns.start, self.columns.len()) };
            let row = |i: usize| &self.dy[i * self.width..][self.columns.clone()];
            match &positions[starts[v]..starts[v + 1]] {
                [] => sum.fill(0.0),
                [first, others @ ..] => {
                    sum.copy_from_slice(row(*first));
                    for &i in others {
                        simd::add_scaled(s, sum, 1.0, row(i));
                    }
                }
            }
        }
    }
}

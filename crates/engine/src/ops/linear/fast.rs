//! Optimised linear layer.
//!
//! Training uses the fastest matrix product (`gemm-f32`). Inference, and any weight in reduced precision, uses dot
//! products in a fixed summation order ([`super::dots`]), so that the result for a row does not depend on the other
//! rows.

use std::ops::Range;

use super::dots::{COLUMNS, Dots, Int8Dots};
use super::integer::Tiles;
use super::rounded::{Fill, Rounded};
use super::turned::{self, PAIR, Turn, Turned};
use super::{LinearList, LinearListBackward, LinearListGradients, Sizes, backward_each};
use crate::array::Array;
use crate::cpu::{Cpu, Products, Shared, with_scratch};
use crate::error::Result;
use crate::ops::accumulate::fast::add_to;
use crate::ops::pack::blocks::GROUP;
use crate::ops::pack::{self, RawWeight};
use crate::product::{Accum, Matrix, product};
use crate::simd::Level;
use crate::tensor::Tensor;

/// Number of multiply-adds below which a single thread is used.
const SMALL: usize = 32 * 1024;
/// Rows of x that are turned at once: a multiple of a tile. More would need memory.
const TURNED: usize = 46 * turned::TILE;
const _: () = assert!(PAIR == 2 * GROUP && PAIR.is_multiple_of(COLUMNS));

/// Several products. For inference, those that follow each other and have the same x are distributed over threads as a
/// single product.
pub(crate) fn forward(cpu: &Cpu, op: LinearList, sizes: Vec<Sizes>) -> Result<Vec<Tensor>> {
    let LinearList { x, weights, products } = &op;
    let mut outputs: Vec<Array<f32>> = std::iter::zip(products, &sizes)
        .map(|(product, sizes)| cpu.uninit(&sizes.output_shape(x[product.x].shape())))
        .collect();
    let mut rest = sizes.iter().zip(&mut outputs);
    for same in products.chunk_by(|a, b| cpu.products() == Products::BatchInvariant && a.x == b.x) {
        let jobs: Vec<Job<'_>> = std::iter::zip(same, &mut rest)
            .map(|(product, (&sizes, y))| Job {
                sizes,
                weight: pack::raw(&weights[product.weight]),
                y: y.data_mut(),
            })
            .collect();
        multiply(cpu, x[same[0].x].f32().data(), jobs);
    }
    for (product, y) in products.iter().zip(&mut outputs) {
        if let Some(bias) = &product.bias {
            add_bias(y, bias.f32());
        }
        if let Some(residual) = &product.residual {
            add_to(cpu, y, residual.f32())?;
        }
    }
    Ok(products.iter().zip(outputs).map(|(product, y)| x[product.x].like(y)).collect())
}

fn add_bias(y: &mut Array<f32>, bias: &Array<f32>) {
    for row in y.data_mut().chunks_exact_mut(bias.len().max(1)) {
        row.iter_mut().zip(bias.data()).for_each(|(y, b)| *y += b);
    }
}

pub(crate) fn backward(cpu: &Cpu, op: LinearListBackward, sizes: Vec<Sizes>) -> Result<LinearListGradients> {
    let (x, weights) = (&op.x, &op.weights);
    backward_each(&op.products, &op.needs, op.dx, |i, needs| {
        let (x, weight, gradient) = (&x[op.products[i].x], &weights[op.products[i].weight], &op.gradients[i]);
        let Sizes { rows, inner, outer } = sizes[i];
        let dy = Matrix::rows(gradient.f32().data(), rows, outer);
        let dx = needs[0].then(|| {
            let mut dx = cpu.uninit(x.shape());
            let w = Matrix::rows(weight.f32().data(), outer, inner);
            product(cpu, dx.data_mut(), Accum::Replace, dy, w);
            dx
        });
        let dw = needs[1].then(|| {
            let mut dw = cpu.uninit(weight.shape());
            let x = Matrix::rows(x.f32().data(), rows, inner);
            product(cpu, dw.data_mut(), Accum::Replace, dy.t(), x);
            dw
        });
        let db = needs[2].then(|| {
            let mut db = cpu.zeros(&[outer]);
            let sums = db.data_mut();
            for row in gradient.f32().data().chunks_exact(outer.max(1)) {
                sums.iter_mut().zip(row).for_each(|(s, g)| *s += g);
            }
            db
        });
        [dx, dw, db].map(|found| found.map(|array| gradient.like(array)))
    })
}

/// One product y = x Wᵀ.
pub(crate) struct Job<'a> {
    pub sizes: Sizes,
    pub weight: RawWeight<'a>,
    pub y: &'a mut [f32],
}

/// Computes y = x Wᵀ for each job, all with the same x.
pub(crate) fn multiply(cpu: &Cpu, x: &[f32], mut jobs: Vec<Job<'_>>) {
    if let ([Job { sizes, weight: RawWeight::F32(w), y }], Products::Fastest) =
        (&mut jobs[..], cpu.products())
    {
        let x = Matrix::rows(x, sizes.rows, sizes.inner);
        let w = Matrix::rows(w, sizes.outer, sizes.inner);
        return product(cpu, y, Accum::Replace, x, w.t());
    }
    let Some(&Job { sizes: Sizes { rows, inner, .. }, .. }) = jobs.first() else { return };
    let once = if jobs.iter().all(|job| is_float(&job.weight)) { TURNED } else { rows.max(1) };
    for from in (0..rows).step_by(once) {
        let count = (rows - from).min(once);
        let mut part = Vec::with_capacity(jobs.len());
        for Job { sizes, weight, y } in &mut jobs {
            let y = &mut y[from * sizes.outer..(from + count) * sizes.outer];
            part.push((Sizes { rows: count, ..*sizes }, *weight, Shared::new(y)));
        }
        invariant(cpu, &x[from * inner..(from + count) * inner], &part);
    }
}

/// Computes y = x Wᵀ for each job. Each row's result is independent of the other rows.
fn invariant(cpu: &Cpu, x: &[f32], jobs: &[(Sizes, RawWeight<'_>, Shared<'_>)]) {
    let Some(&(Sizes { rows, inner, .. }, ..)) = jobs.first() else { return };
    if rows == 0 {
        return;
    }
    let codes = |weight: &RawWeight<'_>| matches!(weight, RawWeight::Blocks(_));
    let any = |test: &dyn Fn(&RawWeight<'_>) -> bool| jobs.iter().any(|(_, weight, _)| test(weight));
    let most = cpu.path().tile_rows(rows);
    let tiles = if any(&codes) { tiles(rows, most) } else { Vec::new() };
    let turns = rows >= turned::MANY && cpu.level() == Level::Avx512 && any(&is_float);
    let large = if turns { self::tiles(rows, turned::TILE) } else { Vec::new() };
    let room = if any(&codes) { Rounded::scratch(rows, inner) } else { 0 };
    with_scratch(room, |scratch| {
        let rounded = Rounded::new(&tiles, inner, scratch);
        let round = |i: usize| cpu.path().run(Fill { x, to: &rounded, tile: tiles[i].clone() });
        if rows * inner < SMALL {
            (0..tiles.len()).for_each(round);
        } else {
            cpu.parallel(tiles.len(), round);
        }
        with_scratch(turned::scratch(large.len(), inner), |scratch| {
            let turned = Shared::new(scratch);
            cpu.parallel(large.len(), |i| {
                let room = turned::scratch(1, inner);
                #[allow(unsafe_code)]
                // SAFETY: each tile has its own part.
                let to = unsafe { turned.part(i * room, room) };
                cpu.level().run_square(Turn { x, inner, rows: large[i].clone(), to });
            });
            distribute(cpu, x, &Ready { rounded, tiles: &large, turned }, jobs);
        });
    });
}

/// Whether a weight is multiplied in f32 with any number of lanes.
fn is_float(weight: &RawWeight<'_>) -> bool {
    matches!(weight, RawWeight::F32(_) | RawWeight::Bf16(_))
}

/// Splits rows into tiles of at most `most` rows whose sizes differ by one at most.
fn tiles(rows: usize, most: usize) -> Vec<Range<usize>> {
    let count = rows.div_ceil(most);
    (0..count).map(|i| i * rows / count..(i + 1) * rows / count).collect()
}

/// x in the forms that its products need.
struct Ready<'a> {
    /// For products of integers.
    rounded: Rounded<'a>,
    /// For products of many rows with sixteen lanes: their tiles, and these turned.
    tiles: &'a [Range<usize>],
    turned: Shared<'a>,
}

/// Distributes the rows of all W over threads.
fn distribute(cpu: &Cpu, x: &[f32], ready: &Ready<'_>, jobs: &[(Sizes, RawWeight<'_>, Shared<'_>)]) {
    let Sizes { rows, inner, .. } = jobs[0].0;
    let work = rows * inner;
    let outer: usize = jobs.iter().map(|(sizes, ..)| sizes.outer).sum();
    // A multiple of the rows of W that are processed together.
    let together = if ready.rounded.rows() + ready.tiles.len() > 0 { PAIR } else { COLUMNS };
    // Each task takes some rows of W, so that all threads together read W once; tasks have a minimum size.
    let share = outer.div_ceil(cpu.threads() * 4);
    let per_task = share.max(8 * 1024 / work.max(1)).next_multiple_of(together).max(together);
    let run = |mut task: usize| {
        for &(sizes, weight, ref y) in jobs {
            let count = sizes.outer.div_ceil(per_task);
            if task >= count {
                task -= count;
                continue;
            }
            let columns = task * per_task..((task + 1) * per_task).min(sizes.outer);
            if let RawWeight::Blocks(weight) = weight {
                let groups = columns.start / GROUP..columns.end.div_ceil(GROUP);
                return with_scratch(Tiles::scratch(rows, inner, weight.bits), |scratch| {
                    cpu.path().run(Tiles { x: &ready.rounded, weight, y, groups, scratch });
                });
            }
            if !ready.tiles.is_empty() && is_float(&weight) {
                return with_scratch(Turned::scratch(sizes), |scratch| {
                    let (tiles, x) = (ready.tiles, &ready.turned);
                    cpu.level().run_square(Turned { sizes, tiles, x, weight, y, columns, scratch });
                });
            }
            return with_scratch(Dots::scratch(sizes), |scratch| {
                let dots = Dots { sizes, x, weight, y, columns, scratch };
                match weight {
                    RawWeight::Int8 { .. } => cpu.level().run(Int8Dots(dots)),
                    _ => cpu.level().run_lanes(dots),
                }
            });
        }
    };
    let count = jobs.iter().map(|(sizes, ..)| sizes.outer.div_ceil(per_task)).sum();
    if work * outer < SMALL { (0..count).for_each(run) } else { cpu.parallel_runs(count, run) }
}

//! Optimised linear layer.
//!
//! Training uses the fastest matrix product (`gemm-f32`). Inference, and any weight in reduced precision, uses dot
//! products in a fixed summation order ([`super::dots`]), so that the result for a row does not depend on the other
//! rows.

use super::dots::{COLUMNS, Dots};
use super::{Linear, LinearList, Sizes, check, output_shape};
use crate::cpu::{Cpu, Products, Shared, with_scratch};
use crate::error::{Result, expect_shape};
use crate::kernels::{Kernels, list_forward};
use crate::product::{Accum, Matrix, product};
use crate::array::Array;
use crate::weight::{PackedWeight, RawWeight, Weight};

type AnyWeight<'a> = Weight<&'a Array<f32>, &'a PackedWeight>;

/// Number of multiply-adds below which a single thread is used.
const SMALL: usize = 32 * 1024;

pub(crate) fn forward(cpu: &Cpu, input: Linear<&Array<f32>, AnyWeight<'_>>) -> Result<Array<f32>> {
    let sizes = check(input.x.shape(), input.weight.shape(), input.bias.map(Array::shape))?;
    let mut y = cpu.uninit(&output_shape(input.x.shape(), sizes));
    let x = input.x.data();
    match (input.weight.raw(), cpu.products()) {
        (RawWeight::F32(w), Products::Fastest) => {
            let w = Matrix::rows(w, sizes.outer, sizes.inner);
            let x = Matrix::rows(x, sizes.rows, sizes.inner);
            product(cpu, y.data_mut(), Accum::Replace, x, w.t());
        }
        (weight, _) => invariant(cpu, x, &[Job { sizes, weight, y: Shared::new(y.data_mut()) }]),
    }
    if let Some(bias) = input.bias {
        add_bias(&mut y, bias, sizes);
    }
    Ok(y)
}

fn add_bias(y: &mut Array<f32>, bias: &Array<f32>, sizes: Sizes) {
    let bias = bias.data();
    for row in y.data_mut().chunks_exact_mut(sizes.outer.max(1)) {
        row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
    }
}

/// Several products. For inference, those that follow each other and have the same x are distributed over threads as a
/// single product.
pub(crate) fn forward_list(
    cpu: &Cpu,
    input: LinearList<'_, &Array<f32>, AnyWeight<'_>>,
) -> Result<Vec<Array<f32>>> {
    if cpu.products() == Products::Fastest {
        return list_forward(cpu, input);
    }
    let LinearList { x, weights, products } = input;
    let mut outputs = Vec::with_capacity(products.len());
    for product in products {
        let x = x[product.x].shape();
        let sizes = check(x, weights[product.weight].shape(), product.bias.map(Array::shape))?;
        outputs.push((sizes, cpu.uninit(&output_shape(x, sizes))));
    }
    let mut rest = &mut outputs[..];
    for same in products.chunk_by(|a, b| a.x == b.x) {
        let (now, later) = rest.split_at_mut(same.len());
        rest = later;
        let jobs: Vec<Job<'_>> = std::iter::zip(same, now)
            .map(|(product, (sizes, y))| Job {
                sizes: *sizes,
                weight: weights[product.weight].raw(),
                y: Shared::new(y.data_mut()),
            })
            .collect();
        invariant(cpu, x[same[0].x].data(), &jobs);
    }
    for (product, (sizes, y)) in products.iter().zip(&mut outputs) {
        if let Some(bias) = product.bias {
            add_bias(y, bias, *sizes);
        }
        if let Some(residual) = product.residual {
            Kernels::accumulate(cpu, y, residual)?;
        }
    }
    Ok(outputs.into_iter().map(|(_, y)| y).collect())
}

pub(crate) fn backward(
    cpu: &Cpu,
    input: Linear<&Array<f32>>,
    gradient: &Array<f32>,
    needs: [bool; 3],
) -> Result<[Option<Array<f32>>; 3]> {
    let sizes = check(input.x.shape(), input.weight.shape(), input.bias.map(Array::shape))?;
    expect_shape("linear", "gradient", gradient.shape(), &output_shape(input.x.shape(), sizes), "[.., out]")?;
    let x = Matrix::rows(input.x.data(), sizes.rows, sizes.inner);
    let w = Matrix::rows(input.weight.data(), sizes.outer, sizes.inner);
    let dy = Matrix::rows(gradient.data(), sizes.rows, sizes.outer);
    let dx = needs[0].then(|| {
        let mut dx = cpu.uninit(input.x.shape());
        product(cpu, dx.data_mut(), Accum::Replace, dy, w);
        dx
    });
    let dw = needs[1].then(|| {
        let mut dw = cpu.uninit(input.weight.shape());
        product(cpu, dw.data_mut(), Accum::Replace, dy.t(), x);
        dw
    });
    let db = needs[2].then(|| {
        let mut db = cpu.zeros(&[sizes.outer]);
        let sums = db.data_mut();
        for row in gradient.data().chunks_exact(sizes.outer.max(1)) {
            sums.iter_mut().zip(row).for_each(|(s, g)| *s += g);
        }
        db
    });
    Ok([dx, dw, db])
}

/// One product y = x Wᵀ.
struct Job<'a> {
    sizes: Sizes,
    weight: RawWeight<'a>,
    y: Shared<'a>,
}

/// Computes y = x Wᵀ for each job, all with the same x. Each row's result is independent of the other rows.
fn invariant(cpu: &Cpu, x: &[f32], jobs: &[Job<'_>]) {
    let outer: usize = jobs.iter().map(|job| job.sizes.outer).sum();
    let work = jobs.first().map_or(0, |job| job.sizes.rows * job.sizes.inner);
    if jobs.first().is_none_or(|job| job.sizes.rows == 0) {
        return;
    }
    // Each task takes some rows of W, so that all threads together read W once; tasks have a minimum size.
    let share = outer.div_ceil(cpu.threads() * 4);
    let per_task = share.max(8 * 1024 / work.max(1)).next_multiple_of(COLUMNS).max(COLUMNS);
    let tasks = |job: &Job<'_>| job.sizes.outer.div_ceil(per_task);
    let run = |mut task: usize| {
        for job in jobs {
            let count = tasks(job);
            if task >= count {
                task -= count;
                continue;
            }
            let Job { sizes, weight, ref y } = *job;
            let columns = task * per_task..((task + 1) * per_task).min(sizes.outer);
            return with_scratch(Dots::scratch(sizes), |scratch| {
                cpu.level().run(Dots { sizes, x, weight, y, columns, scratch });
            });
        }
    };
    let count = jobs.iter().map(tasks).sum();
    if work * outer < SMALL { (0..count).for_each(run) } else { cpu.parallel(count, run) }
}

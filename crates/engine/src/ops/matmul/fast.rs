//! Optimised batched matrix product, based on `gemm-f32`.
//!
//! With a shared B, the whole batch becomes one product. Small or numerous products are distributed over threads,
//! one thread each; few large ones use all threads each. For inference, every element is a single chain of
//! multiply-adds over k in ascending order, so that it depends only on its row of A and column of B, not on the
//! batch: it reads packed columns of B or, for one or two rows, B in place.

use std::ops::Range;

use super::{MatMul, MatMulBackward, Sizes, Transpose};
use crate::cpu::{Carve, Cpu, Products, Shared, with_scratch};
use crate::error::Result;
use crate::product::{Accum, Matrix, product, product_here};
use crate::simd::{Band, Block, BlockMut, Epilogue, Kernel, LANES, Simd, Strided, gemm, transpose};
use crate::tensor::Tensor;

/// Batch of contiguous matrices of equal size, or one matrix for all entries.
#[derive(Clone, Copy)]
struct Batch<'a> {
    data: &'a [f32],
    /// Rows and columns in storage order.
    size: [usize; 2],
    transposed: bool,
    shared: bool,
}

impl<'a> Batch<'a> {
    fn entry(self, i: usize) -> &'a [f32] {
        let len = self.size[0] * self.size[1];
        if self.shared { self.data } else { &self.data[i * len..][..len] }
    }

    fn matrix(self, i: usize) -> Matrix<'a> {
        let matrix = Matrix::rows(self.entry(i), self.size[0], self.size[1]);
        if self.transposed { matrix.t() } else { matrix }
    }

    /// Transposed view of the same memory.
    fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }
}

/// Views of A, B and C (or its gradient) of a call. With a shared B and a non-transposed A, the batch becomes one
/// tall product.
fn batches<'a>(
    sizes: Sizes,
    transpose: Transpose,
    a: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
) -> (Sizes, [Batch<'a>; 3]) {
    let mut sizes = sizes;
    if sizes.shared && !transpose.a {
        sizes = Sizes { batch: 1, m: sizes.batch * sizes.m, shared: false, ..sizes };
    }
    let Sizes { m, n, k, shared, .. } = sizes;
    let stored = |data, rows, columns, transposed: bool| {
        let size = if transposed { [columns, rows] } else { [rows, columns] };
        Batch { data, size, transposed, shared: false }
    };
    let b = Batch { shared, ..stored(b, k, n, transpose.b) };
    (sizes, [stored(a, m, k, transpose.a), b, stored(c, m, n, false)])
}

pub(crate) fn forward(cpu: &Cpu, op: MatMul, (sizes, shape): (Sizes, Vec<usize>)) -> Result<Tensor> {
    let mut c = cpu.uninit(&shape);
    let (sizes, [a, b, _]) = batches(sizes, op.transpose, op.a.f32().data(), op.b.f32().data(), &[]);
    match cpu.products() {
        Products::Fastest => products(cpu, sizes.batch, c.data_mut(), [sizes.m, sizes.n, sizes.k], a, b),
        Products::BatchInvariant => invariant(cpu, sizes, a, b, c.data_mut()),
    }
    Ok(op.a.like(c))
}

pub(crate) fn backward(cpu: &Cpu, op: MatMulBackward, sizes: Sizes) -> Result<[Option<Tensor>; 2]> {
    let (transpose, dc) = (op.transpose, op.gradient.f32().data());
    let (sizes, [a, b, dc]) = batches(sizes, transpose, op.a.f32().data(), op.b.f32().data(), dc);
    let Sizes { batch, m, n, k, shared } = sizes;
    // dA = dC Bᵀ or, if A is stored transposed, its transpose B dCᵀ; likewise for dB.
    let da = op.needs[0].then(|| {
        let mut da = cpu.uninit(op.a.shape());
        match transpose.a {
            false => products(cpu, batch, da.data_mut(), [m, k, n], dc, b.t()),
            true => products(cpu, batch, da.data_mut(), [k, m, n], b, dc.t()),
        }
        op.a.like(da)
    });
    let db = op.needs[1].then(|| {
        let mut db = cpu.uninit(op.b.shape());
        let (size, left, right) = if transpose.b { ([n, k, m], dc.t(), a) } else { ([k, n, m], a.t(), dc) };
        if shared {
            sum_of_products(cpu, batch, db.data_mut(), size, left, right);
        } else {
            products(cpu, batch, db.data_mut(), size, left, right);
        }
        op.b.like(db)
    });
    Ok([da, db])
}

/// cᵢ = aᵢ bᵢ for `count` entries of `size` = [rows, columns, inner], contiguous in c.
#[allow(unsafe_code)]
fn products(cpu: &Cpu, count: usize, c: &mut [f32], size: [usize; 3], a: Batch<'_>, b: Batch<'_>) {
    /// Number of multiply-adds from which several threads pay off.
    const LARGE: usize = 128 * 128 * 128;
    let [rows, columns, inner] = size;
    if c.is_empty() || inner == 0 {
        c.fill(0.0);
        return;
    }
    let work = rows * columns * inner;
    if work < LARGE || (count >= 2 * cpu.threads() && cpu.threads() > 1) {
        let out = Shared::new(c);
        cpu.for_rows(cpu.row_parts(count, work), |_, range| {
            for i in range {
                // SAFETY: each entry is written by one task.
                let c = unsafe { out.part(i * rows * columns, rows * columns) };
                product_here(c, Accum::Replace, a.matrix(i), b.matrix(i));
            }
        });
    } else {
        for (i, c) in c.chunks_exact_mut(rows * columns).enumerate() {
            product(cpu, c, Accum::Replace, a.matrix(i), b.matrix(i));
        }
    }
}

/// c = Σᵢ aᵢ bᵢ, summed in order.
fn sum_of_products(cpu: &Cpu, count: usize, c: &mut [f32], size: [usize; 3], a: Batch<'_>, b: Batch<'_>) {
    if count == 0 || size[2] == 0 || c.is_empty() {
        c.fill(0.0);
        return;
    }
    for i in 0..count {
        let accum = if i == 0 { Accum::Replace } else { Accum::Add };
        product(cpu, c, accum, a.matrix(i), b.matrix(i));
    }
}

/// Number of columns of B packed together.
const COLUMNS: usize = 32;
/// Number of rows of A that use one packed block.
const ROWS: usize = 256;
/// Rows of C computed before they are copied to the result.
const TILE: usize = 24;

fn invariant(cpu: &Cpu, sizes: Sizes, a: Batch<'_>, b: Batch<'_>, c: &mut [f32]) {
    let Sizes { batch, m, n, k, .. } = sizes;
    if c.is_empty() || k == 0 {
        c.fill(0.0);
        return;
    }
    if m <= 2 && !b.transposed {
        return few_rows(cpu, sizes, a, b, c);
    }
    let (strips, blocks) = (n.div_ceil(COLUMNS), m.div_ceil(ROWS));
    let out = Shared::new(c);
    let scratch = Carve::size(k * COLUMNS) + Carve::size(TILE * COLUMNS);
    let parts = cpu.row_parts(batch * strips * blocks, m.min(ROWS) * n.min(COLUMNS) * k / 8);
    cpu.for_rows(parts, |_, range| {
        for task in range {
            let (entry, rest) = (task / (strips * blocks), task % (strips * blocks));
            let (block, strip) = (rest / strips, rest % strips);
            with_scratch(scratch, |scratch| {
                let mut carve = Carve(scratch);
                cpu.level().run(Chains {
                    k,
                    n,
                    rows: block * ROWS..((block + 1) * ROWS).min(m),
                    columns: strip * COLUMNS..((strip + 1) * COLUMNS).min(n),
                    a: match a.transposed {
                        false => Strided::rows(a.entry(entry), k),
                        true => Strided::transposed(a.entry(entry), m),
                    },
                    b: b.entry(entry),
                    b_transposed: b.transposed,
                    packed: carve.take(k * COLUMNS),
                    tile: carve.take(TILE * COLUMNS),
                    c: &out,
                    at: entry * m * n,
                });
            });
        }
    });
}

/// panel[l, j] = b[j, l] for j < used ≤ 16, l < k.
#[inline(always)]
fn pack_transposed<S: Simd>(s: S, k: usize, used: usize, b: &[f32], panel: &mut [f32]) {
    let whole = [used / LANES * LANES, k / LANES * LANES];
    transpose(s, whole[0], whole[1], b, k, panel, 16);
    for j in 0..used {
        let done = if j < whole[0] { whole[1] } else { 0 };
        for l in done..k {
            panel[l * 16 + j] = b[j * k + l];
        }
    }
}

/// Columns per task when B is read in place.
const SPAN: usize = 512;

/// Product for few rows of A: each row of B is added to the sums as it is read, so B is read once and sequentially.
#[allow(unsafe_code)]
fn few_rows(cpu: &Cpu, sizes: Sizes, a: Batch<'_>, b: Batch<'_>, c: &mut [f32]) {
    let Sizes { batch, m, n, k, .. } = sizes;
    let spans = n.div_ceil(SPAN);
    let out = Shared::new(c);
    cpu.for_rows(cpu.row_parts(batch * spans, m * k * n.min(SPAN) / 2), |_, range| {
        for task in range {
            let (entry, first) = (task / spans, task % spans * SPAN);
            let width = SPAN.min(n - first);
            let (a_data, b) = (a.entry(entry), &b.entry(entry)[first..]);
            for i in 0..m {
                // SAFETY: these rows and columns belong to this task only.
                let c = unsafe { out.part((entry * m + i) * n + first, width) };
                let a = match a.transposed {
                    false => Strided { data: &a_data[i * k..], row: k, col: 1 },
                    true => Strided { data: &a_data[i..], row: 1, col: m },
                };
                cpu.level().run(Row { k, a, b, step: n, c });
            }
        }
    });
}

/// c = Σ_l a_l b_l, where the rows b_l have stride `step`.
struct Row<'a> {
    k: usize,
    a: Strided<'a>,
    b: &'a [f32],
    step: usize,
    c: &'a mut [f32],
}

impl Kernel for Row<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { k, a, b, step, c } = self;
        let whole = c.len() / LANES * LANES;
        // The last columns use a partial vector, so that they are fused like all others.
        let (c, rest) = c.split_at_mut(whole);
        let mut last = s.splat(0.0);
        c.fill(0.0);
        for l in 0..k {
            let x = s.splat(a.data[l * a.col]);
            let b = &b[l * step..];
            let mut j = 0;
            while j < whole {
                let sum = s.fma(x, s.load(&b[j..]), s.load(&c[j..]));
                s.store(&mut c[j..], sum);
                j += LANES;
            }
            if !rest.is_empty() {
                let mut v = [0.0; LANES];
                v[..rest.len()].copy_from_slice(&b[whole..][..rest.len()]);
                last = s.fma(x, s.load(&v), last);
            }
        }
        let mut v = [0.0; LANES];
        s.store(&mut v, last);
        rest.copy_from_slice(&v[..rest.len()]);
    }
}

/// Task that computes some rows and at most 32 columns of one product.
struct Chains<'a> {
    k: usize,
    n: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    a: Strided<'a>,
    b: &'a [f32],
    b_transposed: bool,
    packed: &'a mut [f32],
    tile: &'a mut [f32],
    c: &'a Shared<'a>,
    /// Offset of this product's C.
    at: usize,
}

impl Kernel for Chains<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { k, n, rows, columns, a, b, b_transposed, packed, tile, c, at } = self;
        let width = columns.len().next_multiple_of(16);
        // Panels of 16 columns, zero-padded.
        for (p, panel) in packed[..k * width].chunks_exact_mut(k * 16).enumerate() {
            let first = columns.start + p * 16;
            let used = (columns.end - first).min(16);
            if used < 16 {
                panel.fill(0.0);
            }
            if b_transposed {
                pack_transposed(s, k, used, &b[first * k..], panel);
            } else {
                for (l, row) in panel.chunks_exact_mut(16).enumerate() {
                    row[..used].copy_from_slice(&b[l * n + first..][..used]);
                }
            }
        }
        let mut first = rows.start;
        while first < rows.end {
            let count = TILE.min(rows.end - first);
            let a = Strided { data: &a.data[first * a.row..], ..a };
            let size = [count, width, k];
            gemm(
                s,
                size,
                Band::Full,
                a,
                Block::panels(packed, k),
                BlockMut::rows(tile, width),
                Epilogue::Set,
            );
            for i in 0..count {
                // SAFETY: these rows and columns belong to this task only.
                let c = unsafe { c.part(at + (first + i) * n + columns.start, columns.len()) };
                c.copy_from_slice(&tile[i * width..][..columns.len()]);
            }
            first += count;
        }
    }
}

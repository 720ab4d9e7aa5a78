//! faer's matrix product for training. For inference, dot products in one fixed order: eight partial sums
//! over the inner dimension, then their sum, so that a row's bits depend on nothing but the row.

use faer::{Accum, MatRef};

use super::{Linear, Sizes, check, output_shape};
use crate::cpu::{Cpu, Products, Shared};
use crate::error::{Result, expect_shape};
use crate::product::product;
use crate::simd::{Kernel, LANES, Simd};
use crate::tensor::Tensor;

pub(crate) fn forward(cpu: &Cpu, input: Linear<&Tensor<f32>>) -> Result<Tensor<f32>> {
    let sizes = check(input.x.shape(), input.weight.shape(), input.bias.map(Tensor::shape))?;
    let mut y = cpu.uninit(&output_shape(input.x.shape(), sizes));
    let (x, w) = (input.x.data(), input.weight.data());
    match cpu.products() {
        Products::Fastest => {
            let w = MatRef::from_row_major_slice(w, sizes.outer, sizes.inner);
            let x = MatRef::from_row_major_slice(x, sizes.rows, sizes.inner);
            product(cpu, y.data_mut(), Accum::Replace, x, w.transpose());
        }
        Products::BatchInvariant => invariant(cpu, sizes, x, w, y.data_mut()),
    }
    if let Some(bias) = input.bias {
        let bias = bias.data();
        for row in y.data_mut().chunks_exact_mut(sizes.outer.max(1)) {
            row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
    }
    Ok(y)
}

pub(crate) fn backward(
    cpu: &Cpu,
    input: Linear<&Tensor<f32>>,
    gradient: &Tensor<f32>,
    needs: [bool; 3],
) -> Result<[Option<Tensor<f32>>; 3]> {
    let sizes = check(input.x.shape(), input.weight.shape(), input.bias.map(Tensor::shape))?;
    expect_shape("linear", "gradient", gradient.shape(), &output_shape(input.x.shape(), sizes), "[.., out]")?;
    let x = MatRef::from_row_major_slice(input.x.data(), sizes.rows, sizes.inner);
    let w = MatRef::from_row_major_slice(input.weight.data(), sizes.outer, sizes.inner);
    let dy = MatRef::from_row_major_slice(gradient.data(), sizes.rows, sizes.outer);
    let dx = needs[0].then(|| {
        let mut dx = cpu.uninit(input.x.shape());
        product(cpu, dx.data_mut(), Accum::Replace, dy, w);
        dx
    });
    let dw = needs[1].then(|| {
        let mut dw = cpu.uninit(input.weight.shape());
        product(cpu, dw.data_mut(), Accum::Replace, dy.transpose(), x);
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

/// y = x Wᵀ with bits of a row that do not depend on the other rows.
fn invariant(cpu: &Cpu, sizes: Sizes, x: &[f32], w: &[f32], y: &mut [f32]) {
    if sizes.rows == 0 || sizes.outer == 0 {
        return;
    }
    // Each task takes some rows of W, so that W is read once by all threads together.
    let per_task = sizes.outer.div_ceil(cpu.threads() * 4).next_multiple_of(COLUMNS).max(COLUMNS);
    let tasks =
        if sizes.rows * sizes.inner * sizes.outer < 32 * 1024 { 1 } else { sizes.outer.div_ceil(per_task) };
    let per_task = if tasks == 1 { sizes.outer } else { per_task };
    let out = Shared::new(y);
    cpu.parallel(tasks, |t| {
        let columns = t * per_task..((t + 1) * per_task).min(sizes.outer);
        cpu.level().run(Dots { sizes, x, w, y: &out, columns });
    });
}

const COLUMNS: usize = 4;

struct Dots<'a> {
    sizes: Sizes,
    x: &'a [f32],
    w: &'a [f32],
    y: &'a Shared<'a>,
    columns: std::ops::Range<usize>,
}

impl Kernel for Dots<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Sizes { rows, inner, .. } = self.sizes;
        // Rows of x that stay in the second-level cache while W goes by.
        let block = (64 * 1024 / inner.max(1)).clamp(3, 512) / 3 * 3;
        for r0 in (0..rows).step_by(block) {
            let r1 = (r0 + block).min(rows);
            let mut c = self.columns.start;
            while c < self.columns.end {
                let wide = self.columns.end - c;
                let mut r = r0;
                while r < r1 {
                    match (r1 - r, wide) {
                        (1, 8..) => self.tile::<S, 1, 8>(s, r, c),
                        (1, 4..) => self.tile::<S, 1, 4>(s, r, c),
                        (1, _) => self.tile::<S, 1, 1>(s, r, c),
                        (2, 8..) => self.tile::<S, 2, 8>(s, r, c),
                        (2, 4..) => self.tile::<S, 2, 4>(s, r, c),
                        (2, _) => self.tile::<S, 2, 1>(s, r, c),
                        (_, 8..) => {
                            self.tile::<S, 3, 4>(s, r, c);
                            self.tile::<S, 3, 4>(s, r, c + 4);
                        }
                        (_, 4..) => self.tile::<S, 3, 4>(s, r, c),
                        (_, _) => self.tile::<S, 3, 1>(s, r, c),
                    }
                    r += (r1 - r).min(3);
                }
                c += match wide {
                    8.. => 8,
                    4.. => 4,
                    _ => 1,
                };
            }
        }
    }
}

impl Dots<'_> {
    #[inline(always)]
    #[allow(unsafe_code)]
    fn tile<S: Simd, const M: usize, const N: usize>(&self, s: S, r: usize, c: usize) {
        let Sizes { inner, outer, .. } = self.sizes;
        let x: [&[f32]; M] = std::array::from_fn(|i| &self.x[(r + i) * inner..][..inner]);
        let w: [&[f32]; N] = std::array::from_fn(|j| &self.w[(c + j) * inner..][..inner]);
        let mut acc = [[s.splat(0.0); N]; M];
        let whole = inner / LANES * LANES;
        let mut l = 0;
        while l < whole {
            // SAFETY: l + 8 ≤ inner, and every row slice has length inner.
            unsafe {
                let xs: [S::V; M] = std::array::from_fn(|i| s.load_ptr(x[i].as_ptr().add(l)));
                for j in 0..N {
                    let wj = s.load_ptr(w[j].as_ptr().add(l));
                    for i in 0..M {
                        acc[i][j] = s.fma(xs[i], wj, acc[i][j]);
                    }
                }
            }
            l += LANES;
        }
        for i in 0..M {
            // SAFETY: row r + i, columns c..c + N belong to this task alone.
            let out = unsafe { self.y.part((r + i) * outer + c, N) };
            for j in 0..N {
                let mut sum = s.sum(acc[i][j]);
                for l in whole..inner {
                    sum += x[i][l] * w[j][l];
                }
                out[j] = sum;
            }
        }
    }
}

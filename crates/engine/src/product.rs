//! Large matrix products: the single-threaded kernels of the `gemm-f32` crate, distributed over the engine's
//! threads.

use gemm_common::Parallelism;

use crate::cpu::{Cpu, Shared};

/// Number of multiply-adds below which a single thread is used.
const SMALL: usize = 64 * 64 * 64;
/// Maximum number of rows of C for which a column-major B is passed to the library without transposing the product.
const FEW_ROWS: usize = 32;

/// View of an f32 matrix with arbitrary row and column strides.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    /// Number of rows and columns.
    size: [usize; 2],
    /// Row and column stride.
    step: [usize; 2],
}

impl<'a> Matrix<'a> {
    /// Row-major matrix.
    pub(crate) fn rows(data: &'a [f32], rows: usize, columns: usize) -> Self {
        assert!(data.len() == rows * columns, "a matrix of {rows} by {columns} in {} numbers", data.len());
        Self { data, size: [rows, columns], step: [columns, 1] }
    }

    /// Transposed view of the same memory.
    pub(crate) fn t(self) -> Self {
        let Self { data, size: [rows, columns], step: [row, column] } = self;
        Self { data, size: [columns, rows], step: [column, row] }
    }

    /// Pointer to element (`row`, `column`).
    fn at(self, row: usize, column: usize) -> *const f32 {
        self.data[row * self.step[0] + column * self.step[1]..].as_ptr()
    }
}

/// How the product is combined with the contents of C.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accum {
    /// C = A·B.
    Replace,
    /// C += A·B.
    Add,
}

/// c = a·b or c += a·b, row-major [m, n], on all threads; each takes a share of the longer dimension of c.
pub(crate) fn product(cpu: &Cpu, c: &mut [f32], accum: Accum, a: Matrix<'_>, b: Matrix<'_>) {
    let ([m, k], n) = (a.size, b.size[1]);
    let by_rows = m >= n;
    let side = m.max(n);
    let parts = if m * n * k < SMALL { 1 } else { cpu.threads().min(side.div_ceil(16)) };
    // Shares are multiples of 16, so that all but the last fill the kernels' tiles.
    let share = side.div_ceil(parts).next_multiple_of(16).max(16);
    assert!(c.len() == m * n);
    let c = Shared::new(c);
    cpu.parallel(side.div_ceil(share), |part| {
        let range = part * share..((part + 1) * share).min(side);
        let [rows, columns] = if by_rows { [range, 0..n] } else { [0..m, range] };
        #[allow(unsafe_code)]
        // SAFETY: C has m·n elements, and each task has its own rows or columns.
        unsafe {
            block(c.pointer(0), accum, a, b, rows, columns);
        }
    });
}

/// Single-threaded variant of [`product`].
pub(crate) fn product_here(c: &mut [f32], accum: Accum, a: Matrix<'_>, b: Matrix<'_>) {
    let (m, n) = (a.size[0], b.size[1]);
    assert!(c.len() == m * n);
    #[allow(unsafe_code)]
    // SAFETY: C has m·n elements, all exclusively borrowed by this call.
    unsafe {
        block(c.as_mut_ptr(), accum, a, b, 0..m, 0..n);
    }
}

/// Computes the given rows and columns of the product.
/// # Safety
/// `c` must be valid for all elements of C, and no other task may access those of these rows and columns.
#[allow(unsafe_code)]
unsafe fn block(
    c: *mut f32,
    accum: Accum,
    a: Matrix<'_>,
    b: Matrix<'_>,
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
) {
    let (k, n) = (a.size[1], b.size[1]);
    let [m, width] = [rows.len(), columns.len()];
    assert!(b.size[0] == k && rows.end <= a.size[0] && columns.end <= n);
    if m == 0 || width == 0 {
        return;
    }
    let add = accum == Accum::Add;
    if k == 0 {
        for row in rows.filter(|_| !add) {
            // SAFETY: inside C by the assertion and the caller's guarantee; accessed only by this call.
            unsafe { std::slice::from_raw_parts_mut(c.add(row * n + columns.start), width) }.fill(0.0);
        }
        return;
    }
    // The library's kernels store columns of their result, so computing Cᵀ = Bᵀ Aᵀ stores rows of C and is faster.
    // The exception is few rows with a column-major B, which the library would have to repack.
    let direct = m <= FEW_ROWS && b.step[0] == 1;
    let (size, left, right, c_step) =
        if direct { ([m, width], a, b, [n, 1]) } else { ([width, m], b.t(), a.t(), [1, n]) };
    let [left_at, right_at] = if direct { [rows.start, columns.start] } else { [columns.start, rows.start] };
    let (left_start, right_start) = (left.at(left_at, 0), right.at(0, right_at));
    let [c_step, left_step, right_step] =
        [c_step, left.step, right.step].map(|step| step.map(|distance| distance as isize));
    let gemm = gemm_f32::gemm::f32::get_gemm_fn();
    // SAFETY: the rows and columns exist in A, B and C, and the strides stay within them.
    unsafe {
        gemm(
            size[0],
            size[1],
            k,
            c.add(rows.start * n + columns.start),
            c_step[1],
            c_step[0],
            add,
            left_start,
            left_step[1],
            left_step[0],
            right_start,
            right_step[1],
            right_step[0],
            f32::from(u8::from(add)),
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

//! Small matrix product used by all chunk and tile kernels: C ← epilogue(C, A·B).
//!
//! The kernels multiply small matrices that are already in cache, so the operands are used in the layout they have
//! instead of being repacked as a general library would. A is read element by element with arbitrary strides, so a
//! transposed A costs nothing; B and C are accessed in panels of 16 columns. Every element of C is a single chain of
//! multiply-adds over k in ascending order, independent of the tile: a row's result is bit-identical whatever other
//! rows are in the call.
#![allow(unsafe_code)]

use super::{Kernel, LANES, Simd};

/// Columns per panel.
pub(crate) const PANEL: usize = 16;
const ROWS: usize = 6;

/// Left operand: element (i, l) is `data[i·row + l·col]`.
#[derive(Clone, Copy)]
pub(crate) struct Strided<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub col: usize,
}

impl<'a> Strided<'a> {
    /// Row-major matrix.
    #[inline(always)]
    pub(crate) fn rows(data: &'a [f32], width: usize) -> Self {
        Self { data, row: width, col: 1 }
    }

    /// Transpose of a row-major matrix.
    #[inline(always)]
    pub(crate) fn transposed(data: &'a [f32], width: usize) -> Self {
        Self { data, row: 1, col: width }
    }
}

/// Right operand: element (l, j) is `data[l·row + (j / 16)·panel + j % 16]`.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub panel: usize,
}

impl<'a> Block<'a> {
    /// Row-major matrix.
    #[inline(always)]
    pub(crate) fn rows(data: &'a [f32], width: usize) -> Self {
        Self { data, row: width, panel: PANEL }
    }

    /// Consecutive panels of 16 columns, each `rows` × 16.
    #[inline(always)]
    pub(crate) fn panels(data: &'a [f32], rows: usize) -> Self {
        Self { data, row: PANEL, panel: rows * PANEL }
    }
}

/// Result, with the layout of a [`Block`].
pub(crate) struct BlockMut<'a> {
    pub data: &'a mut [f32],
    pub row: usize,
    pub panel: usize,
}

impl<'a> BlockMut<'a> {
    /// Row-major matrix.
    #[inline(always)]
    pub(crate) fn rows(data: &'a mut [f32], width: usize) -> Self {
        Self { data, row: width, panel: PANEL }
    }

    /// Consecutive panels of 16 columns, each `rows` × 16.
    #[inline(always)]
    pub(crate) fn panels(data: &'a mut [f32], rows: usize) -> Self {
        Self { data, row: PANEL, panel: rows * PANEL }
    }
}

/// How the product is combined with C.
#[derive(Clone, Copy)]
pub(crate) enum Epilogue<'a> {
    /// C = AB
    Set,
    /// C += AB
    Add,
    /// C −= AB
    Sub,
    /// C = factor·C + AB
    Decay(f32),
    /// C += diag(weights) AB
    Weighted(&'a [f32]),
    /// C = diag(factors) C + AB
    Rescaled(&'a [f32]),
}

/// Which elements of A are non-zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Band {
    Full,
    /// A(i, l) = 0 for l > i.
    Lower,
    /// A(i, l) = 0 for l < i.
    Upper,
}

struct Product<'a> {
    size: [usize; 3],
    band: Band,
    a: Strided<'a>,
    b: Block<'a>,
    c: BlockMut<'a>,
    epilogue: Epilogue<'a>,
}

/// C ← epilogue(C, A·B) with `size` = [rows of C, columns of C (a multiple of 16), columns of A].
#[inline(always)]
pub(crate) fn gemm<S: Simd>(
    s: S,
    size: [usize; 3],
    band: Band,
    a: Strided<'_>,
    b: Block<'_>,
    c: BlockMut<'_>,
    epilogue: Epilogue<'_>,
) {
    s.call(Product { size, band, a, b, c, epilogue });
}

impl Kernel for Product<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [m, n, k] = self.size;
        let Self { a, b, c, epilogue, band, .. } = self;
        if m == 0 || n == 0 {
            return;
        }
        let panels = n / PANEL;
        assert!(n.is_multiple_of(PANEL));
        if k > 0 {
            assert!((m - 1) * a.row + (k - 1) * a.col < a.data.len());
            assert!((k - 1) * b.row + (panels - 1) * b.panel + PANEL <= b.data.len());
        }
        assert!((m - 1) * c.row + (panels - 1) * c.panel + PANEL <= c.data.len());
        if let Epilogue::Weighted(w) | Epilogue::Rescaled(w) = epilogue {
            assert!(w.len() >= m);
        }
        if m == 1 {
            let k = if band == Band::Lower { k.min(1) } else { k };
            let mut p = 0;
            while p < panels {
                let count = if p + 4 <= panels { 4 } else { 1 };
                // SAFETY: the assertions above bound every address: one row, columns 0..k, panels p..p + count.
                unsafe {
                    let b = (b.data.as_ptr().add(p * b.panel), b.row, b.panel);
                    let c = (c.data.as_mut_ptr().add(p * c.panel), c.panel);
                    match count {
                        4 => row_tile::<S, 4>(s, k, (a.data.as_ptr(), a.col), b, c, epilogue),
                        _ => row_tile::<S, 1>(s, k, (a.data.as_ptr(), a.col), b, c, epilogue),
                    }
                }
                p += count;
            }
            return;
        }
        // Distribute rows evenly: 16 rows become tiles of 6 + 5 + 5, so no tile is small.
        let tiles = m.div_ceil(ROWS);
        for p in 0..panels {
            let mut i = 0;
            for t in 0..tiles {
                let rows = (m - i).div_ceil(tiles - t);
                let (k0, k1) = match band {
                    Band::Full => (0, k),
                    Band::Lower => (0, k.min(i + rows)),
                    Band::Upper => (i.min(k), k),
                };
                // SAFETY: the assertions above bound every address accessed by the tile: rows i..i+rows ≤ m,
                // columns k0..k1 ≤ k, panel p < panels.
                unsafe {
                    let a = Operand { p: a.data.as_ptr().add(i * a.row), row: a.row, col: a.col };
                    let b = (b.data.as_ptr().add(p * b.panel), b.row);
                    let c_at = (c.data.as_mut_ptr().add(p * c.panel + i * c.row), c.row);
                    let e = match epilogue {
                        Epilogue::Weighted(w) => Epilogue::Weighted(&w[i..i + rows]),
                        Epilogue::Rescaled(w) => Epilogue::Rescaled(&w[i..i + rows]),
                        other => other,
                    };
                    match rows {
                        1 => tile::<S, 1>(s, k0, k1, a, b, c_at, e),
                        2 => tile::<S, 2>(s, k0, k1, a, b, c_at, e),
                        3 => tile::<S, 3>(s, k0, k1, a, b, c_at, e),
                        4 => tile::<S, 4>(s, k0, k1, a, b, c_at, e),
                        5 => tile::<S, 5>(s, k0, k1, a, b, c_at, e),
                        _ => tile::<S, 6>(s, k0, k1, a, b, c_at, e),
                    }
                }
                i += rows;
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Operand {
    p: *const f32,
    row: usize,
    col: usize,
}

/// # Safety
/// All addressed elements must be in bounds.
#[inline(always)]
unsafe fn tile<S: Simd, const M: usize>(
    s: S,
    k0: usize,
    k1: usize,
    a: Operand,
    b: (*const f32, usize),
    c: (*mut f32, usize),
    epilogue: Epilogue<'_>,
) {
    let zero = s.splat(0.0);
    let mut acc = [[zero; 2]; M];
    // SAFETY: guaranteed by the caller.
    unsafe {
        // Two row pointers, each used with offsets of 0, 1 and 2 strides, which the addressing modes provide for
        // free.
        let mut near = a.p.add(k0 * a.col);
        let mut far = a.p.add(k0 * a.col + if M > 3 { 3 * a.row } else { 0 });
        let mut pb = b.0.add(k0 * b.1);
        for _ in k0..k1 {
            let b0 = s.load_ptr(pb);
            let b1 = s.load_ptr(pb.add(LANES));
            for i in 0..M {
                let x = s.splat(if i < 3 { *near.add(i * a.row) } else { *far.add((i - 3) * a.row) });
                acc[i][0] = s.fma(x, b0, acc[i][0]);
                acc[i][1] = s.fma(x, b1, acc[i][1]);
            }
            near = near.wrapping_add(a.col);
            far = far.wrapping_add(a.col);
            pb = pb.wrapping_add(b.1);
        }
        for i in 0..M {
            for h in 0..2 {
                put(s, c.0.add(i * c.1 + h * LANES), acc[i][h], i, epilogue);
            }
        }
    }
}

/// One row times P panels at once, to hide the latency of the dependent multiply-adds.
/// # Safety
/// All addressed elements must be in bounds.
#[inline(always)]
unsafe fn row_tile<S: Simd, const P: usize>(
    s: S,
    k: usize,
    a: (*const f32, usize),
    b: (*const f32, usize, usize),
    c: (*mut f32, usize),
    epilogue: Epilogue<'_>,
) {
    let mut acc = [[s.splat(0.0); 2]; P];
    // SAFETY: guaranteed by the caller.
    unsafe {
        for l in 0..k {
            let (x, row) = (s.splat(*a.0.add(l * a.1)), b.0.add(l * b.1));
            for p in 0..P {
                for h in 0..2 {
                    acc[p][h] = s.fma(x, s.load_ptr(row.add(p * b.2 + h * LANES)), acc[p][h]);
                }
            }
        }
        for p in 0..P {
            for h in 0..2 {
                put(s, c.0.add(p * c.1 + h * LANES), acc[p][h], 0, epilogue);
            }
        }
    }
}

/// Applies the epilogue to eight elements of row i of C, given those of A·B.
/// # Safety
/// `p` must be valid for reads and writes of eight elements.
#[inline(always)]
pub(crate) unsafe fn put<S: Simd>(s: S, p: *mut f32, product: S::V, i: usize, epilogue: Epilogue<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let y = match epilogue {
            Epilogue::Set => product,
            Epilogue::Add => s.add(s.load_ptr(p), product),
            Epilogue::Sub => s.sub(s.load_ptr(p), product),
            Epilogue::Decay(factor) => s.fma(s.splat(factor), s.load_ptr(p), product),
            Epilogue::Weighted(w) => s.fma(s.splat(w[i]), product, s.load_ptr(p)),
            Epilogue::Rescaled(w) => s.fma(s.splat(w[i]), s.load_ptr(p), product),
        };
        s.store_ptr(p, y);
    }
}

/// Writes the transpose of the row-major `rows` × `cols` matrix `a` (row stride `lda`) to `b` (row stride `ldb`).
/// `rows` and `cols` are multiples of 8.
#[inline(always)]
pub(crate) fn transpose<S: Simd>(
    s: S,
    rows: usize,
    cols: usize,
    a: &[f32],
    lda: usize,
    b: &mut [f32],
    ldb: usize,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    assert!(rows.is_multiple_of(LANES) && cols.is_multiple_of(LANES));
    assert!((rows - 1) * lda + cols <= a.len() && (cols - 1) * ldb + rows <= b.len());
    for i in (0..rows).step_by(LANES) {
        for j in (0..cols).step_by(LANES) {
            // SAFETY: the assertions bound both blocks.
            unsafe { s.transpose8(a.as_ptr().add(i * lda + j), lda, b.as_mut_ptr().add(j * ldb + i), ldb) };
        }
    }
}

//! Small matrix product used by all chunk and tile kernels: C ← epilogue(C, A·B).
//!
//! The kernels multiply small matrices that are already in cache, so the operands are used in the layout they have
//! instead of being repacked as a general library would. A is read element by element with arbitrary strides, so a
//! transposed A costs nothing; B and C are accessed in panels of 16 columns, each two vectors of eight lanes or one of
//! sixteen. Every element of C is a single chain of multiply-adds over k in ascending order, independent of the tile: a
//! row's result is bit-identical whatever other rows are in the call, and with AVX2 as with AVX-512.
#![allow(unsafe_code)]

use super::{LANES, Lanes, LanesKernel, Simd};

/// Columns per panel.
pub(crate) const PANEL: usize = 16;

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
    s.call_lanes(Product { size, band, a, b, c, epilogue });
}

impl LanesKernel for Product<'_> {
    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
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
        // Vectors of a panel.
        let vectors = PANEL / S::LANES;
        if m == 1 {
            let k = if band == Band::Lower { k.min(1) } else { k };
            let mut p = 0;
            while p < panels {
                let count = if p + 4 <= panels { 4 } else { 1 };
                // SAFETY: the assertions above bound every address: one row, columns 0..k, panels p..p + count.
                unsafe {
                    let b = (b.data.as_ptr().add(p * b.panel), b.row, b.panel);
                    let c = (c.data.as_mut_ptr().add(p * c.panel), c.panel);
                    let a = (a.data.as_ptr(), a.col);
                    match (count, vectors) {
                        (4, 1) => row_tile::<S, 4, 1>(s, k, a, b, c, epilogue),
                        (4, _) => row_tile::<S, 4, 2>(s, k, a, b, c, epilogue),
                        (_, 1) => row_tile::<S, 1, 1>(s, k, a, b, c, epilogue),
                        _ => row_tile::<S, 1, 2>(s, k, a, b, c, epilogue),
                    }
                }
                p += count;
            }
            return;
        }
        // Distribute rows evenly: 16 rows become tiles of 6 + 5 + 5, so no tile is small.
        let tiles = m.div_ceil(S::TILE);
        let mut p = 0;
        while p < panels {
            // Two vectors side by side, if there are two: those of a panel, or two panels of one vector each.
            let wide = vectors == 2 || p + 1 < panels;
            let (b_step, c_step) = if vectors == 2 { (LANES, LANES) } else { (b.panel, c.panel) };
            let mut i = 0;
            for t in 0..tiles {
                let rows = (m - i).div_ceil(tiles - t);
                let (k0, k1) = match band {
                    Band::Full => (0, k),
                    Band::Lower => (0, k.min(i + rows)),
                    Band::Upper => (i.min(k), k),
                };
                // SAFETY: the assertions above bound every address accessed by the tile: rows i..i+rows ≤ m,
                // columns k0..k1 ≤ k, panel p < panels, and p + 1 < panels if the second vector is in it.
                unsafe {
                    let a = Operand { p: a.data.as_ptr().add(i * a.row), row: a.row, col: a.col };
                    let b = (b.data.as_ptr().add(p * b.panel), b.row, b_step);
                    let c_at = (c.data.as_mut_ptr().add(p * c.panel + i * c.row), c.row, c_step);
                    let e = match epilogue {
                        Epilogue::Weighted(w) => Epilogue::Weighted(&w[i..i + rows]),
                        Epilogue::Rescaled(w) => Epilogue::Rescaled(&w[i..i + rows]),
                        other => other,
                    };
                    match wide {
                        true => tiles_of::<S, 2>(s, rows, [k0, k1], a, b, c_at, e),
                        false => tiles_of::<S, 1>(s, rows, [k0, k1], a, b, c_at, e),
                    }
                }
                i += rows;
            }
            p += if vectors == 1 && wide { 2 } else { 1 };
        }
    }
}

#[derive(Clone, Copy)]
struct Operand {
    p: *const f32,
    row: usize,
    col: usize,
}

/// A tile of `rows` rows and V vectors.
/// # Safety
/// All addressed elements must be in bounds.
#[inline(always)]
unsafe fn tiles_of<S: Lanes, const V: usize>(
    s: S,
    rows: usize,
    k: [usize; 2],
    a: Operand,
    b: (*const f32, usize, usize),
    c: (*mut f32, usize, usize),
    epilogue: Epilogue<'_>,
) {
    // Not compiled for vectors that never have it.
    if V * S::LANES < PANEL {
        return;
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        match rows {
            1 => tile::<S, 1, V>(s, k, a, b, c, epilogue),
            2 => tile::<S, 2, V>(s, k, a, b, c, epilogue),
            3 => tile::<S, 3, V>(s, k, a, b, c, epilogue),
            4 => tile::<S, 4, V>(s, k, a, b, c, epilogue),
            5 => tile::<S, 5, V>(s, k, a, b, c, epilogue),
            7 if S::TILE > 6 => tile::<S, 7, V>(s, k, a, b, c, epilogue),
            8 if S::TILE > 6 => tile::<S, 8, V>(s, k, a, b, c, epilogue),
            _ => tile::<S, 6, V>(s, k, a, b, c, epilogue),
        }
    }
}

/// M rows times V vectors of B, which are `b.2` apart.
/// # Safety
/// All addressed elements must be in bounds.
#[inline(always)]
unsafe fn tile<S: Lanes, const M: usize, const V: usize>(
    s: S,
    [k0, k1]: [usize; 2],
    a: Operand,
    b: (*const f32, usize, usize),
    c: (*mut f32, usize, usize),
    epilogue: Epilogue<'_>,
) {
    let mut acc = [[s.splat(0.0); V]; M];
    // SAFETY: guaranteed by the caller.
    unsafe {
        // Pointers to every third row, each used with offsets of 0, 1 and 2 strides, which the addressing modes provide
        // for free.
        let first = a.p.add(k0 * a.col);
        let mut pa = [first, first, first];
        for i in 1..M.div_ceil(3) {
            pa[i] = first.add(3 * i * a.row);
        }
        let mut pb = b.0.add(k0 * b.1);
        for _ in k0..k1 {
            let mut row = [s.splat(0.0); V];
            for v in 0..V {
                row[v] = s.load_ptr(pb.add(v * b.2));
            }
            for i in 0..M {
                let x = s.splat(*pa[i / 3].add(i % 3 * a.row));
                for v in 0..V {
                    acc[i][v] = s.fma(x, row[v], acc[i][v]);
                }
            }
            for i in 0..M.div_ceil(3) {
                pa[i] = pa[i].wrapping_add(a.col);
            }
            pb = pb.wrapping_add(b.1);
        }
        for i in 0..M {
            for v in 0..V {
                put(s, c.0.add(i * c.1 + v * c.2), acc[i][v], i, epilogue);
            }
        }
    }
}

/// One row times P panels of V vectors at once, to hide the latency of the dependent multiply-adds.
/// # Safety
/// All addressed elements must be in bounds.
#[inline(always)]
unsafe fn row_tile<S: Lanes, const P: usize, const V: usize>(
    s: S,
    k: usize,
    a: (*const f32, usize),
    b: (*const f32, usize, usize),
    c: (*mut f32, usize),
    epilogue: Epilogue<'_>,
) {
    let mut acc = [[s.splat(0.0); V]; P];
    // SAFETY: guaranteed by the caller.
    unsafe {
        for l in 0..k {
            let (x, row) = (s.splat(*a.0.add(l * a.1)), b.0.add(l * b.1));
            for p in 0..P {
                for v in 0..V {
                    acc[p][v] = s.fma(x, s.load_ptr(row.add(p * b.2 + v * S::LANES)), acc[p][v]);
                }
            }
        }
        for p in 0..P {
            for v in 0..V {
                put(s, c.0.add(p * c.1 + v * S::LANES), acc[p][v], 0, epilogue);
            }
        }
    }
}

/// Applies the epilogue to a vector of row i of C, given that of A·B.
/// # Safety
/// `p` must be valid for reads and writes of a vector.
#[inline(always)]
pub(crate) unsafe fn put<S: Lanes>(s: S, p: *mut f32, product: S::V, i: usize, epilogue: Epilogue<'_>) {
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

//! Matrices in panels of 16 columns: element (r, c) of a `rows` × `cols` matrix is at `(c / 16)·rows·16 + r·16 + c
//! % 16`. Both dimensions are multiples of 16, padded with zeros.
//!
//! The product kernel reads a panel sequentially, whatever the width of the matrix.
#![allow(unsafe_code)]

use super::gemm::PANEL;
use super::{LANES, Simd};

/// Rounds `n` up to whole panels.
pub(crate) const fn padded(n: usize) -> usize {
    n.next_multiple_of(PANEL)
}

/// Copies a row-major `rows` × `cols` matrix into panels with `padded(rows)` rows each.
#[inline(always)]
pub(crate) fn pack(rows: usize, cols: usize, a: &[f32], panels: &mut [f32]) {
    let (rp, cp) = (padded(rows), padded(cols));
    if !(rows == rp && cols == cp) {
        panels[..rp * cp].fill(0.0);
    }
    for (p, c0) in (0..cols).step_by(PANEL).enumerate() {
        let width = PANEL.min(cols - c0);
        let panel = &mut panels[p * rp * PANEL..][..rp * PANEL];
        for (r, to) in panel.chunks_exact_mut(PANEL).enumerate().take(rows) {
            to[..width].copy_from_slice(&a[r * cols + c0..][..width]);
        }
    }
}

/// Copies panels to a row-major matrix.
#[inline(always)]
pub(crate) fn unpack(rows: usize, cols: usize, panels: &[f32], a: &mut [f32]) {
    let rp = padded(rows);
    for (p, c0) in (0..cols).step_by(PANEL).enumerate() {
        let width = PANEL.min(cols - c0);
        let panel = &panels[p * rp * PANEL..][..rp * PANEL];
        for (r, from) in panel.chunks_exact(PANEL).enumerate().take(rows) {
            a[r * cols + c0..][..width].copy_from_slice(&from[..width]);
        }
    }
}

/// Adds a row-major matrix to panels.
#[inline(always)]
pub(crate) fn add_rows<S: Simd>(s: S, rows: usize, cols: usize, a: &[f32], panels: &mut [f32]) {
    let rp = padded(rows);
    for (p, c0) in (0..cols).step_by(PANEL).enumerate() {
        let width = PANEL.min(cols - c0);
        let panel = &mut panels[p * rp * PANEL..][..rp * PANEL];
        for (r, to) in panel.chunks_exact_mut(PANEL).enumerate().take(rows) {
            super::add_scaled(s, &mut to[..width], 1.0, &a[r * cols + c0..][..width]);
        }
    }
}

/// Transposes a matrix in panels into panels. `rows` and `cols` are padded dimensions.
#[inline(always)]
pub(crate) fn transpose_panels<S: Simd>(s: S, rows: usize, cols: usize, a: &[f32], b: &mut [f32]) {
    assert!(rows.is_multiple_of(PANEL) && cols.is_multiple_of(PANEL));
    assert!(a.len() >= rows * cols && b.len() >= rows * cols);
    for c in (0..cols).step_by(LANES) {
        for r in (0..rows).step_by(LANES) {
            let from = (c / PANEL) * rows * PANEL + r * PANEL + c % PANEL;
            let to = (r / PANEL) * cols * PANEL + c * PANEL + r % PANEL;
            // SAFETY: eight rows of eight elements with stride 16 are inside one panel on both sides.
            unsafe { s.transpose8(a.as_ptr().add(from), PANEL, b.as_mut_ptr().add(to), PANEL) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, Level};

    struct Flip<'a>(usize, usize, &'a [f32], &'a mut [f32]);
    impl Kernel for Flip<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            transpose_panels(s, self.0, self.1, self.2, self.3);
        }
    }

    #[test]
    fn there_and_back() {
        for (rows, cols) in [(1, 1), (12, 24), (64, 64), (17, 40)] {
            let a: Vec<f32> = (0..rows * cols).map(|v| v as f32).collect();
            let size = padded(rows) * padded(cols);
            let (mut p, mut q, mut back) = (vec![7.0; size], vec![0.0; size], vec![0.0; rows * cols]);
            pack(rows, cols, &a, &mut p);
            for level in Level::detect().into_iter().chain(Level::portable()) {
                level.run(Flip(padded(rows), padded(cols), &p, &mut q));
                unpack(cols, rows, &q, &mut back);
                for r in 0..rows {
                    for c in 0..cols {
                        assert_eq!(back[c * rows + r], a[r * cols + c]);
                    }
                }
            }
        }
    }
}

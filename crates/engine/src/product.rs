//! Large matrix products: faer's, cut over the engine's threads.

use faer::{Accum, MatMut, MatRef, Par};

use crate::cpu::{Cpu, Shared};

/// Multiply-adds below which one thread is enough.
const SMALL: usize = 64 * 64 * 64;

/// c = a·b or c += a·b, row-major [m, n], on all threads: each takes a share of the longer side of c.
#[allow(unsafe_code)]
pub(crate) fn product(cpu: &Cpu, c: &mut [f32], accum: Accum, a: MatRef<'_, f32>, b: MatRef<'_, f32>) {
    let (m, n, k) = (a.nrows(), b.ncols(), a.ncols());
    assert!(c.len() == m * n && b.nrows() == k);
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if matches!(accum, Accum::Replace) {
            c.fill(0.0);
        }
        return;
    }
    let by_rows = m >= n;
    let side = m.max(n);
    let parts = if m * n * k < SMALL { 1 } else { cpu.threads().min(side.div_ceil(16)) };
    // Shares are whole blocks of 16, so that all but the last fill the kernels' tiles.
    let share = side.div_ceil(parts).next_multiple_of(16);
    let out = Shared::new(c);
    cpu.parallel(side.div_ceil(share), |part| {
        let (from, to) = (part * share, ((part + 1) * share).min(side));
        if by_rows {
            // SAFETY: each task has its own rows.
            let c = unsafe { out.part(from * n, (to - from) * n) };
            let c = MatMut::from_row_major_slice_mut(c, to - from, n);
            faer::linalg::matmul::matmul(c, accum, a.subrows(from, to - from), b, 1.0, Par::Seq);
        } else {
            // SAFETY: each task has its own columns; the strides keep every address inside c.
            let c = unsafe { MatMut::from_raw_parts_mut(out.pointer(from), m, to - from, n as isize, 1) };
            faer::linalg::matmul::matmul(c, accum, a, b.subcols(from, to - from), 1.0, Par::Seq);
        }
    });
}

//! Numpy-style broadcasting: dimensions are aligned from the last, and a dimension of size one (or a missing one)
//! is repeated.

use crate::array::element_count;
use crate::error::{Result, bad_shape};

/// Common shape of two broadcast shapes.
pub fn broadcast(operation: &'static str, a: &[usize], b: &[usize]) -> Result<Vec<usize>> {
    let rank = a.len().max(b.len());
    let mut shape = Vec::with_capacity(rank);
    for i in 0..rank {
        let size = match (aligned(a, rank, i), aligned(b, rank, i)) {
            (x, y) if x == y || y == 1 => x,
            (1, y) => y,
            _ => return bad_shape(operation, "b", b, format!("a shape that broadcasts with {a:?}")),
        };
        shape.push(size);
    }
    element_count(operation, &shape)?;
    Ok(shape)
}

/// Dimension `i` of `shape` after prepending ones up to rank `rank`.
fn aligned(shape: &[usize], rank: usize, i: usize) -> usize {
    (i + shape.len()).checked_sub(rank).map_or(1, |at| shape[at])
}

/// Rejects `shape` unless it broadcasts to `full`.
pub fn check_broadcasts_to(operation: &'static str, shape: &[usize], full: &[usize]) -> Result<()> {
    let rank = full.len();
    let fits = shape.len() <= rank && (0..rank).all(|i| [1, full[i]].contains(&aligned(shape, rank, i)));
    if fits {
        Ok(())
    } else {
        bad_shape(operation, "shape", shape, format!("a shape that broadcasts to {full:?}"))
    }
}

/// One dimension of the result, with the strides of both operands along it (0 if repeated).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim {
    /// Number of elements.
    pub size: usize,
    /// Stride of the first operand.
    pub a: usize,
    /// Stride of the second operand.
    pub b: usize,
}

/// Minimal list of dimensions for iterating over `shape` with operands of shapes `a` and `b`: neighbouring
/// dimensions that both operands traverse uniformly are merged. Returns at least one dimension.
pub fn dims(shape: &[usize], a: &[usize], b: &[usize]) -> Vec<Dim> {
    let rank = shape.len();
    let mut found: Vec<Dim> = Vec::with_capacity(rank);
    let mut step = [1, 1];
    for i in (0..rank).rev() {
        let sizes = [aligned(a, rank, i), aligned(b, rank, i)];
        if shape[i] != 1 {
            let stride = |which: usize| if sizes[which] == 1 { 0 } else { step[which] };
            let dim = Dim { size: shape[i], a: stride(0), b: stride(1) };
            match found.last_mut() {
                Some(last) if dim.a == last.a * last.size && dim.b == last.b * last.size => {
                    last.size *= dim.size
                }
                _ => found.push(dim),
            }
        }
        step = [step[0] * sizes[0], step[1] * sizes[1]];
    }
    if found.is_empty() {
        found.push(Dim { size: 1, a: 1, b: 1 });
    }
    found.reverse();
    found
}

/// Offsets of both operands at index `at` of the row-major iteration over `dims`.
#[inline(always)]
pub(crate) fn offsets(dims: &[Dim], mut at: usize) -> [usize; 2] {
    let mut found = [0, 0];
    for dim in dims.iter().rev() {
        let i = at % dim.size;
        at /= dim.size;
        found[0] += i * dim.a;
        found[1] += i * dim.b;
    }
    found
}

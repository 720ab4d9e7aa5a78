//! Numpy's broadcasting for kernels: dimensions align from the last, and one of size one (or a missing one) repeats.

/// Dimensions that a kernel iterates over, at the most.
pub(crate) const DIMS: usize = 6;

/// Dimension of a result, with the strides of both operands along it (0 if repeated).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dim {
    pub size: usize,
    pub a: usize,
    pub b: usize,
}

/// Dimension `i` of `shape` after prepending ones up to `rank` dimensions.
fn aligned(shape: &[usize], rank: usize, i: usize) -> usize {
    (i + shape.len()).checked_sub(rank).map_or(1, |at| shape[at])
}

/// The dimensions of `shape` for operands of shapes `a` and `b`, with neighbours merged where both operands pass over
/// them as over one. At least one dimension.
pub(crate) fn dims(shape: &[usize], a: &[usize], b: &[usize]) -> Vec<Dim> {
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
                    last.size *= dim.size;
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

/// The numbers of a call: four of its own, then [`DIMS`] dimensions of four numbers. `None` if there are more
/// dimensions.
pub(crate) fn numbers(head: [usize; 4], dims: &[Dim]) -> Option<Vec<u32>> {
    if dims.len() > DIMS {
        return None;
    }
    let mut numbers: Vec<u32> = head.iter().map(|&n| n as u32).collect();
    numbers.extend(dims.iter().flat_map(|d| [d.size as u32, d.a as u32, d.b as u32, 0]));
    numbers.resize(4 + 4 * DIMS, 0);
    Some(numbers)
}

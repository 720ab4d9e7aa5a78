//! Matrix products on the device, for the operations that contain one.
//!
//! A product kernel has two halves: what is multiplied (`each`, `sum`, `outer`, `batched`) and how (`tile64`, or
//! `tile16` for few rows or columns). Both tiles give the same bits, so the choice between them is one of speed only.

use march_engine::{Result, Weight, WeightOf};

use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::linear::Packed;
use crate::tensor::Tensor;

/// Matrices in one dispatch, at the most.
const EACH: usize = 4;
/// Rows of a batch from which the sum over rows may be divided into pieces.
const LONG: usize = 4096;
/// Tiles from which a device is considered busy.
const BUSY: usize = 256;

/// Sizes of tiles.
#[derive(Clone, Copy, PartialEq)]
enum Tile {
    Large,
    Small,
}

impl Tile {
    /// For matrices with `m` rows and `n` columns, at the most.
    fn of(m: usize, n: usize) -> Self {
        if m <= 16 || n <= 16 { Self::Small } else { Self::Large }
    }

    fn count(self, m: usize, n: usize) -> usize {
        let side = if self == Self::Large { 64 } else { 16 };
        m.div_ceil(side) * n.div_ceil(side)
    }
}

/// The text of a product kernel.
macro_rules! source {
    ($tile:expr, $($half:literal),+) => {
        match $tile {
            Tile::Large => concat!($(include_str!($half)),+, include_str!("tile64.wgsl")),
            Tile::Small => concat!($(include_str!($half)),+, include_str!("tile16.wgsl")),
        }
    };
}

fn each_kernel(tile: Tile, format: u32) -> Kernel {
    Kernel {
        name: "product/each",
        source: source!(tile, "each.wgsl"),
        entry: "product",
        constants: vec![("FORMAT", format)],
        writes: &[false, false, false, false, false, false, true, true, true, true],
    }
}

fn sum_kernel(tile: Tile) -> Kernel {
    Kernel {
        name: "product/sum",
        source: source!(tile, "sum.wgsl", "four.wgsl"),
        entry: "product",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, false, false, false, true],
    }
}

fn outer_kernel(tile: Tile) -> Kernel {
    Kernel {
        name: "product/outer",
        source: source!(tile, "outer.wgsl", "four.wgsl"),
        entry: "product",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, true, true, true, true],
    }
}

fn batched_kernel(tile: Tile, a_rows: bool, b_columns: bool) -> Kernel {
    Kernel {
        name: "product/batched",
        source: source!(tile, "batched.wgsl", "four.wgsl"),
        entry: "product",
        constants: vec![("A_ROWS", a_rows.into()), ("B_COLUMNS", b_columns.into())],
        writes: &[false, false, true],
    }
}

fn fold_kernel() -> Kernel {
    Kernel {
        name: "product/fold",
        source: include_str!("fold.wgsl"),
        entry: "fold",
        constants: Vec::new(),
        writes: &[false, true],
    }
}

/// The kernels of this folder, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    let mut all = vec![fold_kernel()];
    for tile in [Tile::Large, Tile::Small] {
        all.extend((0..3).map(|format| each_kernel(tile, format)));
        all.extend([sum_kernel(tile), outer_kernel(tile)]);
        for (a, b) in [(false, false), (false, true), (true, false), (true, true)] {
            all.push(batched_kernel(tile, a, b));
        }
    }
    all
}

/// A weight matrix [rows, width] as kernels read it.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub words: &'a Tensor,
    pub rows: usize,
    /// Words of a row.
    pub stride: usize,
    /// What a word holds: 0 for f32, 1 for two codes in bf16, 2 for four codes in int8 after the scales of all rows.
    pub format: u32,
}

impl<'a> From<WeightOf<'a, Gpu>> for Matrix<'a> {
    fn from(weight: WeightOf<'a, Gpu>) -> Self {
        match weight {
            Weight::Full(words) => {
                let &[rows, stride] = words.shape() else { unreachable!("the engine checks it") };
                Self { words, rows, stride, format: 0 }
            }
            Weight::Packed(packed) => Packed::matrix(packed),
        }
    }
}

/// Rows `first .. first + count` of a tensor.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub tensor: &'a Tensor,
    pub first: usize,
    pub count: usize,
    pub width: usize,
}

impl<'a> Rows<'a> {
    /// All rows of a tensor [.., width].
    pub fn all(tensor: &'a Tensor) -> Self {
        // Counted from the shape: a tensor whose rows are empty still has rows.
        let count = tensor.shape().iter().rev().skip(1).product();
        Self { tensor, first: 0, count, width: tensor.width() }
    }
}

/// Numbers of up to four matrices for the immediates, and filled up.
fn four(values: impl Iterator<Item = usize>, rest: usize) -> [u32; EACH] {
    let mut all = [rest as u32; EACH];
    all.iter_mut().zip(values).for_each(|(to, value)| *to = value as u32);
    all
}

/// Where the tiles of each matrix start in their common list, and how many there are.
fn starts(counts: impl Iterator<Item = usize>) -> ([u32; EACH], usize) {
    let mut total = 0;
    let first: Vec<usize> = counts
        .map(|count| {
            total += count;
            total - count
        })
        .collect();
    (four(first.into_iter(), total), total)
}

/// Small tensors for bindings that a call does not use.
fn unused(gpu: &Gpu, count: usize) -> Result<Vec<Tensor>> {
    (0..count).map(|_| gpu.empty(&[1])).collect()
}

/// y_q = x W_qᵀ (+ bias) for each weight; a bias is for a single weight. Each y_q is [rows of x, rows of W_q].
pub(crate) fn each(
    gpu: &Gpu,
    x: Rows<'_>,
    weights: &[Matrix<'_>],
    bias: Option<&Tensor>,
    outputs: &[&Tensor],
) -> Result<()> {
    for format in 0..3 {
        let chosen: Vec<(Matrix<'_>, &Tensor)> = weights
            .iter()
            .zip(outputs)
            .filter(|(weight, _)| weight.format == format)
            .map(|(&weight, &y)| (weight, y))
            .collect();
        for part in chosen.chunks(EACH) {
            let tile = Tile::of(x.count, part.iter().map(|(w, _)| w.rows).max().unwrap_or(0));
            let (first, tiles) = starts(part.iter().map(|(w, _)| tile.count(x.count, w.rows)));
            let spare = unused(gpu, EACH - part.len())?;
            let mut tensors = vec![x.tensor, bias.unwrap_or(x.tensor)];
            tensors.extend((0..EACH).map(|q| part.get(q).map_or(part[0].0.words, |(w, _)| w.words)));
            tensors.extend(part.iter().map(|&(_, y)| y).chain(&spare));
            let mut numbers = four(part.iter().map(|(w, _)| w.rows), 0).to_vec();
            numbers.extend(first);
            let rest = [x.count, x.width, x.first * x.width, part[0].0.stride, bias.is_some().into(), tiles];
            numbers.extend(rest.map(|number| number as u32));
            gpu.run(&each_kernel(tile, format), &tensors, &numbers, gpu.list(tiles))?;
        }
    }
    Ok(())
}

/// dx = Σ_q dy_q W_q over all terms (dy_q, W_q), added to what dx holds if `add`.
pub(crate) fn sum(gpu: &Gpu, terms: &[(&Tensor, &Tensor)], dx: Rows<'_>, add: bool) -> Result<()> {
    let tile = Tile::of(dx.count, dx.width);
    let tiles = tile.count(dx.count, dx.width);
    for (turn, part) in terms.chunks(EACH).enumerate() {
        let at = |q: usize| part.get(q).unwrap_or(&part[0]);
        let mut tensors: Vec<&Tensor> = (0..EACH).map(|q| at(q).0).collect();
        tensors.extend((0..EACH).map(|q| at(q).1));
        tensors.push(dx.tensor);
        let mut numbers = four(part.iter().map(|(_, w)| w.shape()[0]), 0).to_vec();
        let add = add || turn > 0;
        let rest = [dx.count, dx.width, dx.first * dx.width, part.len(), add.into(), tiles];
        numbers.extend(rest.map(|number| number as u32));
        gpu.run(&sum_kernel(tile), &tensors, &numbers, gpu.list(tiles))?;
    }
    Ok(())
}

/// dW_q = dy_qᵀ x for each term (dy_q, dW_q), added to what dW_q holds if `add`.
pub(crate) fn outer(gpu: &Gpu, x: Rows<'_>, terms: &[(&Tensor, &Tensor)], add: bool) -> Result<()> {
    for part in terms.chunks(EACH) {
        let sizes: Vec<usize> = part.iter().map(|(_, dw)| dw.shape()[0]).collect();
        let tile = Tile::of(sizes.iter().copied().max().unwrap_or(0), x.width);
        let (first, tiles) = starts(sizes.iter().map(|&n| tile.count(n, x.width)));
        let length = piece(x.count, tiles);
        let pieces = if length == 0 { 1 } else { x.count.div_ceil(length) };
        let sums = match pieces {
            1 => Vec::new(),
            _ => sizes.iter().map(|&n| gpu.empty(&[pieces, n, x.width])).collect::<Result<Vec<_>>>()?,
        };
        let spare = unused(gpu, EACH - part.len())?;
        let mut tensors = vec![x.tensor];
        tensors.extend((0..EACH).map(|q| part.get(q).unwrap_or(&part[0]).0));
        tensors.extend((0..part.len()).map(|q| sums.get(q).unwrap_or(part[q].1)));
        tensors.extend(&spare);
        let mut numbers = four(sizes.iter().copied(), 0).to_vec();
        numbers.extend(first);
        let direct = add && pieces == 1;
        let all = tiles * pieces;
        let rest = [x.count, x.width, x.first * x.width, length, direct.into(), tiles, all];
        numbers.extend(rest.map(|number| number as u32));
        gpu.run(&outer_kernel(tile), &tensors, &numbers, gpu.list(all))?;
        for (sum, (_, dw)) in sums.iter().zip(part) {
            fold(gpu, sum, pieces, dw, add)?;
        }
    }
    Ok(())
}

/// Rows in a piece of the sum over `rows`: all of them, unless they are many and the tiles few.
fn piece(rows: usize, tiles: usize) -> usize {
    if rows <= LONG || tiles >= BUSY || tiles == 0 {
        return rows;
    }
    let pieces = rows.div_ceil(1024).min((2 * BUSY).div_ceil(tiles));
    rows.div_ceil(pieces).next_multiple_of(128)
}

/// y = Σ of the pieces [pieces, length of y], added to what y holds if `add`.
fn fold(gpu: &Gpu, parts: &Tensor, pieces: usize, y: &Tensor, add: bool) -> Result<()> {
    let numbers = [y.len() as u32, pieces as u32, add.into()];
    gpu.run(&fold_kernel(), &[parts, y], &numbers, gpu.list(y.len().div_ceil(256)))
}

/// A batch of matrices in a tensor, with the strides of entries, rows and columns.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub tensor: &'a Tensor,
    pub entry: usize,
    pub row: usize,
    pub column: usize,
}

impl View<'_> {
    /// The transposed matrices.
    pub fn t(self) -> Self {
        Self { row: self.column, column: self.row, ..self }
    }
}

/// Dimensions of [`batched`].
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    pub depth: usize,
}

/// C = A B for each entry of a batch, C [batch, m, n]; or their sum, C [m, n], if `total`.
pub(crate) fn batched(
    gpu: &Gpu,
    a: View<'_>,
    b: View<'_>,
    sizes: Sizes,
    total: bool,
    c: &Tensor,
) -> Result<()> {
    let Sizes { batch, m, n, depth } = sizes;
    let tile = Tile::of(m, n);
    let (entries, parts) = if total { (1, batch) } else { (batch, 1) };
    let tiles = entries * tile.count(m, n);
    let strides = |v: View<'_>| if total { [0, v.entry] } else { [v.entry, 0] };
    let ([a_entry, a_part], [b_entry, b_part]) = (strides(a), strides(b));
    let numbers = [
        [a_entry, a_part, a.row, a.column],
        [b_entry, b_part, b.row, b.column],
        [m, n, depth, parts],
        [tiles, 0, 0, 0],
    ];
    let numbers: Vec<u32> = numbers.as_flattened().iter().map(|&number| number as u32).collect();
    let kernel = batched_kernel(tile, a.column == 1, b.row == 1);
    gpu.run(&kernel, &[a.tensor, b.tensor, c], &numbers, gpu.list(tiles))
}

//! Matrix products on the device, for the operations that contain one.
//!
//! A product kernel has two halves: what is multiplied (`each`, `sum`, `outer`, those for pairs of streams, `batched`)
//! and how (`tile64`, or
//! `tile16` for few rows or columns). Both tiles give the same bits, so the choice between them is one of speed only.

use march_engine::{Result, Tensor};

use crate::array::{GpuArray, array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::linear::Packed;

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
        source: source!(tile, "each.wgsl", "weights.wgsl"),
        entry: "product",
        constants: vec![("FORMAT", format)],
        writes: &[false, false, false, false, false, false, true, true, true, true],
    }
}

fn each_pair_kernel(tile: Tile, format: u32) -> Kernel {
    Kernel {
        name: "product/each_pair",
        source: source!(tile, "each_pair.wgsl", "weights.wgsl"),
        entry: "product",
        constants: vec![("FORMAT", format)],
        writes: &[false, false, false, false, false, false, true, true, true, true],
    }
}

fn sum_pair_kernel(tile: Tile) -> Kernel {
    Kernel {
        name: "product/sum_pair",
        source: source!(tile, "sum_pair.wgsl", "four.wgsl"),
        entry: "product",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, false, true, true],
    }
}

fn outer_pair_kernel(tile: Tile) -> Kernel {
    Kernel {
        name: "product/outer_pair",
        source: source!(tile, "outer_pair.wgsl", "four.wgsl"),
        entry: "product",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, false, true, true],
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
        writes: &[false, false, false, false, false, true, true, true, true, true],
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
        all.extend((0..3).map(|format| each_pair_kernel(tile, format)));
        all.extend([sum_kernel(tile), outer_kernel(tile), sum_pair_kernel(tile), outer_pair_kernel(tile)]);
        for (a, b) in [(false, false), (false, true), (true, false), (true, true)] {
            all.push(batched_kernel(tile, a, b));
        }
    }
    all
}

/// A weight matrix [rows, width] as kernels read it.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub words: &'a GpuArray,
    pub rows: usize,
    /// Words of a row.
    pub stride: usize,
    /// What a word holds: 0 for f32, 1 for two codes in bf16, 2 for four codes in int8 after the scales of all rows.
    pub format: u32,
}

impl<'a> Matrix<'a> {
    /// A weight, packed or not.
    pub fn of(weight: &'a Tensor) -> Self {
        if let Some(packed) = weight.foreign::<Packed>() {
            return packed.matrix();
        }
        let &[rows, stride] = weight.shape() else { unreachable!("the engine checks it") };
        Self { words: array(weight), rows, stride, format: 0 }
    }
}

/// Rows `first .. first + count` of a tensor.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub tensor: &'a GpuArray,
    pub first: usize,
    pub count: usize,
    pub width: usize,
}

impl<'a> Rows<'a> {
    /// All rows of a tensor [.., width].
    pub fn all(tensor: &'a GpuArray) -> Self {
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
fn unused(gpu: &Gpu, count: usize) -> Result<Vec<GpuArray>> {
    (0..count).map(|_| gpu.empty(&[1])).collect()
}

/// What is added to a product.
#[derive(Clone, Copy)]
pub(crate) enum Addend<'a> {
    Nothing,
    /// [rows of W].
    Bias(&'a GpuArray),
    /// [rows of x, rows of W].
    Residual(&'a GpuArray),
}

impl<'a> Addend<'a> {
    fn tensor(self) -> Option<&'a GpuArray> {
        match self {
            Self::Nothing => None,
            Self::Bias(tensor) | Self::Residual(tensor) => Some(tensor),
        }
    }
}

/// A product with rows that others share: its weight, what is added, and its result [rows of x, rows of W].
pub(crate) type Each<'a> = (Matrix<'a>, Addend<'a>, &'a GpuArray);

/// y_q = x W_qᵀ (+ what is added) for each of the products.
pub(crate) fn each(gpu: &Gpu, x: Rows<'_>, products: &[Each<'_>]) -> Result<()> {
    for format in 0..3 {
        let mut rest: Vec<Each<'_>> = products.iter().filter(|(w, ..)| w.format == format).copied().collect();
        while !rest.is_empty() {
            // A dispatch has up to four products, and room to add to one of them.
            let mut adds = 0;
            let fits = rest.iter().take(EACH).take_while(|(_, added, _)| {
                adds += usize::from(added.tensor().is_some());
                adds <= 1
            });
            let count = fits.count();
            let part: Vec<Each<'_>> = rest.drain(..count).collect();
            let tile = Tile::of(x.count, part.iter().map(|(w, ..)| w.rows).max().unwrap_or(0));
            let (first, tiles) = starts(part.iter().map(|(w, ..)| tile.count(x.count, w.rows)));
            let spare = unused(gpu, EACH - part.len())?;
            let added = part.iter().find_map(|(_, added, _)| added.tensor());
            let mut tensors = vec![x.tensor, added.unwrap_or(x.tensor)];
            tensors.extend((0..EACH).map(|q| part.get(q).map_or(part[0].0.words, |(w, ..)| w.words)));
            tensors.extend(part.iter().map(|&(.., y)| y).chain(&spare));
            let mut numbers = four(part.iter().map(|(w, ..)| w.rows), 0).to_vec();
            numbers.extend(first);
            let bias = part.iter().position(|(_, added, _)| matches!(added, Addend::Bias(_)));
            let residual = part.iter().position(|(_, added, _)| matches!(added, Addend::Residual(_)));
            let [bias, residual] = [bias, residual].map(|q| q.map_or(0, |q| q + 1));
            let more = [x.count, x.width, x.first * x.width, part[0].0.stride, bias, residual, tiles];
            numbers.extend(more.map(|number| number as u32));
            gpu.run(&each_kernel(tile, format), &tensors, &numbers, gpu.list(tiles))?;
        }
    }
    Ok(())
}

/// y_ps = x_s W_pᵀ (+ r_s) for two streams of rows and one or two weights of one format; a residual is for one weight.
/// The results are those of both streams for the first weight, then for the second.
pub(crate) fn each_pair(
    gpu: &Gpu,
    x: [Rows<'_>; 2],
    weights: &[Matrix<'_>],
    residuals: Option<[&GpuArray; 2]>,
    outputs: &[&GpuArray],
) -> Result<()> {
    let (first, last) = (weights[0], weights[weights.len() - 1]);
    let tile = Tile::of(x[0].count.max(x[1].count), first.rows.max(last.rows));
    let counts = weights.iter().flat_map(|w| x.map(|x| tile.count(x.count, w.rows)));
    let (start, tiles) = starts(counts);
    let spare = unused(gpu, EACH - outputs.len())?;
    let [r0, r1] = residuals.unwrap_or([x[0].tensor; 2]);
    let mut tensors = vec![x[0].tensor, x[1].tensor, r0, r1, first.words, last.words];
    tensors.extend(outputs.iter().copied().chain(&spare));
    let mut numbers = start.to_vec();
    let added = usize::from(residuals.is_some());
    let rest = [first.rows, last.rows, x[0].count, x[1].count, x[0].width, first.stride, added, tiles];
    numbers.extend(rest.map(|number| number as u32));
    gpu.run(&each_pair_kernel(tile, first.format), &tensors, &numbers, gpu.list(tiles))
}

/// dx_s = Σ_p dy_ps W_p for two streams of rows and one or two weights, added to what dx_s holds if `add`. The gradients
/// are in the order of the results of [`each_pair`].
pub(crate) fn sum_pair(
    gpu: &Gpu,
    gradients: &[&GpuArray],
    weights: &[&GpuArray],
    dx: [&GpuArray; 2],
    add: [bool; 2],
) -> Result<()> {
    let (rows, width) = (dx.map(|dx| Rows::all(dx).count), dx[0].width());
    let tile = Tile::of(rows[0].max(rows[1]), width);
    let [second, more] = rows.map(|rows| tile.count(rows, width));
    let (first, last) = (weights[0], weights[weights.len() - 1]);
    let mut tensors: Vec<&GpuArray> = (0..EACH).map(|q| *gradients.get(q).unwrap_or(&gradients[0])).collect();
    tensors.extend([first, last, dx[0], dx[1]]);
    let added = usize::from(add[0]) + 2 * usize::from(add[1]);
    let tiles = second + more;
    let [n0, n1] = [first, last].map(|weight| weight.shape()[0]);
    let numbers = [n0, n1, rows[0], rows[1], width, weights.len(), added, second, tiles];
    gpu.run(&sum_pair_kernel(tile), &tensors, &numbers.map(|number| number as u32), gpu.list(tiles))
}

/// Whether [`outer_pair`] suits: the sum over the rows need not be divided.
pub(crate) fn fits_outer_pair(rows: [usize; 2], weights: &[&GpuArray]) -> bool {
    let count = |w: &&GpuArray| Tile::of(w.shape()[0], w.width()).count(w.shape()[0], w.width());
    let tiles = weights.iter().map(count).sum();
    rows.iter().all(|&rows| piece(rows, tiles) == rows)
}

/// dW_p = Σ_s dy_psᵀ x_s for two streams of rows and one or two weights. The gradients are in the order of the results
/// of [`each_pair`].
pub(crate) fn outer_pair(
    gpu: &Gpu,
    x: [Rows<'_>; 2],
    gradients: &[&GpuArray],
    weights: &[&GpuArray],
) -> Result<()> {
    let (first, width) = (weights[0], x[0].width);
    let sizes: Vec<usize> = weights.iter().map(|dw| dw.shape()[0]).collect();
    let tile = Tile::of(sizes.iter().copied().max().unwrap_or(0), width);
    let second = tile.count(sizes[0], width);
    let tiles = sizes.iter().map(|&n| tile.count(n, width)).sum();
    let spare = unused(gpu, 1)?;
    let mut tensors = vec![x[0].tensor, x[1].tensor];
    tensors.extend((0..EACH).map(|q| *gradients.get(q).unwrap_or(&gradients[0])));
    tensors.extend([first, weights.get(1).copied().unwrap_or(&spare[0])]);
    let numbers =
        [sizes[0], sizes.get(1).copied().unwrap_or(0), x[0].count, x[1].count, width, second, tiles];
    gpu.run(&outer_pair_kernel(tile), &tensors, &numbers.map(|number| number as u32), gpu.list(tiles))
}

/// dx = Σ_q dy_q W_q over all terms (dy_q, W_q), added to what dx holds if `add`.
pub(crate) fn sum(gpu: &Gpu, terms: &[(&GpuArray, &GpuArray)], dx: Rows<'_>, add: bool) -> Result<()> {
    let tile = Tile::of(dx.count, dx.width);
    let tiles = tile.count(dx.count, dx.width);
    for (turn, part) in terms.chunks(EACH).enumerate() {
        let at = |q: usize| part.get(q).unwrap_or(&part[0]);
        let mut tensors: Vec<&GpuArray> = (0..EACH).map(|q| at(q).0).collect();
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

/// dW_q = dy_qᵀ x for each term (dy_q, dW_q, add), added to what dW_q holds if `add`; and db = Σ dy_q over the rows for
/// the term whose number comes with `bias`. Returns whether db was computed: not if the rows are divided.
pub(crate) fn outer(
    gpu: &Gpu,
    x: Rows<'_>,
    terms: &[(&GpuArray, &GpuArray, bool)],
    bias: Option<(usize, &GpuArray)>,
) -> Result<bool> {
    let mut whole = false;
    for (turn, part) in terms.chunks(EACH).enumerate() {
        let sizes: Vec<usize> = part.iter().map(|(_, dw, _)| dw.shape()[0]).collect();
        let tile = Tile::of(sizes.iter().copied().max().unwrap_or(0), x.width);
        let (first, tiles) = starts(sizes.iter().map(|&n| tile.count(n, x.width)));
        let length = piece(x.count, tiles);
        let pieces = if length == 0 { 1 } else { x.count.div_ceil(length) };
        let sums = match pieces {
            1 => Vec::new(),
            _ => sizes.iter().map(|&n| gpu.empty(&[pieces, n, x.width])).collect::<Result<Vec<_>>>()?,
        };
        let own = bias.filter(|(q, _)| q / EACH == turn && pieces == 1 && x.count > 0);
        let spare = unused(gpu, EACH + 1 - part.len())?;
        let mut tensors = vec![x.tensor];
        tensors.extend((0..EACH).map(|q| part.get(q).unwrap_or(&part[0]).0));
        tensors.extend((0..part.len()).map(|q| sums.get(q).unwrap_or(part[q].1)));
        tensors.extend(&spare[1..]);
        tensors.push(own.map_or(&spare[0], |(_, db)| db));
        let mut numbers = four(sizes.iter().copied(), 0).to_vec();
        numbers.extend(first);
        let bits = part.iter().enumerate().map(|(q, (.., add))| usize::from(*add) << q).sum();
        let direct: usize = if pieces == 1 { bits } else { 0 };
        let more = own.map_or(0, |(q, _)| tile.count(sizes[q % EACH], 1));
        let (each, all) = (tiles + more, (tiles + more) * pieces);
        let number = own.map_or(0, |(q, _)| q % EACH + 1);
        whole |= own.is_some();
        let rest = [x.count, x.width, x.first * x.width, length, direct, each, all, number, tiles];
        numbers.extend(rest.map(|number| number as u32));
        gpu.run(&outer_kernel(tile), &tensors, &numbers, gpu.list(all))?;
        for (sum, &(_, dw, add)) in sums.iter().zip(part) {
            fold(gpu, sum, pieces, dw, add)?;
        }
    }
    Ok(whole)
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
fn fold(gpu: &Gpu, parts: &GpuArray, pieces: usize, y: &GpuArray, add: bool) -> Result<()> {
    let numbers = [y.len() as u32, pieces as u32, add.into()];
    gpu.run(&fold_kernel(), &[parts, y], &numbers, gpu.list(y.len().div_ceil(256)))
}

/// A batch of matrices in a tensor, with the strides of entries, rows and columns.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub tensor: &'a GpuArray,
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
    c: &GpuArray,
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

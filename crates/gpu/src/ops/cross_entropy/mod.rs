//! `cross_entropy` on the device: the output layer and the loss, block by block, so that the logits of all tokens never
//! exist at once.
//!
//! For each block of tokens: the logits (a product), their losses and gradients in place (`rows.wgsl`), and the
//! gradients of x and W (two products). Tokens without a target are left out before: their rows of x are not read.

use march_engine::ops::cross_entropy::{
    CrossEntropy, IGNORE, LinearCrossEntropy, LinearCrossEntropyBackward, Sizes, TokenLosses, TokenLossesOf,
};
use march_engine::{Result, Tensor};

use crate::array::{GpuArray, array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::product::{self, Addend, Matrix, Rows};
use crate::ops::{elementwise, embedding};

/// Logits in a block, at the most, unless that is less than [`FEWEST`] tokens.
const LOGITS: usize = 1 << 24;
/// Tokens in a block, at the least.
const FEWEST: usize = 64;

fn rows_kernel(gradient: bool, greedy: bool) -> Kernel {
    Kernel {
        name: "cross_entropy/rows",
        source: include_str!("rows.wgsl"),
        entry: "rows",
        constants: vec![("GRADIENT", gradient.into()), ("GREEDY", greedy.into())],
        writes: &[true, false, true],
    }
}

fn loss_kernel() -> Kernel {
    Kernel {
        name: "cross_entropy/loss",
        source: include_str!("loss.wgsl"),
        entry: "total",
        constants: Vec::new(),
        writes: &[false, true],
    }
}

fn scale_kernel() -> Kernel {
    Kernel {
        name: "cross_entropy/scale",
        source: include_str!("scale.wgsl"),
        entry: "scale",
        constants: Vec::new(),
        writes: &[false, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![
        rows_kernel(false, false),
        rows_kernel(true, false),
        rows_kernel(false, true),
        loss_kernel(),
        scale_kernel(),
    ]
}

/// The tokens of a call that have a target.
struct TargetRows {
    /// Their rows of x.
    ids: Vec<u32>,
    targets: Vec<u32>,
    /// Rows of x in the call.
    all: usize,
}

impl TargetRows {
    fn new(targets: &[u32], sizes: &Sizes) -> Self {
        let ids = sizes.counted.iter().map(|&row| row as u32).collect();
        let own = sizes.counted.iter().map(|&row| targets[row]).collect();
        Self { ids, targets: own, all: targets.len() }
    }

    fn is_all(&self) -> bool {
        self.ids.len() == self.all
    }

    /// The rows of x that have a target.
    fn gather(&self, gpu: &Gpu, x: &GpuArray) -> Result<GpuArray> {
        if self.is_all() {
            return Ok(x.clone());
        }
        let width = x.width();
        let table = Matrix { words: x, rows: self.all, stride: width, format: 0 };
        embedding::rows(gpu, table, &self.ids, &[self.ids.len(), width])
    }

    /// The gradient of x from that of [`TargetRows::gather`]: zero for tokens without a target.
    fn scatter(&self, gpu: &Gpu, dx: GpuArray, x: &GpuArray) -> Result<GpuArray> {
        if self.is_all() {
            return Ok(dx);
        }
        Ok(embedding::sums(gpu, &self.ids, self.all, &dx)?.reshaped(x.shape()))
    }
}

/// Tokens in a block.
fn block_tokens(vocabulary: usize) -> usize {
    (LOGITS / vocabulary.max(1)).max(FEWEST)
}

pub(crate) fn forward(gpu: &Gpu, op: LinearCrossEntropy, sizes: (Sizes, f64)) -> Result<CrossEntropy> {
    let block = block_tokens(sizes.0.vocabulary);
    forward_in_blocks(gpu, op, sizes, block)
}

/// The loss in blocks of so many tokens.
pub fn forward_in_blocks(
    gpu: &Gpu,
    op: LinearCrossEntropy,
    (sizes, factor): (Sizes, f64),
    block: usize,
) -> Result<CrossEntropy> {
    let LinearCrossEntropy { weight, needs, .. } = &op;
    let (x, factor) = (array(&op.x), factor as f32);
    let counted = TargetRows::new(&op.targets, &sizes);
    let count = counted.ids.len();
    // Only a weight in full precision has gradients; the engine checks it.
    let full = needs.contains(&true).then(|| array(weight));
    let zeros = |shape: &[usize]| elementwise::full(gpu, shape, 0.0);
    let wrapped = |loss: GpuArray, gradients: [Option<GpuArray>; 2]| CrossEntropy {
        loss: op.x.like(loss),
        gradients: gradients.map(|d| d.map(|d| op.x.like(d))),
    };
    if count == 0 {
        let dx = needs[0].then(|| zeros(x.shape())).transpose()?;
        let dw = needs[1].then(|| zeros(weight.shape())).transpose()?;
        return Ok(wrapped(zeros(&[])?, [dx, dw]));
    }
    let shape = if counted.is_all() { x.shape() } else { &[count, x.width()] };
    let dx = needs[0].then(|| gpu.empty(shape)).transpose()?;
    let dw = needs[1].then(|| gpu.empty(weight.shape())).transpose()?;
    let rows = counted.gather(gpu, x)?;
    let nll = gpu.empty(&[count])?;
    let kernel = rows_kernel(full.is_some(), false);
    let weight = Matrix::of(weight);
    let run = Blocks { gpu, x: &rows, weight, targets: &counted.targets, factor, block };
    run.each(&kernel, &nll, |part, logits| {
        if let (Some(dx), Some(weight)) = (&dx, full) {
            product::sum(gpu, &[(logits, weight)], Rows { tensor: dx, ..part }, false)?;
        }
        if let Some(dw) = &dw {
            product::outer(gpu, part, &[(logits, dw, part.first > 0)], None)?;
        }
        Ok(())
    })?;
    let loss = gpu.empty(&[])?;
    gpu.run(&loss_kernel(), &[&nll, &loss], &[count as u32, factor.to_bits()], [1, 1, 1])?;
    let dx = dx.map(|dx| counted.scatter(gpu, dx, x)).transpose()?;
    Ok(wrapped(loss, [dx, dw]))
}

/// The logits of all tokens, computed block by block.
struct Blocks<'a> {
    gpu: &'a Gpu,
    x: &'a GpuArray,
    weight: Matrix<'a>,
    targets: &'a [u32],
    factor: f32,
    /// Tokens in a block.
    block: usize,
}

impl Blocks<'_> {
    /// Runs `kernel` on the logits of each block, then `then` with the rows of x and what the kernel left of the logits.
    fn each(
        &self,
        kernel: &Kernel,
        result: &GpuArray,
        then: impl Fn(Rows<'_>, &GpuArray) -> Result<()>,
    ) -> Result<()> {
        let Self { gpu, x, weight, targets, factor, block } = *self;
        let all = gpu.upload_indices(targets)?;
        for first in (0..targets.len()).step_by(block) {
            let count = block.min(targets.len() - first);
            let part = Rows { tensor: x, first, count, width: x.width() };
            let logits = gpu.empty(&[count, weight.rows])?;
            product::each(gpu, part, &[(weight, Addend::Nothing, &logits)])?;
            let mut numbers = [count, weight.rows, first, targets.len()].map(|number| number as u32).to_vec();
            numbers.push(factor.to_bits());
            gpu.run(kernel, &[&logits, &all, result], &numbers, gpu.list(count))?;
            then(part, &logits)?;
        }
        Ok(())
    }
}

pub(crate) fn backward(gpu: &Gpu, op: LinearCrossEntropyBackward, (): ()) -> Result<[Option<Tensor>; 2]> {
    let LinearCrossEntropyBackward { kept, gradient } = op;
    let mut scaled = [None, None];
    for (to, kept) in scaled.iter_mut().zip(kept) {
        let Some(kept) = kept else { continue };
        let y = elementwise::writable(gpu, kept)?;
        let groups = gpu.list(y.len().div_ceil(256));
        gpu.run(&scale_kernel(), &[array(&gradient), &y], &[y.len() as u32], groups)?;
        *to = Some(gradient.like(y));
    }
    Ok(scaled)
}

pub(crate) fn token_losses(gpu: &Gpu, op: TokenLossesOf, sizes: Sizes) -> Result<TokenLosses> {
    let counted = TargetRows::new(&op.targets, &sizes);
    let (all, count) = (op.targets.len(), counted.ids.len());
    let mut losses = TokenLosses { nll: vec![0.0; all], greedy: vec![IGNORE; all] };
    if count == 0 {
        return Ok(losses);
    }
    let rows = counted.gather(gpu, array(&op.x))?;
    let weight = Matrix::of(&op.weight);
    let result = gpu.empty(&[2, count])?;
    let block = block_tokens(weight.rows);
    let run = Blocks { gpu, x: &rows, weight, targets: &counted.targets, factor: 1.0, block };
    run.each(&rows_kernel(false, true), &result, |_, _| Ok(()))?;
    let numbers = gpu.download(&result);
    gpu.alive()?;
    for (i, &row) in counted.ids.iter().enumerate() {
        losses.nll[row as usize] = numbers[i];
        losses.greedy[row as usize] = numbers[count + i].to_bits();
    }
    Ok(losses)
}

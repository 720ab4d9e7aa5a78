//! `cross_entropy` on the device: the output layer and the loss, block by block, so that the logits of all tokens never
//! exist at once.
//!
//! For each block of tokens: the logits (a product), their losses and gradients in place (`rows.wgsl`), and the
//! gradients of x and W (two products). Tokens without a target are left out before: their rows of x are not read.

use march_engine::ops::cross_entropy::{CrossEntropy, IGNORE, LinearCrossEntropy, TokenLosses};
use march_engine::{Result, WeightOf};

use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::product::{self, Addend, Matrix, Rows};
use crate::ops::{elementwise, embedding};
use crate::tensor::Tensor;

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
    fn new(targets: &[u32]) -> Self {
        let ids = (0..targets.len() as u32).filter(|&row| targets[row as usize] != IGNORE).collect();
        let own = targets.iter().copied().filter(|&target| target != IGNORE).collect();
        Self { ids, targets: own, all: targets.len() }
    }

    fn is_all(&self) -> bool {
        self.ids.len() == self.all
    }

    /// The rows of x that have a target.
    fn gather(&self, gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
        if self.is_all() {
            return Ok(x.clone());
        }
        let width = x.width();
        let table = Matrix { words: x, rows: self.all, stride: width, format: 0 };
        embedding::rows(gpu, table, &self.ids, &[self.ids.len(), width])
    }

    /// The gradient of x from that of [`TargetRows::gather`]: zero for tokens without a target.
    fn scatter(&self, gpu: &Gpu, dx: Tensor, x: &Tensor) -> Result<Tensor> {
        if self.is_all() {
            return Ok(dx);
        }
        Ok(embedding::backward(gpu, &self.ids, self.all, &dx)?.reshaped(x.shape()))
    }
}

/// Tokens in a block.
fn block_tokens(vocabulary: usize) -> usize {
    (LOGITS / vocabulary.max(1)).max(FEWEST)
}

/// See [`march_engine::Engine::linear_cross_entropy`].
pub(crate) fn forward(
    gpu: &Gpu,
    input: LinearCrossEntropy<&Tensor, WeightOf<'_, Gpu>>,
    targets: &[u32],
    normaliser: Option<f64>,
    needs: [bool; 2],
) -> Result<CrossEntropy<Tensor>> {
    let block = block_tokens(Matrix::from(input.weight).rows);
    forward_in_blocks(gpu, input, targets, normaliser, needs, block)
}

fn forward_in_blocks(
    gpu: &Gpu,
    input: LinearCrossEntropy<&Tensor, WeightOf<'_, Gpu>>,
    targets: &[u32],
    normaliser: Option<f64>,
    needs: [bool; 2],
    block: usize,
) -> Result<CrossEntropy<Tensor>> {
    let LinearCrossEntropy { x, weight } = input;
    let counted = TargetRows::new(targets);
    let count = counted.ids.len();
    let factor = (1.0 / normaliser.unwrap_or(count.max(1) as f64)) as f32;
    // Only a weight in full precision has gradients; the engine checks it.
    let full = weight.full().copied().filter(|_| needs != [false; 2]);
    let zeros = |shape: &[usize]| elementwise::full(gpu, shape, 0.0);
    if count == 0 {
        let dx = needs[0].then(|| zeros(x.shape())).transpose()?;
        let dw = full.filter(|_| needs[1]).map(|weight| zeros(weight.shape())).transpose()?;
        return Ok(CrossEntropy { loss: zeros(&[])?, gradients: [dx, dw] });
    }
    let shape = if counted.is_all() { x.shape() } else { &[count, x.width()] };
    let dx = needs[0].then(|| gpu.empty(shape)).transpose()?;
    let dw = full.filter(|_| needs[1]).map(|weight| gpu.empty(weight.shape())).transpose()?;
    let rows = counted.gather(gpu, x)?;
    let nll = gpu.empty(&[count])?;
    let kernel = rows_kernel(full.is_some(), false);
    let run = Blocks { gpu, x: &rows, weight: weight.into(), targets: &counted.targets, factor, block };
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
    Ok(CrossEntropy { loss, gradients: [dx, dw] })
}

/// The logits of all tokens, computed block by block.
struct Blocks<'a> {
    gpu: &'a Gpu,
    x: &'a Tensor,
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
        result: &Tensor,
        then: impl Fn(Rows<'_>, &Tensor) -> Result<()>,
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

/// See [`march_engine::Engine::linear_cross_entropy_backward`].
pub(crate) fn backward(
    gpu: &Gpu,
    kept: [Option<Tensor>; 2],
    gradient: &Tensor,
) -> Result<[Option<Tensor>; 2]> {
    let mut scaled = [None, None];
    for (to, kept) in scaled.iter_mut().zip(kept) {
        let Some(kept) = kept else { continue };
        let y = if kept.is_unique() {
            kept
        } else {
            let copy = gpu.empty(kept.shape())?;
            gpu.copy(&kept, 0, &copy, 0, kept.len());
            copy
        };
        let groups = gpu.list(y.len().div_ceil(256));
        gpu.run(&scale_kernel(), &[gradient, &y], &[y.len() as u32], groups)?;
        *to = Some(y);
    }
    Ok(scaled)
}

/// See [`march_engine::Engine::token_losses`].
pub(crate) fn token_losses(
    gpu: &Gpu,
    x: &Tensor,
    weight: WeightOf<'_, Gpu>,
    targets: &[u32],
) -> Result<TokenLosses> {
    let counted = TargetRows::new(targets);
    let count = counted.ids.len();
    let mut losses = TokenLosses { nll: vec![0.0; targets.len()], greedy: vec![IGNORE; targets.len()] };
    if count == 0 {
        return Ok(losses);
    }
    let rows = counted.gather(gpu, x)?;
    let weight = Matrix::from(weight);
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

#[cfg(test)]
mod tests {
    use march_engine::{Kernels, Weight};

    use super::*;

    /// A scratch that holds few tokens changes no loss and no gradient of x, and that of W only by rounding.
    #[test]
    fn blocks_change_nothing() {
        let usable = crate::adapters().into_iter().filter(|adapter| adapter.usable.is_ok());
        for gpu in usable.map(|adapter| Gpu::open(Some(adapter.index)).unwrap()) {
            let (rows, width, vocabulary) = (45usize, 9, 50);
            let numbers = |count: usize, step: f32| -> Vec<f32> {
                (0..count).map(|i| (i as f32 * step).sin()).collect()
            };
            let x = gpu.upload(&numbers(rows * width, 1.7), &[rows, width]).unwrap();
            let w = gpu.upload(&numbers(vocabulary * width, 2.3), &[vocabulary, width]).unwrap();
            let target = |row: usize| if row % 7 == 3 { IGNORE } else { (row * 13 % vocabulary) as u32 };
            let targets: Vec<u32> = (0..rows).map(target).collect();
            let input = LinearCrossEntropy { x: &x, weight: Weight::Full(&w) };
            let run = |block: usize| {
                let found = forward_in_blocks(&gpu, input, &targets, None, [true; 2], block).unwrap();
                let [dx, dw] = found.gradients.map(|d| gpu.to_f32(&d.unwrap()));
                (gpu.to_f32(&found.loss), dx, dw)
            };
            let want = run(64);
            for block in [1, 4, 17, 20] {
                let found = run(block);
                assert!((&found.0, &found.1) == (&want.0, &want.1), "{gpu:?}: blocks of {block}");
                let near = found.2.iter().zip(&want.2).all(|(a, b)| (a - b).abs() < 1e-6);
                assert!(near, "{gpu:?}: dW in blocks of {block}");
            }
        }
    }
}

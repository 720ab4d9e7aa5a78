//! Optimised output layer with cross-entropy loss.
//!
//! The logits of all tokens are never stored at once, because they would be tokens × vocabulary numbers. Instead, the
//! tokens that have a target are processed in blocks whose logits stay in cache: one product for the logits, softmax
//! in place, and two products for the gradients, all before the next block. The softmax of a block's rows is
//! distributed over threads; sums over the vocabulary and over tokens are in f64, in a fixed order.

use super::{
    CrossEntropy, IGNORE, LinearCrossEntropy, LinearCrossEntropyBackward, Sizes, TokenLosses, TokenLossesOf,
};
use crate::array::Array;
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::ops::linear::{self, fast::Job};
use crate::ops::pack;
use crate::product::{Accum, Matrix, product};
use crate::simd::{self, Kernel, LANES, Simd, load_or_part, store_or_part};
use crate::tensor::Tensor;

/// Maximum number of logits per block: 16 MB.
const BLOCK: usize = 4 * 1024 * 1024;
/// Maximum number of tokens per block: the inner dimension of dLᵀ x, which is fastest at about this size.
const TOKENS: usize = 256;
/// Minimum number of tokens per block. Each block reads all weights, which for a large vocabulary do not fit into any
/// cache; then it matters more that they are read seldom than that the logits stay in cache.
const LEAST_TOKENS: usize = 128;

/// Number of tokens per block: as many as fit, the same for all blocks except the last.
fn block_tokens(sizes: &Sizes) -> usize {
    let most = (BLOCK / sizes.vocabulary.max(1)).clamp(LEAST_TOKENS, TOKENS);
    let blocks = sizes.counted.len().div_ceil(most).max(1);
    sizes.counted.len().div_ceil(blocks).max(1)
}

pub(crate) fn forward(
    cpu: &Cpu,
    op: LinearCrossEntropy,
    (sizes, factor): (Sizes, f64),
) -> Result<CrossEntropy> {
    let LinearCrossEntropy { x: input, weight, targets, needs, .. } = &op;
    let Sizes { width, vocabulary, ref counted } = sizes;
    let whole = counted.len() == targets.len();
    let mut dx = needs[0].then(|| if whole { cpu.uninit(input.shape()) } else { cpu.zeros(input.shape()) });
    let mut dw = needs[1]
        .then(|| if counted.is_empty() { cpu.zeros(weight.shape()) } else { cpu.uninit(weight.shape()) });
    let keep = needs[0] || needs[1];
    let mut total = 0.0;
    let mut accumulate = Accum::Replace;
    for rows in counted.chunks(block_tokens(&sizes)) {
        let x = gather(cpu, input.f32(), width, rows);
        let mut logits = logits(cpu, &x, weight, vocabulary);
        let scale = keep.then_some(factor as f32);
        let seen = softmax_rows(cpu, &mut logits, rows, targets, scale, false);
        total += seen.iter().map(|row| row.nll).sum::<f64>();
        let dl = Matrix::rows(logits.data(), rows.len(), vocabulary);
        if let Some(dx) = &mut dx {
            let mut block = cpu.uninit(x.shape());
            let weight = Matrix::rows(weight.f32().data(), vocabulary, width);
            product(cpu, block.data_mut(), Accum::Replace, dl, weight);
            let out = dx.data_mut();
            for (i, &row) in rows.iter().enumerate() {
                out[row * width..][..width].copy_from_slice(&block.data()[i * width..][..width]);
            }
        }
        if let Some(dw) = &mut dw {
            let x = Matrix::rows(x.data(), rows.len(), width);
            product(cpu, dw.data_mut(), accumulate, dl.t(), x);
            accumulate = Accum::Add;
        }
    }
    let loss = input.like(cpu.from_slice(&[(total * factor) as f32], &[])?);
    Ok(CrossEntropy { loss, gradients: [dx, dw].map(|found| found.map(|array| input.like(array))) })
}

pub(crate) fn backward(cpu: &Cpu, op: LinearCrossEntropyBackward, (): ()) -> Result<[Option<Tensor>; 2]> {
    let factor = op.gradient.f32().data()[0];
    if factor == 1.0 {
        return Ok(op.kept);
    }
    let [dx, dw] = op.kept.map(|kept| {
        let scaled = scale(cpu, kept?.into_f32(), factor);
        Some(scaled.map(|array| op.gradient.like(array)))
    });
    Ok([dx.transpose()?, dw.transpose()?])
}

#[allow(unsafe_code)]
fn scale(cpu: &Cpu, mut array: Array<f32>, factor: f32) -> Result<Array<f32>> {
    if !array.is_unique() {
        array = cpu.from_slice(array.data(), array.shape())?;
    }
    let len = array.len();
    let out = Shared::new(array.data_mut());
    cpu.for_rows(cpu.row_parts(len, 1), |_, range| {
        // SAFETY: parts are disjoint ranges.
        cpu.level().run(Scale(unsafe { out.part(range.start, range.len()) }, factor));
    });
    Ok(array)
}

struct Scale<'a>(&'a mut [f32], f32);
impl Kernel for Scale<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        simd::scale(s, self.0, self.1);
    }
}

pub(crate) fn token_losses(cpu: &Cpu, op: TokenLossesOf, sizes: Sizes) -> Result<TokenLosses> {
    let TokenLossesOf { x, weight, targets } = &op;
    let mut result = TokenLosses { nll: vec![0.0; targets.len()], greedy: vec![IGNORE; targets.len()] };
    for rows in sizes.counted.chunks(block_tokens(&sizes)) {
        let x = gather(cpu, x.f32(), sizes.width, rows);
        let mut logits = logits(cpu, &x, weight, sizes.vocabulary);
        let seen = softmax_rows(cpu, &mut logits, rows, targets, None, true);
        for (&row, seen) in rows.iter().zip(seen) {
            result.nll[row] = seen.nll as f32;
            result.greedy[row] = seen.greedy;
        }
    }
    Ok(result)
}

/// L = x Wᵀ.
fn logits(cpu: &Cpu, x: &Array<f32>, weight: &Tensor, vocabulary: usize) -> Array<f32> {
    let sizes = linear::Sizes { rows: x.shape()[0], inner: x.width(), outer: vocabulary };
    let mut logits = cpu.uninit(&[sizes.rows, vocabulary]);
    let job = Job { sizes, weight: pack::raw(weight), y: logits.data_mut() };
    linear::fast::multiply(cpu, x.data(), vec![job]);
    logits
}

/// Copies the selected rows of x into a contiguous tensor.
fn gather(cpu: &Cpu, x: &Array<f32>, width: usize, rows: &[usize]) -> Array<f32> {
    let mut block = cpu.uninit(&[rows.len(), width]);
    let out = block.data_mut();
    for (i, &row) in rows.iter().enumerate() {
        out[i * width..][..width].copy_from_slice(&x.data()[row * width..][..width]);
    }
    block
}

/// Result of one row of logits for its target.
#[derive(Clone, Copy, Default)]
struct RowLoss {
    nll: f64,
    greedy: u32,
}

/// Computes the loss of each row of a block. With `scale`, the logits are replaced by scale · (softmax − onehot).
#[allow(unsafe_code)]
fn softmax_rows(
    cpu: &Cpu,
    logits: &mut Array<f32>,
    rows: &[usize],
    targets: &[u32],
    scale: Option<f32>,
    greedy: bool,
) -> Vec<RowLoss> {
    let width = logits.width();
    let seen: Vec<std::sync::OnceLock<RowLoss>> = vec![std::sync::OnceLock::new(); rows.len()];
    let out = Shared::new(logits.data_mut());
    cpu.for_rows(cpu.row_parts(rows.len(), width), |_, range| {
        for i in range {
            // SAFETY: each row belongs to one task.
            let logits = unsafe { out.part(i * width, width) };
            let target = targets[rows[i]] as usize;
            let _ = seen[i].set(cpu.level().run(SoftmaxRow { logits, target, scale, greedy }));
        }
    });
    seen.into_iter().map(|s| s.into_inner().unwrap_or_default()).collect()
}

struct SoftmaxRow<'a> {
    logits: &'a mut [f32],
    target: usize,
    scale: Option<f32>,
    greedy: bool,
}

impl Kernel for SoftmaxRow<'_> {
    type Output = RowLoss;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> RowLoss {
        let Self { logits, target, scale, greedy } = self;
        let top = simd::largest(s, logits);
        let hit = logits[target];
        let best = if greedy { logits.iter().position(|&v| v == top).unwrap_or(0) } else { 0 };
        // Sum over all logits except the target's, so that neither p − 1 nor a small loss suffers from
        // cancellation. Groups of 1024 are summed in f32, and the group sums in f64.
        logits[target] = f32::NEG_INFINITY;
        let mut others = 0.0;
        for chunk in logits.chunks_mut(1024) {
            let sum = if scale.is_some() {
                exps::<S, true>(s, chunk, top)
            } else {
                exps::<S, false>(s, chunk, top)
            };
            others += f64::from(sum);
        }
        let below = f64::from(hit) - f64::from(top);
        let own = below.exp();
        let total = others + own;
        if let Some(scale) = scale {
            simd::scale(s, logits, (f64::from(scale) / total) as f32);
            logits[target] = (-f64::from(scale) * (others / total)) as f32;
        }
        let nll = if own > 0.5 { (others / own).ln_1p() } else { total.ln() - below };
        RowLoss { nll, greedy: best as u32 }
    }
}

/// Σ e^(x − top) over at most 1024 elements; with `KEEP`, x is replaced by e^(x − top).
#[inline(always)]
fn exps<S: Simd, const KEEP: bool>(s: S, x: &mut [f32], top: f32) -> f32 {
    let shift = s.splat(top);
    let mut sums = [s.splat(0.0); 2];
    let mut chunks = x.chunks_exact_mut(2 * LANES);
    for chunk in &mut chunks {
        for i in 0..2 {
            let e = simd::exp(s, s.sub(s.load(&chunk[i * LANES..]), shift));
            sums[i] = s.add(sums[i], e);
            if KEEP {
                s.store(&mut chunk[i * LANES..], e);
            }
        }
    }
    let mut total = s.sum(s.add(sums[0], sums[1]));
    for chunk in chunks.into_remainder().chunks_mut(LANES) {
        let mut lanes = [0.0; LANES];
        let e = simd::exp(s, s.sub(load_or_part::<S, true>(s, chunk), shift));
        s.store(&mut lanes, e);
        total += lanes[..chunk.len()].iter().sum::<f32>();
        if KEEP {
            store_or_part::<S, true>(s, chunk, e);
        }
    }
    total
}

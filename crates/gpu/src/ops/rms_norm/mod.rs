//! `rms_norm` on the device, plain and gated.

use march_engine::ops::rms_norm::{GatedRmsNorm, GatedRmsNormBackward, RmsNorm, RmsNormBackward};
use march_engine::{Result, Tensor};

use super::{elementwise, reduce};
use crate::array::{GpuArray, array, arrays, tensors};
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Invocations of a workgroup.
const GROUP: usize = 256;

/// Numbers that a workgroup of the backward pass reads from each tensor, about.
const BLOCK: usize = 16 * 1024;

fn forward_kernel(gated: bool) -> Kernel {
    Kernel {
        name: if gated { "gated_rms_norm/forward" } else { "rms_norm/forward" },
        source: concat!(include_str!("kernel.wgsl"), include_str!("segment.wgsl")),
        entry: if gated { "gated_forward" } else { "forward" },
        constants: Vec::new(),
        writes: &[false, false, false, true, true, false, false],
    }
}

fn backward_kernel(gated: bool) -> Kernel {
    if gated {
        return Kernel {
            name: "gated_rms_norm/backward",
            source: concat!(
                include_str!("backward.wgsl"),
                include_str!("gated.wgsl"),
                include_str!("segment.wgsl")
            ),
            entry: "backward",
            constants: Vec::new(),
            writes: &[false, false, false, false, false, true, false, false, true],
        };
    }
    Kernel {
        name: "rms_norm/backward",
        source: concat!(
            include_str!("backward.wgsl"),
            include_str!("plain.wgsl"),
            include_str!("segment.wgsl")
        ),
        entry: "backward",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, true, true, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![forward_kernel(false), forward_kernel(true), backward_kernel(false), backward_kernel(true)]
}

/// Invocations that share a row: about one for every four numbers.
fn lanes(width: usize) -> usize {
    width.div_ceil(4).next_power_of_two().clamp(8, GROUP)
}

pub(crate) fn forward(gpu: &Gpu, op: RmsNorm, _: usize) -> Result<Vec<Tensor>> {
    normalise(gpu, &op.x, None, &op.weight, op.eps)
}

pub(crate) fn gated_forward(gpu: &Gpu, op: GatedRmsNorm, _: usize) -> Result<Vec<Tensor>> {
    normalise(gpu, &op.x, Some(&op.gates), &op.weight, op.eps)
}

/// Numbers of a tensor in an entry of a list that may be missing.
fn length(list: &[&GpuArray], i: usize) -> usize {
    list.get(i).map_or(0, |tensor| tensor.len())
}

/// Tensors in parts of two, which a dispatch can take.
fn normalise(
    gpu: &Gpu,
    x: &[Tensor],
    gates: Option<&[Tensor]>,
    weight: &Tensor,
    eps: f64,
) -> Result<Vec<Tensor>> {
    let (x, gates, width, gated) = (arrays(x), gates.map(arrays), weight.len(), gates.is_some());
    let lanes = lanes(width);
    let outputs = x.iter().map(|x| gpu.empty(x.shape())).collect::<Result<Vec<_>>>()?;
    let spare = gpu.empty(&[1])?;
    for (part, (x, y)) in x.chunks(2).zip(outputs.chunks(2)).enumerate() {
        let rows = (length(x, 0) + length(x, 1)) / width;
        let split = length(x, 0) as u32;
        let call = [rows as u32, width as u32, lanes as u32, (eps as f32).to_bits(), split];
        let groups = gpu.list(rows.div_ceil(GROUP / lanes));
        let gates = gates.as_ref().map_or(x, |gates| &gates[2 * part..2 * part + x.len()]);
        let last = x.len() - 1;
        let y1 = y.get(1).unwrap_or(&spare);
        let tensors = [x[0], x[last], array(weight), &y[0], y1, gates[0], gates[last]];
        gpu.run(&forward_kernel(gated), &tensors, &call, groups)?;
    }
    Ok(tensors(weight, outputs))
}

/// Sizes of a call of the backward pass for all rows of two tensors.
struct Rows {
    call: Vec<u32>,
    blocks: usize,
    splits: usize,
}

impl Rows {
    /// `starts` and `add` as in backward.wgsl.
    fn new(x: &[&GpuArray], width: usize, eps: f64, starts: [usize; 4], add: u32) -> Self {
        let (rows, lanes) = ((length(x, 0) + length(x, 1)) / width, lanes(width));
        let block = (BLOCK / width).clamp(16, GROUP);
        let splits = GROUP / width.next_power_of_two().min(GROUP);
        let mut call: Vec<u32> = starts.map(|start| start as u32).into();
        call.extend([rows, width, lanes].map(|n| n as u32));
        call.push((eps as f32).to_bits());
        call.extend([block, splits, length(x, 0)].map(|n| n as u32));
        call.push(add);
        Self { call, blocks: rows.div_ceil(block), splits }
    }

    /// Room for the sums of the weights that workgroups make.
    fn partial(&self, gpu: &Gpu, width: usize) -> Result<GpuArray> {
        gpu.empty(&[self.blocks * self.splits, width])
    }
}

/// The sum of the weights' gradients over parts of a list.
fn add_up(gpu: &Gpu, partial: &GpuArray, total: &mut Option<GpuArray>) -> Result<()> {
    let sum = reduce::sum_of_rows(gpu, partial)?;
    match total {
        Some(total) => elementwise::add(gpu, total, &sum),
        None => {
            *total = Some(sum);
            Ok(())
        }
    }
}

pub(crate) fn backward(gpu: &Gpu, op: RmsNormBackward, width: usize) -> Result<(Vec<Tensor>, Tensor)> {
    let RmsNormBackward { forward: RmsNorm { x, weight, eps }, gradients, mut dx } = op;
    let (x, gradients) = (arrays(&x), arrays(&gradients));
    let (mut found, mut total) = (Vec::with_capacity(x.len()), None);
    for ((x, dy), dx) in x.chunks(2).zip(gradients.chunks(2)).zip(dx.chunks_mut(2)) {
        let add = dx.iter().enumerate().map(|(i, dx)| u32::from(dx.is_some()) << i).sum();
        let own = std::iter::zip(x, dx.iter_mut())
            .map(|(x, dx)| elementwise::room_for(gpu, x, dx.take()))
            .collect::<Result<Vec<_>>>()?;
        let rows = Rows::new(x, width, eps, [0; 4], add);
        let (partial, spare, last) = (rows.partial(gpu, width)?, gpu.empty(&[1])?, x.len() - 1);
        let (dx0, dx1) = (&own[0], own.get(1).unwrap_or(&spare));
        let tensors = [x[0], x[last], array(&weight), dy[0], dy[last], &partial, dx0, dx1];
        gpu.run(&backward_kernel(false), &tensors, &rows.call, gpu.list(rows.blocks))?;
        add_up(gpu, &partial, &mut total)?;
        found.extend(own);
    }
    let Some(total) = total else { unreachable!("the engine rejects empty lists") };
    Ok((tensors(&weight, found), weight.like(total)))
}

pub(crate) fn gated_backward(
    gpu: &Gpu,
    op: GatedRmsNormBackward,
    width: usize,
) -> Result<(Vec<Tensor>, Vec<Tensor>, Tensor)> {
    let GatedRmsNorm { x, gates, weight, eps } = &op.forward;
    let (x, gates, gradients) = (arrays(x), arrays(gates), arrays(&op.gradients));
    let (mut d_inputs, mut d_gates, mut total) = (Vec::new(), Vec::new(), None);
    for ((x, gates), dy) in x.chunks(2).zip(gates.chunks(2)).zip(gradients.chunks(2)) {
        let last = x.len() - 1;
        let second: &[usize] = if last == 0 { &[0] } else { x[1].shape() };
        let (whole, [dx0, dx1, dg0, dg1]) = gpu.group([x[0].shape(), second, x[0].shape(), second])?;
        let starts = [&dx0, &dx1, &dg0, &dg1].map(|part| part.start() - whole.start());
        let rows = Rows::new(x, width, *eps, starts, 0);
        let partial = rows.partial(gpu, width)?;
        let weight = array(weight);
        let tensors = [x[0], x[last], weight, dy[0], dy[last], &partial, gates[0], gates[last], &whole];
        gpu.run(&backward_kernel(true), &tensors, &rows.call, gpu.list(rows.blocks))?;
        add_up(gpu, &partial, &mut total)?;
        d_inputs.extend([dx0, dx1].into_iter().take(x.len()));
        d_gates.extend([dg0, dg1].into_iter().take(x.len()));
    }
    let Some(total) = total else { unreachable!("the engine rejects empty lists") };
    Ok((tensors(weight, d_inputs), tensors(weight, d_gates), weight.like(total)))
}

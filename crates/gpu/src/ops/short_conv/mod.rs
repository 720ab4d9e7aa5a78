//! `short_conv` on the device: up to three convolutions in a dispatch.

use march_engine::ops::short_conv::{
    ShortConv, ShortConvBackward, ShortConvForward, ShortConvGradients, Sizes,
};
use march_engine::{Result, Tensor};

use super::elementwise::copied;
use super::reduce;
use crate::array::{ALIGN, GpuArray, array, arrays};
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Numbers that a workgroup owns.
const GROUP: usize = 256;

/// Tokens that an invocation of the backward pass owns.
const BLOCK: usize = 32;

/// Convolutions in one dispatch, at the most.
const EACH: usize = 3;

/// Tokens up to which a new tail stays in the buffer of the results: it is kept, and keeps the whole buffer alive.
const FEW: usize = 8;

fn forward_kernel(has_tail: bool) -> Kernel {
    if has_tail {
        return Kernel {
            name: "short_conv/forward",
            source: concat!(
                include_str!("kernel.wgsl"),
                include_str!("inputs.wgsl"),
                include_str!("tails.wgsl")
            ),
            entry: "forward",
            constants: Vec::new(),
            writes: &[false, false, false, false, false, false, false, false, false, true],
        };
    }
    Kernel {
        name: "short_conv/forward from the beginning",
        source: concat!(
            include_str!("kernel.wgsl"),
            include_str!("inputs.wgsl"),
            include_str!("no_tails.wgsl")
        ),
        entry: "forward",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, false, true, true],
    }
}

fn backward_kernel(three: bool, kernel: usize) -> Kernel {
    let constants = vec![("K", kernel as u32)];
    if three {
        return Kernel {
            name: "short_conv/backward",
            source: concat!(
                include_str!("backward.wgsl"),
                include_str!("inputs.wgsl"),
                include_str!("three.wgsl")
            ),
            entry: "backward",
            constants,
            writes: &[false, false, false, false, false, false, false, false, false, true],
        };
    }
    Kernel {
        name: "short_conv/backward of one",
        source: concat!(include_str!("backward.wgsl"), include_str!("inputs.wgsl"), include_str!("one.wgsl")),
        entry: "backward",
        constants,
        writes: &[false, false, false, false, false, false, false, false, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![forward_kernel(true), forward_kernel(false), backward_kernel(true, 4), backward_kernel(false, 1)]
}

/// The arrays of a convolution.
fn arrays_of(input: &ShortConv<Tensor>) -> ShortConv<&GpuArray> {
    let ShortConv { x, weight, tail } = input;
    ShortConv { x: array(x), weight: array(weight), tail: tail.as_ref().map(array) }
}

/// Convolutions that go together: B, T, K, and up to three lists of channels.
struct Calls<'a> {
    list: &'a [ShortConv<&'a GpuArray>],
    batch: usize,
    tokens: usize,
    kernel: usize,
    has_tail: bool,
}

impl<'a> Calls<'a> {
    /// Divides a list into parts that one dispatch can take.
    fn divided(list: &'a [ShortConv<&'a GpuArray>], sizes: &[Sizes], gpu: &Gpu, most: usize) -> Vec<Self> {
        let limits = gpu.limits();
        let largest = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size) as usize / 4;
        let alike = |i: usize| {
            let Sizes { batch, tokens, kernel, .. } = sizes[i];
            (batch, tokens, kernel, list[i].tail.is_some())
        };
        let room = |part: &[ShortConv<&GpuArray>]| {
            // Besides a result like x there are tails, or sums of blocks.
            let numbers = part.iter().map(|input| 2 * input.x.len() + 8 * input.weight.len() + ALIGN);
            part.len() == 1 || numbers.sum::<usize>() <= largest
        };
        let (mut found, mut first) = (Vec::new(), 0);
        while first < list.len() {
            let same = (first..list.len()).take(most).take_while(|&i| alike(i) == alike(first)).count();
            let count = if room(&list[first..first + same]) { same } else { 1 };
            let (batch, tokens, kernel, has_tail) = alike(first);
            found.push(Self { list: &list[first..first + count], batch, tokens, kernel, has_tail });
            first += count;
        }
        found
    }

    fn width(&self, q: usize) -> usize {
        self.list.get(q).map_or(0, |input| input.x.shape()[2])
    }

    /// x and w of the convolutions, filled up to three.
    fn inputs(&self) -> Vec<&'a GpuArray> {
        let at = |q: usize| self.list.get(q).unwrap_or(&self.list[0]);
        (0..EACH).map(|q| at(q).x).chain((0..EACH).map(|q| at(q).weight)).collect()
    }

    /// Numbers of all channels, then four for each of `starts`, then B, T, K and whether there is a tail.
    fn numbers(&self, starts: &[[usize; EACH]]) -> Vec<u32> {
        let four = |three: [usize; EACH]| three.map(|n| n as u32).into_iter().chain([0]);
        let widths = std::array::from_fn(|q| self.width(q));
        let rest = [self.batch, self.tokens, self.kernel, self.has_tail.into()].map(|n| n as u32);
        four(widths).chain(starts.iter().flat_map(|&starts| four(starts))).chain(rest).collect()
    }

    fn channels(&self) -> usize {
        (0..EACH).map(|q| self.width(q)).sum()
    }

    /// Shapes of x and its like, or with K − 1 tokens.
    fn shapes(&self, tokens: usize) -> [[usize; 3]; EACH] {
        std::array::from_fn(|q| [self.batch, if q < self.list.len() { tokens } else { 0 }, self.width(q)])
    }

    /// Tensors [B, tokens, D] of the convolutions in one buffer.
    fn tensors(&self, gpu: &Gpu, tokens: usize) -> Result<(GpuArray, [GpuArray; EACH])> {
        let shapes = self.shapes(tokens);
        gpu.group(shapes.each_ref().map(|shape| &shape[..]))
    }
}

/// Where tensors start in the buffer of `whole`.
fn starts(whole: &GpuArray, parts: &[GpuArray; EACH]) -> [usize; EACH] {
    parts.each_ref().map(|part| part.start() - whole.start())
}

pub(crate) fn forward(gpu: &Gpu, op: ShortConvForward, sizes: Vec<Sizes>) -> Result<Vec<(Tensor, Tensor)>> {
    let inputs: Vec<_> = op.inputs.iter().map(arrays_of).collect();
    let like = &op.inputs[0].x;
    let mut found = Vec::with_capacity(inputs.len());
    for calls in Calls::divided(&inputs, &sizes, gpu, EACH) {
        let count = calls.batch * (calls.tokens + calls.kernel - 1) * calls.channels();
        let groups = gpu.list(count.div_ceil(GROUP));
        let mut tensors = calls.inputs();
        let (ys, tails) = if calls.has_tail {
            let (ys, tails) = (calls.shapes(calls.tokens), calls.shapes(calls.kernel - 1));
            let [y0, y1, y2] = ys.each_ref().map(|shape| &shape[..]);
            let [t0, t1, t2] = tails.each_ref().map(|shape| &shape[..]);
            let (whole, [y0, y1, y2, t0, t1, t2]) = gpu.group([y0, y1, y2, t0, t1, t2])?;
            let (ys, tails) = ([y0, y1, y2], [t0, t1, t2]);
            tensors.extend((0..EACH).map(|q| {
                let input = calls.list.get(q).unwrap_or(&calls.list[0]);
                input.tail.unwrap_or(input.x)
            }));
            tensors.push(&whole);
            let numbers = calls.numbers(&[starts(&whole, &ys), starts(&whole, &tails)]);
            gpu.run(&forward_kernel(true), &tensors, &numbers, groups)?;
            (ys, tails)
        } else {
            let (whole, ys) = calls.tensors(gpu, calls.tokens)?;
            let (ends, tails) = calls.tensors(gpu, calls.kernel - 1)?;
            tensors.extend([&whole, &ends]);
            let numbers = calls.numbers(&[starts(&whole, &ys), starts(&ends, &tails)]);
            gpu.run(&forward_kernel(false), &tensors, &numbers, groups)?;
            (ys, tails)
        };
        for (y, tail) in ys.into_iter().zip(tails).take(calls.list.len()) {
            let shared = calls.has_tail && calls.tokens > FEW;
            let tail = if shared { copied(gpu, &tail)? } else { tail };
            found.push((like.like(y), like.like(tail)));
        }
    }
    Ok(found)
}

pub(crate) fn backward(
    gpu: &Gpu,
    op: ShortConvBackward,
    sizes: Vec<Sizes>,
) -> Result<Vec<ShortConvGradients>> {
    let inputs: Vec<_> = op.inputs.iter().map(arrays_of).collect();
    let gradients = arrays(&op.gradients);
    let mut found = Vec::with_capacity(inputs.len());
    let mut rest = &gradients[..];
    // Tails take the place of other convolutions in the bindings.
    let most = if inputs.iter().any(|input| input.tail.is_some()) { 1 } else { EACH };
    for calls in Calls::divided(&inputs, &sizes, gpu, most) {
        let (gradients, later) = rest.split_at(calls.list.len());
        rest = later;
        found.extend(gradients_of(gpu, &calls, gradients)?);
    }
    let wrapped = |d: [GpuArray; 2]| {
        let [x, weight] = d.map(|d| op.gradients[0].like(d));
        ShortConvGradients { x, weight }
    };
    Ok(found.into_iter().map(wrapped).collect())
}

/// Gradients of x and of the weight, for each convolution.
fn gradients_of(gpu: &Gpu, calls: &Calls<'_>, gradients: &[&GpuArray]) -> Result<Vec<[GpuArray; 2]>> {
    let blocks = calls.tokens.div_ceil(BLOCK);
    // The sums of each weight start where a tensor may start.
    let mut stride = 0;
    let sums: [usize; EACH] = std::array::from_fn(|q| {
        let start = stride;
        stride += (calls.width(q) * calls.kernel).max(1).next_multiple_of(ALIGN);
        start
    });
    let [x0, x1, x2] = calls.shapes(calls.tokens);
    let (whole, [x0, x1, x2, partial]) = gpu.group([&x0, &x1, &x2, &[calls.batch * blocks, stride]])?;
    let d_inputs = [x0, x1, x2];
    let first = partial.start() - whole.start();
    let three = calls.list.len() > 1;
    let mut tensors = calls.inputs();
    if three {
        tensors.extend((0..EACH).map(|q| gradients.get(q).unwrap_or(&gradients[0])));
    } else {
        tensors.extend([calls.list[0].tail.unwrap_or(calls.list[0].x), gradients[0]]);
    }
    tensors.push(&whole);
    let mut numbers = calls.numbers(&[starts(&whole, &d_inputs), sums.map(|start| first + start)]);
    numbers.extend([BLOCK, blocks, stride].map(|n| n as u32));
    let count = calls.batch * blocks * calls.channels();
    let groups = gpu.list(count.div_ceil(GROUP));
    gpu.run(&backward_kernel(three, calls.kernel), &tensors, &numbers, groups)?;
    let total = reduce::sum_of_rows(gpu, &partial)?;
    let each = std::iter::zip(calls.list, d_inputs).zip(sums);
    Ok(each.map(|((input, x), start)| [x, total.part(start, input.weight.shape())]).collect())
}

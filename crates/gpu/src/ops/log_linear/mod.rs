//! `log_linear_delta` on the device.
//!
//! Both passes run token by token, each column of the level states in one invocation, the states in device memory. The
//! backward pass recomputes the states, from those at the start of every tile, so the forward pass keeps nothing.

mod backward;

pub(crate) use backward::backward;

use std::ops::Range;

use march_engine::ops::gated_delta;
use march_engine::ops::log_linear::{self, LogLinear, LogLinearForward, LogLinearOptions, LogLinearOutput};
use march_engine::{Result, Tensor};

use crate::array::{GpuArray, array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::gated_delta::TURNS;

/// Numbers of keys that a workgroup holds at once.
const TILE_NUMBERS: usize = 2048;

/// Columns of a state that a workgroup owns.
const COLUMNS: usize = 64;

/// Dimensions of a call.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    tokens: usize,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    scales: usize,
    position: usize,
}

/// Number of bits needed to represent `x`; 0 for 0.
fn bit_length(x: usize) -> usize {
    (usize::BITS - x.leading_zeros()) as usize
}

impl Sizes {
    fn new(gpu: &Gpu, log_linear::Sizes { heads, scales, position, .. }: log_linear::Sizes) -> Result<Self> {
        let gated_delta::Sizes { batch, tokens, key_heads, value_heads, key_dim, value_dim, .. } = heads;
        if position + tokens > i32::MAX as usize {
            return gpu.unsupported("log_linear_delta of more than 2^31 tokens");
        }
        Ok(Self { batch, tokens, key_heads, value_heads, key_dim, value_dim, scales, position })
    }

    fn rows(&self) -> usize {
        self.batch * self.tokens
    }

    /// Levels of the states after the last token.
    fn levels(&self) -> usize {
        bit_length(self.position + self.tokens) + 1
    }

    /// Numbers of the level states of one head.
    fn states(&self) -> usize {
        self.levels() * self.key_dim * self.value_dim
    }

    fn strips(&self) -> usize {
        self.value_dim.div_ceil(COLUMNS)
    }

    /// Tokens whose keys and queries a workgroup holds at once.
    fn tile(&self) -> usize {
        (TILE_NUMBERS / self.key_dim.next_multiple_of(4)).clamp(1, 32)
    }

    fn constants(&self) -> Vec<(&'static str, u32)> {
        vec![("D4", self.key_dim.div_ceil(4) as u32), ("TILE", self.tile() as u32)]
    }

    /// Turns of the loops of an invocation for one token, at the most; see [`TURNS`].
    fn turns(&self) -> usize {
        let fours = self.key_dim.div_ceil(4);
        8 + 3 * fours + self.levels() * (2 * fours + 1)
    }

    /// Immediates of both passes, for `count` pairs of batch row and head from `first` on.
    fn numbers(
        &self,
        initial: bool,
        [first, count, slots]: [usize; 3],
        phase: usize,
        range: Range<usize>,
    ) -> [u32; 19] {
        [
            self.batch,
            self.tokens,
            self.key_heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
            self.key_dim.div_ceil(4),
            self.strips(),
            self.scales,
            self.position,
            bit_length(self.position) + 1,
            self.levels(),
            usize::from(initial),
            first,
            count,
            slots,
            phase,
            range.start,
            range.end,
        ]
        .map(|number| number as u32)
    }
}

fn gates_kernel() -> Kernel {
    Kernel {
        name: "log_linear_delta/gates",
        source: include_str!("gates.wgsl"),
        entry: "gate",
        constants: Vec::new(),
        writes: &[false, false, false, false, false, false, true, true],
    }
}

fn forward_kernel(sizes: &Sizes) -> Kernel {
    Kernel {
        name: "log_linear_delta/forward",
        source: concat!(include_str!("step.wgsl"), include_str!("kernel.wgsl")),
        entry: "forward",
        constants: sizes.constants(),
        writes: &[false, false, false, false, false, false, true, true],
    }
}

/// The kernels of this operation, for tests without a device.
pub(crate) fn kernels() -> Vec<Kernel> {
    let size = |key_dim, value_dim| Sizes {
        batch: 1,
        tokens: 1,
        key_heads: 1,
        value_heads: 1,
        key_dim,
        value_dim,
        scales: 12,
        position: 0,
    };
    let mut list = vec![gates_kernel()];
    for sizes in [size(3, 5), size(64, 64), size(128, 128), size(256, 256)] {
        list.push(forward_kernel(&sizes));
        list.extend(backward::kernels(&sizes));
    }
    list
}

/// Gates [B·T, value_heads, 4] and level weights λ [B·T, value_heads, NL] of all tokens.
fn gates(
    gpu: &Gpu,
    input: &LogLinear<&GpuArray>,
    options: &LogLinearOptions,
    sizes: &Sizes,
) -> Result<[GpuArray; 2]> {
    let (rows, heads, scales) = (sizes.rows(), sizes.value_heads, sizes.scales);
    let gates = gpu.empty(&[rows, heads, 4])?;
    let weights = gpu.empty(&[rows, heads, scales])?;
    let tensors = [
        input.retention_input,
        input.write_input,
        input.a_log,
        input.dt_bias,
        input.level_input,
        input.level_scale,
        &gates,
        &weights,
    ];
    let strength: f32 = if options.allow_neg_eigval { 2.0 } else { 1.0 };
    let numbers = [(rows * heads) as u32, heads as u32, scales as u32, strength.to_bits()];
    gpu.run(&gates_kernel(), &tensors, &numbers, gpu.list((rows * heads).div_ceil(256)))?;
    Ok([gates, weights])
}

pub(crate) fn forward(
    gpu: &Gpu,
    op: LogLinearForward,
    sizes: log_linear::Sizes,
) -> Result<LogLinearOutput<Tensor>> {
    let state_shape = sizes.state_shape();
    let sizes = Sizes::new(gpu, sizes)?;
    let (input, initial) = (op.input.each(array), op.initial.as_ref().map(array));
    let [gates, weights] = gates(gpu, &input, &op.options, &sizes)?;
    let readouts = gpu.empty(input.value.shape())?;
    let states = gpu.empty(&state_shape)?;
    let tensors = [
        input.query,
        input.key,
        input.value,
        &gates,
        &weights,
        // Any tensor may stand for initial states that are not read.
        initial.unwrap_or(input.value),
        &readouts,
        &states,
    ];
    let heads = sizes.batch * sizes.value_heads;
    // At least one dispatch, which writes the states.
    let step = (TURNS / sizes.turns()).max(1);
    for first in (0..sizes.tokens.max(1)).step_by(step) {
        let range = first..sizes.tokens.min(first + step);
        let numbers = sizes.numbers(initial.is_some(), [0, heads, 0], 0, range);
        gpu.run(&forward_kernel(&sizes), &tensors, &numbers, gpu.list(heads * sizes.strips()))?;
    }
    let like = &op.input.value;
    let state = op.options.want_state.then(|| like.like(states));
    Ok(LogLinearOutput { readouts: like.like(readouts), state, saved: None })
}

//! How fast the device runs each operation, as shares of its measured peaks.
//!
//! FLOP and bytes are those that the operation needs, counted from the shapes: every input is read once and every output
//! written once. The backward pass of a product takes twice the FLOP of the forward pass.

use std::sync::Arc;

use march_engine::ops::adamw::AdamW;
use march_engine::ops::anchor_read::{AnchorReadOptions, ReadPlan, Segment, Visible};
use march_engine::ops::elementwise::{Map, Zip};
use march_engine::ops::gated_delta::GatedDeltaOptions;
use march_engine::ops::log_linear::LogLinearOptions;
use march_engine::ops::matmul::Transpose;
use march_engine::ops::rotary::Rotary;
use march_engine::{Engine, Error, Result, Tape};

use super::cases::Random;
use super::peaks::{ELEMENTS, Peaks, Task, fastest};
use super::programs::{Op, Program, settings};
use crate::gpu::Gpu;
use crate::tensor::Tensor;

/// Speed of one operation, forward or forward and backward.
#[derive(Clone, Debug)]
pub struct Speed {
    /// Name of the operation.
    pub operation: &'static str,
    /// Whether the backward pass is included.
    pub backward: bool,
    /// Rows, tokens, or the side of square matrices.
    pub size: usize,
    /// GFLOP/s; 0 for an operation that only moves numbers.
    pub gflops: f64,
    /// Share of the peak of multiply-adds, between 0 and 1.
    pub gflops_share: f64,
    /// GB/s.
    pub gbs: f64,
    /// Share of the peak of moving bytes, between 0 and 1.
    pub gbs_share: f64,
}

/// An operation of some size.
struct Work {
    op: Op,
    /// Shapes of the inputs.
    shapes: Vec<Vec<usize>>,
    /// FLOP of the forward pass; 0 for an operation that only moves numbers.
    flop: usize,
    /// Numbers moved forward and backward, if not every input and output once.
    moved: Option<[usize; 2]>,
}

/// Work of an operation that moves its inputs and outputs once.
fn work(op: Op, shapes: &[&[usize]], flop: usize) -> Work {
    Work { op, shapes: shapes.iter().map(|shape| shape.to_vec()).collect(), flop, moved: None }
}

/// Width of rows.
const WIDTH: usize = 512;

/// Heads of the recurrences, of attention and of the reader.
const HEADS: usize = 4;

/// Width of a head.
const HEAD: usize = 64;

/// Texts that the recurrences run over at once.
const TEXTS: usize = 4;

/// Anchors of the reader.
const ANCHORS: usize = 16;

/// Width of the reader's routing keys.
const ROUTING: usize = 16;

/// Rows of WIDTH numbers: the smallest and the largest count.
const ROWS: [usize; 2] = [64, ELEMENTS / WIDTH];

/// Operations by name: sizes, how much longer twice the size takes, and the work.
fn table() -> Vec<(&'static str, [usize; 2], f64, fn(usize) -> Work)> {
    vec![
        ("linear", [128, 4096], 8.0, |n| work(Op::Linear, &[&[n, n], &[n, n]], 2 * n * n * n)),
        ("matmul", [64, 2048], 8.0, |n| {
            let transpose = Transpose { a: false, b: false };
            work(Op::MatMul(transpose), &[&[4, n, n], &[4, n, n]], 8 * n * n * n)
        }),
        ("linear_cross_entropy", [16, 16 << 10], 2.0, |n| {
            let (width, vocabulary) = (256, 4096);
            let targets = (0..n).map(|i| (i * 7 % vocabulary) as u32).collect();
            let op = Op::CrossEntropy(targets);
            work(op, &[&[n, width], &[vocabulary, width]], 2 * n * width * vocabulary)
        }),
        ("attention", [64, 8192], 4.0, |n| {
            let shape: &[usize] = &[1, n, HEADS * HEAD];
            work(Op::Attention(HEADS), &[shape; 3], 2 * n * n * HEADS * HEAD)
        }),
        ("gated_delta", [32, 4096], 2.0, gated_delta),
        ("log_linear_delta", [32, 4096], 2.0, log_linear),
        ("anchor_read", [64, 32 << 10], 2.0, anchor_read),
        ("state_read", [64, 1024], 2.0, |n| {
            let states: &[usize] = &[n, HEADS, HEAD, HEAD];
            work(Op::StateRead(HEADS), &[&[n, HEADS * HEAD], states], 2 * n * HEADS * HEAD * HEAD)
        }),
        ("rms_norm", ROWS, 2.0, |n| work(Op::RmsNorm, &[&[n, WIDTH], &[WIDTH]], 0)),
        ("gated_rms_norm", ROWS, 2.0, |n| work(Op::GatedRmsNorm, &[&[n, WIDTH], &[WIDTH], &[n, WIDTH]], 0)),
        ("swiglu", ROWS, 2.0, |n| work(Op::SwiGlu, &[&[n, WIDTH], &[n, WIDTH]], 0)),
        ("short_conv", ROWS, 2.0, |n| work(Op::ShortConv, &[&[1, n, WIDTH], &[WIDTH, 4]], 0)),
        ("rotary", ROWS, 2.0, |n| {
            let rotary = Rotary { heads: WIDTH / HEAD, theta: 10_000.0, offset: 0 };
            work(Op::Rotary(rotary), &[&[1, n, WIDTH]], 0)
        }),
        ("embedding", ROWS, 2.0, |n| {
            let rows = 4096;
            let ids = (0..n).map(|i| (i * 7 % rows) as u32).collect();
            // Of the table, the forward pass reads the rows of the ids, and the backward pass writes all.
            let moved = Some([2 * n * WIDTH, n * WIDTH + rows * WIDTH]);
            Work { moved, ..work(Op::Embedding(ids), &[&[rows, WIDTH]], 0) }
        }),
        ("map", ROWS, 2.0, |n| work(Op::Map(Map::Silu), &[&[n, WIDTH]], 0)),
        ("zip", ROWS, 2.0, |n| work(Op::Zip(Zip::Mul), &[&[n, WIDTH], &[n, WIDTH]], 0)),
        ("softmax", ROWS, 2.0, |n| work(Op::Softmax, &[&[n, WIDTH]], 0)),
        ("slice and place", ROWS, 2.0, |n| work(Op::Slice(1, 1, WIDTH), &[&[n, WIDTH]], 0)),
        ("concat", ROWS, 2.0, |n| work(Op::Concat(1), &[&[n, WIDTH / 2], &[n, WIDTH / 2]], 0)),
        ("permute", ROWS, 2.0, |n| work(Op::Permute(vec![1, 0, 2]), &[&[n, 8, WIDTH / 8]], 0)),
        ("sum", ROWS, 2.0, |n| work(Op::Sum(1), &[&[n, WIDTH]], 0)),
        ("mean", ROWS, 2.0, |n| work(Op::Mean(1), &[&[n, WIDTH]], 0)),
        ("expand", ROWS, 2.0, |n| work(Op::Expand(1, 8), &[&[n, WIDTH / 8]], 0)),
    ]
}

/// Shapes that both recurrences share, for texts of n tokens.
fn delta_shapes(n: usize) -> Vec<Vec<usize>> {
    let (wide, narrow) = (vec![TEXTS, n, HEADS * HEAD], vec![TEXTS, n, HEADS]);
    vec![wide.clone(), wide.clone(), wide, narrow.clone(), narrow, vec![HEADS], vec![HEADS]]
}

/// One state read, changed by an outer product, and read: 6 FLOP for each of its numbers.
fn gated_delta(n: usize) -> Work {
    let options = GatedDeltaOptions {
        key_heads: HEADS,
        value_heads: HEADS,
        allow_neg_eigval: false,
        boundaries: Arc::new(vec![(32..=n).step_by(32).collect(); TEXTS]),
        final_state: true,
        chunk_offset: 0,
    };
    let flop = 6 * TEXTS * n * HEADS * HEAD * HEAD;
    Work { op: Op::GatedDelta(options), shapes: delta_shapes(n), flop, moved: None }
}

/// The same for each level that holds anything, which are the bits that are set in a token's position; and the token
/// itself, an outer product and a read.
fn log_linear(n: usize) -> Work {
    let levels = 16;
    let options = LogLinearOptions {
        key_heads: HEADS,
        value_heads: HEADS,
        allow_neg_eigval: false,
        position: 0,
        want_state: false,
    };
    let mut shapes = delta_shapes(n);
    shapes.extend([vec![TEXTS, n, HEADS * levels], vec![HEADS, levels]]);
    let each: usize = (0..n).map(|position| 6 * position.count_ones() as usize + 4).sum();
    Work { op: Op::LogLinear(options), shapes, flop: each * TEXTS * HEADS * HEAD * HEAD, moved: None }
}

/// Every token reads every anchor.
fn anchor_read(n: usize) -> Work {
    let segments = vec![Segment { start: 0, len: n, visible: Visible::Run(0..ANCHORS) }];
    let options = AnchorReadOptions {
        key_heads: HEADS,
        value_heads: HEADS,
        top_k: None,
        routing_scale: 0.25,
        plan: Arc::new(ReadPlan { segments }),
    };
    let shapes: [&[usize]; 5] = [
        &[n, HEADS * HEAD],
        &[n, HEADS * ROUTING],
        &[ANCHORS, HEADS * ROUTING],
        &[ANCHORS, HEADS, HEAD, HEAD],
        &[n, HEADS],
    ];
    work(Op::AnchorRead(options), &shapes, 2 * n * ANCHORS * HEADS * (HEAD * HEAD + ROUTING))
}

/// Measures every operation; `progress` gets each speed as soon as it is known. Operations that the engine leaves to
/// another one are left out.
pub fn speeds(gpu: &Gpu, peaks: &Peaks, progress: &mut dyn FnMut(&Speed)) -> Result<Vec<Speed>> {
    let mut list: Vec<Speed> = Vec::new();
    let mut add = |operation, backward, size, flop: usize, numbers: usize, seconds: f64| {
        let gflops = 1e-9 * flop as f64 / seconds;
        let gbs = 4e-9 * numbers as f64 / seconds;
        let (gflops_share, gbs_share) = (gflops / peaks.gflops, gbs / peaks.gbs());
        let speed = Speed { operation, backward, size, gflops, gflops_share, gbs, gbs_share };
        progress(&speed);
        list.push(speed);
    };
    for (operation, sizes, cost, make) in table() {
        for backward in [false, true] {
            let (size, seconds) = match fastest(gpu, sizes, cost, |size| task(gpu, make(size), backward)) {
                Err(Error::Unsupported { .. }) => break,
                measured => measured?,
            };
            let Work { flop, moved, op, shapes } = make(size);
            let [forward, more] = match moved {
                Some(moved) => moved,
                None => {
                    let inputs: usize = shapes.iter().map(|shape| count(shape)).sum();
                    let outputs = outputs(gpu, &op, &inputs_of(gpu, &shapes)?)?;
                    let outputs: usize = outputs.iter().map(Tensor::len).sum();
                    [inputs + outputs, 2 * inputs + outputs]
                }
            };
            let (flop, numbers) = if backward { (3 * flop, forward + more) } else { (flop, forward) };
            add(operation, backward, size, flop, numbers, seconds);
            gpu.trim();
        }
    }
    let (size, seconds) = fastest(gpu, ROWS, 2.0, |n| adamw(gpu, n))?;
    // Reads the parameter, its moments and its gradient, and writes all but the gradient.
    add("adamw", false, size, 0, 7 * size * WIDTH, seconds);
    gpu.trim();
    Ok(list)
}

fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// Tensors of the given shapes. Their numbers repeat: only the time matters.
fn inputs_of(gpu: &Gpu, shapes: &[Vec<usize>]) -> Result<Vec<Tensor>> {
    let numbers: Vec<f32> = Random(8).input("", &[4093], 0.5).data.iter().map(|&v| v as f32).collect();
    let tensor = |shape: &Vec<usize>| {
        let data: Vec<f32> = numbers.iter().cycle().take(count(shape)).copied().collect();
        gpu.upload(&data, shape)
    };
    shapes.iter().map(tensor).collect()
}

/// Runs an operation forward.
fn outputs(gpu: &Gpu, op: &Op, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let tape = Tape::inference(gpu);
    let vars: Vec<_> = inputs.iter().map(|tensor| tape.constant(tensor.clone())).collect();
    Ok(op.run(&tape, &vars)?.into_iter().map(|var| var.into_value()).collect())
}

/// An operation on inputs that are on the device already.
fn task<'a>(gpu: &'a Gpu, work: Work, backward: bool) -> Result<Task<'a>> {
    let inputs = inputs_of(gpu, &work.shapes)?;
    if !backward {
        return Ok(Box::new(move || outputs(gpu, &work.op, &inputs).map(drop)));
    }
    let results = outputs(gpu, &work.op, &inputs)?;
    let gradients = results.iter().map(|y| gpu.full(y.shape(), 0.5)).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(move || {
        let tape = Tape::new(gpu);
        let vars = inputs.iter().enumerate().map(|(i, tensor)| tape.parameter(i, tensor.clone()));
        let vars: Vec<_> = vars.collect();
        let results = work.op.run(&tape, &vars)?;
        let seeds: Vec<_> = results.iter().zip(gradients.iter().cloned()).collect();
        tape.backward_from(&seeds, |_, _| {})
    }))
}

/// A step of AdamW on so many rows of parameters.
fn adamw<'a>(gpu: &'a Gpu, rows: usize) -> Result<Task<'a>> {
    let zeros = || gpu.full(&[rows, WIDTH], 0.0);
    let (mut parameter, mut first_moment, mut second_moment) = (zeros()?, zeros()?, zeros()?);
    let gradient = gpu.full(&[rows, WIDTH], 0.5)?;
    Ok(Box::new(move || {
        let state = AdamW {
            parameter: &mut parameter,
            first_moment: &mut first_moment,
            second_moment: &mut second_moment,
        };
        gpu.adamw(state, &gradient, &settings(1, 1.0))
    }))
}

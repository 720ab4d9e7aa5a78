//! How fast the device runs each operation, as shares of its measured peaks.
//!
//! FLOP and bytes are those that the operation needs, counted from the shapes: every input is read once and every output
//! written once. The backward pass of a product takes twice the FLOP of the forward pass.

use std::sync::Arc;

use march_engine::ops::adamw::{self, AdamW};
use march_engine::ops::anchor_read::{AnchorReadOptions, ReadPlan, Segment, Visible};
use march_engine::ops::gated_delta::GatedDeltaOptions;
use march_engine::ops::log_linear::LogLinearOptions;
use march_engine::ops::rotary::Rotary;
use march_engine::{Device, Result, Tape, Tensor};

use super::cases::{Random, settings};
use super::peaks::{ELEMENTS, Peaks, Task, fastest};
use super::programs::{self, Program, one};
use crate::gpu::Gpu;

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
    program: Program,
    /// Shapes of the inputs.
    shapes: Vec<Vec<usize>>,
    /// FLOP of the forward pass; 0 for an operation that only moves numbers.
    flop: usize,
    /// Numbers moved forward and backward, if not every input and output once.
    moved: Option<[usize; 2]>,
}

/// Work of an operation that moves its inputs and outputs once.
fn work(program: Program, shapes: &[&[usize]], flop: usize) -> Work {
    Work { program, shapes: shapes.iter().map(|shape| shape.to_vec()).collect(), flop, moved: None }
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
        ("linear", [128, 4096], 8.0, |n| work(programs::linear(), &[&[n, n], &[n, n]], 2 * n * n * n)),
        ("matmul", [64, 2048], 8.0, |n| {
            work(one(|v| v[0].matmul(&v[1])), &[&[4, n, n], &[4, n, n]], 8 * n * n * n)
        }),
        ("linear_cross_entropy", [16, 16 << 10], 2.0, |n| {
            let (width, vocabulary) = (256, 4096);
            let targets: Vec<u32> = (0..n).map(|i| (i * 7 % vocabulary) as u32).collect();
            let program = one(move |v| v[0].linear_cross_entropy(&v[1], &targets, None));
            work(program, &[&[n, width], &[vocabulary, width]], 2 * n * width * vocabulary)
        }),
        ("attention", [64, 8192], 4.0, |n| {
            let shape: &[usize] = &[1, n, HEADS * HEAD];
            work(programs::attention(HEADS), &[shape; 3], 2 * n * n * HEADS * HEAD)
        }),
        ("gated_delta", [32, 4096], 2.0, gated_delta),
        ("log_linear_delta", [32, 4096], 2.0, log_linear),
        ("anchor_read", [64, 32 << 10], 2.0, anchor_read),
        ("state_read", [64, 1024], 2.0, |n| {
            let states: &[usize] = &[n, HEADS, HEAD, HEAD];
            work(programs::state_read(HEADS), &[&[n, HEADS * HEAD], states], 2 * n * HEADS * HEAD * HEAD)
        }),
        ("rms_norm", ROWS, 2.0, |n| work(one(|v| v[0].rms_norm(&v[1], 1e-6)), &[&[n, WIDTH], &[WIDTH]], 0)),
        ("gated_rms_norm", ROWS, 2.0, |n| {
            let program = one(|v| v[0].gated_rms_norm(&v[2], &v[1], 1e-6));
            work(program, &[&[n, WIDTH], &[WIDTH], &[n, WIDTH]], 0)
        }),
        ("swiglu", ROWS, 2.0, |n| work(one(|v| v[0].swiglu(&v[1])), &[&[n, WIDTH], &[n, WIDTH]], 0)),
        ("short_conv", ROWS, 2.0, |n| work(programs::short_conv(), &[&[1, n, WIDTH], &[WIDTH, 4]], 0)),
        ("rotary", ROWS, 2.0, |n| {
            let rotary = Rotary::new(WIDTH / HEAD, 10_000.0, 0);
            work(one(move |v| v[0].rotary(rotary)), &[&[1, n, WIDTH]], 0)
        }),
        ("embedding", ROWS, 2.0, |n| {
            let rows = 4096;
            let ids: Vec<u32> = (0..n).map(|i| (i * 7 % rows) as u32).collect();
            // Of the table, the forward pass reads the rows of the ids, and the backward pass writes all.
            let moved = Some([2 * n * WIDTH, n * WIDTH + rows * WIDTH]);
            Work { moved, ..work(one(move |v| v[0].embedding(&ids, &[ids.len()])), &[&[rows, WIDTH]], 0) }
        }),
        ("map", ROWS, 2.0, |n| work(one(|v| v[0].silu()), &[&[n, WIDTH]], 0)),
        ("zip", ROWS, 2.0, |n| work(one(|v| v[0].mul(&v[1])), &[&[n, WIDTH], &[n, WIDTH]], 0)),
        ("softmax", ROWS, 2.0, |n| work(one(|v| v[0].softmax()), &[&[n, WIDTH]], 0)),
        ("slice and place", ROWS, 2.0, |n| work(one(|v| v[0].slice(1, 1..WIDTH)), &[&[n, WIDTH]], 0)),
        ("concat", ROWS, 2.0, |n| {
            let program = one(|v| Tensor::concat(&[&v[0], &v[1]], 1));
            work(program, &[&[n, WIDTH / 2], &[n, WIDTH / 2]], 0)
        }),
        ("permute", ROWS, 2.0, |n| work(one(|v| v[0].permute(&[1, 0, 2])), &[&[n, 8, WIDTH / 8]], 0)),
        ("sum", ROWS, 2.0, |n| work(one(|v| v[0].sum(1)), &[&[n, WIDTH]], 0)),
        ("mean", ROWS, 2.0, |n| work(one(|v| v[0].mean(1)), &[&[n, WIDTH]], 0)),
        ("expand", ROWS, 2.0, |n| work(one(|v| v[0].expand(1, 8)), &[&[n, WIDTH / 8]], 0)),
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
    Work { program: programs::gated_delta(options), shapes: delta_shapes(n), flop, moved: None }
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
    let flop = each * TEXTS * HEADS * HEAD * HEAD;
    Work { program: programs::log_linear(options), shapes, flop, moved: None }
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
    work(programs::anchor_read(options), &shapes, 2 * n * ANCHORS * HEADS * (HEAD * HEAD + ROUTING))
}

/// Measures every operation of a device that is a GPU; `progress` gets each speed as soon as it is known.
pub fn speeds(device: &Device, peaks: &Peaks, progress: &mut dyn FnMut(&Speed)) -> Result<Vec<Speed>> {
    let gpu = Gpu::of(device)?;
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
            let (size, seconds) = fastest(gpu, sizes, cost, |size| task(device, make(size), backward))?;
            let Work { flop, moved, program, shapes } = make(size);
            let [forward, more] = match moved {
                Some(moved) => moved,
                None => {
                    let inputs: usize = shapes.iter().map(|shape| count(shape)).sum();
                    let outputs = program(&inputs_of(device, &shapes)?)?;
                    let outputs: usize = outputs.iter().map(Tensor::len).sum();
                    [inputs + outputs, 2 * inputs + outputs]
                }
            };
            let (flop, numbers) = if backward { (3 * flop, forward + more) } else { (flop, forward) };
            add(operation, backward, size, flop, numbers, seconds);
            device.trim();
        }
    }
    let (size, seconds) = fastest(gpu, ROWS, 2.0, |n| adamw(device, n))?;
    // Reads the parameter, its moments and its gradient, and writes all but the gradient.
    add("adamw", false, size, 0, 7 * size * WIDTH, seconds);
    device.trim();
    Ok(list)
}

fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// Tensors of the given shapes. Their numbers repeat: only the time matters.
fn inputs_of(device: &Device, shapes: &[Vec<usize>]) -> Result<Vec<Tensor>> {
    let numbers: Vec<f32> = Random(8).input("", &[4093], 0.5).data.iter().map(|&v| v as f32).collect();
    let tensor = |shape: &Vec<usize>| {
        let data: Vec<f32> = numbers.iter().cycle().take(count(shape)).copied().collect();
        Tensor::from_slice(&data, shape, device)
    };
    shapes.iter().map(tensor).collect()
}

/// An operation on inputs that are on the device already.
fn task<'a>(device: &Device, work: Work, backward: bool) -> Result<Task<'a>> {
    let (inputs, program) = (inputs_of(device, &work.shapes)?, work.program);
    if !backward {
        return Ok(Box::new(move || program(&inputs).map(drop)));
    }
    let gradient = |y: &Tensor| Tensor::full(y.shape(), 0.5, device);
    let gradients = program(&inputs)?.iter().map(gradient).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(move || {
        let tape = Tape::new();
        let inputs: Vec<_> = inputs.iter().enumerate().map(|(i, x)| tape.parameter(i, x)).collect();
        let results = program(&inputs)?;
        let seeds: Vec<_> = results.iter().zip(gradients.iter().cloned()).collect();
        tape.backward_from(&seeds, |_, _| {})
    }))
}

/// A step of AdamW on so many rows of parameters.
fn adamw<'a>(device: &Device, rows: usize) -> Result<Task<'a>> {
    let zeros = || Tensor::full(&[rows, WIDTH], 0.0, device);
    let (mut parameter, mut first_moment, mut second_moment) = (zeros()?, zeros()?, zeros()?);
    let gradient = Tensor::full(&[rows, WIDTH], 0.5, device)?;
    Ok(Box::new(move || {
        let state = AdamW {
            parameter: &mut parameter,
            first_moment: &mut first_moment,
            second_moment: &mut second_moment,
        };
        adamw::update(state, &gradient, &settings(1, 1.0))
    }))
}

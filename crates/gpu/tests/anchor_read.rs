//! anchor_read: device = reference; dense and top-K, with and without null, ragged plans, stored states.

use std::sync::Arc;

use march_engine::ops::anchor_read::{
    AnchorRead, AnchorReadBackward, AnchorReadForward, AnchorReadOptions, ReadPlan, Segment, Storage,
    StoredStates, Visible,
};
use march_engine::{Device, Op, Result, Tensor};
use march_gpu::Gpu;
use march_gpu::sliced::backward_within;

use crate::common::{Input, Random, assert_close, compare, cpu, devices, infer, outcome, tensors, tests};

tests![
    dense_equals_reference,
    top_k_equals_reference,
    long_calls,
    extreme_scores,
    random_shapes,
    slices_add_up,
    wide_top_k_is_dense,
    rows_do_not_depend_on_each_other,
    ties_go_to_the_newer,
    weights_equal_reference,
    a_nan_score_is_not_dropped,
    stored_states,
    codes_equal_the_cpus,
    slots_are_reused,
];

/// The inputs in the order of their fields.
fn inputs_of(v: &[Tensor]) -> AnchorRead<&Tensor> {
    AnchorRead {
        query: &v[0],
        routing_query: &v[1],
        routing_keys: &v[2],
        anchor_states: &v[3],
        null_score: v.get(4),
    }
}

fn read(v: &[Tensor], options: &AnchorReadOptions) -> Result<Vec<Tensor>> {
    Ok(vec![inputs_of(v).anchor_read(options)?])
}

fn check(label: &str, options: &AnchorReadOptions, inputs: &[Input]) {
    compare(label, &|v| read(v, options), inputs);
}

#[derive(Clone, Copy)]
struct Case {
    rows: usize,
    anchors: usize,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    routing_dim: usize,
    null: bool,
    top_k: Option<usize>,
}

const BASE: Case = Case {
    rows: 20,
    anchors: 3,
    key_heads: 1,
    value_heads: 1,
    key_dim: 8,
    value_dim: 8,
    routing_dim: 8,
    null: true,
    top_k: None,
};

fn program(c: Case, plan: ReadPlan, random: &mut Random) -> (AnchorReadOptions, Vec<Input>) {
    let mut inputs = vec![
        random.input("query", &[c.rows, c.key_heads * c.key_dim], 1.0),
        random.input("routing_query", &[c.rows, c.value_heads * c.routing_dim], 1.0),
        random.input("routing_keys", &[c.anchors, c.value_heads * c.routing_dim], 0.7),
        random.input("anchor_states", &[c.anchors, c.value_heads, c.key_dim, c.value_dim], 1.0),
    ];
    if c.null {
        inputs.push(random.input("null_score", &[c.rows, c.value_heads], 1.0));
    }
    let options = AnchorReadOptions {
        key_heads: c.key_heads,
        value_heads: c.value_heads,
        top_k: c.top_k,
        routing_scale: 0.9,
        plan: Arc::new(plan),
    };
    (options, inputs)
}

fn run(start: usize, len: usize, visible: std::ops::Range<usize>) -> Segment {
    Segment { start, len, visible: Visible::Run(visible) }
}

fn list(start: usize, len: usize, visible: &[usize]) -> Segment {
    Segment { start, len, visible: Visible::List(visible.to_vec()) }
}

/// Plans with their rows and anchors: nothing at all, periodic, two batch rows, arbitrary subsets, many anchors.
fn plans() -> Vec<(usize, usize, ReadPlan)> {
    let every = |tokens: usize, c: usize| -> Vec<usize> { (1..=tokens / c).map(|m| m * c).collect() };
    vec![
        (0, 0, ReadPlan::default()),
        (3, 0, ReadPlan { segments: vec![run(1, 2, 0..0)] }),
        (1, 1, ReadPlan { segments: vec![run(0, 1, 0..1)] }),
        (5, 2, ReadPlan { segments: vec![run(1, 2, 0..0), run(4, 1, 1..2)] }),
        (20, 6, ReadPlan::from_boundaries(20, &[every(20, 3)])),
        (80, 14, ReadPlan::from_boundaries(40, &[every(40, 5), vec![1, 2, 3, 30, 33, 39]])),
        (
            30,
            7,
            ReadPlan { segments: vec![list(2, 3, &[0, 2, 5]), list(5, 1, &[]), list(8, 20, &[1, 5, 6])] },
        ),
        (
            70,
            37,
            ReadPlan {
                segments: vec![run(0, 41, 0..37), list(41, 29, &(0..37).step_by(2).collect::<Vec<_>>())],
            },
        ),
    ]
}

/// key heads, value heads, d_k, d_v, d_r: one tile, several, and sizes that no tile divides.
const SHAPES: [(usize, usize, usize, usize, usize); 4] =
    [(1, 1, 8, 8, 8), (2, 4, 12, 24, 5), (1, 2, 3, 70, 17), (1, 1, 67, 33, 66)];

/// Compares plan × shape, each pair with one choice of `top_k` and null.
fn compare_all(seed: u64, top_k: [Option<usize>; 2]) {
    let mut random = Random(seed);
    for (i, (rows, anchors, plan)) in plans().into_iter().enumerate() {
        for (j, &(key_heads, value_heads, key_dim, value_dim, routing_dim)) in SHAPES.iter().enumerate() {
            // The largest plans with half of the shapes: software devices are slow.
            if rows >= 70 && (i + j) % 2 == 0 {
                continue;
            }
            let (null, top_k) = ((i + j / 2) % 2 == 0, top_k[(i / 2 + j) % 2]);
            let case =
                Case { rows, anchors, key_heads, value_heads, key_dim, value_dim, routing_dim, null, top_k };
            let (options, inputs) = program(case, plan.clone(), &mut random);
            check(&format!("plan {i}, shape {j}, null {null}, top_k {top_k:?}"), &options, &inputs);
        }
    }
}

fn dense_equals_reference() {
    compare_all(21, [None, None]);
}

fn top_k_equals_reference() {
    compare_all(22, [Some(1), Some(4)]);
}

/// More tokens and anchors than any tile or chunk holds; and a K larger than a chunk.
fn long_calls() {
    let mut random = Random(23);
    let plan = ReadPlan::from_boundaries(70, &[(1..=35).map(|m| m * 2).collect(), vec![2, 60]]);
    for top_k in [None, Some(3), Some(20)] {
        let case = Case { rows: 140, anchors: 37, value_heads: 2, top_k, ..BASE };
        let (options, inputs) = program(case, plan.clone(), &mut random);
        check(&format!("long, top_k {top_k:?}"), &options, &inputs);
    }
}

/// Scores so large that all weight is on one anchor or on the null, and states of very different sizes.
fn extreme_scores() {
    let mut random = Random(24);
    for (top_k, null) in [(None, true), (None, false), (Some(2), true)] {
        let case = Case { rows: 19, anchors: 21, value_heads: 2, null, top_k, ..BASE };
        let plan = ReadPlan { segments: vec![run(0, 18, 0..21), run(18, 1, 3..4)] };
        let (options, mut inputs) = program(case, plan, &mut random);
        inputs[1].data.iter_mut().for_each(|v| *v *= 64.0);
        inputs[2].data.iter_mut().for_each(|v| *v = (*v * 4.0).round());
        inputs[1].data.iter_mut().for_each(|v| *v = v.round());
        inputs[0].data[..8].fill(0.0);
        if null {
            inputs[4].data[7] = 1e4;
            inputs[4].data[8] = -1e4;
        }
        check(&format!("extreme, top_k {top_k:?}, null {null}"), &options, &inputs);
    }
}

fn random_shapes() {
    let mut random = Random(25);
    for i in 0..20 {
        let (rows, anchors) = (random.between(1, 60), random.between(0, 30));
        let mut segments = Vec::new();
        let mut start = 0;
        while start < rows {
            let len = random.between(0, 25).min(rows - start);
            let from = random.between(0, anchors);
            segments.push(match random.between(0, 2) {
                0 => {
                    list(start, len, &(0..anchors).filter(|_| random.between(0, 1) == 0).collect::<Vec<_>>())
                }
                _ => run(start, len, from..random.between(from, anchors)),
            });
            start += len + random.between(0, 3);
        }
        let (key_heads, group) = (random.between(1, 2), random.between(1, 3));
        let case = Case {
            rows,
            anchors,
            key_heads,
            value_heads: key_heads * group,
            key_dim: random.between(1, 20),
            value_dim: random.between(1, 40),
            routing_dim: random.between(1, 20),
            null: random.between(0, 1) == 0,
            top_k: [None, Some(random.between(1, 6))][random.between(0, 1)],
        };
        let (options, inputs) = program(case, ReadPlan { segments }, &mut random);
        check(&format!("random shape {i}"), &options, &inputs);
    }
}

/// Gradients do not depend on how many slices the backward pass takes.
fn slices_add_up() {
    let plan = ReadPlan::from_boundaries(50, &[(1..10).map(|m| m * 5).collect()]);
    let case = Case { rows: 50, anchors: 9, value_heads: 2, key_dim: 4, value_dim: 5, ..BASE };
    let (options, inputs) = program(case, plan, &mut Random(34));
    for device in devices() {
        let t = tensors(&inputs, device);
        let input = inputs_of(&t).map(Tensor::clone);
        let forward = AnchorReadForward { input: input.clone(), options: options.clone(), keep: true };
        let (readout, kept) = forward.run().unwrap();
        let gradient = Random(35).input("gradient", readout.shape(), 1.0).on(device);
        let all = |bytes: Option<usize>| -> Vec<f32> {
            let op = AnchorReadBackward {
                input: input.clone(),
                options: options.clone(),
                readout: readout.clone(),
                kept: kept.clone(),
                gradient: gradient.clone(),
            };
            let sizes = op.check().unwrap();
            let gpu = device.backend::<Gpu>().unwrap();
            let d = match bytes {
                Some(bytes) => backward_within(gpu, op, sizes, bytes).unwrap(),
                None => op.run().unwrap(),
            };
            let parts = [&d.query, &d.routing_query, &d.routing_keys, &d.anchor_states];
            parts.into_iter().flat_map(Tensor::to_f32).collect()
        };
        let whole = all(None);
        for bytes in [0, 2000] {
            for (a, b) in all(Some(bytes)).iter().zip(&whole) {
                assert!((a - b).abs() < 1e-5, "{device}, {bytes} bytes: {a} and {b}");
            }
        }
    }
}

/// The readout without anything kept for a backward pass.
fn readout(device: &Device, options: &AnchorReadOptions, inputs: &[Input]) -> Vec<f64> {
    infer(device, &|v| read(v, options), inputs).unwrap().remove(0).1
}

/// The routing weights, which need no states.
fn weights_of(device: &Device, options: &AnchorReadOptions, inputs: &[Input]) -> Vec<f64> {
    let t = tensors(inputs, device);
    let dims = |states: &Tensor| [states.shape()[2], states.shape()[3]];
    inputs_of(&t).map_with(|x| x, dims).routing_weights(options).unwrap().to_f64()
}

/// The inputs of one token, and options with a plan of its own.
fn alone(
    options: &AnchorReadOptions,
    inputs: &[Input],
    row: usize,
    visible: std::ops::Range<usize>,
) -> (AnchorReadOptions, Vec<Input>) {
    let mut alone = inputs.to_vec();
    for i in [0, 1, 4].into_iter().filter(|&i| i < inputs.len()) {
        let width = inputs[i].shape[1];
        alone[i].shape[0] = 1;
        alone[i].data = inputs[i].data[row * width..(row + 1) * width].to_vec();
    }
    let plan = Arc::new(ReadPlan { segments: vec![run(0, 1, visible)] });
    (AnchorReadOptions { plan, ..options.clone() }, alone)
}

/// K at least the number of visible anchors is dense, bit for bit, forward and backward; also for those tokens of a
/// call that see no more than K.
fn wide_top_k_is_dense() {
    let mut random = Random(26);
    let plan = ReadPlan::from_boundaries(100, &[(1..=19).map(|m| m * 5).collect()]);
    let case = Case { rows: 100, anchors: 19, ..BASE };
    let (mut options, inputs) = program(case, plan, &mut random);
    for device in devices() {
        options.top_k = None;
        let dense = outcome(device, &|v| read(v, &options), &inputs).unwrap();
        for k in [19, 50] {
            options.top_k = Some(k);
            let wide = outcome(device, &|v| read(v, &options), &inputs).unwrap();
            assert!(wide.outputs[0].1 == dense.outputs[0].1);
            assert!(wide.gradients == dense.gradients);
        }
        options.top_k = Some(17);
        let mixed = readout(device, &options, &inputs);
        assert!(mixed[..8 * 90] == dense.outputs[0].1[..8 * 90], "{device}");
        assert!(mixed[8 * 90..] != dense.outputs[0].1[8 * 90..], "{device}");
    }
}

/// A token's readout has the same bits alone and among others.
fn rows_do_not_depend_on_each_other() {
    let mut random = Random(27);
    for top_k in [None, Some(3), Some(20)] {
        let case = Case { rows: 40, anchors: 50, value_dim: 32, key_dim: 12, value_heads: 2, top_k, ..BASE };
        let plan = ReadPlan { segments: vec![run(0, 40, 0..50)] };
        let (options, inputs) = program(case, plan, &mut random);
        for device in devices() {
            let whole = readout(device, &options, &inputs);
            for row in [0, 27, 39] {
                let (options, alone) = alone(&options, &inputs, row, 0..50);
                let found = readout(device, &options, &alone);
                assert!(found == whole[row * 64..(row + 1) * 64], "row {row}, top_k {top_k:?} {device}");
                let found = outcome(device, &|v| read(v, &options), &alone).unwrap().outputs.remove(0).1;
                assert!(found == whole[row * 64..(row + 1) * 64], "row {row}, top_k {top_k:?} {device}");
            }
        }
    }
}

/// Equal scores go to the newer anchors.
fn ties_go_to_the_newer() {
    let mut random = Random(28);
    let case = Case { rows: 20, anchors: 40, top_k: Some(2), ..BASE };
    let plan = ReadPlan { segments: vec![run(0, 20, 0..40)] };
    let (options, mut inputs) = program(case, plan, &mut random);
    let one = inputs[2].data[..8].to_vec();
    inputs[2].data.chunks_exact_mut(8).for_each(|key| key.copy_from_slice(&one));
    for device in devices() {
        let (fast, slow) =
            (weights_of(device, &options, &inputs), weights_of(&Device::reference(), &options, &inputs));
        assert_close("weights", &fast, &slow, 1e-5);
        for row in fast.chunks_exact(40) {
            assert!(row[..38].iter().all(|&w| w == 0.0) && row[38] > 0.0 && row[38] == row[39]);
        }
    }
}

/// The weights are the reference's; one token and several take different kernels.
fn weights_equal_reference() {
    let mut random = Random(29);
    for (top_k, null) in [(None, false), (Some(3), false), (None, true), (Some(3), true)] {
        for rows in [5, 60] {
            let plan = ReadPlan::from_boundaries(rows, &[(1..=rows).step_by(2).collect()]);
            let anchors = rows.div_ceil(2);
            let case = Case { rows, anchors, value_heads: 2, null, top_k, ..BASE };
            let (options, inputs) = program(case, plan, &mut random);
            let want = weights_of(&Device::reference(), &options, &inputs);
            for device in devices() {
                assert_close("weights", &weights_of(device, &options, &inputs), &want, 1e-5);
            }
        }
    }
}

/// A NaN score makes a token's weights and readout NaN, whichever anchor has it; other heads stay.
fn a_nan_score_is_not_dropped() {
    let mut random = Random(30);
    let cases = [None, Some(1), Some(3)].into_iter().flat_map(|k| [(k, true), (k, false)]);
    for ((top_k, null), rows) in cases.flat_map(|case| [(case, 1), (case, 2), (case, 9)]) {
        let case = Case { rows, anchors: 45, value_heads: 2, null, top_k, ..BASE };
        let plan = ReadPlan { segments: vec![run(0, rows, 0..45)] };
        let (options, inputs) = program(case, plan, &mut random);
        for device in devices() {
            let clean = readout(device, &options, &inputs);
            for anchor in [0, 15, 31, 44] {
                let mut inputs = inputs.clone();
                inputs[2].data[anchor * 16 + 3] = f64::NAN;
                let what = format!("{rows} tokens, top_k {top_k:?}, null {null}, anchor {anchor}, {device}");
                for (found, clean) in readout(device, &options, &inputs).chunks(16).zip(clean.chunks(16)) {
                    assert!(found[..8].iter().all(|v| v.is_nan()), "{what}");
                    assert!(found[8..] == clean[8..], "{what}");
                }
                assert!(weights_of(device, &options, &inputs)[anchor].is_nan(), "{what}");
            }
        }
    }
}

/// The readout of states stored in blocks that end at `cuts`, each block in the next of `storage`.
fn stored(
    device: &Device,
    options: &AnchorReadOptions,
    inputs: &[Input],
    storage: &[Storage],
    cuts: &[usize],
) -> Vec<f64> {
    let t = tensors(inputs, device);
    let block = |(i, cut): (usize, &[usize])| {
        t[3].slice(0, cut[0]..cut[1]).unwrap().store(storage[i % storage.len()]).unwrap()
    };
    let blocks = Arc::new(cuts.windows(2).enumerate().map(block).collect::<Vec<_>>());
    inputs_of(&t).map_with(|x| x, |_| &blocks).anchor_read_stored(options).unwrap().to_f64()
}

/// Stored states: f32 has the bits of the tensor; bf16 and int8 equal the reference on the same stored numbers.
fn stored_states() {
    let mut random = Random(31);
    for (value_dim, top_k) in [(32, None), (21, None), (21, Some(2)), (70, Some(2))] {
        let plan = ReadPlan::from_boundaries(60, &[(1..=5).map(|m| m * 11).collect()]);
        let case = Case { rows: 60, anchors: 5, value_heads: 2, key_dim: 11, value_dim, top_k, ..BASE };
        let (options, inputs) = program(case, plan, &mut random);
        for device in devices() {
            let whole = readout(device, &options, &inputs);
            for storage in [
                &[Storage::F32][..],
                &[Storage::Bf16],
                &[Storage::Int8],
                &[Storage::Int8, Storage::F32, Storage::Bf16],
            ] {
                // In two blocks, of two anchors and of three, and one by one.
                for cuts in [&[0, 2, 5][..], &[0, 1, 2, 3, 4, 5]] {
                    let what = format!("stored as {storage:?}, d_v {value_dim}, {top_k:?}, {device}");
                    let found = stored(device, &options, &inputs, storage, cuts);
                    let want = stored(&Device::reference(), &options, &inputs, storage, cuts);
                    assert_close(&what, &found, &want, 1e-5);
                    if storage == [Storage::F32] {
                        assert!(found == whole, "{what}");
                    }
                    let (options, alone) = alone(&options, &inputs, 59, 0..5);
                    let one = stored(device, &options, &alone, storage, cuts);
                    assert!(one[..] == found[59 * one.len()..], "{what}");
                }
            }
        }
    }
}

/// Codes and scales are those of the CPU, and pass through host memory unchanged.
fn codes_equal_the_cpus() {
    let mut random = Random(32);
    let cpu = cpu(1);
    for (shape, scale) in [
        ([1, 1, 1, 1], 1.0),
        ([3, 2, 5, 7], 1.0),
        ([2, 1, 16, 32], 1e-30),
        ([1, 3, 4, 9], 1e30),
        ([0, 2, 4, 4], 1.0),
    ] {
        let mut states = random.input("states", &shape, scale);
        let size = states.data.len();
        // Ties of int8 and bf16, zeros, infinity, NaN, a row of zeros.
        if size > 100 {
            let special = [127.0, 0.5, 1.5, -2.5, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -0.0];
            states.data[..7].copy_from_slice(&special);
            states.data[30] = f64::NAN;
            states.data[50] = f64::INFINITY;
            states.data[70..100].fill(0.0);
        }
        for storage in [Storage::F32, Storage::Bf16, Storage::Int8] {
            let bytes = |states: &StoredStates| -> Vec<Vec<u8>> {
                states.parts().unwrap().iter().map(|part| part.to_vec()).collect()
            };
            let want = states.on(&cpu).store(storage).unwrap().stored().unwrap();
            for device in devices() {
                let found = states.on(device).store(storage).unwrap();
                assert_eq!((found.bytes(), found.dtype()), (want.bytes(), storage.into()));
                let host = found.stored().unwrap();
                let what = format!("{shape:?} × {scale} as {storage} on {device}");
                assert_eq!(bytes(&host), bytes(&want), "{what}");
                assert_eq!(host.checksums(), want.checksums(), "{what}");
                let back = Tensor::from_stored((*want).clone(), device).unwrap();
                assert_eq!(bytes(&back.stored().unwrap()), bytes(&want), "{what}");
            }
        }
    }
}

/// Slots of dropped states are reused, and the states that remain keep their contents while their buffer grows.
fn slots_are_reused() {
    let mut random = Random(33);
    for device in devices() {
        let mut kept = Vec::new();
        for i in 0..40 {
            let states = random.input("states", &[1 + i % 3, 1, 6, 10], 1.0);
            let stored = states.on(device).store(Storage::F32).unwrap();
            kept.push((states, stored));
            if i % 3 == 2 {
                kept.remove(i / 3);
            }
        }
        for (states, stored) in &kept {
            let host = stored.stored().unwrap().to_f32().unwrap();
            assert!(host.iter().map(|&v| f64::from(v)).eq(states.data.iter().copied()), "{device}");
        }
    }
}

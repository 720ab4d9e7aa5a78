//! anchor_read: CPU = reference = finite differences; dense and top-K, with and without null, ragged plans.

use std::sync::Arc;

use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions, ReadPlan, Segment, Storage, Visible};
use march_engine::{Device, Error, Result, Tensor};

use crate::common::{Input, Random, assert_close, compare, cpu, cpus, finite_differences, outcome, tensors};

fn inputs_of(v: &[Tensor]) -> AnchorRead<&Tensor> {
    AnchorRead {
        query: &v[0],
        routing_query: &v[1],
        routing_keys: &v[2],
        anchor_states: &v[3],
        null_score: v.get(4),
    }
}

fn read(options: &AnchorReadOptions) -> impl Fn(&[Tensor]) -> Result<Vec<Tensor>> {
    move |v| Ok(vec![inputs_of(v).anchor_read(options)?])
}

/// The readout, as it is when gradients are wanted.
fn readout(device: &Device, options: &AnchorReadOptions, inputs: &[Input]) -> Vec<f64> {
    outcome(device, &read(options), inputs).unwrap().outputs.remove(0).1
}

/// The routing weights, which need no states.
fn weights_of(device: &Device, options: &AnchorReadOptions, inputs: &[Input]) -> Vec<f64> {
    let v = tensors(inputs, device);
    let AnchorRead { query, routing_query, routing_keys, anchor_states, null_score } = inputs_of(&v);
    let &[_, _, key_dim, value_dim] = anchor_states.shape() else { panic!("four dimensions") };
    let anchor_states = [key_dim, value_dim];
    let input = AnchorRead { query, routing_query, routing_keys, anchor_states, null_score };
    input.routing_weights(options).unwrap().to_f64()
}

/// Token `row` alone, which sees the first anchors.
fn alone(options: &AnchorReadOptions, inputs: &[Input], row: usize) -> (AnchorReadOptions, Vec<Input>) {
    let mut inputs = inputs.to_vec();
    for i in [0, 1, 4] {
        let width = inputs[i].shape[1];
        inputs[i].shape[0] = 1;
        inputs[i].data = inputs[i].data[row * width..(row + 1) * width].to_vec();
    }
    let plan = Arc::new(ReadPlan { segments: vec![run(0, 1, 0..inputs[2].shape[0])] });
    (AnchorReadOptions { plan, ..options.clone() }, inputs)
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
    let many = every(300, 3);
    vec![
        (0, 0, ReadPlan::default()),
        (1, 1, ReadPlan { segments: vec![run(0, 1, 0..1)] }),
        (5, 2, ReadPlan { segments: vec![run(1, 2, 0..0), run(4, 1, 1..2)] }),
        (20, 6, ReadPlan::from_boundaries(20, &[every(20, 3)])),
        (80, 14, ReadPlan::from_boundaries(40, &[every(40, 5), vec![1, 2, 3, 30, 33, 39]])),
        (
            30,
            7,
            ReadPlan { segments: vec![list(2, 3, &[0, 2, 5]), list(5, 1, &[]), list(8, 20, &[1, 5, 6])] },
        ),
        (300, many.len(), ReadPlan::from_boundaries(300, &[many])),
        (
            260,
            70,
            ReadPlan {
                segments: vec![run(0, 150, 0..70), list(150, 110, &(0..70).step_by(2).collect::<Vec<_>>())],
            },
        ),
    ]
}

#[test]
fn cpu_equals_reference() {
    let mut random = Random(21);
    let shapes = [(1, 1, 8, 8, 8), (2, 4, 12, 24, 5), (1, 2, 3, 5, 17), (2, 2, 16, 32, 8)];
    for (i, (rows, anchors, plan)) in plans().into_iter().enumerate() {
        for (j, &(key_heads, value_heads, key_dim, value_dim, routing_dim)) in shapes.iter().enumerate() {
            // The largest plans with the first shapes only: the references are slow.
            if rows > 100 && j > 1 {
                continue;
            }
            for top_k in [None, Some(1), Some(4)] {
                for null in [true, false] {
                    let case = Case {
                        rows,
                        anchors,
                        key_heads,
                        value_heads,
                        key_dim,
                        value_dim,
                        routing_dim,
                        null,
                        top_k,
                    };
                    let (options, inputs) = program(case, plan.clone(), &mut random);
                    let label = format!("plan {i}, shape {j}, top_k {top_k:?}, null {null}");
                    compare(&label, &read(&options), &inputs);
                }
            }
        }
    }
}

#[test]
fn reference_equals_finite_differences() {
    let mut random = Random(22);
    for (top_k, null) in [(None, true), (None, false), (Some(2), true), (Some(2), false)] {
        let case = Case {
            rows: 9,
            anchors: 4,
            value_heads: 2,
            key_dim: 3,
            value_dim: 4,
            routing_dim: 3,
            null,
            top_k,
            ..BASE
        };
        let plan = ReadPlan::from_boundaries(9, &[vec![2, 4, 5, 8]]);
        let (options, inputs) = program(case, plan, &mut random);
        finite_differences("anchor_read", &read(&options), &inputs, 6);
    }
}

/// K at least the number of visible anchors is dense, bit for bit, forward and backward.
#[test]
fn wide_top_k_is_dense() {
    let cpu = cpu(0);
    let plan = ReadPlan::from_boundaries(100, &[(1..=9).map(|m| m * 10).collect()]);
    let (mut options, inputs) = program(Case { rows: 100, anchors: 9, ..BASE }, plan, &mut Random(23));
    let dense = outcome(&cpu, &read(&options), &inputs).unwrap();
    for k in [9, 50] {
        options.top_k = Some(k);
        assert!(outcome(&cpu, &read(&options), &inputs).unwrap() == dense);
    }
}

/// Equal scores go to the newer anchors.
#[test]
fn ties_go_to_the_newer() {
    let case = Case { rows: 20, anchors: 6, top_k: Some(2), ..BASE };
    let plan = ReadPlan { segments: vec![run(0, 20, 0..6)] };
    let (options, mut inputs) = program(case, plan, &mut Random(24));
    let one = inputs[2].data[..8].to_vec();
    inputs[2].data.chunks_exact_mut(8).for_each(|key| key.copy_from_slice(&one));
    let [fast, slow] = [cpu(0), Device::reference()].map(|device| weights_of(&device, &options, &inputs));
    assert_close("weights", &fast, &slow, 1e-5);
    for row in fast.chunks_exact(6) {
        assert!(row[..4].iter().all(|&w| w == 0.0) && row[4] > 0.0 && row[4] == row[5]);
    }
}

/// The weight of the null of one token and head, from the scores: e^null / (e^null + Σ e^score over what is read).
fn null_weight(scale: f64, inputs: &[Input], c: &Case, row: usize, head: usize, seen: usize) -> f64 {
    let width = c.value_heads * c.routing_dim;
    let of = |input: &Input, row: usize, i: usize| input.data[row * width + head * c.routing_dim + i];
    let score = |m: usize| -> f64 {
        let dot: f64 = (0..c.routing_dim).map(|i| of(&inputs[1], row, i) * of(&inputs[2], m, i)).sum();
        scale * dot
    };
    let mut scores: Vec<f64> = (0..seen).map(score).collect();
    scores.sort_by(|a, b| b.total_cmp(a));
    scores.truncate(c.top_k.unwrap_or(seen));
    let null = inputs[4].data[row * c.value_heads + head].exp();
    null / (null + scores.iter().map(|score| score.exp()).sum::<f64>())
}

/// Without a null, the weights sum to 1 where a token sees an anchor. With a null, they and the null's own weight do.
/// Where nothing is visible, all weights are 0. The CPU's weights are the reference's.
#[test]
fn weights_add_up() {
    let mut random = Random(25);
    for (top_k, null) in [(None, false), (Some(3), false), (None, true), (Some(3), true)] {
        let plan = ReadPlan::from_boundaries(150, &[(1..=15).map(|m| m * 10).collect()]);
        let case = Case { rows: 150, anchors: 15, value_heads: 2, null, top_k, ..BASE };
        let (options, inputs) = program(case, plan, &mut random);
        let want = weights_of(&Device::reference(), &options, &inputs);
        let found = weights_of(&cpu(0), &options, &inputs);
        assert_close("weights", &found, &want, 1e-5);
        for (weights, limit) in [(want, 1e-12), (found, 2e-6)] {
            for (i, weights) in weights.chunks_exact(15).enumerate() {
                let (row, head) = (i / 2, i % 2);
                let seen = row / 10;
                let mut sum: f64 = weights.iter().sum();
                if seen == 0 {
                    assert_eq!(sum, 0.0, "row {row}");
                    continue;
                }
                let read_count = weights.iter().filter(|&&weight| weight > 0.0).count();
                assert_eq!(read_count, seen.min(top_k.unwrap_or(seen)));
                if null {
                    sum += null_weight(options.routing_scale, &inputs, &case, row, head, seen);
                }
                assert!((sum - 1.0).abs() < limit, "top_k {top_k:?}, null {null}, row {row}: {sum}");
            }
        }
    }
}

/// The readout of states that are stored in blocks, which end at `cuts`.
fn stored(
    device: &Device,
    options: &AnchorReadOptions,
    inputs: &[Input],
    storage: Storage,
    cuts: &[usize],
) -> Vec<f64> {
    let t = tensors(inputs, device);
    let block = |cut: &[usize]| t[3].slice(0, cut[0]..cut[1]).unwrap().store(storage).unwrap();
    let blocks: Arc<Vec<Tensor>> = Arc::new(cuts.windows(2).map(block).collect());
    let AnchorRead { query, routing_query, routing_keys, null_score, .. } = inputs_of(&t);
    let input = AnchorRead { query, routing_query, routing_keys, anchor_states: &blocks, null_score };
    input.anchor_read_stored(options).unwrap().to_f64()
}

/// Stored states: f32 has the bits of the tensor; bf16 and int8 equal the reference on the same stored numbers.
#[test]
fn stored_states() {
    let mut random = Random(26);
    for (value_dim, top_k) in [(32, None), (20, None), (20, Some(2)), (80, None), (80, Some(2))] {
        let plan = ReadPlan::from_boundaries(60, &[(1..=5).map(|m| m * 11).collect()]);
        let case = Case { rows: 60, anchors: 5, value_heads: 2, key_dim: 12, value_dim, top_k, ..BASE };
        let (options, inputs) = program(case, plan, &mut random);
        let cpu = cpu(0);
        let whole = readout(&cpu, &options, &inputs);
        for storage in [Storage::F32, Storage::Bf16, Storage::Int8] {
            // In two blocks, of two anchors and of three, and one by one.
            for cuts in [&[0, 2, 5][..], &[0, 1, 2, 3, 4, 5]] {
                let found = stored(&cpu, &options, &inputs, storage, cuts);
                let want = stored(&Device::reference(), &options, &inputs, storage, cuts);
                assert_close("stored", &found, &want, 1e-5);
                if storage == Storage::F32 {
                    assert!(found == whole);
                } else {
                    assert_close("stored against whole", &found, &whole, 2e-2);
                }
                // The last token, alone.
                let (options, inputs) = alone(&options, &inputs, 59);
                let one = stored(&cpu, &options, &inputs, storage, cuts);
                assert!(one[..] == found[59 * one.len()..], "{value_dim} {top_k:?} {storage}");
            }
        }
    }
}

/// Stored states go to host memory and back, with the same numbers on any device.
#[test]
fn stored_states_on_the_host() {
    let plan = ReadPlan { segments: vec![run(0, 20, 0..3)] };
    let (options, inputs) = program(BASE, plan, &mut Random(30));
    for (storage, bytes) in [(Storage::F32, 256), (Storage::Bf16, 128)] {
        for (device, other) in [(cpu(1), cpu(2)), (Device::reference(), Device::reference())] {
            let read = |device, states: Tensor| {
                let t = tensors(&inputs, device);
                let AnchorRead { query, routing_query, routing_keys, null_score, .. } = inputs_of(&t);
                let states = Arc::new(vec![states]);
                let anchor_states = &states;
                let input = AnchorRead { query, routing_query, routing_keys, anchor_states, null_score };
                input.anchor_read_stored(&options).unwrap().to_f64()
            };
            let states = inputs[3].on(&device).store(storage).unwrap();
            assert_eq!((states.shape(), states.bytes()), (&inputs[3].shape[..], 3 * bytes));
            assert!(!states.is_plain());
            let host = Arc::unwrap_or_clone(states.stored().unwrap());
            let again = Tensor::from_stored(host, &other).unwrap();
            assert_eq!((again.shape(), again.bytes()), (states.shape(), states.bytes()));
            assert!(read(&other, again) == read(&device, states), "{storage}");
        }
    }
}

/// A token's readout has the same bits alone and among others.
#[test]
fn rows_do_not_depend_on_each_other() {
    let mut random = Random(27);
    let cpu = cpu(0);
    for top_k in [None, Some(3)] {
        let case = Case { rows: 200, anchors: 80, value_dim: 32, key_dim: 12, top_k, ..BASE };
        let plan = ReadPlan { segments: vec![run(0, 200, 0..80)] };
        let (options, inputs) = program(case, plan, &mut random);
        let whole = readout(&cpu, &options, &inputs);
        for row in [0, 77, 199] {
            let (options, inputs) = alone(&options, &inputs, row);
            let found = readout(&cpu, &options, &inputs);
            assert!(found == whole[row * 32..(row + 1) * 32], "row {row}, top_k {top_k:?}");
        }
    }
}

/// A NaN score makes a token's weights and readout NaN, whichever anchor has it; other heads stay. One token and
/// several tokens take different code paths.
#[test]
fn a_nan_score_is_not_dropped() {
    let mut random = Random(29);
    let cpus = cpus();
    let cases = [None, Some(1), Some(3)].into_iter().flat_map(|k| [(k, true), (k, false)]);
    for ((top_k, null), rows) in cases.flat_map(|case| [(case, 1), (case, 2), (case, 9)]) {
        let case = Case { rows, anchors: 45, value_heads: 2, null, top_k, ..BASE };
        let plan = ReadPlan { segments: vec![run(0, rows, 0..45)] };
        let (options, inputs) = program(case, plan, &mut random);
        for cpu in &cpus {
            let clean = readout(cpu, &options, &inputs);
            for anchor in (0..45).step_by(if rows == 1 { 1 } else { 4 }) {
                let mut inputs = inputs.clone();
                inputs[2].data[anchor * 16 + 3] = f64::NAN;
                let found = readout(cpu, &options, &inputs);
                let what = format!("{rows} tokens, top_k {top_k:?}, null {null}, anchor {anchor}");
                for (found, clean) in found.chunks(16).zip(clean.chunks(16)) {
                    assert!(found[..8].iter().all(|v| v.is_nan()), "{what}");
                    assert!(found[8..] == clean[8..], "{what}");
                }
                assert!(weights_of(cpu, &options, &inputs)[anchor].is_nan(), "{what}");
            }
        }
    }
}

#[test]
fn bad_calls_are_errors() {
    let cpu = cpu(0);
    let plan = ReadPlan { segments: vec![run(4, 16, 0..3)] };
    let (options, inputs) = program(BASE, plan, &mut Random(28));
    for i in 0..inputs.len() {
        for axis in 0..inputs[i].shape.len() {
            if (i, axis) == (3, 3) {
                continue; // d_v is what the states say
            }
            let mut bad = inputs.clone();
            bad[i].shape[axis] += 1;
            bad[i].data = vec![0.0; bad[i].shape.iter().product()];
            let error = outcome(&cpu, &read(&options), &bad);
            assert!(matches!(error, Err(Error::Shape { .. })), "{} axis {axis}", bad[i].name);
        }
    }
    let refused = |options| matches!(outcome(&cpu, &read(&options), &inputs), Err(Error::Value { .. }));
    for segments in [
        vec![run(0, 21, 0..3)],
        vec![run(4, 2, 0..4)],
        vec![run(4, 2, 0..1), run(5, 2, 0..1)],
        vec![list(0, 1, &[1, 0])],
        vec![list(0, 1, &[3])],
        vec![run(usize::MAX, 2, 0..1)],
    ] {
        assert!(refused(AnchorReadOptions { plan: Arc::new(ReadPlan { segments }), ..options.clone() }));
    }
    assert!(refused(AnchorReadOptions { top_k: Some(0), ..options }));
}

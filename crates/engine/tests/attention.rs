//! rotary and attention: CPU = reference = finite differences, on odd sizes; prefill in pieces; decoding.

use march_engine::ops::attention::{Attention, AttentionBackward, AttentionForward, BLOCK_TOKENS, KeyValues};
use march_engine::ops::rotary::Rotary;
use march_engine::{Device, Error, Op, Result, Tensor};

use crate::common::{
    self, Input, Random, assert_close, compare, cpu, cpus, finite_differences, invariant, outcome, tensors,
};

fn attend(heads: usize) -> impl Fn(&[Tensor]) -> Result<Vec<Tensor>> {
    move |v| Ok(vec![Attention { query: &v[0], key: &v[1], value: &v[2] }.attention(heads)?])
}

#[test]
fn rotary() {
    let mut random = Random(11);
    for (batch, tokens, heads, head, offset) in
        [(1, 1, 1, 2, 0), (2, 0, 1, 8, 3), (2, 150, 3, 12, 0), (1, 70, 2, 64, 61), (3, 5, 1, 6, 1_000_000)]
    {
        let inputs = [random.input("x", &[batch, tokens, heads * head], 1.0)];
        let rotary = |v: &[Tensor]| Ok(vec![v[0].rotary(Rotary::new(heads, 500_000.0, offset))?]);
        compare(&format!("rotary {batch}×{tokens}×{heads}×{head} from {offset}"), &rotary, &inputs);
        finite_differences("rotary", &rotary, &inputs, 6);
    }
}

#[test]
fn rotary_bits_depend_on_the_position_alone() {
    let x = Random(12).input("x", &[1, 200, 24], 1.0).on(&cpu(2));
    let at = |from: usize, to: usize| {
        let rotary = Rotary::new(2, 10_000.0, 7 + from);
        x.slice(1, from..to).unwrap().rotary(rotary).unwrap().to_f32()
    };
    let pieces: Vec<f32> =
        [(0, 1), (1, 60), (60, 130), (130, 200)].iter().flat_map(|&(a, b)| at(a, b)).collect();
    assert!(pieces == at(0, 200));
}

struct Case {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    dk: usize,
    dv: usize,
}

fn inputs(random: &mut Random, c: &Case, scale: f64) -> Vec<Input> {
    vec![
        random.input("query", &[c.batch, c.queries, c.heads * c.dk], scale),
        random.input("key", &[c.batch, c.keys, c.heads * c.dk], scale),
        random.input("value", &[c.batch, c.keys, c.heads * c.dv], 1.0),
    ]
}

#[test]
fn attention() {
    let mut random = Random(13);
    for (batch, queries, keys, heads, dk, dv) in [
        (2, 0, 0, 2, 4, 4),
        (2, 0, 5, 2, 4, 4),
        (2, 5, 5, 2, 3, 5),
        (1, 7, 20, 3, 12, 12),
        (2, 150, 150, 2, 12, 20),
        (1, 1, 150, 2, 64, 64),
        (1, 129, 300, 2, 64, 32),
        (1, 530, 530, 1, 64, 64),
        (1, 3, 600, 1, 16, 16),
    ] {
        let case = Case { batch, queries, keys, heads, dk, dv };
        // Scores of usual size, and scores so large that most weights vanish.
        for scale in [1.0, 4.0] {
            let inputs = inputs(&mut random, &case, scale);
            let label = format!("attention {batch}×{queries}/{keys}×{heads}×{dk}/{dv}, scale {scale}");
            compare(&label, &attend(heads), &inputs);
            if queries * keys < 1000 {
                finite_differences(&label, &attend(heads), &inputs, 6);
            }
        }
    }
}

/// One token sees itself alone: the output is its value, and nothing depends on query and key. (Their gradient
/// is 0, to which `compare` could not relate an error.)
#[test]
fn one_token() {
    let inputs =
        inputs(&mut Random(16), &Case { batch: 2, queries: 1, keys: 1, heads: 3, dk: 3, dv: 5 }, 1.0);
    for cpu in cpus() {
        let found = outcome(&cpu, &attend(3), &inputs).unwrap();
        assert_close("output", &found.outputs[0].1, &inputs[2].data, 1e-6);
        let [Some(dq), Some(dk), Some(dv)] = &found.gradients[..] else { panic!("a gradient is missing") };
        assert!(dq.iter().chain(dk).all(|g| g.abs() < 2e-6), "{dq:?} {dk:?}");
        assert_close("gradient of value", dv, &common::cotangent(0, &inputs[2].on(&cpu)).data, 1e-6);
    }
}

#[test]
fn pieces_and_single_tokens_equal_the_whole() {
    let mut random = Random(14);
    pieces(&mut random, &Case { batch: 2, queries: 450, keys: 450, heads: 2, dk: 24, dv: 40 });
    pieces(&mut random, &Case { batch: 1, queries: 300, keys: 300, heads: 3, dk: 64, dv: 64 });
    pieces(&mut random, &Case { batch: 1, queries: 140, keys: 140, heads: 1, dk: 7, dv: 96 });
}

fn pieces(random: &mut Random, case: &Case) {
    let all = tensors(&inputs(random, case, 1.5), &invariant(2));
    // With what a backward pass needs, as in training.
    let input = Attention { query: all[0].clone(), key: all[1].clone(), value: all[2].clone() };
    let (whole, _) = AttentionForward { input, options: case.heads.into(), keep: true }.run().unwrap();
    let whole = whole.to_f32();
    // The outputs of each batch entry, from calls with the queries between two cuts and the keys up to the second.
    let run = |cuts: &[usize]| {
        let mut found = Vec::new();
        for b in 0..case.batch {
            let part = |x: &Tensor, from, to| x.slice(0, b..b + 1).unwrap().slice(1, from..to).unwrap();
            for cut in cuts.windows(2) {
                let (query, key, value) =
                    (part(&all[0], cut[0], cut[1]), part(&all[1], 0, cut[1]), part(&all[2], 0, cut[1]));
                let input = Attention { query: &query, key: &key, value: &value };
                found.extend(input.attention(case.heads).unwrap().to_f32());
            }
        }
        found
    };
    let last = case.queries;
    let bounds = [0, 1, 50, 129, 130, last - 2, last - 1, last];
    assert!(run(&bounds) == whole, "pieces differ from the whole");
    let each: Vec<usize> = (0..=last).collect();
    assert!(run(&each) == whole, "decoding differs from the whole");
}

/// A cache in blocks gives the bits of keys and values in one piece, for one query and for several.
#[test]
fn blocks_equal_the_whole() {
    for keys in [1, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 37] {
        let case = Case { batch: 1, queries: keys, keys, heads: 2, dk: 12, dv: 20 };
        let inputs = inputs(&mut Random(18), &case, 1.5);
        for device in [Device::reference(), cpu(2), invariant(1)] {
            let [all, key, value] = &tensors(&inputs, &device)[..] else { unreachable!() };
            let block = |from: usize, to: usize| {
                let [key, value] = [key, value].map(|x| x.slice(1, from..to.min(keys)).unwrap());
                KeyValues { key, value }
            };
            let starts = (0..keys).step_by(BLOCK_TOKENS);
            let mut blocks: Vec<_> = starts.map(|from| block(from, from + BLOCK_TOKENS)).collect();
            for queries in [1, 5].into_iter().filter(|&queries| queries <= keys) {
                let query = &all.slice(1, keys - queries..keys).unwrap();
                let whole = Attention { query, key, value }.attention(2).unwrap();
                let found = query.attention_blocks(&blocks, 2).unwrap();
                assert!(found.to_f64() == whole.to_f64(), "{queries} queries, {keys} keys on {device}");
            }
            // Only the last block may be short.
            blocks.insert(0, block(0, 1));
            names(all.slice(1, 0..1).unwrap().attention_blocks(&blocks, 2), "key");
        }
    }
}

#[test]
fn gradients_have_the_same_bits_on_any_thread_count() {
    let mut random = Random(15);
    let case = Case { batch: 1, queries: 1100, keys: 1200, heads: 1, dk: 16, dv: 8 };
    let all = inputs(&mut random, &case, 1.0);
    let run = |threads| outcome(&cpu(threads), &attend(1), &all).unwrap();
    let one = run(1);
    assert!(one == run(2) && one == run(3));
}

/// Buffers of a whole step, inputs included: twice the tokens, about twice the bytes.
#[test]
fn memory_grows_linearly() {
    let bytes = |tokens: usize| {
        let cpu = cpu(2);
        let case = Case { batch: 1, queries: tokens, keys: tokens, heads: 2, dk: 16, dv: 16 };
        outcome(&cpu, &attend(2), &inputs(&mut Random(17), &case, 1.0)).unwrap();
        cpu.free_bytes() as f64
    };
    let (short, long) = (bytes(512), bytes(1024));
    assert!(long <= 2.2 * short, "{short} bytes at 512 tokens, {long} at 1024");
}

fn names<T>(result: Result<T>, argument: &str) {
    match result {
        Err(Error::Shape { argument: found, .. }) => assert_eq!(found, argument),
        Err(Error::Value { message, .. }) => assert!(message.contains(argument), "{message}"),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("accepted a bad {argument}"),
    }
}

fn refused(device: &Device) {
    let tensor = |shape: &[usize]| Tensor::full(shape, 1.0, device).unwrap();
    let attend = |q: &[usize], k: &[usize], v: &[usize], heads: usize| {
        let input = Attention { query: tensor(q), key: tensor(k), value: tensor(v) };
        AttentionForward { input, options: heads.into(), keep: true }.run()
    };
    assert!(attend(&[1, 2, 6], &[1, 3, 6], &[1, 3, 9], 3).is_ok());
    names(attend(&[2, 6], &[1, 3, 6], &[1, 3, 9], 3), "query");
    names(attend(&[1, 2, 7], &[1, 3, 7], &[1, 3, 9], 3), "query");
    names(attend(&[1, 2, 6], &[1, 3, 6], &[1, 3, 9], 0), "heads");
    names(attend(&[1, 4, 6], &[1, 3, 6], &[1, 3, 9], 3), "key");
    names(attend(&[1, 2, 6], &[2, 3, 6], &[2, 3, 9], 3), "key");
    names(attend(&[1, 2, 6], &[1, 3, 9], &[1, 3, 9], 3), "key");
    names(attend(&[1, 2, 6], &[1, 3, 6], &[1, 2, 9], 3), "value");
    names(attend(&[1, 2, 6], &[1, 3, 6], &[1, 3, 10], 3), "value");
    let q = [1, 2, 6];
    let (_, kept) = attend(&q, &q, &q, 3).unwrap();
    names(backward(device, kept, &[1, 2, 3]), "gradient");

    let turn =
        |shape: &[usize], heads, theta, offset| tensor(shape).rotary(Rotary::new(heads, theta, offset));
    names(turn(&[2, 6], 1, 1e4, 0), "x");
    names(turn(&[1, 2, 6], 2, 1e4, 0), "x");
    names(turn(&[1, 2, 6], 0, 1e4, 0), "x");
    names(turn(&[1, 2, 6], 1, -1.0, 0), "theta");
    names(turn(&[1, 2, 6], 1, 1e4, usize::MAX), "offset");
}

fn backward(device: &Device, kept: Vec<Tensor>, gradient: &[usize]) -> Result<Attention<Tensor>> {
    let q = Tensor::full(&[1, 2, 6], 1.0, device)?;
    let input = Attention { query: q.clone(), key: q.clone(), value: q };
    AttentionBackward { input, options: 3.into(), kept, gradient: Tensor::full(gradient, 1.0, device)? }.run()
}

#[test]
fn bad_calls_are_refused() {
    refused(&Device::reference());
    let cpu = invariant(2);
    refused(&cpu);
    let q = Tensor::full(&[1, 2, 6], 1.0, &cpu).unwrap();
    names(backward(&cpu, vec![], &[1, 2, 6]), "what the forward pass kept");
    names(backward(&cpu, vec![q.clone(), q], &[1, 2, 6]), "what the forward pass kept");
}

//! attention: device = reference on sizes that no tile divides, large scores, random shapes; a query alone, in pieces
//! and over the blocks of a cache has the same bits as in one call.

use march_engine::ops::attention::{Attention, BLOCK_TOKENS, KeyValues};
use march_engine::{Result, Tensor};

use crate::common::{Input, Random, assert_close, compare, cotangent, devices, outcome, tensors, tests};

tests![
    device_equals_reference,
    scores_at_the_ends,
    wide_heads,
    random_shapes,
    one_token,
    pieces_and_blocks_equal_the_whole,
    many_blocks,
    heads_that_are_too_wide_are_refused,
];

fn attention(v: &[Tensor], heads: usize) -> Result<Vec<Tensor>> {
    Ok(vec![Attention { query: &v[0], key: &v[1], value: &v[2] }.attention(heads)?])
}

#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    dk: usize,
    dv: usize,
}

fn case([batch, queries, keys, heads, dk, dv]: [usize; 6]) -> Case {
    Case { batch, queries, keys, heads, dk, dv }
}

fn inputs(random: &mut Random, c: &Case, scale: f64) -> Vec<Input> {
    vec![
        random.input("query", &[c.batch, c.queries, c.heads * c.dk], scale),
        random.input("key", &[c.batch, c.keys, c.heads * c.dk], scale),
        random.input("value", &[c.batch, c.keys, c.heads * c.dv], 1.0),
    ]
}

fn check(random: &mut Random, case: &Case, scale: f64) {
    let inputs = inputs(random, case, scale);
    compare(&format!("{case:?}, scale {scale}"), &|v| attention(v, case.heads), &inputs);
}

fn device_equals_reference() {
    let mut random = Random(13);
    for sizes in [
        [2, 0, 0, 2, 4, 4],
        [2, 0, 5, 2, 4, 4],
        [2, 5, 5, 2, 3, 5],
        [1, 7, 20, 3, 12, 12],
        [2, 97, 97, 2, 12, 20],
        [1, 1, 150, 2, 64, 64],
        [1, 65, 131, 1, 64, 32],
        [1, 131, 193, 2, 16, 8],
    ] {
        check(&mut random, &case(sizes), 1.0);
    }
}

/// Scores so large that most weights vanish, and scores that are all alike.
fn scores_at_the_ends() {
    let mut random = Random(14);
    for scale in [0.0, 4.0] {
        check(&mut random, &case([1, 70, 140, 2, 16, 12]), scale);
        check(&mut random, &case([2, 3, 140, 1, 16, 24]), scale);
    }
}

/// The widest heads, in both sizes of tile.
fn wide_heads() {
    let mut random = Random(15);
    check(&mut random, &case([1, 66, 70, 1, 128, 128]), 1.0);
    check(&mut random, &case([1, 40, 70, 1, 200, 256]), 0.5);
    check(&mut random, &case([1, 2, 70, 1, 256, 130]), 0.5);
}

fn random_shapes() {
    let mut random = Random(16);
    for _ in 0..16 {
        let keys = random.between(1, 150);
        let case = Case {
            batch: random.between(1, 2),
            queries: random.between(1, keys),
            keys,
            heads: random.between(1, 3),
            dk: random.between(1, 40),
            dv: random.between(1, 40),
        };
        if case.keys == 1 {
            continue; // the gradients of query and key are 0; `one_token` checks them
        }
        let scale = [0.3, 1.0, 2.0][random.between(0, 2)];
        check(&mut random, &case, scale);
    }
}

/// One token sees itself alone: the output is its value, and nothing depends on query and key.
fn one_token() {
    let inputs = inputs(&mut Random(17), &case([2, 1, 1, 3, 3, 5]), 1.0);
    for device in devices() {
        let found = outcome(device, &|v| attention(v, 3), &inputs).unwrap();
        assert_close("output", &found.outputs[0].1, &inputs[2].data, 1e-6);
        let [Some(dq), Some(dk), Some(dv)] = &found.gradients[..] else { panic!("a gradient is missing") };
        assert!(dq.iter().chain(dk).all(|g| g.abs() < 2e-6), "{dq:?} {dk:?}");
        assert_close("gradient of value", dv, &cotangent(0, &inputs[2].on(device)).data, 1e-6);
    }
}

/// Tokens `from..to` of batch entry `b`.
fn part(x: &Tensor, from: usize, to: usize, b: usize) -> Tensor {
    x.slice(0, b..b + 1).unwrap().slice(1, from..to).unwrap()
}

/// The outputs of queries `from..to` of batch entry `b`, with the keys up to `to`, in one tensor and in blocks.
fn piece(all: &[Tensor], heads: usize, from: usize, to: usize, b: usize) -> [Vec<f32>; 2] {
    let query = part(&all[0], from, to, b);
    let (key, value) = (part(&all[1], 0, to, b), part(&all[2], 0, to, b));
    let whole = Attention { query: &query, key: &key, value: &value }.attention(heads).unwrap();
    let block = |start: usize| {
        let end = to.min(start + BLOCK_TOKENS);
        KeyValues { key: part(&all[1], start, end, b), value: part(&all[2], start, end, b) }
    };
    let blocks: Vec<KeyValues<Tensor>> = (0..to).step_by(BLOCK_TOKENS).map(block).collect();
    [whole, query.attention_blocks(&blocks, heads).unwrap()].map(|y| y.to_f32())
}

/// `samples` single queries, and pieces, of a whole call.
fn pieces(seed: u64, case: &Case, bounds: &[usize], samples: usize) {
    let mut random = Random(seed);
    let all = inputs(&mut random, case, 1.5);
    let width = case.heads * case.dv;
    for device in devices() {
        let all = tensors(&all, device);
        let whole = attention(&all, case.heads).unwrap().remove(0).to_f32();
        let mut ranges: Vec<_> = bounds.windows(2).map(|pair| (pair[0], pair[1])).collect();
        for _ in 0..samples {
            let t = random.between(0, case.queries - 1);
            ranges.push((t, t + 1));
        }
        for (from, to) in ranges {
            for b in 0..case.batch {
                let want = &whole[(b * case.queries + from) * width..(b * case.queries + to) * width];
                let [one, blocks] = piece(&all, case.heads, from, to, b);
                assert!(one == want, "{case:?} on {device}: queries {from}..{to} differ from the whole");
                assert!(blocks == want, "{case:?} on {device}: queries {from}..{to} over blocks differ");
            }
        }
    }
}

fn pieces_and_blocks_equal_the_whole() {
    pieces(18, &case([2, 300, 300, 2, 24, 40]), &[0, 1, 50, 129, 130, 140, 298, 299, 300], 8);
    pieces(19, &case([1, 140, 140, 1, 7, 96]), &[0, 63, 64, 65, 140], 4);
}

/// More blocks than one dispatch reads: the state is carried from dispatch to dispatch.
fn many_blocks() {
    let tokens = 6 * BLOCK_TOKENS + 37;
    let case = case([1, tokens, tokens, 1, 8, 8]);
    let bounds = [BLOCK_TOKENS - 20, BLOCK_TOKENS + 20, 4 * BLOCK_TOKENS - 1, 4 * BLOCK_TOKENS + 1, tokens];
    let mut random = Random(20);
    let all = inputs(&mut random, &case, 1.5);
    for device in devices() {
        let all = tensors(&all, device);
        for pair in bounds.windows(2) {
            // The last queries only, so that the test stays short.
            let from = pair[0].max(pair[1].saturating_sub(70));
            let [one, blocks] = piece(&all, 1, from, pair[1], 0);
            assert!(one == blocks, "queries {from}..{} over blocks differ on {device}", pair[1]);
        }
        for t in [BLOCK_TOKENS, 4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS + 1, tokens] {
            let [one, blocks] = piece(&all, 1, t - 1, t, 0);
            assert!(one == blocks, "query {} over blocks differs on {device}", t - 1);
        }
    }
}

fn heads_that_are_too_wide_are_refused() {
    for device in devices() {
        let x = Tensor::full(&[1, 2, 300], 1.0, device).unwrap();
        let error = attention(&[x.clone(), x.clone(), x], 1).unwrap_err();
        assert!(error.to_string().contains("256"), "{error}");
    }
}

//! rotary and attention: fast = reference = finite differences, on odd sizes; prefill in pieces; decoding.

use march_engine::ops::attention::Attention;
use march_engine::ops::rotary::Rotary;
use march_engine::{Cpu, CpuOptions, Engine, Error, Products, Reference, Result, Tape, Var};

use crate::common::{self, Input, Program, Random, assert_close, compare, finite_differences};

struct RotaryProgram(Rotary);
impl Program for RotaryProgram {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.rotary(&v[0], self.0)?])
    }
}

struct AttentionProgram(usize);
impl Program for AttentionProgram {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.attention(Attention { query: &v[0], key: &v[1], value: &v[2] }, self.0)?])
    }
}

#[test]
fn rotary() {
    let mut random = Random(11);
    for (batch, tokens, heads, head, offset) in
        [(1, 1, 1, 2, 0), (2, 0, 1, 8, 3), (2, 150, 3, 12, 0), (1, 70, 2, 64, 61), (3, 5, 1, 6, 1_000_000)]
    {
        let inputs = [random.input("x", &[batch, tokens, heads * head], 1.0)];
        let program = RotaryProgram(Rotary { heads, theta: 500_000.0, offset });
        compare(&format!("rotary {batch}×{tokens}×{heads}×{head} from {offset}"), &program, &inputs);
        finite_differences("rotary", &program, &inputs, 6);
    }
}

#[test]
fn rotary_bits_depend_on_the_position_alone() {
    let mut random = Random(12);
    let cpu = Cpu::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
    let x = random.input("x", &[1, 200, 24], 1.0);
    let at = |from: usize, to: usize| {
        let part = cpu.from_f64(&x.data[from * 24..to * 24], &[1, to - from, 24]).unwrap();
        cpu.to_f32(&cpu.rotary(&part, Rotary { heads: 2, theta: 10_000.0, offset: 7 + from }).unwrap())
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
            compare(&label, &AttentionProgram(heads), &inputs);
            if queries * keys < 1000 {
                finite_differences(&label, &AttentionProgram(heads), &inputs, 6);
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
    for cpu in common::fast_engines() {
        let found = common::outcome(&cpu, &AttentionProgram(3), &inputs).unwrap();
        assert_close("output", &found.outputs[0].1, &inputs[2].data, 1e-6);
        let [Some(dq), Some(dk), Some(dv)] = &found.gradients[..] else { panic!("a gradient is missing") };
        assert!(dq.iter().chain(dk).all(|g| g.abs() < 2e-6), "{dq:?} {dk:?}");
        assert_close("gradient of value", dv, &common::cotangent(0, &[2, 1, 15]), 1e-6);
    }
}

fn invariant() -> Cpu {
    Cpu::new(CpuOptions { threads: 2, portable: false, products: Products::BatchInvariant }).unwrap()
}

/// The outputs of queries `from..to` when the keys up to `to` are there, for all batch entries in turn.
fn piece(cpu: &Cpu, all: &[Input], heads: usize, from: usize, to: usize) -> Vec<Vec<f32>> {
    let part = |x: &Input, from: usize, to: usize, b: usize| {
        let (tokens, width) = (x.shape[1], x.shape[2]);
        let data = &x.data[(b * tokens + from) * width..(b * tokens + to) * width];
        cpu.from_f64(data, &[1, to - from, width]).unwrap()
    };
    (0..all[0].shape[0])
        .map(|b| {
            let (query, key, value) =
                (part(&all[0], from, to, b), part(&all[1], 0, to, b), part(&all[2], 0, to, b));
            let input = Attention { query: &query, key: &key, value: &value };
            cpu.to_f32(&cpu.attention(input, heads, false).unwrap().0)
        })
        .collect()
}

#[test]
fn pieces_and_single_tokens_equal_the_whole() {
    let mut random = Random(14);
    pieces(&mut random, &Case { batch: 2, queries: 450, keys: 450, heads: 2, dk: 24, dv: 40 });
    pieces(&mut random, &Case { batch: 1, queries: 300, keys: 300, heads: 3, dk: 64, dv: 64 });
    pieces(&mut random, &Case { batch: 1, queries: 140, keys: 140, heads: 1, dk: 7, dv: 96 });
}

fn pieces(random: &mut Random, case: &Case) {
    let all = inputs(random, case, 1.5);
    let cpu = invariant();
    let tensors: Vec<_> = all.iter().map(|x| cpu.from_f64(&x.data, &x.shape).unwrap()).collect();
    let input = Attention { query: &tensors[0], key: &tensors[1], value: &tensors[2] };
    let whole = cpu.to_f32(&cpu.attention(input, case.heads, true).unwrap().0);
    let last = case.queries;
    let bounds = [0, 1, 50, 129, 130, last - 2, last - 1, last];
    let mut found = vec![Vec::new(); case.batch];
    for pair in bounds.windows(2) {
        for (all, part) in found.iter_mut().zip(piece(&cpu, &all, case.heads, pair[0], pair[1])) {
            all.extend(part);
        }
    }
    assert!(found.concat() == whole, "pieces differ from the whole");
    let mut decoded = vec![Vec::new(); case.batch];
    for t in 0..case.queries {
        for (all, part) in decoded.iter_mut().zip(piece(&cpu, &all, case.heads, t, t + 1)) {
            all.extend(part);
        }
    }
    assert!(decoded.concat() == whole, "decoding differs from the whole");
}

#[test]
fn gradients_have_the_same_bits_on_any_thread_count() {
    let mut random = Random(15);
    let case = Case { batch: 1, queries: 1100, keys: 1200, heads: 1, dk: 16, dv: 8 };
    let all = inputs(&mut random, &case, 1.0);
    let run = |threads: usize| {
        let cpu = Cpu::new(CpuOptions { threads, ..CpuOptions::default() }).unwrap();
        let found = common::outcome(&cpu, &AttentionProgram(1), &all).unwrap();
        (found.outputs, found.gradients)
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3));
}

/// Buffers of a whole step, inputs included: twice the tokens, about twice the bytes.
#[test]
fn memory_grows_linearly() {
    let bytes = |tokens: usize| {
        let cpu = Cpu::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
        let case = Case { batch: 1, queries: tokens, keys: tokens, heads: 2, dk: 16, dv: 16 };
        common::outcome(&cpu, &AttentionProgram(2), &inputs(&mut Random(17), &case, 1.0)).unwrap();
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

fn refused<E: Engine>(engine: &E) {
    let tensor = |shape: &[usize]| engine.full(shape, 1.0).unwrap();
    let attend = |q: &[usize], k: &[usize], v: &[usize], heads: usize| {
        let (query, key, value) = (tensor(q), tensor(k), tensor(v));
        engine.attention(Attention { query: &query, key: &key, value: &value }, heads, true)
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
    let q = tensor(&[1, 2, 6]);
    let input = Attention { query: &q, key: &q, value: &q };
    let (_, saved) = engine.attention(input, 3, true).unwrap();
    names(engine.attention_backward(input, 3, &saved, &tensor(&[1, 2, 3])), "gradient");

    let turn = |shape: &[usize], heads, theta, offset| {
        engine.rotary(&tensor(shape), Rotary { heads, theta, offset })
    };
    names(turn(&[2, 6], 1, 1e4, 0), "x");
    names(turn(&[1, 2, 6], 2, 1e4, 0), "x");
    names(turn(&[1, 2, 6], 0, 1e4, 0), "x");
    names(turn(&[1, 2, 6], 1, -1.0, 0), "theta");
    names(turn(&[1, 2, 6], 1, 1e4, usize::MAX), "offset");
}

#[test]
fn bad_calls_are_refused() {
    refused(&Reference);
    let cpu = invariant();
    refused(&cpu);
    let q = cpu.full(&[1, 2, 6], 1.0).unwrap();
    let input = Attention { query: &q, key: &q, value: &q };
    names(cpu.attention_backward(input, 3, &[], &q), "saved");
    names(cpu.attention_backward(input, 3, &[q.clone(), q.clone()], &q), "saved sums");
}

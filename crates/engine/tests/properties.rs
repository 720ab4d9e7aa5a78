//! Random shapes and settings: CPU = reference for every fused operation; regions that run again change no
//! bit, nor does the number of threads. The cases are the same in every run: the seed is fixed.
//!
//! Proptest draws shapes and settings, which it can shrink; the numbers come from a seed that it draws too.
//! Sizes are such that no result is a single number that may cancel, to which no error could be related.

use std::ops::RangeInclusive;
use std::sync::Arc;

use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions, ReadPlan, Segment, Visible};
use march_engine::ops::attention::Attention;
use march_engine::ops::cross_entropy::IGNORE;
use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaOptions};
use march_engine::ops::log_linear::{LogLinear, LogLinearOptions};
use march_engine::ops::rotary::Rotary;
use march_engine::ops::state_read::StateRead;
use march_engine::{Result, Tensor, tape};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::common::{Input, Program, Random, compare, cpu, outcome};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(20),
        failure_persistence: None,
        max_shrink_iters: 100,
        ..ProptestConfig::default()
    }
}

/// The inputs in the order of their fields, optional ones last.
fn delta_of(v: &[Tensor]) -> GatedDelta<&Tensor> {
    let [query, key, value, retention_input, write_input, a_log, dt_bias] = std::array::from_fn(|i| &v[i]);
    let initial_state = v.get(7);
    GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, initial_state }
}

fn levels_of(v: &[Tensor]) -> LogLinear<&Tensor> {
    let GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, .. } = delta_of(v);
    let (level_input, level_scale) = (&v[7], &v[8]);
    LogLinear { query, key, value, retention_input, write_input, a_log, dt_bias, level_input, level_scale }
}

fn read_of(v: &[Tensor]) -> AnchorRead<&Tensor> {
    let [query, routing_query, routing_keys, anchor_states] = std::array::from_fn(|i| &v[i]);
    AnchorRead { query, routing_query, routing_keys, anchor_states, null_score: v.get(4) }
}

/// A small block: norm, projections, convolutions, the gated delta rule with its anchors, gated norm, SwiGLU.
/// All widths are heads·d, so that it also runs without projections.
#[derive(Clone)]
struct Block {
    delta: GatedDeltaOptions,
    read: AnchorReadOptions,
    linear: bool,
}

impl Block {
    fn run(&self, v: &[Tensor]) -> Result<Vec<Tensor>> {
        let project =
            |x: &Tensor, weight: usize| if self.linear { x.linear(&v[weight]) } else { Ok(x.clone()) };
        let conv = |x: &Tensor, weight: usize| -> Result<_> { Ok(x.short_conv(&v[weight], None)?.0) };
        let normal = v[0].rms_norm(&v[1], 1e-6)?;
        let query = conv(&project(&normal, 12)?, 2)?;
        let (key, value) = (conv(&project(&normal, 13)?, 3)?, conv(&project(&normal, 14)?, 4)?);
        let inputs = [&[query.clone(), key, value][..], &v[5..9]].concat();
        let out = delta_of(&inputs).gated_delta(&self.delta)?;
        let history = [query, project(&normal, 12)?, v[9].clone(), out.boundary_states, v[10].clone()];
        let both = out.readout.add(&read_of(&history).anchor_read(&self.read)?)?;
        let mixed = both.gated_rms_norm(&project(&normal, 14)?, &v[11], 1e-6)?;
        let x = v[0].add(&project(&mixed, 13)?)?;
        let normal = x.rms_norm(&v[1], 1e-6)?;
        let wide = project(&normal, 12)?.swiglu(&project(&normal, 13)?)?;
        Ok(vec![x.add(&wide)?])
    }
}

/// Outputs and gradients as bits.
fn on(threads: usize, program: Program<'_>, inputs: &[Input]) -> Vec<Vec<u64>> {
    let found = outcome(&cpu(threads), program, inputs).unwrap();
    let outputs = found.outputs.into_iter().map(|(_, data)| data);
    let all = outputs.chain(found.gradients.into_iter().map(Option::unwrap_or_default));
    all.map(|data| data.iter().map(|v| v.to_bits()).collect()).collect()
}

/// CPU = reference; and one thread = two, bit for bit.
fn agree(label: &str, program: Program<'_>, inputs: &[Input]) {
    compare(label, program, inputs);
    assert!(on(1, program, inputs) == on(2, program, inputs), "{label}: threads change bits");
}

/// Key heads, value heads for each of them, d_k and d_v.
fn heads(dim: usize) -> impl Strategy<Value = [usize; 4]> {
    (1..=2usize, 1..=3usize, 2..=dim, 3..=dim).prop_map(|(key, group, dk, dv)| [key, key * group, dk, dv])
}

/// Often 0 or 1.
fn count(range: RangeInclusive<usize>) -> impl Strategy<Value = usize> {
    prop_oneof![1 => 0..=1usize, 6 => range]
}

/// The inputs that the gated delta rule and its log-linear kind share, up to `dt_bias`. With `extreme`, gates
/// of every kind are mixed: log α ordinary, −80 or 0; β ordinary, 0 or 1 (doubled with negative eigenvalues).
fn delta_inputs(
    random: &mut Random,
    batch: usize,
    tokens: usize,
    heads: [usize; 4],
    extreme: bool,
) -> Vec<Input> {
    let [hk, hv, dk, dv] = heads;
    let mut inputs = vec![
        random.input("query", &[batch, tokens, hk * dk], 1.0),
        random.input("key", &[batch, tokens, hk * dk], 1.0),
        random.input("value", &[batch, tokens, hv * dv], 1.0),
        random.input("retention_input", &[batch, tokens, hv], 1.0),
        random.input("write_input", &[batch, tokens, hv], 1.0),
        random.input("a_log", &[hv], 0.5),
        random.input("dt_bias", &[hv], 1.0),
    ];
    inputs[6].data.iter_mut().for_each(|v| *v -= 2.0);
    for i in 0..batch * tokens * hv {
        let kind = if extreme { random.between(0, 8) } else { 8 };
        let (a_log, dt_bias) = (inputs[5].data[i % hv], inputs[6].data[i % hv]);
        match kind % 3 {
            0 => inputs[3].data[i] = f64::from((80.0 * (-a_log).exp() - dt_bias) as f32),
            1 => inputs[3].data[i] = -200.0,
            _ => {}
        }
        match kind / 3 {
            0 => inputs[4].data[i] = -200.0,
            1 => inputs[4].data[i] = 200.0,
            _ => {}
        }
    }
    inputs
}

fn delta_options([hk, hv]: [usize; 2], neg: bool, boundaries: Arc<Vec<Vec<usize>>>) -> GatedDeltaOptions {
    GatedDeltaOptions {
        key_heads: hk,
        value_heads: hv,
        allow_neg_eigval: neg,
        boundaries,
        final_state: true,
        chunk_offset: 0,
    }
}

fn delta(options: &GatedDeltaOptions) -> impl Fn(&[Tensor]) -> Result<Vec<Tensor>> {
    move |v| {
        let out = delta_of(v).gated_delta(options)?;
        Ok(vec![out.readout, out.final_state, out.boundary_states])
    }
}

/// Each of `1..=tokens` with the given probability.
fn boundaries(random: &mut Random, batch: usize, tokens: usize, share: f64) -> Vec<Vec<usize>> {
    (0..batch).map(|_| (1..=tokens).filter(|_| random.unit() < share).collect()).collect()
}

/// Segments with gaps between them, each with a run or a list of anchors, either maybe empty.
fn plan(random: &mut Random, rows: usize, anchors: usize) -> ReadPlan {
    let mut segments = Vec::new();
    let mut start = random.between(0, 3);
    while start < rows {
        let len = random.between(1, 20).min(rows - start);
        let visible = if random.unit() < 0.5 {
            let from = random.between(0, anchors);
            Visible::Run(from..random.between(from, anchors))
        } else {
            Visible::List((0..anchors).filter(|_| random.unit() < 0.5).collect())
        };
        segments.push(Segment { start, len, visible });
        start += len + [0, 0, 2][random.between(0, 2)];
    }
    ReadPlan { segments }
}

proptest! {
    #![proptest_config(config(20))]

    #[test]
    fn linear(rows in prop_oneof![1 => Just(0usize), 6 => 8..=70usize], inner in 1..=70usize,
              outer in 1..=50usize, bias: bool, seed: u64) {
        let mut random = Random(seed);
        let weight = random.input("weight", &[outer, inner], 1.0);
        let mut inputs = vec![random.input("x", &[rows, inner], 1.0), weight];
        if bias {
            inputs.push(random.input("bias", &[outer], 1.0));
        }
        // A large product may depend on the number of threads.
        compare("linear", &|v| Ok(vec![match v {
            [x, weight, bias] => x.linear_bias(weight, bias)?,
            _ => v[0].linear(&v[1])?,
        }]), &inputs);
    }

    #[test]
    fn norms(rows in count(2..=200), heads in 1..=3usize, width in 1..=70usize, seed: u64) {
        let mut random = Random(seed);
        let shape = [rows, heads * width];
        let x = random.input("x", &shape, 1.0);
        let (gate, weight) = (random.input("gate", &shape, 2.0), random.input("weight", &[width], 1.0));
        agree("rms_norm", &|v| Ok(vec![v[0].rms_norm(&v[1], 1e-6)?]), &[x.clone(), weight.clone()]);
        let gated = |v: &[Tensor]| Ok(vec![v[0].gated_rms_norm(&v[1], &v[2], 1e-6)?]);
        agree("gated_rms_norm", &gated, &[x, gate, weight]);
    }

    #[test]
    fn swiglu(rows in count(2..=200), width in 1..=150usize, scale in 0.1..20.0, seed: u64) {
        let mut random = Random(seed);
        let shape = [rows, width];
        let inputs = [random.input("gate", &shape, scale), random.input("up", &shape, 1.0)];
        agree("swiglu", &|v| Ok(vec![v[0].swiglu(&v[1])?]), &inputs);
    }

    #[test]
    fn short_conv(batch in 1..=3usize, tokens in count(2..=150), width in 3..=70usize,
                  kernel in prop_oneof![Just(4usize), 1..=7usize], tail: bool, seed: u64) {
        let mut random = Random(seed);
        let weight = random.input("weight", &[width, kernel], 1.0);
        let mut inputs = vec![random.input("x", &[batch, tokens, width], 1.0), weight];
        if tail {
            inputs.push(random.input("tail", &[batch, kernel - 1, width], 1.0));
        }
        agree("short_conv", &|v| v[0].short_conv(&v[1], v.get(2)).map(|(y, tail)| vec![y, tail]), &inputs);
    }

    #[test]
    fn state_read(rows in count(2..=60), heads in heads(30), seed: u64) {
        let mut random = Random(seed);
        let [hk, hv, dk, dv] = heads;
        let states = random.input("states", &[rows, hv, dk, dv], 1.0);
        let inputs = [random.input("query", &[rows, hk * dk], 1.0), states];
        agree("state_read", &|v| Ok(vec![StateRead { query: &v[0], states: &v[1] }.state_read(hk)?]), &inputs);
    }

    #[test]
    fn attention(batch in 1..=2usize, queries in count(2..=70), before in count(2..=70), heads in 1..=3usize,
                 half in 1..=12usize, dv in 3..=24usize, seed: u64) {
        let mut random = Random(seed);
        let (keys, dk) = (before + queries, 2 * half);
        let inputs = [
            random.input("query", &[batch, queries, heads * dk], 1.0),
            random.input("key", &[batch, keys, heads * dk], 1.0),
            random.input("value", &[batch, keys, heads * dv], 1.0),
        ];
        let rotary = Rotary::new(heads, 10_000.0, 5);
        let attend = |v: &[Tensor]| {
            let query = v[0].rotary(Rotary { offset: 5 + before, ..rotary })?;
            let key = v[1].rotary(rotary)?;
            Ok(vec![Attention { query: &query, key: &key, value: &v[2] }.attention(heads)?])
        };
        agree("rotary and attention", &attend, &inputs);
    }

    /// Logits of about one, so that no loss is a small difference of large numbers.
    #[test]
    fn linear_cross_entropy(rows in count(2..=80), width in 1..=60usize, vocabulary in 2..=90usize,
                            ignored in 0.0..1.0, normaliser in prop::option::of(1.0..50.0), seed: u64) {
        let mut random = Random(seed);
        let scale = 1.0 / (width as f64).sqrt();
        let weight = random.input("weight", &[vocabulary, width], scale);
        let inputs = [random.input("x", &[rows, width], 1.0), weight];
        let mut target = || match random.unit() < ignored {
            true => IGNORE,
            false => random.between(0, vocabulary - 1) as u32,
        };
        let targets: Vec<u32> = (0..rows).map(|_| target()).collect();
        let loss = |v: &[Tensor]| Ok(vec![v[0].linear_cross_entropy(&v[1], &targets, normaliser)?]);
        compare("linear_cross_entropy", &loss, &inputs);
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn gated_delta(batch in 1..=2usize, tokens in count(2..=90), heads in heads(21), share in 0.0..0.4,
                   initial: bool, neg: bool, extreme: bool, seed: u64) {
        let mut random = Random(seed);
        let [hk, hv, dk, dv] = heads;
        let mut inputs = delta_inputs(&mut random, batch, tokens, heads, extreme);
        if initial {
            inputs.push(random.input("initial_state", &[batch, hv, dk, dv], 0.5));
        }
        let boundaries = Arc::new(boundaries(&mut random, batch, tokens, share));
        agree("gated_delta", &delta(&delta_options([hk, hv], neg, boundaries)), &inputs);
    }

    /// Routing inputs are multiples of 1/8 and, with top-K, the scale is a power of two: scores are then exact
    /// on both devices, so that they choose alike, among equals too.
    #[test]
    fn anchor_read(rows in count(2..=100), anchors in count(2..=20), heads in heads(20),
                   routing in 1..=17usize, top_k in prop::option::of(1..=5usize),
                   null: bool, scale in 0.3..1.5, seed: u64) {
        let mut random = Random(seed);
        let [hk, hv, dk, dv] = heads;
        let mut inputs = vec![
            random.input("query", &[rows, hk * dk], 1.0),
            random.input("routing_query", &[rows, hv * routing], 1.0),
            random.input("routing_keys", &[anchors, hv * routing], 0.7),
            random.input("anchor_states", &[anchors, hv, dk, dv], 1.0),
        ];
        for input in &mut inputs[1..3] {
            input.data.iter_mut().for_each(|v| *v = (*v * 8.0).round() / 8.0);
        }
        if null {
            inputs.push(random.input("null_score", &[rows, hv], 1.0));
        }
        let routing_scale = if top_k.is_some() { 0.5 } else { scale };
        let plan = Arc::new(plan(&mut random, rows, anchors));
        let options = AnchorReadOptions { key_heads: hk, value_heads: hv, top_k, routing_scale, plan };
        agree("anchor_read", &|v| Ok(vec![read_of(v).anchor_read(&options)?]), &inputs);
    }

    #[test]
    fn log_linear(batch in 1..=2usize, tokens in count(2..=90), heads in heads(18), scales in 1..=9usize,
                  position in count(2..=100), neg: bool, extreme: bool, seed: u64) {
        let mut random = Random(seed);
        let [hk, hv, dk, dv] = heads;
        let mut inputs = delta_inputs(&mut random, batch, tokens, heads, extreme);
        inputs.push(random.input("level_input", &[batch, tokens, hv * scales], 1.0));
        inputs.push(random.input("level_scale", &[hv, scales], 1.0));
        // Level m ≥ 1 is filled where bit m − 1 of the position is set.
        let levels = (usize::BITS - position.leading_zeros()) as usize + 1;
        let mut states = random.input("initial", &[batch, hv, levels, dk, dv], 0.5);
        for (i, state) in states.data.chunks_exact_mut(dk * dv).enumerate() {
            let m = i % levels;
            if m == 0 || position >> (m - 1) & 1 == 0 {
                state.fill(0.0);
            }
        }
        let options = LogLinearOptions {
            key_heads: hk, value_heads: hv, allow_neg_eigval: neg, position, want_state: false,
        };
        let states = (position > 0).then_some(states);
        agree("log_linear_delta", &|v| {
            let initial = states.as_ref().map(|states| states.on(v[0].device()));
            Ok(vec![levels_of(v).log_linear_delta(&options, initial.as_ref())?.0])
        }, &inputs);
    }
}

/// Half of every 16 tokens forget all (log α = −80), half are ordinary: the sum of log α is large then, and the
/// decay between ordinary tokens is a small difference of such sums.
#[test]
fn ordinary_gates_after_strong_decay() {
    let mut random = Random(40);
    let mut inputs = delta_inputs(&mut random, 1, 64, [1, 2, 12, 16], false);
    inputs[5].data.fill(0.0);
    inputs[3].data.iter_mut().enumerate().filter(|(i, _)| i / 2 % 16 < 8).for_each(|(_, v)| *v = 82.0);
    agree("gated_delta", &delta(&delta_options([1, 2], false, Arc::default())), &inputs);
}

/// A block and its inputs; the matrices come last.
fn block(
    random: &mut Random,
    batch: usize,
    tokens: usize,
    heads: usize,
    d: usize,
    linear: bool,
) -> (Block, Vec<Input>) {
    let width = heads * d;
    let boundaries = boundaries(random, batch, tokens, 0.1);
    let anchors = boundaries.iter().map(Vec::len).sum();
    let plan = Arc::new(ReadPlan::from_boundaries(tokens, &boundaries));
    let top_k = [None, Some(2)][random.between(0, 1)];
    let read = AnchorReadOptions { key_heads: heads, value_heads: heads, top_k, routing_scale: 1.0, plan };
    let delta = delta_options([heads, heads], false, Arc::new(boundaries));
    let mut inputs = vec![
        random.input("x", &[batch, tokens, width], 1.0),
        random.input("norm", &[width], 1.0),
        random.input("query conv", &[width, 4], 0.5),
        random.input("key conv", &[width, 4], 0.5),
        random.input("value conv", &[width, 4], 0.5),
        random.input("retention_input", &[batch, tokens, heads], 1.0),
        random.input("write_input", &[batch, tokens, heads], 1.0),
        random.input("a_log", &[heads], 0.5),
        random.input("dt_bias", &[heads], 1.0),
        random.input("routing_keys", &[anchors, width], 0.5),
        random.input("null_score", &[batch, tokens, heads], 1.0),
        random.input("head norm", &[d], 1.0),
    ];
    if linear {
        inputs.extend((0..3).map(|_| random.input("matrix", &[width, width], 1.0 / (width as f64).sqrt())));
    }
    (Block { delta, read, linear }, inputs)
}

proptest! {
    #![proptest_config(config(12))]

    #[test]
    fn regions_change_no_bits(batch in 1..=2usize, tokens in 1..=100usize, heads in 1..=3usize,
                              d in 2..=20usize, threads in 1..=2usize, seed: u64) {
        let (block, inputs) = block(&mut Random(seed), batch, tokens, heads, d, true);
        let plain = on(threads, &|v| block.run(v), &inputs);
        prop_assert!(plain.iter().flatten().all(|&v| f64::from_bits(v).is_finite()));
        let again = |v: &[Tensor]| {
            let block = block.clone();
            tape::recompute(&v.iter().collect::<Vec<_>>(), move |v| block.run(v))
        };
        prop_assert!(plain == on(threads, &again, &inputs));
    }

    /// Without matrices, on sizes that are cut into many parts.
    #[test]
    fn threads_change_no_bits(batch in 1..=3usize, tokens in 200..=700usize, heads in 1..=4usize,
                              d in 8..=32usize, seed: u64) {
        let (block, inputs) = block(&mut Random(seed), batch, tokens, heads, d, false);
        let one = on(1, &|v| block.run(v), &inputs);
        prop_assert!(one == on(2, &|v| block.run(v), &inputs));
        prop_assert!(one == on(3, &|v| block.run(v), &inputs));
    }
}

//! The log-linear gated delta rule: fast = reference = finite differences = its definition by sums over pairs
//! of tokens; any cut of a sequence = the whole.

use march_engine::ops::log_linear::{LogLinear, LogLinearOptions};
use march_engine::{Cpu, CpuOptions, Engine, Products, Reference, Result, Tape, Var};

use crate::common::{self, Input, Program, Random, assert_close, compare, finite_differences};

#[derive(Clone, Copy)]
struct Case {
    batch: usize,
    time: usize,
    heads: [usize; 2],
    dims: [usize; 2],
    scales: usize,
    position: usize,
    neg: bool,
}

impl Case {
    fn new(time: usize, dims: [usize; 2]) -> Self {
        Self { batch: 1, time, heads: [1, 1], dims, scales: 12, position: 0, neg: false }
    }

    fn options(&self) -> LogLinearOptions {
        LogLinearOptions {
            key_heads: self.heads[0],
            value_heads: self.heads[1],
            allow_neg_eigval: self.neg,
            position: self.position,
            want_state: false,
        }
    }

    fn inputs(&self, random: &mut Random) -> Vec<Input> {
        let &Self { batch, time, heads: [hk, hv], dims: [dk, dv], scales, .. } = self;
        vec![
            random.input("query", &[batch, time, hk * dk], 1.0),
            random.input("key", &[batch, time, hk * dk], 1.0),
            random.input("value", &[batch, time, hv * dv], 1.0),
            random.input("retention_input", &[batch, time, hv], 1.0),
            random.input("write_input", &[batch, time, hv], 1.0),
            Input { name: "a_log", shape: vec![hv], data: (0..hv).map(|h| -1.0 - h as f64).collect() },
            Input {
                name: "dt_bias",
                shape: vec![hv],
                data: (0..hv).map(|h| -2.0 + 0.5 * h as f64).collect(),
            },
            random.input("level_input", &[batch, time, hv * scales], 1.0),
            random.input("level_scale", &[hv, scales], 1.0),
        ]
    }

    /// Level states that a run of `position` tokens leaves, and their shape.
    fn initial(&self, random: &mut Random) -> Option<(Vec<f64>, Vec<usize>)> {
        if self.position == 0 {
            return None;
        }
        let before = Case { time: self.position, position: 0, ..*self };
        let inputs = before.inputs(random);
        let options = LogLinearOptions { want_state: true, ..before.options() };
        let (_, state) = run(&Reference, &options, &inputs, None);
        let (shape, data) = state?;
        Some((data.iter().map(|&v| f64::from(v as f32)).collect(), shape))
    }
}

fn named<T>(v: &[T]) -> LogLinear<&T> {
    LogLinear {
        query: &v[0],
        key: &v[1],
        value: &v[2],
        retention_input: &v[3],
        write_input: &v[4],
        a_log: &v[5],
        dt_bias: &v[6],
        level_input: &v[7],
        level_scale: &v[8],
    }
}

type State = Option<(Vec<usize>, Vec<f64>)>;

/// Readouts and, if the options want them, level states.
fn run<E: Engine>(
    engine: &E,
    options: &LogLinearOptions,
    inputs: &[Input],
    initial: State,
) -> (Vec<f64>, State) {
    let tape = Tape::inference(engine);
    let vars: Vec<_> =
        inputs.iter().map(|i| tape.constant(engine.from_f64(&i.data, &i.shape).unwrap())).collect();
    let initial = initial.map(|(shape, data)| engine.from_f64(&data, &shape).unwrap());
    let (out, state) = tape.log_linear_delta(named(&vars), options, initial.as_ref()).unwrap();
    (engine.to_f64(out.value()), state.map(|s| (engine.shape(&s).to_vec(), engine.to_f64(&s))))
}

struct Whole {
    options: LogLinearOptions,
    initial: Option<(Vec<f64>, Vec<usize>)>,
}

impl Program for Whole {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let initial = match &self.initial {
            Some((data, shape)) => Some(tape.engine().from_f64(data, shape)?),
            None => None,
        };
        Ok(vec![tape.log_linear_delta(named(v), &self.options, initial.as_ref())?.0])
    }
}

fn check(label: &str, case: &Case, inputs: &[Input], random: &mut Random) {
    let program = Whole { options: case.options(), initial: case.initial(random) };
    compare(label, &program, inputs);
}

#[test]
fn reference_is_finite_differences() {
    let mut random = Random(1);
    for (time, dims, heads, scales, position, neg, batch) in [
        (1, [3, 2], [1, 1], 4, 0, false, 1),
        (5, [3, 4], [1, 2], 4, 0, true, 2),
        (9, [2, 3], [2, 2], 2, 0, false, 1),
        (7, [3, 2], [1, 1], 8, 6, false, 1),
        (19, [2, 2], [1, 1], 3, 0, true, 1),
    ] {
        let case = Case { batch, time, heads, dims, scales, position, neg };
        let inputs = case.inputs(&mut random);
        let program = Whole { options: case.options(), initial: case.initial(&mut random) };
        finite_differences("log_linear_delta", &program, &inputs, 8);
    }
}

/// o_t = Σ_{s ≤ t} λ_t[level(t, s)] qᵀ (Π_{s < r ≤ t} α_r (I − β_r k_r k_rᵀ)) β_s k_s v_sᵀ, pair by pair.
#[test]
fn reference_is_the_definition() {
    let case = Case { scales: 4, ..Case::new(37, [3, 2]) };
    let i = case.inputs(&mut Random(3));
    let [dk, dv] = case.dims;
    let softplus = |x: f64| x.exp().ln_1p();
    let unit = |x: &[f64]| -> Vec<f64> {
        let r = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
        x.iter().map(|v| v * r).collect()
    };
    let mut want = Vec::new();
    for t in 0..case.time {
        let mut out = vec![0.0; dv];
        for s in 0..=t {
            let beta = |r: usize| 1.0 / (1.0 + (-i[4].data[r]).exp());
            let mut x: Vec<f64> = unit(&i[1].data[s * dk..][..dk]).iter().map(|k| k * beta(s)).collect();
            for r in s + 1..=t {
                let alpha = (-i[5].data[0].exp() * softplus(i[3].data[r] + i[6].data[0])).exp();
                let k = unit(&i[1].data[r * dk..][..dk]);
                let seen: f64 = x.iter().zip(&k).map(|(x, k)| x * k).sum();
                x = x.iter().zip(&k).map(|(x, k)| alpha * (x - beta(r) * k * seen)).collect();
            }
            let level = ((usize::BITS - (t ^ s).leading_zeros()) as usize).min(case.scales - 1);
            let lambda = softplus(i[8].data[level] * i[7].data[t * case.scales + level]);
            let q = unit(&i[0].data[t * dk..][..dk]);
            let weight = lambda * q.iter().zip(&x).map(|(q, x)| q * x).sum::<f64>();
            out.iter_mut().zip(&i[2].data[s * dv..][..dv]).for_each(|(o, v)| *o += weight * v);
        }
        want.extend(out);
    }
    assert_close("readouts", &run(&Reference, &case.options(), &i, None).0, &want, 1e-12);
}

#[test]
fn fast_is_the_reference() {
    let mut random = Random(2);
    for time in [0, 1, 5, 16, 17, 150] {
        for dims in [[3, 5], [12, 16], [64, 64]] {
            let case = Case::new(time, dims);
            let inputs = case.inputs(&mut random);
            check(&format!("T {time}, {dims:?}"), &case, &inputs, &mut random);
        }
    }
    for (time, dims, heads, scales, position, neg, batch) in [
        (40, [12, 20], [2, 4], 9, 0, false, 2),
        (70, [16, 8], [1, 3], 3, 0, true, 2),
        (33, [8, 8], [1, 1], 1, 0, false, 1),
        (0, [8, 8], [1, 1], 3, 37, false, 1),
        (3, [8, 8], [1, 2], 9, 37, false, 2),
        (40, [8, 12], [1, 1], 9, 37, false, 1),
        (50, [8, 12], [1, 1], 4, 64, true, 2),
        (60, [8, 12], [2, 2], 9, 95, false, 1),
        (600, [8, 8], [1, 1], 7, 0, false, 1),
    ] {
        let case = Case { batch, time, heads, dims, scales, position, neg };
        let inputs = case.inputs(&mut random);
        check(&format!("T {time}, {dims:?}, {heads:?}, position {position}"), &case, &inputs, &mut random);
    }
}

#[test]
fn extreme_gates() {
    let mut random = Random(4);
    let case = Case { heads: [1, 2], ..Case::new(90, [12, 16]) };
    // log α = −80 for two tokens of three.
    let mut inputs = case.inputs(&mut random);
    inputs[5].data.fill(0.0);
    inputs[6].data.fill(0.0);
    inputs[3].data.iter_mut().enumerate().for_each(|(i, v)| *v = if i % 6 < 4 { 80.0 } else { -3.0 });
    check("strong decay", &case, &inputs, &mut random);
    // log α = −0.
    let mut inputs = case.inputs(&mut random);
    inputs[5].data.fill(-200.0);
    check("no decay", &case, &inputs, &mut random);
    for (label, strength) in [("no writes", -200.0), ("full writes", 60.0)] {
        let mut inputs = case.inputs(&mut random);
        inputs[4].data.fill(strength);
        check(label, &case, &inputs, &mut random);
    }
    // Zero queries and keys: the norm's floor decides.
    let mut inputs = case.inputs(&mut random);
    inputs[0].data[..60].fill(0.0);
    inputs[1].data[30..90].fill(0.0);
    check("zero rows", &case, &inputs, &mut random);
}

/// The tokens `range` of inputs that have a time dimension.
fn cut(inputs: &[Input], batch: usize, time: usize, range: std::ops::Range<usize>) -> Vec<Input> {
    let slice = |input: &Input| {
        if input.shape.len() != 3 {
            return input.clone();
        }
        let width = input.shape[2];
        let rows =
            (0..batch).flat_map(|b| &input.data[(b * time + range.start) * width..][..range.len() * width]);
        Input { name: input.name, shape: vec![batch, range.len(), width], data: rows.copied().collect() }
    };
    inputs.iter().map(slice).collect()
}

/// Readouts of the pieces, put together, and the last state.
fn pieces<E: Engine>(engine: &E, case: &Case, inputs: &[Input], cuts: &[usize]) -> (Vec<f64>, State) {
    let width = case.heads[1] * case.dims[1];
    let mut out = vec![0.0; case.batch * case.time * width];
    let mut state = None;
    let mut from = 0;
    for &to in cuts.iter().chain(&[case.time]) {
        let options = LogLinearOptions { want_state: true, position: from, ..case.options() };
        let part = cut(inputs, case.batch, case.time, from..to);
        let (o, s) = run(engine, &options, &part, state.take());
        for b in 0..case.batch {
            let len = (to - from) * width;
            out[(b * case.time + from) * width..][..len].copy_from_slice(&o[b * len..][..len]);
        }
        state = s;
        from = to;
    }
    (out, state)
}

#[test]
fn any_cut_is_the_whole() {
    let mut random = Random(5);
    for dims in [[3, 5], [64, 64]] {
        let case = Case { batch: 2, heads: [1, 2], scales: 6, ..Case::new(203, dims) };
        let inputs = case.inputs(&mut random);
        let options = LogLinearOptions { want_state: true, ..case.options() };
        let (whole, last) = run(&Reference, &options, &inputs, None);
        let last = last.unwrap();
        let each: Vec<usize> = (1..case.time).collect();
        for engine in common::fast_engines() {
            let (training, _) = run(&engine, &case.options(), &inputs, None);
            assert_close("without a state", &training, &whole, 1e-5);
            for cuts in [&[][..], &[64, 128], &[64, 64, 192], &[1, 2, 3, 40, 47, 63, 97, 128, 190], &each] {
                let (out, state) = pieces(&engine, &case, &inputs, cuts);
                assert_close(&format!("readouts of {cuts:?}"), &out, &whole, 1e-5);
                let state = state.unwrap();
                assert_eq!(state.0, last.0);
                assert_close(&format!("state after {cuts:?}"), &state.1, &last.1, 1e-5);
            }
        }
    }
}

#[test]
fn cuts_on_the_grid_keep_the_bits() {
    let mut random = Random(6);
    let case = Case { batch: 3, heads: [2, 2], ..Case::new(203, [12, 20]) };
    let inputs = case.inputs(&mut random);
    let engine =
        Cpu::new(CpuOptions { threads: 2, portable: false, products: Products::BatchInvariant }).unwrap();
    let whole = pieces(&engine, &case, &inputs, &[]);
    assert!(pieces(&engine, &case, &inputs, &[64, 192]) == whole);
    let one_thread = Cpu::new(CpuOptions { threads: 1, ..Default::default() }).unwrap();
    assert!(pieces(&one_thread, &case, &inputs, &[]) == whole);
    // One entry of the batch alone.
    let alone = Case { batch: 1, ..case };
    let one: Vec<Input> = inputs
        .iter()
        .map(|i| {
            let mut i = i.clone();
            if i.shape.len() == 3 {
                let len = i.data.len() / 3;
                i.data = i.data[len..2 * len].to_vec();
                i.shape[0] = 1;
            }
            i
        })
        .collect();
    let (out, state) = pieces(&engine, &alone, &one, &[]);
    let (all, states) = whole;
    assert!(out[..] == all[out.len()..2 * out.len()]);
    let (state, states) = (state.unwrap().1, states.unwrap().1);
    assert!(state[..] == states[state.len()..2 * state.len()]);
}

/// States as they are right after a token, not yet merged, are taken as well.
#[test]
fn unmerged_states_mean_the_same() {
    let case = Case::new(4, [4, 4]);
    let inputs = case.inputs(&mut Random(7));
    let mut merged = vec![0.0; 3 * 16];
    let mut unmerged = merged.clone();
    let mut random = Random(8);
    for i in 0..16 {
        unmerged[i] = random.normal();
        unmerged[16 + i] = random.normal();
        merged[32 + i] = unmerged[i] + unmerged[16 + i];
    }
    let options = LogLinearOptions { position: 2, want_state: true, ..case.options() };
    let shape = vec![1, 1, 3, 4, 4];
    let want = run(&Reference, &options, &inputs, Some((shape.clone(), merged.clone())));
    for engine in common::fast_engines() {
        for start in [&merged, &unmerged] {
            let (out, state) = run(&engine, &options, &inputs, Some((shape.clone(), start.clone())));
            assert_close("readouts", &out, &want.0, 1e-5);
            assert_close("state", &state.unwrap().1, &want.1.clone().unwrap().1, 1e-5);
        }
    }
}

#[test]
fn wrong_calls_are_named() {
    let case = Case { heads: [2, 4], ..Case::new(3, [4, 6]) };
    let inputs = case.inputs(&mut Random(9));
    fn error<E: Engine>(
        engine: &E,
        options: &LogLinearOptions,
        inputs: &[Input],
        initial: Option<&[usize]>,
    ) -> String {
        let tape = Tape::inference(engine);
        let vars: Vec<_> =
            inputs.iter().map(|i| tape.constant(engine.from_f64(&i.data, &i.shape).unwrap())).collect();
        let initial = initial.map(|shape| engine.full(shape, 0.0).unwrap());
        tape.log_linear_delta(named(&vars), options, initial.as_ref()).unwrap_err().to_string()
    }
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    let both = |options: &LogLinearOptions, inputs: &[Input], initial: Option<&[usize]>, part: &str| {
        for text in [error(&cpu, options, inputs, initial), error(&Reference, options, inputs, initial)] {
            assert!(text.starts_with("log_linear_delta: ") && text.contains(part), "{text}");
        }
    };
    for (which, name) in [
        "query",
        "key",
        "value",
        "retention_input",
        "write_input",
        "a_log",
        "dt_bias",
        "level_input",
        "level_scale",
    ]
    .iter()
    .enumerate()
    {
        let mut wrong = inputs.clone();
        wrong[which].shape.push(1);
        both(&case.options(), &wrong, None, &format!("`{name}`"));
    }
    let o = case.options();
    both(&LogLinearOptions { key_heads: 0, ..o }, &inputs, None, "heads");
    both(&LogLinearOptions { key_heads: 3, ..o }, &inputs, None, "heads");
    both(&LogLinearOptions { value_heads: 8, ..o }, &inputs, None, "`");
    both(&LogLinearOptions { position: usize::MAX, ..o }, &inputs, None, "position");
    both(&o, &inputs, Some(&[1, 4, 2, 4, 6]), "`initial`");
    both(&LogLinearOptions { position: 5, ..o }, &inputs, Some(&[1, 4, 3, 4, 6]), "`initial`");
}

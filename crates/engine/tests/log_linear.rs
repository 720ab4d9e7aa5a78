//! The log-linear gated delta rule: CPU = reference = finite differences = its definition by sums over pairs
//! of tokens; any cut of a sequence = the whole.

use march_engine::ops::log_linear::{LogLinear, LogLinearOptions};
use march_engine::{Device, Result, Tensor};

use crate::common::{
    Input, Random, assert_close, compare, cpu, cpus, finite_differences, invariant, tensors,
};

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

    /// Level states that a run of `position` tokens leaves.
    fn initial(&self, random: &mut Random) -> Option<Input> {
        if self.position == 0 {
            return None;
        }
        let before = Case { time: self.position, position: 0, ..*self };
        let inputs = before.inputs(random);
        let options = LogLinearOptions { want_state: true, ..before.options() };
        let mut state = run(&Device::reference(), &options, &inputs, None).1?;
        state.data.iter_mut().for_each(|v| *v = f64::from(*v as f32));
        Some(state)
    }
}

fn named(v: &[Tensor]) -> LogLinear<&Tensor> {
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

/// Readouts and, if the options want them, level states.
fn run(
    device: &Device,
    options: &LogLinearOptions,
    inputs: &[Input],
    initial: Option<Input>,
) -> (Vec<f64>, Option<Input>) {
    let initial = initial.map(|states| states.on(device));
    let (out, state) = named(&tensors(inputs, device)).log_linear_delta(options, initial.as_ref()).unwrap();
    let state = state.map(|s| Input { name: "state", shape: s.shape().to_vec(), data: s.to_f64() });
    (out.to_f64(), state)
}

/// The readouts of a case that starts with the states that earlier tokens left.
fn whole(case: &Case, random: &mut Random) -> impl Fn(&[Tensor]) -> Result<Vec<Tensor>> {
    let (options, initial) = (case.options(), case.initial(random));
    move |v| {
        let initial = initial.as_ref().map(|states| states.on(v[0].device()));
        Ok(vec![named(v).log_linear_delta(&options, initial.as_ref())?.0])
    }
}

fn check(label: &str, case: &Case, inputs: &[Input], random: &mut Random) {
    compare(label, &whole(case, random), inputs);
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
        finite_differences("log_linear_delta", &whole(&case, &mut random), &inputs, 8);
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
    assert_close("readouts", &run(&Device::reference(), &case.options(), &i, None).0, &want, 1e-12);
}

#[test]
fn cpu_is_the_reference() {
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
fn pieces(device: &Device, case: &Case, inputs: &[Input], cuts: &[usize]) -> (Vec<f64>, Input) {
    let width = case.heads[1] * case.dims[1];
    let mut out = vec![0.0; case.batch * case.time * width];
    let mut state = None;
    let mut from = 0;
    for &to in cuts.iter().chain(&[case.time]) {
        let options = LogLinearOptions { want_state: true, position: from, ..case.options() };
        let part = cut(inputs, case.batch, case.time, from..to);
        let (o, s) = run(device, &options, &part, state.take());
        for b in 0..case.batch {
            let len = (to - from) * width;
            out[(b * case.time + from) * width..][..len].copy_from_slice(&o[b * len..][..len]);
        }
        state = s;
        from = to;
    }
    (out, state.unwrap())
}

#[test]
fn any_cut_is_the_whole() {
    let mut random = Random(5);
    for dims in [[3, 5], [64, 64]] {
        let case = Case { batch: 2, heads: [1, 2], scales: 6, ..Case::new(203, dims) };
        let inputs = case.inputs(&mut random);
        let options = LogLinearOptions { want_state: true, ..case.options() };
        let (whole, last) = run(&Device::reference(), &options, &inputs, None);
        let last = last.unwrap();
        let each: Vec<usize> = (1..case.time).collect();
        for cpu in cpus() {
            let (training, _) = run(&cpu, &case.options(), &inputs, None);
            assert_close("without a state", &training, &whole, 1e-5);
            for cuts in [&[][..], &[64, 128], &[64, 64, 192], &[1, 2, 3, 40, 47, 63, 97, 128, 190], &each] {
                let (out, state) = pieces(&cpu, &case, &inputs, cuts);
                assert_close(&format!("readouts of {cuts:?}"), &out, &whole, 1e-5);
                assert_eq!(state.shape, last.shape);
                assert_close(&format!("state after {cuts:?}"), &state.data, &last.data, 1e-5);
            }
        }
    }
}

#[test]
fn cuts_on_the_grid_keep_the_bits() {
    let mut random = Random(6);
    let case = Case { batch: 3, heads: [2, 2], ..Case::new(203, [12, 20]) };
    let inputs = case.inputs(&mut random);
    let two_threads = invariant(2);
    let run = |cpu, cuts: &[usize]| {
        let (out, state) = pieces(cpu, &case, &inputs, cuts);
        (out, state.data)
    };
    let whole = run(&two_threads, &[]);
    assert!(run(&two_threads, &[64, 192]) == whole);
    assert!(run(&cpu(1), &[]) == whole);
    // One entry of the batch alone.
    let mut one = inputs.clone();
    for input in one.iter_mut().filter(|input| input.shape.len() == 3) {
        let len = input.data.len() / 3;
        input.data = input.data[len..2 * len].to_vec();
        input.shape[0] = 1;
    }
    let (out, state) = pieces(&two_threads, &Case { batch: 1, ..case }, &one, &[]);
    assert!(out[..] == whole.0[out.len()..2 * out.len()]);
    let len = state.data.len();
    assert!(state.data[..] == whole.1[len..2 * len]);
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
    let start = |data: &[f64]| Some(Input { name: "state", shape: vec![1, 1, 3, 4, 4], data: data.to_vec() });
    let (want, last) = run(&Device::reference(), &options, &inputs, start(&merged));
    let last = last.unwrap();
    for cpu in cpus() {
        for states in [&merged, &unmerged] {
            let (out, state) = run(&cpu, &options, &inputs, start(states));
            assert_close("readouts", &out, &want, 1e-5);
            assert_close("state", &state.unwrap().data, &last.data, 1e-5);
        }
    }
}

#[test]
fn wrong_calls_are_named() {
    let case = Case { heads: [2, 4], ..Case::new(3, [4, 6]) };
    let inputs = case.inputs(&mut Random(9));
    let refused = |options: &LogLinearOptions, inputs: &[Input], initial: Option<&[usize]>, part: &str| {
        for device in [cpu(0), Device::reference()] {
            let initial = initial.map(|shape| Tensor::full(shape, 0.0, &device).unwrap());
            let result = named(&tensors(inputs, &device)).log_linear_delta(options, initial.as_ref());
            let text = result.unwrap_err().to_string();
            assert!(text.starts_with("log_linear_delta: ") && text.contains(part), "{text}");
        }
    };
    for which in 0..inputs.len() {
        let mut wrong = inputs.clone();
        wrong[which].shape.push(1);
        refused(&case.options(), &wrong, None, &format!("`{}`", inputs[which].name));
    }
    let o = case.options();
    refused(&LogLinearOptions { key_heads: 0, ..o }, &inputs, None, "heads");
    refused(&LogLinearOptions { key_heads: 3, ..o }, &inputs, None, "heads");
    refused(&LogLinearOptions { value_heads: 8, ..o }, &inputs, None, "`");
    refused(&LogLinearOptions { position: usize::MAX, ..o }, &inputs, None, "position");
    refused(&o, &inputs, Some(&[1, 4, 2, 4, 6]), "`initial`");
    refused(&LogLinearOptions { position: 5, ..o }, &inputs, Some(&[1, 4, 3, 4, 6]), "`initial`");
}

//! log_linear_delta: device = reference, on odd sizes, positions and extreme gates; any cut of a sequence = the whole.

use march_engine::ops::log_linear::{LogLinear, LogLinearOptions};
use march_engine::{Device, Result, Tensor};

use crate::common::{Input, Random, assert_close, compare, devices, tensors, tests};

tests![
    device_equals_reference,
    random_shapes,
    extreme_gates,
    any_cut_is_the_whole,
    unmerged_states_mean_the_same,
];

#[derive(Clone, Copy, Debug)]
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
        Self { batch: 1, time, heads: [1, 1], dims, scales: 7, position: 0, neg: false }
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
        let list = |name, first: f64, step: f64| Input {
            name,
            shape: vec![hv],
            data: (0..hv).map(|h| first + step * h as f64).collect(),
        };
        vec![
            random.input("query", &[batch, time, hk * dk], 1.0),
            random.input("key", &[batch, time, hk * dk], 1.0),
            random.input("value", &[batch, time, hv * dv], 1.0),
            random.input("retention_input", &[batch, time, hv], 1.0),
            random.input("write_input", &[batch, time, hv], 1.0),
            list("a_log", -1.0, -1.0),
            list("dt_bias", -2.0, 0.5),
            random.input("level_input", &[batch, time, hv * scales], 1.0),
            random.input("level_scale", &[hv, scales], 1.0),
        ]
    }

    /// Level states that a run of `position` tokens leaves, and their shape.
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

/// Readouts and, if the options want them, level states; the inputs are in the order of their fields.
fn rule(
    v: &[Tensor],
    options: &LogLinearOptions,
    initial: Option<&Tensor>,
) -> Result<(Tensor, Option<Tensor>)> {
    let input = LogLinear {
        query: &v[0],
        key: &v[1],
        value: &v[2],
        retention_input: &v[3],
        write_input: &v[4],
        a_log: &v[5],
        dt_bias: &v[6],
        level_input: &v[7],
        level_scale: &v[8],
    };
    input.log_linear_delta(options, initial)
}

fn run(
    device: &Device,
    options: &LogLinearOptions,
    inputs: &[Input],
    initial: Option<&Input>,
) -> (Vec<f64>, Option<Input>) {
    let initial = initial.map(|state| state.on(device));
    let (out, state) = rule(&tensors(inputs, device), options, initial.as_ref()).unwrap();
    let read = |s: Tensor| Input { name: "state", shape: s.shape().to_vec(), data: s.to_f64() };
    (out.to_f64(), state.map(read))
}

fn check(case: &Case, inputs: &[Input], random: &mut Random) {
    let (options, initial) = (case.options(), case.initial(random));
    let program = |v: &[Tensor]| {
        let initial = initial.as_ref().map(|state| state.on(v[0].device()));
        Ok(vec![rule(v, &options, initial.as_ref())?.0])
    };
    compare(&format!("{case:?}"), &program, inputs);
}

fn device_equals_reference() {
    let mut random = Random(2);
    for (time, dims, heads, scales, position, neg, batch) in [
        (0, [8, 8], [1, 1], 7, 0, false, 1),
        (0, [8, 8], [1, 1], 3, 37, false, 1),
        (1, [3, 5], [1, 1], 7, 0, false, 1),
        (17, [3, 5], [1, 1], 7, 0, false, 1),
        (40, [12, 20], [2, 4], 9, 0, false, 2),
        (70, [12, 8], [1, 3], 3, 0, true, 2),
        (33, [8, 8], [1, 1], 1, 0, false, 1),
        (3, [8, 8], [1, 2], 9, 37, false, 2),
        (40, [8, 12], [1, 1], 9, 37, false, 1),
        (50, [8, 12], [1, 1], 3, 64, true, 2),
        (60, [8, 12], [2, 2], 9, 95, false, 1),
        (140, [8, 8], [1, 1], 7, 0, false, 1),
        (37, [67, 70], [1, 1], 7, 0, false, 1),
        // More than one dispatch.
        (200, [67, 5], [1, 1], 7, 0, false, 1),
    ] {
        let case = Case { batch, time, heads, dims, scales, position, neg };
        let inputs = case.inputs(&mut random);
        check(&case, &inputs, &mut random);
    }
}

fn random_shapes() {
    let mut random = Random(12);
    for _ in 0..16 {
        let key_heads = random.between(1, 2);
        let case = Case {
            batch: random.between(1, 3),
            time: random.between(0, 70),
            heads: [key_heads, key_heads * random.between(1, 2)],
            // Few key sizes and scales: each pair is a kernel of its own.
            dims: [[3, 12][random.between(0, 1)], random.between(1, 20)],
            scales: [3, 7][random.between(0, 1)],
            position: [0, 1, 6, 31, 32][random.between(0, 4)],
            neg: random.between(0, 1) == 1,
        };
        let inputs = case.inputs(&mut random);
        check(&case, &inputs, &mut random);
    }
}

fn extreme_gates() {
    let mut random = Random(4);
    let case = Case { heads: [1, 2], ..Case::new(75, [12, 16]) };
    // log α = −80 for two tokens of three.
    let mut inputs = case.inputs(&mut random);
    inputs[5].data.fill(0.0);
    inputs[6].data.fill(0.0);
    inputs[3].data.iter_mut().enumerate().for_each(|(i, v)| *v = if i % 6 < 4 { 80.0 } else { -3.0 });
    check(&case, &inputs, &mut random);
    // log α = −0.
    let mut inputs = case.inputs(&mut random);
    inputs[5].data.fill(-200.0);
    check(&case, &inputs, &mut random);
    // No writes, then full writes.
    for strength in [-200.0, 60.0] {
        let mut inputs = case.inputs(&mut random);
        inputs[4].data.fill(strength);
        check(&case, &inputs, &mut random);
    }
    // Zero queries and keys: the norm's floor decides.
    let mut inputs = case.inputs(&mut random);
    inputs[0].data[..60].fill(0.0);
    inputs[1].data[30..90].fill(0.0);
    check(&case, &inputs, &mut random);
}

/// The tokens `range` of batch row `row`.
fn part(inputs: &[Input], row: usize, range: std::ops::Range<usize>) -> Vec<Input> {
    let cut = |input: &Input| match input.shape[..] {
        [_, time, width] => Input {
            name: input.name,
            shape: vec![1, range.len(), width],
            data: input.data[(row * time + range.start) * width..(row * time + range.end) * width].to_vec(),
        },
        _ => input.clone(),
    };
    inputs.iter().map(cut).collect()
}

/// A row alone, in pieces or token by token, has the bits of the whole call; its states are the reference's.
fn any_cut_is_the_whole() {
    let case = Case { batch: 2, heads: [1, 2], scales: 3, ..Case::new(77, [12, 20]) };
    let inputs = case.inputs(&mut Random(5));
    let options = LogLinearOptions { want_state: true, ..case.options() };
    let want = run(&Device::reference(), &options, &inputs, None).1.unwrap();
    for device in devices() {
        let (whole, last) = run(device, &options, &inputs, None);
        let last = last.unwrap();
        assert_eq!(last.shape, want.shape);
        assert_close("state", &last.data, &want.data, 1e-5);
        for cuts in [vec![77], vec![1; 77], vec![64, 1, 12], vec![3, 5, 24, 45]] {
            let (mut readouts, mut state, mut from) = (Vec::new(), None, 0);
            for count in cuts {
                let options = LogLinearOptions { position: from, ..options };
                let piece = part(&inputs, 1, from..from + count);
                let (out, next) = run(device, &options, &piece, state.as_ref());
                readouts.extend(out);
                state = next;
                from += count;
            }
            assert!(readouts == whole[whole.len() / 2..]);
            assert!(state.unwrap().data == last.data[last.data.len() / 2..]);
        }
    }
}

/// States as they are right after a token, not yet merged, are taken as well.
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
    let [merged, unmerged] =
        [merged, unmerged].map(|data| Input { name: "state", shape: vec![1, 1, 3, 4, 4], data });
    let want = run(&Device::reference(), &options, &inputs, Some(&merged));
    for device in devices() {
        for start in [&merged, &unmerged] {
            let (out, state) = run(device, &options, &inputs, Some(start));
            assert_close("readouts", &out, &want.0, 1e-5);
            assert_close("state", &state.unwrap().data, &want.1.as_ref().unwrap().data, 1e-5);
        }
    }
}

//! What must hold for every mixer, whatever its weights are.

use march_lm::anchors::{Policy, Retention};
use march_lm::engine::ops::adamw::squared_norm;
use march_lm::engine::{CpuOptions, Device, Tensor};
use march_lm::model::ModelConfig;
use march_lm::model::{Batch, Init, Model, Settings, TraceCell};

use crate::common::{Case, KINDS, assert_close, cpu, error, invariant, small, tokens};

/// The policies that a kind is tried with: its own, and for MARCH others.
fn policies(own: &Policy) -> Vec<Policy> {
    let mut list = vec![own.clone()];
    if own.interval.is_some() {
        for (interval, top_k, retention) in [
            (1, None, Retention::All),
            (7, Some(3), Retention::All),
            (16, None, Retention::Fenwick),
            (16, Some(1), Retention::Fenwick),
            (20, Some(2), Retention::Fenwick),
            (64, Some(50), Retention::All),
            (1000, None, Retention::All),
        ] {
            list.push(Policy { interval: Some(interval), top_k, retention, ..Policy::default() });
        }
    }
    list
}

#[test]
fn gradients_are_finite_differences() {
    let device = Device::reference();
    for kind in KINDS {
        let mut case = Case::new(&device, &small(kind));
        let (rows, length) = (2, 37);
        let ids = tokens(rows * length, 37, 3);
        let targets = tokens(rows * length, 37, 4);
        let settings = case.settings();
        let batch = Batch { ids: &ids, rows };
        let (_, gradients) = case.gradients(batch, &targets, &settings);
        let loss = |case: &Case| {
            let weights = case.weights();
            let hidden = case.model.forward(&weights, batch, &settings, None).unwrap();
            let loss = case.model.loss(&weights, &hidden, &targets, None).unwrap();
            loss.to_f64()[0]
        };
        for i in 0..case.parameters.len() {
            let spec = case.model.layout()[i].clone();
            let values = case.parameters[i].to_f64();
            let gradient = gradients[i].as_ref().unwrap().to_f64();
            let largest = gradient.iter().fold(0.0f64, |m, g| m.max(g.abs()));
            for pick in 0..2 {
                let at = (pick * 7919 + 13 * i) % values.len();
                let step = 1e-5;
                let mut moved = |by: f64| {
                    let mut values = values.clone();
                    values[at] += by;
                    case.parameters[i] = Tensor::from_f64(&values, &spec.shape, &device).unwrap();
                    loss(&case)
                };
                let slope = (moved(step) - moved(-step)) / (2.0 * step);
                let difference = (slope - gradient[at]).abs();
                assert!(
                    difference <= 1e-6 * largest.max(1e-3),
                    "{kind} {}[{at}]: slope {slope:e}, gradient {:e}",
                    spec.name,
                    gradient[at]
                );
            }
            case.parameters[i] = Tensor::from_f64(&values, &spec.shape, &device).unwrap();
        }
    }
}

/// One token, no anchor, lengths that divide nothing; one token at a time, in uneven calls, and all at once.
#[test]
fn decoding_is_prefill_is_the_training_forward() {
    let device = invariant();
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        for policy in policies(&case.model.policy()) {
            for length in [1, 15, 83, 211] {
                let ids = tokens(length, 37, length as u64);
                let want = case.forward(Batch::one(&ids), &policy);
                for calls in [&[1][..], &[length], &[3, 70, 1, 1, 29], &[64]] {
                    let got = case.extend(&ids, &policy, calls);
                    assert_close(&format!("{kind} {policy:?} {length} {calls:?}"), &got, &want, 1e-5);
                }
            }
        }
    }
}

#[test]
fn decoding_is_the_training_forward_on_long_text() {
    let device = invariant();
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        let policy = case.model.policy();
        let ids = tokens(5000, 37, 11);
        let want = case.forward(Batch::one(&ids), &policy);
        assert_close(kind, &case.extend(&ids, &policy, &[1]), &want, 1e-5);
        assert_close(kind, &case.extend(&ids, &policy, &[1000, 1, 777]), &want, 1e-5);
    }
}

/// A batch of sequences gives what each gives alone, to rounding.
#[test]
fn rows_of_a_batch_are_independent() {
    let device = cpu();
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        let policy = case.model.policy();
        let ids = tokens(3 * 70, 37, 5);
        let all = case.forward(Batch { ids: &ids, rows: 3 }, &policy);
        for (row, ids) in ids.chunks(70).enumerate() {
            let one = case.forward(Batch::one(ids), &policy);
            assert_close(kind, &all[row * one.len()..(row + 1) * one.len()], &one, 1e-5);
        }
    }
}

#[test]
fn prefill_does_not_depend_on_its_cuts() {
    let device = invariant();
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        let ids = tokens(300, 37, 6);
        for policy in policies(&case.model.policy()) {
            let whole = case.extend(&ids, &policy, &[300]);
            for calls in [&[64][..], &[128, 64, 64], &[256, 44]] {
                assert!(case.extend(&ids, &policy, calls) == whole, "{kind} {policy:?} {calls:?}");
            }
        }
    }
}

/// Where the recurrence decides what is read, decoding has the very bits of the forward pass: else two scores that
/// almost tie could be ranked differently.
#[test]
fn decoding_has_the_bits_of_the_forward_pass() {
    let device = invariant();
    for kind in ["gated_deltanet", "march", "march_top_k", "march_no_null"] {
        let case = Case::new(&device, &small(kind));
        let ids = tokens(333, 37, 21);
        for policy in policies(&case.model.policy()) {
            let whole = case.forward(Batch::one(&ids), &policy);
            for calls in [&[1][..], &[333], &[5, 40, 1, 1, 23], &[16]] {
                assert!(case.extend(&ids, &policy, calls) == whole, "{kind} {policy:?} {calls:?}");
            }
        }
    }
}

/// Three sequences at different positions decode together as they do alone, bit for bit.
#[test]
fn decoding_does_not_depend_on_its_batch() {
    let device = invariant();
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        let policy = case.model.policy();
        let lengths = [5, 31, 47];
        let texts: Vec<Vec<u32>> = lengths.iter().map(|&n| tokens(n + 40, 37, n as u64)).collect();
        let weights = case.weights();
        let mut banks: Vec<_> = lengths.iter().map(|_| case.model.bank(policy.clone()).unwrap()).collect();
        for ((bank, text), &n) in banks.iter_mut().zip(&texts).zip(&lengths) {
            case.model.extend(&weights, Batch::one(&text[..n]), &mut [bank], None).unwrap();
        }
        // A fork goes on alone.
        let mut alone = banks.clone();
        for step in 0..40 {
            let ids: Vec<u32> = texts.iter().zip(lengths).map(|(text, n)| text[n + step]).collect();
            let mut together: Vec<_> = banks.iter_mut().collect();
            let batch = Batch { ids: &ids, rows: 3 };
            let hidden = case.model.extend(&weights, batch, &mut together, None).unwrap();
            let logits = case.model.logits(&weights, &hidden).unwrap().to_f32();
            for (row, bank) in alone.iter_mut().enumerate() {
                let one = Batch::one(&ids[row..=row]);
                let hidden = case.model.extend(&weights, one, &mut [bank], None).unwrap();
                let want = case.model.logits(&weights, &hidden).unwrap().to_f32();
                assert!(logits[row * 37..(row + 1) * 37] == want, "{kind}, step {step}, row {row}");
            }
        }
    }
}

#[test]
fn no_token_sees_a_later_one() {
    let device = cpu();
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        let policy = case.model.policy();
        let ids = tokens(100, 37, 8);
        let before = case.forward(Batch::one(&ids), &policy);
        for at in [0, 1, 16, 50, 99] {
            let mut other = ids.clone();
            other[at] = (other[at] + 1) % 37;
            let after = case.forward(Batch::one(&other), &policy);
            assert!(before[..at * 37] == after[..at * 37], "{kind}: token {at} changed an earlier one");
            assert!(before[at * 37..] != after[at * 37..], "{kind}: token {at} changed nothing");
        }
    }
}

/// The parameters of a Gated DeltaNet in a MARCH whose null takes everything.
#[test]
fn with_all_weight_on_the_null_it_is_gated_delta_net() {
    let device = cpu();
    let calm = |kind| ModelConfig { initializer_range: 0.05, ..small(kind) };
    let plain = Case::new(&device, &calm("gated_deltanet"));
    let mut march = Case::new(&device, &calm("march"));
    for (i, spec) in march.model.layout().iter().enumerate() {
        if let Some(same) = plain.model.layout().iter().position(|other| other.name == spec.name) {
            march.parameters[i] = plain.parameters[same].clone();
        } else if spec.name.ends_with("null_proj.bias") {
            march.parameters[i] = Tensor::full(&spec.shape, 1e4, &device).unwrap();
        }
    }
    let ids = tokens(200, 37, 9);
    let want = plain.forward(Batch::one(&ids), &Policy::default());
    for interval in [16, 48] {
        let policy = Policy { interval: Some(interval), ..Policy::default() };
        assert!(march.forward(Batch::one(&ids), &policy) == want, "interval {interval}");
    }
    for interval in [1, 20] {
        let policy = Policy { interval: Some(interval), ..Policy::default() };
        assert_close("interval that cuts chunks", &march.forward(Batch::one(&ids), &policy), &want, 1e-6);
    }
}

#[test]
fn wide_top_k_is_dense() {
    let device = cpu();
    let case = Case::new(&device, &small("march"));
    let ids = tokens(150, 37, 10);
    let dense = case.forward(Batch::one(&ids), &case.model.policy());
    for k in [9, 1000] {
        let policy = Policy { top_k: Some(k), ..case.model.policy() };
        assert!(case.forward(Batch::one(&ids), &policy) == dense);
        let own = case.settings();
        let wide = Settings { policy, ..Settings::default() };
        let (a, b) =
            (case.gradients(Batch::one(&ids), &ids, &own).1, case.gradients(Batch::one(&ids), &ids, &wide).1);
        for (a, b) in a.iter().zip(&b) {
            assert!(a.as_ref().unwrap().to_f32() == b.as_ref().unwrap().to_f32());
        }
    }
    let narrow = Policy { top_k: Some(1), ..case.model.policy() };
    assert!(error(&case.forward(Batch::one(&ids), &narrow), &dense) > 1e-3);
}

/// No anchor touches the first layer's input, so its state does not know where anchors are.
#[test]
fn the_state_does_not_depend_on_the_interval() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let ids = tokens(130, 37, 12);
    let state = |interval: Option<usize>| {
        let weights = case.weights();
        let mut bank = case.model.bank(Policy { interval, ..Policy::default() }).unwrap();
        case.model.extend(&weights, Batch::one(&ids), &mut [&mut bank], None).unwrap();
        bank.layers()[0].state().unwrap().to_f64()
    };
    let want = state(None);
    assert!(state(Some(16)) == want && state(Some(64)) == want);
    assert_close("interval 20", &state(Some(20)), &want, 1e-6);
}

/// The routing weights of a layer, [tokens·4, 6], for 100 tokens and the case's own policy.
fn traced(case: &Case, ids: &[u32], layer: usize) -> Vec<f32> {
    let trace = TraceCell::default();
    let weights = case.weights();
    case.model.forward(&weights, Batch::one(ids), &case.settings(), Some(&trace)).unwrap();
    let (_, all) = trace.lock().unwrap().weights(layer, ids.len(), 6);
    all
}

/// In the first layer, whose inputs are the embeddings and whose routing keys are all equal: the null's weight of each
/// token and head if `read` anchors are read, from the scores themselves.
fn null_weight_of_the_first_layer(case: &Case, scale: f64, id: u32, head: usize, read: usize) -> f64 {
    let parameter = |name: &str| {
        let at = case.model.layout().iter().position(|spec| spec.name == format!("model.{name}"));
        case.parameters[at.unwrap()].to_f64()
    };
    let (width, routing_dim) = (24, 5);
    let gain = parameter("layers.0.attn_norm.weight");
    let normal = |x: &[f64]| -> Vec<f64> {
        let root = (x.iter().map(|v| v * v).sum::<f64>() / width as f64 + 1e-6).sqrt();
        x.iter().zip(&gain).map(|(v, gain)| v / root * gain).collect()
    };
    let product = |name: &str, row: usize, x: &[f64]| -> f64 {
        let matrix = parameter(&format!("layers.0.attn.{name}.weight"));
        matrix[row * width..][..width].iter().zip(x).map(|(w, x)| w * x).sum()
    };
    let text = normal(&parameter("embeddings.weight")[id as usize * width..][..width]);
    let anchor = normal(&parameter("anchor_embedding"));
    let score: f64 = (head * routing_dim..(head + 1) * routing_dim)
        .map(|i| product("routing_query_proj", i, &text) * product("routing_key_proj", i, &anchor))
        .sum();
    let null = product("null_proj", head, &text) + parameter("layers.0.attn.null_proj.bias")[head];
    null.exp() / (null.exp() + read as f64 * (scale * score).exp())
}

/// Without a null, the weights of what a token reads sum to 1; with one, they and the null's own weight do. The null's
/// weight is computed from the scores in the first layer. In every layer, what is missing to 1 must behave like the
/// weight of a softmax: raising the null's score by δ multiplies its odds by e^δ.
#[test]
fn routing_weights_sum_to_one() {
    let device = cpu();
    for (kind, scale) in [("march", 1.0), ("march_top_k", 0.7), ("march_no_null", 1.0)] {
        let mut case = Case::new(&device, &small(kind));
        let exact = Case::new(&Device::reference(), &small(kind));
        let (ids, policy) = (tokens(100, 37, 13), case.model.policy());
        let has_null = kind != "march_no_null";
        for layer in 0..3 {
            let all = traced(&case, &ids, layer);
            for (row, weights) in all.chunks(6).enumerate() {
                let seen = row / 4 / 16;
                let sum: f64 = weights.iter().map(|&w| f64::from(w)).sum();
                let read = weights.iter().filter(|&&w| w > 0.0).count();
                assert!(weights[seen..].iter().all(|&w| w == 0.0));
                assert_eq!(read, seen.min(policy.top_k.unwrap_or(seen)), "{kind}, layer {layer}, row {row}");
                match (seen, has_null) {
                    (0, _) => assert_eq!(sum, 0.0),
                    (_, false) => {
                        assert!((sum - 1.0).abs() < 1e-5, "{kind}, layer {layer}, row {row}: {sum}")
                    }
                    (_, true) => assert!(sum > 0.0 && sum < 1.0, "{kind}, layer {layer}, row {row}: {sum}"),
                }
                if layer == 0 && read > 0 {
                    // The first layer's keys are all equal; top-K keeps the newest.
                    assert!(weights[seen - read..seen].iter().all(|w| (w - weights[seen - 1]).abs() < 1e-6));
                }
                if layer == 0 && seen > 0 && has_null {
                    let (token, head) = (row / 4, row % 4);
                    let null = null_weight_of_the_first_layer(&exact, scale, ids[token], head, read);
                    assert!((sum + null - 1.0).abs() < 1e-5, "{kind}, row {row}: {sum} and {null}");
                }
            }
            if !has_null {
                continue;
            }
            let name = format!("model.layers.{layer}.attn.null_proj.bias");
            let at = case.model.layout().iter().position(|spec| spec.name == name).unwrap();
            let delta = 0.6f64;
            let raised = Tensor::full(&[4], delta, &device).unwrap();
            let before = case.parameters[at].clone();
            case.parameters[at].accumulate(&raised).unwrap();
            let after = traced(&case, &ids, layer);
            case.parameters[at] = before;
            for (row, (before, after)) in all.chunks(6).zip(after.chunks(6)).enumerate().skip(4 * 16) {
                let [before, after] =
                    [before, after].map(|weights| 1.0 - weights.iter().map(|&w| f64::from(w)).sum::<f64>());
                let odds = before / (1.0 - before) * delta.exp();
                let want = odds / (1.0 + odds);
                assert!((after - want).abs() < 1e-5, "{kind}, layer {layer}, row {row}: {after}, {want}");
            }
        }
    }
}

#[test]
fn every_parameter_gets_a_gradient() {
    let device = cpu();
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        let ids = tokens(2 * 60, 37, 14);
        let (_, gradients) = case.gradients(Batch { ids: &ids, rows: 2 }, &ids, &case.settings());
        for (spec, gradient) in case.model.layout().iter().zip(gradients) {
            let gradient = gradient.unwrap_or_else(|| panic!("{kind}: none for {}", spec.name));
            let norm = squared_norm(&[&gradient]).unwrap();
            assert!(norm.is_finite() && norm > 0.0, "{kind}: {} has squared norm {norm}", spec.name);
        }
    }
}

/// Also with activation recomputation, and with two threads as with one.
#[test]
fn the_same_seed_gives_the_same_bits() {
    for kind in KINDS {
        let run = |threads: usize, recompute: bool| {
            let options = CpuOptions { threads, ..Default::default() };
            let device = Device::cpu(options).unwrap();
            let case = Case::new(&device, &small(kind));
            let ids = tokens(2 * 60, 37, 15);
            let settings = Settings { recompute, ..case.settings() };
            let (loss, gradients) = case.gradients(Batch { ids: &ids, rows: 2 }, &ids, &settings);
            let gradients: Vec<Vec<f32>> = gradients.iter().flatten().map(|g| g.to_f32()).collect();
            (loss, gradients)
        };
        let first = run(2, false);
        assert!(first == run(2, false), "{kind}: again");
        assert!(first == run(2, true), "{kind}: recomputed");
    }
}

#[test]
fn the_first_values_are_as_they_should_be() {
    let model = Model::new(&small("march"));
    let count: usize = model.layout().iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
    assert_eq!(model.parameter_count(), count);
    for (i, spec) in model.layout().iter().enumerate() {
        let values = model.initial(i, 1);
        assert_eq!(values, model.initial(i, 1));
        match spec.init {
            Init::Constant(c) => assert!(values.iter().all(|&v| f64::from(v) == c)),
            Init::DecayRate => assert!(values.iter().all(|&v| (0.01..=16.0).contains(&v.exp()))),
            Init::TimeStep => {
                let step = |v: f32| f64::from(v).exp().ln_1p();
                assert!(values.iter().all(|&v| (0.00099..=0.1001).contains(&step(v))));
            }
            Init::Normal => {
                assert_ne!(values, model.initial(i, 2));
                if values.len() > 500 {
                    let mean = values.iter().sum::<f32>() / values.len() as f32;
                    let square = values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
                    assert!(mean.abs() < 0.05 && (square.sqrt() / 0.12 - 1.0).abs() < 0.15, "{}", spec.name);
                }
            }
        }
    }
    let names: Vec<&str> = model.layout().iter().map(|spec| spec.name.as_str()).collect();
    let mut unique = names.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), names.len());
}

/// What does not fit is refused with a reason, and the bank is as it was.
#[test]
fn requests_that_do_not_fit_are_refused() {
    let device = cpu();
    let case = Case::new(&device, &small("march"));
    let weights = case.weights();
    let mut bank = case.model.bank(case.model.policy()).unwrap();
    for (ids, part) in [(&[5, 37][..], "token id 37 at position 1"), (&[], "0 token ids")] {
        let batch = Batch::one(ids);
        let refused = case.model.extend(&weights, batch, &mut [&mut bank], None).unwrap_err();
        assert!(refused.to_string().contains(part), "{refused}");
    }
    assert_eq!(bank.timeline().position, 0);
    let zero = Policy { interval: Some(0), ..Policy::default() };
    assert!(case.model.bank(zero).is_err());
    let plain = Case::new(&device, &small("transformer"));
    let refused = plain.model.bank(Policy { interval: Some(4), ..Policy::default() }).unwrap_err();
    assert!(refused.to_string().contains("has no anchors"), "{refused}");
}

//! What the settings of the state bank promise, for every combination of them.

use march_lm::anchors::{Placement, Policy, Recording, Retention, Storage};
use march_lm::engine::Device;
use march_lm::engine::ops::adamw::squared_norm;
use march_lm::memory::StateBank;
use march_lm::model::{Batch, Model, ModelConfig, Settings};

use crate::common::{Case, assert_close, cpu, error, invariant, small, tokens};

/// Three layers; an anchor has 1,664 bytes in each.
const ANCHOR: usize = 3 * 1664;

/// Intervals × routing × retention × placement.
fn combinations() -> Vec<Policy> {
    let mut list = Vec::new();
    for (interval, min) in [(1, 1), (3, 2), (16, 4), (20, 4)] {
        for top_k in [None, Some(2)] {
            let budget = Retention::Budget(3 * ANCHOR + 100);
            for retention in [Retention::All, Retention::Fenwick, Retention::Recent(3), budget] {
                for placement in [Placement::Periodic, Placement::Adaptive(min)] {
                    let storage = Storage::F32;
                    list.push(Policy { interval: Some(interval), top_k, retention, placement, storage });
                }
            }
        }
    }
    list
}

/// Logits of one text that comes in calls of the given sizes (the last repeats), and the bank after it.
fn extend(
    case: &Case,
    ids: &[u32],
    policy: &Policy,
    calls: &[usize],
    watch: impl FnMut(&StateBank),
) -> (Vec<f64>, StateBank) {
    let mut bank = case.model.bank(policy.clone()).unwrap();
    bank.record(true).unwrap();
    let all = case.continued(&mut bank, ids, calls, watch);
    assert_eq!(bank.timeline().position, ids.len());
    (all, bank)
}

/// The forward pass with recorded anchors.
fn replay(case: &Case, batch: Batch<'_>, policy: &Policy, recordings: &[Recording]) -> Vec<f64> {
    let recordings = Some(recordings.to_vec());
    case.forward_with(batch, &Settings { policy: policy.clone(), recordings, ..Settings::default() })
}

/// Everything that a bank knows but its tensors.
fn known(bank: &StateBank) -> String {
    let ledgers: Vec<_> = bank.layers().iter().filter_map(|layer| layer.ledger()).collect();
    serde_json::to_string(&(bank.policy(), bank.timeline(), ledgers)).unwrap()
}

#[test]
fn decoding_is_prefill_is_the_forward_pass_for_every_combination() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let ids = tokens(150, 37, 3);
    for policy in combinations() {
        let (whole, bank) = extend(&case, &ids, &policy, &[150], |_| {});
        for calls in [&[1][..], &[64], &[128, 22], &[7, 50, 1, 1, 31]] {
            let (got, other) = extend(&case, &ids, &policy, calls, |_| {});
            assert!(got == whole, "{policy:?} {calls:?}: off by {:.1e}", error(&got, &whole));
            assert_eq!(known(&other), known(&bank), "{policy:?} {calls:?}");
        }
        let recording = bank.recording().unwrap();
        for length in [150, 61, 1] {
            let want = replay(&case, Batch::one(&ids[..length]), &policy, std::slice::from_ref(&recording));
            assert_close(&format!("{policy:?} {length}"), &whole[..length * 37], &want, 1e-5);
        }
        if !matches!(policy.retention, Retention::Budget(_)) {
            let want = case.forward(Batch::one(&ids), &policy);
            assert_close(&format!("{policy:?}, decided anew"), &whole, &want, 1e-5);
        }
    }
}

/// The same through the reference device, which computes by the equations.
#[test]
fn the_reference_device_agrees() {
    let device = invariant();
    let [case, exact] = [device, Device::reference()].map(|device| Case::new(&device, &small("march")));
    let ids = tokens(100, 37, 5);
    for policy in combinations().into_iter().filter(|policy| policy.interval == Some(16)) {
        let (got, bank) = extend(&case, &ids, &policy, &[9], |_| {});
        let (want, other) = extend(&exact, &ids, &policy, &[100], |_| {});
        assert_eq!(bank.recording(), other.recording(), "{policy:?}");
        assert_close(&format!("{policy:?}"), &got, &want, 1e-4);
    }
}

/// Two texts at different positions, with different policies, together as alone.
#[test]
fn decoding_does_not_depend_on_its_batch() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let texts = [tokens(120, 37, 8), tokens(120, 37, 9)];
    let all = combinations();
    for (a, b) in all.iter().zip(all.iter().skip(5).chain(&all[..5])) {
        let weights = case.weights();
        let mut banks = [a, b].map(|policy| case.model.bank(policy.clone()).unwrap());
        let [first, second] = &mut banks;
        case.model.extend(&weights, Batch::one(&texts[0][..13]), &mut [first], None).unwrap();
        case.model.extend(&weights, Batch::one(&texts[1][..40]), &mut [second], None).unwrap();
        // A fork goes on alone.
        let mut alone = banks.clone();
        let mut at = [13, 40];
        for count in [1, 1, 1, 30, 1, 17, 1] {
            let parts = [0, 1].map(|row| &texts[row][at[row]..at[row] + count]);
            let [first, second] = &mut banks;
            let ids = parts.concat();
            let batch = Batch { ids: &ids, rows: 2 };
            let both = case.model.extend(&weights, batch, &mut [first, second], None).unwrap();
            let both = both.to_f32();
            for (row, bank) in alone.iter_mut().enumerate() {
                let one = Batch::one(parts[row]);
                let one = case.model.extend(&weights, one, &mut [bank], None).unwrap();
                let one = one.to_f32();
                let together = &both[row * one.len()..(row + 1) * one.len()];
                assert!(together == one, "{a:?} beside {b:?}, row {row}, {count} tokens");
            }
            at = at.map(|at| at + count);
        }
        for (bank, alone) in banks.iter().zip(&alone) {
            assert_eq!(known(bank), known(alone));
        }
    }
}

/// Tokens read what is stored, wherever calls are cut; the anchors themselves read the exact state.
#[test]
fn stored_precision_is_what_every_token_reads() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let ids = tokens(150, 37, 4);
    let budget = Retention::Budget(3 * ANCHOR);
    for (interval, top_k, retention, placement) in [
        (3, None, Retention::All, Placement::Periodic),
        (16, Some(2), Retention::Fenwick, Placement::Adaptive(4)),
        (20, None, Retention::Recent(3), Placement::Periodic),
        (16, Some(1), budget, Placement::Adaptive(8)),
    ] {
        let policy = |storage| Policy { interval: Some(interval), top_k, retention, placement, storage };
        let (exact, full) = extend(&case, &ids, &policy(Storage::F32), &[150], |_| {});
        let mut bytes = vec![full.bytes()];
        for (storage, limit) in [(Storage::Bf16, 2e-2), (Storage::Int8, 5e-2)] {
            let policy = policy(storage);
            let (whole, bank) = extend(&case, &ids, &policy, &[150], |_| {});
            for calls in [&[1][..], &[64], &[11, 1, 64]] {
                let (got, other) = extend(&case, &ids, &policy, calls, |_| {});
                assert!(got == whole, "{policy:?} {calls:?}");
                assert_eq!(known(&other), known(&bank));
            }
            // A budget keeps other anchors where more of them fit, so that the texts are read otherwise.
            if retention != budget {
                let off = error(&whole, &exact);
                assert!(off > 0.0 && off < limit, "{policy:?}: {off:.1e}");
                bytes.push(bank.bytes());
            }
            if placement == Placement::Periodic {
                assert_eq!(bank.bytes(), case.model.memory_bytes(150, &policy));
                assert_eq!(bank.rollback_bytes(), case.model.rollback_bytes(150, &policy));
            }
        }
        assert!(bytes.windows(2).all(|pair| pair[0] > pair[1]), "{bytes:?}");
    }
}

#[test]
fn a_budget_is_never_exceeded() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let ids = tokens(400, 37, 6);
    for (interval, top_k, bytes, placement, storage) in [
        (1, None, ANCHOR, Placement::Periodic, Storage::F32),
        (1, Some(2), 4 * ANCHOR - 1, Placement::Adaptive(1), Storage::F32),
        (5, Some(4), 7 * ANCHOR + 1, Placement::Periodic, Storage::Int8),
        (7, None, 5 * ANCHOR, Placement::Adaptive(3), Storage::Bf16),
    ] {
        let retention = Retention::Budget(bytes);
        let policy = Policy { interval: Some(interval), top_k, retention, placement, storage };
        let room = bytes / case.model.anchor_bytes(&policy);
        let mut largest = 0;
        let (_, bank) = extend(&case, &ids, &policy, &[1], |bank| {
            let anchors: usize = bank.layers().iter().map(|layer| layer.anchors().1).sum();
            assert!(anchors <= bytes, "{policy:?}: {anchors} bytes");
            largest = largest.max(anchors);
            for layer in bank.layers() {
                let ledger = layer.ledger().unwrap();
                let kept = layer.anchors().0;
                assert_eq!(ledger.entries.len(), kept);
                assert_eq!(kept, room.min(bank.timeline().complete));
                let newest = ledger.anchors().last().map_or(0, |anchor| anchor.ordinal);
                assert_eq!(newest, bank.timeline().complete, "the newest is kept");
            }
        });
        assert_eq!(largest, room * case.model.anchor_bytes(&policy), "all of the room is used");
        if placement == Placement::Periodic {
            assert_eq!(bank.bytes(), case.model.memory_bytes(ids.len(), &policy));
            assert_eq!(bank.rollback_bytes(), case.model.rollback_bytes(ids.len(), &policy));
        }
        // What the timeline lists is in every layer.
        let timeline = bank.timeline();
        assert!(!timeline.kept.is_empty());
        for anchor in &timeline.kept {
            assert!(
                bank.layers().iter().all(|layer| layer.ledger().unwrap().anchors().any(|a| a == *anchor))
            );
        }
        let recording = bank.recording().unwrap();
        for (layer, evictions) in recording.evictions.iter().enumerate() {
            let dropped: usize = evictions.iter().map(|(_, list)| list.len()).sum();
            assert_eq!(dropped + bank.layers()[layer].anchors().0, recording.boundaries.len());
        }
    }
}

/// A bank that records nothing keeps no list that grows.
#[test]
fn notes_are_taken_only_where_asked_for() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let policy = Policy {
        interval: Some(2),
        retention: Retention::Budget(2 * ANCHOR),
        placement: Placement::Adaptive(1),
        ..Policy::default()
    };
    let weights = case.weights();
    let mut bank = case.model.bank(policy).unwrap();
    let ids = tokens(60, 37, 2);
    case.model.extend(&weights, Batch::one(&ids), &mut [&mut bank], None).unwrap();
    assert!(bank.recording().is_none());
    assert!(bank.layers().iter().all(|layer| layer.ledger().unwrap().evictions.is_empty()));
    let refused = bank.record(true).unwrap_err();
    assert!(refused.to_string().contains("requires an empty bank"), "{refused}");
    assert!(bank.record(false).is_ok());
}

/// A model of one layer over a real text: as many anchors as periodic ones, at most one in MIN tokens, and not periodic.
#[test]
fn adaptive_anchors_are_as_many_as_periodic_ones() {
    let device = invariant();
    let config = ModelConfig { num_hidden_layers: 1, vocab_size: 257, ..small("march") };
    let case = Case::new(&device, &config);
    let text = march_lm::data::builtin().bytes().map(u32::from);
    let ids: Vec<u32> = text.cycle().take(65536).collect();
    for (interval, min) in [(512, 32), (256, 1), (1000, 100)] {
        let policy = Policy {
            interval: Some(interval),
            top_k: Some(2),
            retention: Retention::Recent(2),
            placement: Placement::Adaptive(min),
            ..Policy::default()
        };
        let (_, bank) = extend(&case, &ids, &policy, &[4096], |_| {});
        let boundaries = bank.recording().unwrap().boundaries;
        let (count, wanted) = (boundaries.len() as f64, 65536.0 / interval as f64);
        assert!((count / wanted - 1.0).abs() < 0.1, "{policy:?}: {count} anchors, {wanted} wanted");
        let gaps: Vec<usize> = boundaries.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(boundaries.iter().all(|boundary| boundary % min == 0));
        assert!(
            gaps.iter().any(|gap| gap * 10 < interval * 8) && gaps.iter().any(|gap| gap * 10 > interval * 12)
        );
        println!(
            "adaptive:{min}, {interval}: {count} anchors, gaps {:?} ..= {:?}",
            gaps.iter().min(),
            gaps.iter().max()
        );
    }
}

/// Rows of a batch place their own anchors; training goes through them.
#[test]
fn training_with_adaptive_anchors() {
    let device = cpu();
    let case = Case::new(&device, &small("march"));
    // A text that repeats one token moves the state no more.
    let mut ids = tokens(3 * 70, 37, 14);
    ids[85..140].fill(5);
    let targets = tokens(3 * 70, 37, 15);
    let policy = Policy { interval: Some(9), placement: Placement::Adaptive(2), ..Policy::default() };
    let settings = |recompute| Settings { policy: policy.clone(), recompute, ..Settings::default() };
    let batch = Batch { ids: &ids, rows: 3 };
    let all = case.forward(batch, &policy);
    let mut recordings = Vec::new();
    for (row, ids) in ids.chunks(70).enumerate() {
        let one = case.forward(Batch::one(ids), &policy);
        assert_close("a row", &all[row * one.len()..(row + 1) * one.len()], &one, 1e-5);
        recordings.push(extend(&case, ids, &policy, &[70], |_| {}).1.recording().unwrap());
    }
    assert!(recordings.iter().any(|other| other.boundaries != recordings[0].boundaries), "{recordings:?}");
    assert_close("replayed", &replay(&case, batch, &policy, &recordings), &all, 1e-5);
    // Rows with different numbers of anchors, one with none.
    let by_hand = [vec![3, 40], vec![], vec![2, 5, 9, 66, 70]];
    let by_hand = by_hand.map(|boundaries| Recording { boundaries, evictions: Vec::new() });
    let all = replay(&case, batch, &policy, &by_hand);
    for (row, ids) in ids.chunks(70).enumerate() {
        let one = replay(&case, Batch::one(ids), &policy, &by_hand[row..=row]);
        assert_close("a row by hand", &all[row * one.len()..(row + 1) * one.len()], &one, 1e-5);
    }
    let (loss, gradients) = case.gradients(batch, &targets, &settings(false));
    for (spec, gradient) in case.model.layout().iter().zip(&gradients) {
        let norm = squared_norm(&[gradient.as_ref().unwrap()]).unwrap();
        assert!(norm.is_finite() && norm > 0.0, "{}: squared norm {norm}", spec.name);
    }
    let (again, others) = case.gradients(batch, &targets, &settings(true));
    assert_eq!(loss, again);
    for (a, b) in gradients.iter().zip(&others) {
        assert!(a.as_ref().unwrap().to_f32() == b.as_ref().unwrap().to_f32());
    }
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let device = cpu();
    let case = Case::new(&device, &small("march"));
    let own = case.model.policy();
    let refused = |policy: Policy| case.model.bank(policy).unwrap_err().to_string();
    let small_budget = Policy { retention: Retention::Budget(ANCHOR - 1), ..own.clone() };
    let message = refused(small_budget);
    assert!(message.contains("is too small") && message.contains(&ANCHOR.to_string()), "{message}");
    let int8 = Policy { retention: Retention::Budget(ANCHOR - 1), storage: Storage::Int8, ..own.clone() };
    assert!(case.model.bank(int8).is_ok());
    let far = Policy { placement: Placement::Adaptive(17), ..own.clone() };
    assert!(refused(far).contains("adaptive:16 or less"));
    let budget = Policy { retention: Retention::Budget(9 * ANCHOR), ..own.clone() };
    let weights = case.weights();
    let settings = Settings { policy: budget, ..Settings::default() };
    let ids = tokens(40, 37, 1);
    let message = case.model.forward(&weights, Batch::one(&ids), &settings, None).unwrap_err();
    assert!(message.to_string().contains("replay"), "{message}");
    let settings = Settings { recordings: Some(Vec::new()), ..settings };
    let message = case.model.forward(&weights, Batch::one(&ids), &settings, None).unwrap_err();
    assert!(message.to_string().contains("got 0 recordings, expected 1"), "{message}");
    let plain = Case::new(&device, &small("gated_deltanet"));
    let stored = Policy { storage: Storage::Int8, ..Policy::default() };
    assert!(plain.model.bank(stored).unwrap_err().to_string().contains("has no anchors"));
}

/// The figures of README.md: after 8 and 32 days of the demo's task, with its questions.
#[test]
fn the_demos_bytes_for_rollback() {
    let model = Model::new(&march_lm::Config::load("demo/march").unwrap().model);
    let sizes = [192, 624]
        .map(|n| (model.memory_bytes(n, &model.policy()), model.rollback_bytes(n, &model.policy())));
    assert_eq!(sizes, [(72_960, 23_040), (232_704, 78_336)]);
}

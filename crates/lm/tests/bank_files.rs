//! Banks as files: save, load, append, fork, roll back; damage and wrong tags.

mod places;
mod refusals;

use std::fs;
use std::path::{Path, PathBuf};

use march_lm::anchors::{Placement, Policy, Retention, Storage};
use march_lm::checkpoint::{self, Checkpoint, SHARD_BYTES};
use march_lm::engine::{Device, Tensor};
use march_lm::memory::{BankFile, BankTag, Rollback, StateBank};
use march_lm::model::{Batch, Model, Weights};
use march_lm::tokenizer::Tokenizer;
use proptest::prelude::*;

use crate::common::{Case, KINDS, invariant, small, tokens};

/// A model whose banks are tried.
struct Trial {
    device: Device,
    case: Case,
    weights: Weights,
    tag: BankTag,
}

impl Trial {
    fn new(device: &Device, kind: &str) -> Self {
        let case = Case::new(device, &small(kind));
        let weights = case.weights();
        let fingerprint = case.model.fingerprint(&case.parameters).unwrap();
        let tag = BankTag::new(case.model.config().mixer.model_type(), fingerprint, &Tokenizer::bytes());
        Self { device: device.clone(), case, weights, tag }
    }

    /// Logits of tokens that continue a bank.
    fn extend(&self, bank: &mut StateBank, ids: &[u32]) -> march_lm::Result<Vec<f32>> {
        let model = &self.case.model;
        let hidden = model.extend(&self.weights, Batch::one(ids), &mut [bank], None)?;
        Ok(model.logits(&self.weights, &hidden)?.to_f32())
    }

    /// The bank of a text, all at once.
    fn bank(&self, policy: &Policy, ids: &[u32]) -> StateBank {
        let mut bank = self.case.model.bank(policy.clone()).unwrap();
        if !ids.is_empty() {
            self.extend(&mut bank, ids).unwrap();
        }
        bank
    }

    /// Logits of a text that goes on one token at a time.
    fn decode(&self, bank: &mut StateBank, ids: &[u32]) -> Vec<f32> {
        ids.iter().flat_map(|&id| self.extend(bank, &[id]).unwrap()).collect()
    }

    fn save(&self, bank: &StateBank, path: &Path) {
        bank.save(path, &self.tag).unwrap();
    }

    fn append(&self, bank: &StateBank, path: &Path) {
        bank.append(None, path, &self.tag).unwrap();
    }

    fn load(&self, path: &Path) -> march_lm::Result<StateBank> {
        self.case.model.load_bank(&self.device, &BankFile::open(path)?, &self.tag, None)
    }

    fn refused(&self, path: &Path, tag: &BankTag, policy: Option<&Policy>) -> String {
        let loaded =
            BankFile::open(path).and_then(|file| self.case.model.load_bank(&self.device, &file, tag, policy));
        loaded.expect_err("it should be refused").to_string()
    }
}

/// A policy with other settings.
fn with(own: &Policy, interval: usize, top_k: Option<usize>, retention: Retention) -> Policy {
    let mut policy = own.clone();
    (policy.interval, policy.top_k, policy.retention) = (Some(interval), top_k, retention);
    policy
}

/// The policies that a kind is tried with.
fn policies(own: &Policy) -> Vec<Policy> {
    let mut list = vec![own.clone()];
    if own.interval.is_some() {
        let settings =
            [(1, None), (7, Some(3)), (16, Some(1)), (20, Some(2)), (23, None), (64, Some(50)), (1000, None)];
        for (interval, top_k) in settings {
            for retention in [Retention::All, Retention::Fenwick] {
                list.push(with(own, interval, top_k, retention));
            }
        }
    }
    list
}

/// Those and the ones under which going back is not exact.
fn all_policies(model: &Model) -> Vec<Policy> {
    let own = &model.policy();
    let mut list = policies(own);
    if own.interval.is_some() {
        for (retention, placement, storage) in [
            ("recent:3", "periodic", Storage::F32),
            ("budget:20kB", "periodic", Storage::F32),
            ("all", "adaptive:4", Storage::F32),
            ("all", "periodic", Storage::Bf16),
            ("fenwick", "periodic", Storage::Int8),
            ("budget:9kB", "adaptive:3", Storage::Int8),
        ] {
            let (retention, placement) = (retention.parse().unwrap(), placement.parse().unwrap());
            list.push(Policy { interval: Some(9), retention, placement, storage, ..own.clone() });
        }
    }
    list.retain(|policy| policy.placement == Placement::Periodic || model.config().mixer.places_adaptively());
    list
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bank.safetensors");
    (folder, path)
}

#[test]
fn save_load_continue_is_never_having_stopped() {
    let device = invariant();
    let (_folder, path) = folder();
    let next = tokens(40, 37, 2);
    for kind in KINDS {
        let trial = Trial::new(&device, kind);
        for policy in all_policies(&trial.case.model) {
            for length in [0, 1, 15, 16, 47, 130] {
                let mut bank = trial.bank(&policy, &tokens(length, 37, 1));
                trial.save(&bank, &path);
                let mut loaded = trial.load(&path).unwrap();
                let what = format!("{kind} {policy:?} {length}");
                assert_eq!((loaded.policy(), loaded.timeline()), (bank.policy(), bank.timeline()), "{what}");
                assert_eq!(loaded.bytes(), bank.bytes(), "{what}");
                let mut again = loaded.clone();
                let want = trial.decode(&mut bank, &next);
                assert!(trial.decode(&mut loaded, &next) == want, "{what}");
                assert!(trial.extend(&mut again, &next[..1]).unwrap() == want[..37], "{what}");
                // Saved again over the file that it still reads from.
                trial.save(&again, &path);
                let mut third = trial.load(&path).unwrap();
                assert!(trial.decode(&mut third, &next[1..]) == want[37..], "{what}");
                assert!(trial.decode(&mut again, &next[1..]) == want[37..], "{what}");
            }
        }
    }
}

#[test]
fn appended_is_saved() {
    let device = invariant();
    let (_folder, path) = folder();
    let ids = tokens(330, 37, 3);
    for kind in KINDS {
        let trial = Trial::new(&device, kind);
        for policy in all_policies(&trial.case.model) {
            let what = format!("{kind} {policy:?}");
            let _ = fs::remove_file(&path);
            // One goes on in memory, the other from what is in the file.
            let mut bank = trial.bank(&policy, &[]);
            let (mut from, mut sizes) = (0, Vec::new());
            for to in [1, 130, 131, 200, 200, 290] {
                if to > from {
                    trial.extend(&mut bank, &ids[from..to]).unwrap();
                }
                from = to;
                let filed = if to == 1 { bank.clone() } else { trial.load(&path).unwrap() };
                for mut bank in [filed, bank.clone()] {
                    // Of the file's bank the rest of the text is still to come.
                    let at = bank.timeline().position;
                    if at < to {
                        trial.extend(&mut bank, &ids[at..to]).unwrap();
                    }
                    trial.append(&bank, &path);
                    let file = BankFile::open(&path).unwrap();
                    file.verify().unwrap();
                    let mut loaded = trial.load(&path).unwrap();
                    assert_eq!(loaded.timeline(), bank.timeline(), "{what}");
                    assert_eq!(loaded.bytes(), bank.bytes(), "{what}");
                    let next = &ids[to..to + 40];
                    assert!(trial.decode(&mut loaded, next) == trial.decode(&mut bank, next), "{what}");
                    sizes.push((file.appended(), file.bytes()));
                }
            }
            let whole = path.with_extension("whole");
            trial.save(&bank, &whole);
            let whole = fs::metadata(whole).unwrap().len() as usize;
            assert!(sizes.iter().all(|&(_, size)| size < 2 * whole + 8192), "{what}: {sizes:?}, {whole}");
            let grows = policy.retention == Retention::All && policy.interval.is_some_and(|c| c < 10);
            if kind.starts_with("march") && grows {
                assert!(sizes.iter().any(|&(times, _)| times > 0), "{what}: {sizes:?}");
            }
        }
    }
}

/// A file of another text is replaced; so is one that has what the bank has left.
#[test]
fn what_is_no_beginning_is_replaced() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (_folder, path) = folder();
    let policy = Policy { interval: Some(4), ..trial.case.model.policy() };
    let (ids, next) = (tokens(200, 37, 1), tokens(9, 37, 2));
    let mut bank = trial.bank(&policy, &ids);
    let other = trial.bank(&policy, &tokens(180, 37, 5));
    let mut back = bank.clone();
    back.rollback(30).unwrap();
    let mut top = bank.clone();
    trial.extend(&mut top, &next).unwrap();
    for start in [other, top] {
        for _ in 0..2 {
            trial.save(&start, &path);
            trial.append(&back, &path);
            assert_eq!(BankFile::open(&path).unwrap().appended(), 0);
            let (mut loaded, mut want) = (trial.load(&path).unwrap(), back.clone());
            assert!(trial.decode(&mut loaded, &next) == trial.decode(&mut want, &next));
        }
    }
    // And what is: after going back, the same way again, and another.
    trial.save(&back, &path);
    trial.append(&bank, &path);
    trial.extend(&mut bank, &next).unwrap();
    trial.append(&bank, &path);
    assert_eq!(BankFile::open(&path).unwrap().appended(), 2);
    assert_eq!(trial.load(&path).unwrap().timeline(), bank.timeline());
}

#[test]
fn other_tools_read_the_file() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (_folder, path) = folder();
    let bank = trial.bank(&trial.case.model.policy(), &tokens(70, 37, 1));
    trial.save(&bank, &path);
    let bytes = fs::read(&path).unwrap();
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = metadata.metadata().as_ref().unwrap();
    assert_eq!(metadata["format"], "march state bank");
    assert_eq!(metadata["interval"], "16");
    assert_eq!(metadata["storage"], "f32");
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("layers.2.anchors.states").unwrap().shape(), [4, 4, 6, 9]);
    assert_eq!(file.tensor("layers.0.chunk_key").unwrap().shape(), [1, 6, 12]);
    let file = BankFile::open(&path).unwrap();
    file.verify().unwrap();
    assert_eq!(file.tag(), &trial.tag);
    let states = file.parts().into_iter().find(|part| part.name == "layers.2.anchors.states").unwrap();
    assert_eq!((states.dtype.as_str(), states.bytes), ("F32", 4 * 4 * 6 * 9 * 4));
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn a_fork_goes_its_own_way() {
    let device = invariant();
    let (_folder, path) = folder();
    let (ids, [one, other]) = (tokens(100, 37, 1), [5, 6].map(|seed| tokens(50, 37, seed)));
    for kind in KINDS {
        let trial = Trial::new(&device, kind);
        let policy = trial.case.model.policy();
        let want = [&one, &other].map(|next| trial.decode(&mut trial.bank(&policy, &ids), next));
        let bank = trial.bank(&policy, &ids);
        trial.save(&bank, &path);
        for bank in [bank, trial.load(&path).unwrap()] {
            let (mut first, mut second) = (bank.clone(), bank);
            let mut got = [Vec::new(), Vec::new()];
            for (a, b) in one.iter().zip(&other) {
                got[0].extend(trial.extend(&mut first, &[*a]).unwrap());
                got[1].extend(trial.extend(&mut second, &[*b]).unwrap());
            }
            assert!(got == want, "{kind}");
        }
    }
}

#[test]
fn rolled_back_is_never_having_gone_further() {
    let device = invariant();
    let (_folder, path) = folder();
    let (ids, next) = (tokens(150, 37, 1), tokens(45, 37, 2));
    for kind in ["march", "march_top_k", "march_no_null"] {
        let trial = Trial::new(&device, kind);
        for policy in policies(&trial.case.model.policy()) {
            let whole = trial.bank(&policy, &ids);
            trial.save(&whole, &path);
            let filed = trial.load(&path).unwrap();
            let kept = whole.timeline().kept.clone();
            for anchor in kept.iter().step_by(kept.len() / 9 + 1) {
                let mut then = trial.bank(&policy, &ids[..anchor.position]);
                let (timeline, at_once) = (then.timeline().clone(), trial.extend(&mut then.clone(), &next));
                let (want, at_once) = (trial.decode(&mut then, &next), at_once.unwrap());
                for mut bank in [whole.clone(), filed.clone()] {
                    let what = format!("{kind} {policy:?} back to {anchor:?}");
                    assert_eq!(bank.rollback(anchor.ordinal).unwrap(), Rollback::Exact, "{what}");
                    assert_eq!(bank.timeline().position, timeline.position, "{what}");
                    assert_eq!(bank.timeline().kept, timeline.kept, "{what}");
                    trial.save(&bank, &path);
                    assert!(trial.extend(&mut bank.clone(), &next).unwrap() == at_once, "{what}");
                    assert!(trial.decode(&mut bank, &next) == want, "{what}");
                    assert!(trial.decode(&mut trial.load(&path).unwrap(), &next) == want, "{what}");
                    // Once more, from what was added since.
                    if let Some(later) = bank.timeline().kept.iter().find(|a| a.position > anchor.position) {
                        let (later, added) = (*later, later.position - anchor.position);
                        assert_eq!(bank.rollback(later.ordinal).unwrap(), Rollback::Exact);
                        assert!(trial.decode(&mut bank, &next[added..]) == want[37 * added..], "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn anchors_that_are_not_kept_are_refused_by_name() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let policy = Policy { interval: Some(8), retention: Retention::Fenwick, ..trial.case.model.policy() };
    let mut bank = trial.bank(&policy, &tokens(8 * 7 + 3, 37, 1));
    let before = bank.timeline().clone();
    let mut refused = |ordinal| bank.rollback(ordinal).unwrap_err().to_string();
    assert_eq!(refused(5), "anchor 5 is no longer kept; the bank keeps 4, 6–7");
    assert_eq!(refused(8), "anchor 8 does not exist; the bank keeps 4, 6–7");
    assert_eq!(refused(0), "anchor 0 does not exist; the bank keeps 4, 6–7");
    assert_eq!(*bank.timeline(), before);
    for kind in KINDS.into_iter().filter(|kind| !kind.starts_with("march")) {
        let trial = Trial::new(&device, kind);
        let mut bank = trial.bank(&Policy::default(), &tokens(40, 37, 1));
        let refused = bank.rollback(1).unwrap_err().to_string();
        assert_eq!(refused, "no anchor 1 to roll back to: the bank keeps no anchors");
    }
}

#[test]
fn fingerprints_tell_models_apart() {
    let device = invariant();
    let (folder, _) = folder();
    let mut seen = Vec::new();
    for kind in KINDS {
        let Case { model, parameters, .. } = Case::new(&device, &small(kind));
        let own = model.fingerprint(&parameters).unwrap();
        assert!(own.len() == 64 && !seen.contains(&own));
        let path = folder.path().join(kind);
        checkpoint::save(&path, model.config(), model.layout(), SHARD_BYTES, |i| Ok(parameters[i].to_f32()))
            .unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(model.checkpoint_fingerprint(&checkpoint).unwrap(), own);
        seen.push(own);
    }
    // One number of one tensor.
    let Case { model, mut parameters, .. } = Case::new(&device, &small("march"));
    let mut numbers = parameters[4].to_f32();
    *numbers.last_mut().unwrap() += 1e-3;
    parameters[4] = Tensor::from_slice(&numbers, &model.layout()[4].shape, &device).unwrap();
    assert!(!seen.contains(&model.fingerprint(&parameters).unwrap()));
}

/// One thing that is done to banks.
#[derive(Clone, Debug)]
enum Operation {
    /// So many more tokens.
    Step(usize),
    /// Into one of a few files.
    Save(usize),
    /// Into one of them, which may hold a part of it.
    Append(usize),
    /// From one of them, if it is there.
    Load(usize),
    /// Another bank goes on from here as well.
    Fork,
    /// The next of the banks.
    Turn,
    /// To one of the kept anchors, if there is one; the number may also name an evicted one.
    Rollback(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (1usize..40).prop_map(Operation::Step),
        2 => (0usize..3).prop_map(Operation::Save),
        3 => (0usize..3).prop_map(Operation::Append),
        2 => (0usize..3).prop_map(Operation::Load),
        1 => Just(Operation::Fork),
        1 => Just(Operation::Turn),
        2 => (0usize..12).prop_map(Operation::Rollback),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Beside every bank stands the list of calls that it should be the result of: a fresh bank after these calls
    /// gives the same logits, bit for bit. Retention evicts; where going back is not exact, it is tried and undone.
    #[test]
    fn any_sequence_of_operations(
        kind in 0..KINDS.len(),
        interval in prop_oneof![Just(1usize), Just(5), Just(16), Just(24)],
        top_k in prop_oneof![Just(None), Just(Some(2usize))],
        retention in prop_oneof![
            Just(Retention::All), Just(Retention::Fenwick), Just(Retention::Recent(3)), Just(Retention::Budget(15_000))
        ],
        adaptive in any::<bool>(),
        storage in prop_oneof![3 => Just(Storage::F32), 1 => Just(Storage::Bf16), 1 => Just(Storage::Int8)],
        operations in prop::collection::vec(operation(), 1..14),
        seed in any::<u64>(),
    ) {
        let device = invariant();
        let trial = Trial::new(&device, KINDS[kind]);
        let mut policy = trial.case.model.policy();
        let mut adaptive = adaptive;
        // A layer of Gated DeltaNet without anchors cannot go back.
        let goes_back = KINDS[kind] != "hybrid_anchors";
        if policy.interval.is_some() {
            policy = Policy { storage, ..with(&policy, interval, top_k, retention) };
            adaptive &= trial.case.model.config().mixer.places_adaptively();
            if adaptive {
                policy.placement = Placement::Adaptive(interval.min(3));
            }
        }
        let (folder, _) = folder();
        let file = |number: usize| folder.path().join(format!("{number}.bank"));
        let mut banks: Vec<(StateBank, Vec<Vec<u32>>)> = vec![(trial.bank(&policy, &[]), vec![])];
        let mut files: [Option<Vec<Vec<u32>>>; 3] = [None, None, None];
        for (i, operation) in operations.into_iter().enumerate() {
            let (bank, calls) = banks.last_mut().unwrap();
            match operation {
                Operation::Step(count) => {
                    let ids = tokens(count, 37, seed.wrapping_add(i as u64));
                    trial.extend(bank, &ids).unwrap();
                    calls.push(ids);
                }
                Operation::Save(number) => {
                    trial.save(bank, &file(number));
                    files[number] = Some(calls.clone());
                }
                Operation::Append(number) => {
                    trial.append(bank, &file(number));
                    files[number] = Some(calls.clone());
                }
                Operation::Load(number) => {
                    if let Some(saved) = &files[number] {
                        *bank = trial.load(&file(number)).unwrap();
                        *calls = saved.clone();
                    }
                }
                Operation::Fork => {
                    let fork = (bank.clone(), calls.clone());
                    banks.push(fork);
                }
                Operation::Turn => banks.rotate_right(1),
                Operation::Rollback(ordinal) => {
                    let kept = bank.timeline().kept.iter().find(|anchor| anchor.ordinal == ordinal).copied();
                    let before = bank.clone();
                    let result = bank.rollback(ordinal);
                    let kept = kept.filter(|_| goes_back);
                    prop_assert_eq!(result.is_ok(), kept.is_some());
                    if let (Ok(Rollback::Approximate(_)), Some(anchor)) = (&result, kept) {
                        let plain = matches!(retention, Retention::All | Retention::Fenwick);
                        prop_assert!(!plain || adaptive || storage != Storage::F32);
                        prop_assert_eq!(bank.timeline().position, anchor.position);
                        // It goes on, though not as it did.
                        trial.extend(bank, &[7, 8, 9]).unwrap();
                        *bank = before;
                    } else if let Some(anchor) = kept {
                        prop_assert_eq!(result.unwrap(), Rollback::Exact);
                        let mut left = anchor.position;
                        calls.iter_mut().for_each(|call| {
                            call.truncate(left);
                            left -= call.len();
                        });
                        calls.retain(|call| !call.is_empty());
                    }
                }
            }
            let (bank, calls) = banks.last().unwrap();
            let mut fresh = trial.bank(&policy, &[]);
            calls.iter().for_each(|call| { trial.extend(&mut fresh, call).unwrap(); });
            prop_assert_eq!(bank.timeline().position, fresh.timeline().position);
            prop_assert_eq!(&bank.timeline().kept, &fresh.timeline().kept);
            prop_assert_eq!(bank.timeline().complete, fresh.timeline().complete);
            for probe in [&[3][..], &[1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]] {
                let got = trial.extend(&mut bank.clone(), probe).unwrap();
                prop_assert!(got == trial.extend(&mut fresh.clone(), probe).unwrap());
            }
        }
    }
}

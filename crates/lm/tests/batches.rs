//! Many sequences in one call: each has the bits that it has alone, whatever the others do.

use march_lm::anchors::{Placement, Policy};
use march_lm::engine::{CpuOptions, Device, Products};
use march_lm::generate::{Inference, Limits, Sampling, Session, Text};
use march_lm::memory::StateBank;
use march_lm::model::Part;
use march_lm::tokenizer::Tokenizer;
use proptest::prelude::*;

use crate::common::{Case, KINDS, invariant, small, tokens};

/// Whether anchors can be placed as the policy says.
fn can_place(case: &Case, policy: &Policy) -> bool {
    policy.placement == Placement::Periodic || case.model.config().mixer.places_adaptively()
}

/// Policies that a model can follow: its own, and for models with anchors every kind of placement, retention and storage.
fn policies(case: &Case) -> Vec<Policy> {
    let own = case.model.policy();
    let mut list = vec![own.clone()];
    if own.interval.is_some() {
        let budget = 3 * case.model.anchor_bytes(&own);
        for settings in [
            "interval=7 top-k=2".to_string(),
            "interval=5 retention=fenwick storage=bf16".to_string(),
            "interval=16 retention=recent:2 storage=int8".to_string(),
            "interval=9 placement=adaptive:3".to_string(),
            format!("interval=6 retention=budget:{budget}"),
            format!("interval=11 placement=adaptive:4 retention=budget:{budget} top-k=1"),
        ] {
            list.push(own.with(&settings).unwrap());
        }
    }
    list.retain(|policy| can_place(case, policy));
    list
}

/// The last layer of a sequence's next tokens, alone.
fn alone(case: &Case, bank: &mut StateBank, ids: &[u32]) -> Vec<f32> {
    let weights = case.weights();
    let hidden = case.model.step(&weights, &mut [Part::new(ids, bank)]).unwrap();
    hidden.to_f32()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Random ragged schedules: in each call some of the sequences, each with some tokens.
    #[test]
    fn a_sequence_does_not_depend_on_the_others(
        kind in 0..KINDS.len(),
        seed in 0u64..1000,
        calls in prop::collection::vec(prop::collection::vec(0usize..40, 2..6), 1..6),
    ) {
        let options = CpuOptions { threads: 2, products: Products::BatchInvariant, ..Default::default() };
        let device = Device::cpu(options).unwrap();
        let case = Case::new(&device, &small(KINDS[kind]));
        let policies = policies(&case);
        let rows = 5;
        let policy = |row: usize| policies[(row + seed as usize) % policies.len()].clone();
        let mut together: Vec<_> = (0..rows).map(|row| case.model.bank(policy(row)).unwrap()).collect();
        let mut apart: Vec<_> = (0..rows).map(|row| case.model.bank(policy(row)).unwrap()).collect();
        let weights = case.weights();
        for (call, counts) in calls.iter().enumerate() {
            // A count of 0 leaves the sequence out of the call; some prompts are long beside single tokens.
            let ids: Vec<Vec<u32>> = counts
                .iter()
                .enumerate()
                .map(|(row, &n)| tokens(if n > 36 { 4 * n } else { n }, 37, seed + (10 * call + row) as u64))
                .collect();
            let mut parts: Vec<_> = ids
                .iter()
                .zip(&mut together)
                .filter(|(ids, _)| !ids.is_empty())
                .map(|(ids, bank)| Part::new(ids, bank))
                .collect();
            if parts.is_empty() {
                continue;
            }
            let hidden = case.model.step(&weights, &mut parts).unwrap().to_f32();
            let mut want = Vec::new();
            for (ids, bank) in ids.iter().zip(&mut apart).filter(|(ids, _)| !ids.is_empty()) {
                want.extend(alone(&case, bank, ids));
            }
            prop_assert!(hidden == want, "{}: call {call} of {calls:?}", KINDS[kind]);
        }
        for (together, apart) in together.iter().zip(&apart) {
            prop_assert_eq!(together.timeline(), apart.timeline());
            prop_assert_eq!(together.bytes(), apart.bytes());
        }
    }
}

/// A text of `count` tokens that a session writes, one of several in the same steps.
fn write(inference: &Inference, seeds: &[u64], count: usize) -> Vec<String> {
    let tokenizer = Tokenizer::bytes();
    let mut sessions: Vec<Session> = seeds
        .iter()
        .map(|&seed| {
            let model = inference.model();
            let sampling = Sampling { seed, temperature: 0.9, ..Sampling::default() };
            let mut session = Session::new(Text::new(model.bank(model.policy()).unwrap()), sampling).unwrap();
            session.push(&tokens(3 + 61 * (seed as usize % 3), 37, seed));
            session.begin(&tokenizer, Limits { max_tokens: count, stop: vec!["\u{7}\u{7}".into()] }).unwrap();
            session
        })
        .collect();
    let mut texts = vec![String::new(); seeds.len()];
    let mut ended = vec![false; seeds.len()];
    while ended.iter().any(|ended| !ended) {
        // Sessions leave the batch when they are done; prompts and single tokens share a step.
        let mut running: Vec<_> = sessions
            .iter_mut()
            .zip(&ended)
            .filter(|(_, ended)| !**ended)
            .map(|(session, _)| session)
            .collect();
        inference.step(&mut running).unwrap();
        for ((session, text), ended) in sessions.iter_mut().zip(&mut texts).zip(&mut ended) {
            if !*ended && session.is_ready() {
                let wrote = session.advance(&tokenizer).unwrap();
                *text += &wrote.text;
                *ended = wrote.ended.is_some();
            }
        }
    }
    texts
}

#[test]
fn sessions_write_together_what_each_writes_alone() {
    let device = invariant();
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        // Slices of 64 tokens: log-linear models round by where a prompt is cut, so the cuts are the same here.
        let inference = Inference::new(&case.model, &case.parameters).with_call_tokens(64);
        let seeds = [1, 2, 3, 4, 5];
        let together = write(&inference, &seeds, 20);
        let apart: Vec<String> = seeds.iter().flat_map(|&seed| write(&inference, &[seed], 20)).collect();
        assert_eq!(together, apart, "{kind}");
    }
}

/// Several threads use one model at once and get what one gets.
#[test]
fn threads_share_a_model() {
    fn shared<T: Send + Sync>(_: &T) {}
    let options = CpuOptions { threads: 2, products: Products::BatchInvariant, ..Default::default() };
    let device = Device::cpu(options).unwrap();
    for kind in ["march", "gated_deltanet", "transformer", "memory_caching"] {
        let case = Case::new(&device, &small(kind));
        let inference = Inference::new(&case.model, &case.parameters);
        shared(&case.model);
        shared(&inference);
        let want = [write(&inference, &[1, 2, 3], 30), write(&inference, &[4, 5], 30)];
        let got = std::thread::scope(|scope| {
            let tasks = [
                scope.spawn(|| write(&inference, &[1, 2, 3], 30)),
                scope.spawn(|| write(&inference, &[4, 5], 30)),
            ];
            tasks.map(|task| task.join().unwrap())
        });
        assert_eq!(got, want, "{kind}");
    }
}

/// A fork shares what came before: appending to it copies at most the open block of keys and values.
#[test]
fn a_fork_copies_at_most_one_block() {
    let device = invariant();
    let case = Case::new(&device, &small("transformer"));
    let mut bank = case.model.bank(Policy::default()).unwrap();
    let text = tokens(5000, 37, 1);
    alone(&case, &mut bank, &text);
    let whole = bank.bytes();
    let mut fork = bank.clone();
    let before = device.live_bytes();
    alone(&case, &mut fork, &[1]);
    let copied = device.live_bytes() - before;
    // Buffers have room to grow: twice a block of keys and values in each of three layers.
    let block = 2 * 256 * 24 * size_of::<f32>() * 3;
    assert!(copied <= 2 * block, "{copied} bytes copied; a block has {block}, the cache {whole}");
    assert!(2 * block < whole / 4);
    // Both go on as if the other were not there.
    let mut again = case.model.bank(Policy::default()).unwrap();
    alone(&case, &mut again, &text);
    assert!(alone(&case, &mut bank, &[2, 3]) == alone(&case, &mut again, &[2, 3]));
}

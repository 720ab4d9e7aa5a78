//! Requests in batches: every answer has the bits of its sequence alone, whatever is shared and whatever runs beside it.

use std::ops::ControlFlow;

use march_lab::eval::{Answer, Encoded, Event, Scheduler, Scored};
use march_lm::anchors::Policy;
use march_lm::engine::ops::cross_entropy::IGNORE;
use march_lm::engine::{CpuOptions, Device, Products};
use march_lm::generate::{Generator, Inference, Limits, Sampling};
use march_lm::model::Part;
use march_lm::tokenizer::Tokenizer;
use proptest::prelude::*;

use crate::common::{Case, KINDS, small, tokens};

fn device(threads: usize) -> Device {
    Device::cpu(CpuOptions { threads, products: Products::BatchInvariant, ..Default::default() }).unwrap()
}

/// All answers, in the order of the requests.
fn answers(
    case: &Case,
    policy: &Policy,
    requests: &[Encoded],
    set: impl Fn(&mut Scheduler<'_>),
) -> Vec<Answer> {
    let tokenizer = Tokenizer::bytes();
    let inference = Inference::new(&case.model, &case.parameters);
    let mut scheduler = Scheduler::new(inference, &tokenizer, policy);
    set(&mut scheduler);
    let numbered: Vec<(usize, Encoded)> = requests.iter().cloned().enumerate().collect();
    let mut all = vec![None; requests.len()];
    let finished = scheduler.run(&numbered, &mut |event| {
        let Event::Answered(number, answer) = event else { return Ok(ControlFlow::Continue(())) };
        assert!(all[number].replace(answer).is_none(), "request {number} was answered twice");
        Ok(ControlFlow::Continue(()))
    });
    assert!(finished.unwrap());
    all.into_iter().map(Option::unwrap).collect()
}

/// ln p of a continuation: the whole sequence in one call, alone.
fn scored_in_one_call(case: &Case, policy: &Policy, context: &[u32], continuation: &[u32]) -> Scored {
    let inputs = [context, &continuation[..continuation.len() - 1]].concat();
    let targets = [&vec![IGNORE; context.len() - 1][..], continuation].concat();
    let mut bank = case.model.bank(policy.clone()).unwrap();
    let inference = Inference::new(&case.model, &case.parameters);
    let losses = inference.losses(&mut [Part::new(&inputs, &mut bank)], &targets).unwrap();
    let mut scored = Scored::NONE;
    for ((nll, greedy), target) in losses.nll.iter().zip(&losses.greedy).zip(&targets) {
        if *target != IGNORE {
            scored.loglikelihood -= f64::from(*nll);
            scored.is_greedy &= greedy == target;
            scored.tokens += 1;
        }
    }
    scored
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn scores_have_the_bits_of_each_sequence_alone(
        kind in 0..KINDS.len(),
        seed in 0u64..1000,
        shapes in prop::collection::vec((1usize..90, prop::collection::vec(1usize..30, 1..5)), 1..7),
    ) {
        let device = device(2);
        let case = Case::new(&device, &small(KINDS[kind]));
        let own = case.model.policy();
        let policy = match own.interval {
            Some(_) if seed % 3 == 1 => own.with("interval=7 top-k=2 storage=bf16").unwrap(),
            Some(_) if seed % 3 == 2 => own.with("interval=9 placement=adaptive:3 retention=fenwick").unwrap(),
            _ => own.clone(),
        };
        // Adaptive placement needs anchors in the first layer, which a stack may not have there.
        let policy = if case.model.check_policy(&policy).is_ok() { policy } else { own };
        let mut requests = Vec::new();
        let mut want = Vec::new();
        for (i, (length, continuations)) in shapes.iter().enumerate() {
            let context = tokens(*length, 37, seed + i as u64);
            let continuations: Vec<Vec<u32>> = continuations
                .iter()
                .enumerate()
                .map(|(j, &n)| tokens(n, 37, seed + (100 * i + j) as u64))
                .collect();
            want.push(Answer::Loglikelihood(
                continuations.iter().map(|one| scored_in_one_call(&case, &policy, &context, one)).collect(),
            ));
            requests.push(Encoded::Loglikelihood { context, continuations });
            let text = tokens(length + 3, 37, seed + 50 + i as u64);
            want.push(Answer::LoglikelihoodRolling(scored_in_one_call(&case, &policy, &[5], &text)));
            requests.push(Encoded::Rolling { prefix: 5, text });
        }
        prop_assert_eq!(&answers(&case, &policy, &requests, |_| {}), &want);
        prop_assert_eq!(&answers(&case, &policy, &requests, |s| s.share_contexts = false), &want);
        prop_assert_eq!(&answers(&case, &policy, &requests, |s| s.sequences = 3), &want);
    }
}

/// Generated texts join and leave the batch; each is what a generator writes alone.
#[test]
fn texts_are_those_that_are_generated_alone() {
    let device = device(2);
    for kind in KINDS {
        let mut config = small(kind);
        config.vocab_size = 257;
        let case = Case::new(&device, &config);
        let (policy, tokenizer) = (case.model.policy(), Tokenizer::bytes());
        let mut requests = Vec::new();
        let mut want = Vec::new();
        for i in 0..7u64 {
            let prompt = tokens(1 + 13 * i as usize % 70, 257, i);
            let (max_tokens, until) = (5 + 3 * i as usize, vec!["e".to_string(), "\u{FFFD}\u{FFFD}".into()]);
            let bank = case.model.bank(policy.clone()).unwrap();
            let mut generator =
                Generator::new(&case.model, &case.parameters, bank, Sampling::greedy()).unwrap();
            generator.read(&prompt, &mut |_| ControlFlow::Continue(())).unwrap();
            let mut text = String::new();
            let limits = Limits { max_tokens, stop: until.clone() };
            let mut show = |piece: &str| {
                text += piece;
                ControlFlow::Continue(())
            };
            generator.write(&tokenizer, &limits, &mut show).unwrap();
            want.push(Answer::GenerateUntil(text));
            requests.push(Encoded::Generate { prompt, until, max_tokens });
        }
        for sequences in [1, 2, 64] {
            assert_eq!(answers(&case, &policy, &requests, |s| s.sequences = sequences), want, "{kind}");
        }
    }
}

/// A run that was stopped continues with what is left.
#[test]
fn a_stop_loses_nothing_that_was_taken() {
    let device = device(1);
    let case = Case::new(&device, &small(KINDS[0]));
    let policy = case.model.policy();
    let requests: Vec<(usize, Encoded)> =
        (0..9).map(|i| (i, Encoded::Rolling { prefix: 1, text: tokens(600 + i, 37, i as u64) })).collect();
    let tokenizer = Tokenizer::bytes();
    let inference = Inference::new(&case.model, &case.parameters);
    let scheduler = Scheduler::new(inference, &tokenizer, &policy);
    let mut taken = Vec::new();
    let finished = scheduler
        .run(&requests, &mut |event| {
            let Event::Answered(number, _) = event else { return Ok(ControlFlow::Continue(())) };
            taken.push(number);
            Ok(if taken.len() == 4 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })
        .unwrap();
    assert!(!finished && taken.len() == 4);
    let left: Vec<_> = requests.into_iter().filter(|(number, _)| !taken.contains(number)).collect();
    let mut rest = Vec::new();
    let finished = scheduler.run(&left, &mut |event| {
        let Event::Answered(number, _) = event else { return Ok(ControlFlow::Continue(())) };
        rest.push(number);
        Ok(ControlFlow::Continue(()))
    });
    assert!(finished.unwrap());
    taken.extend(rest);
    taken.sort_unstable();
    assert_eq!(taken, (0..9).collect::<Vec<_>>());
}

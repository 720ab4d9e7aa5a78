//! A generator beside the plain loop, forks, and what a stop string leaves in memory.

mod sampling;
mod stream;

use std::ops::ControlFlow;

use march_lm::generate::{
    GenerationSummary, Generator, Limits, PIECE_TOKENS, Sampling, StopReason, Text, call_tokens,
};
use march_lm::memory::{BankFile, BankTag, Rollback};
use march_lm::model::Batch;
use march_lm::tokenizer::Tokenizer;

use crate::common::{Case, KINDS, assert_close, invariant, small, tokens};

const GREEDY: Sampling = Sampling {
    temperature: 0.0,
    top_k: None,
    top_p: 1.0,
    repetition_penalty: 1.0,
    penalty_window: 0,
    seed: 0,
};

fn generator(case: &Case, sampling: Sampling) -> Generator {
    let bank = case.model.bank(case.model.policy()).unwrap();
    Generator::new(&case.model, &case.parameters, bank, sampling).unwrap()
}

fn read(generator: &mut Generator, ids: &[u32]) {
    assert!(generator.read(ids, &mut |_| ControlFlow::Continue(())).unwrap());
}

fn next(generator: &mut Generator, count: usize) -> Vec<u32> {
    (0..count).map(|_| generator.next_token().unwrap()).collect()
}

/// The most probable next tokens, each from all of the text from its beginning.
fn plain(case: &Case, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut all = prompt.to_vec();
    for _ in 0..count {
        let logits = case.forward(Batch::one(&all), &case.model.policy());
        let last = &logits[(all.len() - 1) * 37..];
        let best = (0..37).reduce(|best, i| if last[i] > last[best] { i } else { best });
        all.push(best.unwrap() as u32);
    }
    all.split_off(prompt.len())
}

#[test]
fn the_plain_loop() {
    let device = invariant();
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        for length in [1, 17, 64] {
            let prompt = tokens(length, 37, 5);
            let want = plain(&case, &prompt, 20);
            let mut generator = generator(&case, GREEDY);
            read(&mut generator, &prompt);
            let start = generator.text().clone();
            assert_eq!(next(&mut generator, 20), want, "{kind}, {length} tokens");
            // In two turns, with a fork in between that goes elsewhere.
            generator.set_text(start);
            assert_eq!(next(&mut generator, 7), want[..7]);
            let fork = generator.text().clone();
            read(&mut generator, &tokens(30, 37, 6));
            next(&mut generator, 3);
            generator.set_text(fork);
            assert_eq!(generator.text().tokens(), length + 7);
            assert_eq!(next(&mut generator, 13), want[7..], "{kind}, {length} tokens, after a fork");
            assert_eq!(generator.bank().unwrap().timeline().position, length + 20);
        }
    }
}

#[test]
fn long_prompts_are_read_in_pieces() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let prompt = tokens(2 * PIECE_TOKENS + 5, 37, 8);
    let weights = case.weights();
    let mut bank = case.model.bank(case.model.policy()).unwrap();
    let hidden = case.model.extend(&weights, Batch::one(&prompt), &mut [&mut bank], None).unwrap();
    let last = hidden.slice(1, prompt.len() - 1..prompt.len()).unwrap();
    let logits = case.model.logits(&weights, &last).unwrap().to_f32();
    let best = (0..37).reduce(|best, i| if logits[i] > logits[best] { i } else { best });
    let mut generator = generator(&case, GREEDY);
    read(&mut generator, &prompt[..3]);
    let mut left = Vec::new();
    let whole = generator
        .read(&prompt[3..], &mut |count| {
            left.push(count);
            if left.len() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    assert_eq!((whole, left), (false, vec![PIECE_TOKENS + 5, 5]));
    // What was not read is not part of the text, and can be read later.
    assert_eq!(generator.text().tokens(), prompt.len() - 5);
    assert!(generator.text().can_continue());
    read(&mut generator, &prompt[prompt.len() - 5..]);
    assert_eq!(generator.next_token().unwrap() as usize, best.unwrap());
    assert_eq!(generator.text().bank().bytes(), bank.bytes());
}

/// A prompt that comes in two parts gives the bits of one that comes whole. The log-linear model computes chunks of 16
/// tokens from the states before them, and the tokens of a chunk that a call ends in one by one: it rounds otherwise then.
#[test]
fn where_a_prompt_is_cut() {
    let device = invariant();
    let ids = tokens(300, 37, 6);
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        let policy = case.model.policy();
        let whole = case.extend(&ids, &policy, &[300]);
        for cut in [64, 128, 256, 16, 48, 208, 1, 37, 63, 65, 100, 299] {
            let got = case.extend(&ids, &policy, &[cut, 300]);
            if kind == "log_linear_gated_deltanet" && cut % 16 != 0 {
                assert_close(&format!("{kind}, cut at {cut}"), &got, &whole, 1e-5);
            } else {
                assert!(got == whole, "{kind}, cut at {cut}");
            }
        }
    }
}

/// A call of a large model is short, and always on the grid.
#[test]
fn large_models_read_few_tokens_in_a_call() {
    for (parameters, tokens) in [
        (0, 2048),
        (1_000_000, 2048),
        (100_000_000, 960),
        (700_000_000, 128),
        (1_500_000_000, 64),
        (usize::MAX, 64),
    ] {
        assert_eq!(call_tokens(parameters), tokens, "{parameters} parameters");
    }
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let mut generator = generator(&case, GREEDY);
    assert_eq!(
        [0, 2047, 2048, 2049, 5000].map(|count| generator.whole_calls(count)),
        [0, 0, 2048, 2048, 4096]
    );
    read(&mut generator, &[1, 2, 3]);
    assert_eq!(
        [0, 2044, 2045, 2046, 4093].map(|count| generator.whole_calls(count)),
        [0, 0, 2045, 2045, 4093]
    );
}

/// A text that is saved and goes on later, without a new token, is the text that never stopped.
#[test]
fn saved_and_continued_is_never_having_stopped() {
    let device = invariant();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bank");
    for kind in KINDS {
        let case = Case::new(&device, &small(kind));
        let fingerprint = case.model.fingerprint(&case.parameters).unwrap();
        let tag = BankTag::new(case.model.config().mixer.model_type(), fingerprint, &Tokenizer::bytes());
        for sampling in [GREEDY, Sampling { repetition_penalty: 1.4, penalty_window: 40, ..GREEDY }] {
            let mut whole = generator(&case, sampling);
            read(&mut whole, &tokens(70, 37, 5));
            let want = next(&mut whole, 40);
            // The first part needs no memory of the tokens; the second does.
            let mut parts = generator(&case, sampling);
            read(&mut parts, &tokens(70, 37, 5));
            let mut got = Vec::new();
            for count in [10, 1, 29] {
                got.extend(next(&mut parts, count));
                let _ = std::fs::remove_file(&path);
                parts.save(&path, &tag).unwrap();
                let file = BankFile::open(&path).unwrap();
                file.verify().unwrap();
                let text = Text::load(&device, &case.model, &file, &tag, None).unwrap();
                assert!(text.can_continue());
                parts = generator(&case, sampling);
                parts.set_text(text);
            }
            assert_eq!(got, want, "{kind} {sampling:?}");
        }
    }
}

#[test]
fn going_back_by_tokens() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let ids = tokens(100, 37, 5);
    let mut generator = generator(&case, GREEDY);
    read(&mut generator, &ids);
    assert_eq!(generator.rollback(100).unwrap(), None);
    assert!(generator.text().can_continue());
    let error = generator.rollback(101).unwrap_err().to_string();
    assert!(error.contains("the text has 100"), "{error}");
    let (anchor, exactness) = generator.rollback(50).unwrap().unwrap();
    assert_eq!((anchor.ordinal, anchor.position, exactness), (3, 48, Rollback::Exact));
    assert!(!generator.text().can_continue() && generator.text().tokens() == 48);
    let error = generator.rollback(15).unwrap_err().to_string();
    assert!(error.contains("at or before 15 tokens") && error.contains("is at 16 tokens"), "{error}");
    read(&mut generator, &ids[48..60]);
    assert_eq!(next(&mut generator, 20), plain(&case, &ids[..60], 20));
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let run = |sampling| {
        let mut generator = generator(&case, sampling);
        read(&mut generator, &[1, 2, 3]);
        next(&mut generator, 60)
    };
    let sampling = Sampling {
        temperature: 1.2,
        top_k: Some(20),
        top_p: 0.9,
        repetition_penalty: 1.3,
        penalty_window: 8,
        seed: 4,
    };
    assert_eq!(run(sampling), run(sampling));
    assert_ne!(run(sampling), run(Sampling { seed: 5, ..sampling }));
    // Nothing positive comes again within the window of so large a penalty.
    let strict = run(Sampling { repetition_penalty: 1e6, penalty_window: 8, ..GREEDY });
    assert!(strict.windows(9).all(|window| !window[..8].contains(&window[8])), "{strict:?}");
    let empty = generator(&case, GREEDY).next_token().unwrap_err().to_string();
    assert!(empty.contains("no logits to sample from"), "{empty}");
}

/// A tokenizer of 37 letters.
fn letters(end_of_text: &str) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let names = ('a'..='z').chain('0'..='9').map(String::from).chain([end_of_text.to_string()]);
    let vocabulary: Vec<String> = names.zip(0..).map(|(name, id)| format!("\"{name}\": {id}")).collect();
    let json = format!(
        r#"{{"version": "1.0", "added_tokens": [{{"id": 36, "content": "{end_of_text}", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true}}], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": {{"type": "Fuse"}},
        "model": {{"type": "BPE", "vocab": {{{}}}, "merges": []}}}}"#,
        vocabulary.join(", ")
    );
    std::fs::write(&path, json).unwrap();
    Tokenizer::load(path.to_str().unwrap()).unwrap()
}

#[test]
fn a_stop_string_leaves_nothing_behind() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let sampling = Sampling { temperature: 1.5, seed: 3, ..Sampling::default() };
    let write = |tokenizer: &Tokenizer, max_tokens, stop: &[&str], break_at: Option<usize>| {
        let mut generator = generator(&case, sampling);
        read(&mut generator, &[1, 2, 3]);
        let stop = stop.iter().map(|string| string.to_string()).collect();
        let (mut text, mut count) = (String::new(), 0);
        let mut show = |piece: &str| {
            text += piece;
            count += 1;
            if Some(count) == break_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let written = generator.write(tokenizer, &Limits { max_tokens, stop }, &mut show).unwrap();
        (generator, text, written)
    };
    let tokenizer = letters("_");
    let (_, all, written) = write(&tokenizer, 90, &[], None);
    assert_eq!(written, GenerationSummary { tokens: 90, ended: StopReason::MaxTokens });
    assert_eq!(all.len(), 90);
    // Three tokens that come after token 70.
    let stop = &all[70..73];
    let (mut stopped, text, written) = write(&tokenizer, 90, &[stop, "nowhere"], None);
    assert_eq!(written.ended, StopReason::Stop);
    assert_eq!(text, all[..all.find(stop).unwrap()]);
    assert_eq!(stopped.text().tokens(), 3 + text.len());
    // As if the text had been read, not written.
    let mut fresh = generator(&case, sampling);
    read(&mut fresh, &[&[1, 2, 3][..], &tokenizer.encode(&text).unwrap()].concat());
    for generator in [&mut stopped, &mut fresh] {
        assert_eq!(generator.bank().unwrap().timeline().position, 3 + text.len());
    }
    let more = |generator: &mut Generator| {
        let mut greedy = self::generator(&case, GREEDY);
        greedy.set_text(generator.text().clone());
        next(&mut greedy, 30)
    };
    assert_eq!(more(&mut stopped), more(&mut fresh));
    // What only looked like one is shown.
    let almost = format!("{}!", &all[88..]);
    let (generator, text, _) = write(&tokenizer, 90, &[&almost], None);
    assert_eq!((text, generator.text().tokens()), (all.clone(), 93));
    let (generator, text, written) = write(&tokenizer, 90, &[], Some(12));
    assert_eq!((text.as_str(), written.ended), (&all[..12], StopReason::Requested));
    assert_eq!(generator.text().tokens(), 15);
    // The end of a text ends it, and is not part of it.
    let at = all.find('_').expect("drawn in 90 tokens");
    let (generator, text, written) = write(&letters("<|endoftext|>"), 90, &[], None);
    assert_eq!((text.as_str(), written.ended), (&all[..at], StopReason::EndOfText));
    assert_eq!(generator.text().tokens(), 3 + at);
}

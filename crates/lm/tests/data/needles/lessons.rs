//! Lessons: what they show, what they ask, and that evaluation asks something else.

use std::collections::HashSet;

use march_lm::data::needles::{Essay, LessonOptions, NeedleSource, Task};
use march_lm::data::{Source, builtin};
use march_lm::engine::ops::cross_entropy::IGNORE;
use march_lm::tokenizer::Tokenizer;

fn options(names: &str, sequence_length: usize, text_share: f64) -> LessonOptions {
    let tasks = Task::list(names).unwrap();
    LessonOptions { tasks, sequence_length, text_share, validation_fraction: 0.1 }
}

fn source(names: &str, length: usize, text_share: f64, seed: u64) -> NeedleSource {
    NeedleSource::lessons(options(names, length, text_share), Tokenizer::bytes(), seed).unwrap()
}

fn sequence(source: &NeedleSource, index: u64) -> (Vec<u32>, Vec<u32>) {
    let (mut inputs, mut targets) = (vec![7], vec![9]);
    source.sequence(index, &mut inputs, &mut targets).unwrap();
    assert_eq!(inputs.len(), 1 + source.sequence_length());
    assert_eq!(targets.len(), 1 + source.sequence_length());
    (inputs.split_off(1), targets.split_off(1))
}

fn text(ids: &[u32]) -> String {
    Tokenizer::bytes().decode(ids).unwrap()
}

/// The prompts of a sequence with their answers: the targets of each prompt, which follow each other.
fn lessons(inputs: &[u32], targets: &[u32]) -> Vec<(String, String)> {
    let (mut found, mut at, mut begin) = (Vec::new(), 0, 0);
    while let Some(first) = targets[at..].iter().position(|&id| id != IGNORE).map(|first| at + first) {
        let end = targets[first..].iter().position(|&id| id == IGNORE).map_or(targets.len(), |n| first + n);
        // Every target is the next input.
        assert_eq!(targets[first..end], inputs[first + 1..end + 1]);
        found.push((text(&inputs[begin..=first]), text(&targets[first..end])));
        // A line break follows the answer.
        begin = end + 2;
        at = end;
    }
    assert!(inputs[(begin.max(1) - 1).min(inputs.len())..].iter().all(|&id| id == u32::from(b'\n')));
    found
}

/// The values of an answer, after its punctuation was compared to that of a list.
fn values(answer: &str) -> Vec<String> {
    let inner = answer.strip_prefix(' ').and_then(|rest| rest.strip_suffix('.')).unwrap();
    let values: Vec<String> =
        inner.split(", ").map(|value| value.strip_prefix("and ").unwrap_or(value).to_string()).collect();
    let listed = match &values[..] {
        [others @ .., last] if !others.is_empty() => format!("{}, and {last}", others.join(", ")),
        _ => values.concat(),
    };
    assert_eq!(listed, inner);
    values
}

const ALL: &str = "niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2,niah_multikey_3,\
                   niah_multivalue,niah_multiquery";

#[test]
fn answers_are_in_the_prompt_and_all_that_is_asked() {
    let source = source(ALL, 1500, 0.0, 3);
    let (mut counts, mut packed, mut sizes) = (HashSet::new(), HashSet::new(), Vec::new());
    for index in 0..150 {
        let (inputs, targets) = sequence(&source, index);
        let found = lessons(&inputs, &targets);
        assert!(!found.is_empty(), "sequence {index}");
        packed.insert(found.len());
        for (prompt, answer) in found {
            let start = prompt.starts_with("A special magic ") || prompt.starts_with("Some special magic ");
            assert!(start && prompt.ends_with(['s', 'e']), "{prompt}");
            let (before, question) = prompt.rsplit_once("\nWhat ").unwrap();
            let query = question.split(" for ").nth(1).unwrap().split(" mentioned").next().unwrap();
            let asked: Vec<&str> = query.split(", ").map(|key| key.trim_start_matches("and ")).collect();
            let all = values(&answer);
            // Each value follows its key; the values of one key are in the order of the text.
            let mut last = 0;
            for (i, value) in all.iter().enumerate() {
                let key = asked[i * asked.len() / all.len()];
                let at = before.find(&format!(" for {key} is: {value}.")).unwrap();
                assert!(asked.len() > 1 || at > last, "{prompt}{answer}");
                last = at;
            }
            counts.insert((asked.len(), all.len()));
            sizes.push(prompt.len());
        }
    }
    assert_eq!(counts, HashSet::from([(1, 1), (1, 4), (4, 4)]));
    assert!(packed.contains(&1) && packed.contains(&2), "{packed:?}");
    assert!(sizes.iter().any(|&size| size < 450) && sizes.iter().any(|&size| size > 1350));
}

#[test]
fn lessons_repeat_for_a_seed_and_differ_between_seeds() {
    let draw = |seed| sequence(&source("niah_single_2", 600, 0.25, seed), 5);
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
    let mut seen = HashSet::new();
    let source = source("niah_single_1", 512, 0.0, 1);
    let held_out =
        NeedleSource::held_out(options("niah_single_1", 512, 0.25), Tokenizer::bytes(), 9).unwrap();
    assert_eq!(held_out.sequences(), 9);
    for index in 0..200 {
        assert!(seen.insert(sequence(&source, index).0), "sequence {index} came before");
        assert!(index >= 9 || seen.insert(sequence(&held_out, index).0), "validation {index} came before");
    }
    let fingerprints: HashSet<String> =
        [source.fingerprint(), held_out.fingerprint()].into_iter().map(Result::unwrap).collect();
    assert_eq!(fingerprints.len(), 2);
}

/// No pair of key and value of the first 50 samples of evaluation, at four seeds, is in a lesson.
#[test]
fn lessons_have_other_needles_than_evaluation() {
    let (tokenizer, essay) = (Tokenizer::bytes(), Essay::builtin());
    let pairs = |text: &str| -> HashSet<String> {
        let parts = text.split("One of the special magic ").skip(1);
        parts.map(|part| part.split_once('.').map_or(part, |(pair, _)| pair).to_string()).collect()
    };
    let mut evaluated = HashSet::new();
    for task in Task::list(ALL).unwrap() {
        for seed in 0..4 {
            let fitted = task.needles.fit(&tokenizer, &essay, 1024, seed, 50).unwrap();
            evaluated.extend((0..50).flat_map(|index| pairs(&fitted.sample(index).unwrap().prompt)));
        }
    }
    assert!(evaluated.len() > 5000, "{}", evaluated.len());
    for seed in 0..4 {
        let source = source(ALL, 1024, 0.0, seed);
        for index in 0..100 {
            let found = pairs(&text(&sequence(&source, index).0));
            assert!(!found.is_empty() && found.is_disjoint(&evaluated), "seed {seed}, sequence {index}");
        }
    }
}

#[test]
fn a_share_of_the_sequences_is_text() {
    let book = &builtin()[..builtin().len() * 9 / 10 + 1];
    for (share, least, most) in [(0.0, 0, 0), (0.25, 70, 130), (1.0, 400, 400)] {
        let source = source("niah_single_1", 512, share, 2);
        let (mut texts, mut targets) = (0, 0);
        for index in 0..400 {
            let (inputs, outputs) = sequence(&source, index);
            targets += outputs.iter().filter(|&&id| id != IGNORE).count();
            if !outputs.contains(&IGNORE) {
                texts += 1;
                assert_eq!(inputs[1..], outputs[..511]);
                assert!(index > 50 || book.contains(&text(&inputs)));
            }
        }
        assert!((least..=most).contains(&texts), "{texts} of 400 at a share of {share}");
        let (mean, expected) = (targets as f64 / 400.0, source.targets() as f64);
        assert!((mean / expected - 1.0).abs() < 0.3, "{mean} targets, expected {expected}");
    }
}

#[test]
fn sequences_that_are_too_short_or_too_long_are_refused() {
    let refused = |length, share| {
        let options = options("niah_single_1,niah_multiquery", length, share);
        NeedleSource::lessons(options, Tokenizer::bytes(), 0).err().unwrap().to_string()
    };
    let error = refused(500, 0.25);
    assert!(error.contains("`sequence_length`") && error.contains("`niah_multiquery`"), "{error}");
    let least = error.split_once("use sequences of ").and_then(|(_, rest)| rest.split(' ').next()).unwrap();
    // The smallest length works although some prompts are longer than those that were tried.
    let source = source("niah_single_1,niah_multiquery", least.parse().unwrap(), 0.0, 0);
    for index in 0..300 {
        assert_eq!(lessons(&sequence(&source, index).0, &sequence(&source, index).1).len(), 1);
    }
    assert!(refused(140_000, 0.25).contains("`text_share`"));
}

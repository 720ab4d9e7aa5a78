//! The needle tasks: their prompts against text that is put together here from the templates, their lengths,
//! and where the needles are.

use std::collections::HashSet;
use std::path::Path;
use std::sync::LazyLock;

use march_lab::eval::suite::{Documents, Gold, Sample, suites};
use march_lm::data::needles::{Drawn, Essay, Haystack, Needles};
use march_lm::data::{builtin, train_tokenizer};
use march_lm::tokenizer::Tokenizer;

const LINE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

/// Each task with its kind of values, its number of needles and answers, and whether it is one of the
/// paper's.
const EXPECTED: [(&str, &str, usize, usize, bool); 8] = [
    ("niah_single_1", "number", 1, 1, true),
    ("niah_single_2", "number", 1, 1, true),
    ("niah_single_3", "uuid", 1, 1, true),
    ("niah_multikey_1", "number", 4, 1, true),
    ("niah_multikey_2", "number", 1, 1, false),
    ("niah_multikey_3", "uuid", 1, 1, false),
    ("niah_multivalue", "number", 4, 4, true),
    ("niah_multiquery", "number", 4, 4, true),
];

/// A tokenizer of 600 ids learnt from the built-in text.
fn learnt() -> &'static Tokenizer {
    static LEARNT: LazyLock<Tokenizer> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("text.txt");
        std::fs::write(&file, builtin()).unwrap();
        train_tokenizer(&[file], "text", 600, false, &mut |_, _, _| {}).unwrap()
    });
    &LEARNT
}

fn tasks() -> Vec<(&'static str, Needles)> {
    let one = |(name, ..): &(&'static str, &str, usize, usize, bool)| {
        let suite = suites().find(|suite| suite.name == *name).unwrap();
        let Documents::Needles(needles) = &suite.documents else { panic!("{name} has no needles") };
        (*name, *needles)
    };
    EXPECTED.iter().map(one).collect()
}

fn context(drawn: &Drawn) -> String {
    let sample = Sample::of_needles(drawn.clone());
    let requests = serde_json::to_value(&sample.requests).unwrap();
    assert_eq!(requests.as_array().unwrap().len(), 1);
    let request = &requests[0];
    assert_eq!(request["kind"], "generate_until");
    assert_eq!(request["max_tokens"], 128);
    assert_eq!(request["until"], serde_json::json!([]));
    request["context"].as_str().unwrap().to_string()
}

fn answers(drawn: &Drawn) -> &[String] {
    let Gold::Texts { answers, classes } = Sample::of_needles(drawn.clone()).gold else { panic!("no texts") };
    assert!(classes.is_empty());
    assert_eq!(answers, drawn.answers);
    &drawn.answers
}

fn sentence(kind: &str, key: &str, value: &str) -> String {
    format!("One of the special magic {kind}s for {key} is: {value}.")
}

/// What is between the first line and the question, after both were compared to the templates.
fn haystack(drawn: &Drawn, kind: &str) -> String {
    let prompt = context(drawn);
    let answers = answers(drawn);
    let key =
        |answer: &String| drawn.needles.iter().find(|needle| needle.value == *answer).unwrap().key.clone();
    let mut keys: Vec<String> = answers.iter().map(key).collect();
    keys.dedup();
    let query = match &keys[..] {
        [a] => a.clone(),
        [a, b, c, d] => format!("{a}, {b}, {c}, and {d}"),
        keys => panic!("{} keys are asked for", keys.len()),
    };
    let many = answers.len() > 1;
    let first = if many {
        format!(
            "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. \
             I will quiz you about the {kind}s afterwards.\n"
        )
    } else {
        format!(
            "A special magic {kind} is hidden within the following text. Make sure to memorize it. \
             I will quiz you about the {kind} afterwards.\n"
        )
    };
    let last = if many {
        format!(
            "\nWhat are all the special magic {kind}s for {query} mentioned in the provided text? \
             The special magic {kind}s for {query} mentioned in the provided text are"
        )
    } else {
        format!(
            "\nWhat is the special magic {kind} for {query} mentioned in the provided text? \
             The special magic {kind} for {query} mentioned in the provided text is"
        )
    };
    let rest = prompt.strip_prefix(&first).unwrap_or_else(|| panic!("another beginning: {prompt}"));
    rest.strip_suffix(&last).unwrap_or_else(|| panic!("another end: {prompt}")).to_string()
}

/// The parts of a haystack of text around its needles, in order.
fn around(text: &str, drawn: &Drawn, kind: &str) -> Vec<String> {
    let (mut parts, mut rest) = (Vec::new(), text.to_string());
    for needle in &drawn.needles {
        let sentence = format!(" {} ", sentence(kind, &needle.key, &needle.value));
        let (before, after) = rest.split_once(&sentence).unwrap();
        parts.push(before.to_string());
        rest = after.to_string();
    }
    parts.push(rest);
    parts
}

/// Compares a haystack of lines to what its needles say; returns the number of lines without them.
fn check_lines(text: &str, drawn: &Drawn, kind: &str, repeat: bool) -> usize {
    let lines: Vec<&str> = text.split('\n').collect();
    let needles: Vec<String> = drawn.needles.iter().map(|n| sentence(kind, &n.key, &n.value)).collect();
    let others: Vec<&&str> = lines.iter().filter(|line| !needles.contains(&line.to_string())).collect();
    assert_eq!(others.len() + needles.len(), lines.len(), "each needle once");
    for (i, needle) in needles.iter().enumerate() {
        let at = lines.iter().position(|line| line == needle).unwrap();
        let depth = 100.0 * (at - i) as f64 / others.len() as f64;
        assert!((depth - drawn.needles[i].depth).abs() < 1e-9, "depth {depth}");
    }
    if repeat {
        assert!(others.iter().all(|line| **line == LINE));
    } else {
        let start = format!("One of the special magic {kind}s for ");
        let keys: HashSet<&str> = lines
            .iter()
            .map(|line| line.strip_prefix(&start).unwrap().split_once(" is: ").unwrap().0)
            .collect();
        assert_eq!(keys.len(), lines.len(), "keys are distinct");
    }
    others.len()
}

#[test]
fn all_tasks_are_there() {
    for (name, _, _, _, paper) in EXPECTED {
        let suite = suites().find(|suite| suite.name == name).unwrap();
        assert_eq!(suite.group, if paper { "niah" } else { "niah_extra" }, "{name}");
        assert_eq!(suite.paper.is_some(), paper, "{name}");
    }
}

#[test]
fn prompts_are_those_of_the_templates() {
    let essay = Essay::builtin();
    let words: Vec<&str> = builtin().split_whitespace().collect();
    let (mut fitting, mut refused) = (0, 0);
    for tokenizer in [&Tokenizer::bytes(), learnt()] {
        for (task, (name, kind, count, asked, _)) in tasks().into_iter().zip(EXPECTED) {
            for length in [512, 1024, 4096] {
                let place = format!("{name} at {length} with {}", tokenizer.name());
                let fitted = match task.1.fit(tokenizer, &essay, length, 0, 12) {
                    Ok(fitted) => fitted,
                    Err(error) => {
                        assert!(length == 512, "{place}: {error}");
                        refused += 1;
                        continue;
                    }
                };
                fitting += 1;
                let mut seen = HashSet::new();
                for index in 0..12 {
                    let drawn = fitted.sample(index).unwrap();
                    let prompt = context(&drawn);
                    assert_eq!(drawn.tokens, tokenizer.encode(&prompt).unwrap().len(), "{place}");
                    assert!(drawn.tokens + 128 <= length, "{place}: {} tokens", drawn.tokens);
                    assert_eq!((drawn.needles.len(), answers(&drawn).len()), (count, asked), "{place}");
                    assert!(answers(&drawn).iter().all(|answer| prompt.contains(answer)), "{place}");
                    let depths = answers(&drawn).iter().map(|answer| {
                        drawn.needles.iter().find(|needle| needle.value == *answer).unwrap().depth
                    });
                    assert_eq!(depths.collect::<Vec<_>>(), drawn.depths, "{place}");
                    let text = haystack(&drawn, kind);
                    let unit = match task.1.haystack {
                        Haystack::Essay => {
                            let parts = around(&text, &drawn, kind);
                            let parts: Vec<String> =
                                parts.into_iter().filter(|part| !part.is_empty()).collect();
                            let got = parts.join(" ");
                            let count = got.split(' ').count();
                            assert_eq!(got, words[..count].join(" "), "{place}");
                            words[count]
                        }
                        other => {
                            check_lines(&text, &drawn, kind, other == Haystack::Repeat);
                            text.split('\n').max_by_key(|line| line.len()).unwrap()
                        }
                    };
                    // A prompt may be short only if another word or line would make it too long.
                    let more = drawn.tokens + tokenizer.encode(unit).unwrap().len() + 8;
                    let full = (drawn.tokens + 128) as f64 >= 0.85 * length as f64;
                    assert!(full || more + 128 > length, "{place}: only {} tokens", drawn.tokens);
                    assert!(seen.insert(prompt), "{place}: sample {index} came before");
                }
            }
        }
    }
    assert!(fitting >= 36 && refused > 0, "{fitting} fit, {refused} do not");
}

/// In a text whose sentences have four words each, needles are exactly at int(sentences · depth / 100).
#[test]
fn needles_are_at_their_depths() {
    let text: String = (0..5000).map(|i| format!("Sentence {i} is here. ")).collect();
    let essay = Essay::new(&text).unwrap();
    let tokenizer = Tokenizer::bytes();
    let allowed: Vec<f64> = (0..40).map(|i| (i as f64 * 100.0 / 39.0).round()).collect();
    let mut depths = HashSet::new();
    for (task, (name, kind, ..)) in tasks().into_iter().zip(EXPECTED) {
        if task.1.haystack != Haystack::Essay {
            continue;
        }
        let fitted = task.1.fit(&tokenizer, &essay, 3000, 7, 60).unwrap();
        for index in 0..60 {
            let drawn = fitted.sample(index).unwrap();
            let parts = around(&haystack(&drawn, kind), &drawn, kind);
            let sizes: Vec<usize> = parts.iter().map(|part| part.split_whitespace().count()).collect();
            let words: usize = sizes.iter().sum();
            let sentences = words.div_ceil(4);
            let mut before = 0;
            for (needle, size) in drawn.needles.iter().zip(&sizes) {
                before += size;
                assert!(allowed.contains(&needle.depth), "{name}: {}", needle.depth);
                let at = (sentences as f64 * needle.depth / 100.0 + 1e-9) as usize;
                assert_eq!(before, (4 * at).min(words), "{name}, sample {index}: depth {}", needle.depth);
                depths.insert(needle.depth as usize);
            }
            let own: Vec<f64> = drawn.needles.iter().map(|needle| needle.depth).collect();
            assert!(own.windows(2).all(|pair| pair[0] < pair[1]), "no depth twice: {own:?}");
        }
    }
    assert_eq!(depths.len(), 40, "all depths come up");
}

#[test]
fn a_length_that_is_too_short_names_the_smallest() {
    let essay = Essay::builtin();
    for tokenizer in [&Tokenizer::bytes(), learnt()] {
        for (name, task) in tasks() {
            let error = task.fit(tokenizer, &essay, 150, 0, 30).err().unwrap().to_string();
            let smallest: usize = error
                .split_once("the smallest length that fits is ")
                .and_then(|(_, rest)| rest.split(':').next()?.parse().ok())
                .unwrap_or_else(|| panic!("{name}: {error}"));
            assert!(task.fit(tokenizer, &essay, smallest - 1, 0, 30).is_err(), "{name}");
            let fitted = task.fit(tokenizer, &essay, smallest, 0, 30).unwrap();
            for index in 0..30 {
                assert!(fitted.sample(index).unwrap().tokens + 128 <= smallest, "{name}");
            }
        }
    }
}

/// A sample's needles depend on the task, the seed and the index, not on length or tokenizer.
#[test]
fn samples_repeat() {
    let essay = Essay::builtin();
    let bytes = Tokenizer::bytes();
    let mut all = HashSet::new();
    for (name, task) in tasks() {
        let draw = |tokenizer: &Tokenizer, length, seed, index| {
            task.fit(tokenizer, &essay, length, seed, 1).unwrap().sample(index).unwrap()
        };
        let drawn = draw(&bytes, 2048, 0, 3);
        assert_eq!(drawn, draw(&bytes, 2048, 0, 3), "{name}");
        assert_eq!(answers(&drawn), answers(&draw(&bytes, 4096, 0, 3)), "{name}");
        assert_eq!(answers(&drawn), answers(&draw(learnt(), 2048, 0, 3)), "{name}");
        for (seed, index) in [(0, 3), (0, 4), (1, 3)] {
            let other = draw(&bytes, 2048, seed, index);
            assert!(all.insert(answers(&other).to_vec()), "{name}: the answers came before");
        }
    }
}

/// Longer than the text is, and with a tokenizer that takes long.
#[test]
fn long_prompts_repeat_the_text() {
    let essay = Essay::builtin();
    for (tokenizer, length) in [(&Tokenizer::bytes(), 400_000), (learnt(), 131_072)] {
        for (name, task) in tasks() {
            let fitted = task.fit(tokenizer, &essay, length, 0, 500).unwrap();
            let drawn = fitted.sample(1).unwrap();
            assert!(drawn.tokens + 128 <= length, "{name}");
            assert!(drawn.tokens as f64 > 0.98 * length as f64, "{name}: {} of {length}", drawn.tokens);
        }
    }
}

#[test]
fn any_text_may_be_the_haystack() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("essay.txt");
    assert!(Essay::read(&path).is_err());
    std::fs::write(&path, " \n").unwrap();
    assert!(Essay::read(&path).unwrap_err().to_string().contains("no words"));
    std::fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(Essay::read(&path).unwrap_err().to_string().contains("UTF-8"));
    std::fs::write(&path, "Ein Wort – ça va! ").unwrap();
    let essay = Essay::read(&path).unwrap();
    let tokenizer = Tokenizer::bytes();
    let (_, task) = tasks()[1];
    let drawn = task.fit(&tokenizer, &essay, 2000, 0, 5).unwrap().sample(0).unwrap();
    assert!(context(&drawn).contains("Ein Wort – ça va! Ein Wort – ça va!"));
}

/// Whole prompts as they were, so that no change of a text goes unnoticed. Such a change makes results
/// incomparable with earlier ones; if it is wanted, run with MARCH_WRITE_FIXTURES=1 to write the files anew.
#[test]
fn prompts_are_as_before() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ruler");
    let essay = Essay::builtin();
    for (name, task) in tasks() {
        let drawn = task.fit(&Tokenizer::bytes(), &essay, 1200, 0, 5).unwrap().sample(0).unwrap();
        let depths: Vec<String> = drawn.depths.iter().map(|depth| format!("{depth:.1}")).collect();
        let text = format!("{}\n---\n{}\n{}\n", context(&drawn), answers(&drawn).join(" "), depths.join(" "));
        let path = folder.join(format!("{name}.txt"));
        if std::env::var_os("MARCH_WRITE_FIXTURES").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &text).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap_or_default(), text, "{name}");
    }
}

use std::collections::HashSet;

use march_lm::data::needles::{Essay, Task};
use march_lm::tokenizer::Tokenizer;

#[test]
fn the_lists_hold_single_words_once() {
    for list in [
        include_str!("../../../src/data/needles/adjectives.txt"),
        include_str!("../../../src/data/needles/nouns.txt"),
    ] {
        let words: Vec<&str> = list.lines().collect();
        assert!(words.len() > 300);
        assert!(words.iter().all(|word| word.len() > 1 && word.bytes().all(|b| b.is_ascii_lowercase())));
        assert!(words.is_sorted_by(|a, b| a < b), "sorted, without a word that comes twice");
    }
}

/// The pairs of a haystack of needles: words and numbers, then uuids.
#[test]
fn items_have_their_form_and_never_come_twice() {
    let (tokenizer, essay) = (Tokenizer::bytes(), Essay::builtin());
    for task in Task::list("niah_multikey_2,niah_multikey_3").unwrap() {
        let fitted = task.needles.fit(&tokenizer, &essay, 150_000, 0, 1).unwrap();
        let prompt = fitted.sample(0).unwrap().prompt;
        let mut seen = HashSet::new();
        for line in prompt.lines().filter(|line| line.starts_with("One of the special magic ")) {
            let (_, pair) = line.split_once(" for ").unwrap();
            let (key, value) = pair.strip_suffix('.').unwrap().split_once(" is: ").unwrap();
            for item in [key, value] {
                let sizes: Vec<usize> = item.split('-').map(str::len).collect();
                match sizes[..] {
                    [7] => assert!(!item.starts_with('0') && item.parse::<u32>().is_ok(), "{item}"),
                    [_, _] => assert!(item.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{item}"),
                    _ => {
                        assert_eq!(sizes, [8, 4, 4, 4, 12], "{item}");
                        assert!(&item[14..15] == "4" && "89ab".contains(&item[19..20]), "{item}");
                    }
                }
                assert!(seen.insert(item.to_string()), "{item} comes twice");
            }
        }
        assert!(seen.len() > 2000, "{}", seen.len());
    }
}

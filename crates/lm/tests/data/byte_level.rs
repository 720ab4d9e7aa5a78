use march_lm::tokenizer::byte_level::{Cut, LINE_END_LAST, spell, words};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

/// Texts that exercise every rule: letters, digits, punctuation and spaces, ASCII and beyond, contractions, runs.
fn texts() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-zA-Z]{1,6}",
        "[0-9]{1,5}",
        "[ \t\r\n\u{a0}\u{2003}\u{85}]{1,4}",
        "[ \n]{1,3}",
        "[!-/:-@]{1,3}",
        "'(s|t|re|ve|m|ll|d|S|x)",
        "[äßéΩж中文字़\u{301}]{1,3}",
        "[²½٣Ⅷ]{1,2}",
        "[“”…—🦀\u{200d}\u{0}\u{1c}]{1,2}",
        "\\PC{0,4}",
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

fn pre_tokenizer(json: &Value) -> PreTokenizerWrapper {
    serde_json::from_value(json.clone()).unwrap()
}

/// The words that no token crosses, as split by the library.
fn splits(pre_tokenizer: &PreTokenizerWrapper, text: &str) -> Vec<String> {
    let mut string = PreTokenizedString::from(text);
    pre_tokenizer.pre_tokenize(&mut string).unwrap();
    let splits = string.get_splits(OffsetReferential::Original, OffsetType::Byte);
    splits.into_iter().map(|(split, ..)| split.to_string()).collect()
}

fn gpt2() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
}

fn line_end_last(pattern: &str) -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
    ]})
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn words_are_those_of_the_library(text in texts()) {
        let ours: Vec<String> = words(&text).map(|word| spell(word.as_bytes())).collect();
        prop_assert_eq!(ours, splits(&pre_tokenizer(&gpt2()), &text));
    }

    #[test]
    fn cuts_change_nothing(text in texts(), size in 1usize..20) {
        let kinds = [(Cut::BeforeLineEnd, gpt2()), (Cut::AfterLineEnd, line_end_last(LINE_END_LAST[0])),
            (Cut::AfterLineEnd, line_end_last(LINE_END_LAST[1])),
            (Cut::AtSpace, json!({"type": "WhitespaceSplit"}))];
        for (cut, json) in kinds {
            prop_assert_eq!(Cut::of(&json!({"pre_tokenizer": json})), Some(cut));
            let library = pre_tokenizer(&json);
            let parts = cut.parts(&text, size);
            prop_assert_eq!(parts.concat(), text.as_str());
            prop_assert!(parts.iter().rev().skip(1).all(|part| part.len() >= size));
            let cut: Vec<String> = parts.iter().flat_map(|part| splits(&library, part)).collect();
            prop_assert_eq!(cut, splits(&library, &text));
        }
        prop_assert_eq!(Cut::Anywhere.parts(&text, size).concat(), text);
    }
}

#[test]
fn bytes_are_spelt_as_in_vocabularies() {
    let ours: Vec<String> = (0..=255).map(|byte| spell(&[byte])).collect();
    let distinct: std::collections::BTreeSet<&String> = ours.iter().collect();
    assert_eq!(distinct.len(), 256);
    assert_eq!(
        (ours[0].as_str(), ours[32].as_str(), ours[10].as_str(), ours[65].as_str()),
        ("Ā", "Ġ", "Ċ", "A")
    );
}

#[test]
fn other_files_are_not_cut() {
    let refused = [
        json!({"pre_tokenizer": gpt2(), "normalizer": {"type": "NFC"}}),
        json!({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true, "use_regex": true}}),
        json!({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}}),
        json!({"pre_tokenizer": gpt2(), "added_tokens": [{"content": "<x>", "rstrip": true}]}),
        json!({"pre_tokenizer": gpt2(), "added_tokens": [{"content": "a\nb"}]}),
        json!({"pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [{"content": "a b"}]}),
        json!({"pre_tokenizer": line_end_last(r"\s+")}),
        json!({"pre_tokenizer": null}),
        json!({}),
    ];
    assert!(refused.iter().all(|json| Cut::of(json).is_none()));
}

//! Tokenizers: ids, texts, files.

use march_lm::data::{builtin, train_tokenizer};
use march_lm::tokenizer::Tokenizer;
use proptest::prelude::*;

use super::{damaged, folder, json_lines, learnt, message, write};

const SAMPLES: [&str; 9] = [
    "",
    " ",
    "It's the first line.\n\n  The second\tone,\r\nit'll do; they've 12,345.67 of it   \n",
    "naïve Ωmega, 中文字符 und ß – “quoted” 🦀🦀",
    "a<|endoftext|>b <|endoftext|>\n<|endoftext|",
    "\u{0}\u{1}\u{7f}\u{a0}\u{2003}x\u{85}\u{feff}",
    "                            indented\n\n\n\n",
    "'s't're'S ''' 's",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

#[test]
fn bytes_are_bytes() {
    let tokenizer = Tokenizer::load("bytes").unwrap();
    assert_eq!(
        (tokenizer.vocabulary(), tokenizer.end_of_text(), tokenizer.name()),
        (257, Some(256), "bytes")
    );
    for text in SAMPLES {
        let ids = tokenizer.encode(text).unwrap();
        assert!(ids.iter().copied().eq(text.bytes().map(u32::from)));
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
    assert_eq!(tokenizer.decode(&[0xC3]).unwrap(), "\u{FFFD}");
    assert_eq!(tokenizer.decode(&[65, 0xFF, 256, 66]).unwrap(), "A\u{FFFD}<|endoftext|>B");
    assert_eq!(tokenizer.decode(&[257, 65, u32::MAX, 66]).unwrap(), "\u{FFFD}A\u{FFFD}B");
    assert_eq!(tokenizer.decode_checked(&[65, 256, 66]).unwrap(), "A<|endoftext|>B");
    for id in [257, 99_999, u32::MAX] {
        let refused = tokenizer.decode_checked(&[65, id]).unwrap_err().to_string();
        assert!(refused.contains(&format!("the id {id}; its ids are from 0 to 256")), "{refused}");
    }
    // Folders that exist carry this hash: it must never change.
    assert_eq!(tokenizer.hash(), "4ac42338aa4c66aca62402c411908ecf06c316e70ad83613890a304d368e4d4b");
}

#[test]
fn bytes_as_a_file_are_the_same_for_others_and_known_again() {
    let (_keep, folder) = folder();
    let (tokenizer, path) = (Tokenizer::bytes(), folder.join("tokenizer.json"));
    tokenizer.save(&path).unwrap();
    let again = Tokenizer::load(path.to_str().unwrap()).unwrap();
    assert_eq!((again.hash(), again.name()), (tokenizer.hash(), "bytes"));
    let library = tokenizers::Tokenizer::from_file(&path).unwrap();
    assert_eq!(library.token_to_id("<|endoftext|>"), Some(256));
    for text in SAMPLES.iter().filter(|text| !text.contains("<|endoftext|>")) {
        let ids = library.encode(*text, false).unwrap().get_ids().to_vec();
        assert_eq!(ids, tokenizer.encode(text).unwrap());
        assert_eq!(library.decode(&ids, false).unwrap(), *text);
    }
}

#[test]
fn a_learnt_tokenizer_is_deterministic_and_shortens_text() {
    let (_keep, folder) = folder();
    let file = write(&folder.join("text.txt"), builtin());
    let (first, again) = (folder.join("a.json"), folder.join("b.json"));
    learnt().save(&first).unwrap();
    let second = train_tokenizer(std::slice::from_ref(&file), "text", 600, false, &mut |_, _, _| {}).unwrap();
    second.save(&again).unwrap();
    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&again).unwrap());
    assert_eq!((second.vocabulary(), second.end_of_text()), (600, Some(256)));
    let ids = learnt().encode(builtin()).unwrap();
    assert!(ids.len() * 2 < builtin().len(), "{} ids of {} bytes", ids.len(), builtin().len());
    assert_eq!(learnt().decode(&ids).unwrap(), builtin());
    // The same documents in another format are the same tokenizer.
    let (half, rest) = builtin().split_at(builtin()[..100_000].rfind("\n\n").unwrap());
    let lines = write(&folder.join("text.jsonl"), json_lines(&[half, rest]));
    let third = train_tokenizer(&[lines], "text", 600, false, &mut |_, _, _| {}).unwrap();
    assert_eq!(third.hash(), second.hash());
}

#[test]
fn merges_are_the_commonest_pairs() {
    let (_keep, folder) = folder();
    // Four times "ab"; then " b", " ab" and "bc" three times each, the smaller ids first. "<|endoftext|>" is
    // no text.
    let file = write(&folder.join("t.txt"), "ab ab ab ab bc bc bc<|endoftext|>xx xx<|endoftext|>");
    let tokenizer =
        train_tokenizer(std::slice::from_ref(&file), "text", 300, false, &mut |_, _, _| {}).unwrap();
    let texts: Vec<String> =
        (257..tokenizer.vocabulary() as u32).map(|id| tokenizer.decode(&[id]).unwrap()).collect();
    assert_eq!(texts, ["ab", " b", " ab", " bc", "xx"]);
    message(train_tokenizer(&[file], "text", 256, false, &mut |_, _, _| {}), &["256", "257"]);
    let empty = write(&folder.join("empty.txt"), "");
    message(train_tokenizer(&[empty], "text", 300, false, &mut |_, _, _| {}), &["no text"]);
    let broken = write(&folder.join("broken.jsonl"), "{\"text\": \"aa aa\"}\n{\n");
    message(
        train_tokenizer(std::slice::from_ref(&broken), "text", 300, false, &mut |_, _, _| {}),
        &["broken.jsonl", "line 2"],
    );
    assert_eq!(train_tokenizer(&[broken], "text", 300, true, &mut |_, _, _| {}).unwrap().vocabulary(), 258);
}

/// The same file, as the library reads it.
fn library(tokenizer: &Tokenizer) -> tokenizers::Tokenizer {
    let (_keep, folder) = folder();
    let path = folder.join("tokenizer.json");
    tokenizer.save(&path).unwrap();
    tokenizers::Tokenizer::from_file(&path).unwrap()
}

#[test]
fn a_file_encodes_as_the_library_does() {
    let library = library(learnt());
    let mut encoder = learnt().encoder();
    for text in SAMPLES.iter().chain([&builtin()]) {
        let expected = library.encode(*text, false).unwrap().get_ids().to_vec();
        assert_eq!(learnt().encode(text).unwrap(), expected);
        let mut ids = vec![7];
        encoder.encode(text, &mut ids).unwrap();
        assert_eq!(ids[1..], expected);
        assert_eq!(learnt().decode(&expected).unwrap(), *text);
    }
    assert_eq!(learnt().decode(&learnt().encode("中").unwrap()[..1]).unwrap(), "\u{FFFD}");
    assert_eq!(learnt().decode(&[65, 600, 66]).unwrap(), "A\u{FFFD}B");
    assert!(learnt().decode_checked(&[65, 600]).unwrap_err().to_string().contains("the id 600"));
    assert_eq!(learnt().decode_checked(&[65, 66]).unwrap(), "AB");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn texts_survive(text in "(\\PC|[ \n\t'a-e]|<\\|endoftext\\|>){0,60}") {
        for tokenizer in [&Tokenizer::bytes(), learnt()] {
            let ids = tokenizer.encode(&text).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_str());
        }
    }

    #[test]
    fn any_text_encodes_as_the_library_does(text in "(\\PC|[ \n\t'a-e]|<\\|endoftext\\|>){0,60}") {
        thread_local!(static LIBRARY: tokenizers::Tokenizer = library(learnt()));
        let expected = LIBRARY.with(|library| library.encode(text.as_str(), false).unwrap());
        prop_assert_eq!(learnt().encode(&text).unwrap(), expected.get_ids());
    }
}

#[test]
fn files_keep_their_bytes_and_say_what_they_are() {
    let (_keep, folder) = folder();
    let (path, copy) = (folder.join("mine.json"), folder.join("copy.json"));
    // Spaces change the file, and so its hash, but no ids; limits on the length of texts do not count.
    let text = String::from_utf8(learnt().to_json()).unwrap().replace(
        "\"truncation\": null",
        "\"truncation\":  {\
        \"direction\": \"Right\", \"max_length\": 3, \"strategy\": \"LongestFirst\", \"stride\": 0}",
    );
    write(&path, &text);
    let tokenizer = Tokenizer::load(path.to_str().unwrap()).unwrap();
    tokenizer.save(&copy).unwrap();
    assert_eq!(std::fs::read_to_string(&copy).unwrap(), text);
    assert_eq!(tokenizer.name(), "mine.json");
    assert_ne!(tokenizer.hash(), learnt().hash());
    assert_eq!(tokenizer.hash().len(), 64);
    assert_eq!(tokenizer.encode(SAMPLES[2]).unwrap(), learnt().encode(SAMPLES[2]).unwrap());
    // Chance at encoding is for training a tokenizer's users, not for data.
    write(&path, text.replace("\"dropout\": null", "\"dropout\": 0.5"));
    let tokenizer = Tokenizer::load(path.to_str().unwrap()).unwrap();
    assert_eq!(tokenizer.encode(builtin()).unwrap(), learnt().encode(builtin()).unwrap());
}

#[test]
fn the_end_of_a_text_has_many_names() {
    let (_keep, folder) = folder();
    let path = folder.join("tokenizer.json");
    let text = String::from_utf8(learnt().to_json()).unwrap();
    for name in ["<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"] {
        write(&path, text.replace("<|endoftext|>", name));
        assert_eq!(Tokenizer::load(path.to_str().unwrap()).unwrap().end_of_text(), Some(256), "{name}");
    }
    write(&path, text.replace("<|endoftext|>", "<|other|>"));
    assert_eq!(Tokenizer::load(path.to_str().unwrap()).unwrap().end_of_text(), None);
}

#[test]
fn what_is_no_tokenizer_is_refused() {
    let (_keep, folder) = folder();
    let path = folder.join("tokenizer.json");
    let load = |path: &std::path::Path| Tokenizer::load(path.to_str().unwrap());
    message(load(&path), &["tokenizer.json", "does not exist", "bytes"]);
    message(load(&folder), &["is a folder"]);
    for text in [
        "",
        "{",
        "[]",
        "{}",
        "{\"model\": 3}",
        "{\"version\": \"1.0\", \"model\": {\"type\": \"Odd\"}}",
        "\0",
    ] {
        write(&path, text);
        message(load(&path), &["tokenizer.json", "is not a `tokenizer.json`"]);
    }
}

#[test]
fn damaged_files_never_panic() {
    let (_keep, folder) = folder();
    let path = folder.join("tokenizer.json");
    let file = write(&folder.join("t.txt"), "ab ab ab bc bc bc");
    let small = train_tokenizer(&[file], "text", 260, false, &mut |_, _, _| {}).unwrap();
    let bytes = small.to_json();
    damaged(&bytes, 5, 3000, |bytes| {
        write(&path, bytes);
        if let Ok(tokenizer) = Tokenizer::load(path.to_str().unwrap()) {
            for text in &SAMPLES[..6] {
                if let Ok(ids) = tokenizer.encode(text) {
                    let _ = tokenizer.decode(&ids);
                }
            }
        }
    });
}

/// Any damage of a tokenizer with its checksum beside it is noticed, and so is damage of the checksum.
#[test]
fn a_checksum_beside_the_file_is_compared() {
    let (_keep, folder) = folder();
    let path = folder.join("mine.json");
    let beside = folder.join("mine.json.sha256");
    let file = write(&folder.join("t.txt"), "ab ab ab bc bc bc");
    let small = train_tokenizer(&[file], "text", 260, false, &mut |_, _, _| {}).unwrap();
    small.save(&path).unwrap();
    let load = || Tokenizer::load(path.to_str().unwrap());
    assert_eq!(load().unwrap().hash(), small.hash());
    assert_eq!(std::fs::read_to_string(&beside).unwrap(), format!("{}  mine.json\n", small.hash()));
    let bytes = small.to_json();
    damaged(&bytes, 9, 1000, |damage| {
        write(&path, damage);
        assert!(load().is_err() || damage == bytes);
    });
    // Still a tokenizer, of other ids.
    write(&path, String::from_utf8(bytes.clone()).unwrap().replace("\"<|endoftext|>\"", "\"<|endoftexu|>\""));
    let said = message(
        load(),
        &["mine.json", "does not have the checksum in", "mine.json.sha256", "delete that file"],
    );
    assert!(matches!(load().unwrap_err(), march_lm::Error::Damaged { .. }), "{said}");
    // Written again, both files are new.
    learnt().save(&path).unwrap();
    assert_eq!(load().unwrap().hash(), learnt().hash());
    small.save(&path).unwrap();
    let sum = std::fs::read(&beside).unwrap();
    damaged(&sum, 10, 1000, |damage| {
        write(&beside, damage);
        let digits = |bytes: &[u8]| bytes.get(..65).map(|digits| digits.to_ascii_lowercase());
        assert!(load().is_err() || digits(damage) == digits(&sum), "{}", String::from_utf8_lossy(damage));
    });
    for text in ["", "\n", "0123", "x  mine.json\n"] {
        write(&beside, text);
        message(load(), &["mine.json.sha256", "is not a SHA-256 sum", "delete it"]);
    }
    std::fs::remove_file(&beside).unwrap();
    load().unwrap();
}

#[test]
fn a_word_that_is_missing_is_named() {
    let words: Vec<String> = ["key0", "key1", "value0", "value1", "?"].map(String::from).into();
    let tokenizer = Tokenizer::words(&words).unwrap();
    assert_eq!(tokenizer.encode("key1  value0 ?").unwrap(), [1, 2, 4]);
    let said = message(
        tokenizer.encode("key1 what\u{1b}[2J ?"),
        &["the word `what\\u{1b}[2J` is not in the model's vocabulary of 5 words, such as `key0`"],
    );
    assert!(!said.contains("UNK") && !said.contains("WordLevel"), "{said}");
    let said = message(tokenizer.encode(&"long".repeat(50)), &["longlong…`"]);
    assert!(said.len() < 200, "{said}");
}

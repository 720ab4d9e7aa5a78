use march_lm::tokenizer::byte_level::LINE_END_LAST;
use march_lm::tokenizer::{Tokenizer, byte_level_json};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Tokenizers that allow splits anywhere, before and after line ends, at white space, and nowhere.
fn tokenizers() -> Vec<Tokenizer> {
    let tokens: Vec<Vec<u8>> = [&b"ab"[..], b" a", b"\n\n", b"ab\n", b"\na"].map(<[u8]>::to_vec).into();
    let merges: [(&[u8], &[u8]); 5] =
        [(b"a", b"b"), (b" ", b"a"), (b"\n", b"\n"), (b"ab", b"\n"), (b"\n", b"a")];
    let before = byte_level_json(&tokens, &merges, true);
    let plain = byte_level_json(&tokens, &merges, false);
    let mut after: Value = serde_json::from_str(&plain).unwrap();
    after["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": LINE_END_LAST[0]}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
    ]});
    let load = |json: String| Tokenizer::from_json(json.into_bytes(), "test").unwrap();
    // Words that are not in the list become a special id.
    let words = json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"?": 0, "ab": 1, "a": 2}, "unk_token": "?"},
    });
    let words = load(words.to_string());
    vec![Tokenizer::bytes(), load(before), load(after.to_string()), words, load(plain)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// The ids equal those of the whole text wherever the pieces are cut, even within characters.
    #[test]
    fn pieces_have_the_ids_of_the_whole(
        words in prop::collection::vec("[ab]{1,3}|[ \n]{1,3}|é|🦀|<\\|endoftext\\|>|\r\n", 0..30),
        sizes in prop::collection::vec(1usize..9, 1..6),
    ) {
        let text = words.concat();
        for tokenizer in tokenizers() {
            let (mut pieces, mut ids) = (tokenizer.pieces(), Vec::new());
            let (mut rest, mut sizes) = (text.as_bytes(), sizes.iter().cycle());
            while !rest.is_empty() {
                let (piece, later) = rest.split_at(rest.len().min(*sizes.next().unwrap()));
                pieces.push(piece, &mut ids).unwrap();
                rest = later;
            }
            pieces.finish(&mut ids).unwrap();
            prop_assert_eq!(ids, tokenizer.encode(&text).unwrap());
        }
    }
}

#[test]
fn what_is_certain_is_given_at_once() {
    let text = "ab ab\nab".repeat(100);
    for (i, tokenizer) in tokenizers().iter().enumerate() {
        let (mut pieces, mut ids) = (tokenizer.pieces(), Vec::new());
        text.as_bytes().chunks(8).for_each(|piece| pieces.push(piece, &mut ids).unwrap());
        let held = tokenizer.encode(&text).unwrap().len() - ids.len();
        // The last one allows no splits: nothing is certain before the end.
        assert!(if i < 4 { held < 20 } else { ids.is_empty() }, "{tokenizer:?} holds {held} tokens");
    }
}

#[test]
fn broken_text_is_refused_with_its_place() {
    let bytes = Tokenizer::bytes();
    for (parts, place) in [
        (&[&b"ab\xFF"[..]][..], 2),
        (&[b"a\xC3", b"b"], 1),
        (&["é".as_bytes(), b"\xF0\x9F", b"\xA6", b"("], 2),
        (&[b"abc\xE2\x82"], 3),
    ] {
        let (mut pieces, mut ids) = (bytes.pieces(), Vec::new());
        let pushed = parts.iter().try_for_each(|part| pieces.push(part, &mut ids));
        let error = pushed.and_then(|()| pieces.finish(&mut ids)).unwrap_err().to_string();
        assert!(error.contains(&format!("byte {place} ")), "{error}");
    }
}

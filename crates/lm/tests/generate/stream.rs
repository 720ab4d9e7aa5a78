use march_lm::generate::{Stops, TextStream};
use march_lm::tokenizer::Tokenizer;
use proptest::prelude::*;
use serde_json::json;

/// The pieces that a stream returns, the last one at its end.
fn pieces(tokenizer: &Tokenizer, context: &[u32], ids: &[u32]) -> Vec<String> {
    let mut stream = TextStream::new(tokenizer, context).unwrap();
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(tokenizer, id).unwrap()).collect();
    pieces.push(stream.finish(tokenizer).unwrap());
    pieces
}

#[test]
fn half_characters_wait() {
    let bytes = Tokenizer::bytes();
    let ids = bytes.encode("aé🦀b").unwrap();
    assert_eq!(pieces(&bytes, &[], &ids), ["a", "", "é", "", "", "", "🦀", "b", ""]);
    // Truncated bytes that never become a character.
    assert_eq!(pieces(&bytes, &[], &ids[..5]), ["a", "", "é", "", "", "\u{FFFD}"]);
    assert_eq!(pieces(&bytes, &[], &[0xC3, 65, 0xFF]), ["", "\u{FFFD}A", "", "\u{FFFD}"]);
    // Many bytes that are not valid text do not block the stream.
    let many = pieces(&bytes, &[], &[0xFF; 9]);
    assert_eq!((many[4].as_str(), many.concat()), ("\u{FFFD}", "\u{FFFD}".repeat(9)));
}

/// A tokenizer of words that drops the space before the first word, and falls back to bytes for unknown ones.
fn words() -> Tokenizer {
    let mut vocabulary: serde_json::Map<_, _> =
        (0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte))).collect();
    for (token, id) in [("▁the", 256), ("▁cat", 257), ("s", 258)] {
        vocabulary.insert(token.into(), json!(id));
    }
    let json = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 }
        ] },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": true }
    });
    Tokenizer::from_json(json.to_string().into_bytes(), "words").unwrap()
}

#[test]
fn a_token_is_decoded_behind_its_context() {
    let words = words();
    assert_eq!(pieces(&words, &[], &[256, 257, 258]), ["the", " cat", "s", ""]);
    assert_eq!(pieces(&words, &[256], &[257, 258, 256]), [" cat", "s", " the", ""]);
    let crab: Vec<u32> = "🦀é".bytes().map(u32::from).collect();
    assert_eq!(pieces(&words, &[256], &crab).concat(), "🦀é");
    assert_eq!(pieces(&words, &[257], &[&crab[..2], &[256]].concat()).concat(), "\u{FFFD}\u{FFFD} the");
}

/// What `Stops` returns for pieces, and whether it stopped.
fn shown(strings: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
    let strings: Vec<String> = strings.iter().map(|string| string.to_string()).collect();
    let mut stops = Stops::new(strings);
    let mut list = Vec::new();
    for piece in pieces {
        let (text, stopped) = stops.push(piece);
        list.push(text);
        if stopped {
            return (list, true);
        }
    }
    list.push(stops.finish());
    (list, false)
}

#[test]
fn stop_strings_are_found_across_pieces() {
    let owned = |list: &[&str]| list.iter().map(|text| text.to_string()).collect::<Vec<_>>();
    assert_eq!(shown(&["END"], &["a E", "N", "D b"]), (owned(&["a ", "", ""]), true));
    assert_eq!(shown(&["END"], &["EE", "ND"]), (owned(&["E", ""]), true));
    assert_eq!(shown(&["END"], &["E", "Nd"]), (owned(&["", "ENd", ""]), false));
    assert_eq!(shown(&["END"], &["x", "EN"]), (owned(&["x", "", "EN"]), false));
    assert_eq!(shown(&["aab"], &["a", "a", "a", "b"]), (owned(&["", "", "a", ""]), true));
    assert_eq!(shown(&["later", "x"], &["lax later"]), (owned(&["la"]), true));
    assert_eq!(shown(&["é!"], &["né", "?"]), (owned(&["n", "é?", ""]), false));
    assert_eq!(shown(&["", "b"], &["ab"]), (owned(&["a"]), true));
    assert_eq!(shown(&[], &["ab"]), (owned(&["ab", ""]), false));
}

proptest! {
    /// In total, a stream returns what decoding all tokens at once returns, and never retracts anything.
    #[test]
    fn a_stream_gives_all_of_the_text(
        ids in prop::collection::vec(prop_oneof![0u32..128, 0u32..260, 0xC0u32..0xF8], 0..40),
        text in "\\PC{0,8}"
    ) {
        let bytes = Tokenizer::bytes();
        prop_assert_eq!(pieces(&bytes, &[], &ids).concat(), bytes.decode(&ids).unwrap());
        let ids = bytes.encode(&text).unwrap();
        let all = pieces(&bytes, &bytes.encode("before").unwrap(), &ids);
        prop_assert!(all.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)) || text.contains(char::REPLACEMENT_CHARACTER));
        prop_assert_eq!(all.concat(), text);
    }

    /// The text before the first stop string is found wherever the pieces are cut.
    #[test]
    fn stops_show_the_text_before(pieces in prop::collection::vec("[ab]{0,3}", 0..12), stop in "[ab]{1,4}") {
        let whole = pieces.concat();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let (list, stopped) = shown(&[&stop], &pieces);
        let want = whole.find(&stop).map_or(whole.as_str(), |at| &whole[..at]);
        prop_assert_eq!((list.concat(), stopped), (want.to_string(), whole.contains(&stop)));
    }
}

//! Ids of a text that arrives in pieces: the same as those of the whole text, as soon as they are certain.

use super::{Encoder, Tokenizer};
use crate::error::{Error, Result};

/// Encodes a text that arrives in pieces of arbitrary bytes. Text after the last position where the tokenizer allows a
/// split is held back; if it allows none, that is the whole text.
pub struct Pieces<'t> {
    tokenizer: &'t Tokenizer,
    encoder: Encoder<'t>,
    /// Text whose ids are not known yet; it cannot be split before `searched`.
    held: String,
    searched: usize,
    /// The first bytes of an incomplete character, at most three.
    half: Vec<u8>,
    /// Number of bytes before `half`.
    bytes: usize,
}

impl<'t> Pieces<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer) -> Self {
        let (encoder, held, half) = (tokenizer.encoder(), String::new(), Vec::new());
        Self { tokenizer, encoder, held, searched: 0, half, bytes: 0 }
    }

    /// Takes the next piece and appends the ids that are certain. Bytes that are not UTF-8 are rejected with their
    /// position.
    pub fn push(&mut self, piece: &[u8], ids: &mut Vec<u32>) -> Result<()> {
        self.take(piece)?;
        let cut = self.tokenizer.cut().and_then(|cut| cut.last_place(&self.held, self.searched));
        let Some(cut) = cut else {
            // Whether the text can be split at the last line end depends on what follows.
            self.searched = self.held.len().saturating_sub(1);
            return Ok(());
        };
        self.encoder.encode(&self.held[..cut], ids)?;
        self.held.drain(..cut);
        self.searched = 0;
        Ok(())
    }

    /// Appends the ids of the rest.
    pub fn finish(mut self, ids: &mut Vec<u32>) -> Result<()> {
        if !self.half.is_empty() {
            return Err(self.not_utf8());
        }
        self.encoder.encode(&self.held, ids)
    }

    /// Moves complete characters to the text that is held back.
    fn take(&mut self, mut piece: &[u8]) -> Result<()> {
        while !self.half.is_empty() && !piece.is_empty() {
            self.half.push(piece[0]);
            piece = &piece[1..];
            match std::str::from_utf8(&self.half) {
                Ok(character) => {
                    self.held.push_str(character);
                    self.bytes += self.half.len();
                    self.half.clear();
                }
                Err(error) if error.error_len().is_some() => return Err(self.not_utf8()),
                Err(_) => {}
            }
        }
        let (whole, half, broken) = match std::str::from_utf8(piece) {
            Ok(whole) => (whole, &[][..], false),
            Err(error) => {
                let (whole, half) = piece.split_at(error.valid_up_to());
                // These bytes are known to be complete characters.
                (std::str::from_utf8(whole).unwrap_or_default(), half, error.error_len().is_some())
            }
        };
        self.held.push_str(whole);
        self.bytes += whole.len();
        if broken {
            return Err(self.not_utf8());
        }
        self.half.extend_from_slice(half);
        Ok(())
    }

    fn not_utf8(&self) -> Error {
        Error::Request(format!(
            "the text is not UTF-8: byte {} (from 0) is not part of a character",
            self.bytes
        ))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::tokenizer::byte_level::LINE_END_LAST;
    use crate::tokenizer::byte_level_json;

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
        let list = vec![Tokenizer::bytes(), load(before), load(after.to_string()), words, load(plain)];
        assert_eq!(list.iter().filter(|tokenizer| tokenizer.cut().is_none()).count(), 1);
        list
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
        for tokenizer in tokenizers().iter().take(4) {
            let (mut pieces, mut ids) = (tokenizer.pieces(), Vec::new());
            for _ in 0..100 {
                pieces.push(b"ab ab\nab", &mut ids).unwrap();
            }
            assert!(pieces.held.len() < 20, "{tokenizer:?} holds {:?}", pieces.held);
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
}

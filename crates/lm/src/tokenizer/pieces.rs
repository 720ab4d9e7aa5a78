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

//! Converts tokens to text as they arrive: no incomplete characters, and no part of a stop string.

use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// An incomplete multi-byte character lacks at most three bytes. Some tokenizers decode each of its bytes to one of
/// these until the rest arrives.
const REPLACEMENT: char = '\u{FFFD}';
const HELD_REPLACEMENTS: usize = 3;

/// Converts tokens to text one by one. Text that the next tokens may still change is held back.
///
/// Some tokenizers decode a token differently after another one (for instance, they drop a space before the first). So
/// tokens are decoded together with those before them, and the known part is then removed.
#[derive(Clone, Debug)]
pub struct TextStream {
    /// A few tokens whose text is known, followed by those whose text is not.
    ids: Vec<u32>,
    /// The number of tokens whose text is known.
    known: usize,
    /// The part of the text of `ids` that was already returned.
    given: String,
}

impl TextStream {
    /// Creates a stream that continues after the last tokens of a text, `context`. Use the same tokenizer in all calls.
    pub fn new(tokenizer: &Tokenizer, context: &[u32]) -> Result<Self> {
        let given = tokenizer.decode(context)?;
        Ok(Self { ids: context.to_vec(), known: context.len(), given })
    }

    /// Adds a token and returns the text that is now final.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids)?;
        let replacements =
            text.chars().rev().take(HELD_REPLACEMENTS).take_while(|&c| c == REPLACEMENT).count();
        let certain = &text[..text.len() - replacements * REPLACEMENT.len_utf8()];
        let whole = certain.len() == text.len();
        let new = match certain.strip_prefix(&self.given) {
            Some(new) => new.to_string(),
            None if !whole => return Ok(String::new()),
            // Text that was already returned has changed: it stays as it was, and the new tokens are decoded alone.
            None => tokenizer.decode(&self.ids[self.known..])?,
        };
        if whole {
            self.ids.drain(..self.known);
            self.known = self.ids.len();
            self.given = tokenizer.decode(&self.ids)?;
        } else {
            self.given = certain.to_string();
        }
        Ok(new)
    }

    /// Whether there are tokens whose text is not final.
    pub fn holds(&self) -> bool {
        self.known < self.ids.len()
    }

    /// Returns the rest as it is.
    pub fn finish(self, tokenizer: &Tokenizer) -> Result<String> {
        let text = tokenizer.decode(&self.ids)?;
        match text.strip_prefix(&self.given) {
            Some(rest) => Ok(rest.to_string()),
            None => tokenizer.decode(&self.ids[self.known..]),
        }
    }
}

/// Searches for stop strings in a text that arrives in pieces. A possible beginning of one is held back.
#[derive(Clone, Debug)]
pub struct Stops {
    strings: Vec<String>,
    held: String,
}

impl Stops {
    /// Creates a search for `strings`; empty ones never match.
    pub fn new(strings: Vec<String>) -> Self {
        Self { strings, held: String::new() }
    }

    /// Returns the text before any stop string, and whether one was found; nothing may be pushed after that.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held += piece;
        let strings = self.strings.iter().filter(|string| !string.is_empty());
        if let Some(at) = strings.clone().filter_map(|string| self.held.find(string.as_str())).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let begins = |at: &usize| strings.clone().any(|string| string.starts_with(&self.held[*at..]));
        let at = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
        let held = self.held.split_off(at);
        (std::mem::replace(&mut self.held, held), false)
    }

    /// Whether text is held back.
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Returns the text that is held back, once no more arrives.
    pub fn finish(self) -> String {
        self.held
    }
}

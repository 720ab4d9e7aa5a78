//! The text that needles are hidden in: words, and where its sentences begin.

use std::ops::Range;
use std::path::Path;

use super::super::builtin;
use crate::error::{Error, Result};

/// A text as a haystack of any number of words: it begins anew when it is over. The harness stops at the end
/// of its essays instead, so that long contexts are shorter than they claim to be.
#[derive(Clone, Debug)]
pub struct Essay {
    /// At least one.
    words: Vec<String>,
    /// The index of each sentence's first word; the first is 0.
    starts: Vec<usize>,
}

/// What a point that ends no sentence may belong to.
const ABBREVIATIONS: [&str; 28] = [
    "Mr.", "Mrs.", "Ms.", "Messrs.", "Mme.", "Mlle.", "Dr.", "Prof.", "Rev.", "Hon.", "St.", "Mt.", "Ft.",
    "Jr.", "Sr.", "Capt.", "Col.", "Gen.", "Lt.", "Maj.", "Sgt.", "No.", "Vol.", "Fig.", "vs.", "cf.",
    "e.g.", "i.e.",
];

const OPENING: [char; 9] = ['"', '\'', '`', '“', '‘', '«', '(', '[', '_'];
const CLOSING: [char; 8] = ['"', '\'', '”', '’', '»', ')', ']', '_'];

impl Essay {
    /// Takes the words of a text; fails if there are none.
    pub fn new(text: &str) -> Result<Self> {
        let words: Vec<String> = text.split_whitespace().map(Into::into).collect();
        if words.is_empty() {
            return Err(Error::Request("the text to hide needles in has no words".into()));
        }
        let between = words.windows(2).enumerate();
        let later = between.filter(|(_, pair)| ends(&pair[0], &pair[1])).map(|(i, _)| i + 1);
        let starts = std::iter::once(0).chain(later).collect();
        Ok(Self { words, starts })
    }

    /// Reads a text file.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(Error::io(path, "read the text to hide needles in"))?;
        let text = str::from_utf8(&bytes).map_err(|_| Error::file(path, "is not a text in UTF-8"))?;
        Self::new(text).map_err(|_| Error::file(path, "has no words to hide needles in"))
    }

    /// The built-in text.
    pub fn builtin() -> Self {
        let one = || Self { words: vec!["The".into()], starts: vec![0] };
        Self::new(builtin()).unwrap_or_else(|_| one())
    }

    /// The number of sentences; the text begins anew after the last one.
    #[doc(hidden)]
    pub fn count(&self) -> usize {
        self.starts.len()
    }

    /// The number of sentences of `words` words from the beginning of a sentence, of which the last may be cut.
    #[doc(hidden)]
    pub fn sentences(&self, first: usize, words: usize) -> usize {
        let end = self.start(first) + words;
        let (times, rest) = (end / self.words.len(), end % self.words.len());
        times * self.starts.len() + self.starts.partition_point(|&start| start < rest) - first
    }

    /// The index of a sentence's first word.
    #[doc(hidden)]
    pub fn start(&self, sentence: usize) -> usize {
        let (times, rest) = (sentence / self.starts.len(), sentence % self.starts.len());
        times * self.words.len() + self.starts[rest]
    }

    /// Appends words with single spaces between them.
    #[doc(hidden)]
    pub fn append(&self, words: Range<usize>, text: &mut String) {
        for i in words.clone() {
            if i > words.start {
                text.push(' ');
            }
            text.push_str(&self.words[i % self.words.len()]);
        }
    }
}

/// Whether a sentence ends between two words: the first ends with a point, `!` or `?`, and the second begins
/// with a capital or a quote. Titles and initials, which also end with a point, end no sentence.
fn ends(word: &str, next: &str) -> bool {
    let bare = word.trim_end_matches(CLOSING);
    if !bare.ends_with(['.', '!', '?']) {
        return false;
    }
    let bare = bare.trim_start_matches(OPENING);
    let mut letters = bare.chars();
    let initial = matches!(
        (letters.next(), letters.next(), letters.next()),
        (Some(letter), Some('.'), None) if letter.is_uppercase() && letter != 'I'
    );
    let begins =
        next.chars().next().is_some_and(|first| first.is_uppercase() || OPENING[..6].contains(&first));
    begins && !initial && !ABBREVIATIONS.contains(&bare)
}

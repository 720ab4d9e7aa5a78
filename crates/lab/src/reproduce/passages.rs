//! Passages of a corpus's held-out documents, and which of their tokens could profit from a memory.
//!
//! ```text
//! repeat       the pair (previous token, token) occurred before in the passage, and at most RARE times in training:
//!              Zoology's "AR hits"; by the distance to the pair's last occurrence
//! identifier   part of an identifier that occurred exactly once before, more than FAR tokens back
//! other        neither
//! ```

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use march_lm::data::Shards;
use march_lm::tokenizer::Tokenizer;
use march_lm::{Error, Result};

/// A pair of tokens that occurs more often in training is known, not recalled.
const RARE: u16 = 100;
/// The bounds of the distances: one and four of MARCH's intervals.
const NEAR: usize = 256;
const FAR: usize = 1024;
/// Shorter identifiers recur by chance.
const SHORTEST_IDENTIFIER: usize = 6;

/// The groups of tokens.
pub const GROUPS: [&str; 7] = [
    "all tokens",
    "repeated rare pairs",
    "repeated, at most 256 back",
    "repeated, 257 to 1,024 back",
    "repeated, more than 1,024 back",
    "identifiers seen once, more than 1,024 back",
    "other tokens",
];

/// The group of tokens of repeated definitions.
pub const REPETITIONS: &str = "repetitions";

/// A part of a document.
#[derive(Clone, Debug, PartialEq)]
pub struct Passage {
    /// The number of the document.
    pub document: usize,
    /// Its tokens: one more than are read, the last of which is only a target.
    pub ids: Vec<u32>,
}

/// The documents of a part of a corpus, without the ends of text between them.
pub fn documents(shards: &Shards) -> Result<Vec<Range<u64>>> {
    let mut ids = Vec::new();
    shards.read(0..shards.tokens(), &mut ids)?;
    let Some(end) = shards.meta().end_of_text else {
        return Err(Error::file(shards.folder(), "has no end-of-text token between its documents"));
    };
    let mut documents = Vec::new();
    let mut start = 0;
    for (at, _) in ids.iter().enumerate().filter(|(_, id)| **id == end) {
        documents.push(start as u64..at as u64);
        start = at + 1;
    }
    Ok(documents)
}

/// Up to `count` passages of `length` tokens from each document that has that many, at equal distances.
pub fn passages(shards: &Shards, length: usize, count: usize) -> Result<Vec<Passage>> {
    let mut passages = Vec::new();
    for (document, range) in documents(shards)?.into_iter().enumerate() {
        let fit = fitting(&range, length, count);
        // What is left over is divided among the spaces between the passages.
        let step = (range.end - range.start).saturating_sub(1) as usize / fit.max(1);
        for number in 0..fit {
            let start = range.start + (number * step) as u64;
            let mut ids = Vec::new();
            shards.read(start..start + length as u64 + 1, &mut ids)?;
            passages.push(Passage { document, ids });
        }
    }
    Ok(passages)
}

/// The number of these passages.
pub fn count_passages(shards: &Shards, length: usize, count: usize) -> Result<usize> {
    Ok(documents(shards)?.iter().map(|range| fitting(range, length, count)).sum())
}

/// How many passages of a document there are; each has a token after it.
fn fitting(document: &Range<u64>, length: usize, most: usize) -> usize {
    let tokens = (document.end - document.start) as usize;
    (tokens.saturating_sub(1) / length.max(1)).min(most)
}

/// Finds the groups of tokens.
pub struct Grouping {
    /// How often each pair of ids occurs in training, at most RARE + 1.
    pairs: Vec<u16>,
    vocabulary: usize,
    /// The bytes of each token.
    bytes: Vec<Vec<u8>>,
}

impl Grouping {
    /// Counts the pairs of the training tokens.
    pub fn new(training: &Path) -> Result<Self> {
        let shards = Shards::open(training)?;
        let tokenizer = shards.tokenizer()?;
        let vocabulary = tokenizer.vocabulary();
        let mut pairs = vec![0u16; vocabulary * vocabulary];
        let (mut ids, mut last) = (Vec::new(), None);
        // Shards are read in parts, which keeps the memory small.
        let part = 1 << 22;
        for start in (0..shards.tokens()).step_by(part) {
            ids.clear();
            shards.read(start..(start + part as u64).min(shards.tokens()), &mut ids)?;
            for &id in &ids {
                if let Some(last) = last {
                    let count = &mut pairs[last as usize * vocabulary + id as usize];
                    *count = (*count + 1).min(RARE + 1);
                }
                last = Some(id);
            }
        }
        let bytes = (0..vocabulary as u32).map(|id| tokenizer.token_bytes(id).unwrap_or_default()).collect();
        Ok(Self { pairs, vocabulary, bytes })
    }

    /// For each target of a passage, that is for all tokens but the first, whether it belongs to each of [`GROUPS`].
    pub fn groups(&self, ids: &[u32]) -> Vec<[bool; GROUPS.len()]> {
        let identifiers = self.identifiers(ids);
        let mut last: HashMap<(u32, u32), usize> = HashMap::new();
        let one = |at: usize| {
            let pair = (ids[at - 1], ids[at]);
            let known = self.pairs[pair.0 as usize * self.vocabulary + pair.1 as usize] > RARE;
            let distance = last.insert(pair, at).map(|before| at - before).filter(|_| !known);
            let within = |range: Range<usize>| distance.is_some_and(|distance| range.contains(&distance));
            [
                true,
                distance.is_some(),
                within(1..NEAR + 1),
                within(NEAR + 1..FAR + 1),
                within(FAR + 1..usize::MAX),
                identifiers[at],
                distance.is_none() && !identifiers[at],
            ]
        };
        (1..ids.len()).map(one).collect()
    }

    /// For each token, whether it is part of an identifier that occurred exactly once before, far back.
    fn identifiers(&self, ids: &[u32]) -> Vec<bool> {
        let mut found = vec![false; ids.len()];
        // For each byte of the text, the token that it belongs to.
        let (mut text, mut owner) = (Vec::new(), Vec::new());
        for (at, &id) in ids.iter().enumerate() {
            let bytes = self.bytes.get(id as usize).map_or(&[][..], Vec::as_slice);
            text.extend_from_slice(bytes);
            owner.extend(std::iter::repeat_n(at, bytes.len()));
        }
        // Where each identifier occurred last, and how often.
        let mut seen: HashMap<&[u8], (usize, usize)> = HashMap::new();
        let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
        let mut start = 0;
        for word in text.split(|byte| !is_part(byte)) {
            let end = start + word.len();
            if word.len() >= SHORTEST_IDENTIFIER && !word[0].is_ascii_digit() {
                let at = owner[start];
                let (before, count) = seen.get(word).copied().unwrap_or_default();
                if count == 1 && at - before > FAR {
                    found[at..=owner[end - 1]].fill(true);
                }
                seen.insert(word, (at, count + 1));
            }
            start = end + 1;
        }
        found
    }
}

/// Least and most tokens of a definition that is repeated.
const DEFINITION: Range<usize> = 48..161;

/// A text in which a definition occurs, then `distance` tokens of another document, then the definition again.
#[derive(Clone, Debug, PartialEq)]
pub struct Copy {
    /// The number of the document that the definition is from.
    pub document: usize,
    /// The whole text.
    pub ids: Vec<u32>,
    /// The tokens of the repetition.
    pub repetition: Range<usize>,
}

/// Up to `count` such texts from each document. A definition is a function that begins and ends without indentation.
pub fn copies(shards: &Shards, tokenizer: &Tokenizer, distance: usize, count: usize) -> Result<Vec<Copy>> {
    let documents = documents(shards)?;
    let line_end = tokenizer.encode("\n")?;
    let mut copies = Vec::new();
    for (number, range) in documents.iter().enumerate() {
        let mut ids = Vec::new();
        shards.read(range.start..range.end.min(range.start + (1 << 17)), &mut ids)?;
        let text = tokenizer.decode(&ids)?;
        let encoded = functions(&text).map(|function| tokenizer.encode(function));
        let fitting = encoded.filter(|ids| ids.as_ref().map_or(true, |ids| DEFINITION.contains(&ids.len())));
        for (place, definition) in fitting.take(count).enumerate() {
            let definition = definition?;
            // What lies between comes from the next document that is long enough.
            let others = (1..documents.len()).map(|step| &documents[(number + step) % documents.len()]);
            let long = others.filter(|other| other.end - other.start > (2 * distance) as u64 + 64);
            let Some(other) = long.into_iter().nth(place) else { continue };
            let mut between = Vec::new();
            shards.read(other.start..other.start + distance as u64 - line_end.len() as u64, &mut between)?;
            between.extend(&line_end);
            let ids = [&definition[..], &between, &definition].concat();
            let repetition = definition.len() + between.len()..ids.len();
            copies.push(Copy { document: number, ids, repetition });
        }
    }
    Ok(copies)
}

/// The functions of a source file that begin and end without indentation.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    let starts = text.match_indices('\n').map(|(at, _)| at + 1);
    starts.filter_map(|start| {
        let rest = &text[start..];
        let is_function = rest.starts_with("fn ") || rest.starts_with("pub fn ");
        let end = rest.find("\n}\n").filter(|_| is_function)? + 3;
        Some(&rest[..end])
    })
}

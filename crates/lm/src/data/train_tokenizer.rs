//! Trains a byte-level BPE tokenizer: the most frequent pairs of adjacent tokens become tokens.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::path::PathBuf;

use super::text::{self, Record};
use crate::error::{Error, Result};
use crate::tokenizer::{BYTE_END_OF_TEXT, END_OF_TEXT, Tokenizer, byte_level_json, words};

/// Pairs that occur less often than this do not become tokens.
const LEAST: u64 = 2;

/// Number of ids before the first learned token: the bytes and the end of text.
const FIRST: usize = BYTE_END_OF_TEXT as usize + 1;

/// Trains a tokenizer of `vocabulary` ids on files: the 256 bytes, `<|endoftext|>`, and merges within GPT-2's words.
/// The same files give the same tokenizer; it has fewer ids if the text is too short. `watch` receives the progress:
/// the current phase, the amount done, and the total.
pub fn train_tokenizer(
    files: &[PathBuf],
    text_column: &str,
    vocabulary: usize,
    skip_bad: bool,
    watch: &mut dyn FnMut(&'static str, u64, u64),
) -> Result<Tokenizer> {
    if files.is_empty() {
        return Err(Error::Request("no input files; name at least one text file".into()));
    }
    if !(FIRST..=1 << 24).contains(&vocabulary) {
        let message =
            format!("a vocabulary of {vocabulary} is not possible: it must be between {FIRST} (256 bytes");
        return Err(Error::Request(format!("{message} and <|endoftext|>) and {}", 1 << 24)));
    }
    let counts = count_words(files, text_column, skip_bad, watch)?;
    let mut learner = Learner::new(counts);
    while learner.tokens.len() < vocabulary && learner.merge() {
        watch("merging pairs", (learner.tokens.len() - FIRST) as u64, (vocabulary - FIRST) as u64);
    }
    let merges: Vec<(&[u8], &[u8])> =
        learner.merges.iter().map(|&(a, b)| (learner.bytes(a), learner.bytes(b))).collect();
    let json = byte_level_json(&learner.tokens[FIRST..], &merges, true);
    Tokenizer::from_json(json.into_bytes(), "tokenizer.json").map_err(Error::Request)
}

/// Counts how often each word occurs in the files.
fn count_words(
    files: &[PathBuf],
    text_column: &str,
    skip_bad: bool,
    watch: &mut dyn FnMut(&'static str, u64, u64),
) -> Result<BTreeMap<Box<str>, u64>> {
    let sizes = files.iter().map(|file| text::check(file)).collect::<Result<Vec<u64>>>()?;
    let total = sizes.iter().sum();
    let mut counts: HashMap<Box<str>, u64> = HashMap::new();
    let mut done = 0;
    for (file, size) in files.iter().zip(sizes) {
        let mut documents = text::open(file, text_column)?;
        while let Some(record) = documents.read()? {
            let text = match record {
                Record::Document(text) => text,
                Record::Broken(_) if skip_bad => continue,
                Record::Broken(error) => return Err(error),
            };
            for word in text.split(END_OF_TEXT[0]).flat_map(words) {
                match counts.get_mut(word) {
                    Some(count) => *count += 1,
                    None => _ = counts.insert(word.into(), 1),
                }
            }
            watch("counting words in", done + documents.bytes(), total);
        }
        done += size;
    }
    if counts.is_empty() {
        return Err(Error::Request("the files contain no text; there is nothing to learn from".into()));
    }
    Ok(counts.into_iter().collect())
}

/// Two adjacent tokens.
type Pair = (u32, u32);

/// The occurrences of a pair.
#[derive(Default)]
struct Places {
    /// Number of occurrences in the whole text.
    count: u64,
    /// Indices of the words that contain it, or once did.
    words: Vec<usize>,
}

struct Learner {
    /// Each distinct word as tokens, and how often it occurs in the text.
    words: Vec<(Vec<u32>, u64)>,
    pairs: HashMap<Pair, Places>,
    /// The most frequent pair on top; ties go to the pair with the smaller ids. Counts may be outdated: a pair that has
    /// become rarer is put back when it reaches the top.
    queue: BinaryHeap<(u64, Reverse<Pair>)>,
    /// The bytes of each id; empty for the end of text.
    tokens: Vec<Vec<u8>>,
    ids: HashMap<Vec<u8>, u32>,
    merges: Vec<Pair>,
}

impl Learner {
    fn new(counts: BTreeMap<Box<str>, u64>) -> Self {
        let words: Vec<(Vec<u32>, u64)> =
            counts.into_iter().map(|(word, count)| (word.bytes().map(u32::from).collect(), count)).collect();
        let mut pairs: HashMap<Pair, Places> = HashMap::new();
        for (place, (word, count)) in words.iter().enumerate() {
            for pair in neighbours(word) {
                add(&mut pairs, pair, *count, place);
            }
        }
        let queue = pairs.iter().map(|(&pair, places)| (places.count, Reverse(pair))).collect();
        let tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).chain([vec![]]).collect();
        let ids = tokens.iter().cloned().zip(0..).take(BYTE_END_OF_TEXT as usize).collect();
        Self { words, pairs, queue, tokens, ids, merges: Vec::new() }
    }

    fn bytes(&self, id: u32) -> &[u8] {
        &self.tokens[id as usize]
    }

    /// Makes the most frequent pair a token; returns false if no pair is frequent enough.
    fn merge(&mut self) -> bool {
        let pair = loop {
            let Some((count, Reverse(pair))) = self.queue.pop() else { return false };
            // Zero if the pair was already merged and was in the queue twice.
            let now = self.pairs.get(&pair).map_or(0, |places| places.count);
            if now < LEAST {
                continue;
            }
            if now == count {
                break pair;
            }
            self.queue.push((now, Reverse(pair)));
        };
        let Some(Places { words, .. }) = self.pairs.remove(&pair) else { return false };
        let bytes = [self.bytes(pair.0), self.bytes(pair.1)].concat();
        // Two pairs can form the same token.
        let next = self.tokens.len() as u32;
        let id = *self.ids.entry(bytes.clone()).or_insert(next);
        if id == next {
            self.tokens.push(bytes);
        }
        self.merges.push(pair);
        let mut changed = Vec::new();
        for place in words {
            self.merge_in(place, pair, id, &mut changed);
        }
        changed.sort_unstable();
        changed.dedup();
        for pair in changed {
            if let Some(places) = self.pairs.get(&pair) {
                self.queue.push((places.count, Reverse(pair)));
            }
        }
        true
    }

    /// Replaces a pair in one word; pairs that have become more frequent are added to `changed`.
    fn merge_in(&mut self, place: usize, pair: Pair, id: u32, changed: &mut Vec<Pair>) {
        let Some((word, count)) = self.words.get_mut(place) else { return };
        if !neighbours(word).any(|found| found == pair) {
            return;
        }
        for old in neighbours(word) {
            if let Some(places) = self.pairs.get_mut(&old) {
                places.count -= *count;
            }
        }
        let (mut from, mut to) = (0, 0);
        while let Some(&symbol) = word.get(from) {
            let found = symbol == pair.0 && word.get(from + 1) == Some(&pair.1);
            word[to] = if found { id } else { symbol };
            from += if found { 2 } else { 1 };
            to += 1;
        }
        word.truncate(to);
        for new in neighbours(word) {
            if new.0 == id || new.1 == id {
                add(&mut self.pairs, new, *count, place);
                changed.push(new);
            } else if let Some(places) = self.pairs.get_mut(&new) {
                places.count += *count;
            }
        }
    }
}

/// The pairs of a word, from left to right.
fn neighbours(word: &[u32]) -> impl Iterator<Item = Pair> {
    word.windows(2).map(|pair| (pair[0], pair[1]))
}

/// Counts an occurrence of a pair in a word.
fn add(pairs: &mut HashMap<Pair, Places>, pair: Pair, count: u64, place: usize) {
    let places = pairs.entry(pair).or_default();
    places.count += count;
    if places.words.last() != Some(&place) {
        places.words.push(place);
    }
}

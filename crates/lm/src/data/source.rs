//! Sources of sequences: shards, a text in memory, given batches.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use super::loader::fingerprint;
use super::{Shards, Source};
use crate::error::{Error, Result};
use crate::tokenizer::sha256;

/// The number of sequences of T inputs in a text: each needs one more token, its last target, which is the first input
/// of the next sequence. Rejects a text that has none.
fn count(tokens: u64, sequence_length: usize) -> Result<u64> {
    if sequence_length == 0 {
        return Err(Error::Request("the sequence length is 0; it must be at least 1".into()));
    }
    match tokens.saturating_sub(1) / sequence_length as u64 {
        0 => Err(Error::Request(format!(
            "{tokens} tokens are too few for one sequence of {sequence_length} tokens and its last target; use \
             shorter sequences or more text"
        ))),
        sequences => Ok(sequences),
    }
}

/// Appends T inputs and T targets from T + 1 tokens.
fn append(tokens: &[u32], inputs: &mut Vec<u32>, targets: &mut Vec<u32>) {
    if let [rest @ .., _] = tokens {
        inputs.extend_from_slice(rest);
    }
    if let [_, rest @ ..] = tokens {
        targets.extend_from_slice(rest);
    }
}

/// The error for an index that the source does not have.
fn no_sequence(index: u64, sequences: u64) -> Error {
    Error::Request(format!("sequence {index} is out of range; there are {sequences}"))
}

/// The tokens of a folder of shards, or a range of them: sequence i is tokens i·T..i·T + T + 1 of the range.
#[derive(Clone, Debug)]
pub struct ShardSource {
    shards: Arc<Shards>,
    range: Range<u64>,
    sequence_length: usize,
    sequences: u64,
}

impl ShardSource {
    /// A source of all tokens of a folder.
    pub fn new(shards: Arc<Shards>, sequence_length: usize) -> Result<Self> {
        let all = 0..shards.tokens();
        Self::part(shards, all, sequence_length)
    }

    /// A source of a range of a folder's tokens, as returned by [`super::split`].
    pub fn part(shards: Arc<Shards>, range: Range<u64>, sequence_length: usize) -> Result<Self> {
        if range.start > range.end || range.end > shards.tokens() {
            let message = format!("tokens {}..{} are out of range; there are", range.start, range.end);
            return Err(Error::file(shards.folder(), format!("{message} {}", shards.tokens())));
        }
        let sequences = count(range.end - range.start, sequence_length).map_err(|error| match error {
            Error::Request(message) => Error::file(shards.folder(), message),
            other => other,
        })?;
        Ok(Self { shards, range, sequence_length, sequences })
    }
}

impl Source for ShardSource {
    fn sequence_length(&self) -> usize {
        self.sequence_length
    }

    fn sequences(&self) -> u64 {
        self.sequences
    }

    fn sequence(&self, index: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        if index >= self.sequences {
            return Err(no_sequence(index, self.sequences));
        }
        let length = self.sequence_length as u64;
        let start = self.range.start + index * length;
        let first = inputs.len();
        self.shards.read(start..start + length + 1, inputs)?;
        targets.extend_from_slice(&inputs[first + 1..]);
        inputs.pop();
        Ok(())
    }

    fn fingerprint(&self) -> Result<String> {
        let Range { start, end } = self.range;
        Ok(fingerprint(&format!("shards {} {start} {end}", self.shards.fingerprint()?), &[]))
    }
}

/// A text in memory: sequence i is tokens i·T..i·T + T + 1.
#[derive(Clone, Debug)]
pub struct TextSource {
    tokens: Vec<u32>,
    sequence_length: usize,
    sequences: u64,
}

impl TextSource {
    /// The tokens of a text.
    pub fn new(tokens: Vec<u32>, sequence_length: usize) -> Result<Self> {
        let sequences = count(tokens.len() as u64, sequence_length)?;
        Ok(Self { tokens, sequence_length, sequences })
    }
}

impl Source for TextSource {
    fn sequence_length(&self) -> usize {
        self.sequence_length
    }

    fn sequences(&self) -> u64 {
        self.sequences
    }

    fn sequence(&self, index: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        if index >= self.sequences {
            return Err(no_sequence(index, self.sequences));
        }
        let start = index as usize * self.sequence_length;
        append(&self.tokens[start..start + self.sequence_length + 1], inputs, targets);
        Ok(())
    }

    fn fingerprint(&self) -> Result<String> {
        Ok(fingerprint("text", &[&self.tokens]))
    }
}

/// Batches from a JSON file, `{"batches": [steps][rows][T + 1 ids]}`: the sequences of the first step, then those of
/// the second, and so on. They are meant to be taken in order: load them without a seed, [`BatchFile::rows`] at a time.
#[derive(Clone, Debug)]
pub struct BatchFile {
    batches: Vec<Vec<Vec<u32>>>,
    rows: usize,
    sequence_length: usize,
    /// SHA-256 of the file.
    hash: String,
}

/// The part of the file that is read.
#[derive(Deserialize)]
struct Batches {
    batches: Vec<Vec<Vec<u32>>>,
}

impl BatchFile {
    /// Reads a file. All steps must have equally many rows, and all rows equally many ids.
    pub fn open(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io(path, "read"))?;
        let Batches { batches } = serde_json::from_str(&text).map_err(|error| {
            Error::file(path, format!("is not a file of batches, {{\"batches\": [[[ids]]]}}: {error}"))
        })?;
        let rows = batches.first().map_or(0, Vec::len);
        let length = batches.first().and_then(|step| step.first()).map_or(0, Vec::len);
        if rows == 0 || length < 2 {
            return Err(Error::file(path, "needs at least one batch of one row of two ids"));
        }
        for (step, batch) in batches.iter().enumerate() {
            if batch.len() != rows {
                let message = format!("step {step} has {} rows, but step 0 has {rows}", batch.len());
                return Err(Error::file(path, message));
            }
            if let Some(row) = batch.iter().position(|row| row.len() != length) {
                let found = batch[row].len();
                let message =
                    format!("step {step}, row {row} has {found} ids, but the first row has {length}");
                return Err(Error::file(path, message));
            }
        }
        Ok(Self { batches, rows, sequence_length: length - 1, hash: sha256(text.as_bytes()) })
    }

    /// Number of sequences per step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of steps in the file.
    pub fn steps(&self) -> usize {
        self.batches.len()
    }
}

impl Source for BatchFile {
    fn sequence_length(&self) -> usize {
        self.sequence_length
    }

    fn sequences(&self) -> u64 {
        (self.batches.len() * self.rows) as u64
    }

    fn sequence(&self, index: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        let step = self.batches.get((index / self.rows as u64) as usize);
        let row = step.and_then(|step| step.get((index % self.rows as u64) as usize));
        append(row.ok_or_else(|| no_sequence(index, self.sequences()))?, inputs, targets);
        Ok(())
    }

    fn fingerprint(&self) -> Result<String> {
        Ok(fingerprint(&format!("batches {}", self.hash), &[]))
    }
}

//! Sequences in order or in a seeded random order, and a cursor to go on from.

use std::path::Path;

use crate::error::{Error, Result};

/// Sequences of T inputs and as many targets.
pub trait Source {
    /// T.
    fn sequence_length(&self) -> usize;
    /// Sequences of one epoch.
    fn sequences(&self) -> u64;
    /// Appends the T inputs and T targets of one sequence.
    fn sequence(&self, index: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()>;
}

/// Takes sequences from a source, epoch after epoch.
pub struct Loader {
    source: Box<dyn Source>,
    /// The seed of the order.
    shuffle: Option<u64>,
    /// Sequences taken so far.
    cursor: u64,
}

impl Loader {
    /// A loader at the beginning; with a seed each epoch has a random order of its own.
    pub fn new(source: Box<dyn Source>, shuffle: Option<u64>) -> Self {
        Self { source, shuffle, cursor: 0 }
    }

    /// T.
    pub fn sequence_length(&self) -> usize {
        self.source.sequence_length()
    }

    /// Sequences of one epoch.
    pub fn sequences(&self) -> u64 {
        self.source.sequences()
    }

    /// Appends the next `rows` sequences.
    pub fn next(&mut self, rows: usize, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        for _ in 0..rows {
            self.source.sequence(self.at(self.cursor), inputs, targets)?;
            self.cursor += 1;
        }
        Ok(())
    }

    /// Appends one sequence of the source, by its index.
    pub fn sequence(&self, index: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        self.source.sequence(index, inputs, targets)
    }

    /// Sequences taken so far.
    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    /// Goes on from a cursor.
    pub fn seek(&mut self, cursor: u64) {
        self.cursor = cursor;
    }

    /// The index of the sequence at a cursor.
    pub fn at(&self, cursor: u64) -> u64 {
        let count = self.source.sequences().max(1);
        let (epoch, place) = (cursor / count, cursor % count);
        match self.shuffle {
            Some(seed) => permuted(place, count, mix(seed ^ mix(epoch))),
            None => place,
        }
    }
}

/// The place of `x` in a permutation of 0..count that depends on the key only: a Feistel network on the smallest
/// even number of bits that holds `count`, again until it falls below `count`.
fn permuted(x: u64, count: u64, key: u64) -> u64 {
    let bits = (64 - (count.max(2) - 1).leading_zeros()).next_multiple_of(2);
    let half = bits / 2;
    let mask = (1u64 << half) - 1;
    let mut x = x;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..6 {
            (left, right) = (right, left ^ (mix(right ^ key.rotate_left(round * 11)) & mask));
        }
        x = (left << half) | right;
        if x < count {
            return x;
        }
    }
}

/// A number that looks random (SplitMix64's last steps).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Tokens in memory; sequence i is tokens [i·T, i·T + T + 1).
pub struct TextSource {
    tokens: Vec<u32>,
    length: usize,
}

impl TextSource {
    /// Refuses tokens that are too few for one sequence.
    pub fn new(tokens: Vec<u32>, sequence_length: usize) -> Result<Self> {
        if tokens.len() <= sequence_length {
            return Err(Error::Request(format!(
                "{} tokens are too few for one sequence of {sequence_length} and its next token; take more text or \
                 a smaller `sequence_length`",
                tokens.len()
            )));
        }
        Ok(Self { tokens, length: sequence_length })
    }
}

impl Source for TextSource {
    fn sequence_length(&self) -> usize {
        self.length
    }

    fn sequences(&self) -> u64 {
        ((self.tokens.len() - 1) / self.length) as u64
    }

    fn sequence(&self, index: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        let start = index as usize * self.length;
        inputs.extend(&self.tokens[start..start + self.length]);
        targets.extend(&self.tokens[start + 1..start + self.length + 1]);
        Ok(())
    }
}

/// How many of `tokens` tokens are for training when a share at the end is held back.
pub fn split(tokens: usize, validation_fraction: f64) -> usize {
    tokens - (tokens as f64 * validation_fraction) as usize
}

/// Explicit batches from a JSON file: `{"batches": [[[id; T + 1]; rows]; steps]}`, taken in order.
pub struct BatchFile {
    rows: Vec<Vec<u32>>,
}

impl BatchFile {
    /// Reads the file; all rows must have T + 1 ids.
    pub fn open(path: &Path, sequence_length: usize) -> Result<Self> {
        #[derive(serde::Deserialize)]
        struct Batches {
            batches: Vec<Vec<Vec<u32>>>,
        }
        let text = std::fs::read_to_string(path).map_err(Error::io(path, "read"))?;
        let file: Batches = serde_json::from_str(&text).map_err(|error| {
            Error::file(path, format!("is not {{\"batches\": [[[ids], …], …]}}: {error}"))
        })?;
        let rows: Vec<Vec<u32>> = file.batches.into_iter().flatten().collect();
        if rows.is_empty() {
            return Err(Error::file(path, "has no batches"));
        }
        if let Some((i, row)) = rows.iter().enumerate().find(|(_, row)| row.len() != sequence_length + 1) {
            let message = format!(
                "row {i} has {} ids; with `sequence_length` {sequence_length} it must have {}",
                row.len(),
                sequence_length + 1
            );
            return Err(Error::file(path, message));
        }
        Ok(Self { rows })
    }
}

impl Source for BatchFile {
    fn sequence_length(&self) -> usize {
        self.rows.first().map_or(0, |row| row.len() - 1)
    }

    fn sequences(&self) -> u64 {
        self.rows.len() as u64
    }

    fn sequence(&self, index: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        let row = &self.rows[index as usize % self.rows.len()];
        inputs.extend(&row[..row.len() - 1]);
        targets.extend(&row[1..]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_is_a_permutation() {
        for count in [1u64, 2, 3, 7, 16, 100, 1000] {
            for key in 0..5 {
                let mut seen: Vec<u64> = (0..count).map(|x| permuted(x, count, mix(key))).collect();
                seen.sort_unstable();
                assert!(seen.iter().enumerate().all(|(i, &x)| i as u64 == x), "{count} {key}");
            }
        }
        let loader = Loader::new(Box::new(TextSource::new((0..1001).collect(), 10).unwrap()), Some(3));
        let epoch = |n: u64| (n * 100..(n + 1) * 100).map(|c| loader.at(c)).collect::<Vec<_>>();
        assert_ne!(epoch(0), epoch(1));
        assert_ne!(epoch(0), (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_cursor_goes_on_where_it_was() {
        let make = || Loader::new(Box::new(TextSource::new((0..35).collect(), 4).unwrap()), Some(1));
        let (mut whole, mut rest) = (make(), make());
        assert_eq!(whole.sequences(), 8);
        let (mut a, mut b, mut skip) = ((vec![], vec![]), (vec![], vec![]), (vec![], vec![]));
        whole.next(5, &mut skip.0, &mut skip.1).unwrap();
        whole.next(9, &mut a.0, &mut a.1).unwrap();
        rest.seek(5);
        rest.next(9, &mut b.0, &mut b.1).unwrap();
        assert_eq!(a, b);
        assert!(a.0.iter().zip(&a.1).all(|(x, y)| x + 1 == *y));
    }
}

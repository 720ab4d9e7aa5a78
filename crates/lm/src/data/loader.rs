//! Batches: sequences from a source, in order or shuffled, from any position.

use super::order::Order;
use crate::error::{Error, Result};
use crate::tokenizer::sha256;

/// Sequences of T inputs and T targets; each target is the input one token later.
///
/// A source is implemented by a text, a folder of shards or a synthetic task: it returns the sequence of an index and
/// has no current position. The [`Loader`] is responsible for order and position.
pub trait Source: Send {
    /// T, the number of inputs per sequence.
    fn sequence_length(&self) -> usize;

    /// The number of sequences in one epoch.
    fn sequences(&self) -> u64;

    /// How many of a sequence's T targets count, or about how many on average; the others are
    /// [`IGNORE`](march_engine::ops::cross_entropy::IGNORE). A step's gradient is divided by this number times its
    /// sequences.
    fn targets(&self) -> usize {
        self.sequence_length()
    }

    /// Appends the T inputs and the T targets of a sequence, the same each time. `index` is below
    /// [`Source::sequences`].
    fn sequence(&self, index: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()>;

    /// A hexadecimal string that is equal for equal sequences: when a run resumes, it is compared with the one recorded
    /// at the start.
    fn fingerprint(&self) -> Result<String>;
}

/// The fingerprint of a source, computed from a description and its tokens.
pub(super) fn fingerprint(about: &str, tokens: &[&[u32]]) -> String {
    let mut bytes = format!("{about}\n").into_bytes();
    for tokens in tokens {
        bytes.extend(tokens.iter().flat_map(|id| id.to_le_bytes()));
    }
    sha256(&bytes)
}

/// Takes batches from a source.
pub struct Loader {
    source: Box<dyn Source>,
    sequences: u64,
    shuffle: Option<u64>,
    cursor: u64,
}

impl Loader {
    /// Starts at the beginning of a source; with a seed, every epoch is shuffled in its own order.
    pub fn new(source: Box<dyn Source>, shuffle: Option<u64>) -> Result<Self> {
        let sequences = source.sequences();
        if sequences == 0 {
            return Err(Error::Request("the source has no sequences; it needs at least one".into()));
        }
        Ok(Self { source, sequences, shuffle, cursor: 0 })
    }

    /// The source.
    pub fn source(&self) -> &dyn Source {
        self.source.as_ref()
    }

    /// Replaces the contents of `inputs` and `targets`, [rows, T] each, with the next sequences. After the last
    /// sequence of an epoch comes the first of the next. On an error the loader's position is unchanged.
    pub fn next(&mut self, rows: usize, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        inputs.clear();
        targets.clear();
        let mut order = None;
        for row in 0..rows as u64 {
            let index = self.ordered(self.cursor.wrapping_add(row), &mut order);
            self.source.sequence(index, inputs, targets)?;
        }
        self.cursor = self.cursor.wrapping_add(rows as u64);
        Ok(())
    }

    /// Number of sequences taken since the beginning, over all epochs.
    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    /// Moves to a position that [`Loader::cursor`] returned; the same sequences follow as did then.
    pub fn seek(&mut self, cursor: u64) {
        self.cursor = cursor;
    }

    /// The index of the sequence at a cursor.
    pub fn at(&self, cursor: u64) -> u64 {
        self.ordered(cursor, &mut None)
    }

    /// The index of the sequence at a cursor, with the order of the most recently used epoch cached in `order`.
    fn ordered(&self, cursor: u64, order: &mut Option<(u64, Order)>) -> u64 {
        let (epoch, place) = (cursor / self.sequences, cursor % self.sequences);
        let Some(seed) = self.shuffle else { return place };
        match order {
            Some((known, order)) if *known == epoch => order.at(place),
            _ => order.insert((epoch, Order::new(self.sequences, seed, epoch))).1.at(place),
        }
    }
}

//! Verifies a whole file against its checksums, on several threads.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use march_engine::checksum;

use super::BankFile;
use super::section::{Part, Section, advice, is_of_anchors};
use crate::error::{Error, Result};

/// Bytes per read: few enough to stay in the cache until they are summed.
const PIECE: usize = 256 << 10;
/// Files smaller than this are read by a single thread.
const SMALL: usize = 4 << 20;
const THREADS: usize = 8;

/// Consecutive rows of a tensor in the file.
struct Piece<'a> {
    section: &'a Section,
    /// The previous section.
    earlier: Option<&'a Section>,
    name: &'a str,
    part: &'a Part,
    rows: Range<usize>,
    /// Number of the tensor's rows in earlier sections.
    before: usize,
}

impl BankFile {
    /// Reads everything and verifies the checksums; the error names the tensor of the first mismatch.
    pub fn verify(&self) -> Result<()> {
        let pieces = self.pieces();
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = if self.bytes() < SMALL { 1 } else { cores.clamp(2, THREADS) };
        let next = AtomicUsize::new(0);
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        let failed_at = |i: usize, error: Option<Error>| {
            let mut failed = failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let first = failed.as_ref().is_none_or(|(first, _)| i < *first);
            if let (true, Some(error)) = (first, error) {
                *failed = Some((i, error));
            }
            !first
        };
        let work = || {
            let mut bytes = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                // Nothing after the first damage needs to be read.
                let Some(piece) = pieces.get(i).filter(|_| !failed_at(i, None)) else { return };
                if let Err(error) = self.verify_piece(piece, &mut bytes) {
                    failed_at(i, Some(error));
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        let failed = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        failed.map_or(Ok(()), |(_, error)| Err(error))
    }

    fn pieces(&self) -> Vec<Piece<'_>> {
        let mut rows_before: BTreeMap<&str, usize> = BTreeMap::new();
        let (mut pieces, mut earlier) = (Vec::new(), None);
        for section in self.sections() {
            for (name, part) in &section.tensors {
                let before = rows_before.entry(name).or_default();
                let row = part.entry.range.len() / part.rows.max(1);
                let step = (PIECE / row.max(1)).max(1);
                pieces.extend((0..part.rows).step_by(step).map(|first| {
                    let rows = first..(first + step).min(part.rows);
                    Piece { section, earlier, name, part, rows, before: *before }
                }));
                *before += part.rows;
            }
            earlier = Some(section);
        }
        // Sort by position in the file.
        pieces.sort_by_key(|piece| piece.part.row(piece.rows.start).start);
        pieces
    }

    fn verify_piece(&self, piece: &Piece<'_>, bytes: &mut Vec<u8>) -> Result<()> {
        let Piece { section, earlier, name, part, rows, before } = piece;
        let range = part.rows_range(rows.clone());
        bytes.resize(range.len(), 0);
        self.source.fill(range.start, bytes)?;
        self.compare_rows(section, name, part, rows.clone(), bytes, *before).map_err(|message| {
            let message = match earlier {
                Some(earlier) => format!("{message}. {}", advice(earlier)),
                None => message,
            };
            Error::damaged(&self.source.path, message)
        })
    }

    /// Verifies the bytes of some rows of a tensor, `before` rows of which are in earlier sections; the error says what
    /// is wrong.
    pub(super) fn compare_rows(
        &self,
        section: &Section,
        name: &str,
        part: &Part,
        rows: Range<usize>,
        bytes: &[u8],
        before: usize,
    ) -> std::result::Result<(), String> {
        let start = part.row(rows.start).start;
        for row in rows {
            let range = part.row(row);
            if checksum(&bytes[range.start - start..range.end - start]) != section.checksums[part.first + row]
            {
                let of = match is_of_anchors(name) {
                    true => format!(", kept anchor {} (counted from 0)", before + row),
                    false => String::new(),
                };
                return Err(format!(
                    "is damaged: tensor `{name}`{of} does not match the checksum written with it; \
                     restore the file from a copy"
                ));
            }
        }
        Ok(())
    }
}

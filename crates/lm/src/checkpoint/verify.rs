//! Loading tensors while a second thread checks the files: against their checksums, and for numbers that are not
//! finite.
//!
//! Copying a file's numbers to the device is bound by memory bandwidth, and so is checking them. In parallel on two
//! cores the check costs almost nothing; done sequentially, it would add half of the loading time. The checking thread
//! stays at most [`AHEAD`] bytes ahead of the copying thread, so that the data both threads touch is in memory only
//! once and copied pages are released soon.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use march_engine::checksum;
use safetensors::Dtype;

use super::Checkpoint;
use super::checksums::{BLOCK, file_checksum};
use super::read::{Kind, Stored, TensorFile};
use crate::error::{Error, Result};
use crate::model::ParameterSpec;

/// How many bytes the check may be ahead of the copy.
const AHEAD: usize = 64 << 20;

/// Progress of the copying thread.
#[derive(Default)]
struct CopyProgress {
    bytes: AtomicUsize,
    /// Set when nothing more will be copied.
    finished: AtomicBool,
}

impl Checkpoint {
    /// Passes on the numbers of each parameter, in order, while checking the files. Use the numbers only if this
    /// returns `Ok`: damage may be found after a file's numbers were passed on.
    pub fn read_all(
        &self,
        parameters: &[ParameterSpec],
        mut give: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.take_all(parameters, |i| {
            give(i, &self.tensor(&parameters[i])?)?;
            self.release(&parameters[i]);
            Ok(())
        })
    }

    /// Calls `take` for each parameter, in order, while checking the files. Use what it takes only if this returns `Ok`.
    pub(crate) fn take_all(
        &self,
        parameters: &[ParameterSpec],
        mut take: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let copied = CopyProgress::default();
        let copy = || {
            for (i, parameter) in parameters.iter().enumerate() {
                take(i)?;
                copied.bytes.fetch_add(self.bytes_of(parameter), Ordering::Relaxed);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let check = std::thread::Builder::new()
                .name("checkpoint check".into())
                .spawn_scoped(scope, || self.check_files(Some(&copied)));
            let mut copy = copy;
            let given = copy();
            copied.finished.store(true, Ordering::Release);
            match check.map(|check| check.join()) {
                // Damage takes precedence, because it explains any other error.
                Ok(Ok(Err(damage))) => Err(damage),
                Ok(Ok(Ok(()))) => given,
                // The thread could not be started, or it failed: check here instead.
                _ => self.check_files(None).and(given),
            }
        })
    }

    /// Verifies all tensor files against their checksums, and checks that all numbers are finite.
    pub fn verify(&self) -> Result<()> {
        self.check_files(None)
    }

    fn check_files(&self, copied: Option<&CopyProgress>) -> Result<()> {
        let mut done = 0;
        for (place, file) in self.files.iter().enumerate() {
            let mut tensors: Vec<(&str, &Stored)> = self
                .tensors
                .iter()
                .filter(|(_, (found, _))| *found == place)
                .map(|(name, (_, entry))| (name.as_str(), entry))
                .collect();
            tensors.sort_by_key(|(_, entry)| entry.range.start);
            let listed = match &self.checksums {
                Some(list) => Some((list, list.of(file.path())?)),
                None => None,
            };
            let bytes = file.bytes();
            let mut sums = Vec::with_capacity(bytes.len().div_ceil(BLOCK));
            let mut first = 0;
            let mut not_finite = None;
            for start in (0..bytes.len()).step_by(BLOCK) {
                if let Some(copied) = copied {
                    keep_pace(copied, done + start);
                }
                let end = bytes.len().min(start + BLOCK);
                file.prepare(start..end);
                if listed.is_some() {
                    sums.push(checksum(&bytes[start..end]));
                }
                // The block is in the cache now, so check its numbers.
                while first < tensors.len() && tensors[first].1.range.end <= start {
                    first += 1;
                }
                for (name, entry) in tensors[first..].iter().take_while(|(_, entry)| entry.range.start < end)
                {
                    if not_finite.is_none() && !is_finite(file, entry, start, end) {
                        not_finite = Some(*name);
                    }
                }
                // What was copied before has been released, and what is only checked is not needed; it is in memory (again)
                // because it was checked.
                if copied.is_none_or(|copied| done + end <= copied.bytes.load(Ordering::Relaxed)) {
                    file.release_bytes(start..end);
                }
            }
            done += bytes.len();
            if let Some((list, sum)) = listed {
                list.compare(file.path(), sum, file_checksum(&sums))?;
            }
            if let Some(name) = not_finite {
                return Err(not_finite_error(file.path(), name));
            }
        }
        Ok(())
    }

    fn bytes_of(&self, parameter: &ParameterSpec) -> usize {
        let source = self.source(parameter);
        let share: usize = source.ranges().iter().map(ExactSizeIterator::len).sum();
        let whole: usize = source.shape.iter().product();
        let bytes = self.tensors.get(&source.name).map_or(0, |(_, entry)| entry.range.len());
        (bytes as f64 * share as f64 / whole.max(1) as f64) as usize
    }
}

/// Waits until the copying thread is close or has ended. If it failed, the check continues, because damage may be the
/// cause.
fn keep_pace(copied: &CopyProgress, done: usize) {
    let near = || done <= copied.bytes.load(Ordering::Relaxed) + AHEAD;
    while !near() && !copied.finished.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Whether the numbers of a tensor that begin in the given part of its file are finite.
fn is_finite(file: &TensorFile, entry: &Stored, start: usize, end: usize) -> bool {
    if let Some((packed, _)) = file.packed(entry) {
        let inside = |place: usize| place.clamp(entry.range.start, entry.range.end) - entry.range.start;
        return packed.are_finite(inside(start)..inside(end));
    }
    let (_, width) = entry.kind.block();
    let at = |place: usize| {
        let inside = place.clamp(entry.range.start, entry.range.end) - entry.range.start;
        entry.range.start + inside.next_multiple_of(width)
    };
    let numbers = &file.bytes()[at(start)..at(end).min(entry.range.end)];
    // A number is not finite if all bits of its exponent are set. There is no early exit, so that the loop is
    // vectorised.
    match entry.kind {
        Kind::Blocks(blocks) => blocks.are_finite(numbers),
        Kind::Plain(Dtype::F32) => {
            const EXPONENT: u32 = 0x7F80_0000;
            let any = |any, &number: &[u8; 4]| any | (u32::from_le_bytes(number) & EXPONENT == EXPONENT);
            !numbers.as_chunks().0.iter().fold(false, any)
        }
        Kind::Plain(dtype @ (Dtype::BF16 | Dtype::F16)) => {
            let exponent: u16 = if dtype == Dtype::F16 { 0x7C00 } else { 0x7F80 };
            let any = |any, &number: &[u8; 2]| any | (u16::from_le_bytes(number) & exponent == exponent);
            !numbers.as_chunks().0.iter().fold(false, any)
        }
        _ => true,
    }
}

fn not_finite_error(path: &Path, name: &str) -> Error {
    let message = format!(
        "tensor `{name}` has a number that is not finite (NaN or infinity): its training diverged, or the file is \
         damaged; use an earlier checkpoint or another copy"
    );
    Error::damaged(path, message)
}

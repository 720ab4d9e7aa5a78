//! Memory-mapped files, whose numbers are read in place, without a copy of the file; and bytes inside the program that
//! stand for a file.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use march_engine::f32s_of_bytes;
use memmap2::{Mmap, MmapOptions};

/// A file mapped into memory, read-only.
///
/// The file must not be truncated while it is mapped: reading a page beyond its new end would kill the process.
#[derive(Debug)]
pub struct Mapped {
    path: PathBuf,
    /// `None` for an empty file, which not every system can map, and for one inside the program.
    map: Option<Mmap>,
    /// The bytes where nothing is mapped.
    fixed: &'static [u8],
}

impl Mapped {
    /// Maps a file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if metadata.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let length = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        if length == 0 {
            return Ok(Self::fixed(path, &[]));
        }
        #[allow(unsafe_code)]
        // SAFETY: the bytes must not change, and the file must not be truncated, while it is mapped. Files opened this
        // way are checkpoints: they are replaced by rename, which leaves the mapped file unchanged.
        let map = unsafe { MmapOptions::new().len(length).map(&file) }?;
        Ok(Self { path: path.into(), map: Some(map), fixed: &[] })
    }

    /// Bytes inside the program, in place of the file at a path.
    pub fn fixed(path: &Path, bytes: &'static [u8]) -> Self {
        Self { path: path.into(), map: None, fixed: bytes }
    }

    /// The file's path when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(self.fixed)
    }

    /// A range of the file as the little-endian f32 numbers that it holds. `None` if the range is not in the file, is
    /// not a whole number of f32, is not aligned for f32, or if the machine is big-endian.
    pub fn f32s(&self, range: Range<usize>) -> Option<&[f32]> {
        f32s_of_bytes(self.bytes().get(range)?)
    }

    /// Tells the system to prefetch all pages of a range at once. Has an effect only on Linux.
    pub fn prepare(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        if let Some(map) = &self.map {
            let start = range.start.min(map.len());
            let end = range.end.min(map.len()).max(start);
            // An older kernel does not know this advice and loads pages one by one.
            let _ = map.advise_range(memmap2::Advice::PopulateRead, start, end - start);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }

    /// Tells the system that the pages completely inside a range are not needed for now. They leave the memory of the
    /// process and are loaded from the file again when they are read. Has an effect only on Linux.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        if let Some(map) = &self.map {
            /// If the system's pages are larger, it also drops the page in which the range begins, which at most costs
            /// reading it again.
            const PAGE: usize = 4096;
            let start = range.start.min(map.len()).next_multiple_of(PAGE);
            let end = if range.end >= map.len() { map.len() } else { range.end / PAGE * PAGE };
            if start >= end {
                return;
            }
            #[allow(unsafe_code)]
            // SAFETY: the mapping is of a file and is never written, so a dropped page is loaded again with the same
            // bytes, and borrows from it stay valid.
            let advised =
                unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
            // If the system rejects the advice, the pages stay in memory.
            let _ = advised;
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

/// Numbers in their file representation: little-endian.
pub fn file_bytes(numbers: &[f32]) -> Cow<'_, [u8]> {
    march_engine::little_endian_bytes(numbers)
}

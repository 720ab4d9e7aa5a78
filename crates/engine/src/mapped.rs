//! A file mapped into memory, so that its numbers are read where they are, without a copy of the file.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapOptions};

/// A file mapped into memory, to be read only.
///
/// The file must not be cut short while it is mapped: reading a page beyond its new end would end the
/// process.
#[derive(Debug)]
pub struct Mapped {
    path: PathBuf,
    /// None for an empty file, which cannot be mapped everywhere.
    map: Option<Mmap>,
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
            return Ok(Self { path: path.into(), map: None });
        }
        #[allow(unsafe_code)]
        // SAFETY: the bytes must not change, nor the file be cut short, while it is mapped. Files that are
        // opened this way are checkpoints and shards: they are replaced by rename, which leaves the mapped file as it
        // was.
        let map = unsafe { MmapOptions::new().len(length).map(&file) }?;
        Ok(Self { path: path.into(), map: Some(map) })
    }

    /// The file's path when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// A part of the file as the little-endian f32 that it holds; none if the range is not in the file, if it
    /// does not hold whole numbers, if they do not lie on addresses for f32, or if the machine's own order is
    /// another.
    pub fn f32s(&self, range: Range<usize>) -> Option<&[f32]> {
        self.numbers(range)
    }

    /// [`Mapped::f32s`] for other numbers.
    #[inline]
    pub(crate) fn numbers<T: Plain>(&self, range: Range<usize>) -> Option<&[T]> {
        let bytes = self.bytes().get(range)?;
        if cfg!(target_endian = "big") {
            return None;
        }
        #[allow(unsafe_code)]
        // SAFETY: any bytes are a `Plain` number.
        let (before, numbers, after) = unsafe { bytes.align_to::<T>() };
        (before.is_empty() && after.is_empty()).then_some(numbers)
    }

    /// Tells the system that a range is about to be read, so that its pages come all at once. Does nothing but on
    /// Linux.
    pub fn prepare(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        if let Some(map) = &self.map {
            let start = range.start.min(map.len());
            let end = range.end.min(map.len()).max(start);
            // An older system does not know the advice; its pages come one by one.
            let _ = map.advise_range(memmap2::Advice::PopulateRead, start, end - start);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }

    /// Tells the system that the pages wholly inside a range are not needed for now: they leave the memory of
    /// the process and come back from the file when they are read again. Does nothing but on Linux.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        if let Some(map) = &self.map {
            /// Where pages are larger, the system takes the page that the range begins in as well, which
            /// costs a second reading of it at most.
            const PAGE: usize = 4096;
            let start = range.start.min(map.len()).next_multiple_of(PAGE);
            let end = if range.end >= map.len() { map.len() } else { range.end / PAGE * PAGE };
            if start >= end {
                return;
            }
            #[allow(unsafe_code)]
            // SAFETY: the mapping is of a file and is never written, so a page that is dropped comes back
            // with the same bytes; what is borrowed from it stays valid.
            let advised =
                unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
            // A system that refuses the advice keeps the pages, and nothing is lost.
            let _ = advised;
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }
}

/// Numbers of which any bytes are one, and that have no other bytes between them.
pub(crate) trait Plain: Copy + Default + std::fmt::Debug + Send + Sync + 'static {
    /// Adds the number's bytes, the lowest first.
    fn write_to(self, bytes: &mut Vec<u8>);

    /// The number whose bytes, the lowest first, are those that this one has in memory.
    fn of_file(self) -> Self;
}

macro_rules! plain {
    ($($number:ty),*) => {
        $(impl Plain for $number {
            fn write_to(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }

            fn of_file(self) -> Self {
                Self::from_le_bytes(self.to_ne_bytes())
            }
        })*
    };
}

plain!(f32, u16, i8);

/// Numbers as a file holds them, little-endian: where they lie, if the machine's own order is that.
pub fn file_bytes(numbers: &[f32]) -> Cow<'_, [u8]> {
    plain_bytes(numbers)
}

/// [`file_bytes`] of other numbers.
pub(crate) fn plain_bytes<T: Plain>(numbers: &[T]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "big") {
        let mut bytes = Vec::with_capacity(size_of_val(numbers));
        numbers.iter().for_each(|number| number.write_to(&mut bytes));
        return Cow::Owned(bytes);
    }
    #[allow(unsafe_code)]
    // SAFETY: a `Plain` number has no bytes that are not initialised, and bytes lie on any address.
    let (_, bytes, _) = unsafe { numbers.align_to::<u8>() };
    Cow::Borrowed(bytes)
}

/// The memory of numbers, to be filled with bytes.
pub(crate) fn plain_bytes_mut<T: Plain>(numbers: &mut [T]) -> &mut [u8] {
    #[allow(unsafe_code)]
    // SAFETY: any bytes are a `Plain` number, which has no others between them, and bytes lie on any address.
    let (_, bytes, _) = unsafe { numbers.align_to_mut::<u8>() };
    bytes
}

//! Numbers in memory of their own, or where a file is mapped: those are checked before they are first read.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::checksum::checksum;
use crate::error::{Result, bad_value};
use crate::mapped::{Mapped, Plain, plain_bytes};

/// Numbers, owned or of a file.
#[derive(Clone, Debug)]
pub(super) enum Numbers<T: Plain> {
    Own(Vec<T>),
    Filed(Arc<Filed>),
}

/// A part of a mapped file.
#[derive(Debug)]
pub(super) struct Filed {
    file: Arc<Mapped>,
    range: Range<usize>,
    checksum: u64,
    /// Whether the checksum was right; empty until the first read.
    sound: OnceLock<bool>,
}

impl Filed {
    #[inline]
    fn is_sound(&self) -> bool {
        *self.sound.get_or_init(|| {
            self.file.prepare(self.range.clone());
            self.file.bytes().get(self.range.clone()).is_some_and(|bytes| checksum(bytes) == self.checksum)
        })
    }
}

impl<T: Plain> Numbers<T> {
    /// `count` numbers of a file. Refused if they are not there or cannot be read where they lie.
    pub fn filed(file: &Arc<Mapped>, range: Range<usize>, checksum: u64, count: usize) -> Result<Self> {
        let found = file.numbers::<T>(range.clone()).map(<[T]>::len);
        if found != Some(count) {
            return bad_value(
                "stored_states",
                format!(
                    "bytes {range:?} of {} are not {count} numbers that this machine reads where they lie",
                    file.path().display()
                ),
            );
        }
        Ok(Self::Filed(Arc::new(Filed { file: Arc::clone(file), range, checksum, sound: OnceLock::new() })))
    }

    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Self::Own(own) => own.len(),
            Self::Filed(filed) => filed.range.len() / size_of::<T>(),
        }
    }

    /// The numbers; none if they are a file's and damaged, which [`Numbers::check`] then reports.
    #[inline]
    pub fn get(&self) -> Option<&[T]> {
        match self {
            Self::Own(own) => Some(own),
            Self::Filed(filed) if filed.is_sound() => filed.file.numbers(filed.range.clone()),
            Self::Filed(_) => None,
        }
    }

    /// Of their bytes in a file.
    pub fn checksum(&self) -> u64 {
        match self {
            Self::Own(own) => checksum(&plain_bytes(own)),
            Self::Filed(filed) => filed.checksum,
        }
    }

    /// Refuses numbers that were read and found to be damaged.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Filed(filed) if filed.sound.get() == Some(&false) => bad_value(
                "stored_states",
                format!(
                    "{} is damaged: bytes {:?}, which hold anchors, do not have the checksum that was written \
                     with them; take another copy of the file",
                    filed.file.path().display(),
                    filed.range
                ),
            ),
            _ => Ok(()),
        }
    }

    /// The numbers, or the report of their damage.
    pub fn read(&self) -> Result<&[T]> {
        let numbers = self.get();
        self.check()?;
        Ok(numbers.unwrap_or_default())
    }
}

//! Numbers in memory, or elsewhere until they are first read: then they are fetched, checked and kept.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::bytes::{Plain, plain_bytes, plain_bytes_mut};
use crate::checksum::checksum;
use crate::error::{Result, bad_value};

/// Where numbers are until they are read, such as a file.
pub trait Source: Debug + Send + Sync {
    /// Fills `bytes` with those from `start` on and compares them with their checksum; or says what is wrong.
    fn fetch(&self, start: usize, checksum: u64, bytes: &mut [u8]) -> Result<(), String>;
}

/// Numbers, owned or of a source.
#[derive(Clone, Debug)]
pub(super) enum Numbers<T: Plain> {
    Own(Vec<T>),
    Distant(Arc<Distant<T>>),
}

/// Numbers of a source.
#[derive(Debug)]
pub(super) struct Distant<T> {
    source: Arc<dyn Source>,
    range: Range<usize>,
    checksum: u64,
    /// The numbers, or what is wrong with them; empty until the first read.
    fetched: OnceLock<Result<Vec<T>, String>>,
}

impl<T: Plain> Distant<T> {
    #[inline]
    fn get(&self) -> &Result<Vec<T>, String> {
        self.fetched.get_or_init(|| {
            let mut numbers = vec![T::default(); self.range.len() / size_of::<T>()];
            self.fill(plain_bytes_mut(&mut numbers))?;
            if cfg!(target_endian = "big") {
                numbers.iter_mut().for_each(|number| *number = number.from_little_endian());
            }
            Ok(numbers)
        })
    }

    fn fill(&self, bytes: &mut [u8]) -> Result<(), String> {
        self.source.fetch(self.range.start, self.checksum, bytes)
    }
}

impl<T: Plain> Numbers<T> {
    /// `count` numbers of a source, little-endian. Refused where the range does not hold so many.
    pub fn distant(
        source: &Arc<dyn Source>,
        range: Range<usize>,
        checksum: u64,
        count: usize,
    ) -> Result<Self> {
        if count.checked_mul(size_of::<T>()) != Some(range.len()) {
            let message = format!("bytes {range:?} cannot hold {count} numbers of {} bytes", size_of::<T>());
            return bad_value("stored_states", message);
        }
        let distant = Distant { source: Arc::clone(source), range, checksum, fetched: OnceLock::new() };
        Ok(Self::Distant(Arc::new(distant)))
    }

    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Self::Own(own) => own.len(),
            Self::Distant(distant) => distant.range.len() / size_of::<T>(),
        }
    }

    /// The numbers; none if they could not be fetched, which [`Numbers::check`] then reports.
    #[inline]
    pub fn get(&self) -> Option<&[T]> {
        match self {
            Self::Own(own) => Some(own),
            Self::Distant(distant) => distant.get().as_deref().ok(),
        }
    }

    /// Whether reading them fetches nothing.
    #[inline]
    pub fn is_here(&self) -> bool {
        match self {
            Self::Own(_) => true,
            Self::Distant(distant) => distant.fetched.get().is_some(),
        }
    }

    /// Of their bytes in a file.
    pub fn checksum(&self) -> u64 {
        match self {
            Self::Own(own) => checksum(&plain_bytes(own)),
            Self::Distant(distant) => distant.checksum,
        }
    }

    /// Refuses numbers that were to be read and could not be fetched, or were found to be damaged.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Distant(distant) => match distant.fetched.get() {
                Some(Err(message)) => bad_value("stored_states", message.clone()),
                _ => Ok(()),
            },
            Self::Own(_) => Ok(()),
        }
    }

    /// The numbers, or why they cannot be read.
    pub fn read(&self) -> Result<&[T]> {
        let numbers = self.get();
        self.check()?;
        Ok(numbers.unwrap_or_default())
    }

    /// Their bytes in a file. What was not fetched yet is fetched for this once and not kept.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        match self {
            Self::Distant(distant) if !self.is_here() => {
                let mut bytes = vec![0; distant.range.len()];
                match distant.fill(&mut bytes) {
                    Ok(()) => Ok(bytes.into()),
                    Err(message) => bad_value("stored_states", message),
                }
            }
            _ => Ok(plain_bytes(self.read()?)),
        }
    }
}

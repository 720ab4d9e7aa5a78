//! Arrays that are either in memory or loaded lazily: on first read they are fetched, verified and cached.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::bytes::{Plain, plain_bytes, plain_bytes_mut};
use crate::checksum::checksum;
use crate::error::{Result, bad_value};

/// Backing storage of lazily loaded arrays, such as a file.
pub trait Source: Debug + Send + Sync {
    /// Fills `bytes` with the data at offset `start` and verifies the checksum; returns a message on failure.
    fn fetch(&self, start: usize, checksum: u64, bytes: &mut [u8]) -> Result<(), String>;
}

/// Array of numbers, either owned or loaded lazily from a [`Source`].
#[derive(Clone, Debug)]
pub(super) enum Numbers<T: Plain> {
    Own(Vec<T>),
    Distant(Arc<Distant<T>>),
}

/// Lazily loaded array.
#[derive(Debug)]
pub(super) struct Distant<T> {
    source: Arc<dyn Source>,
    range: Range<usize>,
    checksum: u64,
    /// The loaded numbers or the error message; empty until the first read.
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
    /// Array of `count` little-endian numbers in `range` of a source. Fails if the range has a different size.
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

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Own(own) => own.len(),
            Self::Distant(distant) => distant.range.len() / size_of::<T>(),
        }
    }

    /// The numbers, loaded if necessary; `None` if loading failed, which [`Numbers::check`] then reports.
    #[inline]
    pub fn get(&self) -> Option<&[T]> {
        match self {
            Self::Own(own) => Some(own),
            Self::Distant(distant) => distant.get().as_deref().ok(),
        }
    }

    /// Whether the numbers can be read without loading.
    #[inline]
    pub fn is_here(&self) -> bool {
        match self {
            Self::Own(_) => true,
            Self::Distant(distant) => distant.fetched.get().is_some(),
        }
    }

    /// Checksum of the little-endian bytes.
    pub fn checksum(&self) -> u64 {
        match self {
            Self::Own(own) => checksum(&plain_bytes(own)),
            Self::Distant(distant) => distant.checksum,
        }
    }

    /// Returns an error if loading was attempted and failed or the data was corrupt.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Distant(distant) => match distant.fetched.get() {
                Some(Err(message)) => bad_value("stored_states", message.clone()),
                _ => Ok(()),
            },
            Self::Own(_) => Ok(()),
        }
    }

    /// The numbers, loaded if necessary, or the reason why they cannot be read.
    pub fn read(&self) -> Result<&[T]> {
        let numbers = self.get();
        self.check()?;
        Ok(numbers.unwrap_or_default())
    }

    /// The little-endian bytes. Data that is not loaded yet is fetched for this call only and not cached.
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

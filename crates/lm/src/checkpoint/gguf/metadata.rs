//! The keys of a GGUF file and their values, which stay in the mapped file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::disk::Mapped;
use crate::error::{Error, Result};

/// The type of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scalar {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    U64,
    I64,
    F64,
}

impl Scalar {
    /// The type with this number in a header.
    pub fn of(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Its size.
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// The value as a whole number, 0 or more.
    pub fn whole(self, bytes: &[u8]) -> Option<u64> {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(wide);
        match self {
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => Some(bits),
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => {
                Some(bits).filter(|bits| bits >> (8 * bytes.len() - 1) == 0)
            }
            Self::F32 | Self::F64 | Self::Bool => None,
        }
    }

    /// The value as a number. An f32 becomes the f64 with its shortest decimals, which is what it was made from.
    fn number(self, bytes: &[u8]) -> Option<f64> {
        match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).to_string().parse().ok(),
            (Self::F64, bytes) => Some(f64::from_le_bytes(std::array::from_fn(|i| bytes[i]))),
            _ => self.whole(bytes).map(|whole| whole as f64),
        }
    }
}

/// A value, whose bytes are in the file.
#[derive(Debug)]
pub(super) enum Value {
    Scalar(Scalar, Range<usize>),
    Text(Range<usize>),
    List {
        /// The type of the entries; `None` for texts.
        kind: Option<Scalar>,
        count: usize,
        range: Range<usize>,
    },
}

/// The keys of a file.
#[derive(Debug)]
pub(in crate::checkpoint) struct Metadata {
    pub(super) file: Arc<Mapped>,
    pub(super) values: BTreeMap<String, Value>,
}

impl Metadata {
    /// An error about a key.
    pub fn error(&self, key: &str, message: impl Into<String>) -> Error {
        Error::config(&self.file.path().display().to_string(), key, message)
    }

    fn bytes(&self, range: &Range<usize>) -> &[u8] {
        &self.file.bytes()[range.clone()]
    }

    /// A key that may be missing, as `read` understands it, or an error that says what it must be.
    fn read<T>(&self, key: &str, what: &str, read: impl FnOnce(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| {
            self.error(key, format!("is not {what}; the file is damaged, or of another kind of model"))
        })
    }

    /// The error for a key that is missing.
    pub fn required<T>(&self, key: &str, found: Option<T>) -> Result<T> {
        found.ok_or_else(|| self.error(key, "is missing; the file is incomplete: convert the model again"))
    }

    /// A whole number. A list of equal ones, one for each layer, counts as one.
    pub fn whole(&self, key: &str) -> Result<Option<u64>> {
        self.read(key, "a whole number, 0 or more, the same for every layer", |value| match value {
            Value::Scalar(kind, range) => kind.whole(self.bytes(range)),
            Value::List { kind: Some(kind), range, .. } => {
                let mut entries = self.bytes(range).chunks_exact(kind.bytes());
                let first = entries.next()?;
                entries.all(|entry| entry == first).then(|| kind.whole(first))?
            }
            _ => None,
        })
    }

    /// A number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, "a finite number", |value| match value {
            Value::Scalar(kind, range) => kind.number(self.bytes(range)).filter(|number| number.is_finite()),
            _ => None,
        })
    }

    /// Whether something is so.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", |value| match value {
            Value::Scalar(Scalar::Bool, range) => match self.bytes(range) {
                [0] => Some(false),
                [1] => Some(true),
                _ => None,
            },
            _ => None,
        })
    }

    /// A text.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.read(key, "a text in UTF-8", |value| match value {
            Value::Text(range) => std::str::from_utf8(self.bytes(range)).ok(),
            _ => None,
        })
    }

    /// A list of texts.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>> {
        self.read(key, "a list of texts in UTF-8", |value| {
            let Value::List { kind: None, count, range } = value else { return None };
            let (mut rest, mut texts) = (self.bytes(range), Vec::with_capacity(*count));
            while let Some((length, after)) = rest.split_first_chunk() {
                let (text, after) = after.split_at_checked(u64::from_le_bytes(*length) as usize)?;
                texts.push(std::str::from_utf8(text).ok()?);
                rest = after;
            }
            Some(texts)
        })
    }

    /// A list of whole numbers.
    pub fn wholes(&self, key: &str) -> Result<Option<Vec<u64>>> {
        self.read(key, "a list of whole numbers, 0 or more", |value| match value {
            Value::List { kind: Some(kind), range, .. } => {
                self.bytes(range).chunks_exact(kind.bytes()).map(|entry| kind.whole(entry)).collect()
            }
            _ => None,
        })
    }

    /// A list of numbers.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.read(key, "a list of finite numbers (f32)", |value| match value {
            Value::List { kind: Some(Scalar::F32), range, .. } => {
                let numbers = self.bytes(range).as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
                numbers.map(|number| Some(number).filter(|number| number.is_finite())).collect()
            }
            _ => None,
        })
    }

    /// A list of flags.
    pub fn flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.read(key, "a list of true and false", |value| match value {
            Value::List { kind: Some(Scalar::Bool), range, .. } => {
                self.bytes(range).iter().map(|byte| [false, true].get(usize::from(*byte)).copied()).collect()
            }
            _ => None,
        })
    }
}

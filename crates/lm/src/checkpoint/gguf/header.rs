//! The header of a GGUF file, versions 2 and 3, little-endian:
//!
//! ```text
//! "GGUF", version u32, number of tensors u64, number of keys u64
//! each key:     name (u64 length, UTF-8), type u32, value
//! each tensor:  name, number of dimensions u32, dimensions u64 with the fastest first, type u32, offset u64
//! padding to the alignment, then the tensors' bytes, each padded to the alignment
//! ```
//!
//! Nothing in it is believed: every length and count is compared with the bytes that are left before anything is
//! allocated.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::read::{Kind, Stored};
use super::blocks::Blocks;
use super::metadata::{Scalar, Value};
use safetensors::Dtype;

/// The first bytes of a file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// The alignment of tensors without the key `general.alignment`.
const ALIGNMENT: usize = 32;
const ALIGNMENT_KEY: &str = "general.alignment";
/// Dimensions that a tensor can have at most.
const MOST_DIMENSIONS: u32 = 4;
/// The fewest bytes that a key takes, and a tensor.
const KEY_BYTES: usize = 8 + 4 + 1;
const TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;

/// A parsed header.
pub(super) struct Header {
    pub values: BTreeMap<String, Value>,
    pub tensors: Vec<(String, Stored)>,
}

type Parsed<T> = Result<T, String>;

/// A place in the header.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next bytes, if the file has so many.
    fn take(&mut self, count: u64, what: &str) -> Parsed<&'a [u8]> {
        let start = self.at;
        match usize::try_from(count).ok().filter(|&count| count <= self.left()) {
            Some(count) => {
                self.at += count;
                Ok(&self.bytes[start..self.at])
            }
            None => Err(format!(
                "is cut short or damaged: {what} takes {count} bytes from byte {start}, but the file ends after {}; \
                 copy it again",
                self.bytes.len()
            )),
        }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Parsed<[u8; N]> {
        let bytes = self.take(N as u64, what)?;
        Ok(std::array::from_fn(|i| bytes[i]))
    }

    fn u32(&mut self, what: &str) -> Parsed<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Parsed<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// The bytes of a text.
    fn text_range(&mut self, what: &str) -> Parsed<Range<usize>> {
        let length = self.u64(what)?;
        self.take(length, what)?;
        Ok(self.at - length as usize..self.at)
    }

    /// A name.
    fn name(&mut self, what: &str) -> Parsed<String> {
        let range = self.text_range(what)?;
        let start = range.start;
        let name = std::str::from_utf8(&self.bytes[range]);
        name.map(String::from)
            .map_err(|_| format!("is damaged: {what} at byte {start} is not UTF-8; copy it again"))
    }

    /// A number of things that take at least `least` bytes each.
    fn count(&mut self, what: &str, least: usize) -> Parsed<u64> {
        let count = self.u64(what)?;
        if count > (self.left() / least) as u64 {
            return Err(format!(
                "is cut short or damaged: it declares {count} {what}, but only {} bytes follow; copy it again",
                self.left()
            ));
        }
        Ok(count)
    }

    fn value(&mut self, key: &str) -> Parsed<Value> {
        let what = format!("the value of key `{key}`");
        let unknown = |code: u32| {
            format!("is damaged, or newer than this program: key `{key}` has the unknown value type {code}")
        };
        const TEXT: u32 = 8;
        const LIST: u32 = 9;
        let code = self.u32(&what)?;
        match (code, Scalar::of(code)) {
            (TEXT, _) => self.text_range(&what).map(Value::Text),
            (LIST, _) => {
                let code = self.u32(&what)?;
                let kind = Scalar::of(code);
                if kind.is_none() && code != TEXT {
                    return Err(match code {
                        LIST => format!("has lists in the list of key `{key}`, which is not supported"),
                        code => unknown(code),
                    });
                }
                let width = kind.map_or(8, Scalar::bytes);
                let count = self.count(&format!("entries in the list of key `{key}`"), width)? as usize;
                let start = self.at;
                match kind {
                    Some(_) => drop(self.take((count * width) as u64, &what)?),
                    None => {
                        for _ in 0..count {
                            self.text_range(&what)?;
                        }
                    }
                }
                Ok(Value::List { kind, count, range: start..self.at })
            }
            (_, Some(kind)) => {
                let start = self.at;
                self.take(kind.bytes() as u64, &what)?;
                Ok(Value::Scalar(kind, start..self.at))
            }
            (code, None) => Err(unknown(code)),
        }
    }
}

/// A tensor's entry as it is in the file.
struct Entry {
    name: String,
    shape: Vec<usize>,
    kind: Kind,
    bytes: usize,
    offset: u64,
}

/// Parses the header of a file; returns what is wrong with it.
pub(super) fn parse(bytes: &[u8]) -> Parsed<Header> {
    let mut cursor = Cursor { bytes, at: 0 };
    if cursor.array("`GGUF`")? != *MAGIC {
        return Err("does not begin with `GGUF`: it is damaged, or no GGUF file".into());
    }
    match cursor.u32("the version")? {
        2 | 3 => {}
        version if (2..4).contains(&version.swap_bytes()) => {
            return Err(
                "is big-endian; convert it with `gguf-convert-endian FILE little` (Python package gguf)"
                    .into(),
            );
        }
        version => {
            return Err(format!(
                "is of version {version}; only versions 2 and 3 can be read: convert the model again"
            ));
        }
    }
    let tensors = cursor.count("tensors", TENSOR_BYTES)?;
    let keys = cursor.count("keys", KEY_BYTES)?;
    let mut values = BTreeMap::new();
    for _ in 0..keys {
        let key = cursor.name("the name of a key")?;
        let value = cursor.value(&key)?;
        if values.insert(key.clone(), value).is_some() {
            return Err(format!("is damaged: it has key `{key}` twice; copy it again"));
        }
    }
    let alignment = alignment(&values, bytes)?;
    let mut entries = Vec::new();
    for _ in 0..tensors {
        entries.push(entry(&mut cursor)?);
    }
    let start = cursor.at.next_multiple_of(alignment);
    Ok(Header { values, tensors: place(entries, start, alignment, bytes.len())? })
}

/// The alignment of tensors.
fn alignment(values: &BTreeMap<String, Value>, bytes: &[u8]) -> Parsed<usize> {
    let found = match values.get(ALIGNMENT_KEY) {
        None => return Ok(ALIGNMENT),
        Some(Value::Scalar(kind, range)) => kind.whole(&bytes[range.clone()]),
        Some(_) => None,
    };
    let valid = found.and_then(|found| usize::try_from(found).ok());
    valid.filter(|found| found.is_power_of_two() && *found <= 1 << 20).ok_or_else(|| {
        let found = found.map_or("no number".into(), |found| found.to_string());
        format!(
            "is damaged: key `{ALIGNMENT_KEY}` is {found}; it must be a power of two; copy the file again"
        )
    })
}

fn entry(cursor: &mut Cursor<'_>) -> Parsed<Entry> {
    let name = cursor.name("the name of a tensor")?;
    let what = format!("the entry of tensor `{name}`");
    let dimensions = cursor.u32(&what)?;
    if !(1..=MOST_DIMENSIONS).contains(&dimensions) {
        return Err(format!(
            "is damaged: tensor `{name}` has {dimensions} dimensions; 1 to {MOST_DIMENSIONS} are possible; copy the \
             file again"
        ));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        shape.push(usize::try_from(cursor.u64(&what)?).unwrap_or(usize::MAX));
    }
    // The first dimension is the one whose numbers are next to each other.
    shape.reverse();
    let code = cursor.u32(&what)?;
    let kind = match code {
        0 => Kind::Plain(Dtype::F32),
        1 => Kind::Plain(Dtype::F16),
        30 => Kind::Plain(Dtype::BF16),
        28 => Kind::Plain(Dtype::F64),
        24 => Kind::Plain(Dtype::I8),
        25 => Kind::Plain(Dtype::I16),
        26 => Kind::Plain(Dtype::I32),
        27 => Kind::Plain(Dtype::I64),
        code => match Blocks::of(code) {
            Some(blocks) => Kind::Blocks(blocks),
            None => return Err(Blocks::refusal(&name, code)),
        },
    };
    let (numbers, block_bytes) = kind.block();
    let count = shape.iter().try_fold(1usize, |all, &size| all.checked_mul(size)).filter(|&count| count > 0);
    let whole = shape.last().is_some_and(|width| width.is_multiple_of(numbers));
    let bytes = count.filter(|_| whole).and_then(|count| (count / numbers).checked_mul(block_bytes));
    let Some(bytes) = bytes else {
        return Err(format!(
            "is damaged: tensor `{name}` of type {kind} has the shape {shape:?}, which no tensor of this type has; \
             copy the file again"
        ));
    };
    let offset = cursor.u64(&what)?;
    Ok(Entry { name, shape, kind, bytes, offset })
}

/// Checks that the tensors follow each other in the data, which begins at `start`, and fill the file.
fn place(
    entries: Vec<Entry>,
    start: usize,
    alignment: usize,
    length: usize,
) -> Parsed<Vec<(String, Stored)>> {
    let padded = |end: usize| end.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
    let (mut end, mut last) = (start, String::new());
    let mut placed: Vec<(String, Stored)> = Vec::with_capacity(entries.len());
    for Entry { name, shape, kind, bytes, offset } in entries {
        let from = usize::try_from(offset).ok().and_then(|offset| start.checked_add(offset));
        let expected = padded(end);
        if from != Some(expected) {
            let wrong = match from {
                Some(from) if from < expected => format!("inside tensor `{last}` or its padding"),
                _ => "elsewhere".into(),
            };
            return Err(format!(
                "is damaged: tensor `{name}` should begin at offset {}, where the tensors before it end, but its \
                 offset is {offset}, {wrong}; copy the file again",
                expected - start
            ));
        }
        let to = expected.checked_add(bytes).filter(|&to| to <= length);
        let Some(to) = to else {
            return Err(format!(
                "is cut short or damaged: tensor `{name}` takes {bytes} bytes from byte {expected}, but the file \
                 ends after {length}; copy it again"
            ));
        };
        (end, last) = (to, name.clone());
        placed.push((name, Stored { shape, kind, range: expected..to }));
    }
    if length > padded(end) {
        return Err(format!(
            "is longer than its header says: {length} bytes instead of {}; copy it again",
            padded(end)
        ));
    }
    Ok(placed)
}

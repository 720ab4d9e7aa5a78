//! One memory-mapped file of tensors, safetensors or GGUF.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use march_engine::{Blocks as Packed, Precision, SharedBytes};
use safetensors::Dtype;

use super::gguf::blocks::{Blocks, LARGEST};
use super::packed;
use crate::disk::Mapped;
use crate::disk::header::{Entry, read_header, wrong_dtype};
use crate::error::{Error, Result};

/// How the numbers of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Plain(Dtype),
    /// In blocks with common scales, one after the other.
    Blocks(Blocks),
    /// A matrix in q8 or q4 as the CPU computes with it.
    Packed(Precision),
}

impl Kind {
    /// The least part of a tensor that can be read alone: its numbers and its bytes.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::Plain(dtype) => (1, dtype.bitsize().div_ceil(8)),
            Self::Blocks(blocks) => blocks.size(),
            // Bytes have no order of numbers.
            Self::Packed(_) => (1, 1),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => write!(f, "{dtype}"),
            Self::Blocks(blocks) => f.write_str(blocks.name()),
            Self::Packed(precision) => write!(f, "{precision}"),
        }
    }
}

/// A tensor in a file.
#[derive(Debug)]
pub(super) struct Stored {
    pub shape: Vec<usize>,
    pub kind: Kind,
    /// The byte range in the file.
    pub range: Range<usize>,
}

impl From<Entry> for Stored {
    fn from(entry: Entry) -> Self {
        Self { shape: entry.shape, kind: Kind::Plain(entry.dtype), range: entry.range }
    }
}

/// A memory-mapped file of tensors.
#[derive(Debug)]
pub(super) struct TensorFile {
    mapped: Arc<Mapped>,
}

impl TensorFile {
    /// Maps a file and reads its header.
    pub fn open(path: &Path) -> Result<(Self, Vec<(String, Stored)>)> {
        Self::of(Mapped::open(path).map_err(Error::io(path, "open"))?)
    }

    /// A file whose header was read.
    pub fn new(mapped: Arc<Mapped>) -> Self {
        Self { mapped }
    }

    /// Reads the header of a safetensors file. The tensors must be contiguous and fill it.
    pub fn of(mapped: Mapped) -> Result<(Self, Vec<(String, Stored)>)> {
        let (path, bytes) = (mapped.path(), mapped.bytes());
        let header = read_header(bytes).map_err(|message| Error::damaged(path, message))?;
        if header.end < bytes.len() {
            let message = format!(
                "is longer than its header says: {} bytes instead of {}; copy it again",
                bytes.len(),
                header.end
            );
            return Err(Error::damaged(path, message));
        }
        let tensors = packed::stored(path, &header.metadata, header.tensors)?;
        Ok((Self::new(Arc::new(mapped)), tensors))
    }

    /// The contents of the file.
    pub fn bytes(&self) -> &[u8] {
        self.mapped.bytes()
    }

    /// Tells the system to prefetch a range of the file.
    pub fn prepare(&self, range: Range<usize>) {
        self.mapped.prepare(range);
    }

    /// The path.
    pub fn path(&self) -> &Path {
        self.mapped.path()
    }

    /// Rejects a tensor with an unsupported data type.
    pub fn check_kind(&self, name: &str, entry: &Stored) -> Result<()> {
        match entry.kind {
            Kind::Plain(Dtype::F32 | Dtype::BF16 | Dtype::F16) | Kind::Blocks(_) | Kind::Packed(_) => Ok(()),
            other => Err(Error::file(self.path(), wrong_dtype(name, &other.to_string()))),
        }
    }

    /// The contents of the file, for what outlives it here.
    pub fn shared(&self) -> SharedBytes {
        self.mapped.clone()
    }

    /// A matrix in q8 or q4, and its width; `None` for other tensors.
    pub fn packed(&self, entry: &Stored) -> Option<(Packed<'_>, usize)> {
        let (Kind::Packed(precision), &[rows, width]) = (entry.kind, &entry.shape[..]) else { return None };
        let bytes = &self.mapped.bytes()[entry.range.clone()];
        Packed::new(precision, bytes, [rows, width]).map(|packed| (packed, width))
    }

    /// A range of the numbers of one tensor in the file.
    pub fn numbers(&self, name: &str, entry: &Stored, numbers: Range<usize>) -> Result<Cow<'_, [f32]>> {
        self.check_kind(name, entry)?;
        if let Some((packed, width)) = self.packed(entry) {
            let rows = numbers.start / width.max(1)..numbers.end.div_ceil(width.max(1));
            let mut decoded = vec![0.0; rows.len() * width];
            let each = rows.clone().zip(decoded.chunks_exact_mut(width.max(1)));
            each.for_each(|(row, to)| packed.row(row, to));
            decoded.truncate(numbers.end - rows.start * width);
            decoded.drain(..numbers.start - rows.start * width);
            return Ok(Cow::Owned(decoded));
        }
        let (count, width) = entry.kind.block();
        let first = numbers.start / count;
        let range = entry.range.start + width * first
            ..entry.range.start + width * numbers.end.div_ceil(count).max(first);
        self.mapped.prepare(range.clone());
        let bytes = &self.mapped.bytes()[range.clone()];
        Ok(match entry.kind {
            Kind::Blocks(blocks) => {
                let mut decoded = vec![0.0; bytes.len() / width * count];
                blocks.decode(bytes, &mut decoded);
                decoded.truncate(numbers.end - first * count);
                decoded.drain(..numbers.start - first * count);
                Cow::Owned(decoded)
            }
            Kind::Packed(_) => unreachable!("unpacked above"),
            Kind::Plain(Dtype::BF16) => Cow::Owned(widen(bytes, bf16::from_le_bytes)),
            Kind::Plain(Dtype::F16) => Cow::Owned(widen(bytes, f16::from_le_bytes)),
            Kind::Plain(_) => match self.mapped.f32s(range) {
                Some(numbers) => Cow::Borrowed(numbers),
                None => {
                    Cow::Owned(bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect())
                }
            },
        })
    }

    /// Individual numbers of one tensor in the file, given their indices, which must be in range.
    pub fn sample(&self, name: &str, entry: &Stored, places: &[usize]) -> Result<Vec<f32>> {
        self.check_kind(name, entry)?;
        if let Some((packed, width)) = self.packed(entry) {
            let (mut row, mut last) = (vec![0.0; width], usize::MAX);
            let number = |&place: &usize| {
                if place / width != last {
                    last = place / width;
                    packed.row(last, &mut row);
                }
                row[place % width]
            };
            return Ok(places.iter().map(number).collect());
        }
        let bytes = &self.mapped.bytes()[entry.range.clone()];
        let two = |place: usize| [bytes[2 * place], bytes[2 * place + 1]];
        let mut decoded = [0.0; LARGEST];
        let mut last = usize::MAX;
        Ok(places
            .iter()
            .map(|&place| match entry.kind {
                Kind::Blocks(blocks) => {
                    let (count, width) = blocks.size();
                    if place / count != last {
                        last = place / count;
                        blocks.decode(&bytes[last * width..][..width], &mut decoded[..count]);
                    }
                    decoded[place % count]
                }
                Kind::Packed(_) => unreachable!("unpacked above"),
                Kind::Plain(Dtype::BF16) => bf16::from_le_bytes(two(place)).to_f32(),
                Kind::Plain(Dtype::F16) => f16::from_le_bytes(two(place)).to_f32(),
                Kind::Plain(_) => f32::from_le_bytes(std::array::from_fn(|i| bytes[4 * place + i])),
            })
            .collect())
    }

    /// Releases the memory of a part of the file.
    pub fn release_bytes(&self, range: Range<usize>) {
        self.mapped.release(range);
    }

    /// Releases the memory of one tensor in the file.
    pub fn release(&self, entry: &Stored) {
        self.mapped.release(entry.range.clone());
    }
}

/// Converts 16-bit numbers to f32, a block at a time.
fn widen<H: Copy + Default>(bytes: &[u8], from_le_bytes: fn([u8; 2]) -> H) -> Vec<f32>
where
    [H]: HalfFloatSliceExt,
{
    const BLOCK: usize = 2048;
    let (numbers, _) = bytes.as_chunks();
    let mut wide = Vec::with_capacity(numbers.len());
    let mut from = [H::default(); BLOCK];
    let mut to = [0.0; BLOCK];
    for block in numbers.chunks(BLOCK) {
        let (from, to) = (&mut from[..block.len()], &mut to[..block.len()]);
        for (number, &bytes) in from.iter_mut().zip(block) {
            *number = from_le_bytes(bytes);
        }
        from.convert_to_f32_slice(to);
        wide.extend_from_slice(to);
    }
    wide
}

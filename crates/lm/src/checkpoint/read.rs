//! One memory-mapped safetensors file.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use march_engine::SharedBytes;
use safetensors::Dtype;

use crate::disk::Mapped;
use crate::disk::header::{Entry, read_header, wrong_dtype};
use crate::error::{Error, Result};

/// A memory-mapped file of tensors.
#[derive(Debug)]
pub(super) struct TensorFile {
    mapped: Arc<Mapped>,
}

impl TensorFile {
    /// Maps a file and reads its header.
    pub fn open(path: &Path) -> Result<(Self, Vec<(String, Entry)>)> {
        Self::of(Mapped::open(path).map_err(Error::io(path, "open"))?)
    }

    /// Reads the header of a file. The tensors must be contiguous and fill it.
    pub fn of(mapped: Mapped) -> Result<(Self, Vec<(String, Entry)>)> {
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
        Ok((Self { mapped: Arc::new(mapped) }, header.tensors))
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
    pub fn check_dtype(&self, name: &str, entry: &Entry) -> Result<()> {
        match entry.dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 => Ok(()),
            other => Err(Error::file(self.path(), wrong_dtype(name, &other.to_string()))),
        }
    }

    /// The contents of the file, for what outlives it here.
    pub fn shared(&self) -> SharedBytes {
        self.mapped.clone()
    }

    /// A range of the numbers of one tensor in the file.
    pub fn numbers(&self, name: &str, entry: &Entry, numbers: Range<usize>) -> Result<Cow<'_, [f32]>> {
        self.check_dtype(name, entry)?;
        let width = if entry.dtype == Dtype::F32 { 4 } else { 2 };
        let range = entry.range.start + width * numbers.start..entry.range.start + width * numbers.end;
        self.mapped.prepare(range.clone());
        let bytes = &self.mapped.bytes()[range.clone()];
        Ok(match entry.dtype {
            Dtype::BF16 => Cow::Owned(widen(bytes, bf16::from_le_bytes)),
            Dtype::F16 => Cow::Owned(widen(bytes, f16::from_le_bytes)),
            _ => match self.mapped.f32s(range) {
                Some(numbers) => Cow::Borrowed(numbers),
                None => {
                    Cow::Owned(bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect())
                }
            },
        })
    }

    /// Individual numbers of one tensor in the file, given their indices, which must be in range.
    pub fn sample(&self, name: &str, entry: &Entry, places: &[usize]) -> Result<Vec<f32>> {
        self.check_dtype(name, entry)?;
        let bytes = &self.mapped.bytes()[entry.range.clone()];
        let two = |place: usize| [bytes[2 * place], bytes[2 * place + 1]];
        Ok(places
            .iter()
            .map(|&place| match entry.dtype {
                Dtype::BF16 => bf16::from_le_bytes(two(place)).to_f32(),
                Dtype::F16 => f16::from_le_bytes(two(place)).to_f32(),
                _ => f32::from_le_bytes(std::array::from_fn(|i| bytes[4 * place + i])),
            })
            .collect())
    }

    /// Releases the memory of one tensor in the file.
    pub fn release(&self, entry: &Entry) {
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

//! One safetensors file: eight bytes with the header's length, the header in JSON, the numbers.

use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Map, Value};

use crate::disk::Mapped;
use crate::error::{Error, Result};

/// Bytes of the header's length.
pub(crate) const LENGTH_BYTES: usize = 8;
/// The longest header that the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The key of the header that is not a tensor.
const METADATA_KEY: &str = "__metadata__";

/// A file of tensors, mapped into memory.
#[derive(Debug)]
pub(super) struct TensorFile {
    path: PathBuf,
    mapped: Mapped,
}

/// What a file's header says of a tensor.
#[derive(Debug)]
pub(crate) struct Entry {
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    /// Bytes of the file.
    pub range: Range<usize>,
}

/// What a file's header says.
#[derive(Debug)]
pub(crate) struct Header {
    /// In the order in which they lie in the file.
    pub tensors: Vec<(String, Entry)>,
    pub metadata: Map<String, Value>,
    /// Where the last of them ends.
    pub end: usize,
}

/// A tensor as the header has it.
#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    /// Bytes after the header, [start, end].
    data_offsets: [usize; 2],
}

impl TensorFile {
    /// Maps a file and reads its header. The tensors must lie one after the other and fill the file.
    pub fn open(path: &Path) -> Result<(Self, Vec<(String, Entry)>)> {
        let mapped = Mapped::open(path).map_err(Error::io(path, "open"))?;
        let bytes = mapped.bytes();
        let header = read_header(bytes).map_err(|message| Error::damaged(path, message))?;
        if header.end < bytes.len() {
            let message = format!(
                "is longer than its header says: {} bytes instead of {}; copy it again",
                bytes.len(),
                header.end
            );
            return Err(Error::damaged(path, message));
        }
        Ok((Self { path: path.into(), mapped }, header.tensors))
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        self.mapped.bytes()
    }

    /// Tells the system that a range of the file is about to be read.
    pub fn prepare(&self, range: Range<usize>) {
        self.mapped.prepare(range);
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses a tensor whose numbers are of a kind that is not read.
    pub fn check_dtype(&self, name: &str, entry: &Entry) -> Result<()> {
        match entry.dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 => Ok(()),
            other => Err(Error::file(&self.path, wrong_dtype(name, &other.to_string()))),
        }
    }

    /// The numbers of one of the file's tensors.
    pub fn numbers(&self, name: &str, entry: &Entry) -> Result<Cow<'_, [f32]>> {
        self.check_dtype(name, entry)?;
        self.mapped.prepare(entry.range.clone());
        let bytes = &self.mapped.bytes()[entry.range.clone()];
        Ok(match entry.dtype {
            Dtype::BF16 => Cow::Owned(widen(bytes, bf16::from_le_bytes)),
            Dtype::F16 => Cow::Owned(widen(bytes, f16::from_le_bytes)),
            _ => match self.mapped.f32s(entry.range.clone()) {
                Some(numbers) => Cow::Borrowed(numbers),
                None => {
                    Cow::Owned(bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect())
                }
            },
        })
    }

    /// Single numbers of one of the file's tensors, by their places, which must be in it.
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

    /// Lets go of the memory of one of the file's tensors.
    pub fn release(&self, entry: &Entry) {
        self.mapped.release(entry.range.clone());
    }
}

/// 16-bit numbers as f32, a block at a time.
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

/// The header of a file, in whose data the tensors lie one after the other; or what is wrong with it. What comes after
/// them is the caller's.
pub(crate) fn read_header(file: &[u8]) -> std::result::Result<Header, String> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!(
            "is cut short: a safetensors file begins with {LENGTH_BYTES} bytes of header length, this one \
             has {} bytes in all; copy it again",
            file.len()
        ));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!(
            "announces a header of {length} bytes, more than the {MAX_HEADER_BYTES} that the format allows; \
             it is damaged or not a safetensors file"
        ));
    }
    let length = length as usize;
    let Some((header, data)) = rest.split_at_checked(length) else {
        return Err(format!(
            "is cut short: it announces a header of {length} bytes and has only {} after it; copy it again",
            rest.len()
        ));
    };
    parse_header(header, data.len())
}

/// The header of a file from its JSON, with `data_bytes` behind it.
pub(crate) fn parse_header(header: &[u8], data_bytes: usize) -> std::result::Result<Header, String> {
    let start = LENGTH_BYTES + header.len();
    let header: Map<String, Value> =
        serde_json::from_slice(header).map_err(|error| format!("has a header that is not JSON: {error}"))?;
    let (mut tensors, mut metadata) = (Vec::with_capacity(header.len()), Map::new());
    for (name, value) in header {
        match value {
            Value::Object(value) if name == METADATA_KEY => metadata = value,
            _ if name == METADATA_KEY => {}
            value => {
                let raw: RawEntry = serde_json::from_value(value).map_err(|error| {
                    format!("has a header that does not describe tensor `{name}`: {error}")
                })?;
                tensors.push((name, raw));
            }
        }
    }
    tensors.sort_by_key(|(_, raw)| raw.data_offsets);
    let tensors = place(tensors, start, data_bytes)?;
    let end = tensors.last().map_or(start, |(_, entry)| entry.range.end);
    Ok(Header { tensors, metadata, end })
}

/// Checks that tensors, in the order of their offsets, lie end to end in the data. `start` is where the data begins in
/// the file.
fn place(
    tensors: Vec<(String, RawEntry)>,
    start: usize,
    data_bytes: usize,
) -> std::result::Result<Vec<(String, Entry)>, String> {
    let mut end = 0;
    let mut placed: Vec<(String, Entry)> = Vec::with_capacity(tensors.len());
    for (name, raw) in tensors {
        let [from, to] = raw.data_offsets;
        let Ok(dtype) = serde_json::from_value::<Dtype>(Value::String(raw.dtype.clone())) else {
            return Err(wrong_dtype(&name, &raw.dtype));
        };
        let expected = tensor_bytes(&raw.shape, dtype);
        if to.checked_sub(from).is_none_or(|found| Some(found) != expected) {
            let expected = expected.map_or("no such number of".into(), |bytes| bytes.to_string());
            return Err(format!(
                "has a damaged header: tensor `{name}`, {dtype} of shape {:?}, takes {expected} bytes, but \
                 its offsets are {from} to {to}",
                raw.shape
            ));
        }
        if from != end {
            let wrong = match placed.last() {
                Some((last, _)) if from < end => format!("`{last}` ends at {end}: they overlap"),
                _ => format!("what is before it ends at {end}: the bytes between belong to nothing"),
            };
            return Err(format!(
                "has a damaged header: tensor `{name}` begins at offset {from}, but {wrong}"
            ));
        }
        end = to;
        // Beyond the largest number, and then beyond the end of the file as well, which is refused below.
        let range = start.saturating_add(from)..start.saturating_add(to);
        placed.push((name, Entry { shape: raw.shape, dtype, range }));
    }
    if end > data_bytes {
        return Err(format!(
            "is cut short: its header describes {end} bytes of tensors and it has {data_bytes}; copy it again"
        ));
    }
    Ok(placed)
}

/// Bytes of a tensor; none if they are too many to count or not whole.
fn tensor_bytes(shape: &[usize], dtype: Dtype) -> Option<usize> {
    let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size))?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// What is wrong with numbers of another kind.
fn wrong_dtype(name: &str, dtype: &str) -> String {
    format!(
        "tensor `{name}` is of type {dtype}; only F32, BF16 and F16 can be read: convert it to one of these"
    )
}

//! The header of a safetensors file: eight bytes with its length, then JSON with the location of each tensor.

use std::ops::Range;

use safetensors::Dtype;
use serde_json::{Map, Value};

/// Bytes of the length field.
pub(crate) const LENGTH_BYTES: usize = 8;
/// The maximum header length that the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The header key that is not a tensor.
const METADATA_KEY: &str = "__metadata__";

/// A tensor's entry in the header.
#[derive(Debug)]
pub(crate) struct Entry {
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    /// The byte range in the file.
    pub range: Range<usize>,
}

/// The parsed header of a file.
#[derive(Debug)]
pub(crate) struct Header {
    /// The tensors, in file order.
    pub tensors: Vec<(String, Entry)>,
    pub metadata: Map<String, Value>,
    /// The end of the last tensor.
    pub end: usize,
}

/// A tensor in the header's JSON.
#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    /// Byte offsets after the header, [start, end].
    data_offsets: [usize; 2],
}

/// Parses the header of a file whose tensors are contiguous, or returns what is wrong. Data after the tensors is up to
/// the caller.
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
            "declares a header of {length} bytes, more than the {MAX_HEADER_BYTES} that the format allows; \
             it is damaged or not a safetensors file"
        ));
    }
    let length = length as usize;
    let Some((header, data)) = rest.split_at_checked(length) else {
        return Err(format!(
            "is cut short: it declares a header of {length} bytes but only {} follow; copy it again",
            rest.len()
        ));
    };
    parse_header(header, data.len())
}

/// Parses the header of a file from its JSON; `data_bytes` bytes follow it.
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

/// Checks that tensors, in the order of their offsets, are contiguous in the data, which begins at `start` in the file.
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
                _ => format!("the data before it ends at {end}: the bytes between belong to no tensor"),
            };
            return Err(format!(
                "has a damaged header: tensor `{name}` begins at offset {from}, but {wrong}"
            ));
        }
        end = to;
        // On overflow this saturates, which is beyond the end of the file and rejected below.
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

/// Size of a tensor in bytes; `None` on overflow or if it is not a whole number of bytes.
fn tensor_bytes(shape: &[usize], dtype: Dtype) -> Option<usize> {
    let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size))?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// The error message for an unsupported data type.
pub(crate) fn wrong_dtype(name: &str, dtype: &str) -> String {
    format!(
        "tensor `{name}` is of type {dtype}; only F32, BF16 and F16 can be read: convert it to one of these"
    )
}

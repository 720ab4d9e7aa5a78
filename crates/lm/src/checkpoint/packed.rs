//! Matrices in q8 and q4 in a safetensors file: tensors of bytes, exactly as the CPU computes with them.
//!
//! Such a file says so in its `__metadata__`:
//!
//! ```text
//! format    "march weights"
//! version   "1"
//! packed    JSON: {"q4": {"model.embeddings.weight": [rows, width], …}}
//! ```
//! A tensor that is listed has the type U8 and the shape [groups of 16 rows, bytes of a group]. All others are as
//! usual. The listed ones come first, so that each begins at a cache line: their sizes are multiples of it.

use std::collections::BTreeMap;
use std::path::Path;

use march_engine::Precision;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::read::{Kind, Stored};
use crate::disk::header::Entry;
use crate::error::{Error, Result};

const FORMAT: &str = "march weights";
const VERSION: &str = "1";

/// Precision, then name, then rows and width.
type Listed = BTreeMap<String, BTreeMap<String, [usize; 2]>>;

/// The metadata of a file with these packed matrices.
pub(super) fn metadata<'a>(
    weights: Precision,
    matrices: impl Iterator<Item = (&'a str, [usize; 2])>,
) -> Value {
    let matrices = matrices.map(|(name, shape)| (name.to_string(), shape)).collect();
    let listed: Listed = BTreeMap::from([(weights.to_string(), matrices)]);
    json!({ "format": FORMAT, "version": VERSION, "packed": json!(listed).to_string() })
}

/// The tensors of a file as they are stored. Nothing that the metadata says is believed: a listed tensor must have
/// the type and the shape of its bytes.
pub(super) fn stored(
    path: &Path,
    metadata: &Map<String, Value>,
    tensors: Vec<(String, Entry)>,
) -> Result<Vec<(String, Stored)>> {
    let mut listed = listed(path, metadata)?;
    let mut found = Vec::with_capacity(tensors.len());
    for (name, entry) in tensors {
        let Some((precision, shape)) = listed.remove(&name) else {
            found.push((name, entry.into()));
            continue;
        };
        let bytes = precision.blocks_shape(shape[0], shape[1]);
        if entry.dtype != Dtype::U8 || bytes.is_none_or(|bytes| entry.shape != bytes) {
            let expected =
                bytes.map_or("no such number of bytes".into(), |bytes| format!("U8 of shape {bytes:?}"));
            let message = format!(
                "has a damaged header: tensor `{name}`, {precision} of shape {shape:?}, takes {expected}, but it is {} \
                 of shape {:?}",
                entry.dtype, entry.shape
            );
            return Err(Error::damaged(path, message));
        }
        found.push((name, Stored { shape: shape.into(), kind: Kind::Packed(precision), range: entry.range }));
    }
    match listed.keys().next() {
        None => Ok(found),
        Some(name) => {
            let message = format!("has a damaged header: it lists tensor `{name}`, which it does not have");
            Err(Error::damaged(path, message))
        }
    }
}

/// Precision and shape of the packed matrices that the metadata lists.
fn listed(path: &Path, metadata: &Map<String, Value>) -> Result<BTreeMap<String, (Precision, [usize; 2])>> {
    if metadata.get("format").and_then(Value::as_str) != Some(FORMAT) {
        return Ok(BTreeMap::new());
    }
    let text = |key: &str| metadata.get(key).and_then(Value::as_str).unwrap_or_default();
    if text("version") != VERSION {
        let message = format!(
            "has weights in version `{}` of their format; this program reads version {VERSION}: convert the model \
             again",
            text("version")
        );
        return Err(Error::file(path, message));
    }
    let lists: Listed = serde_json::from_str(text("packed")).map_err(|error| {
        Error::damaged(path, format!("has a damaged header: `packed` is not a list of matrices: {error}"))
    })?;
    let mut listed = BTreeMap::new();
    for (precision, matrices) in lists {
        let Some(known) = [Precision::Q8, Precision::Q4].into_iter().find(|own| own.to_string() == precision)
        else {
            let message = format!(
                "has weights in `{precision}`; packed weights can be read in q8 and q4: convert the model again"
            );
            return Err(Error::file(path, message));
        };
        for (name, shape) in matrices {
            if listed.insert(name.clone(), (known, shape)).is_some() {
                let message = format!("has a damaged header: it lists tensor `{name}` twice");
                return Err(Error::damaged(path, message));
            }
        }
    }
    Ok(listed)
}

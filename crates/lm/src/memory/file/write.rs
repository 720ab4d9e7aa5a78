//! Writing a bank: the tensors in sequence, each with its checksums, then the header and the checksum table into the
//! space reserved before them. An appended section becomes valid with its first 64 bytes, which are written last.

use std::cmp::Reverse;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use march_engine::checksum;
use march_engine::ops::anchor_read::Storage;
use safetensors::Dtype;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::layer::{LayerWriter, Numbers, OutTensor};
use super::section::{
    ALIGNMENT, DIGITS, FORMAT, OPENING, PLAIN_VERSION, RECENT, Row, TABLE, UNFINISHED, hexadecimal,
    is_of_anchors,
};
use super::{BankFile, BankTag, Ending, FORMAT_VERSION, LOGITS};
use crate::disk::{self, header::LENGTH_BYTES};
use crate::error::{Error, Result};
use crate::memory::{Ledger, StateBank};

pub(super) fn save(bank: &StateBank, ending: Option<&Ending>, path: &Path, tag: &BankTag) -> Result<()> {
    bank.check_whole()?;
    let (tensors, storage) = tensors(bank, ending)?;
    let header = header(bank, ending, tag, storage, &tensors, None);
    disk::replace_with(path, |file| {
        let prefix = write_tensors(path, file, 0, header, &tensors)?;
        let written = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&prefix));
        written.map_err(Error::io(path, "write"))
    })
}

pub(super) fn append(bank: &StateBank, ending: Option<&Ending>, path: &Path, tag: &BankTag) -> Result<()> {
    bank.check_whole()?;
    let save = || save(bank, ending, path, tag);
    if std::fs::metadata(path).map_or(true, |file| file.is_file() && file.len() == 0) {
        return save();
    }
    let mut file = open_locked(path)?;
    let begun = BankFile::of_file(path, file.try_clone().map_err(Error::io(path, "append to"))?)?;
    // Verify first: data appended to a damaged file would be lost with it.
    begun.verify()?;
    let (mut tensors, storage) = tensors(bank, ending)?;
    let whole: usize = tensors.iter().map(OutTensor::bytes).sum();
    if !continues(&begun, tag, &mut tensors)? {
        return save();
    }
    tensors.retain(|tensor| tensor.rows() > 0);
    let header = header(bank, ending, tag, storage, &tensors, Some(&begun.last.header_checksum));
    let (end, start) = (begun.last.end, begun.last.end.next_multiple_of(ALIGNMENT));
    let new: usize = tensors.iter().map(OutTensor::bytes).sum();
    if 2 * new > whole || start + new > 2 * whole {
        return save();
    }
    let failed = || Error::io(path, "append to");
    let put = |file: &mut File, at: usize, bytes: &[u8]| {
        file.seek(SeekFrom::Start(at as u64)).map_err(failed())?;
        file.write_all(bytes).map_err(failed())?;
        file.sync_all().map_err(failed())
    };
    let write = || {
        // Remove what an earlier append left unfinished.
        file.set_len(end as u64).map_err(failed())?;
        let mark = [&vec![0; start - end][..], UNFINISHED].concat();
        put(&mut file, end, &mark)?;
        let prefix = write_tensors(path, &mut file, start, header, &tensors)?;
        let (first, rest) = prefix.split_at(ALIGNMENT);
        put(&mut file, start + ALIGNMENT, rest)?;
        put(&mut file, start, first)
    };
    let written = write();
    if written.is_err() {
        // Report the original error; the mark already makes the section invalid.
        let _ = file.set_len(end as u64);
    }
    written
}

/// Opens a file for appending, one process at a time. On systems without locks, concurrent appends are detected by the
/// checksums.
fn open_locked(path: &Path) -> Result<File> {
    loop {
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(Error::io(path, "append to"))?;
        let _ = file.lock();
        // The previous owner may have put another file in its place.
        if disk::is_at(&file, path) {
            return Ok(file);
        }
    }
}

/// Whether the anchors in a file are the first of these; if so, records how many there are.
fn continues(file: &BankFile, tag: &BankTag, tensors: &mut [OutTensor<'_>]) -> Result<bool> {
    let parts = file.parts();
    let known = |name: &str| !is_of_anchors(name) || tensors.iter().any(|tensor| tensor.name == name);
    if file.tag() != tag || !parts.iter().all(|part| known(&part.name)) {
        return Ok(false);
    }
    for tensor in tensors.iter_mut().filter(|tensor| is_of_anchors(&tensor.name)) {
        let rows = file.rows(&tensor.name);
        let like = |row: &Row<'_>| {
            row.part.entry.dtype == tensor.dtype && row.part.entry.shape[1..] == tensor.shape[1..]
        };
        let sums: Vec<u64> = rows.iter().map(Row::checksum).collect();
        if !rows.iter().all(like) || !tensor.begins_with(&sums)? {
            return Ok(false);
        }
        tensor.done = sums.len();
    }
    Ok(true)
}

/// Writes tensors to a file, with space for their header at byte `start`; returns the bytes that belong there.
fn write_tensors(
    path: &Path,
    file: &mut File,
    start: usize,
    header: Map<String, Value>,
    tensors: &[OutTensor<'_>],
) -> Result<Vec<u8>> {
    let failed = || Error::io(path, "write");
    let mut sums = vec![0; tensors.iter().map(OutTensor::rows).sum()];
    let room = prefix(header.clone(), &sums).len();
    file.seek(SeekFrom::Start((start + room) as u64)).map_err(failed())?;
    let mut out = BufWriter::with_capacity(1 << 20, &mut *file);
    let mut sum = sums.iter_mut();
    for tensor in tensors {
        let uneven = || Error::Request(format!("tensor `{}` has rows of different sizes", tensor.name));
        let mut left = tensor.bytes();
        tensor.each_row(|bytes| {
            left = left.checked_sub(bytes.len()).ok_or_else(uneven)?;
            *sum.next().ok_or_else(uneven)? = checksum(bytes);
            out.write_all(bytes).map_err(failed())
        })?;
        if left > 0 {
            return Err(uneven());
        }
    }
    out.flush().map_err(failed())?;
    drop(out);
    // Numbers read from a device that was lost in the meantime must not become a bank.
    tensors.iter().find_map(OutTensor::device).map_or(Ok(()), |device| device.check())?;
    Ok(prefix(header, &sums))
}

/// All tensors of a bank, and the precision of its anchors' states.
fn tensors<'a>(
    bank: &'a StateBank,
    ending: Option<&'a Ending>,
) -> Result<(Vec<OutTensor<'a>>, Option<Storage>)> {
    let (mut tensors, mut storage) = (Vec::new(), None);
    if let Some(Ending { logits, .. }) = ending {
        tensors.push(OutTensor {
            name: LOGITS.into(),
            dtype: Dtype::F32,
            shape: vec![logits.len()],
            done: 0,
            numbers: Numbers::Host(logits),
        });
    }
    for (index, layer) in bank.layers.iter().enumerate() {
        let mut writer = LayerWriter::new(index);
        layer.save(&mut writer)?;
        storage = writer.storage.or(storage);
        tensors.extend(writer.tensors);
    }
    // Widest types first, so that every tensor is aligned for its type.
    tensors.sort_by_key(|tensor| Reverse(tensor.dtype.bitsize()));
    Ok((tensors, storage))
}

/// The header without its checksums.
fn header(
    bank: &StateBank,
    ending: Option<&Ending>,
    tag: &BankTag,
    storage: Option<Storage>,
    tensors: &[OutTensor<'_>],
    after: Option<&str>,
) -> Map<String, Value> {
    let zeros = "0".repeat(DIGITS);
    let mut metadata = Map::new();
    let mut add = |key: &str, value: &str| metadata.insert(key.into(), value.into());
    add("header_checksum", &zeros);
    add("table_checksum", &zeros);
    if let Some(after) = after {
        add("after", after);
    }
    add("format", FORMAT);
    // Without the end of the text, use the old version, which earlier programs can read as well.
    add("version", &if ending.is_some() { FORMAT_VERSION } else { PLAIN_VERSION }.to_string());
    add("model_type", &tag.model_type);
    add("model", &tag.model);
    add("tokenizer_name", &tag.tokenizer_name);
    add("tokenizer", &tag.tokenizer);
    if let Some(interval) = bank.policy.interval {
        add("interval", &interval.to_string());
    }
    if let Some(storage) = storage {
        add("storage", &storage.to_string());
    }
    add("policy", &text(&bank.policy));
    add("timeline", &text(&bank.timeline));
    if bank.policy.budget().is_some() {
        let empty = Ledger::default();
        let ledgers: Vec<&Ledger> =
            bank.layers.iter().map(|layer| layer.ledger().unwrap_or(&empty)).collect();
        add("ledgers", &text(&ledgers));
    }
    if let Some(ending) = ending {
        add(RECENT, &text(&ending.recent));
    }
    let mut header = Map::new();
    header.insert("__metadata__".into(), metadata.into());
    let rows: usize = tensors.iter().map(OutTensor::rows).sum();
    let mut start = rows * size_of::<u64>();
    header.insert(TABLE.into(), json!({ "dtype": "U64", "shape": [rows], "data_offsets": [0, start] }));
    for tensor in tensors {
        let end = start + tensor.bytes();
        let entry = json!({
            "dtype": tensor.dtype.to_string(), "shape": tensor.shape(), "data_offsets": [start, end]
        });
        header.insert(tensor.name.clone(), entry);
        start = end;
    }
    header
}

fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// The header's length, the header and the checksum table, with the checksums of header and table filled in.
fn prefix(mut header: Map<String, Value>, sums: &[u64]) -> Vec<u8> {
    let table: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    if let Some(Value::Object(metadata)) = header.get_mut("__metadata__") {
        metadata.insert("table_checksum".into(), hexadecimal(checksum(&table)).into());
    }
    let header = Value::Object(header).to_string();
    debug_assert!(header.starts_with(OPENING));
    // Pad with spaces, so that the numbers are aligned for any type.
    let length = (LENGTH_BYTES + header.len()).next_multiple_of(ALIGNMENT) - LENGTH_BYTES;
    let mut bytes = (length as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(LENGTH_BYTES + length, b' ');
    let sum = hexadecimal(checksum(&bytes));
    bytes[LENGTH_BYTES + OPENING.len()..][..DIGITS].copy_from_slice(sum.as_bytes());
    bytes.extend_from_slice(&table);
    bytes
}

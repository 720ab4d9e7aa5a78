//! Writing a bank: the tensors one after the other, each with its checksums, then the header and the checksums before
//! them, where room was left.

use std::cmp::Reverse;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use march_engine::ops::anchor_read::Storage;
use march_engine::{Engine, checksum, file_bytes};
use safetensors::Dtype;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    BankTag, DIGITS, FORMAT, FORMAT_VERSION, LENGTH_BYTES, OPENING, ROUTING_KEYS, SCALES, STATES, TABLE,
    TAILS, hexadecimal, storage_name,
};
use crate::disk;
use crate::error::{Error, Result};
use crate::memory::{Anchors, Ledger, StateBank};

/// The header ends on a multiple of this.
const ALIGNMENT: usize = 64;

/// A tensor to be written.
struct Out<'a, E: Engine> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    numbers: Numbers<'a, E>,
}

/// Where its numbers come from.
enum Numbers<'a, E: Engine> {
    /// One checksum.
    Whole(&'a E::Tensor),
    /// A checksum for each row.
    Rows(&'a E::Tensor),
    /// For each row one of the parts of stored states, and a checksum.
    Stored(Vec<&'a E::Stored>, usize),
}

impl<E: Engine> Out<'_, E> {
    fn rows(&self) -> usize {
        match &self.numbers {
            Numbers::Whole(_) => 1,
            Numbers::Rows(_) => self.shape[0],
            Numbers::Stored(list, _) => list.len(),
        }
    }

    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    /// Gives the bytes under each checksum.
    fn each_row(&self, engine: &E, mut give: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match &self.numbers {
            Numbers::Whole(tensor) => give(&file_bytes(&engine.to_f32(tensor))),
            Numbers::Rows(tensor) => {
                let numbers = engine.to_f32(tensor);
                let width = numbers.len() / self.shape[0].max(1);
                numbers.chunks_exact(width.max(1)).try_for_each(|row| give(&file_bytes(row)))
            }
            Numbers::Stored(list, part) => list.iter().try_for_each(|stored| {
                let stored = engine.stored_to_host(stored)?;
                give(stored.parts()?.get(*part).map_or(&[][..], |bytes| bytes))
            }),
        }
    }
}

pub(super) fn save<E: Engine>(bank: &StateBank<E>, engine: &E, path: &Path, tag: &BankTag) -> Result<()> {
    bank.check_whole()?;
    let mut tensors = Vec::new();
    let mut storage = None;
    for (index, layer) in bank.layers.iter().enumerate() {
        for (name, tensor) in &layer.live {
            tensors.push(Out {
                name: format!("layers.{index}.{name}"),
                dtype: Dtype::F32,
                shape: engine.shape(tensor).to_vec(),
                numbers: Numbers::Whole(tensor),
            });
        }
        storage =
            anchors(engine, &format!("layers.{index}.anchors."), &layer.anchors, &mut tensors)?.or(storage);
    }
    // Wide numbers first, so that all lie on addresses for their type.
    tensors.sort_by_key(|tensor| Reverse(tensor.dtype.bitsize()));
    let header = header(bank, tag, storage, &tensors);
    let mut sums = vec![0; tensors.iter().map(Out::rows).sum()];
    let room = prefix(header.clone(), &sums).len();
    disk::replace_with(path, |file| {
        let failed = || Error::io(path, "write");
        file.seek(SeekFrom::Start(room as u64)).map_err(failed())?;
        let mut out = BufWriter::with_capacity(1 << 20, &mut *file);
        let mut sum = sums.iter_mut();
        for tensor in &tensors {
            let mut left = tensor.bytes();
            tensor.each_row(engine, |bytes| {
                let (Some(sum), true) = (sum.next(), bytes.len() <= left) else {
                    return Err(Error::Request(format!("tensor `{}` has rows of unlike sizes", tensor.name)));
                };
                *sum = checksum(bytes);
                left -= bytes.len();
                out.write_all(bytes).map_err(failed())
            })?;
            if left > 0 {
                return Err(Error::Request(format!("tensor `{}` has rows of unlike sizes", tensor.name)));
            }
        }
        out.flush().map_err(failed())?;
        drop(out);
        file.seek(SeekFrom::Start(0)).map_err(failed())?;
        file.write_all(&prefix(header, &sums)).map_err(failed())
    })
}

/// The tensors of a layer's anchors, and the precision of their states.
fn anchors<'a, E: Engine>(
    engine: &E,
    prefix: &str,
    anchors: &'a Anchors<E>,
    tensors: &mut Vec<Out<'a, E>>,
) -> Result<Option<Storage>> {
    let (Some(first), Some(keys)) = (anchors.states.first(), &anchors.routing_keys) else { return Ok(None) };
    let count = anchors.states.len();
    let mut add = |name: &str, dtype, rest: &[usize], numbers| {
        let shape = [count].iter().chain(rest).copied().collect();
        tensors.push(Out { name: format!("{prefix}{name}"), dtype, shape, numbers });
    };
    let first = engine.stored_to_host(first)?;
    let (storage, [_, shape @ ..]) = (first.storage(), first.shape());
    let states = || anchors.states.iter().map(|state| &**state).collect();
    let dtype = match storage {
        Storage::F32 => Dtype::F32,
        Storage::Bf16 => Dtype::BF16,
        Storage::Int8 => {
            add(SCALES, Dtype::F32, &shape[..2], Numbers::Stored(states(), 1));
            Dtype::I8
        }
    };
    add(STATES, dtype, &shape, Numbers::Stored(states(), 0));
    add(ROUTING_KEYS, Dtype::F32, &engine.shape(keys)[1..], Numbers::Rows(keys));
    for (i, name) in TAILS.into_iter().enumerate() {
        if let Some(tails) = anchors.tails.first() {
            let [_, _, shape @ ..] = engine.stored_to_host(&tails[i])?.shape();
            let list = anchors.tails.iter().map(|tails| &*tails[i]).collect();
            add(name, Dtype::F32, &shape, Numbers::Stored(list, 0));
        }
    }
    Ok(Some(storage))
}

/// The header but for its checksums.
fn header<E: Engine>(
    bank: &StateBank<E>,
    tag: &BankTag,
    storage: Option<Storage>,
    tensors: &[Out<'_, E>],
) -> Map<String, Value> {
    let zeros = "0".repeat(DIGITS);
    let mut metadata = Map::new();
    let mut add = |key: &str, value: &str| metadata.insert(key.into(), value.into());
    add("header_checksum", &zeros);
    add("table_checksum", &zeros);
    add("format", FORMAT);
    add("version", &FORMAT_VERSION.to_string());
    add("model_type", &tag.model_type);
    add("model", &tag.model);
    add("tokenizer_name", &tag.tokenizer_name);
    add("tokenizer", &tag.tokenizer);
    if let Some(interval) = bank.policy.interval {
        add("interval", &interval.to_string());
    }
    if let Some(storage) = storage {
        add("storage", storage_name(storage));
    }
    add("policy", &text(&bank.policy));
    add("timeline", &text(&bank.timeline));
    if bank.policy.budget().is_some() {
        let ledgers: Vec<&Ledger> = bank.layers.iter().map(|layer| &layer.anchors.ledger).collect();
        add("ledgers", &text(&ledgers));
    }
    let mut header = Map::new();
    header.insert("__metadata__".into(), metadata.into());
    let rows: usize = tensors.iter().map(Out::rows).sum();
    let mut start = rows * size_of::<u64>();
    header.insert(TABLE.into(), json!({ "dtype": "U64", "shape": [rows], "data_offsets": [0, start] }));
    for tensor in tensors {
        let end = start + tensor.bytes();
        let entry = json!({
            "dtype": tensor.dtype.to_string(), "shape": tensor.shape, "data_offsets": [start, end]
        });
        header.insert(tensor.name.clone(), entry);
        start = end;
    }
    header
}

fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// The header's length, the header and the table of checksums, with the checksums of these two.
fn prefix(mut header: Map<String, Value>, sums: &[u64]) -> Vec<u8> {
    let table: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    if let Some(Value::Object(metadata)) = header.get_mut("__metadata__") {
        metadata.insert("table_checksum".into(), hexadecimal(checksum(&table)).into());
    }
    let header = Value::Object(header).to_string();
    debug_assert!(header.starts_with(OPENING));
    // Spaces, so that the numbers begin at an address for any type.
    let length = (LENGTH_BYTES + header.len()).next_multiple_of(ALIGNMENT) - LENGTH_BYTES;
    let mut bytes = (length as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(LENGTH_BYTES + length, b' ');
    let sum = hexadecimal(checksum(&bytes));
    bytes[LENGTH_BYTES + OPENING.len()..][..DIGITS].copy_from_slice(sum.as_bytes());
    bytes.extend_from_slice(&table);
    bytes
}

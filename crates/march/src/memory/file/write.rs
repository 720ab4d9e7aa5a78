//! Writing a bank: the tensors one after the other, each with its checksums, then the header and the checksums before
//! them, where room was left. What is appended becomes part of the file with its first 64 bytes, which are written last.

use std::cmp::Reverse;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use march_engine::ops::anchor_read::Storage;
use march_engine::{Engine, checksum};
use safetensors::Dtype;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::section::{
    ALIGNMENT, DIGITS, FORMAT, OPENING, PLAIN_VERSION, RECENT, Row, TABLE, UNFINISHED, hexadecimal,
    is_of_anchors,
};
use super::{
    BankFile, BankTag, Ending, FORMAT_VERSION, LOGITS, ROUTING_KEYS, SCALES, STATES, TAILS, storage_name,
};
use crate::checkpoint::read::LENGTH_BYTES;
use crate::disk::{self, file_bytes};
use crate::error::{Error, Result};
use crate::memory::{Anchors, Ledger, StateBank};

/// A tensor to be written.
struct Out<'a, E: Engine> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Rows that are left out, because the file has them.
    done: usize,
    numbers: Numbers<'a, E>,
}

/// Where its numbers come from.
enum Numbers<'a, E: Engine> {
    /// One checksum.
    Whole(&'a E::Tensor),
    /// One checksum.
    Host(&'a [f32]),
    /// A checksum for each row.
    Rows(&'a E::Tensor),
    /// For each row one of the parts of stored states, and a checksum.
    Stored(Vec<&'a E::Stored>, usize),
}

impl<E: Engine> Out<'_, E> {
    fn rows(&self) -> usize {
        match &self.numbers {
            Numbers::Whole(_) | Numbers::Host(_) => 1,
            Numbers::Rows(_) => self.shape[0] - self.done,
            Numbers::Stored(list, _) => list.len() - self.done,
        }
    }

    /// What is written of its shape.
    fn shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.done > 0 {
            shape[0] -= self.done;
        }
        shape
    }

    fn bytes(&self) -> usize {
        self.shape().iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    /// Gives the bytes under each checksum.
    fn each_row(&self, engine: &E, mut give: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match &self.numbers {
            Numbers::Whole(tensor) => give(&file_bytes(&engine.to_f32(tensor))),
            Numbers::Host(numbers) => give(&file_bytes(numbers)),
            Numbers::Rows(tensor) => {
                let numbers = engine.to_f32(tensor);
                let width = numbers.len() / self.shape[0].max(1);
                let rows = numbers.chunks_exact(width.max(1)).skip(self.done);
                rows.into_iter().try_for_each(|row| give(&file_bytes(row)))
            }
            Numbers::Stored(list, part) => list[self.done..].iter().try_for_each(|stored| {
                let stored = engine.stored_to_host(stored)?;
                give(stored.parts()?.get(*part).map_or(&[][..], |bytes| bytes))
            }),
        }
    }

    /// Whether the first rows have these checksums.
    fn begins_with(&self, engine: &E, sums: &[u64]) -> Result<bool> {
        Ok(match &self.numbers {
            Numbers::Whole(_) | Numbers::Host(_) => false,
            Numbers::Rows(tensor) => {
                let numbers = engine.to_f32(tensor);
                let width = numbers.len() / self.shape[0].max(1);
                let rows = numbers.chunks_exact(width.max(1)).map(|row| checksum(&file_bytes(row)));
                sums.len() <= self.shape[0] && rows.zip(sums).all(|(own, sum)| own == *sum)
            }
            Numbers::Stored(list, part) => {
                if sums.len() > list.len() {
                    return Ok(false);
                }
                for (stored, sum) in list.iter().zip(sums) {
                    if engine.stored_to_host(stored)?.checksums().get(*part) != Some(sum) {
                        return Ok(false);
                    }
                }
                true
            }
        })
    }
}

pub(super) fn save<E: Engine>(
    bank: &StateBank<E>,
    ending: Option<&Ending>,
    engine: &E,
    path: &Path,
    tag: &BankTag,
) -> Result<()> {
    bank.check_whole()?;
    let (tensors, storage) = tensors(bank, ending, engine)?;
    let header = header(bank, ending, tag, storage, &tensors, None);
    disk::replace_with(path, |file| {
        let prefix = write_tensors(engine, path, file, 0, header, &tensors)?;
        let written = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&prefix));
        written.map_err(Error::io(path, "write"))
    })
}

pub(super) fn append<E: Engine>(
    bank: &StateBank<E>,
    ending: Option<&Ending>,
    engine: &E,
    path: &Path,
    tag: &BankTag,
) -> Result<()> {
    bank.check_whole()?;
    let save = || save(bank, ending, engine, path, tag);
    if std::fs::metadata(path).map_or(true, |file| file.is_file() && file.len() == 0) {
        return save();
    }
    let mut file = open_locked(path)?;
    let begun = BankFile::of_file(path, file.try_clone().map_err(Error::io(path, "append to"))?)?;
    // What is appended to damage would be lost with it.
    begun.verify()?;
    let (mut tensors, storage) = tensors(bank, ending, engine)?;
    let whole: usize = tensors.iter().map(Out::bytes).sum();
    if !continues(engine, &begun, tag, &mut tensors)? {
        return save();
    }
    tensors.retain(|tensor| tensor.rows() > 0);
    let header = header(bank, ending, tag, storage, &tensors, Some(&begun.last.header_checksum));
    let (end, start) = (begun.last.end, begun.last.end.next_multiple_of(ALIGNMENT));
    let new: usize = tensors.iter().map(Out::bytes).sum();
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
        // What an earlier append has not finished.
        file.set_len(end as u64).map_err(failed())?;
        let mark = [&vec![0; start - end][..], UNFINISHED].concat();
        put(&mut file, end, &mark)?;
        let prefix = write_tensors(engine, path, &mut file, start, header, &tensors)?;
        let (first, rest) = prefix.split_at(ALIGNMENT);
        put(&mut file, start + ALIGNMENT, rest)?;
        put(&mut file, start, first)
    };
    let written = write();
    if written.is_err() {
        // The error is the one to report; the mark says that the section is not there.
        let _ = file.set_len(end as u64);
    }
    written
}

/// Opens a file to append to it, one process at a time. Where the system has no locks, two at once are found out by the
/// checksums.
fn open_locked(path: &Path) -> Result<File> {
    loop {
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(Error::io(path, "append to"))?;
        let _ = file.lock();
        // Whoever had it before may have put another file into its place.
        if disk::is_at(&file, path) {
            return Ok(file);
        }
    }
}

/// Whether the anchors of a file are the first of these; if so, notes down how many.
fn continues<E: Engine>(
    engine: &E,
    file: &BankFile,
    tag: &BankTag,
    tensors: &mut [Out<'_, E>],
) -> Result<bool> {
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
        if !rows.iter().all(like) || !tensor.begins_with(engine, &sums)? {
            return Ok(false);
        }
        tensor.done = sums.len();
    }
    Ok(true)
}

/// Writes tensors into a file, with room for their header at byte `start`; returns what belongs there.
fn write_tensors<E: Engine>(
    engine: &E,
    path: &Path,
    file: &mut File,
    start: usize,
    header: Map<String, Value>,
    tensors: &[Out<'_, E>],
) -> Result<Vec<u8>> {
    let failed = || Error::io(path, "write");
    let mut sums = vec![0; tensors.iter().map(Out::rows).sum()];
    let room = prefix(header.clone(), &sums).len();
    file.seek(SeekFrom::Start((start + room) as u64)).map_err(failed())?;
    let mut out = BufWriter::with_capacity(1 << 20, &mut *file);
    let mut sum = sums.iter_mut();
    for tensor in tensors {
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
    Ok(prefix(header, &sums))
}

/// All tensors of a bank, and the precision of its anchors' states.
fn tensors<'a, E: Engine>(
    bank: &'a StateBank<E>,
    ending: Option<&'a Ending>,
    engine: &E,
) -> Result<(Vec<Out<'a, E>>, Option<Storage>)> {
    let (mut tensors, mut storage) = (Vec::new(), None);
    if let Some(Ending { logits, .. }) = ending {
        tensors.push(Out {
            name: LOGITS.into(),
            dtype: Dtype::F32,
            shape: vec![logits.len()],
            done: 0,
            numbers: Numbers::Host(logits),
        });
    }
    for (index, layer) in bank.layers.iter().enumerate() {
        for (name, tensor) in &layer.live {
            tensors.push(Out {
                name: format!("layers.{index}.{name}"),
                dtype: Dtype::F32,
                shape: engine.shape(tensor).to_vec(),
                done: 0,
                numbers: Numbers::Whole(tensor),
            });
        }
        storage =
            anchors(engine, &format!("layers.{index}.anchors."), &layer.anchors, &mut tensors)?.or(storage);
    }
    // Wide numbers first, so that all lie on addresses for their type.
    tensors.sort_by_key(|tensor| Reverse(tensor.dtype.bitsize()));
    Ok((tensors, storage))
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
        tensors.push(Out { name: format!("{prefix}{name}"), dtype, shape, done: 0, numbers });
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
    ending: Option<&Ending>,
    tag: &BankTag,
    storage: Option<Storage>,
    tensors: &[Out<'_, E>],
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
    // Without the text's end, also an earlier program can read it.
    add("version", &if ending.is_some() { FORMAT_VERSION } else { PLAIN_VERSION }.to_string());
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
    if let Some(ending) = ending {
        add(RECENT, &text(&ending.recent));
    }
    let mut header = Map::new();
    header.insert("__metadata__".into(), metadata.into());
    let rows: usize = tensors.iter().map(Out::rows).sum();
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

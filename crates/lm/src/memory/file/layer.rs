//! The interface between a mixer's memory and a bank's file: writing and reading the tensors of one layer.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use march_engine::ops::anchor_read::{self, Storage, StoredStates};
use march_engine::{Device, Tensor, checksum};
use safetensors::Dtype;

use super::BankFile;
use super::section::{Row, is_of_anchors};
use crate::disk::file_bytes;
use crate::error::{Error, Result};
use crate::memory::Ledger;

/// A tensor to write.
pub(super) struct OutTensor<'a> {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Number of leading rows to skip because the file already has them.
    pub done: usize,
    pub numbers: Numbers<'a>,
}

/// The source of a tensor's numbers.
pub(super) enum Numbers<'a> {
    /// Tensors that are concatenated; one checksum.
    Whole(Vec<&'a Tensor>),
    /// Numbers in host memory; one checksum.
    Host(&'a [f32]),
    /// A tensor with one checksum per row.
    Rows(&'a Tensor),
    /// One part of each stored state per row; one checksum per row.
    Stored(&'a [Tensor], usize),
}

impl OutTensor<'_> {
    /// The device that holds the numbers; `None` for numbers in host memory.
    pub fn device(&self) -> Option<&Device> {
        let tensor = match &self.numbers {
            Numbers::Whole(parts) => parts.first().copied(),
            Numbers::Host(_) => None,
            Numbers::Rows(tensor) => Some(*tensor),
            Numbers::Stored(states, _) => states.first(),
        };
        tensor.map(Tensor::device)
    }

    pub fn rows(&self) -> usize {
        match &self.numbers {
            Numbers::Whole(_) | Numbers::Host(_) => 1,
            Numbers::Rows(_) => self.shape[0] - self.done,
            Numbers::Stored(states, _) => states.len() - self.done,
        }
    }

    /// The shape of the part that is written.
    pub fn shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.done > 0 {
            shape[0] -= self.done;
        }
        shape
    }

    pub fn bytes(&self) -> usize {
        self.shape().iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    /// Passes the bytes under each checksum to `give`.
    pub fn each_row(&self, mut give: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match &self.numbers {
            Numbers::Whole(parts) => {
                let parts: Vec<_> = parts.iter().map(|part| part.to_f32()).collect();
                give(&file_bytes(&parts.concat()))
            }
            Numbers::Host(numbers) => give(&file_bytes(numbers)),
            Numbers::Rows(tensor) => {
                let numbers = tensor.to_f32();
                let width = numbers.len() / self.shape[0].max(1);
                numbers.chunks_exact(width.max(1)).skip(self.done).try_for_each(|row| give(&file_bytes(row)))
            }
            Numbers::Stored(states, part) => states[self.done..].iter().try_for_each(|state| {
                let stored = state.stored()?;
                give(stored.parts()?.get(*part).map_or(&[][..], |bytes| bytes))
            }),
        }
    }

    /// Whether the first rows have these checksums.
    pub fn begins_with(&self, sums: &[u64]) -> Result<bool> {
        if sums.len() > self.rows() {
            return Ok(false);
        }
        match &self.numbers {
            Numbers::Whole(_) | Numbers::Host(_) => Ok(false),
            Numbers::Rows(_) => {
                let mut own = Vec::with_capacity(self.rows());
                self.each_row(|row| {
                    own.push(checksum(row));
                    Ok(())
                })?;
                Ok(own.starts_with(sums))
            }
            Numbers::Stored(states, part) => {
                for (state, sum) in states.iter().zip(sums) {
                    if state.stored()?.checksums().get(*part) != Some(sum) {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }
}

/// Collects the tensors of one layer for a file.
pub struct LayerWriter<'a> {
    prefix: String,
    pub(super) tensors: Vec<OutTensor<'a>>,
    pub(super) storage: Option<Storage>,
}

impl<'a> LayerWriter<'a> {
    pub(super) fn new(layer: usize) -> Self {
        Self { prefix: format!("layers.{layer}."), tensors: Vec::new(), storage: None }
    }

    fn add(&mut self, name: &str, dtype: Dtype, shape: Vec<usize>, numbers: Numbers<'a>) {
        let name = format!("{}{name}", self.prefix);
        self.tensors.push(OutTensor { name, dtype, shape, done: 0, numbers });
    }

    /// Adds a tensor that is written in full at every save.
    pub fn tensor(&mut self, name: &str, tensor: &'a Tensor) {
        self.add(name, Dtype::F32, tensor.shape().to_vec(), Numbers::Whole(vec![tensor]));
    }

    /// Adds a tensor [1, tokens, ..] given in parts [1, n, ..]; it is written in full at every save.
    pub fn tokens(&mut self, name: &str, parts: Vec<&'a Tensor>) {
        let Some(first) = parts.first() else { return };
        let mut shape = first.shape().to_vec();
        shape[1] = parts.iter().map(|part| part.shape()[1]).sum();
        self.add(name, Dtype::F32, shape, Numbers::Whole(parts));
    }

    /// Adds a tensor with one row per kept anchor, [anchors, ..]. Rows that a file already holds are not written again.
    pub fn anchor_rows(&mut self, name: &str, rows: &'a Tensor) {
        self.add(&format!("{ANCHORS}{name}"), Dtype::F32, rows.shape().to_vec(), Numbers::Rows(rows));
    }

    /// Adds stored states of one shape, one per kept anchor; int8 states come with their scales. A state that a file
    /// already holds is not written again.
    pub fn anchor_states(&mut self, name: &str, states: &'a [Tensor]) -> Result<()> {
        let Some(first) = states.first() else { return Ok(()) };
        let first = first.stored()?;
        let (storage, shape) = (first.storage(), first.shape());
        let count = |rest: &[usize]| [&[states.len()], rest].concat();
        let dtype = match storage {
            Storage::F32 => Dtype::F32,
            Storage::Bf16 => Dtype::BF16,
            Storage::Int8 => {
                let scales = format!("{ANCHORS}{SCALES}");
                self.add(&scales, Dtype::F32, count(&shape[1..3]), Numbers::Stored(states, 1));
                Dtype::I8
            }
        };
        // Other tensors have a single head and are written without the dimension for heads.
        let rest = if name == STATES { &shape[1..] } else { &shape[2..] };
        self.add(&format!("{ANCHORS}{name}"), dtype, count(rest), Numbers::Stored(states, 0));
        if name == STATES {
            self.storage = Some(storage);
        }
        Ok(())
    }
}

/// Prefix of the names of tensors with one row per anchor, after the layer's number.
const ANCHORS: &str = "anchors.";
/// The anchors' states, in the bank's precision.
pub(crate) const STATES: &str = "states";
/// The scales of int8 states.
const SCALES: &str = "scales";

/// Reads the tensors of one layer from a file.
pub struct LayerReader<'f> {
    file: &'f BankFile,
    device: &'f Device,
    prefix: String,
    ledger: Ledger,
    anchors: usize,
    asked: RefCell<BTreeSet<String>>,
}

impl<'f> LayerReader<'f> {
    /// A reader for layer `layer` of a file, in which that layer keeps `anchors` anchors.
    pub(super) fn new(
        file: &'f BankFile,
        device: &'f Device,
        layer: usize,
        ledger: Ledger,
        anchors: usize,
    ) -> Self {
        Self { file, device, prefix: format!("layers.{layer}."), ledger, anchors, asked: RefCell::default() }
    }

    /// The number of text tokens in the bank.
    pub fn position(&self) -> usize {
        self.file.timeline().position
    }

    /// The layer's bookkeeping of its anchors, if it decided by itself which to keep.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The number of anchors that the layer keeps.
    pub fn anchors(&self) -> usize {
        self.anchors
    }

    fn full_name(&self, name: &str) -> String {
        let name = format!("{}{name}", self.prefix);
        self.asked.borrow_mut().insert(name.clone());
        name
    }

    /// Reads a tensor that was written in full; `None` if the file has none of this name.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let (name, last) = (self.full_name(name), &self.file.last);
        let Some(part) = last.tensors.get(&name) else { return Ok(None) };
        let numbers = self.file.numbers(last, &name, part, 0)?;
        Ok(Some(Tensor::from_slice(&numbers, &part.entry.shape, self.device)?))
    }

    /// Reads a tensor as [`LayerReader::tensor`] does, but fails if the file does not have it.
    pub fn required(&self, name: &str) -> Result<Tensor> {
        let missing = || Error::file(self.file.path(), format!("has no tensor `{}{name}`", self.prefix));
        self.tensor(name)?.ok_or_else(missing)
    }

    /// The rows of a tensor of anchors, one row per anchor.
    fn rows(&self, name: &str) -> Result<(String, Vec<Row<'f>>)> {
        let name = self.full_name(&format!("{ANCHORS}{name}"));
        let rows = self.file.rows(&name);
        if rows.len() == self.anchors {
            return Ok((name, rows));
        }
        let message = format!("has no tensor `{name}` of {} anchors", self.anchors);
        Err(Error::file(self.file.path(), message))
    }

    /// Reads what [`LayerWriter::anchor_rows`] wrote, [anchors, width]. There must be at least one anchor.
    pub fn anchor_rows(&self, name: &str) -> Result<Tensor> {
        let (name, rows) = self.rows(name)?;
        let (mut numbers, mut done) = (Vec::new(), 0);
        for section in self.file.sections() {
            if let Some(part) = section.tensors.get(&name) {
                numbers.extend(self.file.numbers(section, &name, part, done)?);
                done += part.rows;
            }
        }
        let width: usize = rows.first().map_or(0, |row| row.part.entry.shape[1..].iter().product());
        Ok(Tensor::from_slice(&numbers, &[self.anchors, width], self.device)?)
    }

    /// Reads what [`LayerWriter::anchor_states`] wrote. Each state stays in the file until it is first used.
    pub fn anchor_states(&self, name: &str) -> Result<Vec<Tensor>> {
        let (name, rows) = self.rows(name)?;
        let scales = match rows.iter().any(|row| row.part.entry.dtype == Dtype::I8) {
            true => self.rows(SCALES)?.1,
            false => Vec::new(),
        };
        let source: Arc<dyn anchor_read::Source> = self.file.source.clone();
        let mut states = Vec::with_capacity(rows.len());
        for (i, row) in rows.iter().enumerate() {
            let shape = match row.part.entry.shape[..] {
                [_, heads, key_dim, value_dim] => [1, heads, key_dim, value_dim],
                [_, tokens, width] => [1, 1, tokens, width],
                _ => return Err(self.file.unreadable(&name, row.part)),
            };
            let (storage, parts) = match row.part.entry.dtype {
                Dtype::F32 => (Storage::F32, vec![*row]),
                Dtype::BF16 => (Storage::Bf16, vec![*row]),
                Dtype::I8 => (Storage::Int8, vec![*row, scales[i]]),
                _ => return Err(self.file.unreadable(&name, row.part)),
            };
            let parts: Vec<_> = parts.iter().map(|row| (row.range(), row.checksum())).collect();
            let stored = StoredStates::distant(&source, shape, storage, &parts)?;
            states.push(Tensor::from_stored(stored, self.device)?);
        }
        Ok(states)
    }

    /// Rejects a file with tensors of this layer that nothing has read, or with none although its text is not empty.
    pub(super) fn finish(self) -> Result<()> {
        let (asked, of) = (self.asked.into_inner(), |name: &&String| name.starts_with(&self.prefix));
        let last = self.file.last.tensors.keys().filter(of);
        let anchors = self.file.sections().flat_map(|section| section.tensors.keys()).filter(of);
        let mut found = last.chain(anchors.filter(|name| is_of_anchors(name))).peekable();
        if found.peek().is_none() != (self.file.timeline().position == 0) {
            let layer = self.prefix.trim_end_matches('.');
            let message = format!("tensors of `{layer}` are missing, or present although its text is empty");
            return Err(Error::file(self.file.path(), message));
        }
        match found.find(|name| !asked.contains(*name)) {
            Some(name) => {
                let message = format!("has a tensor `{name}`, which the model's layer does not use");
                Err(Error::file(self.file.path(), message))
            }
            None => Ok(()),
        }
    }
}

//! The sections of a bank's file: parsing each header, validating it, and locating the tensors.

use std::collections::BTreeMap;
use std::ops::Range;

use march_engine::checksum;
use safetensors::Dtype;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::source::Source;
use super::{BankTag, FORMAT_VERSION};
use crate::anchors::{Policy, Timeline};
use crate::disk::header::{Entry, LENGTH_BYTES, parse_header};
use crate::error::Error;
use crate::memory::Ledger;

/// The name of the format in the header.
pub(super) const FORMAT: &str = "march state bank";
/// The beginning of every header; the header's own checksum follows, as 16 hexadecimal digits.
pub(super) const OPENING: &str = r#"{"__metadata__":{"header_checksum":""#;
pub(super) const DIGITS: usize = 16;
/// The tensor of checksums, which comes first.
pub(super) const TABLE: &str = "checksums";
/// Alignment of a section's start and of the data after its header.
pub(super) const ALIGNMENT: usize = 64;
/// Placeholder for the first bytes of a section until the section is finished. It is on the disk before anything else
/// of the section is written, so zeros there mean damage, not an interrupted append.
pub(super) const UNFINISHED: &[u8; ALIGNMENT] =
    b"march state bank: what follows here has not been written whole.\n";
/// The version of files without the last tokens of the text.
pub(super) const PLAIN_VERSION: u32 = 1;
/// Metadata key for the last tokens of the text.
pub(super) const RECENT: &str = "recent";

/// The result of one write: a header, checksums and tensors. The live tensors are those of the last section; the
/// anchors are those of all sections.
#[derive(Debug)]
pub(super) struct Section {
    pub version: u32,
    pub tag: BankTag,
    pub policy: Policy,
    pub timeline: Timeline,
    /// Each layer's bookkeeping of its anchors, if layers decide by themselves which to keep.
    pub ledgers: Vec<Ledger>,
    /// The last tokens of the text, if its end is kept.
    pub recent: Option<Vec<u32>>,
    /// The checksum of this section's header.
    pub header_checksum: String,
    /// The header checksum of the previous section.
    pub after: Option<String>,
    pub checksums: Vec<u64>,
    pub tensors: BTreeMap<String, Part>,
    /// The section's end in the file.
    pub end: usize,
}

/// A tensor of a section.
#[derive(Debug)]
pub(super) struct Part {
    pub entry: Entry,
    /// The index of its first checksum in the table.
    pub first: usize,
    /// Number of its checksums: one per anchor, or one in total.
    pub rows: usize,
}

impl Part {
    /// The byte range of one row.
    pub fn row(&self, row: usize) -> Range<usize> {
        self.rows_range(row..row + 1)
    }

    /// The byte range of several rows.
    pub fn rows_range(&self, rows: Range<usize>) -> Range<usize> {
        let (size, start) = (self.entry.range.len() / self.rows.max(1), self.entry.range.start);
        start + rows.start * size..start + rows.end * size
    }
}

/// The data of one anchor in a file.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub section: &'a Section,
    pub part: &'a Part,
    pub row: usize,
}

impl Row<'_> {
    pub fn range(&self) -> Range<usize> {
        self.part.row(self.row)
    }

    pub fn checksum(&self) -> u64 {
        self.section.checksums[self.part.first + self.row]
    }
}

/// The reason why a section cannot be read.
pub(super) enum Problem {
    /// The section is invalid, and why.
    Wrong(String),
    /// The file could not be read.
    Unread(Error),
}

impl From<String> for Problem {
    fn from(message: String) -> Self {
        Self::Wrong(message)
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self::Unread(error)
    }
}

/// All sections of a file except the last, and the last.
pub(super) fn sections(source: &Source) -> crate::Result<(Vec<Section>, Section)> {
    let refuse = |problem: Problem| match problem {
        Problem::Wrong(message) => Error::file(&source.path, message),
        Problem::Unread(error) => error,
    };
    let (mut earlier, mut last) = (Vec::new(), Section::read(source, 0).map_err(refuse)?);
    if last.after.is_some() {
        let message = "is damaged: its beginning is missing; restore the file from a copy";
        return Err(Error::file(&source.path, message));
    }
    while let Some(next) = next(source, &last).map_err(refuse)? {
        earlier.push(std::mem::replace(&mut last, next));
    }
    Ok((earlier, last))
}

/// The section after another one; `None` if there is none, or only one that an append did not finish.
fn next(source: &Source, last: &Section) -> Result<Option<Section>, Problem> {
    let start = last.end.next_multiple_of(ALIGNMENT);
    let seen = source.read(last.end..source.length.min(start + ALIGNMENT))?;
    let (gap, first) = seen.split_at((start - last.end).min(seen.len()));
    let zero = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
    // The mark of an append may have reached the disk only in part; nothing is written after it until it is complete.
    if zero(gap) && (UNFINISHED.starts_with(first) || (zero(first) && source.length <= start + ALIGNMENT)) {
        return Ok(None);
    }
    let wrong = |message: String| {
        Problem::Wrong(format!("the section appended at byte {start} {message}. {}", advice(last)))
    };
    if !zero(gap) {
        return Err(wrong("is damaged: the padding before it is not zero".into()));
    }
    if zero(&first[..LENGTH_BYTES.min(first.len())]) {
        return Err(wrong(
            "is damaged, or was left incomplete by an earlier version of this program: its length is zero"
                .into(),
        ));
    }
    match Section::read(source, start) {
        Ok(next) if next.after.as_ref() == Some(&last.header_checksum) => Ok(Some(next)),
        Ok(_) => Err(wrong("does not belong to the section before it".into())),
        Err(Problem::Wrong(message)) => Err(wrong(message)),
        Err(problem) => Err(problem),
    }
}

/// What to do when a section is valid and what follows it is not.
pub(super) fn advice(last: &Section) -> String {
    let (end, position) = (last.end, last.timeline.position);
    format!(
        "The first {end} bytes of the file are the bank after {position} tokens; extract them with \
         `head -c {end} FILE > OTHER`"
    )
}

impl Section {
    /// Reads the section that begins at a byte of the file.
    fn read(source: &Source, start: usize) -> Result<Self, Problem> {
        let rest = source.length.saturating_sub(start);
        let length = source.read(start..start + LENGTH_BYTES.min(rest))?;
        let length = length.first_chunk().map_or(u64::MAX, |length| u64::from_le_bytes(*length));
        let end = usize::try_from(length).ok().and_then(|length| length.checked_add(LENGTH_BYTES));
        let Some(end) = end.filter(|&end| end <= rest) else {
            let message = "is cut short or not a state bank; restore the file from a copy";
            return Err(message.to_string().into());
        };
        // Check the first bytes before reading a header of arbitrary length: they show whether this is a bank at all.
        let opening = source.read(start + LENGTH_BYTES..start + end.min(LENGTH_BYTES + OPENING.len()))?;
        if opening != OPENING.as_bytes() {
            return Err("is not a state bank, or its header is damaged".to_string().into());
        }
        let bytes = source.read(start..start + end)?;
        check_header(&bytes)?;
        let header = parse_header(&bytes[LENGTH_BYTES..], rest - end)?;
        let optional = |key: &str| header.metadata.get(key).and_then(Value::as_str);
        let text = |key: &str| {
            optional(key).ok_or_else(|| format!("has no `{key}` in its header; it is not a state bank"))
        };
        if text("format")? != FORMAT {
            return Err(format!("has format `{}`; a state bank has `{FORMAT}`", text("format")?).into());
        }
        let version = text("version")?;
        let Some(version) = (PLAIN_VERSION..=FORMAT_VERSION).find(|known| known.to_string() == version)
        else {
            let message = format!(
                "has format version {version}, but this program reads {PLAIN_VERSION} to {FORMAT_VERSION}; it was \
                 written by a newer one"
            );
            return Err(message.into());
        };
        let tag = BankTag {
            model_type: text("model_type")?.into(),
            model: text("model")?.into(),
            tokenizer_name: text("tokenizer_name")?.into(),
            tokenizer: text("tokenizer")?.into(),
        };
        let timeline: Timeline = parse("timeline", text("timeline")?)?;
        check_timeline(&timeline)?;
        let mut tensors = header.tensors.into_iter();
        let checksums: Vec<u64> = match tensors.next() {
            Some((name, entry)) if name == TABLE && entry.dtype == Dtype::U64 => {
                let table = source.read(start + entry.range.start..start + entry.range.end)?;
                compare(&format!("tensor `{TABLE}`"), &table, Some(text("table_checksum")?))?;
                table.as_chunks().0.iter().map(|&number| u64::from_le_bytes(number)).collect()
            }
            _ => return Err(format!("does not begin with a tensor `{TABLE}` of U64").into()),
        };
        let mut parts = BTreeMap::new();
        let mut first = 0;
        for (name, Entry { shape, dtype, range }) in tensors {
            if is_of_anchors(&name) && shape.is_empty() {
                return Err(format!("has a tensor `{name}` without a dimension for the anchors").into());
            }
            let rows = if is_of_anchors(&name) { shape[0] } else { 1 };
            let entry = Entry { shape, dtype, range: start + range.start..start + range.end };
            parts.insert(name, Part { entry, first, rows });
            first += rows;
        }
        if first != checksums.len() {
            return Err(format!("has {} checksums for {first} parts of tensors", checksums.len()).into());
        }
        Ok(Self {
            version,
            tag,
            policy: parse("policy", text("policy")?)?,
            timeline,
            ledgers: optional("ledgers").map(|text| parse("ledgers", text)).transpose()?.unwrap_or_default(),
            recent: optional(RECENT).map(|text| parse(RECENT, text)).transpose()?,
            header_checksum: text("header_checksum")?.into(),
            after: optional("after").map(String::from),
            checksums,
            tensors: parts,
            end: start + header.end,
        })
    }
}

/// Whether a tensor has one row per kept anchor.
pub(super) fn is_of_anchors(name: &str) -> bool {
    name.contains(".anchors.")
}

/// Verifies a header, preceded by its length, against its own checksum, computed with the checksum digits set to zero.
fn check_header(header: &[u8]) -> std::result::Result<(), String> {
    let digits = LENGTH_BYTES + OPENING.len()..LENGTH_BYTES + OPENING.len() + DIGITS;
    let mut zeroed = header.to_vec();
    let Some(place) = zeroed.get_mut(digits.clone()) else { return Err("is not a state bank".into()) };
    place.fill(b'0');
    compare("its header", &zeroed, std::str::from_utf8(&header[digits]).ok())
}

/// Rejects bytes whose checksum differs from the recorded one.
fn compare(what: &str, bytes: &[u8], written: Option<&str>) -> std::result::Result<(), String> {
    let found = hexadecimal(checksum(bytes));
    match written {
        Some(written) if written == found => Ok(()),
        _ => Err(format!(
            "is damaged: {what} has checksum {found}, but {} is recorded; restore the file from a copy",
            written.unwrap_or("an invalid one")
        )),
    }
}

/// A checksum in its written form.
pub(super) fn hexadecimal(checksum: u64) -> String {
    format!("{checksum:016x}")
}

fn parse<T: DeserializeOwned>(key: &str, text: &str) -> std::result::Result<T, String> {
    serde_json::from_str(text).map_err(|error| format!("has a `{key}` that cannot be read: {error}"))
}

/// Rejects a timeline that no text can produce.
fn check_timeline(timeline: &Timeline) -> std::result::Result<(), String> {
    let Timeline { position, complete, kept, .. } = timeline;
    let ascend = kept.is_sorted_by(|a, b| a.ordinal < b.ordinal && a.position < b.position);
    let last = kept.last().is_none_or(|anchor| anchor.position <= *position && anchor.ordinal <= *complete);
    if ascend && last && *position < usize::MAX / 4 {
        return Ok(());
    }
    let last = match kept.last() {
        Some(last) => format!("the last one number {} at {} tokens", last.ordinal, last.position),
        None => "none".into(),
    };
    Err(format!(
        "has an inconsistent timeline: {position} tokens, {complete} anchors placed, {} kept, {last}; \
         restore the file from a copy",
        kept.len()
    ))
}

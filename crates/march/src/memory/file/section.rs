//! The sections of a bank's file: what each header says, whether it is sound, and where the tensors lie.

use std::collections::BTreeMap;
use std::ops::Range;

use march_engine::checksum;
use safetensors::Dtype;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{BankTag, FORMAT_VERSION, Ledger};
use crate::anchors::{Policy, Timeline};
use crate::checkpoint::read::{Entry, LENGTH_BYTES, read_header};

/// What the header calls the file.
pub(super) const FORMAT: &str = "march state bank";
/// How every header begins; its own checksum follows, as 16 hexadecimal digits.
pub(super) const OPENING: &str = r#"{"__metadata__":{"header_checksum":""#;
pub(super) const DIGITS: usize = 16;
/// The tensor of checksums, which is the first.
pub(super) const TABLE: &str = "checksums";
/// A section begins on a multiple of this, and so does what follows its header.
pub(super) const ALIGNMENT: usize = 64;

/// What was written at once: a header, checksums and tensors. The live tensors are those of the last section, and the
/// anchors those of all.
#[derive(Debug)]
pub(super) struct Section {
    pub tag: BankTag,
    pub policy: Policy,
    pub timeline: Timeline,
    /// What each layer knows of its anchors, where it decides by itself.
    pub ledgers: Vec<Ledger>,
    /// The checksum of its header.
    pub header_checksum: String,
    /// That of the section before it.
    pub after: Option<String>,
    pub checksums: Vec<u64>,
    pub tensors: BTreeMap<String, Part>,
    /// Where it ends in the file.
    pub end: usize,
}

/// A tensor of a section.
#[derive(Debug)]
pub(super) struct Part {
    pub entry: Entry,
    /// Where its checksums begin in the table.
    pub first: usize,
    /// How many they are: one for each anchor, or one in all.
    pub rows: usize,
}

impl Part {
    /// The bytes of one row.
    pub fn row(&self, row: usize) -> Range<usize> {
        let size = self.entry.range.len() / self.rows.max(1);
        let start = self.entry.range.start + row * size;
        start..start + size
    }
}

/// What a file holds of one anchor.
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

/// All sections of a file but the last, and the last; or what is wrong with them.
pub(super) fn sections(file: &[u8]) -> std::result::Result<(Vec<Section>, Section), String> {
    let (mut earlier, mut last) = (Vec::new(), Section::read(file, 0)?);
    if last.after.is_some() {
        return Err("has lost its beginning; take another copy of the file".into());
    }
    loop {
        let start = last.end.next_multiple_of(ALIGNMENT);
        // Its length is what an append writes last: before that there is nothing.
        if file[last.end..].iter().take(start - last.end + LENGTH_BYTES).all(|&byte| byte == 0) {
            return Ok((earlier, last));
        }
        let next = Section::read(file, start).and_then(|next| match &next.after {
            Some(after) if *after == last.header_checksum => Ok(next),
            _ => Err("follows something else than what is before it".to_string()),
        });
        let next = next.map_err(|message| {
            format!(
                "what was appended at byte {start}: {message}. The first {} bytes of the file are the bank after {} tokens: \
                 `head -c {} FILE` takes them out",
                last.end, last.timeline.position, last.end
            )
        })?;
        earlier.push(std::mem::replace(&mut last, next));
    }
}

impl Section {
    /// The section that begins at a byte of the file.
    fn read(file: &[u8], start: usize) -> std::result::Result<Self, String> {
        let bytes = file.get(start..).unwrap_or_default();
        check_header(bytes)?;
        let header = read_header(bytes)?;
        let text = |key: &str| match header.metadata.get(key) {
            Some(Value::String(text)) => Ok(text.as_str()),
            _ => Err(format!("has no `{key}` in its header; it is not a state bank")),
        };
        if text("format")? != FORMAT {
            return Err(format!("has format `{}`; a state bank has `{FORMAT}`", text("format")?));
        }
        let version = text("version")?;
        if version != FORMAT_VERSION.to_string() {
            return Err(format!("has format version {version}, but this program reads {FORMAT_VERSION}"));
        }
        let tag = BankTag {
            model_type: text("model_type")?.into(),
            model: text("model")?.into(),
            tokenizer_name: text("tokenizer_name")?.into(),
            tokenizer: text("tokenizer")?.into(),
        };
        let policy: Policy = parse("policy", text("policy")?)?;
        let timeline: Timeline = parse("timeline", text("timeline")?)?;
        check_timeline(&timeline)?;
        let ledgers: Vec<Ledger> = match header.metadata.get("ledgers") {
            Some(Value::String(ledgers)) => parse("ledgers", ledgers)?,
            _ => Vec::new(),
        };
        let header_checksum = text("header_checksum")?.to_string();
        let after = header.metadata.get("after").and_then(Value::as_str).map(String::from);
        let table_checksum = text("table_checksum")?.to_string();
        let mut tensors = header.tensors.into_iter();
        let checksums: Vec<u64> = match tensors.next() {
            Some((name, entry)) if name == TABLE && entry.dtype == Dtype::U64 => {
                let table = &bytes[entry.range];
                compare(&format!("tensor `{TABLE}`"), table, Some(&table_checksum))?;
                table.as_chunks().0.iter().map(|&number| u64::from_le_bytes(number)).collect()
            }
            _ => return Err(format!("does not begin with a tensor `{TABLE}` of U64")),
        };
        let mut parts = BTreeMap::new();
        let mut first = 0;
        for (name, Entry { shape, dtype, range }) in tensors {
            if is_of_anchors(&name) && shape.is_empty() {
                return Err(format!("has a tensor `{name}` without a dimension for the anchors"));
            }
            let rows = if is_of_anchors(&name) { shape[0] } else { 1 };
            let entry = Entry { shape, dtype, range: start + range.start..start + range.end };
            parts.insert(name, Part { entry, first, rows });
            first += rows;
        }
        if first != checksums.len() {
            return Err(format!("has {} checksums for {first} parts of tensors", checksums.len()));
        }
        let end = start + header.end;
        Ok(Self { tag, policy, timeline, ledgers, header_checksum, after, checksums, tensors: parts, end })
    }
}

/// Whether a tensor has a row for each kept anchor.
pub(super) fn is_of_anchors(name: &str) -> bool {
    name.contains(".anchors.")
}

/// Compares the header with the checksum in it, for which its digits count as zeros.
fn check_header(bytes: &[u8]) -> std::result::Result<(), String> {
    let length = bytes.first_chunk().map_or(u64::MAX, |length| u64::from_le_bytes(*length));
    let end = usize::try_from(length).ok().and_then(|length| length.checked_add(LENGTH_BYTES));
    let Some(header) = end.and_then(|end| bytes.get(..end)) else {
        return Err("is cut short or not a state bank; take another copy of the file".into());
    };
    let digits = LENGTH_BYTES + OPENING.len()..LENGTH_BYTES + OPENING.len() + DIGITS;
    if header.get(LENGTH_BYTES..digits.start) != Some(OPENING.as_bytes()) {
        return Err("is not a state bank, or its header is damaged".into());
    }
    let mut zeroed = header.to_vec();
    let Some(place) = zeroed.get_mut(digits.clone()) else { return Err("is not a state bank".into()) };
    place.fill(b'0');
    compare("its header", &zeroed, std::str::from_utf8(&header[digits]).ok())
}

/// Refuses bytes that do not have the checksum that is written.
fn compare(what: &str, bytes: &[u8], written: Option<&str>) -> std::result::Result<(), String> {
    let found = hexadecimal(checksum(bytes));
    match written {
        Some(written) if written == found => Ok(()),
        _ => Err(format!(
            "is damaged: {what} has checksum {found}, but {} is written; take another copy of the file",
            written.unwrap_or("something that is none")
        )),
    }
}

/// A checksum as it is written.
pub(super) fn hexadecimal(checksum: u64) -> String {
    format!("{checksum:016x}")
}

fn parse<T: DeserializeOwned>(key: &str, text: &str) -> std::result::Result<T, String> {
    serde_json::from_str(text).map_err(|error| format!("has a `{key}` that cannot be read: {error}"))
}

/// Refuses what no text leads to.
fn check_timeline(timeline: &Timeline) -> std::result::Result<(), String> {
    let Timeline { position, complete, kept, .. } = timeline;
    let ascend = kept.is_sorted_by(|a, b| a.ordinal < b.ordinal && a.position < b.position);
    let last = kept.last().is_none_or(|anchor| anchor.position <= *position && anchor.ordinal <= *complete);
    if ascend && last && *position < usize::MAX / 4 {
        return Ok(());
    }
    Err(format!("has a timeline that cannot be: {timeline:?}"))
}

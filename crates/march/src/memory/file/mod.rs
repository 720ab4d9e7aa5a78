//! A state bank as one safetensors file, and behind it what was appended, each time as another; `docs/formats.md` has the
//! layout.
//!
//! Opening a file reads its header and the table of checksums, and maps the rest. The live tensors are copied when the
//! bank is loaded; the anchors' states and tails stay in the file. Whatever is read is compared with its checksum
//! first, once: a damaged file is refused at the latest when a token would read what is damaged.

#[cfg(test)]
mod tests;
mod write;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use march_engine::ops::anchor_read::{Storage, StoredStates};
use march_engine::{Engine, Mapped, checksum};
use safetensors::Dtype;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{Anchors, LayerMemory, Ledger, StateBank};
use crate::anchors::{Policy, Timeline};
use crate::checkpoint::read::{Entry, LENGTH_BYTES, read_header};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::mixer::gated_delta_net::TAILS;
use crate::tokenizer::Tokenizer;

/// The version that this program writes and reads. Raised when a file's meaning changes.
pub const FORMAT_VERSION: u32 = 1;

/// What the header calls the file.
const FORMAT: &str = "march state bank";
/// How every header begins; its own checksum follows, as 16 hexadecimal digits.
const OPENING: &str = r#"{"__metadata__":{"header_checksum":""#;
const DIGITS: usize = 16;
/// The tensor of checksums, which is the first.
const TABLE: &str = "checksums";
/// Names of an anchor's tensors after `layers.N.anchors.`; of its tails [`TAILS`].
const STATES: &str = "states";
const SCALES: &str = "scales";
const ROUTING_KEYS: &str = "routing_keys";
/// A section begins on a multiple of this, and so does what follows its header.
const ALIGNMENT: usize = 64;
/// What of a policy may change when a bank is loaded.
const FREE: [&str; 2] = ["top_k", "retention"];

/// What a bank belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BankTag {
    /// `model_type`, to be read by people.
    pub model_type: String,
    /// [`Model::fingerprint`].
    pub model: String,
    /// The tokenizer's name, to be read by people.
    pub tokenizer_name: String,
    /// [`Tokenizer::hash`].
    pub tokenizer: String,
}

impl BankTag {
    /// The tag of a model's banks, with the model's fingerprint.
    pub fn new<E: Engine>(model: &Model<E>, fingerprint: String, tokenizer: &Tokenizer) -> Self {
        Self {
            model_type: model.config().mixer.model_type().into(),
            model: fingerprint,
            tokenizer_name: tokenizer.name().into(),
            tokenizer: tokenizer.hash(),
        }
    }
}

/// An opened file of a bank.
#[derive(Debug)]
pub struct BankFile {
    path: PathBuf,
    file: Arc<Mapped>,
    /// All but the last section.
    earlier: Vec<Section>,
    last: Section,
}

/// What was written at once: a header, checksums and tensors. The live tensors are those of the last section, and the
/// anchors those of all.
#[derive(Debug)]
struct Section {
    tag: BankTag,
    policy: Policy,
    timeline: Timeline,
    /// What each layer knows of its anchors, where it decides by itself.
    ledgers: Vec<Ledger>,
    /// The checksum of its header.
    header_checksum: String,
    /// That of the section before it.
    after: Option<String>,
    checksums: Vec<u64>,
    tensors: BTreeMap<String, Part>,
    /// Where it ends in the file.
    end: usize,
}

/// A tensor of a section.
#[derive(Debug)]
struct Part {
    entry: Entry,
    /// Where its checksums begin in the table.
    first: usize,
    /// How many they are: one for each anchor, or one in all.
    rows: usize,
}

impl Part {
    /// The bytes of one row.
    fn row(&self, row: usize) -> Range<usize> {
        let size = self.entry.range.len() / self.rows.max(1);
        let start = self.entry.range.start + row * size;
        start..start + size
    }
}

/// What a file holds of one tensor, to be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePart {
    /// As in the file.
    pub name: String,
    /// The numbers' type, as safetensors calls it.
    pub dtype: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its bytes.
    pub bytes: usize,
}

impl<E: Engine> StateBank<E> {
    /// Writes the bank to one file, whole or not at all; a file that is there is replaced. Banks that were loaded
    /// from it go on reading what it was.
    pub fn save(&self, engine: &E, path: &Path, tag: &BankTag) -> Result<()> {
        write::save(self, engine, path, tag)
    }

    /// The same for a file that may hold the beginning of this bank: then only what came since is written, behind the
    /// rest. A process that dies on the way leaves the bank that was there. All is written anew where the file holds
    /// something else, where most is new, and where half of the file would be of no use.
    pub fn append(&self, engine: &E, path: &Path, tag: &BankTag) -> Result<()> {
        write::append(self, engine, path, tag)
    }

    /// The bank of a file that [`StateBank::save`] wrote for the same model and tokenizer. A `policy` takes the place of
    /// the file's; it may differ in top-K and retention only.
    pub fn load(
        engine: &E,
        model: &Model<E>,
        path: &Path,
        tag: &BankTag,
        policy: Option<&Policy>,
    ) -> Result<Self> {
        BankFile::open(path)?.load(engine, model, tag, policy)
    }
}

impl BankFile {
    /// Maps a file and checks the headers and the tables of checksums in it.
    pub fn open(path: &Path) -> Result<Self> {
        let open = |bytes| Mapped::open_first(path, bytes).map_err(Error::io(path, "open"));
        let file = open(usize::MAX)?;
        let (earlier, last) = sections(file.bytes()).map_err(|message| Error::file(path, message))?;
        // What an append has not finished is written over by the next, so it is not kept in sight.
        let file = if last.end < file.bytes().len() { open(last.end)? } else { file };
        Ok(Self { path: path.into(), file: Arc::new(file), earlier, last })
    }

    fn sections(&self) -> impl Iterator<Item = &Section> {
        self.earlier.iter().chain([&self.last])
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the bank belongs to.
    pub fn tag(&self) -> &BankTag {
        &self.last.tag
    }

    /// How anchors were placed, kept and read.
    pub fn policy(&self) -> &Policy {
        &self.last.policy
    }

    /// Text tokens so far, and the anchors that are kept.
    pub fn timeline(&self) -> &Timeline {
        &self.last.timeline
    }

    /// The tensors but the checksums, by name; anchors' with all rows.
    pub fn parts(&self) -> Vec<FilePart> {
        let mut parts: BTreeMap<&str, FilePart> = BTreeMap::new();
        for section in self.sections() {
            for (name, Part { entry, .. }) in &section.tensors {
                let (shape, bytes) = (entry.shape.clone(), entry.range.len());
                match parts.get_mut(name.as_str()).filter(|_| is_of_anchors(name)) {
                    Some(part) => {
                        part.shape[0] += shape[0];
                        part.bytes += bytes;
                    }
                    None => {
                        let dtype = entry.dtype.to_string();
                        parts.insert(name, FilePart { name: name.clone(), dtype, shape, bytes });
                    }
                }
            }
        }
        parts.into_values().collect()
    }

    /// How often something was appended since the whole was written.
    pub fn appended(&self) -> usize {
        self.earlier.len()
    }

    /// Bytes that the file takes.
    pub fn bytes(&self) -> usize {
        self.last.end
    }

    /// How many checksums the file has.
    pub fn checksums(&self) -> usize {
        self.sections().map(|section| section.checksums.len()).sum()
    }

    /// Reads all and compares it with its checksums; the first that differs is refused by its tensor's name.
    pub fn verify(&self) -> Result<()> {
        let tensors = self.sections().flat_map(|section| section.tensors.iter().map(move |t| (section, t)));
        let mut rows_before: BTreeMap<&str, usize> = BTreeMap::new();
        for (section, (name, part)) in tensors {
            let before = rows_before.entry(name).or_default();
            self.verify_tensor(section, name, part, *before)?;
            *before += part.rows;
        }
        Ok(())
    }

    /// The rows of an anchors' tensor, in the order of the anchors.
    fn rows(&self, name: &str) -> Vec<Row<'_>> {
        let parts = self.sections().filter_map(|section| Some((section, section.tensors.get(name)?)));
        parts.flat_map(|(section, part)| (0..part.rows).map(move |row| Row { section, part, row })).collect()
    }

    /// Compares a tensor of a section, before whose rows there are some in earlier sections.
    fn verify_tensor(&self, section: &Section, name: &str, part: &Part, before: usize) -> Result<()> {
        self.file.prepare(part.entry.range.clone());
        for row in 0..part.rows {
            if checksum(&self.file.bytes()[part.row(row)]) != section.checksums[part.first + row] {
                let of = match is_of_anchors(name) {
                    true => format!(", kept anchor {} from 0", before + row),
                    false => String::new(),
                };
                let message = format!(
                    "is damaged: tensor `{name}`{of} does not have the checksum that was written with it; \
                     take another copy of the file"
                );
                return Err(Error::file(&self.path, message));
            }
        }
        Ok(())
    }

    /// [`StateBank::load`] from an opened file.
    pub fn load<E: Engine>(
        &self,
        engine: &E,
        model: &Model<E>,
        tag: &BankTag,
        policy: Option<&Policy>,
    ) -> Result<StateBank<E>> {
        self.check_tag(tag)?;
        let policy = self.check_policy(policy.unwrap_or(self.policy()))?;
        model.check_policy(&policy)?;
        let (Section { timeline, ledgers, .. }, count) = (&self.last, model.config().num_hidden_layers);
        let of = |index: usize, name: &str| name.starts_with(&format!("layers.{index}."));
        let mut names = self.sections().flat_map(|section| section.tensors.keys());
        if !names.all(|name| (0..count).any(|index| of(index, name))) {
            let message = format!("has tensors of other layers than the model's {count}");
            return Err(Error::file(&self.path, message));
        }
        let mut layers = Vec::new();
        for index in 0..count {
            let prefix = format!("layers.{index}.");
            let mut layer = LayerMemory::default();
            for (name, part) in &self.last.tensors {
                if of(index, name) && !is_of_anchors(name) {
                    self.verify_tensor(&self.last, name, part, 0)?;
                    let tensor = engine.from_f32(self.numbers(name, part)?, &part.entry.shape)?;
                    layer.live.insert(name[prefix.len()..].to_string().into(), tensor);
                }
            }
            if layer.live.is_empty() != (timeline.position == 0) {
                let message = format!("does not hold what layer {index} kept");
                return Err(Error::file(&self.path, message));
            }
            let ledger = ledgers.get(index).cloned().unwrap_or_default();
            // Where each layer decides by itself, it knows what it keeps.
            let own = self.policy().budget().map(|_| ledger.entries.len());
            let count = own.unwrap_or(timeline.kept.len());
            if count > 0 {
                layer.anchors = self.anchors(engine, &format!("{prefix}anchors."), count)?;
            }
            layer.anchors.ledger = ledger;
            layers.push(layer);
        }
        Ok(StateBank { policy, timeline: timeline.clone(), layers, torn: false })
    }

    /// Refuses a bank of another model or tokenizer.
    fn check_tag(&self, tag: &BankTag) -> Result<()> {
        let own = self.tag();
        for (what, kind, saved, other_kind, asked) in [
            ("model", &own.model_type, &own.model, &tag.model_type, &tag.model),
            ("tokenizer", &own.tokenizer_name, &own.tokenizer, &tag.tokenizer_name, &tag.tokenizer),
        ] {
            if saved != asked {
                let message = format!(
                    "is a bank of {what} {saved} ({kind}), but {what} {asked} ({other_kind}) is to go on with it; a \
                     bank goes on only with what made it"
                );
                return Err(Error::file(&self.path, message));
            }
        }
        Ok(())
    }

    /// Refuses a policy that differs from the file's in what is fixed.
    fn check_policy(&self, asked: &Policy) -> Result<Policy> {
        let (saved, wanted) = (keys(self.policy()), keys(asked));
        for (key, value) in &saved {
            let other = wanted.get(key).unwrap_or(&Value::Null);
            // A budget decides from the beginning of a text, layer by layer.
            let budget = key == "retention" && (self.policy().budget().is_some() || asked.budget().is_some());
            if value != other && (budget || !FREE.contains(&key.as_str())) {
                let message = format!(
                    "was saved with {key} {value}, but {key} {other} is asked for; it cannot change within a text: \
                     leave it as it is, or begin a new bank"
                );
                return Err(Error::file(&self.path, message));
            }
        }
        Ok(asked.clone())
    }

    /// A tensor of f32 where it lies.
    fn numbers(&self, name: &str, part: &Part) -> Result<&[f32]> {
        match self.file.f32s(part.entry.range.clone()) {
            Some(numbers) if part.entry.dtype == Dtype::F32 => Ok(numbers),
            _ => Err(self.unreadable(name, part)),
        }
    }

    /// A layer's `count` kept anchors; their states and tails stay in the file.
    fn anchors<E: Engine>(&self, engine: &E, prefix: &str, count: usize) -> Result<Anchors<E>> {
        let find = |name: &str| {
            let (name, rows) = (format!("{prefix}{name}"), self.rows(&format!("{prefix}{name}")));
            if rows.len() == count {
                return Ok((name, rows));
            }
            Err(Error::file(&self.path, format!("has no tensor `{name}` of {count} anchors")))
        };
        let stored = |storage, shape: [usize; 4], rows: &[Row<'_>]| -> Result<Arc<E::Stored>> {
            let parts: Vec<_> = rows.iter().map(|row| (row.range(), row.checksum())).collect();
            Ok(Arc::new(engine.stored_from_host(StoredStates::in_file(&self.file, shape, storage, &parts)?)?))
        };
        let (name, rows) = find(ROUTING_KEYS)?;
        let (mut keys, mut done) = (Vec::new(), 0);
        for section in self.sections() {
            if let Some(part) = section.tensors.get(&name) {
                self.verify_tensor(section, &name, part, done)?;
                keys.extend_from_slice(self.numbers(&name, part)?);
                done += part.rows;
            }
        }
        let width: usize = rows[0].part.entry.shape[1..].iter().product();
        let routing_keys = Some(engine.from_f32(&keys, &[count, width])?);
        let (name, rows) = find(STATES)?;
        let scales = match rows.iter().any(|row| row.part.entry.dtype == Dtype::I8) {
            true => find(SCALES)?.1,
            false => Vec::new(),
        };
        let mut states = Vec::with_capacity(count);
        for (i, &row) in rows.iter().enumerate() {
            let &[_, heads, key_dim, value_dim] = &row.part.entry.shape[..] else {
                return Err(self.unreadable(&name, row.part));
            };
            let shape = [1, heads, key_dim, value_dim];
            states.push(match row.part.entry.dtype {
                Dtype::F32 => stored(Storage::F32, shape, &[row])?,
                Dtype::BF16 => stored(Storage::Bf16, shape, &[row])?,
                Dtype::I8 => stored(Storage::Int8, shape, &[row, scales[i]])?,
                _ => return Err(self.unreadable(&name, row.part)),
            });
        }
        let mut tails = Vec::with_capacity(count);
        let [q, k, v] = TAILS.map(find);
        let (all, mut lists) = ([q?, k?, v?], Vec::with_capacity(3));
        for (name, rows) in &all {
            let tail = |row: &Row<'_>| match row.part.entry.shape[..] {
                [_, tokens, width] => stored(Storage::F32, [1, 1, tokens, width], &[*row]),
                _ => Err(self.unreadable(name, row.part)),
            };
            lists.push(rows.iter().map(tail).collect::<Result<Vec<_>>>()?.into_iter());
        }
        while let (Some(q), Some(k), Some(v)) = (lists[0].next(), lists[1].next(), lists[2].next()) {
            tails.push([q, k, v]);
        }
        Ok(Anchors { states, routing_keys, tails, ledger: Ledger::default() })
    }

    fn unreadable(&self, name: &str, part: &Part) -> Error {
        let Entry { dtype, shape, .. } = &part.entry;
        let message =
            format!("tensor `{name}`, {dtype} of shape {shape:?}, is not what a state bank has there");
        Error::file(&self.path, message)
    }
}

/// What a file holds of one anchor.
#[derive(Clone, Copy)]
struct Row<'a> {
    section: &'a Section,
    part: &'a Part,
    row: usize,
}

impl Row<'_> {
    fn range(&self) -> Range<usize> {
        self.part.row(self.row)
    }

    fn checksum(&self) -> u64 {
        self.section.checksums[self.part.first + self.row]
    }
}

/// All sections of a file but the last, and the last; or what is wrong with them.
fn sections(file: &[u8]) -> std::result::Result<(Vec<Section>, Section), String> {
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
                "what was appended at byte {start}: {message}. Its first {} bytes are the bank after {} tokens",
                last.end, last.timeline.position
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
fn is_of_anchors(name: &str) -> bool {
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
fn hexadecimal(checksum: u64) -> String {
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

/// The keys of a policy.
fn keys(policy: &Policy) -> Map<String, Value> {
    match serde_json::to_value(policy) {
        Ok(Value::Object(keys)) => keys,
        _ => Map::new(),
    }
}

/// The name of a precision.
pub(super) fn storage_name(storage: Storage) -> &'static str {
    match storage {
        Storage::F32 => "f32",
        Storage::Bf16 => "bf16",
        Storage::Int8 => "int8",
    }
}

//! A state bank as one safetensors file; `docs/formats.md` has its layout.
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
    tag: BankTag,
    policy: Policy,
    timeline: Timeline,
    /// What each layer knows of its anchors, where it decides by itself.
    ledgers: Vec<Ledger>,
    checksums: Vec<u64>,
    tensors: BTreeMap<String, Part>,
}

/// A tensor of the file.
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
    /// Maps a file and checks its header and its table of checksums.
    pub fn open(path: &Path) -> Result<Self> {
        let file = Arc::new(Mapped::open(path).map_err(Error::io(path, "open"))?);
        Self::read(path, file).map_err(|message| Error::file(path, message))
    }

    fn read(path: &Path, file: Arc<Mapped>) -> std::result::Result<Self, String> {
        let bytes = file.bytes();
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
        for (name, entry) in tensors {
            let rows = if is_of_anchors(&name) { entry.shape.first().copied().unwrap_or(1) } else { 1 };
            parts.insert(name, Part { entry, first, rows });
            first += rows;
        }
        if first != checksums.len() {
            return Err(format!("has {} checksums for {first} parts of tensors", checksums.len()));
        }
        Ok(Self { path: path.into(), file, tag, policy, timeline, ledgers, checksums, tensors: parts })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the bank belongs to.
    pub fn tag(&self) -> &BankTag {
        &self.tag
    }

    /// How anchors were placed, kept and read.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Text tokens so far, and the anchors that are kept.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// The tensors but the checksums, by name.
    pub fn parts(&self) -> Vec<FilePart> {
        let part = |(name, Part { entry, .. }): (&String, &Part)| FilePart {
            name: name.clone(),
            dtype: entry.dtype.to_string(),
            shape: entry.shape.clone(),
            bytes: entry.range.len(),
        };
        self.tensors.iter().map(part).collect()
    }

    /// How many checksums the file has.
    pub fn checksums(&self) -> usize {
        self.checksums.len()
    }

    /// Reads all and compares it with its checksums; the first that differs is refused by its tensor's name.
    pub fn verify(&self) -> Result<()> {
        self.tensors.iter().try_for_each(|(name, part)| self.verify_tensor(name, part))
    }

    fn verify_tensor(&self, name: &str, part: &Part) -> Result<()> {
        self.file.prepare(part.entry.range.clone());
        for row in 0..part.rows {
            if checksum(&self.file.bytes()[part.row(row)]) != self.checksums[part.first + row] {
                let of =
                    if is_of_anchors(name) { format!(", kept anchor {row} from 0") } else { String::new() };
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
        let policy = self.check_policy(policy.unwrap_or(&self.policy))?;
        model.check_policy(&policy)?;
        let mut layers = Vec::new();
        let mut taken = 0;
        for index in 0..model.config().num_hidden_layers {
            let prefix = format!("layers.{index}.");
            let own = self.tensors.range(prefix.clone()..).take_while(|(name, _)| name.starts_with(&prefix));
            let mut layer = LayerMemory::default();
            for (name, part) in own {
                taken += 1;
                if !is_of_anchors(name) {
                    let tensor = self.tensor(engine, name, part)?;
                    layer.live.insert(name[prefix.len()..].to_string().into(), tensor);
                }
            }
            if layer.live.is_empty() != (self.timeline.position == 0) {
                let message = format!("does not hold what layer {index} kept");
                return Err(Error::file(&self.path, message));
            }
            let ledger = self.ledgers.get(index).cloned().unwrap_or_default();
            // Where each layer decides by itself, it knows what it keeps.
            let own = self.policy.budget().map(|_| ledger.entries.len());
            let count = own.unwrap_or(self.timeline.kept.len());
            if count > 0 {
                layer.anchors = self.anchors(engine, &format!("{prefix}anchors."), count)?;
            }
            layer.anchors.ledger = ledger;
            layers.push(layer);
        }
        if taken != self.tensors.len() {
            let message = format!("has tensors of other layers than the model's {}", layers.len());
            return Err(Error::file(&self.path, message));
        }
        Ok(StateBank { policy, timeline: self.timeline.clone(), layers, torn: false })
    }

    /// Refuses a bank of another model or tokenizer.
    fn check_tag(&self, tag: &BankTag) -> Result<()> {
        let own = &self.tag;
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
        let (saved, wanted) = (keys(&self.policy), keys(asked));
        for (key, value) in &saved {
            let other = wanted.get(key).unwrap_or(&Value::Null);
            // A budget decides from the beginning of a text, layer by layer.
            let budget = key == "retention" && (self.policy.budget().is_some() || asked.budget().is_some());
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

    /// A tensor of f32, compared with its checksums and copied.
    fn tensor<E: Engine>(&self, engine: &E, name: &str, part: &Part) -> Result<E::Tensor> {
        self.verify_tensor(name, part)?;
        match self.file.f32s(part.entry.range.clone()) {
            Some(numbers) if part.entry.dtype == Dtype::F32 => {
                Ok(engine.from_f32(numbers, &part.entry.shape)?)
            }
            _ => Err(self.unreadable(name, part)),
        }
    }

    /// A layer's `count` kept anchors; their states and tails stay in the file.
    fn anchors<E: Engine>(&self, engine: &E, prefix: &str, count: usize) -> Result<Anchors<E>> {
        let find = |name: &str| match self.tensors.get_key_value(&format!("{prefix}{name}")) {
            Some((name, part)) if part.rows == count => Ok((name, part)),
            _ => {
                let message = format!("has no tensor `{prefix}{name}` of {count} anchors");
                Err(Error::file(&self.path, message))
            }
        };
        let stored = |storage, shape: [usize; 4], parts: &[&Part], row| -> Result<Arc<E::Stored>> {
            let sum = |part: &&Part| (part.row(row), self.checksums[part.first + row]);
            let parts: Vec<_> = parts.iter().map(sum).collect();
            Ok(Arc::new(engine.stored_from_host(StoredStates::in_file(&self.file, shape, storage, &parts)?)?))
        };
        let (name, keys) = find(ROUTING_KEYS)?;
        let routing_keys = Some(self.tensor(engine, name, keys)?);
        let (name, states) = find(STATES)?;
        let &[_, heads, key_dim, value_dim] = &states.entry.shape[..] else {
            return Err(self.unreadable(name, states));
        };
        let (storage, parts) = match states.entry.dtype {
            Dtype::F32 => (Storage::F32, vec![states]),
            Dtype::BF16 => (Storage::Bf16, vec![states]),
            Dtype::I8 => (Storage::Int8, vec![states, find(SCALES)?.1]),
            _ => return Err(self.unreadable(name, states)),
        };
        let states = (0..count).map(|row| stored(storage, [1, heads, key_dim, value_dim], &parts, row));
        let states = states.collect::<Result<_>>()?;
        let mut tails = Vec::with_capacity(3);
        for name in TAILS {
            let (name, part) = find(name)?;
            let &[_, tokens, width] = &part.entry.shape[..] else { return Err(self.unreadable(name, part)) };
            tails.push(move |row| stored(Storage::F32, [1, 1, tokens, width], &[part], row));
        }
        let tails = (0..count).map(|row| Ok([tails[0](row)?, tails[1](row)?, tails[2](row)?]));
        let tails = tails.collect::<Result<_>>()?;
        Ok(Anchors { states, routing_keys, tails, ledger: Ledger::default() })
    }

    fn unreadable(&self, name: &str, part: &Part) -> Error {
        let Entry { dtype, shape, .. } = &part.entry;
        let message =
            format!("tensor `{name}`, {dtype} of shape {shape:?}, is not what a state bank has there");
        Error::file(&self.path, message)
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

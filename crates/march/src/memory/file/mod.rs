//! A state bank as one safetensors file, and behind it what was appended, each time as another; `docs/formats.md` has the
//! layout.
//!
//! Opening a file reads its header and the table of checksums, and maps the rest. The live tensors are copied when the
//! bank is loaded; the anchors' states and tails stay in the file. Whatever is read is compared with its checksum
//! first, once: a damaged file is refused at the latest when a token would read what is damaged.

mod section;
#[cfg(test)]
mod tests;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use march_engine::ops::anchor_read::{Storage, StoredStates};
use march_engine::{Engine, Mapped, checksum};
use safetensors::Dtype;
use serde_json::{Map, Value};

use self::section::{Part, Row, Section, is_of_anchors, sections};
use super::{Anchors, LayerMemory, Ledger, StateBank};
use crate::anchors::{Policy, Timeline};
use crate::checkpoint::read::Entry;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::mixer::gated_delta_net::TAILS;
use crate::tokenizer::Tokenizer;

/// The version that this program writes and reads. Raised when a file's meaning changes.
pub const FORMAT_VERSION: u32 = 1;

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
    /// All but the last section.
    earlier: Vec<Section>,
    last: Section,
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
    /// another bank, where most is new, and where half of the file would be of no use. A file that is no bank, or a
    /// damaged one, is refused and stays.
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

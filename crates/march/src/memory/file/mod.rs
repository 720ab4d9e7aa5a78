//! A state bank as one safetensors file, and behind it what was appended, each time as another; `docs/formats.md` has the
//! layout.
//!
//! Opening a file reads its headers and tables of checksums. The live tensors are read when the bank is loaded; an
//! anchor's state or tail when it is first needed, and is then kept in memory. Whatever is read is compared with its
//! checksum first, once: a damaged file is refused at the latest when a token would read what is damaged.

mod layer;
mod load;
mod section;
mod source;
mod verify;
mod write;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use march_engine::Engine;
use march_engine::ops::anchor_read::Storage;

pub(crate) use self::layer::STATES;
pub use self::layer::{LayerReader, LayerWriter};
use self::section::{Part, Row, Section, is_of_anchors, sections};
use self::source::Source;
use super::StateBank;
use crate::anchors::{Policy, Timeline};
use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// The newest version that this program writes; it reads all up to this one. Raised when a file's meaning changes.
pub const FORMAT_VERSION: u32 = 2;

/// The logits after the text's last token.
const LOGITS: &str = "logits";

/// What a bank belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BankTag {
    /// `model_type`, to be read by people.
    pub model_type: String,
    /// `Model::fingerprint`.
    pub model: String,
    /// The tokenizer's name, to be read by people.
    pub tokenizer_name: String,
    /// [`Tokenizer::hash`].
    pub tokenizer: String,
}

impl BankTag {
    /// The tag of a model's banks, from its `model_type` and its fingerprint.
    pub fn new(model_type: &str, fingerprint: String, tokenizer: &Tokenizer) -> Self {
        Self {
            model_type: model_type.into(),
            model: fingerprint,
            tokenizer_name: tokenizer.name().into(),
            tokenizer: tokenizer.hash(),
        }
    }
}

/// What a bank itself does not hold of its text's end, and what goes on from there without a new token needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ending {
    /// The logits after the last token.
    pub logits: Vec<f32>,
    /// The last tokens.
    pub recent: Vec<u32>,
}

/// An opened file of a bank.
#[derive(Debug)]
pub struct BankFile {
    source: Arc<Source>,
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
        write::save(self, None, engine, path, tag)
    }

    /// Saves the bank to a file that may hold its beginning: then only what came since is written, behind the rest. A process that dies on the way leaves the bank that was there. All is written anew where the file holds
    /// another bank, where most is new, and where half of the file would be of no use. The whole file is compared
    /// with its checksums first: one that is no bank, or a damaged one, is refused and stays as it is.
    pub fn append(&self, engine: &E, path: &Path, tag: &BankTag) -> Result<()> {
        write::append(self, None, engine, path, tag)
    }

    /// [`StateBank::append`] with what the bank itself does not hold of its text's end.
    pub fn append_with(&self, ending: &Ending, engine: &E, path: &Path, tag: &BankTag) -> Result<()> {
        write::append(self, Some(ending), engine, path, tag)
    }
}

impl BankFile {
    /// Opens a file and checks the headers and the tables of checksums in it.
    pub fn open(path: &Path) -> Result<Self> {
        Self::of(Source::open(path)?)
    }

    /// [`BankFile::open`] for a file that is open already.
    fn of_file(path: &Path, file: File) -> Result<Self> {
        Self::of(Source::new(path, file)?)
    }

    fn of(source: Source) -> Result<Self> {
        let (earlier, last) = sections(&source)?;
        Ok(Self { source: Arc::new(source), earlier, last })
    }

    fn sections(&self) -> impl Iterator<Item = &Section> {
        self.earlier.iter().chain([&self.last])
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// The format's version, the last section's.
    pub fn version(&self) -> u32 {
        self.last.version
    }

    /// What tells the file's contents from all others: the checksum of its last header, in which the others are.
    pub fn identity(&self) -> &str {
        &self.last.header_checksum
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

    /// The rows of an anchors' tensor, in the order of the anchors.
    fn rows(&self, name: &str) -> Vec<Row<'_>> {
        let parts = self.sections().filter_map(|section| Some((section, section.tensors.get(name)?)));
        parts.flat_map(|(section, part)| (0..part.rows).map(move |row| Row { section, part, row })).collect()
    }
}

/// The name of a precision.
pub(in crate::memory) fn storage_name(storage: Storage) -> &'static str {
    match storage {
        Storage::F32 => "f32",
        Storage::Bf16 => "bf16",
        Storage::Int8 => "int8",
    }
}

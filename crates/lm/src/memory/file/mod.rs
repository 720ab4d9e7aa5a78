//! A state bank as one safetensors file, followed by whatever was appended, each time as another section. The layout is
//! described in `docs/formats.md`.
//!
//! Opening a file reads its headers and checksum tables. The live tensors are read when the bank is loaded; the state
//! or tail of an anchor is read when it is first needed, and then stays in memory. All data is verified against its
//! checksum the first time it is read, so a damaged file is rejected at the latest when a token would read the damaged
//! part.

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

pub(crate) use self::layer::STATES;
pub use self::layer::{LayerReader, LayerWriter};
use self::section::{Part, Row, Section, is_of_anchors, sections};
use self::source::Source;
use super::StateBank;
use crate::anchors::{Policy, Timeline};
use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// The newest version, which this program writes; it reads all versions up to this one. Raised when a file's meaning
/// changes.
pub const FORMAT_VERSION: u32 = 2;

/// The logits after the text's last token.
const LOGITS: &str = "logits";

/// The model and tokenizer that a bank belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BankTag {
    /// `model_type`, for display.
    pub model_type: String,
    /// `Model::fingerprint`.
    pub model: String,
    /// The tokenizer's name, for display.
    pub tokenizer_name: String,
    /// [`Tokenizer::hash`].
    pub tokenizer: String,
}

impl BankTag {
    /// Creates the tag of a model's banks from its `model_type` and its fingerprint.
    pub fn new(model_type: &str, fingerprint: String, tokenizer: &Tokenizer) -> Self {
        Self {
            model_type: model_type.into(),
            model: fingerprint,
            tokenizer_name: tokenizer.name().into(),
            tokenizer: tokenizer.hash(),
        }
    }
}

/// The end of the text: what continuing without a new token needs but the bank itself does not hold.
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

/// Description of one tensor in a file, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePart {
    /// The name in the file.
    pub name: String,
    /// The data type, as safetensors names it.
    pub dtype: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Size in bytes.
    pub bytes: usize,
}

impl StateBank {
    /// Writes the bank to one file atomically, replacing an existing file. Banks that were loaded from the old file
    /// continue to read its old contents.
    pub fn save(&self, path: &Path, tag: &BankTag) -> Result<()> {
        write::save(self, None, path, tag)
    }

    /// Saves the bank to a file that may already hold its beginning; in that case only the new part is appended. A
    /// process that dies midway leaves the previous bank in place. The whole file is rewritten if it holds another
    /// bank, if most of the bank is new, or if half of the file would be unused. The existing file is first verified
    /// against its checksums: a file that is damaged or is not a bank is rejected and left unchanged.
    /// The end of the text, which the bank itself does not hold, is written as well if it is given.
    pub fn append(&self, ending: Option<&Ending>, path: &Path, tag: &BankTag) -> Result<()> {
        write::append(self, ending, path, tag)
    }
}

impl BankFile {
    /// Opens a file and verifies its headers and checksum tables.
    pub fn open(path: &Path) -> Result<Self> {
        Self::of(Source::open(path)?)
    }

    /// Same as [`BankFile::open`], for a file that is already open.
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

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// The format version of the last section.
    pub fn version(&self) -> u32 {
        self.last.version
    }

    /// Identifies the file's contents: the checksum of its last header, which covers the earlier headers.
    pub fn identity(&self) -> &str {
        &self.last.header_checksum
    }

    /// The model and tokenizer that the bank belongs to.
    pub fn tag(&self) -> &BankTag {
        &self.last.tag
    }

    /// How anchors were placed, kept and read.
    pub fn policy(&self) -> &Policy {
        &self.last.policy
    }

    /// The number of text tokens so far, and the anchors that are kept.
    pub fn timeline(&self) -> &Timeline {
        &self.last.timeline
    }

    /// All tensors except the checksums, by name; tensors of anchors with the rows of all sections.
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

    /// How many times something was appended since the file was last rewritten.
    pub fn appended(&self) -> usize {
        self.earlier.len()
    }

    /// Size of the file in bytes.
    pub fn bytes(&self) -> usize {
        self.last.end
    }

    /// Number of checksums in the file.
    pub fn checksums(&self) -> usize {
        self.sections().map(|section| section.checksums.len()).sum()
    }

    /// The rows of a tensor of anchors, in the order of the anchors.
    fn rows(&self, name: &str) -> Vec<Row<'_>> {
        let parts = self.sections().filter_map(|section| Some((section, section.tensors.get(name)?)));
        parts.flat_map(|(section, part)| (0..part.rows).map(move |row| Row { section, part, row })).collect()
    }
}

//! GGUF files: a whole model in one file, with its configuration, tokenizer and chat template among its metadata.
//!
//! Such a file has no checksums; `<path>.sha256` beside it, as `sha256sum` writes it, is compared if it is there.

pub(super) mod blocks;
mod config;
mod header;
mod metadata;
mod names;
mod vocabulary;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use self::config::{Architecture, Facts};
use self::metadata::Metadata;
use super::Checkpoint;
use super::names::Source;
use super::read::{Stored, TensorFile};
use crate::disk::Mapped;
use crate::error::{Error, Result};
use crate::model::{Dialect, ModelConfig, ParameterSpec};
use crate::tokenizer::{Tokenizer, compare_sum};

/// Factors on the wavelengths of positions.
const FACTORS: &str = "rope_freqs.weight";

/// What a file has besides tensors.
#[derive(Debug)]
pub(super) struct Contents {
    architecture: Architecture,
    metadata: Metadata,
    /// The first layer that only predicts tokens further ahead, and how many of these there are.
    ahead: (u64, u64),
}

/// How a conversation is written, as a GGUF file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTemplate {
    /// The template, in the Jinja language.
    pub text: String,
    /// The spelling of the token at the beginning of a text.
    pub bos: String,
    /// The spelling of the token at its end.
    pub eos: String,
}

/// Whether a path is that of a GGUF file, by its name or its first bytes.
pub fn is_gguf(path: &Path) -> bool {
    let begins = || {
        let mut bytes = [0; header::MAGIC.len()];
        File::open(path).and_then(|mut file| file.read_exact(&mut bytes)).is_ok() && bytes == *header::MAGIC
    };
    path.is_file() && (path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) || begins())
}

impl Contents {
    /// Where a parameter is.
    pub fn source(&self, spec: &ParameterSpec, config: &ModelConfig) -> Source {
        names::source(spec, self.architecture, config)
    }

    /// Whether a tensor is not needed: it belongs to a layer that predicts tokens further ahead, or was read already.
    pub fn leaves_out(&self, name: &str) -> bool {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')?.0.parse::<u64>().ok());
        let (first, count) = self.ahead;
        layer.is_some_and(|layer| layer >= first && layer - first < count) || name == FACTORS
    }
}

impl Checkpoint {
    /// Opens a GGUF file: maps it, checks its header, and reads its configuration.
    pub(super) fn open_gguf(path: &Path) -> Result<Self> {
        let mapped = Arc::new(Mapped::open(path).map_err(Error::io(path, "open"))?);
        compare_sum(path, mapped.bytes())?;
        let header = header::parse(mapped.bytes()).map_err(|message| Error::damaged(path, message))?;
        let metadata = Metadata { file: mapped.clone(), values: header.values };
        let architecture = Architecture::of(&metadata)?;
        let file = TensorFile::new(mapped);
        let tensors = header.tensors;
        let find = |name: &str| tensors.iter().find(|(known, _)| known == name).map(|(_, stored)| stored);
        let Some(embeddings) = find("token_embd.weight") else {
            let message = "tensor `token_embd.weight` is missing; the file holds no whole language model";
            return Err(Error::file(path, message));
        };
        let version = metadata.whole("general.quantization_version")?;
        if let Some(version) = version.filter(|version| *version != 2) {
            let message = format!("is {version}; only 2 can be read: convert the model again");
            return Err(metadata.error("general.quantization_version", message));
        }
        let factors = match find(FACTORS) {
            None => None,
            Some(stored) => Some(factors(&file, stored)?),
        };
        let facts = Facts {
            vocab_size: embeddings.shape[0],
            tensors: tensors.len(),
            largest: tensors.iter().flat_map(|(_, stored)| stored.shape.iter().copied()).max().unwrap_or(0),
            has_head: find("output.weight").is_some(),
            has_bias: architecture != Architecture::Qwen35
                && tensors.iter().any(|(name, _)| name.ends_with(".attn_q.bias")),
            rope_factors: factors,
        };
        let config = config::read(&metadata, architecture, &facts)?;
        let ahead = config::layers(&metadata, architecture)?;
        let mut checkpoint = Self {
            config,
            dialect: Dialect::Own,
            listing: path.into(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            checksums: None,
            gguf: Some(Contents { architecture, metadata, ahead }),
        };
        checkpoint.add((file, tensors))?;
        Ok(checkpoint)
    }

    /// The tokenizer: the one that is named as for [`Tokenizer::load`], else that of the GGUF file or of the folder.
    pub fn tokenizer(&self, folder: &Path, named: Option<&str>) -> Result<Tokenizer> {
        let vocabulary = self.config.vocab_size;
        match (&self.gguf, named) {
            (Some(own), None) => vocabulary::tokenizer(&own.metadata)?.fitting(folder, vocabulary),
            (_, named) => Tokenizer::of_checkpoint(folder, vocabulary, named),
        }
    }

    /// The chat template of a GGUF file, if it has one. That of a folder is in a file of its own.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>> {
        self.gguf.as_ref().map_or(Ok(None), |own| vocabulary::chat_template(&own.metadata))
    }

    /// Of a GGUF file, the files with its tokenizer and chat template that a folder with this model has.
    pub(crate) fn files_beside(&self, path: &Path) -> Result<Vec<(&'static str, Vec<u8>)>> {
        if self.gguf.is_none() {
            return Ok(Vec::new());
        }
        let tokenizer = self.tokenizer(path, None)?;
        let json = |value: Value| format!("{value:#}\n").into_bytes();
        let mut files = vec![
            ("tokenizer.json", tokenizer.to_json()),
            ("generation_config.json", json(json!({ "eos_token_id": tokenizer.ends() }))),
        ];
        if let Some(ChatTemplate { text, bos, eos }) = self.chat_template()? {
            files.push(("chat_template.jinja", text.into_bytes()));
            files.push(("tokenizer_config.json", json(json!({ "bos_token": bos, "eos_token": eos }))));
        }
        Ok(files)
    }
}

/// Reads the factors on the wavelengths of positions.
fn factors(file: &TensorFile, stored: &Stored) -> Result<Vec<f32>> {
    /// Heads are not wider.
    const MOST: usize = 1 << 16;
    let count = stored.shape.iter().product::<usize>();
    if count > MOST {
        let message = format!("tensor `{FACTORS}` has the shape {:?}; the file is damaged", stored.shape);
        return Err(Error::damaged(file.path(), message));
    }
    file.numbers(FACTORS, stored, 0..count).map(std::borrow::Cow::into_owned)
}

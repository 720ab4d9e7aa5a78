//! Text to token ids and back: the built-in bytes, or a Hugging Face `tokenizer.json`.

#[doc(hidden)]
pub mod byte_level;
mod pieces;
mod sum;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokenizers::models::ModelWrapper;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use self::byte_level::{ByteLevel, Cut};
pub(crate) use self::byte_level::{LINE_END_LAST, words};
pub use self::pieces::Pieces;
pub(crate) use self::sum::compare as compare_sum;
use crate::disk;
use crate::error::{Error, Result};

/// The name of the built-in tokenizer.
pub const BYTES: &str = "bytes";

/// The names of the end-of-text token; the first one that a file has is used.
pub(crate) const END_OF_TEXT: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"];

/// Ids 0..=255 of the built-in tokenizer, and of those trained here, are the bytes; this id is the end of text.
pub(crate) const BYTE_END_OF_TEXT: u32 = 256;

/// The vocabulary sizes of byte models: without and with an end of text.
const BYTE_VOCABULARIES: [usize; 2] = [256, 257];

/// A tokenizer. Clones share the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    kind: Kind,
    name: String,
    hash: String,
    /// Further ids that end a text, as the checkpoint says.
    ends: Vec<u32>,
    /// A text that it can encode, for the error about words that it cannot.
    example: Option<&'static str>,
}

#[derive(Clone)]
enum Kind {
    Bytes,
    File(Arc<File>),
}

/// A `tokenizer.json`.
struct File {
    inner: tokenizers::Tokenizer,
    /// The file as it was read.
    json: Vec<u8>,
    vocabulary: usize,
    end_of_text: Option<u32>,
    /// Where long texts can be split without changing their ids.
    cut: Option<Cut>,
    /// The fast path for the most common kind of file.
    byte_level: Option<ByteLevel>,
}

/// The ids at which a checkpoint's texts end: `eos_token_id` of its `generation_config.json`, a number or a list.
fn ends(folder: &Path) -> Result<Vec<u32>> {
    let path = folder.join("generation_config.json");
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(&path).map_err(Error::io(&path, "read"))?;
    let config: Value = serde_json::from_str(&text).map_err(|error| {
        Error::file(&path, format!("is not JSON: {error}; correct it, or remove the file"))
    })?;
    let list = match &config["eos_token_id"] {
        Value::Null => return Ok(Vec::new()),
        Value::Array(list) => list.clone(),
        one => vec![one.clone()],
    };
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    list.iter().map(id).collect::<Option<Vec<u32>>>().ok_or_else(|| {
        let found = &config["eos_token_id"];
        Error::file(&path, format!("has `eos_token_id` {found}; it must be an id or a list of ids"))
    })
}

impl Tokenizer {
    /// Loads `bytes`, or the path of a `tokenizer.json`. If there is a `<path>.sha256`, the file must match it.
    pub fn load(name_or_path: &str) -> Result<Self> {
        if name_or_path == BYTES {
            return Ok(Self::bytes());
        }
        let path = Path::new(name_or_path);
        let refuse = |message: &str| Err(Error::file(path, message));
        if path.is_dir() {
            return refuse("is a folder; name the `tokenizer.json` in it");
        }
        if !path.exists() {
            return refuse("does not exist; a tokenizer is `bytes` or the path of a `tokenizer.json`");
        }
        let json = std::fs::read(path).map_err(Error::io(path, "read the tokenizer"))?;
        sum::compare(path, &json)?;
        let name = path.file_name().map_or(name_or_path.into(), |name| name.to_string_lossy().into_owned());
        Self::from_json(json, &name)
            .map_err(|message| Error::file(path, format!("is not a `tokenizer.json`: {message}")))
    }

    /// The tokenizer of a checkpoint whose vocabulary has `vocabulary` ids: the one given as for [`Tokenizer::load`],
    /// else the folder's `tokenizer.json`, else bytes if the vocabulary has their size.
    pub fn of_checkpoint(folder: &Path, vocabulary: usize, named: Option<&str>) -> Result<Self> {
        const FILE: &str = "tokenizer.json";
        let beside = folder.join(FILE);
        let tokenizer = match (named, disk::built_in(folder, FILE)) {
            (Some(name), _) => Self::load(name)?,
            (None, Some(json)) => {
                let own = Self::from_json(json.to_vec(), FILE);
                Self {
                    example: Some(disk::QUESTION),
                    ..own.map_err(|message| Error::file(&beside, message))?
                }
            }
            (None, None) if beside.exists() => Self::load(&beside.display().to_string())?,
            (None, None) if BYTE_VOCABULARIES.contains(&vocabulary) => Self::bytes(),
            (None, None) => {
                let message = format!(
                    "has no `tokenizer.json`, and a vocabulary of {vocabulary} is not a byte vocabulary; \
                     name the model's tokenizer (`--tokenizer FILE`)"
                );
                return Err(Error::file(folder, message));
            }
        };
        let tokenizer = tokenizer.fitting(folder, vocabulary)?;
        // A tokenizer that was named instead may have other ids.
        let ends = if named.is_none() { ends(folder)? } else { Vec::new() };
        Ok(tokenizer.with_ends(ends))
    }

    /// This tokenizer, unless it needs more ids than a model at a path has.
    pub(crate) fn fitting(self, model: &Path, vocabulary: usize) -> Result<Self> {
        // A byte model may lack the end of text.
        let needed = if self.name == BYTES { BYTE_VOCABULARIES[0] } else { self.vocabulary() };
        if needed > vocabulary {
            let message = format!(
                "the model's vocabulary has {vocabulary} ids, but the tokenizer `{}` needs {needed}: \
                 it belongs to another model",
                self.name
            );
            return Err(Error::file(model, message));
        }
        Ok(self)
    }

    /// The same tokenizer with further ids that end a text.
    pub(crate) fn with_ends(self, ends: Vec<u32>) -> Self {
        Self { ends, ..self }
    }

    /// The built-in tokenizer: ids 0..=255 are the bytes, 256 is the end of text.
    pub fn bytes() -> Self {
        Self {
            kind: Kind::Bytes,
            name: BYTES.into(),
            hash: sha256(b"march: the tokenizer of bytes, version 1"),
            ends: Vec::new(),
            example: None,
        }
    }

    /// A tokenizer of words separated by white space, each with its index in the list as its id.
    pub fn words(names: &[String]) -> Result<Self> {
        let vocabulary: serde_json::Map<String, Value> =
            names.iter().enumerate().map(|(id, name)| (name.clone(), json!(id))).collect();
        let value = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
            // A word that is not in the list is an error.
            "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>" },
        });
        let json = serde_json::to_vec(&value).unwrap_or_default();
        Self::from_json(json, "words")
            .map_err(|message| Error::Request(format!("the list of words is not valid: {message}")))
    }

    /// A tokenizer of phrases, such as "12 May" and "harbour", each with its index in the list as its id. Between them a
    /// text may have white space, punctuation and the ignored words, in small or capital letters; any other word is an
    /// error. `<eos>` in the list is the end of text.
    pub fn phrases(names: &[String], ignored: &[&str]) -> Result<Self> {
        let vocabulary: serde_json::Map<String, Value> =
            names.iter().enumerate().map(|(id, name)| (name.clone(), json!(id))).collect();
        let ends = names.iter().position(|name| name == "<eos>").map(|id| {
            json!({
                "id": id, "content": "<eos>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true
            })
        });
        // A phrase of several words, or a single word that is not ignored.
        let several: Vec<&str> = names.iter().map(String::as_str).filter(|name| name.contains(' ')).collect();
        let (several, ignored) = (several.join("|"), ignored.join("|"));
        let pattern = format!(r"\b(?:{several})\b|\b(?!(?i:{ignored})\b)[\w'-]+");
        let value = json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": ends.into_iter().collect::<Vec<_>>(), "normalizer": null,
            "pre_tokenizer": {
                "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Removed", "invert": true
            },
            "post_processor": null, "decoder": null,
            "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>" },
        });
        let json = serde_json::to_vec(&value).unwrap_or_default();
        Self::from_json(json, "phrases")
            .map_err(|message| Error::Request(format!("the list of phrases is not valid: {message}")))
    }

    /// Parses the contents of a `tokenizer.json`.
    #[doc(hidden)]
    pub fn from_json(json: Vec<u8>, name: &str) -> std::result::Result<Self, String> {
        if json == bytes_as_json().as_bytes() {
            return Ok(Self::bytes());
        }
        let value: Value = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
        if !value.is_object() || value.get("model").is_none() {
            return Err("it has no `model`".into());
        }
        let text = str::from_utf8(&json).map_err(|error| error.to_string())?;
        // Avoid `from_bytes`, which is generic: its parser would be compiled here again.
        let mut inner: tokenizers::Tokenizer =
            text.parse().map_err(|error: tokenizers::Error| broken_part(&value, &error.to_string()))?;
        // Encode all of a text's tokens, the same each time.
        inner.with_padding(None).with_truncation(None).map_err(|error| error.to_string())?;
        if let ModelWrapper::BPE(model) = inner.get_model()
            && model.dropout.is_some()
        {
            let mut model = model.clone();
            model.dropout = None;
            inner.with_model(model);
        }
        let vocabulary = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        if vocabulary == 0 {
            return Err("its vocabulary is empty".into());
        }
        let added: BTreeMap<String, u32> =
            inner.get_added_tokens_decoder().into_iter().map(|(id, token)| (token.content, id)).collect();
        let end_of_text = END_OF_TEXT.iter().find_map(|name| added.get(*name).copied());
        let (cut, byte_level) = (Cut::of(&value), ByteLevel::of(&value, &inner));
        let hash = sha256(&json);
        let file = File { inner, json, vocabulary, end_of_text, cut, byte_level };
        Ok(Self {
            kind: Kind::File(Arc::new(file)),
            name: name.into(),
            hash,
            ends: Vec::new(),
            example: None,
        })
    }

    /// `bytes`, or the file name without its folder.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The size of the vocabulary; all ids are below it.
    pub fn vocabulary(&self) -> usize {
        match &self.kind {
            Kind::Bytes => BYTE_END_OF_TEXT as usize + 1,
            Kind::File(file) => file.vocabulary,
        }
    }

    /// The id that separates texts: for a file, the first that it adds of `<|endoftext|>`, `<|end_of_text|>`, `</s>`,
    /// `<eos>`, `<|im_end|>`.
    pub fn end_of_text(&self) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => Some(BYTE_END_OF_TEXT),
            Kind::File(file) => file.end_of_text,
        }
    }

    /// Whether a token ends a text: the end of text, or one that the checkpoint's `generation_config.json` names.
    pub fn is_end(&self, id: u32) -> bool {
        self.end_of_text() == Some(id) || self.ends.contains(&id)
    }

    /// The ids, besides the end of text, that end a text.
    pub(crate) fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The ids of a text, with no beginning or end added. If the text contains the spelling of a token that the file
    /// adds, such as `<|endoftext|>`, it becomes that token; the bytes tokenizer has no such spellings.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.encoder().encode(text, &mut ids)?;
        Ok(ids)
    }

    /// Returns an encoder for many texts, faster than encoding one by one. Each thread needs its own.
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder { tokenizer: self, cache: byte_level::Cache::default() }
    }

    /// Returns an encoder for a text that arrives in pieces.
    pub fn pieces(&self) -> Pieces<'_> {
        Pieces::new(self)
    }

    /// The bytes that a token stands for; `None` if they are only part of a character, and the tokenizer does not tell.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        match (&self.kind, u8::try_from(id)) {
            (Kind::Bytes, Ok(byte)) => Some(vec![byte]),
            _ => self.decode(&[id]).ok().filter(|text| !text.contains('\u{FFFD}')).map(String::into_bytes),
        }
    }

    /// The text of ids. Bytes that are not UTF-8 become U+FFFD, and so do ids that the tokenizer does not have, which a
    /// model with a larger vocabulary can produce; the end of text is spelled out.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let unknown = |id: &u32| *id as usize >= self.vocabulary();
        let known = ids.split(unknown).map(|known| self.decode_known(known));
        Ok(known.collect::<Result<Vec<String>>>()?.join("\u{FFFD}"))
    }

    /// The text of ids as [`Tokenizer::decode`] gives it. Rejects an id that the tokenizer does not have.
    pub fn decode_checked(&self, ids: &[u32]) -> Result<String> {
        match ids.iter().find(|&&id| !self.contains(id)) {
            Some(id) => Err(Error::Request(format!(
                "the tokenizer `{}` has no token with the id {id}; its ids are from 0 to {}",
                self.name,
                self.vocabulary() - 1
            ))),
            None => self.decode(ids),
        }
    }

    /// Whether the tokenizer has a token with this id. The ids of a file may have gaps.
    pub fn contains(&self, id: u32) -> bool {
        match &self.kind {
            Kind::Bytes => id <= BYTE_END_OF_TEXT,
            Kind::File(file) => file.inner.id_to_token(id).is_some(),
        }
    }

    fn decode_known(&self, ids: &[u32]) -> Result<String> {
        match &self.kind {
            Kind::Bytes => {
                let mut bytes = Vec::with_capacity(ids.len());
                for &id in ids {
                    match u8::try_from(id) {
                        Ok(byte) => bytes.push(byte),
                        Err(_) => bytes.extend_from_slice(END_OF_TEXT[0].as_bytes()),
                    }
                }
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::File(file) => {
                let text = file.inner.decode(ids, false);
                text.map_err(|error| Error::Request(format!("{} could not decode: {error}", self.name)))
            }
        }
    }

    /// SHA-256, in hexadecimal, that identifies the tokenizer: of the file's bytes, or of a fixed text for `bytes`.
    pub fn hash(&self) -> String {
        self.hash.clone()
    }

    /// Writes a `tokenizer.json`: the original file, or, for `bytes`, one that other tools can read and that
    /// [`Tokenizer::load`] recognises. Its SHA-256 is written to `<path>.sha256`, in the format of `sha256sum`.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.save_alone(path)?;
        sum::write(path, &self.to_json())
    }

    /// Same as [`Tokenizer::save`] without the checksum, for a folder whose other files record the tokenizer's hash.
    pub(crate) fn save_alone(&self, path: &Path) -> Result<()> {
        let json = self.to_json();
        if std::fs::read(path).is_ok_and(|there| there == json) {
            return Ok(());
        }
        // The checksum of the previous file would be wrong.
        disk::remove(&sum::beside(path))?;
        disk::replace(path, &json)
    }

    /// The bytes that [`Tokenizer::save`] writes.
    pub fn to_json(&self) -> Vec<u8> {
        match &self.kind {
            Kind::Bytes => bytes_as_json().into(),
            Kind::File(file) => file.json.to_vec(),
        }
    }

    /// Splits a text into parts of `size` bytes or slightly more whose concatenated ids are those of the whole text. If
    /// the tokenizer does not allow such splits, the parts are larger or the text stays whole.
    pub(crate) fn parts<'t>(&self, text: &'t str, size: usize) -> Vec<&'t str> {
        self.cut().map_or(vec![text], |cut| cut.parts(text, size))
    }

    /// Where texts can be split without changing their ids; `None` if unknown.
    fn cut(&self) -> Option<Cut> {
        match &self.kind {
            Kind::Bytes => Some(Cut::Anywhere),
            Kind::File(file) => file.cut,
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({}, {} ids)", self.name, self.vocabulary())
    }
}

/// Encodes texts and caches the ids of words.
pub struct Encoder<'t> {
    tokenizer: &'t Tokenizer,
    cache: byte_level::Cache,
}

impl Encoder<'_> {
    /// Appends the ids of a text, equal to those of [`Tokenizer::encode`].
    pub fn encode(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let file = match &self.tokenizer.kind {
            Kind::Bytes => {
                ids.extend(text.bytes().map(u32::from));
                return Ok(());
            }
            Kind::File(file) => file,
        };
        let result = match &file.byte_level {
            Some(byte_level) if !byte_level.has_added_token(text) => {
                byte_level.encode(file.inner.get_model(), text, &mut self.cache, ids)
            }
            _ => {
                file.inner.encode_fast(text, false).map(|encoding| ids.extend_from_slice(encoding.get_ids()))
            }
        };
        result.map_err(|error| {
            let example = self.tokenizer.example;
            let example = example.map_or(String::new(), |text| format!("; what it understands: \"{text}\""));
            Error::Request(match file.missing_word(text) {
                Some(message) => message + &example,
                None => format!("{} could not encode: {error}", self.tokenizer.name),
            })
        })
    }
}

impl File {
    /// The error for a text with a word that a vocabulary of whole words lacks.
    fn missing_word(&self, text: &str) -> Option<String> {
        let ModelWrapper::WordLevel(_) = self.inner.get_model() else { return None };
        let mut words = PreTokenizedString::from(text);
        self.inner.get_pre_tokenizer()?.pre_tokenize(&mut words).ok()?;
        let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let mut missing: Vec<String> = Vec::new();
        for (word, ..) in words {
            let shown: String = word.chars().take(40).flat_map(char::escape_debug).collect();
            let shown = if word.chars().nth(40).is_some() { shown + "…" } else { shown };
            if self.inner.token_to_id(word).is_none() && !missing.contains(&shown) {
                missing.push(shown);
            }
        }
        let count = missing.len();
        let (what, are) = match count {
            0 => return None,
            1 => ("word", "is"),
            _ => ("words", "are"),
        };
        missing.truncate(8);
        let more = if count > 8 { format!(" and {} more", count - 8) } else { String::new() };
        let words: Vec<String> = (0..self.vocabulary as u32)
            .filter(|&id| Some(id) != self.end_of_text)
            .filter_map(|id| self.inner.id_to_token(id))
            .collect();
        let examples: Vec<&str> =
            words.iter().step_by(words.len().div_ceil(12).max(1)).map(String::as_str).collect();
        Some(format!(
            "the {what} `{}`{more} {are} not in the model's vocabulary of {} words, such as `{}`",
            missing.join("`, `"),
            words.len(),
            examples.join("`, `")
        ))
    }
}

/// Explains why the library rejected a `tokenizer.json`. For parts that come in several kinds, the library itself says
/// only that none matches, in terms of its own types.
fn broken_part(value: &Value, error: &str) -> String {
    let parts = [
        ("Model", "model"),
        ("Normalizer", "normalizer"),
        ("PreTokenizer", "pre_tokenizer"),
        ("PostProcessor", "post_processor"),
        ("Decoder", "decoder"),
    ];
    let named = error
        .split("untagged enum ")
        .nth(1)
        .and_then(|name| parts.iter().find(|(kind, _)| name.starts_with(kind)).map(|(_, part)| *part));
    let Some(part) = named else { return error.into() };
    match value[part]["type"].as_str() {
        Some(kind) => {
            format!("its `{part}` of type `{kind}` is not valid: a key is missing or has a wrong value")
        }
        None => format!("its `{part}` is not valid, or of an unknown type"),
    }
}

/// SHA-256 in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The built-in tokenizer as a `tokenizer.json`.
fn bytes_as_json() -> String {
    byte_level_json(&[], &[], false)
}

/// A byte-level BPE as a `tokenizer.json`: the 256 bytes, the end of text, `tokens`; and merges, each of two tokens.
#[doc(hidden)]
pub fn byte_level_json(tokens: &[Vec<u8>], merges: &[(&[u8], &[u8])], use_regex: bool) -> String {
    let spell = byte_level::spell;
    let bytes = (0..=255).map(|byte| spell(&[byte]));
    let names = bytes.chain([END_OF_TEXT[0].into()]).chain(tokens.iter().map(|token| spell(token)));
    let vocabulary: serde_json::Map<String, Value> =
        names.zip(0..).map(|(name, id)| (name, id.into())).collect();
    let merges: Vec<String> = merges.iter().map(|(a, b)| format!("{} {}", spell(a), spell(b))).collect();
    let byte_level = |regex: bool| {
        json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex
        })
    };
    let value = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": BYTE_END_OF_TEXT, "content": END_OF_TEXT[0], "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level(use_regex),
        "post_processor": null,
        "decoder": byte_level(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges
        }
    });
    format!("{value:#}\n")
}

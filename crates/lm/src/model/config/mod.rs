//! The keys of a model: `config.json` of a checkpoint, and `[model]` and `[memory]` of a configuration file.
//!
//! A TOML file is written for this program alone, so an unknown key is rejected. In `config.json`, keys of other tools
//! that are known not to affect the computation are preserved.

mod defaults;
mod dialect;
mod foreign;

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use self::dialect::Dialect;
use super::mixer::MixerConfig;
use crate::anchors::{MemoryConfig, Policy};
use crate::config::{self, Contradiction, Document, Example, Source, keys_of, presets};
use crate::error::{Error, Result};

/// The configuration of a model: what it computes.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// D, the width of both streams.
    pub hidden_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Inner width of the feed-forward network.
    pub intermediate_size: usize,
    /// The constant added to the mean square in every norm.
    pub norm_eps: f64,
    /// Whether the output layer shares the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// The sequence mixer, with `model_type` and its own keys.
    pub mixer: MixerConfig,
    /// How anchors are placed and kept: `[memory]`, or separate keys in `config.json`. The defaults for a mixer without
    /// anchors.
    pub memory: MemoryConfig,
    /// Keys of other tools, preserved when the file is written.
    pub other: Map<String, Value>,
}

/// The key that determines which other keys exist.
#[derive(Serialize, Deserialize)]
struct ModelType {
    model_type: String,
}

/// The keys common to all models.
#[derive(Serialize, Deserialize)]
struct CommonConfig {
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    intermediate_size: usize,
    norm_eps: f64,
    tie_word_embeddings: bool,
    initializer_range: f64,
}

/// Larger sizes are mistakes, and their products would overflow.
const MOST_LAYERS: usize = 10_000;
const LARGEST_SIZE: usize = 1 << 24;

impl ModelConfig {
    /// Reads the `config.json` of a checkpoint. `origin` names it in errors. Missing keys get the defaults of
    /// flash-linear-attention; a key that may affect the computation is rejected unless its value describes this
    /// computation.
    pub fn from_json(text: &str, origin: &str) -> Result<Self> {
        Self::from_any_json(text, origin).map(|(config, _)| config)
    }

    /// Reads the `config.json` of a checkpoint, and says how its tensors are called.
    pub(crate) fn from_any_json(text: &str, origin: &str) -> Result<(Self, Dialect)> {
        let refuse = |message: String| Error::file(origin.as_ref(), message);
        let keys = match serde_json::from_str(text) {
            Ok(Value::Object(keys)) => keys,
            Ok(_) => return Err(refuse("is not a JSON object; a `config.json` starts with `{`".into())),
            Err(error) => return Err(refuse(format!("is not JSON: {error}"))),
        };
        let mut document = Document::new(origin, keys).with_examples(Self::examples);
        let dialect = dialect::translate(&mut document)?;
        Self::model_type(&mut document, &dialect::MODEL_TYPES)?; // before keys that it explains
        defaults::fill(&mut document, dialect)?;
        let mut model = Self::read(&mut document)?;
        let own = model.mixer.policy();
        if own.is_some() {
            model.memory = MemoryConfig::read(&mut document, own, model.mixer.model_type())?;
        }
        foreign::check(&document, model.mixer.model_type())?;
        model.contradiction().map_err(|(key, message)| document.error(key, message))?;
        model.other = document.unknown().map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok((model, dialect))
    }

    /// The key that says which other keys there are; an error also names the types of `others`.
    fn model_type(document: &mut Document, others: &[&str]) -> Result<String> {
        let ModelType { model_type } = document.keys()?;
        match MixerConfig::MODEL_TYPES.contains(&model_type.as_str()) {
            true => Ok(model_type),
            false => Err(unknown_model_type(document, &model_type, others)),
        }
    }

    /// Takes the keys of `[model]` from a document; whatever remains is unknown.
    pub(crate) fn read(document: &mut Document) -> Result<Self> {
        let model_type = Self::model_type(document, &[])?;
        let common: CommonConfig = document.keys()?;
        let mixer = |document: &mut Document| {
            MixerConfig::read(&model_type, document)
                .unwrap_or_else(|| Err(unknown_model_type(document, &model_type, &[])))
        };
        // Read again with the defaults filled in, so that an omitted key equals the same key written out.
        let mut filled = mixer(document)?.write();
        // A stack of several mixers depends on it.
        filled.insert("num_hidden_layers".into(), common.num_hidden_layers.into());
        let mixer = mixer(&mut Document::new(document.origin(), filled))?;
        Ok(Self {
            vocab_size: common.vocab_size,
            hidden_size: common.hidden_size,
            num_hidden_layers: common.num_hidden_layers,
            intermediate_size: common.intermediate_size,
            norm_eps: common.norm_eps,
            tie_word_embeddings: common.tie_word_embeddings,
            initializer_range: common.initializer_range,
            mixer,
            memory: MemoryConfig::default(),
            other: Map::new(),
        })
    }

    /// The models of the presets, as examples for messages about keys.
    pub(crate) fn examples() -> &'static [Example] {
        static EXAMPLES: OnceLock<Vec<Example>> = OnceLock::new();
        let read = |preset| {
            // Documents of presets get no examples of their own, to avoid endless recursion.
            let mut sections = Source::preset(preset)?.sections(|| &[]).ok()?;
            let keys = sections.0.remove("model")?.keys;
            let model = Self::read(&mut Document::new(preset, keys)).ok()?;
            Some(Example { preset, model_type: model.mixer.model_type(), keys: model.keys() })
        };
        EXAMPLES.get_or_init(|| presets::names().filter_map(read).collect())
    }

    /// The complete policy that the model was trained with: how anchors are placed, kept and read. `None` for a
    /// mixer without anchors.
    pub fn policy(&self) -> Option<Policy> {
        self.mixer.policy().map(|own| self.memory.over(own))
    }

    /// The keys of `[model]` and their values, with defaults filled in; `model_type` first, keys of other tools last.
    pub(crate) fn keys(&self) -> Map<String, Value> {
        self.keys_with(Map::new())
    }

    /// The keys of `[model]`, then `more`, then the keys of other tools.
    fn keys_with(&self, more: Map<String, Value>) -> Map<String, Value> {
        let mut keys = keys_of(&ModelType { model_type: self.mixer.model_type().into() });
        keys.extend(keys_of(&CommonConfig {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_hidden_layers: self.num_hidden_layers,
            intermediate_size: self.intermediate_size,
            norm_eps: self.norm_eps,
            tie_word_embeddings: self.tie_word_embeddings,
            initializer_range: self.initializer_range,
        }));
        keys.extend(self.mixer.write());
        keys.extend(more);
        for (key, value) in &self.other {
            keys.entry(key).or_insert_with(|| value.clone());
        }
        keys
    }

    /// Writes a `config.json` with every key, including defaults; the keys of `[memory]` only for a mixer with anchors.
    pub fn to_json(&self) -> String {
        let memory = self.mixer.policy().map(|_| self.memory.keys());
        format!("{:#}\n", Value::Object(self.keys_with(memory.unwrap_or_default())))
    }

    /// The part of the configuration that the weights depend on: `config.json` without `[memory]`, which can be changed
    /// for the same weights, and without keys of other tools.
    pub(super) fn identity(&self) -> String {
        let own = Self { other: Map::new(), ..self.clone() };
        format!("{:#}\n", Value::Object(own.keys()))
    }

    /// Rejects invalid values. `origin` names the configuration in errors.
    pub fn check(&self, origin: &str) -> Result<()> {
        self.contradiction().map_err(|(key, message)| Error::config(origin, key, message))
    }

    /// Returns the first key with an invalid value.
    pub(crate) fn contradiction(&self) -> std::result::Result<(), Contradiction> {
        for (key, size, most) in [
            ("vocab_size", self.vocab_size, LARGEST_SIZE),
            ("hidden_size", self.hidden_size, LARGEST_SIZE),
            ("num_hidden_layers", self.num_hidden_layers, MOST_LAYERS),
            ("intermediate_size", self.intermediate_size, LARGEST_SIZE),
        ] {
            if !(1..=most).contains(&size) {
                return Err((key, format!("is {size}; it must be from 1 to {most}")));
            }
        }
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0) {
            let message = format!("is {}; it must be a small number above 0, such as 1e-6", self.norm_eps);
            return Err(("norm_eps", message));
        }
        if !(self.initializer_range.is_finite() && self.initializer_range >= 0.0) {
            let message = format!("is {}; it must be 0 or more, such as 0.02", self.initializer_range);
            return Err(("initializer_range", message));
        }
        self.mixer.check(self.hidden_size)
    }
}

fn unknown_model_type(document: &Document, model_type: &str, others: &[&str]) -> Error {
    let known = MixerConfig::MODEL_TYPES.iter().chain(others).copied();
    let message = format!("is `{model_type}`; {}", config::choice(model_type, "it can be", known));
    document.error("model_type", message)
}

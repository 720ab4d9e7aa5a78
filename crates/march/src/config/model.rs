//! The keys of a model: `config.json` of a checkpoint and `[model]` of a configuration file.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::document::{Document, keys_of};
use super::{defaults, foreign, hints};
use crate::error::{Error, Result};
use crate::model::mixer::{Contradiction, MixerConfig};

/// What a model computes.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Tokens that it knows.
    pub vocab_size: usize,
    /// D, the width of both streams.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Width inside the feed-forward network.
    pub intermediate_size: usize,
    /// What is added to the mean square in every norm.
    pub norm_eps: f64,
    /// Whether the output layer is the embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of new weights.
    pub initializer_range: f64,
    /// The sequence mixer, with `model_type` and its own keys.
    pub mixer: MixerConfig,
    /// Keys of other tools, kept and written again.
    pub other: Map<String, Value>,
}

/// The key that decides which others there are.
#[derive(Serialize, Deserialize)]
struct ModelType {
    model_type: String,
}

/// Keys of every model.
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

/// Sizes beyond these are mistakes, and their products would overflow.
const MOST_LAYERS: usize = 10_000;
const LARGEST_SIZE: usize = 1 << 24;

impl ModelConfig {
    /// Reads the `config.json` of a checkpoint. `origin` names it in errors. What flash-linear-attention fills in where
    /// a key is left out is filled in; a key that may change what is computed is refused unless it says what is
    /// computed here.
    pub fn from_json(text: &str, origin: &str) -> Result<Self> {
        let refuse = |message: String| Error::file(origin.as_ref(), message);
        let keys = match serde_json::from_str(text) {
            Ok(Value::Object(keys)) => keys,
            Ok(_) => return Err(refuse("is not a JSON object; a `config.json` starts with `{`".into())),
            Err(error) => return Err(refuse(format!("is not JSON: {error}"))),
        };
        let mut document = Document::new(origin, keys);
        defaults::fill(&mut document)?;
        let mut model = Self::read(&mut document)?;
        foreign::check(&document, model.mixer.model_type())?;
        model.contradiction().map_err(|(key, message)| document.error(key, message))?;
        model.other = document.unknown().map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(model)
    }

    /// Takes the keys of a model from a document; what is left there is unknown to it.
    pub(super) fn read(document: &mut Document) -> Result<Self> {
        let ModelType { model_type } = document.keys()?;
        if !MixerConfig::MODEL_TYPES.contains(&model_type.as_str()) {
            return Err(unknown_model_type(document, &model_type));
        }
        let common: CommonConfig = document.keys()?;
        let mixer = |document: &mut Document| {
            MixerConfig::read(&model_type, document)
                .unwrap_or_else(|| Err(unknown_model_type(document, &model_type)))
        };
        // Once more with the defaults filled in, so that a key left out equals the same key written.
        let filled = mixer(document)?.write();
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
            other: Map::new(),
        })
    }

    /// All keys and their values, defaults filled in; `model_type` first, those of other tools last.
    pub(super) fn keys(&self) -> Map<String, Value> {
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
        for (key, value) in &self.other {
            keys.entry(key).or_insert_with(|| value.clone());
        }
        keys
    }

    /// Writes a `config.json`: every key, also those with a default.
    pub fn to_json(&self) -> String {
        format!("{:#}\n", Value::Object(self.keys()))
    }

    /// Refuses what cannot be. `origin` names the configuration in errors.
    pub fn check(&self, origin: &str) -> Result<()> {
        self.contradiction().map_err(|(key, message)| Error::config(origin, key, message))
    }

    /// The first key that cannot be as it is.
    pub(super) fn contradiction(&self) -> std::result::Result<(), Contradiction> {
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

fn unknown_model_type(document: &Document, model_type: &str) -> Error {
    let known = MixerConfig::MODEL_TYPES.iter().copied();
    let message = format!("is `{model_type}`; {}", hints::choice(model_type, "it can be", known));
    document.error("model_type", message)
}

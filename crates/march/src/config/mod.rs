//! What is computed, as files say it: TOML for people, `config.json` for checkpoints, the same keys in both.
//!
//! A TOML file has sections, `[model]`, `[memory]`, `[data]` and `[train]`, and may start with `extends = "…"`, the name of a
//! preset or the path of a file: its own keys then count over those of that file. The presets are the files
//! of `configs/`. A key that nobody knows is refused. In `config.json`, keys of other tools that are known to change
//! nothing in what is computed are kept.

mod defaults;
mod document;
mod foreign;
mod hints;
mod model;
mod presets;
mod sections;
mod settings;

use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use document::{Document, keys_of};
pub(crate) use hints::choice;
pub use model::ModelConfig;

use crate::anchors::{Placement, Policy, Retention, Storage};
use crate::error::{Error, Result};
use crate::train::{DataConfig, TrainConfig};
use sections::{SECTIONS, Sections, Source};

/// A whole configuration file.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `[model]`: what is computed.
    pub model: ModelConfig,
    /// `[memory]`: what decoding keeps.
    pub memory: MemoryConfig,
    /// `[data]`: where tokens come from.
    pub data: DataConfig,
    /// `[train]`: how the model learns.
    pub train: TrainConfig,
}

/// `[memory]`: how the state bank is kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryConfig {
    /// Which anchors outlive the next boundary; all by default.
    pub retention: Retention,
    /// Where anchors are placed, in training too; periodic by default.
    pub placement: Placement,
    /// The precision of kept states in decoding; f32 by default.
    pub storage: Storage,
}

impl MemoryConfig {
    /// `own` with these settings.
    pub fn over(&self, own: Policy) -> Policy {
        let Self { retention, placement, storage } = *self;
        Policy { retention, placement, storage, ..own }
    }

    /// Reads the section for a model with this policy of its own; none for one without anchors.
    fn read(document: &mut Document, own: Option<Policy>, model_type: &str) -> Result<Self> {
        let text: MemoryText = document.keys()?;
        refuse_unknown(document, "memory", model_type)?;
        fn setting<T: FromStr<Err = String> + Default>(
            document: &Document,
            key: &str,
            text: Option<String>,
        ) -> Result<T> {
            let parsed = text.map(|text| text.parse()).transpose();
            Ok(parsed.map_err(|error| document.error(key, error))?.unwrap_or_default())
        }
        let keys = Self {
            retention: setting(document, "retention", text.retention)?,
            placement: setting(document, "placement", text.placement)?,
            storage: setting(document, "storage", text.storage)?,
        };
        let Some(own) = own else {
            let without = Self::default();
            let changed = [
                ("retention", keys.retention != without.retention, keys.retention.to_string()),
                ("placement", keys.placement != without.placement, keys.placement.to_string()),
                ("storage", keys.storage != without.storage, keys.storage.to_string()),
            ];
            return match changed.into_iter().find(|(_, changed, _)| *changed) {
                Some((key, _, value)) => {
                    let message =
                        format!("is `{value}`, but model_type `{model_type}` has no anchors; remove it");
                    Err(document.error(key, message))
                }
                None => Ok(keys),
            };
        };
        if let (Placement::Adaptive(_), Err(error)) = (keys.placement, keys.over(own).check()) {
            return Err(document.error("placement", format!("cannot be: {error}")));
        }
        Ok(keys)
    }

    fn text(&self) -> MemoryText {
        MemoryText {
            retention: Some(self.retention.to_string()),
            placement: Some(self.placement.to_string()),
            storage: Some(self.storage.to_string()),
        }
    }
}

/// `[memory]` as it is written.
#[derive(Serialize, Deserialize)]
struct MemoryText {
    #[serde(default)]
    retention: Option<String>,
    #[serde(default)]
    placement: Option<String>,
    #[serde(default)]
    storage: Option<String>,
}

impl Config {
    /// Reads a configuration by the name of a preset (`paper/march`) or the path of a TOML file.
    pub fn load(name_or_path: &str) -> Result<Self> {
        Self::load_with(name_or_path, &[])
    }

    /// The same with some keys set anew, each as `section.key=value`. A value is TOML; what is not is a text.
    pub fn load_with(name_or_path: &str, settings: &[String]) -> Result<Self> {
        let path = Path::new(name_or_path);
        let source = match Source::preset(name_or_path) {
            Some(preset) => preset,
            None if path.exists() => Source::file(path)?,
            None => {
                let message = format!("is neither a preset nor a file; {}", hints::preset(name_or_path));
                return Err(Error::file(path, message));
            }
        };
        let mut sections = source.sections()?;
        settings::apply(&mut sections, settings)?;
        Self::read(&source.origin, sections, false)
    }

    /// The whole configuration as TOML, defaults filled in.
    pub fn to_toml(&self) -> String {
        let without_null = |keys: serde_json::Map<String, serde_json::Value>| -> serde_json::Map<_, _> {
            keys.into_iter().filter(|(_, value)| !value.is_null()).collect()
        };
        let sections = [
            ("model", self.model.keys()),
            ("memory", keys_of(&self.memory.text())),
            ("data", keys_of(&self.data)),
            ("train", keys_of(&self.train)),
        ];
        let table: std::collections::BTreeMap<_, _> =
            sections.into_iter().map(|(name, keys)| (name, without_null(keys))).collect();
        toml::to_string(&table).unwrap_or_default()
    }

    /// Reads a configuration from the text of a TOML file. `origin` names it in errors; `folder` is where the
    /// path in `extends` starts; without one it can only name a preset.
    pub fn from_toml(text: &str, origin: &str, folder: Option<&Path>) -> Result<Self> {
        let sections = Source::text(text.into(), origin, folder).sections()?;
        Self::read(origin, sections, false)
    }

    /// The names of the embedded presets.
    pub fn presets() -> impl Iterator<Item = &'static str> {
        presets::names()
    }

    /// A preset, for messages about other configurations.
    fn preset_without_hints(name: &str) -> Option<Self> {
        let source = Source::preset(name)?;
        Self::read(&source.origin, source.sections().ok()?, true).ok()
    }

    fn read(origin: &str, mut sections: Sections, without_hints: bool) -> Result<Self> {
        let [model, memory, data, train] = SECTIONS.map(|name| sections.0.remove(name));
        let document = |section: sections::Section| {
            Document::new(origin, section.keys).at_places(section.places).without_hints(without_hints)
        };
        let Some(model) = model else {
            let message =
                "is missing; add a section [model], or start the file with `extends = \"paper/march\"`";
            return Err(Error::config(origin, "model", message));
        };
        let (mut model_keys, mut memory_keys) = (document(model), document(memory.unwrap_or_default()));
        let model = ModelConfig::read(&mut model_keys)?;
        refuse_unknown(&model_keys, "model", model.mixer.model_type())?;
        model.contradiction().map_err(|(key, message)| model_keys.error(key, message))?;
        let (own, model_type) = (model.mixer.policy(), model.mixer.model_type());
        let memory = MemoryConfig::read(&mut memory_keys, own, model_type)?;
        let mut data_keys = document(data.unwrap_or_default());
        let data: DataConfig = data_keys.keys()?;
        refuse_unknown(&data_keys, "data", model.mixer.model_type())?;
        data.check().map_err(|(key, message)| data_keys.error(key, message))?;
        let mut train_keys = document(train.unwrap_or_default());
        let train: TrainConfig = train_keys.keys()?;
        refuse_unknown(&train_keys, "train", model.mixer.model_type())?;
        train.check(data.sequence_length).map_err(|(key, message)| train_keys.error(key, message))?;
        Ok(Self { model, memory, data, train })
    }
}

/// Refuses keys of a section that nobody asked for.
fn refuse_unknown(document: &Document, section: &str, model_type: &str) -> Result<()> {
    let Some((key, _)) = document.unknown().next() else { return Ok(()) };
    let users = hints::model_types_with(key);
    let message = if section == "model" && !users.is_empty() {
        format!(
            "is not used by model_type `{model_type}`, only by {}; \
             remove it, or change `model_type` or `extends`",
            hints::list(users)
        )
    } else if section != "model" && hints::is_model_key(key) {
        format!("is not a key of [{section}] but of [model]; move it there")
    } else if section != "memory" && ["retention", "placement", "storage"].contains(&key.as_str()) {
        format!("is not a key of [{section}] but of [memory]; move it there")
    } else if let Some(near) = hints::nearest(key, document.known()) {
        format!("is not a key of [{section}]; did you mean `{near}`?")
    } else {
        format!("is not a key of [{section}]; its keys are {}", hints::list(document.known()))
    };
    Err(document.error(key, message))
}

//! A recipe: the complete configuration file of a model and its training, with the sections `[model]`, `[memory]`,
//! `[data]` and `[train]`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use crate::anchors::MemoryConfig;
use crate::config::{self, Document, SECTIONS, Section, Sections, Source, keys_of, presets, settings};
use crate::data::DataConfig;
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::train::{Only, TrainConfig};

/// A complete configuration file.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `[model]`: what is computed; its field `memory` holds `[memory]`: what decoding keeps.
    pub model: ModelConfig,
    /// `[data]`: where tokens come from.
    pub data: DataConfig,
    /// `[train]`: how the model is trained.
    pub train: TrainConfig,
}

impl Config {
    /// Reads a configuration, given the name of a preset (`paper/march`) or the path of a TOML file.
    pub fn load(name_or_path: &str) -> Result<Self> {
        Self::load_with(name_or_path, &[])
    }

    /// Reads a configuration as [`Config::load`] does, then overrides some keys, each given as `section.key=value`. A
    /// value is parsed as TOML; if that fails, it is taken as a string.
    pub fn load_with(name_or_path: &str, settings: &[String]) -> Result<Self> {
        let path = Path::new(name_or_path);
        let source = match Source::preset(name_or_path) {
            Some(preset) => preset,
            None if path.exists() => Source::file(path)?,
            None => {
                let message = format!("is not a preset or a file; {}", config::preset(name_or_path));
                return Err(Error::file(path, message));
            }
        };
        let mut sections = source.sections(ModelConfig::examples)?;
        settings::apply(&mut sections, settings)?;
        Self::read(&source.origin, sections)
    }

    /// A configuration with another model: `[data]` and `[train]` are those of a preset or file. Settings apply to both.
    pub fn with_model(name_or_path: &str, model: &ModelConfig, settings: &[String]) -> Result<Self> {
        let base = Self::load(name_or_path)?;
        let own = ModelConfig { other: Map::new(), ..model.clone() };
        let text = Self { model: own, ..base }.to_toml();
        let mut sections = Source::text(text, name_or_path, None).sections(ModelConfig::examples)?;
        settings::apply(&mut sections, settings)?;
        Self::read(name_or_path, sections)
    }

    /// Reads a configuration from the text of a TOML file. `origin` names it in errors. A path in `extends` is relative
    /// to `folder`; without a folder, `extends` can only name a preset.
    pub fn from_toml(text: &str, origin: &str, folder: Option<&Path>) -> Result<Self> {
        let sections = Source::text(text.into(), origin, folder).sections(ModelConfig::examples)?;
        Self::read(origin, sections)
    }

    /// The complete configuration as TOML, with defaults filled in.
    pub fn to_toml(&self) -> String {
        let without_null = |keys: Map<String, Value>| -> Map<_, _> {
            keys.into_iter().filter(|(_, value)| !value.is_null()).collect()
        };
        let sections = [
            ("model", self.model.keys()),
            ("memory", self.model.memory.keys()),
            ("data", keys_of(&self.data)),
            ("train", self.train.keys()),
        ];
        let table: BTreeMap<_, _> =
            sections.into_iter().map(|(name, keys)| (name, without_null(keys))).collect();
        toml::to_string(&table).unwrap_or_default()
    }

    /// The names of the embedded presets.
    pub fn presets() -> impl Iterator<Item = &'static str> {
        presets::names()
    }

    fn read(origin: &str, mut sections: Sections) -> Result<Self> {
        let [model, memory, data, train] = SECTIONS.map(|name| sections.0.remove(name));
        let document = |section: Option<Section>| {
            let Section { keys, places } = section.unwrap_or_default();
            Document::new(origin, keys).at_places(places).with_examples(ModelConfig::examples)
        };
        if model.is_none() {
            let message =
                "is missing; add a section [model], or start the file with `extends = \"paper/march\"`";
            return Err(Error::config(origin, "model", message));
        }
        let mut section = document(model);
        let mut model = ModelConfig::read(&mut section)?;
        let model_type = model.mixer.model_type();
        refuse_unknown(&section, "model", model_type)?;
        model.contradiction().map_err(|(key, message)| section.error(key, message))?;

        let mut section = document(memory);
        model.memory = MemoryConfig::read(&mut section, model.mixer.policy(), model_type)?;
        refuse_unknown(&section, "memory", model_type)?;

        let mut section = document(data);
        let mut data: DataConfig = section.keys()?;
        refuse_unknown(&section, "data", model_type)?;
        data.check().map_err(|(key, message)| section.error(key, message))?;
        data.complete();

        let mut section = document(train);
        let train: TrainConfig = section.keys()?;
        refuse_unknown(&section, "train", model_type)?;
        train.check(data.sequence_length).map_err(|(key, message)| section.error(key, message))?;
        let routing = [
            ("routing_rate", train.routing_rate != 1.0, train.routing_rate.to_string()),
            ("only", train.only == Only::Routing, "\"routing\"".to_string()),
        ];
        if let Some((key, _, value)) = routing.into_iter().find(|(_, set, _)| *set)
            && model.mixer.extension().is_none()
        {
            let message = format!("is {value}, but a model of type `{model_type}` has no routing; remove it");
            return Err(section.error(key, message));
        }
        Ok(Self { model, data, train })
    }
}

/// Rejects the keys of a section that nothing has read.
fn refuse_unknown(document: &Document, section: &str, model_type: &str) -> Result<()> {
    let Some((key, _)) = document.unknown().next() else { return Ok(()) };
    let users = config::model_types_with(ModelConfig::examples, key);
    let message = if section == "model" && !users.is_empty() {
        format!(
            "is not used by model_type `{model_type}`, only by {}; \
             remove it, or change `model_type` or `extends`",
            config::list(users)
        )
    } else if section != "model" && !users.is_empty() {
        format!("is not a key of [{section}] but of [model]; move it there")
    } else if section != "memory" && MemoryConfig::default().keys().contains_key(key) {
        format!("is not a key of [{section}] but of [memory]; move it there")
    } else if let Some(near) = config::nearest(key, document.known()) {
        format!("is not a key of [{section}]; did you mean `{near}`?")
    } else {
        format!("is not a key of [{section}]; its keys are {}", config::list(document.known()))
    };
    Err(document.error(key, message))
}

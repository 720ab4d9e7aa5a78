//! TOML files: their sections, and the files that they extend.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Number, Value};
use toml::de::{DeTable, DeValue};

use super::hints::{self, Examples};
use super::presets;
use crate::error::{Error, Result};

/// The sections that a configuration file can have.
pub(crate) const SECTIONS: [&str; 4] = ["model", "memory", "data", "train"];

/// The key before the sections that names the file to extend.
const EXTENDS: &str = "extends";

/// A configuration file or preset.
pub(crate) struct Source {
    text: Cow<'static, str>,
    /// The name of the source in errors.
    pub origin: String,
    /// The folder that paths in it are relative to.
    folder: Option<PathBuf>,
    /// Identifies the file, however it was named.
    identity: PathBuf,
}

impl Source {
    /// Opens an embedded preset.
    pub fn preset(name: &str) -> Option<Self> {
        let (name, text) = presets::find(name)?;
        let origin = format!("preset {name}");
        Some(Self { text: text.into(), identity: origin.clone().into(), origin, folder: None })
    }

    /// Reads a file.
    pub fn file(path: &Path) -> Result<Self> {
        if path.is_dir() {
            return Err(Error::file(path, "is a folder; name a TOML file in it, or a preset"));
        }
        let text = std::fs::read_to_string(path).map_err(Error::io(path, "read the configuration"))?;
        Ok(Self::text(text, &path.display().to_string(), path.parent()))
    }

    /// Wraps a text that was read elsewhere.
    pub fn text(text: String, origin: &str, folder: Option<&Path>) -> Self {
        let identity = std::fs::canonicalize(origin).unwrap_or_else(|_| origin.into());
        Self { text: text.into(), origin: origin.into(), folder: folder.map(Into::into), identity }
    }

    /// The sections, merged over those of the file that it extends. Messages take names from the examples.
    pub fn sections(&self, examples: Examples) -> Result<Sections> {
        self.extending(examples, &mut Vec::new())
    }

    /// The sections of a file that is extended by the files of `chain` (identity and origin).
    fn extending(&self, examples: Examples, chain: &mut Vec<(PathBuf, String)>) -> Result<Sections> {
        chain.push((self.identity.clone(), self.origin.clone()));
        let ParsedFile { sections, extends } = self.parse(examples)?;
        let Some((name, place)) = extends else { return Ok(sections) };
        let base = self.base(&name, &place)?;
        if chain.iter().any(|(identity, _)| *identity == base.identity) {
            let origins = chain.iter().map(|(_, origin)| origin.as_str()).chain([base.origin.as_str()]);
            let circle = origins.collect::<Vec<_>>().join(" → ");
            return Err(Error::config(
                &place,
                EXTENDS,
                format!("forms a cycle: {circle}; remove one `{EXTENDS}`"),
            ));
        }
        let mut merged = base.extending(examples, chain)?;
        for (name, section) in sections.0 {
            let below = merged.0.entry(name).or_default();
            below.keys.extend(section.keys);
            below.places.extend(section.places);
        }
        Ok(merged)
    }

    /// The source that `extends = "name"` refers to.
    fn base(&self, name: &str, place: &str) -> Result<Self> {
        let refuse = |what: String| {
            let message = format!("names `{name}`, which is not a preset{what}; {}", hints::preset(name));
            Error::config(place, EXTENDS, message)
        };
        if let Some(preset) = Self::preset(name) {
            return Ok(preset);
        }
        let Some(folder) = &self.folder else { return Err(refuse(String::new())) };
        let path = folder.join(name);
        if !path.exists() {
            return Err(refuse(format!(" or a file ({} does not exist)", path.display())));
        }
        Self::file(&path)
    }

    fn parse(&self, examples: Examples) -> Result<ParsedFile> {
        let table = DeTable::parse(&self.text).map_err(|error| {
            let place = error.span().map(|span| self.line_and_column(&span) + ": ").unwrap_or_default();
            Error::file(self.origin.as_ref(), format!("{place}not TOML: {}", error.message().trim()))
        })?;
        let mut parsed = ParsedFile::default();
        for (name, value) in table.get_ref() {
            let place = self.place(&name.span());
            match (name.get_ref().as_ref(), value.get_ref()) {
                (EXTENDS, DeValue::String(base)) => parsed.extends = Some((base.to_string(), place)),
                (EXTENDS, _) => {
                    let message = "must be a text: the name of a preset or the path of a TOML file";
                    return Err(Error::config(&place, EXTENDS, message));
                }
                (section, DeValue::Table(keys)) if SECTIONS.contains(&section) => {
                    parsed.sections.0.insert(section.into(), self.section(keys)?);
                }
                (name, value) => return Err(unknown_name(&place, name, value, examples)),
            }
        }
        Ok(parsed)
    }

    fn section(&self, keys: &DeTable<'_>) -> Result<Section> {
        let mut section = Section::default();
        for (key, value) in keys {
            let (name, place) = (key.get_ref().to_string(), self.place(&key.span()));
            let value = to_json(value.get_ref()).map_err(|message| Error::config(&place, &name, message))?;
            section.keys.insert(name.clone(), value);
            section.places.insert(name, place);
        }
        Ok(section)
    }

    fn place(&self, span: &Range<usize>) -> String {
        let line = self.text.bytes().take(span.start).filter(|byte| *byte == b'\n').count() + 1;
        format!("{}, line {line}", self.origin)
    }

    fn line_and_column(&self, span: &Range<usize>) -> String {
        let before = String::from_utf8_lossy(&self.text.as_bytes()[..span.start.min(self.text.len())]);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
        format!("line {line}, column {column}")
    }
}

/// The contents of one file.
#[derive(Default)]
struct ParsedFile {
    sections: Sections,
    /// The name and its location.
    extends: Option<(String, String)>,
}

/// The sections of a file by name.
#[derive(Default)]
pub(crate) struct Sections(pub BTreeMap<String, Section>);

/// The keys of a section and their locations.
#[derive(Default)]
pub(crate) struct Section {
    pub keys: Map<String, Value>,
    pub places: BTreeMap<String, String>,
}

/// The error about a name outside the sections, or an unknown section.
fn unknown_name(place: &str, name: &str, value: &DeValue<'_>, examples: Examples) -> Error {
    let sections = || SECTIONS.map(|section| format!("[{section}]")).join(", ");
    let message = if SECTIONS.contains(&name) {
        format!("is a section; write [{name}] on a line of its own, with its keys below")
    } else if hints::is_model_key(examples, name) {
        "is a key of [model]; move it below the line [model]".into()
    } else if let Some(near) = hints::nearest(name, SECTIONS.into_iter().chain([EXTENDS])) {
        format!("is unknown; did you mean `{near}`?")
    } else if matches!(value, DeValue::Table(_)) {
        format!("is an unknown section; there are {}", sections())
    } else {
        format!("is unknown; before the sections {} there can only be `{EXTENDS}`", sections())
    };
    Error::config(place, name, message)
}

/// A TOML value as JSON.
pub(super) fn to_json(value: &DeValue<'_>) -> std::result::Result<Value, String> {
    Ok(match value {
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Boolean(flag) => Value::Bool(*flag),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_err(|_| format!("is {number}; the number is too large"))?
            .into(),
        DeValue::Float(number) => {
            let finite = number.as_str().parse().ok().and_then(Number::from_f64);
            Value::Number(finite.ok_or_else(|| format!("is {number}; it must be a finite number"))?)
        }
        DeValue::Datetime(date) => Value::String(date.to_string()),
        DeValue::Array(values) => {
            let values: std::result::Result<_, _> =
                values.iter().map(|value| to_json(value.get_ref())).collect();
            Value::Array(values?)
        }
        DeValue::Table(keys) => {
            let keys =
                keys.iter().map(|(key, value)| Ok((key.get_ref().to_string(), to_json(value.get_ref())?)));
            Value::Object(keys.collect::<std::result::Result<_, String>>()?)
        }
    })
}

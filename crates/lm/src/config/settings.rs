//! `--set section.key=value`: overrides keys of a preset or file.

use serde_json::Value;
use toml::de::DeTable;

use super::hints;
use super::sections::{SECTIONS, Sections, to_json};
use crate::error::{Error, Result};

/// Applies the settings to the keys of the sections. A later setting overrides an earlier one.
pub(crate) fn apply(sections: &mut Sections, settings: &[String]) -> Result<()> {
    for setting in settings {
        let parts = setting.split_once('=').and_then(|(key, value)| Some((key.split_once('.')?, value)));
        let Some(((section, key), value)) = parts else {
            let message = "must be section.key=value, such as train.steps=100";
            return Err(Error::config("--set", setting, message));
        };
        let (section, key, place) = (section.trim(), key.trim(), format!("--set {}", setting.trim()));
        if !SECTIONS.contains(&section) {
            let message =
                format!("is not a section; {}", hints::choice(section, "use one of", SECTIONS.into_iter()));
            return Err(Error::config(&place, section, message));
        }
        let value = parse(value.trim()).map_err(|message| Error::config(&place, key, message))?;
        let section = sections.0.entry(section.into()).or_default();
        section.keys.insert(key.into(), value);
        section.places.insert(key.into(), place);
    }
    Ok(())
}

/// Parses a value as TOML, or takes it as a string.
fn parse(value: &str) -> std::result::Result<Value, String> {
    let line = format!("x = {value}");
    match DeTable::parse(&line) {
        Ok(table) if table.get_ref().len() == 1 => {
            let value = table.get_ref().iter().next().map(|(_, value)| to_json(value.get_ref()));
            value.unwrap_or(Ok(Value::Null))
        }
        _ => Ok(Value::String(value.into())),
    }
}

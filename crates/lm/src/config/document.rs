//! Flat keys and values, independent of the file format.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Number, Value};

use super::hints::{self, Examples};
use crate::error::{Error, Result};

/// Flat keys of a model with their origin; tracks which keys were read.
#[derive(Clone, Debug)]
pub struct Document {
    origin: String,
    keys: Map<String, Value>,
    /// The location of a key, if it is known more precisely than `origin`.
    places: BTreeMap<String, String>,
    known: Vec<String>,
    /// Examples for messages about a key.
    examples: Examples,
    /// What stands before each key in messages.
    prefix: String,
    /// The name of a key in the file, if it is another.
    names: BTreeMap<String, String>,
}

impl Document {
    /// A document from a single origin.
    pub fn new(origin: &str, keys: Map<String, Value>) -> Self {
        let (places, known, prefix) = (BTreeMap::new(), Vec::new(), String::new());
        let names = BTreeMap::new();
        Self { origin: origin.into(), keys, places, known, examples: || &[], prefix, names }
    }

    /// Sets the location of each key.
    pub(crate) fn at_places(self, places: BTreeMap<String, String>) -> Self {
        Self { places, ..self }
    }

    /// Sets the examples for messages about its keys.
    pub fn with_examples(self, examples: Examples) -> Self {
        Self { examples, ..self }
    }

    /// The examples for the messages about its keys.
    pub(crate) fn examples(&self) -> Examples {
        self.examples
    }

    /// Reads the keys of `T` (a serde struct, fields = keys); all of them count as known from then on. A null counts as
    /// missing; a whole number may be written as 2.0, and a float without a fraction.
    pub fn keys<T: Serialize + DeserializeOwned>(&mut self) -> Result<T> {
        let present = self.keys.iter().filter(|(_, value)| !value.is_null());
        let present: Map<_, _> = present.map(|(key, value)| (key.clone(), whole(value))).collect();
        let keys: T =
            serde_path_to_error::deserialize(Value::Object(present)).map_err(|e| self.explain(&e))?;
        self.known.extend(keys_of(&keys).into_iter().map(|(key, _)| key));
        Ok(keys)
    }

    /// Reads keys whose names begin with a prefix, which `read` does not see.
    pub(crate) fn within<T>(
        &mut self,
        prefix: &str,
        read: impl FnOnce(&mut Document) -> Result<T>,
    ) -> Result<T> {
        let own =
            |(key, value): (&String, &Value)| Some((key.strip_prefix(prefix)?.to_string(), value.clone()));
        let keys = self.keys.iter().filter_map(own).collect();
        let places = self
            .places
            .iter()
            .filter_map(|(key, place)| Some((key.strip_prefix(prefix)?.to_string(), place.clone())));
        let mut inner = Self {
            origin: self.origin.clone(),
            keys,
            places: places.collect(),
            known: Vec::new(),
            examples: || &[],
            prefix: format!("{}{prefix}", self.prefix),
            names: self
                .names
                .iter()
                .filter_map(|(key, name)| Some((key.strip_prefix(prefix)?.to_string(), name.clone())))
                .collect(),
        };
        let found = read(&mut inner)?;
        self.known.extend(inner.known.iter().map(|key| format!("{prefix}{key}")));
        Ok(found)
    }

    /// Where the document comes from.
    pub(crate) fn origin(&self) -> &str {
        &self.origin
    }

    /// The value of a key that is present and not null.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is present, even if null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// Sets the value of a key.
    pub(crate) fn set(&mut self, key: &str, value: Value) {
        self.keys.insert(key.into(), value);
    }

    /// Removes a key and returns its value, even null.
    pub(crate) fn take(&mut self, key: &str) -> Option<Value> {
        self.keys.remove(key)
    }

    /// Sets a key to what the file says under another name, which messages use.
    pub(crate) fn set_from(&mut self, key: &str, value: Value, theirs: &str) {
        self.keys.insert(key.into(), value);
        if key != theirs {
            self.names.insert(key.into(), theirs.into());
        }
    }

    /// Whether a key has another name in the file.
    pub(crate) fn is_renamed(&self, key: &str) -> bool {
        self.names.contains_key(key)
    }

    /// Removes the keys that `drop` chooses.
    pub(crate) fn drop_keys(&mut self, drop: impl Fn(&str) -> bool) {
        self.keys.retain(|key, _| !drop(key));
    }

    /// The keys that were read so far.
    pub(crate) fn known(&self) -> impl Iterator<Item = &str> {
        self.known.iter().map(String::as_str)
    }

    /// The keys that nothing has read.
    pub(crate) fn unknown(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.keys.iter().filter(|(key, _)| !self.known.contains(key))
    }

    /// An error about a key, with its location. The message may name other keys; all have their names in the file.
    pub(crate) fn error(&self, key: &str, message: impl Into<String>) -> Error {
        let place = self.places.get(key).unwrap_or(&self.origin);
        let theirs = |message: String, (ours, theirs): (&String, &String)| {
            message.replace(&format!("`{ours}`"), &format!("`{theirs}`"))
        };
        let message = self.names.iter().fold(message.into(), theirs);
        match self.names.get(key) {
            Some(name) => Error::config(place, name, message),
            None => Error::config(place, &format!("{}{key}", self.prefix), message),
        }
    }

    /// Translates an error of serde into the terms of a configuration.
    fn explain(&self, error: &serde_path_to_error::Error<serde_json::Error>) -> Error {
        let message = error.inner().to_string();
        let missing = message.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        if let Some(key) = missing {
            return self.missing(key);
        }
        let path = error.path().to_string();
        let key = path.split(['.', '[']).next().unwrap_or_default();
        // The types with a text form explain by themselves what they must be.
        if message.starts_with("is `") {
            return self.error(key, message);
        }
        let (kind, is_choice) = plain_kind(&message);
        let value = match self.get(key) {
            Some(Value::String(text)) if is_choice => format!("`{text}`"),
            value => value.map(Value::to_string).unwrap_or_default(),
        };
        let of = if path.contains('[') { "each of its values" } else { "it" };
        self.error(key, format!("is {value}; {of} must be {kind}"))
    }

    /// The error for a missing key without a default.
    fn missing(&self, key: &str) -> Error {
        let null = if self.has(key) { " (it is null)" } else { "" };
        let remedy = if let Some(misspelt) = self.misspelt(key) {
            format!("; is `{misspelt}` a misspelling of it?")
        } else if let Some((preset, value)) =
            hints::example(self.examples, self.get("model_type").and_then(Value::as_str), key)
        {
            format!(" and has no default; add it (preset {preset} has {value})")
        } else {
            " and has no default; add it".into()
        };
        self.error(key, format!("is missing{null}{remedy}"))
    }

    /// An unknown key that resembles `key`.
    fn misspelt(&self, key: &str) -> Option<&str> {
        let unknown = self.unknown().map(|(name, _)| name.as_str());
        let strange = unknown.filter(|name| !hints::is_model_key(self.examples, name));
        hints::nearest(key, strange)
    }
}

/// What serde expected, taken from its message, in words that need no knowledge of the program; and whether that is a
/// choice between names.
fn plain_kind(message: &str) -> (String, bool) {
    let kind = message.rsplit_once("expected ").map_or("", |(_, kind)| kind);
    let plain = match kind {
        "usize" | "u64" | "u32" | "u16" | "u8" => "a whole number, 0 or more".into(),
        "isize" | "i64" | "i32" | "i16" | "i8" => "a whole number".into(),
        "f64" | "f32" => "a number".into(),
        "a boolean" => "true or false".into(),
        // serde uses the second for an enum.
        "a string" | "string or map" => "a text in quotes".into(),
        "a sequence" => "a list, such as [1, 2] or [\"a\", \"b\"]".into(),
        _ if kind.starts_with('`') => return (kind.into(), true),
        _ => match (kind.strip_prefix("one of "), kind.strip_prefix("an array of length ")) {
            (Some(names), _) => {
                let or = names.rsplit_once(", ").map(|(first, last)| format!("{first} or {last}"));
                return (or.unwrap_or(names.into()), true);
            }
            (None, Some(length)) => format!("a list of {length} values"),
            (None, None) => "of another kind; see what a preset has for this key".into(),
        },
    };
    (plain, false)
}

/// The keys of a serde struct and their values.
pub fn keys_of<T: Serialize>(keys: &T) -> Map<String, Value> {
    match serde_json::to_value(keys) {
        Ok(Value::Object(keys)) => keys,
        _ => Map::new(),
    }
}

/// Converts 2.0 to 2, so that it is also valid for an integer key.
fn whole(value: &Value) -> Value {
    /// Whole numbers up to this one are exact in f64.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) if number.is_f64() => match number.as_f64() {
            Some(real) if real.fract() == 0.0 && real.abs() <= EXACT => {
                Value::Number(Number::from(real as i64))
            }
            _ => value.clone(),
        },
        _ => value.clone(),
    }
}

//! The JSON object in the body of a request, read key by key: what a value becomes in memory is decided by its key, so
//! that a body cannot grow to many times its size.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::ApiError;

type Result<T> = std::result::Result<T, ApiError>;

/// The most keys of an object.
const MOST_KEYS: usize = 64;

/// The most bytes of a value that is not read by a function of its own.
const LONGEST_VALUE: usize = 64 << 10;

/// The keys of an object; those that were not taken are left.
pub struct Keys<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> Keys<'a> {
    /// The keys of a body.
    pub fn of_body(body: &'a [u8]) -> Result<Self> {
        serde_json::from_slice(body).map_err(|error| match error.classify() {
            serde_json::error::Category::Data => {
                ApiError::key("body", format!("the body must be a JSON object: {error}"))
            }
            _ => ApiError::key("body", format!("the body is not JSON: {error}")),
        })
    }

    /// The text of a value; `null` counts as absent.
    pub fn raw(&mut self, key: &str) -> Option<&'a str> {
        let at = self.0.iter().position(|(own, _)| own == key)?;
        Some(self.0.swap_remove(at).1.get()).filter(|text| *text != "null")
    }

    /// Takes a value that is not long.
    pub fn take(&mut self, key: &str) -> Result<Option<Value>> {
        self.take_within(key, LONGEST_VALUE)
    }

    /// Takes a value of at most `most` bytes.
    pub fn take_within(&mut self, key: &str, most: usize) -> Result<Option<Value>> {
        self.raw(key).map(|text| short(key, text, most)).transpose()
    }

    /// Takes a finite number.
    pub fn number(&mut self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.take(key)? else { return Ok(None) };
        match value.as_f64().filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => Err(ApiError::key(key, format!("`{key}` is {}; it must be a number", brief(&value)))),
        }
    }

    /// Takes a whole number that is not negative; `most` is the largest, with the reason.
    pub fn whole(&mut self, key: &str, most: Option<(usize, &str)>) -> Result<Option<usize>> {
        let Some(value) = self.take(key)? else { return Ok(None) };
        let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
        match number.filter(|&number| most.is_none_or(|(most, _)| number <= most)) {
            Some(number) => Ok(Some(number)),
            None => {
                let range = match most {
                    Some((most, why)) => format!("from 0 to {most}{why}"),
                    None => "that is not negative".into(),
                };
                let message = format!("`{key}` is {}; it must be a whole number {range}", brief(&value));
                Err(ApiError::key(key, message))
            }
        }
    }

    /// Takes a truth value; absent is false.
    pub fn flag(&mut self, key: &str) -> Result<bool> {
        match self.take(key)? {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(value) => {
                Err(ApiError::key(key, format!("`{key}` is {}; it must be true or false", brief(&value))))
            }
        }
    }

    /// Takes a string.
    pub fn string(&mut self, key: &str) -> Result<Option<String>> {
        match self.take(key)? {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => {
                Err(ApiError::key(key, format!("`{key}` is {}; it must be a string", brief(&value))))
            }
        }
    }

    /// Refuses every key that is left and not `null`, except those that `is_allowed` accepts.
    pub fn end(self, mut is_allowed: impl FnMut(&str, &Value) -> Result<bool>) -> Result<()> {
        for (key, text) in self.0.into_iter().filter(|(_, text)| text.get() != "null") {
            if !is_allowed(&key, &short(&key, text.get(), LONGEST_VALUE)?)? {
                return Err(ApiError::key(&key, format!("`{key}` is not a key of this request")));
            }
        }
        Ok(())
    }
}

/// A value for a message: all of it, or its beginning.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

fn short(key: &str, text: &str, most: usize) -> Result<Value> {
    if text.len() > most {
        let message = format!("`{key}` has {} bytes; at most {most} are allowed", text.len());
        return Err(ApiError::key(key, message));
    }
    serde_json::from_str(text).map_err(|error| ApiError::key(key, format!("`{key}` is not JSON: {error}")))
}

impl<'de: 'a, 'a> Deserialize<'de> for Keys<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Keys<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
                let mut keys: Vec<(Cow<'de, str>, &'de RawValue)> = Vec::new();
                while let Some(Key(key)) = map.next_key()? {
                    if keys.iter().any(|(other, _)| *other == key) {
                        return Err(A::Error::custom(format!("the key `{key}` is there twice")));
                    }
                    if keys.len() == MOST_KEYS {
                        return Err(A::Error::custom(format!("an object has more than {MOST_KEYS} keys")));
                    }
                    keys.push((key, map.next_value()?));
                }
                Ok(Keys(keys))
            }
        }
        from.deserialize_map(Object)
    }
}

/// A key, without a copy if it has no escapes.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// Reads a list of at most `most` entries; stops reading at the first one beyond.
pub fn list<'a, T: Deserialize<'a>>(text: &'a str, most: usize) -> std::result::Result<Vec<T>, ListError> {
    struct Entries<T>(usize, PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for &mut Entries<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Vec<T>, A::Error> {
            let mut entries = Vec::new();
            while let Some(entry) = list.next_element()? {
                if entries.len() == self.0 {
                    self.0 = usize::MAX;
                    return Err(A::Error::custom("too many entries"));
                }
                entries.push(entry);
            }
            Ok(entries)
        }
    }
    impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for &mut Entries<T> {
        type Value = Vec<T>;

        fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<Vec<T>, D::Error> {
            from.deserialize_seq(self)
        }
    }
    let mut entries = Entries(most, PhantomData);
    let read = entries.deserialize(&mut serde_json::Deserializer::from_str(text));
    read.map_err(|_| if entries.0 == most { ListError::Entry } else { ListError::Long })
}

/// Why a list could not be read.
#[derive(Debug, PartialEq, Eq)]
pub enum ListError {
    /// It is no list, or an entry is of the wrong kind.
    Entry,
    /// It has too many entries.
    Long,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_taken_once_and_checked() {
        let body = br#"{"a": 1, "b\u0041": "x", "n": null, "t": true, "long": [1, 2]}"#;
        let mut keys = Keys::of_body(body).unwrap();
        assert_eq!(keys.whole("a", Some((1, ""))).unwrap(), Some(1));
        assert_eq!(keys.string("bA").unwrap().as_deref(), Some("x"));
        assert_eq!((keys.number("n").unwrap(), keys.flag("t").unwrap()), (None, true));
        let error = keys.end(|_, _| Ok(false)).unwrap_err();
        assert!(error.body()["error"]["param"] == "long");
        for wrong in ["", "[]", "1", "{", r#"{"a": 1, "a": 2}"#, "{} x"] {
            assert!(Keys::of_body(wrong.as_bytes()).is_err(), "{wrong}");
        }
        let many: String = (0..100).map(|i| format!("\"k{i}\": 1,")).collect();
        assert!(Keys::of_body(format!("{{{many} \"z\": 1}}").as_bytes()).is_err());
        let long = format!("{{\"a\": [{}1]}}", "1,".repeat(LONGEST_VALUE));
        assert!(Keys::of_body(long.as_bytes()).unwrap().take("a").is_err());
    }

    #[test]
    fn lists_end_at_their_limit() {
        assert_eq!(list::<u32>("[1, 2, 3]", 3), Ok(vec![1, 2, 3]));
        assert_eq!(list::<u32>("[1, 2, 3]", 2), Err(ListError::Long));
        for wrong in ["[1, -2]", "[1.5]", "[\"1\"]", "{}", "1", "[4294967296]"] {
            assert_eq!(list::<u32>(wrong, 9), Err(ListError::Entry), "{wrong}");
        }
    }
}

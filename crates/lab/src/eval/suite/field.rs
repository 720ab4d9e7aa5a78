//! The fields of a document. An error names the field and what was expected.

use serde_json::Value;

use march_lm::data::text::kind;

/// The value of a field; `a.b` is the field `b` of the field `a`. Null counts as missing.
pub(super) fn value<'d>(document: &'d Value, field: &str) -> Option<&'d Value> {
    field.split('.').try_fold(document, |value, key| value.get(key)).filter(|value| !value.is_null())
}

/// Like [`value`], of a field that must be there.
pub(super) fn required<'d>(document: &'d Value, field: &str, expected: &str) -> Result<&'d Value, String> {
    value(document, field)
        .ok_or_else(|| format!("has no `{field}`, which must be {expected}{}", keys(document)))
}

/// The keys that there are, for an error message.
fn keys(document: &Value) -> String {
    let Some(object) = document.as_object() else {
        return format!("; it is {}, not an object", kind(document));
    };
    let keys: Vec<String> = object.keys().map(|key| format!("`{key}`")).collect();
    if keys.is_empty() { "; it is empty".into() } else { format!("; it has {}", keys.join(", ")) }
}

/// A text.
pub(super) fn text<'d>(document: &'d Value, field: &str) -> Result<&'d str, String> {
    let value = required(document, field, "a text")?;
    value.as_str().ok_or_else(|| format!("`{field}` is {}, not a text", kind(value)))
}

/// A text, or a number as text.
pub(super) fn text_or_number(document: &Value, field: &str) -> Result<String, String> {
    match required(document, field, "a text or a number")? {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        other => Err(format!("`{field}` is {}, not a text or a number", kind(other))),
    }
}

/// A list.
pub(super) fn list<'d>(document: &'d Value, field: &str) -> Result<&'d [Value], String> {
    let value = required(document, field, "a list")?;
    value.as_array().map(Vec::as_slice).ok_or_else(|| format!("`{field}` is {}, not a list", kind(value)))
}

/// A list of texts; `none` says whether it may be empty.
pub(super) fn texts(document: &Value, field: &str, none: bool) -> Result<Vec<String>, String> {
    let list = list(document, field)?;
    if list.is_empty() && !none {
        return Err(format!("`{field}` is an empty list; at least one text was expected"));
    }
    let text = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        other => Err(format!("`{field}` holds {}, not only texts", kind(other))),
    };
    list.iter().map(text).collect()
}

/// The index of one of `count` choices, as a number or as a text.
pub(super) fn index(document: &Value, field: &str, count: usize) -> Result<usize, String> {
    let text = text_or_number(document, field)?;
    let index = text.trim().parse().ok().filter(|&index| index < count);
    index.ok_or_else(|| format!("`{field}` is {text:?}, not a number from 0 to {}", count.saturating_sub(1)))
}

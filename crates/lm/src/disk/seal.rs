//! JSON objects that end with a checksum of their own text, so that a changed byte is detected when they are read.
//!
//! The last key is `"checksum"`, 16 hexadecimal digits over all text before it. Other tools just see an additional key.

use std::path::Path;

use march_engine::checksum;

use crate::error::{Error, Result};

/// The state of a text's own checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seal {
    /// It has one, and it is correct.
    Sealed,
    /// It has none: an older program or another tool wrote it.
    Missing,
    /// It has an incorrect one.
    Broken,
}

const KEY: &str = "\"checksum\":";
const DIGITS: usize = 16;

/// Adds the checksum to a JSON object, on one line or indented by two spaces, preserving a final line break. Any other
/// text is returned unchanged.
pub fn seal(text: &str) -> String {
    let Some(brace) = text.rfind('}') else { return text.into() };
    let body = text[..brace].trim_end();
    let indented = body.len() < brace;
    let empty = body.trim_start() == "{";
    let sum = checksum(body.as_bytes());
    let comma = if empty { "" } else { "," };
    match indented {
        true => format!("{body}{comma}\n  {KEY} \"{sum:016x}\"\n{}", &text[brace..]),
        false => format!("{body}{comma}{KEY}\"{sum:016x}\"{}", &text[brace..]),
    }
}

/// Verifies a text against the checksum in it.
pub fn unseal(text: &str) -> Seal {
    let Some(at) = text.rfind(KEY) else { return Seal::Missing };
    let body = text[..at].trim_end();
    let body = body.strip_suffix(',').unwrap_or(body);
    let rest = text[at + KEY.len()..].trim_start();
    let digits = rest.strip_prefix('"').and_then(|rest| rest.get(..DIGITS));
    let written = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    // The text must be exactly what `seal` makes of the body, except for a final line break.
    let end = if text.ends_with('\n') { "\n" } else { "" };
    let again = [format!("{body}\n}}{end}"), format!("{body}}}{end}")];
    match written {
        Some(sum) if sum == checksum(body.as_bytes()) && again.iter().any(|plain| seal(plain) == text) => {
            Seal::Sealed
        }
        _ => Seal::Broken,
    }
}

/// Reads the text of a JSON object, and returns whether it has a checksum. A wrong checksum, or text that is not UTF-8,
/// is damage; `advice` says what to do about it.
pub fn read_sealed(path: &Path, advice: &str) -> Result<(String, bool)> {
    let damaged = |what: &str| Error::damaged(path, format!("{what}; {advice}"));
    let bytes = std::fs::read(path).map_err(Error::io(path, "read"))?;
    let text = String::from_utf8(bytes).map_err(|_| damaged("is damaged: it is not UTF-8"))?;
    match unseal(&text) {
        Seal::Broken => Err(damaged("is damaged: its text does not have the checksum at its end")),
        seal => Ok((text, seal == Seal::Sealed)),
    }
}

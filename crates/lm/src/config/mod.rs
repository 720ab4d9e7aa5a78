//! Configuration files in general: documents of keys, TOML sections, the presets' texts, and messages that suggest
//! corrections.
//!
//! A TOML file has the sections `[model]`, `[memory]`, `[data]` and `[train]`, and may start with `extends = "…"`, the
//! name of a preset or the path of a file, whose keys its own keys override. The presets are the files of `configs/`.
//! The modules that use a section define its meaning: `model`, `anchors`, `data` and `train`; `recipe` reads whole
//! files.

mod document;
mod hints;
pub(crate) mod presets;
mod sections;
pub(crate) mod settings;

use std::ops::RangeInclusive;

pub use document::{Document, keys_of};
pub use hints::{Example, Examples, choice, nearest};
pub(crate) use hints::{list, model_types_with, preset};
pub(crate) use sections::{SECTIONS, Section, Sections, Source};

/// A key that contradicts another or has an invalid value: its name, and what is wrong and what to do.
pub type Contradiction = (&'static str, String);

/// Rejects a number outside its range.
pub(crate) fn within(
    key: &'static str,
    value: u64,
    range: RangeInclusive<u64>,
) -> std::result::Result<(), Contradiction> {
    let (least, most) = (range.start(), range.end());
    match value {
        _ if range.contains(&value) => Ok(()),
        _ if *most == u64::MAX => Err((key, format!("is {value}; it must be at least {least}"))),
        _ => Err((key, format!("is {value}; it must be from {least} to {most}"))),
    }
}

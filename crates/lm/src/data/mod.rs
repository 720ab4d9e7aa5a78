//! From text files to batches of tokens.
//!
//! [`prepare()`] reads documents ([`text`]), encodes them and writes a folder of token [`shards`]; a [`Loader`] takes
//! sequences from a [`Source`], which can be such a folder, a text in memory, a file of given batches, a task of
//! [`recall`], or lessons with [`needles`]. `docs/data.md` shows the commands.

mod blocks;
mod config;
mod loader;
pub mod needles;
mod order;
pub mod prepare;
pub mod recall;
pub mod shards;
mod source;
mod sources;
pub mod text;
mod train_tokenizer;

use std::ops::Range;

pub(crate) use self::config::LONGEST_SEQUENCE;
pub use self::config::{DataConfig, DataKind};
pub use self::loader::{Loader, Source};
pub use self::prepare::{Options, PrepareOutcome, Status, prepare};
pub use self::shards::{Meta, Shards};
pub use self::source::{BatchFile, ShardSource, TextSource};
pub use self::sources::Sources;
pub use self::train_tokenizer::train_tokenizer;

use crate::error::{Error, Result};

/// The built-in text: a book in the public domain, 148 kB.
pub fn builtin() -> &'static str {
    include_str!("../../assets/text.txt")
}

/// Splits `tokens` tokens into training and validation: the last part, a fraction of the whole, is for validation.
pub fn split(tokens: u64, validation_fraction: f64) -> Result<(Range<u64>, Range<u64>)> {
    if !(0.0..1.0).contains(&validation_fraction) {
        let message = format!("the fraction for validation is {validation_fraction}; it must be at least 0");
        return Err(Error::Request(format!("{message} and below 1")));
    }
    let validation = ((tokens as f64 * validation_fraction).round() as u64).min(tokens);
    let border = tokens - validation;
    Ok((0..border, border..tokens))
}

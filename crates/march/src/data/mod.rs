//! From tokens to batches.

mod loader;

pub use loader::{BatchFile, Loader, Source, TextSource, split};

/// A public-domain text that is part of the program.
pub fn builtin() -> &'static str {
    include_str!("../../assets/text.txt")
}

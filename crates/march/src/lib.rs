//! MARCH and its baselines: from a configuration to logits, losses and a memory that decoding keeps.
//!
//! A module imports only from those before it, in the order of README's tree: [`disk`] writes files that survive a crash;
//! [`config`] reads configuration files; [`tokenizer`] and [`data`] make batches of texts; [`anchors`] says which past
//! states each token may read; [`memory`] is what is kept between calls; [`model`] computes; [`checkpoint`] is a model on
//! disk; [`generate`] writes text; [`train`] learns; [`recipe`] is a whole configuration file, [`run`] follows one in a
//! folder; [`eval`] asks; [`report`] shows.

pub mod anchors;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod disk;
mod error;
pub mod eval;
pub mod generate;
pub mod memory;
pub mod model;
pub mod recipe;
pub mod report;
pub mod run;
pub mod tokenizer;
pub mod train;

pub use error::{Error, Result};
pub use march_engine as engine;
pub use recipe::Config;

/// The page `docs/add-a-mixer.md`, whose code is compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/add-a-mixer.md")]
pub struct AddAMixer;

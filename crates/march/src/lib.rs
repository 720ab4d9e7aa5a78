//! MARCH and its baselines: from a configuration to logits, losses and a memory that decoding keeps.
//!
//! In the order of the data: [`tokenizer`] and [`data`] make batches of texts, [`config`] says what is computed,
//! [`checkpoint`] where the numbers are, [`anchors`] which past states each token may read, [`model`] computes,
//! [`memory`] is what is kept between calls, [`train`] learns, [`generate`] writes, [`eval`] asks, [`report`] shows.

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
pub mod report;
pub mod tokenizer;
pub mod train;

pub use error::{Error, Result};
pub use march_engine as engine;

/// The page `docs/add-a-mixer.md`, whose code is compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/add-a-mixer.md")]
pub struct AddAMixer;

//! MARCH and its baselines: from a configuration to logits, losses and a memory that persists across decoding calls.
//!
//! A module imports only from the modules before it, in the order of the tree in README: [`disk`] writes files that
//! survive a crash; [`config`] reads configuration files; [`tokenizer`] and [`data`] turn text into batches;
//! [`anchors`] decides which past states each token may read; [`memory`] holds what is kept between calls; [`model`]
//! computes; [`checkpoint`] stores a model on disk; [`generate`] writes text; [`train`] trains; [`recipe`] is a whole
//! configuration file and [`run`] executes one in a folder; [`Pipeline`] is the entry for applications. The crate
//! `march-lab` builds evaluation, experiments and reports on this one.

pub mod anchors;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod disk;
mod error;
pub mod generate;
pub mod memory;
pub mod model;
pub mod pipeline;
pub mod recipe;
pub mod run;
pub mod tokenizer;
pub mod train;

pub use error::{Error, Result};
pub use march_engine as engine;
pub use pipeline::Pipeline;
pub use recipe::Config;

/// The page `docs/add-a-mixer.md`; its code is compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../docs/add-a-mixer.md")]
pub struct AddAMixer;

/// The page `README.md` of this crate, tested in the same way.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;

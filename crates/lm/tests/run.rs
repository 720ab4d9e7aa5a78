//! The files of a run folder that have checksums in their text.

mod environment;
mod metrics;
mod seal;

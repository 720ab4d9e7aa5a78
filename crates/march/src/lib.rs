//! The library of march: config, data, models, memory, training and evaluation, on the engine.

pub use march_engine as engine;

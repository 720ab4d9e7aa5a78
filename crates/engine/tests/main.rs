//! The tests of the engine, as one program, which is linked once: a module for each operation or property.
//!
//! `reader_memory.rs` is a program of its own: it counts the bytes of the whole process.

mod common;

mod anchor_read;
mod attention;
mod device;
mod fused_layers;
mod gated_delta;
mod layers;
mod lists;
mod log_linear;
mod machine;
mod plain;
mod properties;
mod tape;
mod weights;

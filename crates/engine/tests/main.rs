//! The tests of the engine, as one program, which is linked once: a module for each operation or property.
//!
//! `reader_memory.rs` is a program of its own: it counts the bytes of the whole process.

mod common;

// Modules without a public interface, with their own tests. They are compiled into this program, so that the library is
// not compiled a second time for them.
#[allow(dead_code, missing_docs, unused_imports)]
#[path = "../src/simd/mod.rs"]
mod simd;
#[allow(dead_code, missing_docs)]
#[path = "../src/team.rs"]
mod team;

mod anchor_read;
mod attention;
mod device;
mod fused_layers;
mod gated_delta;
mod grids;
mod integers;
mod layers;
mod lists;
mod log_linear;
mod machine;
mod numbers;
mod plain;
mod properties;
mod tape;
mod weights;

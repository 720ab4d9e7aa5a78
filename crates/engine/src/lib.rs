//! Tensors on the CPU, a small reverse-mode tape over coarse fused operations, and the operations themselves,
//! each with a hand-written backward pass.
//!
//! Model code holds a [`Tape`] and calls operations on it; the tape runs them on an [`Engine`]. Two engines
//! exist: [`Cpu`], f32, SIMD and threads, and [`Reference`], f64, the equations as they stand.

mod checksum;
mod cpu;
mod engine;
mod error;
mod fast_engine;
mod machine;
mod mapped;
pub mod ops;
mod precision;
mod product;
mod reference_engine;
mod simd;
mod tape;
mod team;
mod tensor;
mod weight;

pub use checksum::checksum;
pub use cpu::{Cpu, CpuOptions, Products};
pub use engine::Engine;
pub use error::{Error, Result};
pub use machine::Machine;
pub use mapped::{Mapped, file_bytes};
pub use precision::Precision;
pub use reference_engine::Reference;
pub use simd::Level;
pub use tape::{Tape, Var};
pub use tensor::{Real, Tensor};

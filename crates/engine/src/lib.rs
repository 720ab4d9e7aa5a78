//! Tensor engine on the CPU: a small reverse-mode tape over coarse fused operations, each with a hand-written
//! backward pass.
//!
//! Model code holds a [`Tape`] and calls operations on it; the tape runs them on an [`Engine`]. There are two
//! engines: [`Cpu`] (f32, SIMD, multithreaded) and [`Reference`] (f64, a direct transcription of the equations). A
//! new device implements [`Kernels`]; it may start with a few operations and leave the others to another engine
//! ([`Fallback`]).

mod bytes;
mod checksum;
mod cpu;
mod engine;
mod error;
mod fallback;
mod fast_engine;
mod kernels;
mod machine;
pub mod ops;
mod peak;
mod precision;
mod product;
mod reference_engine;
mod simd;
mod tape;
mod team;
mod tensor;
mod weight;

pub use bytes::{f32s_of_bytes, little_endian_bytes};
pub use checksum::checksum;
pub use cpu::{Cpu, CpuOptions, Products};
pub use engine::{Engine, WeightRef};
pub use error::{Error, Result};
pub use fallback::{Fallback, FallbackPacked, FallbackStored};

pub use kernels::{Kernels, WeightOf};
pub use machine::Machine;
pub use peak::Instructions;
pub use precision::{Precision, from_bf16, to_bf16, to_int8};
pub use reference_engine::Reference;
pub use simd::Level;
pub use tape::{Tape, Var};
pub use tensor::{Real, Tensor};
pub use weight::{PackedWeight, RoundedWeight, Weight, check_packable};

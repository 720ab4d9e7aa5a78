//! Tensor engine: coarse fused operations, each with a hand-written backward pass, on devices that are values.
//!
//! A [`Tensor`] knows its shape, its number type, its [`Device`] and, if it is recorded, its place on a [`Tape`]; operations
//! are its methods. There are two devices here, [`Device::cpu`] (f32, SIMD, threads) and [`Device::reference`] (f64, a
//! direct transcription of the equations); another crate can add one ([`Backend`]). An operation is defined once, in its
//! folder under `ops` ([`Op`]); a device implements it with one line in its [`Table`].

mod array;
mod bytes;
mod checksum;
mod cpu;
mod cpu_table;
mod device;
mod error;
mod machine;
mod op;
pub mod ops;
mod peak;
mod precision;
mod product;
mod reference;
mod simd;
pub mod tape;
mod team;
mod tensor;

pub use array::{Array, Real};
pub use bytes::{f32s_of_bytes, little_endian_bytes};
pub use checksum::checksum;
pub use cpu::{Cpu, CpuOptions, Products};
pub use device::{Backend, Device, Kernel, Table, TableBuilder};
pub use error::{Error, Result};
pub use machine::Machine;
pub use op::Op;
pub use ops::pack::{Blocks, SharedBytes};
pub use peak::Instructions;
pub use precision::{Precision, Storage, from_bf16, to_bf16, to_int8};
pub use reference::Reference;
pub use simd::Level;
pub use simd::wide::Path;
pub use tape::Tape;
pub use tensor::{DType, Data, Foreign, Tensor};

//! GPUs as devices of the engine: the operations of the models as hand-written WGSL kernels, on Vulkan, Metal or DX12 by
//! `wgpu`.
//!
//! [`Gpu::open`] makes a `march_engine::Device`. All numbers are f32, and every tensor stays on the device until the host
//! asks for it. No kernel uses float atomics, and every sum has one fixed order, so the same device gives the same
//! bits.

mod adapter;
mod array;
mod buffer;
pub mod doctor;
mod error;
mod gpu;
mod kernel;
mod ops;
mod table;

pub use adapter::{AdapterSummary, adapters};
pub use gpu::Gpu;

/// Operations whose slices tests choose.
#[doc(hidden)]
pub mod sliced {
    pub use crate::ops::anchor_read::backward_within;
    pub use crate::ops::cross_entropy::forward_in_blocks;
}

/// Names of the operations that a GPU implements, sorted.
pub fn operations() -> Vec<&'static str> {
    table::table().names()
}

/// Every kernel with constants as some call uses them, as (name, entry point, text), for tests that need no device.
#[doc(hidden)]
pub fn shaders() -> Vec<(&'static str, &'static str, String)> {
    let all = ops::kernels().into_iter().chain([doctor::kernel()]);
    all.map(|kernel| (kernel.name, kernel.entry, kernel.text())).collect()
}

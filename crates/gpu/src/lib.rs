//! Engine for GPUs: the operations of the models as hand-written WGSL kernels, on Vulkan, Metal or DX12 by `wgpu`.
//!
//! [`Gpu`] implements `march_engine::Kernels`. All numbers are f32, and every tensor stays on the device until the host
//! asks for it. No kernel uses float atomics, and every sum has one fixed order, so the same device gives the same
//! bits.

mod adapter;
mod buffer;
pub mod doctor;
mod engine;
mod error;
mod gpu;
mod kernel;
mod ops;
mod tensor;

pub use adapter::{AdapterSummary, adapters};
pub use gpu::Gpu;
pub use ops::anchor_read::Stored;
pub use ops::linear::Packed;
pub use tensor::Tensor;

/// Every kernel with constants as some call uses them, as (name, entry point, text), for tests that need no device.
#[doc(hidden)]
pub fn shaders() -> Vec<(&'static str, &'static str, String)> {
    let all = ops::kernels().into_iter().chain([doctor::kernel()]);
    all.map(|kernel| (kernel.name, kernel.entry, kernel.text())).collect()
}

//! Finds the machine's GPUs and opens one of them.
//!
//! Adapters are numbered in one order: discrete GPUs, integrated ones, then everything else, software devices last.
//! `gpu` means number 0.

use march_engine::Result;
use wgpu::{Adapter, Backends, DeviceType, Features, Instance, InstanceDescriptor, Limits};

use crate::error::device;

/// Storage buffers that a kernel may bind; the smallest limit among the devices that this engine was tested on.
pub(crate) const BINDINGS: u32 = 10;

/// Bytes of parameters that a call passes to its kernel as immediates.
pub(crate) const IMMEDIATE_BYTES: u32 = 128;

/// One GPU of this machine, and whether the engine can use it.
#[derive(Clone, Debug)]
pub struct AdapterSummary {
    /// Number for `gpu:N`.
    pub index: usize,
    /// Name of the device.
    pub name: String,
    /// Interface that it is reached by: Vulkan, Metal or DX12.
    pub backend: String,
    /// Discrete, integrated or software.
    pub kind: String,
    /// Driver and its version.
    pub driver: String,
    /// Size of the largest tensor, in bytes.
    pub memory_limit: u64,
    /// Why the engine cannot use it, if so.
    pub usable: std::result::Result<(), String>,
}

/// Every GPU of this machine, in the order of their numbers.
pub fn adapters() -> Vec<AdapterSummary> {
    found().iter().enumerate().map(|(index, adapter)| summary(index, adapter)).collect()
}

fn summary(index: usize, adapter: &Adapter) -> AdapterSummary {
    let info = adapter.get_info();
    let kind = match info.device_type {
        DeviceType::DiscreteGpu => "discrete",
        DeviceType::IntegratedGpu => "integrated",
        DeviceType::VirtualGpu => "virtual",
        DeviceType::Cpu => "software",
        DeviceType::Other => "other",
    };
    AdapterSummary {
        index,
        name: info.name.clone(),
        backend: info.backend.to_string(),
        kind: kind.into(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().into(),
        memory_limit: adapter.limits().max_storage_buffer_binding_size,
        usable: check(adapter),
    }
}

/// Returns why the engine cannot use an adapter, if so.
fn check(adapter: &Adapter) -> std::result::Result<(), String> {
    let limits = adapter.limits();
    if !adapter.features().contains(Features::IMMEDIATES) || limits.max_immediate_size < IMMEDIATE_BYTES {
        return Err(format!("it does not support {IMMEDIATE_BYTES} bytes of immediates (push constants)"));
    }
    for (what, has, needs) in [
        ("storage buffers in a kernel", limits.max_storage_buffers_per_shader_stage, BINDINGS),
        ("invocations in a workgroup", limits.max_compute_invocations_per_workgroup, 256),
        ("bytes of workgroup memory", limits.max_compute_workgroup_storage_size, 32 << 10),
    ] {
        if has < needs {
            return Err(format!("it allows {has} {what}, and the kernels need {needs}"));
        }
    }
    Ok(())
}

fn found() -> Vec<Adapter> {
    let backends = Backends::VULKAN | Backends::METAL | Backends::DX12;
    let instance =
        Instance::new(InstanceDescriptor { backends, ..InstanceDescriptor::new_without_display_handle() });
    let mut adapters = pollster::block_on(instance.enumerate_adapters(backends));
    adapters.sort_by_key(|adapter| match adapter.get_info().device_type {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    });
    adapters
}

/// Opens adapter `index`, or the first that the engine can use.
pub(crate) fn open(index: Option<usize>) -> Result<(Adapter, wgpu::Device, wgpu::Queue)> {
    let adapters = found();
    let chosen = match index {
        Some(index) => adapters.get(index),
        None => adapters.iter().find(|adapter| check(adapter).is_ok()).or(adapters.first()),
    };
    let Some(adapter) = chosen.cloned() else {
        return device(match (adapters.len(), index) {
            (count @ 1.., Some(index)) => {
                format!("there is no GPU {index}; `march doctor` lists those of this machine: 0 to {}", count - 1)
            }
            _ => "no GPU was found: no Vulkan, Metal or DX12 driver reports one. Install the driver of the GPU, or use \
                  `--device cpu`"
                .into(),
        });
    };
    let name = adapter.get_info().name;
    if let Err(why) = check(&adapter) {
        return device(format!("{name} cannot be used: {why}"));
    }
    // The limits of the adapter itself: the defaults allow only 16 KiB of workgroup memory and 8 storage buffers.
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("march"),
        required_features: Features::IMMEDIATES | (adapter.features() & Features::TIMESTAMP_QUERY),
        required_limits: Limits { ..adapter.limits() },
        ..Default::default()
    };
    match pollster::block_on(adapter.request_device(&descriptor)) {
        Ok((device, queue)) => Ok((adapter, device, queue)),
        Err(error) => device(format!("{name} could not be opened: {error}")),
    }
}

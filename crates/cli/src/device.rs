//! Which device runs the model: `--device`.

use anyhow::Context;
use clap::Args;
use march_lm::engine::{Cpu, CpuOptions, Device, Products};
use march_lm::train::machine_memory;

/// A device, as the user names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// The processor.
    #[default]
    Cpu,
    /// A GPU: the best one, or the one with this number in `march doctor`.
    Gpu(Option<usize>),
}

impl DeviceName {
    /// The flag that names it, after a space; nothing for the processor.
    pub fn flag(self) -> String {
        match self {
            Self::Cpu => String::new(),
            Self::Gpu(None) => " --device gpu".into(),
            Self::Gpu(Some(index)) => format!(" --device gpu:{index}"),
        }
    }
}

/// Reads the value of `--device`.
pub fn device_name(text: &str) -> Result<DeviceName, String> {
    let number = |number: &str| number.parse().ok().filter(|_| number.bytes().all(|b| b.is_ascii_digit()));
    match text.split_once(':') {
        None if text == "cpu" => Ok(DeviceName::Cpu),
        None if text == "gpu" => Ok(DeviceName::Gpu(None)),
        Some(("gpu", index)) if number(index).is_some() => Ok(DeviceName::Gpu(number(index))),
        _ => Err("expected cpu, gpu, or gpu:N with the number of a GPU that `march doctor` lists".into()),
    }
}

/// The device that a command runs the model on.
#[derive(Args, Clone, Copy)]
pub struct DeviceArgs {
    /// The device that runs the model: cpu, gpu, or gpu:N for the GPU that `march doctor` lists with number N
    #[arg(long, value_name = "cpu|gpu|gpu:N", default_value = "cpu", value_parser = device_name)]
    pub device: DeviceName,
    /// Number of threads; 0 uses all cores
    #[arg(long, default_value_t = 0)]
    pub threads: usize,
}

impl DeviceArgs {
    /// Opens the device.
    pub fn open(self, products: Products) -> anyhow::Result<Device> {
        match self.device {
            DeviceName::Cpu => self.cpu(products),
            DeviceName::Gpu(index) => gpu::open(index),
        }
    }

    /// Opens the processor.
    pub fn cpu(self, products: Products) -> anyhow::Result<Device> {
        Device::cpu(CpuOptions { threads: self.threads, products, ..Default::default() })
            .context("the engine could not start; try `--threads 1`")
    }
}

/// Bytes of memory that are available to a device, if known.
pub fn available_memory(device: &Device) -> Option<usize> {
    device.backend::<Cpu>()?;
    machine_memory().map(|[_, available]| available)
}

#[cfg(feature = "gpu")]
pub mod gpu {
    use march_gpu::Gpu;
    use march_lm::engine::Device;

    /// Opens a GPU: the best one, or the one with this number.
    pub fn open(index: Option<usize>) -> anyhow::Result<Device> {
        Ok(Gpu::open(index)?)
    }

    /// Fails if a GPU does not compute what it should. The processor is not tested.
    pub fn self_test(device: &Device) -> anyhow::Result<()> {
        device.backend::<Gpu>().map_or(Ok(()), |gpu| crate::device_test::require(device, gpu))
    }
}

#[cfg(not(feature = "gpu"))]
pub mod gpu {
    use march_lm::engine::Device;

    /// Fails: the program was built without GPU support.
    pub fn open(_: Option<usize>) -> anyhow::Result<Device> {
        anyhow::bail!(
            "march was built without GPU support; build it with `cargo build --release --features gpu`, or use \
             --device cpu"
        )
    }

    /// Does nothing: the processor is not tested.
    pub fn self_test(_: &Device) -> anyhow::Result<()> {
        Ok(())
    }
}

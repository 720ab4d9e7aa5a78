//! Which engine runs the model: `--device`. Commands are generic over the engine; [`on_device`] starts the one that was
//! asked for and hands it over.

use anyhow::Context;
use clap::Args;
use march_lm::engine::{Cpu, CpuOptions, Engine, Products};
use march_lm::train::machine_memory;

/// A device, as the user names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// A GPU: the best one, or the one with this number in `march doctor`.
    Gpu(Option<usize>),
}

impl Device {
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
fn device(text: &str) -> Result<Device, String> {
    let number = |number: &str| number.parse().ok().filter(|_| number.bytes().all(|b| b.is_ascii_digit()));
    match text.split_once(':') {
        None if text == "cpu" => Ok(Device::Cpu),
        None if text == "gpu" => Ok(Device::Gpu(None)),
        Some(("gpu", index)) if number(index).is_some() => Ok(Device::Gpu(number(index))),
        _ => Err("expected cpu, gpu, or gpu:N with the number of a GPU that `march doctor` lists".into()),
    }
}

/// The engine that a command runs the model on.
#[derive(Args, Clone, Copy)]
pub struct EngineArgs {
    /// The device that runs the model: cpu, gpu, or gpu:N for the GPU that `march doctor` lists with number N
    #[arg(long, value_name = "cpu|gpu|gpu:N", default_value = "cpu", value_parser = device)]
    pub device: Device,
    /// Number of threads; 0 uses all cores
    #[arg(long, default_value_t = 0)]
    pub threads: usize,
}

impl EngineArgs {
    /// The engine on the processor. With a GPU, it runs what the GPU does not.
    pub fn cpu(self, products: Products) -> anyhow::Result<Cpu> {
        Cpu::new(CpuOptions { threads: self.threads, products, ..Default::default() })
            .context("the engine could not start; try `--threads 1`")
    }
}

/// An engine that a command can run a model on, and what the command says about it.
pub trait Runs: Engine {
    /// The engine on the processor: itself, or the one that runs what the device does not.
    fn processor(&self) -> &Cpu;

    /// The device's name; `cpu` for the processor.
    fn name(&self) -> String;

    /// Bytes of memory that are available to the engine, if known.
    fn available(&self) -> Option<usize>;

    /// Fails if the device does not compute what it should. The processor is not tested.
    fn self_test(&self) -> anyhow::Result<()> {
        Ok(())
    }
}

impl Runs for Cpu {
    fn processor(&self) -> &Cpu {
        self
    }

    fn name(&self) -> String {
        CPU.into()
    }

    fn available(&self) -> Option<usize> {
        machine_memory().map(|[_, available]| available)
    }
}

/// The name of the processor as a device.
pub const CPU: &str = "cpu";

/// Runs `$body` with the engine of these arguments: `on_device!(args, products, |engine| body)`.
macro_rules! on_device {
    ($args:expr, $products:expr, |$engine:ident| $body:expr) => {{
        let args: $crate::device::EngineArgs = $args;
        let cpu = args.cpu($products)?;
        match args.device {
            $crate::device::Device::Cpu => {
                let $engine = cpu;
                $body
            }
            #[cfg(feature = "gpu")]
            $crate::device::Device::Gpu(index) => {
                let $engine = $crate::device::gpu::open(index, cpu)?;
                $body
            }
            #[cfg(not(feature = "gpu"))]
            $crate::device::Device::Gpu(_) => Err($crate::device::built_without()),
        }
    }};
}
pub(crate) use on_device;

/// The error for a GPU in a program that was built without.
#[cfg(not(feature = "gpu"))]
pub fn built_without() -> anyhow::Error {
    anyhow::anyhow!(
        "march was built without GPU support; build it with `cargo build --release --features gpu`, or use --device cpu"
    )
}

/// The engine on a GPU.
#[cfg(feature = "gpu")]
pub mod gpu {
    use march_gpu::Gpu;
    use march_lm::engine::{Cpu, Fallback};

    use super::Runs;
    use crate::proof;

    /// A GPU, with the processor for what the GPU does not implement.
    pub type OnGpu = Fallback<Gpu, Cpu>;

    /// Opens a GPU: the best one, or the one with this number.
    pub fn open(index: Option<usize>, cpu: Cpu) -> anyhow::Result<OnGpu> {
        Ok(Fallback::new(Gpu::open(index)?, cpu))
    }

    impl Runs for OnGpu {
        fn processor(&self) -> &Cpu {
            &self.rest
        }

        fn name(&self) -> String {
            self.device.description()
        }

        fn available(&self) -> Option<usize> {
            None
        }

        fn self_test(&self) -> anyhow::Result<()> {
            proof::require(self)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        assert_eq!(device("cpu"), Ok(Device::Cpu));
        assert_eq!(device("gpu"), Ok(Device::Gpu(None)));
        assert_eq!(device("gpu:0"), Ok(Device::Gpu(Some(0))));
        assert_eq!(device("gpu:12"), Ok(Device::Gpu(Some(12))));
        assert_eq!(
            ["cpu", "gpu", "gpu:3"].map(|name| device(name).unwrap().flag()),
            ["", " --device gpu", " --device gpu:3"]
        );
        for wrong in [
            "",
            "GPU",
            "gpu:",
            "gpu:+1",
            "gpu:-1",
            "gpu:a",
            "gpu:1:2",
            "cpu:1",
            "cuda",
            "gpu:99999999999999999999",
        ] {
            assert!(device(wrong).unwrap_err().contains("`march doctor`"), "{wrong}");
        }
    }
}

//! `march doctor`: the machine's capabilities and the build of the program.

use anyhow::bail;
use clap::Args;
use march::engine::{Machine, Products};
use march::train::machine_memory;

use crate::device::{Device, EngineArgs};
use crate::display::out::say;
use crate::machine;

/// Show the machine's capabilities: instruction sets, threads, memory, GPUs, and measured limits; or test a GPU.
#[derive(Args)]
#[command(after_help = "Examples:
  march doctor --threads 2
  march doctor --device gpu
  march doctor --device gpu:1 --json

With --device gpu, every operation of the GPU is compared with the reference, on random and extreme inputs, and small
models of every kind with what is known of them; then its speed is measured. The exit code says whether all agree.
`march train` refuses a GPU that fails. --json prints everything, for a report of a fault.")]
pub struct Doctor {
    #[command(flatten)]
    engine: EngineArgs,
    /// Print the test of a GPU as JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Prints the report; measuring takes a few seconds.
    pub fn run(self) -> anyhow::Result<()> {
        let cpu = self.engine.cpu(Products::Fastest)?;
        match self.engine.device {
            Device::Cpu if self.json => {
                bail!("--json is for the test of a GPU: march doctor --device gpu --json")
            }
            Device::Cpu => {}
            #[cfg(feature = "gpu")]
            Device::Gpu(index) => {
                return super::doctor_gpu::test(&crate::device::gpu::open(index, cpu)?, self.json);
            }
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(_) => return Err(crate::device::built_without()),
        }
        say!("march         {} ({})", env!("CARGO_PKG_VERSION"), machine::profile());
        say!("processor     {} {}", std::env::consts::ARCH, machine::instructions());
        say!("threads       {} in use, {} available", cpu.threads(), machine::cores());
        say!("kernels       {:?}", cpu.level());
        match memory() {
            Some((total, free)) => say!("memory        {total:.1} GiB, {free:.1} GiB available"),
            None => say!("memory        unknown on this system"),
        }
        #[cfg(feature = "gpu")]
        super::doctor_gpu::list();
        #[cfg(not(feature = "gpu"))]
        say!("GPU           not in this build; build with `cargo build --release --features gpu`");
        // Two arrays of at most an eighth of the free memory, so that a small machine does not start swapping.
        let array = memory().map(|(_, free)| ((free / 8.0 * (1u64 << 30) as f64) as usize).min(256 << 20));
        let measured = Machine::measure(&cpu, array);
        say!("FMA peak      {:.1} GFLOP/s", measured.peak_gflops);
        say!("memory read   {:.1} GB/s", measured.read_gbs);
        say!("memory copy   {:.1} GB/s (bytes read and written)", measured.copy_gbs);
        if cfg!(debug_assertions) {
            say!("\nThis is a debug build, many times slower: build with `cargo build --release`.");
        }
        Ok(())
    }
}

/// Total and available memory in GiB, if the system reports them.
fn memory() -> Option<(f64, f64)> {
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    machine_memory().map(|[total, available]| (gib(total), gib(available)))
}

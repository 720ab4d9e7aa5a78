//! `march doctor`: the machine's capabilities and the build of the program.

use clap::Args;
use march::engine::{Cpu, Machine, Products};
use march::train::machine_memory;
use serde_json::json;

use crate::device::{Device, EngineArgs};
use crate::display::out::say;
use crate::machine;

/// Show the machine's capabilities: instruction sets, threads, memory, GPUs, and measured limits; or test a GPU.
#[derive(Args)]
#[command(after_help = "Examples:
  march doctor --threads 2
  march doctor --json
  march doctor --device gpu
  march doctor --device gpu:1 --json

With --device gpu, every operation of the GPU is compared with the reference, on random and extreme inputs, and small
models of every kind with what is known of them; then its speed is measured. The exit code says whether all agree.
`march train` refuses a GPU that fails. --json prints everything, for a report of a fault.")]
pub struct Doctor {
    #[command(flatten)]
    engine: EngineArgs,
    /// Print the report, or the test of a GPU, as JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Prints the report; measuring takes a few seconds.
    pub fn run(self) -> anyhow::Result<()> {
        let cpu = self.engine.cpu(Products::Fastest)?;
        match self.engine.device {
            Device::Cpu if self.json => return print_json(&cpu),
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
        let measured = measure(&cpu);
        say!("FMA peak      {:.1} GFLOP/s ({})", measured.peak_gflops, measured.instructions);
        say!("memory read   {:.1} GB/s", measured.read_gbs);
        say!("memory copy   {:.1} GB/s (bytes read and written)", measured.copy_gbs);
        if cfg!(debug_assertions) {
            say!("\nThis is a debug build, many times slower: build with `cargo build --release`.");
        }
        Ok(())
    }
}

fn measure(cpu: &Cpu) -> Machine {
    // Two arrays of at most an eighth of the free memory, so that a small machine does not start swapping.
    let array = memory().map(|(_, free)| ((free / 8.0 * (1u64 << 30) as f64) as usize).min(256 << 20));
    Machine::measure(cpu, array)
}

/// The report without the list of GPUs.
fn print_json(cpu: &Cpu) -> anyhow::Result<()> {
    let measured = measure(cpu);
    let memory = machine_memory().map(|[total, available]| json!({ "bytes": total, "available": available }));
    let report = json!({
        "march": format!("{} ({})", env!("CARGO_PKG_VERSION"), machine::profile()),
        "processor": format!("{} {}", std::env::consts::ARCH, machine::instructions()),
        "threads": { "in_use": cpu.threads(), "available": machine::cores() },
        "kernels": format!("{:?}", cpu.level()),
        "memory": memory,
        "peak": { "gflops": measured.peak_gflops, "instructions": measured.instructions.name() },
        "read_gbs": measured.read_gbs,
        "copy_gbs": measured.copy_gbs,
    });
    say!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}

/// Total and available memory in GiB, if the system reports them.
fn memory() -> Option<(f64, f64)> {
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    machine_memory().map(|[total, available]| (gib(total), gib(available)))
}

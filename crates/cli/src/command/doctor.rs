//! `march doctor`: the machine's capabilities and the build of the program.

use anyhow::Context;
use clap::Args;
use march::engine::{Cpu, CpuOptions, Machine};
use march::train::machine_memory;

use crate::display::out::say;
use crate::machine;

/// Show the machine's capabilities: instruction sets, threads, memory, and measured limits.
#[derive(Args)]
#[command(after_help = "Example:\n  march doctor --threads 2")]
pub struct Doctor {
    /// Number of threads to measure with; 0 uses all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

impl Doctor {
    /// Prints the report; measuring takes a few seconds.
    pub fn run(self) -> anyhow::Result<()> {
        let cpu = Cpu::new(CpuOptions { threads: self.threads, ..Default::default() })
            .context("the engine could not start; try `--threads 1`")?;
        say!("march         {} ({})", env!("CARGO_PKG_VERSION"), machine::profile());
        say!("processor     {} {}", std::env::consts::ARCH, machine::instructions());
        say!("threads       {} in use, {} available", cpu.threads(), machine::cores());
        say!("kernels       {:?}", cpu.level());
        match memory() {
            Some((total, free)) => say!("memory        {total:.1} GiB, {free:.1} GiB available"),
            None => say!("memory        unknown on this system"),
        }
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

//! `march doctor`: the machine's capabilities and the build of the program.

use anyhow::Context;
use clap::Args;
use march_lm::engine::{Cpu, Machine, Products};
use march_lm::train::machine_memory;
use serde_json::json;

use crate::device::DeviceArgs;
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
    device: DeviceArgs,
    /// Print the report, or the test of a GPU, as JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Prints the report; measuring takes a few seconds.
    pub fn run(self) -> anyhow::Result<()> {
        let device = self.device.open(Products::Fastest)?;
        #[cfg(feature = "gpu")]
        if let Some(gpu) = device.backend() {
            return super::doctor_gpu::test(&device, gpu, self.json);
        }
        let cpu: &Cpu = device.backend().context("neither the processor nor a GPU")?;
        if self.json {
            return print_json(cpu);
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
        let (measured, scatter) = measure(cpu);
        say!("FMA peak      {:.1} GFLOP/s ({})", measured.peak_gflops, measured.instructions);
        say!("memory read   {:.1} GB/s", measured.read_gbs);
        say!("memory copy   {:.1} GB/s (bytes read and written)", measured.copy_gbs);
        if scatter > STEADY {
            say!(
                "\nThe machine is busy: the measured limits differ by {:.0} % from one measurement to the next, and may be \
                 higher. End other programs, then run `march doctor` again.",
                100.0 * scatter
            );
        }
        if cfg!(debug_assertions) {
            say!("\nThis is a debug build, many times slower: build with `cargo build --release`.");
        }
        Ok(())
    }
}

/// Two measurements in a row that differ by no more than this fraction are believed.
pub const STEADY: f64 = 0.1;

/// The most measurements; each takes about a second.
pub const MOST_MEASUREMENTS: usize = 5;

/// Measures until two measurements in a row agree in all `limits`, or a few times at most. Returns the highest of each
/// limit, because other programs only lower them, and the largest difference between the last two measurements as a
/// fraction.
pub fn steady<M: Copy>(mut measure: impl FnMut() -> M, limits: impl Fn(&mut M) -> [&mut f64; 3]) -> (M, f64) {
    let mut last = measure();
    let (mut highest, mut scatter) = (last, 0.0);
    for _ in 1..MOST_MEASUREMENTS {
        let mut next = measure();
        scatter = 0.0;
        for ((next, last), highest) in
            limits(&mut next).into_iter().zip(limits(&mut last)).zip(limits(&mut highest))
        {
            scatter = f64::max(scatter, 1.0 - next.min(*last) / next.max(*last));
            *highest = highest.max(*next);
        }
        if scatter <= STEADY {
            break;
        }
        last = next;
    }
    (highest, scatter)
}

/// The machine's limits, and how much they scatter.
pub fn measure(cpu: &Cpu) -> (Machine, f64) {
    // Two arrays of at most an eighth of the free memory, so that a small machine does not start swapping.
    let array = memory().map(|(_, free)| ((free / 8.0 * (1u64 << 30) as f64) as usize).min(256 << 20));
    steady(
        || Machine::measure(cpu, array),
        |machine| [&mut machine.peak_gflops, &mut machine.read_gbs, &mut machine.copy_gbs],
    )
}

/// The report without the list of GPUs.
fn print_json(cpu: &Cpu) -> anyhow::Result<()> {
    let (measured, scatter) = measure(cpu);
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
        "busy": scatter > STEADY,
    });
    say!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}

/// Total and available memory in GiB, if the system reports them.
fn memory() -> Option<(f64, f64)> {
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    machine_memory().map(|[total, available]| (gib(total), gib(available)))
}

//! `march doctor`: what this machine offers and how the program was built.

use anyhow::Context;
use clap::Args;
use march::engine::{Cpu, CpuOptions, Machine};

/// Show what this machine offers: instruction sets, threads, memory, and measured limits.
#[derive(Args)]
#[command(after_help = "Example:\n  march doctor --threads 2")]
pub struct Doctor {
    /// Threads to measure with; 0 takes all of the machine's.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

impl Doctor {
    /// Prints the report; measuring takes a few seconds.
    pub fn run(self) -> anyhow::Result<()> {
        let cpu = Cpu::new(CpuOptions { threads: self.threads, ..Default::default() })
            .context("the engine could not start; try `--threads 1`")?;
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        println!("march         {} ({})", env!("CARGO_PKG_VERSION"), profile());
        println!("processor     {} {}", std::env::consts::ARCH, features());
        println!("threads       {} in use, {available} available", cpu.threads());
        println!("kernels       {:?}", cpu.level());
        match memory() {
            Some((total, free)) => println!("memory        {total:.1} GiB, {free:.1} GiB available"),
            None => println!("memory        unknown on this system"),
        }
        // Two arrays of at most an eighth of what is free, so that a small machine is not pushed into swapping.
        let array = memory().map(|(_, free)| ((free / 8.0 * (1u64 << 30) as f64) as usize).min(256 << 20));
        let machine = Machine::measure(&cpu, array);
        println!("FMA peak      {:.1} GFLOP/s", machine.peak_gflops);
        println!("memory read   {:.1} GB/s", machine.read_gbs);
        println!("memory copy   {:.1} GB/s (bytes read and written)", machine.copy_gbs);
        if cfg!(debug_assertions) {
            println!("\nThis is a debug build, many times slower: build with `cargo build --release`.");
        }
        Ok(())
    }
}

fn profile() -> &'static str {
    if cfg!(debug_assertions) { "debug build" } else { "release build" }
}

/// The instruction sets that matter here and that the processor has.
fn features() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        let known = [
            ("avx2", std::arch::is_x86_feature_detected!("avx2")),
            ("fma", std::arch::is_x86_feature_detected!("fma")),
            ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
        ];
        let has: Vec<&str> = known.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
        if has.is_empty() { "(no AVX2: portable kernels)".into() } else { has.join(" ") }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        "(portable kernels)".into()
    }
}

/// Total and available memory in GiB, where the system tells.
fn memory() -> Option<(f64, f64)> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| -> Option<f64> {
        let line = text.lines().find(|l| l.starts_with(name))?;
        let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib / (1024.0 * 1024.0))
    };
    Some((field("MemTotal:")?, field("MemAvailable:")?))
}

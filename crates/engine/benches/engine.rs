//! `cargo bench -p march-engine`: the machine's own peak first, then every operation as a share of it.
//!
//! After `--`: `--threads N` (default: all of the machine's), `--only TEXT` (operations whose name holds TEXT),
//! `--json FILE`. Times are the best of several runs; nothing here asserts a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaGradient, GatedDeltaOptions};
use march_engine::{Cpu, CpuOptions, Engine, Machine, Tensor};

type T = Tensor<f32>;

/// Counts bytes in use and their peak, so that memory is measured and not guessed.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code)]
// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = IN_USE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Bench {
    cpu: Cpu,
    machine: Machine,
    only: Option<String>,
    json: Option<String>,
    results: Vec<serde_json::Value>,
    seed: u64,
}

fn main() {
    let (mut threads, mut only, mut json) = (0, None, None);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--threads" => threads = args.next().and_then(|v| v.parse().ok()).unwrap_or(0),
            "--only" => only = args.next(),
            "--json" => json = args.next(),
            _ => {} // cargo passes --bench
        }
    }
    let cpu = Cpu::new(CpuOptions { threads, ..Default::default() }).expect("the machine's threads");
    let machine = Machine::measure(&cpu, None);
    cpu.trim();
    println!(
        "{} threads, {:?}: {:.1} GFLOP/s FMA peak, {:.1} GB/s copy, {:.1} GB/s read\n",
        cpu.threads(),
        cpu.level(),
        machine.peak_gflops,
        machine.copy_gbs,
        machine.read_gbs
    );
    println!("{:<44} {:>10} {:>12} {:>9}", "operation", "ms", "rate", "share");
    let mut bench = Bench { cpu, machine, only, json, results: Vec::new(), seed: 1 };
    bench.gated_delta();
    bench.finish();
}

impl Bench {
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    fn random(&mut self, shape: &[usize], scale: f32) -> T {
        let data: Vec<f32> = (0..shape.iter().product())
            .map(|_| {
                self.seed =
                    self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((self.seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
            })
            .collect();
        self.cpu.from_f32(&data, shape).expect("a shape that fits")
    }

    /// The best time of several runs, in milliseconds.
    fn time<R>(&self, mut f: impl FnMut(&Cpu) -> R) -> f64 {
        let cpu = &self.cpu;
        drop(f(cpu));
        let mut best = f64::INFINITY;
        let begin = Instant::now();
        let mut runs = 0;
        while runs < 5 || (runs < 200 && begin.elapsed().as_secs_f64() < 1.0) {
            let start = Instant::now();
            let result = f(cpu);
            best = best.min(start.elapsed().as_secs_f64());
            drop(result);
            runs += 1;
        }
        best * 1e3
    }

    /// Peak bytes above those in use before, with the pool empty.
    fn extra_bytes<R>(&self, f: impl FnOnce(&Cpu) -> R) -> usize {
        self.cpu.trim();
        let before = IN_USE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        drop(f(&self.cpu));
        PEAK.load(Ordering::Relaxed) - before
    }

    /// A line with the share of the FMA peak.
    fn flops(&mut self, name: &str, ms: f64, flops: f64) {
        let rate = flops / ms / 1e6;
        let share = rate / self.machine.peak_gflops;
        println!("{name:<44} {ms:>10.3} {rate:>7.1} GF/s {:>7.1} %", share * 100.0);
        self.results
            .push(serde_json::json!({ "name": name, "ms": ms, "gflops": rate, "share_of_peak": share }));
    }

    /// A line with the share of the copy bandwidth.
    #[allow(dead_code)]
    fn bytes(&mut self, name: &str, ms: f64, bytes: f64) {
        let rate = bytes / ms / 1e6;
        let share = rate / self.machine.copy_gbs;
        println!("{name:<44} {ms:>10.3} {rate:>7.1} GB/s {:>7.1} %", share * 100.0);
        self.results.push(serde_json::json!({ "name": name, "ms": ms, "gbs": rate, "share_of_copy": share }));
    }

    /// A line with a plain ratio or size.
    fn note(&mut self, name: &str, value: f64, unit: &str) {
        println!("{name:<44} {value:>10.3} {unit}");
        self.results.push(serde_json::json!({ "name": name, "value": value, "unit": unit }));
    }

    fn finish(self) {
        let machine = serde_json::json!({
            "threads": self.cpu.threads(),
            "level": format!("{:?}", self.cpu.level()),
            "peak_gflops": self.machine.peak_gflops,
            "copy_gbs": self.machine.copy_gbs,
            "read_gbs": self.machine.read_gbs,
        });
        let all = serde_json::json!({ "machine": machine, "results": self.results });
        if let Some(path) = self.json {
            std::fs::write(&path, format!("{all:#}\n")).unwrap_or_else(|e| eprintln!("{path}: {e}"));
        }
    }

    fn delta_inputs(&mut self, t: usize, heads: usize, d: usize) -> GatedDelta<T> {
        GatedDelta {
            query: self.random(&[1, t, heads * d], 1.0),
            key: self.random(&[1, t, heads * d], 1.0),
            value: self.random(&[1, t, heads * d], 1.0),
            retention_input: self.random(&[1, t, heads], 1.0),
            write_input: self.random(&[1, t, heads], 1.0),
            a_log: self.random(&[heads], 1.0),
            dt_bias: self.random(&[heads], 1.0),
            initial_state: None,
        }
    }

    fn gated_delta(&mut self) {
        let (t, heads) = (4096, 4);
        for d in [64, 128] {
            let name = format!("gated_delta forward d={d}");
            if !self.wants(&name) {
                continue;
            }
            let input = self.delta_inputs(t, heads, d);
            let input = borrow(&input);
            let options = GatedDeltaOptions {
                key_heads: heads,
                value_heads: heads,
                allow_neg_eigval: false,
                boundaries: Arc::default(),
            };
            let dout = self.random(&[1, t, heads * d], 1.0);
            let gradient =
                GatedDeltaGradient { readout: Some(&dout), final_state: None, boundary_states: None };
            let work = (d * d * t * heads) as f64;
            let ms = self.time(|cpu| cpu.gated_delta(input, &options, false));
            self.flops(&name, ms, 6.0 * work);
            let ms = self.time(|cpu| {
                let (_, kept) = cpu.gated_delta(input, &options, true).expect("shapes that fit");
                cpu.gated_delta_backward(input, &options, &kept, gradient)
            });
            self.flops(&format!("gated_delta forward+backward d={d}"), ms, 18.0 * work);
        }
    }
}

fn borrow(input: &GatedDelta<T>) -> GatedDelta<&T> {
    GatedDelta {
        query: &input.query,
        key: &input.key,
        value: &input.value,
        retention_input: &input.retention_input,
        write_input: &input.write_input,
        a_log: &input.a_log,
        dt_bias: &input.dt_bias,
        initial_state: input.initial_state.as_ref(),
    }
}

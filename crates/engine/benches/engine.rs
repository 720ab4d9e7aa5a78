//! `cargo bench --workspace --bench engine`: the machine's own peak first, then every operation as a share of it.
//!
//! After `--`: `--threads N` (default: all of the machine's), `--only TEXT` (operations whose name holds TEXT),
//! `--quick` (one run each, without the longest), `--json FILE`. Times are the best of several runs; nothing here asserts a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use march_engine::ops::adamw::{self, AdamW, Step};
use march_engine::ops::anchor_read::{
    AnchorRead, AnchorReadBackward, AnchorReadForward, AnchorReadOptions, ReadPlan,
};
use march_engine::ops::attention::{Attention, AttentionBackward, AttentionForward};
use march_engine::ops::cross_entropy::LinearCrossEntropy;
use march_engine::ops::gated_delta::{
    GatedDelta, GatedDeltaBackward, GatedDeltaForward, GatedDeltaGradient, GatedDeltaOptions,
};
use march_engine::ops::log_linear::{LogLinear, LogLinearBackward, LogLinearForward, LogLinearOptions};
use march_engine::ops::rms_norm::{RmsNorm, RmsNormBackward};
use march_engine::ops::short_conv::{ShortConv, ShortConvBackward};
use march_engine::ops::swiglu::{SwiGlu, SwiGluBackward};
use march_engine::{Cpu, CpuOptions, Data, Device, Machine, Op, Precision, Products, Tensor};

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
    device: Device,
    machine: Machine,
    only: Option<String>,
    quick: bool,
    json: Option<String>,
    results: Vec<serde_json::Value>,
    seed: u64,
}

fn main() {
    let (mut threads, mut only, mut json, mut quick) = (0, None, None, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--threads" => threads = args.next().and_then(|v| v.parse().ok()).unwrap_or(0),
            "--only" => only = args.next(),
            "--quick" => quick = true,
            "--json" => json = args.next(),
            _ => {} // cargo passes --bench
        }
    }
    let device = Device::cpu(CpuOptions { threads, ..Default::default() }).expect("the machine's threads");
    let cpu = cpu_of(&device);
    let machine = Machine::measure(cpu, None);
    device.trim();
    println!(
        "{} threads, {:?} kernels: {:.1} GFLOP/s FMA peak ({}), {:.1} GB/s copy, {:.1} GB/s read\n",
        cpu.threads(),
        cpu.level(),
        machine.peak_gflops,
        machine.instructions,
        machine.copy_gbs,
        machine.read_gbs
    );
    println!("{:<44} {:>10} {:>12} {:>9}", "operation", "ms", "rate", "share");
    let mut bench = Bench { device, machine, only, quick, json, results: Vec::new(), seed: 1 };
    bench.linear();
    bench.weights();
    bench.gated_delta();
    bench.log_linear();
    bench.anchor_read();
    bench.attention();
    bench.memory_bound();
    bench.cross_entropy();
    bench.finish();
}

fn cpu_of(device: &Device) -> &Cpu {
    device.backend().expect("the CPU")
}

/// Elements of a tensor of the CPU.
fn elements(tensor: &Tensor) -> &[f32] {
    match tensor.data() {
        Data::F32(array) => array.data(),
        _ => unreachable!("the bench runs on the CPU"),
    }
}

/// Runs an operation whose shapes fit.
fn run<O: Op>(op: O) -> O::Output {
    op.run().expect("shapes that fit")
}

impl Bench {
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    fn random(&mut self, shape: &[usize], scale: f32) -> Tensor {
        let data: Vec<f32> = (0..shape.iter().product())
            .map(|_| {
                self.seed =
                    self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((self.seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
            })
            .collect();
        Tensor::from_slice(&data, shape, &self.device).expect("a shape that fits")
    }

    /// The best time of several runs, in milliseconds; of two when a run takes seconds.
    fn time<R>(&self, mut f: impl FnMut() -> R) -> f64 {
        if !self.quick {
            drop(f());
        }
        let mut best = f64::INFINITY;
        let begin = Instant::now();
        let mut runs = 0;
        let more = |runs: usize, seconds: f64| {
            runs == 0
                || (!self.quick && (runs < 2 || (runs < 5 && seconds < 5.0) || (runs < 400 && seconds < 2.0)))
        };
        while more(runs, begin.elapsed().as_secs_f64()) {
            let start = Instant::now();
            let result = f();
            best = best.min(start.elapsed().as_secs_f64());
            drop(result);
            runs += 1;
        }
        best * 1e3
    }

    /// Peak bytes above those in use before, with the pool empty.
    fn extra_bytes<R>(&self, f: impl FnOnce() -> R) -> usize {
        self.device.trim();
        let before = IN_USE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        drop(f());
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
    fn bytes(&mut self, name: &str, ms: f64, bytes: f64) {
        let rate = bytes / ms / 1e6;
        let share = rate / self.machine.copy_gbs;
        println!("{name:<44} {ms:>10.3} {rate:>7.1} GB/s {:>7.1} %", share * 100.0);
        self.results.push(serde_json::json!({ "name": name, "ms": ms, "gbs": rate, "share_of_copy": share }));
    }

    /// A line with the share of the read bandwidth.
    fn reads(&mut self, name: &str, ms: f64, bytes: f64) {
        let rate = bytes / ms / 1e6;
        let share = rate / self.machine.read_gbs;
        println!("{name:<44} {ms:>10.3} {rate:>7.1} GB/s {:>7.1} %", share * 100.0);
        self.results.push(serde_json::json!({ "name": name, "ms": ms, "gbs": rate, "share_of_read": share }));
    }

    /// A line with the share of the peak of products of integers.
    fn integers(&mut self, name: &str, ms: f64, operations: f64, peak: f64) {
        let rate = operations / ms / 1e6;
        println!("{name:<44} {ms:>10.3} {rate:>7.1} GO/s {:>7.1} %", rate / peak * 100.0);
        let share = rate / peak;
        self.results.push(
            serde_json::json!({ "name": name, "ms": ms, "gops": rate, "share_of_integer_peak": share }),
        );
    }

    /// A line with a plain ratio or size.
    fn note(&mut self, name: &str, value: f64, unit: &str) {
        println!("{name:<44} {value:>10.3} {unit}");
        self.results.push(serde_json::json!({ "name": name, "value": value, "unit": unit }));
    }

    fn finish(self) {
        let cpu = cpu_of(&self.device);
        let machine = serde_json::json!({
            "threads": cpu.threads(),
            "level": format!("{:?}", cpu.level()),
            "peak_gflops": self.machine.peak_gflops,
            "peak_instructions": self.machine.instructions.name(),
            "copy_gbs": self.machine.copy_gbs,
            "read_gbs": self.machine.read_gbs,
        });
        let all = serde_json::json!({ "machine": machine, "results": self.results });
        if let Some(path) = self.json
            && let Err(e) = std::fs::write(&path, format!("{all:#}\n"))
        {
            eprintln!(
                "{path} could not be written: {e} (cargo runs the bench in crates/engine: give a full path)"
            );
            std::process::exit(1);
        }
    }

    fn delta_inputs(&mut self, t: usize, heads: usize, d: usize) -> GatedDelta<Tensor> {
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
            let options = GatedDeltaOptions {
                key_heads: heads,
                value_heads: heads,
                allow_neg_eigval: false,
                boundaries: Arc::default(),
                final_state: true,
                chunk_offset: 0,
            };
            let dout = self.random(&[1, t, heads * d], 1.0);
            let gradient =
                GatedDeltaGradient { readout: Some(dout), final_state: None, boundary_states: None };
            let work = (d * d * t * heads) as f64;
            let forward =
                |keep| run(GatedDeltaForward { input: input.clone(), options: options.clone(), keep });
            let ms = self.time(|| forward(false));
            self.flops(&name, ms, 6.0 * work);
            let ms = self.time(|| {
                let (_, kept) = forward(true);
                let (input, options, gradient) = (input.clone(), options.clone(), gradient.clone());
                run(GatedDeltaBackward { input, options, kept, gradient })
            });
            self.flops(&format!("gated_delta forward+backward d={d}"), ms, 18.0 * work);
        }
    }
}

/// y = x Wᵀ by the library alone.
#[allow(unsafe_code)]
fn bare_product(y: &mut [f32], x: &[f32], weight: &[f32], inner: usize, outer: usize) {
    let rows = x.len() / inner;
    assert!(y.len() == rows * outer && x.len() == rows * inner && weight.len() == outer * inner);
    let (y, x, w) = (y.as_mut_ptr(), x.as_ptr(), weight.as_ptr());
    let (row, step) = (outer as isize, inner as isize);
    let (one, none) = (1.0, gemm_common::Parallelism::None);
    let gemm = gemm_f32::gemm::f32::get_gemm_fn();
    // SAFETY: the assertion: yᵀ [outer, rows] = W xᵀ, whose columns are the rows of y and of x.
    unsafe {
        gemm(
            outer, rows, inner, y, row, 1, false, w, 1, step, x, step, 1, 0.0, one, false, false, false, none,
        );
    }
}

impl Bench {
    fn linear(&mut self) {
        let (rows, inner, outer) = (2048, 512, 2048);
        let name = format!("linear {rows}x{inner}x{outer}");
        if !self.wants(&name) {
            return;
        }
        let (x, weight) = (self.random(&[rows, inner], 1.0), self.random(&[outer, inner], 1.0));
        let flops = 2.0 * (rows * inner * outer) as f64;
        let mut out = vec![0.0f32; rows * outer];
        let threads = cpu_of(&self.device).threads();
        let share = rows.div_ceil(threads);
        let bare = self.time(|| {
            std::thread::scope(|scope| {
                for (x, y) in elements(&x).chunks(share * inner).zip(out.chunks_mut(share * outer)) {
                    let weight = elements(&weight);
                    scope.spawn(move || bare_product(y, x, weight, inner, outer));
                }
            });
        });
        let ms = self.time(|| x.linear(&weight));
        self.flops(&name, ms, flops);
        self.flops("  bare gemm-f32 product", bare, flops);
        self.note("  linear as a share of the bare product", bare / ms * 100.0, "%");
        let invariant = CpuOptions { threads, products: Products::BatchInvariant, ..Default::default() };
        let invariant = Device::cpu(invariant).expect("the machine's threads");
        let (x, weight) =
            (Tensor::new(x.data().clone(), &invariant), Tensor::new(weight.data().clone(), &invariant));
        let ms = self.time(|| x.linear(&weight));
        self.flops("  batch-invariant (inference)", ms, flops);
    }

    /// Products with weights in all precisions: few rows read the weight from memory, many rows compute.
    fn weights(&mut self) {
        let cpu = cpu_of(&self.device);
        let (path, peak) = (cpu.path(), cpu.path().peak_gops(cpu).unwrap_or(f64::NAN));
        let integers = [Precision::Q8, Precision::Q4];
        for (inner, outer, many) in [(1024, 131_072, false), (1024, 3584, true), (3584, 1024, true)] {
            let rows: &[usize] = if many { &[512] } else { &[1, 8] };
            let name = |rows: usize, precision| format!("linear {rows}x{inner}x{outer} in {precision}");
            if !rows.iter().any(|&rows| Precision::ALL.iter().any(|&p| self.wants(&name(rows, p)))) {
                continue;
            }
            let products = Products::BatchInvariant;
            let threads = cpu_of(&self.device).threads();
            let device = Device::cpu(CpuOptions { threads, products, ..Default::default() });
            let device = device.expect("the machine's threads");
            let numbers = self.random(&[outer, inner], 0.05).to_f32();
            for precision in Precision::ALL {
                let read = |r: usize, row: &mut [f32]| row.copy_from_slice(&numbers[r * inner..][..inner]);
                let weight = Tensor::pack_rows([outer, inner], precision, &device, &read);
                let weight = weight.expect("finite numbers");
                for &rows in rows {
                    let name = name(rows, precision);
                    if !self.wants(&name) {
                        continue;
                    }
                    let x = Tensor::new(self.random(&[rows, inner], 1.0).data().clone(), &device);
                    let ms = self.time(|| x.linear(&weight));
                    let operations = 2.0 * (rows * inner * outer) as f64;
                    if many && integers.contains(&precision) {
                        self.integers(&name, ms, operations, peak);
                    } else if many {
                        self.flops(&name, ms, operations);
                    } else {
                        self.reads(&name, ms, weight.bytes() as f64);
                    }
                }
            }
        }
        self.note(&format!("  integer peak ({})", path.name()), peak, "GOP/s");
    }

    fn log_linear(&mut self) {
        let (t, heads, d, levels) = (4096, 4, 64, 13);
        let name = format!("log_linear_delta forward+backward d={d}");
        if !self.wants(&name) {
            return;
        }
        let GatedDelta { query, key, value, retention_input, write_input, a_log, dt_bias, .. } =
            self.delta_inputs(t, heads, d);
        let level_input = self.random(&[1, t, heads * levels], 1.0);
        let level_scale = self.random(&[heads, levels], 1.0);
        let input = LogLinear {
            query,
            key,
            value,
            retention_input,
            write_input,
            a_log,
            dt_bias,
            level_input,
            level_scale,
        };
        let options = LogLinearOptions {
            key_heads: heads,
            value_heads: heads,
            allow_neg_eigval: false,
            position: 0,
            want_state: false,
        };
        let dout = self.random(&[1, t, heads * d], 1.0);
        let forward = |keep| run(LogLinearForward { input: input.clone(), options, initial: None, keep });
        let ms = self.time(|| forward(false));
        self.flops("log_linear_delta forward d=64", ms, 6.0 * (d * d * t * heads) as f64);
        let ms = self.time(|| {
            let saved = forward(true).saved;
            let (input, gradient) = (input.clone(), dout.clone());
            run(LogLinearBackward { input, options, initial: None, saved, gradient })
        });
        self.flops(&name, ms, 18.0 * (d * d * t * heads) as f64);
        if let Some(gated) = self.ms(&format!("gated_delta forward+backward d={d}")) {
            self.note("  times gated_delta", ms / gated, "x");
        }
    }

    fn anchor_inputs(&mut self, t: usize, c: usize, heads: usize) -> (AnchorRead<Tensor>, AnchorReadOptions) {
        let (dk, dv, dr) = (64, 128, 64);
        let boundaries: Vec<usize> = (1..t.div_ceil(c)).map(|m| m * c).collect();
        let n = boundaries.len();
        let input = AnchorRead {
            query: self.random(&[1, t, heads * dk], 1.0),
            routing_query: self.random(&[1, t, heads * dr], 0.5),
            routing_keys: self.random(&[n, heads * dr], 0.5),
            anchor_states: self.random(&[n, heads, dk, dv], 1.0),
            null_score: Some(self.random(&[1, t, heads], 1.0)),
        };
        let plan = Arc::new(ReadPlan::from_boundaries(t, &[boundaries]));
        (
            input,
            AnchorReadOptions { key_heads: heads, value_heads: heads, top_k: None, routing_scale: 1.0, plan },
        )
    }

    fn anchor_read(&mut self) {
        let (c, heads, dv) = (512, 4, 128);
        for t in [16_384, 131_072] {
            let name = format!("anchor_read dense forward T={t}");
            if !self.wants(&name) || (self.quick && t > 16_384) {
                continue;
            }
            let (input, mut options) = self.anchor_inputs(t, c, heads);
            let dout = self.random(&[1, t, heads * dv], 1.0);
            let seen: usize = options.plan.segments.iter().map(|s| s.len * s.visible.len()).sum();
            let flops = (seen * heads * 2 * 64 * dv) as f64;
            let forward = self.time(|| read(&input, &options, false));
            self.flops(&name, forward, flops);
            let dense = self.time(|| read_both(&input, &options, &dout));
            self.flops(&format!("anchor_read dense forward+backward T={t}"), dense, 3.0 * flops);
            self.note("  times the forward", dense / forward, "x");
            options.top_k = Some(4);
            let chosen = (t - c) as f64 * 4.0 * (heads * 2 * 64 * dv) as f64;
            let ms = self.time(|| read(&input, &options, false));
            self.flops(&format!("anchor_read top-4 forward T={t}"), ms, chosen);
            let sparse = self.time(|| read_both(&input, &options, &dout));
            self.flops(&format!("anchor_read top-4 forward+backward T={t}"), sparse, 3.0 * chosen);
            self.note("  times faster than dense", dense / sparse, "x");
        }
        if self.wants("anchor_read memory") {
            let bytes = [8192, 16_384].map(|t| {
                let (input, options) = self.anchor_inputs(t, c, heads);
                let dout = self.random(&[1, t, heads * dv], 1.0);
                self.extra_bytes(|| read_both(&input, &options, &dout))
            });
            self.memory("anchor_read", bytes);
        }
    }

    fn attention(&mut self) {
        let (heads, d) = (8, 64);
        let name = "attention forward+backward";
        if !self.wants(name) {
            return;
        }
        let inputs = |bench: &mut Self, t: usize| {
            let [query, key, value, dout] = [(); 4].map(|()| bench.random(&[1, t, heads * d], 1.0));
            (Attention { query, key, value }, dout)
        };
        let forward = |input: &Attention<Tensor>, keep| {
            run(AttentionForward { input: input.clone(), options: heads.into(), keep })
        };
        let both = |input: &Attention<Tensor>, dout: &Tensor| {
            let (_, kept) = forward(input, true);
            run(AttentionBackward {
                input: input.clone(),
                options: heads.into(),
                kept,
                gradient: dout.clone(),
            })
        };
        let t = 4096;
        let (input, dout) = inputs(self, t);
        let flops = 2.0 * (t * t * heads * d) as f64;
        let ms = self.time(|| forward(&input, false));
        self.flops("attention forward", ms, flops);
        let ms = self.time(|| both(&input, &dout));
        self.flops(name, ms, 3.5 * flops);
        let bytes = [t, 2 * t].map(|t| {
            let (input, dout) = inputs(self, t);
            self.extra_bytes(|| both(&input, &dout))
        });
        self.memory("attention", bytes);
    }

    /// Operations that memory bounds, on arrays of 32 MiB; bytes are those of inputs and outputs, once each.
    fn memory_bound(&mut self) {
        let (rows, width) = (8192, 1024);
        let array = (rows * width * 4) as f64;
        let x = self.random(&[1, rows, width], 1.0);
        let gate = self.random(&[1, rows, width], 1.0);
        let dy = self.random(&[1, rows, width], 1.0);
        let weight = self.random(&[width], 1.0);
        let kernel = self.random(&[width, 1, 4], 0.5);
        if self.wants("rms_norm forward+backward") {
            let input = || RmsNorm { x: vec![x.clone()], weight: weight.clone(), eps: 1e-6 };
            let backward =
                || RmsNormBackward { forward: input(), gradients: vec![dy.clone()], dx: vec![None] };
            let ms = self.time(|| (run(input()), run(backward())));
            self.bytes("rms_norm forward+backward", ms, 5.0 * array);
        }
        if self.wants("swiglu forward+backward") {
            let input = || SwiGlu { gates: vec![gate.clone()], ups: vec![x.clone()] };
            let backward = || SwiGluBackward { forward: input(), gradients: vec![dy.clone()] };
            let ms = self.time(|| (run(input()), run(backward())));
            self.bytes("swiglu forward+backward", ms, 8.0 * array);
        }
        if self.wants("short_conv forward+backward") {
            let input = || ShortConv { x: x.clone(), weight: kernel.clone(), tail: None };
            let backward = || ShortConvBackward { inputs: vec![input()], gradients: vec![dy.clone()] };
            let ms = self.time(|| (x.short_conv(&kernel, None), run(backward())));
            self.bytes("short_conv forward+backward", ms, 5.0 * array);
        }
        if self.wants("adamw") {
            let mut state = [(); 3].map(|()| self.random(&[rows, width], 0.1));
            state[2] = Tensor::full(&[rows, width], 0.1, &self.device).expect("a shape that fits");
            let step = Step {
                learning_rate: 1e-3,
                betas: [0.9, 0.95],
                eps: 1e-8,
                weight_decay: 0.1,
                clip: 1.0,
                step: 10,
            };
            let gradient = self.random(&[rows, width], 0.1);
            let ms = self.time(|| {
                let [parameter, first_moment, second_moment] = &mut state;
                adamw::update(AdamW { parameter, first_moment, second_moment }, &gradient, &step)
            });
            self.bytes("adamw", ms, 7.0 * array);
        }
    }

    fn cross_entropy(&mut self) {
        let (rows, width, vocabulary) = (2048, 512, 32_000);
        let name = format!("linear_cross_entropy forward+backward {rows}x{width}x{vocabulary}");
        if !self.wants(&name) {
            return;
        }
        let (x, weight) = (self.random(&[rows, width], 1.0), self.random(&[vocabulary, width], 0.05));
        let targets: Vec<u32> = (0..rows as u32).map(|i| i * 13 % vocabulary as u32).collect();
        let ms = self.time(|| {
            let (x, weight, targets) = (x.clone(), weight.clone(), targets.clone());
            run(LinearCrossEntropy { x, weight, targets, normaliser: None, needs: [true, true] })
        });
        self.flops(&name, ms, 6.0 * (rows * width * vocabulary) as f64);
    }

    /// The time of an earlier line.
    fn ms(&self, name: &str) -> Option<f64> {
        self.results.iter().find(|r| r["name"] == name).and_then(|r| r["ms"].as_f64())
    }

    /// Peak extra bytes at T and at 2T.
    fn memory(&mut self, name: &str, bytes: [usize; 2]) {
        for (which, bytes) in ["T", "2T"].iter().zip(bytes) {
            self.note(&format!("  {name} extra memory at {which}"), bytes as f64 / (1 << 20) as f64, "MiB");
        }
        self.note(&format!("  {name} memory at 2T / at T"), bytes[1] as f64 / bytes[0] as f64, "x");
    }
}

fn read(
    input: &AnchorRead<Tensor>,
    options: &AnchorReadOptions,
    keep: bool,
) -> <AnchorReadForward as Op>::Output {
    run(AnchorReadForward { input: input.clone(), options: options.clone(), keep })
}

/// Forward and backward.
fn read_both(input: &AnchorRead<Tensor>, options: &AnchorReadOptions, dout: &Tensor) -> AnchorRead<Tensor> {
    let (readout, kept) = read(input, options, true);
    let (input, options, gradient) = (input.clone(), options.clone(), dout.clone());
    run(AnchorReadBackward { input, options, readout, kept, gradient })
}

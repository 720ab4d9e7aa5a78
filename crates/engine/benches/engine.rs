//! `cargo bench --workspace --bench engine`: the machine's own peak first, then every operation as a share of it.
//!
//! After `--`: `--threads N` (default: all of the machine's), `--only TEXT` (operations whose name holds TEXT),
//! `--quick` (one run each, without the longest), `--json FILE`. Times are the best of several runs; nothing here asserts a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use march_engine::ops::adamw::{AdamW, Step};
use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions, ReadPlan};
use march_engine::ops::attention::Attention;
use march_engine::ops::cross_entropy::LinearCrossEntropy;
use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaGradient, GatedDeltaOptions};
use march_engine::ops::linear::Linear;
use march_engine::ops::log_linear::{LogLinear, LogLinearOptions};
use march_engine::ops::rms_norm::RmsNormList;
use march_engine::ops::short_conv::ShortConv;
use march_engine::ops::swiglu::SwiGlu;
use march_engine::{Cpu, CpuOptions, Engine, Machine, Products, Tensor};

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
    let cpu = Cpu::new(CpuOptions { threads, ..Default::default() }).expect("the machine's threads");
    let machine = Machine::measure(&cpu, None);
    cpu.trim();
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
    let mut bench = Bench { cpu, machine, only, quick, json, results: Vec::new(), seed: 1 };
    bench.linear();
    bench.gated_delta();
    bench.log_linear();
    bench.anchor_read();
    bench.attention();
    bench.memory_bound();
    bench.cross_entropy();
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

    /// The best time of several runs, in milliseconds; of two when a run takes seconds.
    fn time<R>(&self, mut f: impl FnMut(&Cpu) -> R) -> f64 {
        let cpu = &self.cpu;
        if !self.quick {
            drop(f(cpu));
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
                final_state: true,
                chunk_offset: 0,
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
        let input = Linear { x: &x, weight: &weight, bias: None };
        let flops = 2.0 * (rows * inner * outer) as f64;
        let mut out = vec![0.0f32; rows * outer];
        let threads = self.cpu.threads();
        let share = rows.div_ceil(threads);
        let bare = self.time(|_| {
            std::thread::scope(|scope| {
                for (x, y) in x.data().chunks(share * inner).zip(out.chunks_mut(share * outer)) {
                    let weight = weight.data();
                    scope.spawn(move || bare_product(y, x, weight, inner, outer));
                }
            });
        });
        let ms = self.time(|cpu| cpu.linear(input));
        self.flops(&name, ms, flops);
        self.flops("  bare gemm-f32 product", bare, flops);
        self.note("  linear as a share of the bare product", bare / ms * 100.0, "%");
        let invariant = CpuOptions {
            threads: self.cpu.threads(),
            products: Products::BatchInvariant,
            ..Default::default()
        };
        let cpu = Cpu::new(invariant).expect("the machine's threads");
        let ms = self.time(|_| cpu.linear(input));
        self.flops("  batch-invariant (inference)", ms, flops);
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
        let forward = self.time(|cpu| cpu.log_linear_delta(input.as_ref(), &options, None, false));
        self.flops("log_linear_delta forward d=64", forward, 6.0 * (d * d * t * heads) as f64);
        let ms = self.time(|cpu| {
            let out = cpu.log_linear_delta(input.as_ref(), &options, None, true).expect("shapes that fit");
            cpu.log_linear_delta_backward(input.as_ref(), &options, None, out.saved.as_ref(), &dout)
        });
        self.flops(&name, ms, 18.0 * (d * d * t * heads) as f64);
        if let Some(gated) = self.ms(&format!("gated_delta forward+backward d={d}")) {
            self.note("  times gated_delta", ms / gated, "x");
        }
    }

    fn anchor_inputs(&mut self, t: usize, c: usize, heads: usize) -> (AnchorRead<T>, AnchorReadOptions) {
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
            let input = borrow_read(&input);
            let dout = self.random(&[1, t, heads * dv], 1.0);
            let seen: usize = options.plan.segments.iter().map(|s| s.len * s.visible.len()).sum();
            let flops = (seen * heads * 2 * 64 * dv) as f64;
            let both = |cpu: &Cpu, options: &AnchorReadOptions| {
                let (out, kept) = cpu.anchor_read(input, options, true).expect("shapes that fit");
                cpu.anchor_read_backward(input, options, &out, kept.as_ref(), &dout)
            };
            let forward = self.time(|cpu| cpu.anchor_read(input, &options, false));
            self.flops(&name, forward, flops);
            let dense = self.time(|cpu| both(cpu, &options));
            self.flops(&format!("anchor_read dense forward+backward T={t}"), dense, 3.0 * flops);
            self.note("  times the forward", dense / forward, "x");
            options.top_k = Some(4);
            let read = (t - c) as f64 * 4.0 * (heads * 2 * 64 * dv) as f64;
            let ms = self.time(|cpu| cpu.anchor_read(input, &options, false));
            self.flops(&format!("anchor_read top-4 forward T={t}"), ms, read);
            let sparse = self.time(|cpu| both(cpu, &options));
            self.flops(&format!("anchor_read top-4 forward+backward T={t}"), sparse, 3.0 * read);
            self.note("  times faster than dense", dense / sparse, "x");
        }
        if self.wants("anchor_read memory") {
            let bytes = [8192, 16_384].map(|t| {
                let (input, options) = self.anchor_inputs(t, c, heads);
                let input = borrow_read(&input);
                let dout = self.random(&[1, t, heads * dv], 1.0);
                self.extra_bytes(|cpu| {
                    let (out, kept) = cpu.anchor_read(input, &options, true).expect("shapes that fit");
                    cpu.anchor_read_backward(input, &options, &out, kept.as_ref(), &dout)
                })
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
        let inputs = |bench: &mut Self, t: usize| [(); 4].map(|()| bench.random(&[1, t, heads * d], 1.0));
        let t = 4096;
        let [query, key, value, dout] = inputs(self, t);
        let input = Attention { query: &query, key: &key, value: &value };
        let flops = 2.0 * (t * t * heads * d) as f64;
        let ms = self.time(|cpu| cpu.attention(input, heads, false));
        self.flops("attention forward", ms, flops);
        let ms = self.time(|cpu| {
            let (_, saved) = cpu.attention(input, heads, true).expect("shapes that fit");
            cpu.attention_backward(input, heads, &saved, &dout)
        });
        self.flops(name, ms, 3.5 * flops);
        let bytes = [t, 2 * t].map(|t| {
            let [query, key, value, dout] = inputs(self, t);
            let input = Attention { query: &query, key: &key, value: &value };
            self.extra_bytes(|cpu| {
                let (_, saved) = cpu.attention(input, heads, true).expect("shapes that fit");
                cpu.attention_backward(input, heads, &saved, &dout)
            })
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
            let input = RmsNormList { x: &[&x], weight: &weight };
            let ms = self.time(|cpu| {
                (cpu.rms_norm(input, 1e-6), cpu.rms_norm_backward(input, 1e-6, &[&dy], &mut [None]))
            });
            self.bytes("rms_norm forward+backward", ms, 5.0 * array);
        }
        if self.wants("swiglu forward+backward") {
            let input = [SwiGlu { gate: &gate, up: &x }];
            let ms = self.time(|cpu| (cpu.swiglu(&input), cpu.swiglu_backward(&input, &[&dy])));
            self.bytes("swiglu forward+backward", ms, 8.0 * array);
        }
        if self.wants("short_conv forward+backward") {
            let input = [ShortConv { x: &x, weight: &kernel, tail: None }];
            let ms = self.time(|cpu| (cpu.short_conv(&input), cpu.short_conv_backward(&input, &[&dy])));
            self.bytes("short_conv forward+backward", ms, 5.0 * array);
        }
        if self.wants("adamw") {
            let mut state = [(); 3].map(|()| self.random(&[rows, width], 0.1));
            state[2] = self.cpu.full(&[rows, width], 0.1).expect("a shape that fits");
            let step = Step {
                learning_rate: 1e-3,
                betas: [0.9, 0.95],
                eps: 1e-8,
                weight_decay: 0.1,
                clip: 1.0,
                step: 10,
            };
            let gradient = self.random(&[rows, width], 0.1);
            let ms = self.time(|cpu| {
                let [parameter, first_moment, second_moment] = &mut state;
                cpu.adamw(AdamW { parameter, first_moment, second_moment }, &gradient, &step)
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
        let input = LinearCrossEntropy { x: &x, weight: &weight };
        let ms = self.time(|cpu| cpu.linear_cross_entropy(input, &targets, None, [true, true]));
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

fn borrow_read(input: &AnchorRead<T>) -> AnchorRead<&T> {
    AnchorRead {
        query: &input.query,
        routing_query: &input.routing_query,
        routing_keys: &input.routing_keys,
        anchor_states: &input.anchor_states,
        null_score: input.null_score.as_ref(),
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

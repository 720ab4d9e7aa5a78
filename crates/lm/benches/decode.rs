//! `cargo bench -p march-lm --bench decode`: decoding and prefill as shares of what the machine can do.
//!
//! After `--`: `--threads N` (default: all of the machine's), `--paper` (also the paper's MARCH with random weights:
//! 3.3 GB as f32), `--only TEXT` (sections whose name holds TEXT), `--tokens N` (tokens that the paper's model
//! decodes), `--profile` (decodes with the small model only, for ten seconds), `--rows N` (with `--profile`: decodes N
//! sequences of tiny/march in one step; with `--paper`, of paper/march with int8 weights), `--logits DIR` (only
//! `Pipeline::logits` of that checkpoint, as `bench/peers/python.py --logits DIR` measures it from Python). Times are the best
//! of several runs; nothing here asserts a time.

use std::ops::ControlFlow;
use std::time::Instant;

use march_lm::anchors::Policy;
use march_lm::engine::{Cpu, CpuOptions, Device, Machine, Precision, Products, Tensor};
use march_lm::memory::StateBank;
use march_lm::model::{Batch, Model, ModelConfig, Parameters, Part, Settings, Weights};
use march_lm::pipeline::OpenOptions;
use march_lm::{Config, Pipeline};

const ALL: [Precision; 5] = Precision::ALL;

struct Bench {
    threads: usize,
    tokens: usize,
    device: Device,
    machine: Machine,
    only: Option<String>,
}

fn main() {
    let (mut threads, mut paper, mut only, mut tokens, mut profile, mut rows) =
        (0, false, None, 12, false, 0);
    let mut logits = None;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--threads" => threads = args.next().and_then(|v| v.parse().ok()).unwrap_or(0),
            "--tokens" => tokens = args.next().and_then(|v| v.parse().ok()).unwrap_or(tokens),
            "--paper" => paper = true,
            "--profile" => profile = true,
            "--rows" => rows = args.next().and_then(|v| v.parse().ok()).unwrap_or(0),
            "--only" => only = args.next(),
            "--logits" => logits = args.next(),
            _ => {} // cargo passes --bench
        }
    }
    let options = CpuOptions { threads, products: Products::BatchInvariant, ..Default::default() };
    let device = Device::cpu(options).expect("the machine's threads");
    if let Some(folder) = logits {
        return time_logits(&folder, device);
    }
    let cpu = cpu(&device);
    let machine = Machine::measure(cpu, None);
    device.trim();
    println!(
        "{} threads, {:?} kernels: {:.1} GFLOP/s FMA peak ({}), {:.1} GB/s read",
        cpu.threads(),
        cpu.level(),
        machine.peak_gflops,
        machine.instructions,
        machine.read_gbs
    );
    let bench = Bench { threads, tokens, device, machine, only };
    match (profile, rows) {
        (false, _) => {}
        (true, 0) => return bench.profile(),
        (true, rows) if paper => return bench.profile_rows("paper/march", Precision::Int8, rows),
        (true, rows) => return bench.profile_rows("tiny/march", Precision::F32, rows),
    }
    bench.small();
    bench.many_anchors();
    bench.batches("tiny/march", &[Precision::F32], 60);
    bench.prefill("tiny/march", 2048);
    if paper {
        bench.paper();
        bench.batches("paper/march", &[Precision::F32, Precision::Int8], 4);
        bench.prefill("paper/march", 512);
    }
}

fn time_logits(folder: &str, device: Device) {
    let options = OpenOptions { device: Some(device), ..Default::default() };
    let pipeline = Pipeline::open_with(folder, options).expect("a checkpoint");
    let ids: Vec<u32> = (0..2048).map(|i| i * i % 251).collect();
    let time = |_| {
        let start = Instant::now();
        let logits = pipeline.logits(&ids, &mut |_| ControlFlow::Continue(())).expect("ids that fit");
        assert_eq!(logits.len(), ids.len() * pipeline.model().config().vocab_size);
        start.elapsed().as_secs_f64()
    };
    let mut seconds: Vec<f64> = (0..30).map(time).collect();
    seconds.sort_by(f64::total_cmp);
    println!(
        "Pipeline::logits, 2,048 tokens: best {:.2} ms, median {:.2} ms",
        1e3 * seconds[0],
        1e3 * seconds[15]
    );
}

fn cpu(device: &Device) -> &Cpu {
    device.backend().expect("it is a CPU")
}

/// A MARCH of fewer than a million weights.
fn small() -> ModelConfig {
    let text = r#"{"model_type": "march", "vocab_size": 257, "hidden_size": 128, "num_hidden_layers": 4,
        "intermediate_size": 352, "norm_eps": 1e-6, "tie_word_embeddings": false, "initializer_range": 0.05,
        "num_heads": 2, "head_dim": 32, "expand_v": 2.0, "conv_size": 4, "anchor_interval": 512,
        "routing_dim": 16}"#;
    ModelConfig::from_json(text, "small").expect("keys that fit")
}

/// A sequence that decodes.
struct Decoder<'a> {
    model: &'a Model,
    weights: Weights,
    bank: StateBank,
}

impl<'a> Decoder<'a> {
    fn new(model: &'a Model, parameters: &[Tensor], policy: Policy) -> Self {
        let bank = model.bank(policy).expect("a policy that fits");
        Self { model, weights: parameters.into(), bank }
    }

    fn read(&mut self, count: usize) {
        let ids: Vec<u32> = (0..count).map(|i| (i * i % 251) as u32).collect();
        for ids in ids.chunks(1024) {
            let bank = &mut [&mut self.bank];
            self.model.extend(&self.weights, Batch::one(ids), bank, None).expect("ids that fit");
        }
    }

    /// One token and the logits that follow it.
    fn step(&mut self, id: u32) {
        let (model, weights) = (self.model, &self.weights);
        let bank = &mut [&mut self.bank];
        let hidden = model.extend(weights, Batch::one(&[id]), bank, None).expect("an id that fits");
        std::hint::black_box(model.logits(weights, &hidden).expect("shapes that fit"));
    }

    /// Seconds a token, over `count` tokens; the best of `runs` runs.
    fn time(&mut self, runs: usize, count: usize) -> f64 {
        let run = |decoder: &mut Self| {
            let start = Instant::now();
            (0..count).for_each(|i| decoder.step((i * 7 % 251) as u32));
            start.elapsed().as_secs_f64() / count as f64
        };
        (0..runs).map(|_| run(self)).fold(f64::INFINITY, f64::min)
    }
}

impl Bench {
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    fn small(&self) {
        if !self.wants("small") {
            return;
        }
        let model = Model::new(&small());
        let parameters = model.init(&self.device, 1).expect("shapes that fit");
        println!("\nsmall MARCH, {} weights, 32 anchors, µs a token", model.parameter_count());
        for (name, top_k) in [("dense", None), ("top-4", Some(4))] {
            let policy = Policy { top_k, ..model.policy() };
            let mut times = Vec::new();
            for weights in ALL {
                let parameters = model.quantize(parameters.clone(), weights).expect("finite");
                let mut decoder = Decoder::new(&model, &parameters, policy.clone());
                decoder.read(32 * 512);
                times.push(decoder.time(30, 16) * 1e6);
            }
            println!("  {name}: f32 {:.1}, bf16 {:.1}, int8 {:.1}", times[0], times[1], times[2]);
        }
    }

    fn many_anchors(&self) {
        if !self.wants("anchors") {
            return;
        }
        let model = Model::new(&small());
        let parameters = model.init(&self.device, 1).expect("shapes that fit");
        println!("\nsmall MARCH, top-4, an anchor every 16 tokens, µs a token");
        let mut times = Vec::new();
        for anchors in [32, 4096] {
            let policy = Policy { interval: Some(16), top_k: Some(4), ..model.policy() };
            let mut decoder = Decoder::new(&model, &parameters, policy);
            decoder.read(anchors * 16);
            times.push(decoder.time(if anchors == 32 { 8 } else { 40 }, 16) * 1e6);
        }
        println!(
            "  32 anchors {:.1}, 4096 anchors {:.1}: {:.2} times",
            times[0],
            times[1],
            times[1] / times[0]
        );
    }

    /// Several sequences in one step, and a slice of a prompt beside them.
    fn batches(&self, preset: &str, precisions: &[Precision], steps: usize) {
        if !self.wants("batches") {
            return;
        }
        let config = Config::load(preset).expect("a preset").model;
        let model = Model::new(&config);
        let ids: Vec<u32> = (0..1024).map(|i| (i * i % 251) as u32).collect();
        for &weights in precisions {
            let parameters = self.packed(&model, weights);
            let bound = parameters.into();
            println!(
                "\n{preset}, {weights} weights: sequences that decode in one step, 200 tokens each before it"
            );
            let step = |banks: &mut [StateBank], slice: usize| {
                let mut parts: Vec<_> = banks.iter_mut().map(|bank| Part::new(&ids[..1], bank)).collect();
                if slice > 0 {
                    let last = parts.len() - 1;
                    parts[last].ids = &ids[..slice];
                }
                let start = Instant::now();
                let hidden = model.step(&bound, &mut parts).expect("ids that fit");
                std::hint::black_box(model.logits(&bound, &hidden).expect("shapes that fit"));
                start.elapsed().as_secs_f64()
            };
            let mut bank = model.bank(model.policy()).expect("its own policy");
            model.step(&bound, &mut [Part::new(&ids[..200], &mut bank)]).expect("ids that fit");
            let time = |count: usize, slice: usize, steps: usize| {
                let mut banks = vec![bank.clone(); count];
                step(&mut banks, 0);
                let first = banks.clone();
                let once = |_| {
                    if slice > 0 {
                        banks = first.clone();
                    }
                    step(&mut banks, slice)
                };
                (0..steps).map(once).fold(f64::INFINITY, f64::min)
            };
            let one = time(1, 0, steps);
            for count in [1, 2, 4, 8, 16] {
                let seconds = if count == 1 { one } else { time(count, 0, steps) };
                println!(
                    "  {count:2}: {:9.1} tokens/s, {:.2} times one sequence's, {:.3} ms a step",
                    count as f64 / seconds,
                    count as f64 * one / seconds,
                    seconds * 1e3
                );
            }
            let few = steps.min(12);
            let (together, prompt, seven) = (time(8, 512, few), time(1, 512, few), time(7, 0, few));
            println!(
                "  7 and a slice of 512 tokens of a prompt: {:.2} ms, {:.2} times both apart ({:.2} + {:.2} ms)",
                together * 1e3,
                together / (prompt + seven),
                seven * 1e3,
                prompt * 1e3
            );
        }
    }

    /// The weights of a new model in a precision, made one tensor at a time.
    fn packed(&self, model: &Model, weights: Precision) -> Parameters {
        self.device.trim();
        let tensors = model.layout().iter().enumerate().map(|(i, spec)| {
            let tensor = Tensor::from_slice(&model.initial(i, 1), &spec.shape, &self.device)?;
            let plain = weights == Precision::F32 || !spec.is_matrix();
            if plain { Ok(tensor) } else { tensor.pack(weights) }
        });
        tensors.collect::<march_lm::engine::Result<_>>().expect("finite numbers")
    }

    fn prefill(&self, preset: &str, tokens: usize) {
        if !self.wants("prefill") {
            return;
        }
        let config = Config::load(preset).expect("a preset").model;
        let model = Model::new(&config);
        let ids: Vec<u32> = (0..tokens).map(|i| (i * i % 251) as u32).collect();
        let training =
            Device::cpu(CpuOptions { threads: self.threads, ..Default::default() }).expect("threads");
        let parameters = model.init(&training, 1).expect("shapes that fit");
        let best = |f: &mut dyn FnMut()| {
            let time = |f: &mut dyn FnMut()| {
                let start = Instant::now();
                f();
                start.elapsed().as_secs_f64()
            };
            (0..4).map(|_| time(f)).fold(f64::INFINITY, f64::min)
        };
        let forward = best(&mut || {
            let weights = parameters.as_slice().into();
            let settings = Settings { policy: model.policy(), ..Settings::default() };
            model.forward(&weights, Batch::one(&ids), &settings, None).expect("ids that fit");
        });
        println!("\n{preset}, {tokens} tokens: training forward {:.0} tokens/s", tokens as f64 / forward);
        for weights in ALL {
            let parameters = self.packed(&model, weights);
            let prefill = best(&mut || {
                let mut decoder = Decoder::new(&model, &parameters, model.policy());
                decoder.read(tokens);
            });
            println!(
                "  prefill, {weights} weights: {:.0} tokens/s, {:.0} % of that",
                tokens as f64 / prefill,
                100.0 * forward / prefill
            );
        }
    }

    fn paper(&self) {
        if !self.wants("paper") {
            return;
        }
        let config = Config::load("paper/march").expect("a preset").model;
        let model = Model::new(&config);
        println!("\npaper/march, {} weights, no anchor yet", model.parameter_count());
        let mut first = None;
        // All but the embeddings, of which a token reads one row, and each layer's state.
        let table = &model.layout()[0];
        let state = model.memory_bytes(16, &model.policy());
        for weights in ALL {
            let parameters = self.packed(&model, weights);
            self.device.trim();
            let machine = Machine::measure(cpu(&self.device), None);
            self.device.trim();
            let mut decoder = Decoder::new(&model, &parameters, model.policy());
            decoder.read(16);
            decoder.step(1);
            let seconds = (0..self.tokens).map(|_| decoder.time(1, 1)).fold(f64::INFINITY, f64::min);
            let bytes = model.parameter_bytes(weights) - table.bytes(weights) + state;
            let rate = bytes as f64 / seconds / 1e9;
            let read = machine.read_gbs.max(self.machine.read_gbs);
            println!(
                "  {weights} weights: {:.2} tokens/s, {:.2} times f32; {rate:.1} GB/s of {read:.1}, {:.0} %",
                1.0 / seconds,
                *first.get_or_insert(seconds) / seconds,
                100.0 * rate / read,
            );
        }
    }

    fn profile_rows(&self, preset: &str, weights: Precision, rows: usize) {
        let model = Model::new(&Config::load(preset).expect("a preset").model);
        let parameters = self.packed(&model, weights);
        let weights = parameters.as_slice().into();
        let mut banks: Vec<_> =
            (0..rows).map(|_| model.bank(model.policy()).expect("its own policy")).collect();
        let (start, mut steps) = (Instant::now(), 0);
        while start.elapsed().as_secs() < 8 {
            if steps % 512 == 0 {
                banks.iter_mut().for_each(|bank| *bank = model.bank(model.policy()).expect("its own policy"));
            }
            let mut parts: Vec<_> = banks.iter_mut().map(|bank| Part::new(&[7], bank)).collect();
            let hidden = model.step(&weights, &mut parts).expect("ids that fit");
            std::hint::black_box(model.logits(&weights, &hidden).expect("shapes that fit"));
            steps += 1;
        }
        println!("{rows} rows: {:.1} µs a step", start.elapsed().as_secs_f64() * 1e6 / f64::from(steps));
    }

    fn profile(&self) {
        let model = Model::new(&small());
        let parameters = model.init(&self.device, 1).expect("shapes that fit");
        let policy = Policy { top_k: Some(4), ..model.policy() };
        let mut decoder = Decoder::new(&model, &parameters, policy);
        decoder.read(32 * 512);
        let start = Instant::now();
        let (mut best, mut count) = (f64::INFINITY, 0);
        while start.elapsed().as_secs() < 10 {
            // Back to the same place, so that no anchor comes in.
            let bank = decoder.bank.clone();
            for _ in 0..30 {
                best = best.min(decoder.time(1, 16));
                count += 16;
            }
            decoder.bank = bank;
        }
        println!("{count} tokens, {:.1} µs a token at best", best * 1e6);
    }
}

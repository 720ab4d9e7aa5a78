//! `cargo bench -p march-lab --bench eval`: scoring requests, with and without shared contexts, as a share of the training
//! forward pass.
//!
//! The requests have the shapes of PIQA (a context of about 20 tokens, two continuations of 25) and HellaSwag (85
//! tokens, four of 35). After `--`: `--threads N` (default: all of the machine's), `--paper` (also the paper's Gated
//! DeltaNet with random weights, 3.2 GB as f32), `--peer FILE` (writes the HellaSwag requests of tiny/gdn as JSON, for
//! bench/peers/eval.py), `--quick` (a few requests, once). Times are the best of several runs; nothing here asserts a
//! time.

use std::ops::ControlFlow;
use std::time::Instant;

use march_lab::eval::{Encoded, Scheduler};
use march_lm::Config;
use march_lm::engine::{Cpu, CpuOptions, Device, Products};
use march_lm::generate::Inference;
use march_lm::model::{Batch, Model, Settings};
use march_lm::tokenizer::Tokenizer;

/// Name, tokens of a context, number of continuations, tokens of each.
const SHAPES: [(&str, usize, usize, usize); 2] = [("PIQA", 20, 2, 25), ("HellaSwag", 85, 4, 35)];

fn main() {
    let (mut threads, mut paper, mut peer, mut quick) = (0, false, None, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--threads" => threads = args.next().and_then(|v| v.parse().ok()).unwrap_or(0),
            "--paper" => paper = true,
            "--peer" => peer = args.next(),
            "--quick" => quick = true,
            _ => {} // cargo passes --bench
        }
    }
    let scoring =
        Device::cpu(CpuOptions { threads, products: Products::BatchInvariant, ..Default::default() })
            .expect("threads");
    let training = Device::cpu(CpuOptions { threads, ..Default::default() }).expect("threads");
    let cpu = scoring.backend::<Cpu>().expect("a CPU");
    println!("{} threads, {:?}", cpu.threads(), cpu.level());
    let (count, runs) = if quick { (4, 1) } else { (64, 5) };
    if let Some(path) = peer {
        let requests: Vec<_> =
            requests(SHAPES[1], count).iter().map(|(_, request)| sequences(request)).collect();
        std::fs::write(&path, format!("{requests:?}")).expect("a file that can be written");
    }
    for preset in ["tiny/gdn", "tiny/march"] {
        measure(&scoring, &training, preset, count, runs);
    }
    if paper {
        measure(&scoring, &training, "paper/gdn", 8, 1);
    }
}

/// Requests of a shape; lengths vary by a third.
fn requests(
    (_, context, choices, tokens): (&str, usize, usize, usize),
    count: usize,
) -> Vec<(usize, Encoded)> {
    let ids = |length: usize, seed: usize| -> Vec<u32> {
        (0..length).map(|i| ((i * i + 31 * seed + 7 * i) % 251) as u32).collect()
    };
    let vary = |length: usize, i: usize| length * 5 / 6 + (i * 7919) % (length / 3);
    (0..count)
        .map(|i| {
            let continuations = (0..choices).map(|j| ids(vary(tokens, 3 * i + j), 17 * i + j)).collect();
            (i, Encoded::Loglikelihood { context: ids(vary(context, i), i), continuations })
        })
        .collect()
}

/// Each continuation with its context, as a scorer without shared contexts reads them.
fn sequences(request: &Encoded) -> Vec<Vec<u32>> {
    let Encoded::Loglikelihood { context, continuations } = request else { return Vec::new() };
    continuations.iter().map(|one| [context.as_slice(), one].concat()).collect()
}

fn measure(scoring: &Device, training: &Device, preset: &str, count: usize, runs: usize) {
    let model = Model::new(&Config::load(preset).expect("a preset").model);
    let parameters = model.init(scoring, 1).expect("shapes that fit");
    let (tokenizer, policy) = (Tokenizer::bytes(), model.policy());
    // The training forward pass: whole sequences of 128 tokens, 2,048 in a batch, with the fastest product.
    let forward = {
        let weights = model.init(training, 1).expect("shapes that fit").into();
        let tokens = if runs > 1 { 2048 } else { 512 };
        let ids: Vec<u32> = (0..tokens).map(|i| (i * i % 251) as u32).collect();
        let settings = Settings::default();
        let once = || {
            let start = Instant::now();
            let batch = Batch { ids: &ids, rows: tokens / 128 };
            let hidden = model.forward(&weights, batch, &settings, None).expect("ids that fit");
            let loss = model.loss(&weights, &hidden, &ids, None).expect("shapes that fit");
            std::hint::black_box(loss);
            start.elapsed().as_secs_f64()
        };
        tokens as f64 / (0..=runs).map(|_| once()).fold(f64::INFINITY, f64::min)
    };
    println!("\n{preset}: the training forward pass reads {forward:.0} tokens/s");
    for shape in SHAPES {
        let requests = requests(shape, count);
        let tokens: usize = requests.iter().flat_map(|(_, r)| sequences(r)).map(|s| s.len()).sum();
        let shared: usize = requests.iter().map(|(_, r)| r.tokens()).sum();
        let time = |share: bool| {
            let inference = Inference::new(&model, &parameters);
            let mut scheduler = Scheduler::new(inference, &tokenizer, &policy);
            scheduler.share_contexts = share;
            let once = |_| {
                let start = Instant::now();
                scheduler.run(&requests, &mut |_| Ok(ControlFlow::Continue(()))).expect("requests that fit");
                start.elapsed().as_secs_f64()
            };
            (0..runs).map(once).fold(f64::INFINITY, f64::min)
        };
        let (separate, together) = (time(false), time(true));
        println!(
            "  {:<10} {:7.1} requests/s, {:.2} times as many as without shared contexts ({:.1}); \
             {:.0} % of the forward pass's tokens/s ({:.0} % without sharing)",
            shape.0,
            count as f64 / together,
            separate / together,
            count as f64 / separate,
            100.0 * shared as f64 / together / forward,
            100.0 * tokens as f64 / separate / forward,
        );
    }
}

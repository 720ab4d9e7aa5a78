//! `march demo --sweep`: the demo's models with several learning rates and seeds.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use march::Config;
use march::data::recall::Task;

use super::demo::{Learned, MODELS, Note, check_free, learn};
use crate::display::lines::duration;
use crate::display::out::{note, say};
use crate::interrupt;

/// One run of a sweep.
struct Job {
    model: usize,
    rate: f64,
    seed: u64,
    config: Config,
}

impl Job {
    /// The run's folder.
    fn folder(&self, all: &Path) -> PathBuf {
        all.join(format!("{}-{}-{}", MODELS[self.model].1, self.rate, self.seed))
    }
}

/// Trains every model with every rate and seed, one thread each, as many at a time as there are cores; prints one line
/// per run, then a table in Markdown.
pub fn sweep(
    configs: &[Config; 2],
    rates: &[f64],
    seeds: u64,
    folder: &Path,
    task: &Task,
    stop: &AtomicBool,
) -> anyhow::Result<()> {
    let mut jobs = Vec::new();
    for seed in 0..seeds {
        for &rate in rates {
            for (model, config) in configs.iter().enumerate() {
                let mut config = config.clone();
                (config.train.learning_rate, config.train.seed) = (rate, seed);
                jobs.push(Job { model, rate, seed, config });
            }
        }
    }
    jobs.iter().try_for_each(|job| check_free(&job.folder(folder)))?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let next = AtomicUsize::new(0);
    let (send, receive) = channel();
    let results = std::thread::scope(|scope| {
        for _ in 0..cores {
            let (send, jobs, next) = (send.clone(), &jobs, &next);
            scope.spawn(move || work(jobs, next, folder, task, stop, &send));
        }
        drop(send);
        let mut results: Vec<Option<f64>> = vec![None; jobs.len()];
        for (number, learned) in receive {
            let job = &jobs[number];
            if let Some(Learned { result, seconds, .. }) = learned? {
                results[number] = Some(result.accuracy);
                say!(
                    "{:<6} rate {:<8} seed {}   {:.1} % right   {}",
                    MODELS[job.model].0,
                    job.rate,
                    job.seed,
                    100.0 * result.accuracy,
                    duration(seconds)
                );
            }
        }
        anyhow::Ok(results)
    })?;
    if interrupt::asked() {
        note!("the sweep was stopped; the finished runs are in {}", folder.display());
        interrupt::leave();
    }
    table(&jobs, &results, rates, seeds, configs[0].train.steps);
    Ok(())
}

/// Works through the jobs one by one.
fn work(
    jobs: &[Job],
    next: &AtomicUsize,
    folder: &Path,
    task: &Task,
    stop: &AtomicBool,
    send: &Sender<(usize, anyhow::Result<Option<Learned>>)>,
) {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(job) = jobs.get(number) else { return };
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let run = job.folder(folder);
        let (silent, _listener) = channel::<(usize, Note)>();
        let learned = learn(0, &job.config, &run, task, 256, stop, &silent);
        if send.send((number, learned)).is_err() {
            return;
        }
    }
}

fn table(jobs: &[Job], results: &[Option<f64>], rates: &[f64], seeds: u64, steps: u64) {
    let seeds: Vec<u64> = (0..seeds).collect();
    let heads: Vec<String> = seeds.iter().map(|seed| format!(" seed {seed} |")).collect();
    say!("\n| model | learning rate |{} mean after {steps} steps |", heads.concat());
    say!("|---|---|{}---|", "---|".repeat(seeds.len()));
    for (model, (name, _)) in MODELS.iter().enumerate() {
        for &rate in rates {
            let of = |seed: u64| {
                let at = jobs.iter().position(|job| (job.model, job.rate, job.seed) == (model, rate, seed));
                at.and_then(|at| results[at]).unwrap_or(f64::NAN)
            };
            let all: Vec<f64> = seeds.iter().map(|&seed| 100.0 * of(seed)).collect();
            let cells: Vec<String> = all.iter().map(|share| format!(" {share:.1} % |")).collect();
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            say!("| {name} | {rate} |{} **{mean:.1} %** |", cells.concat());
        }
    }
}

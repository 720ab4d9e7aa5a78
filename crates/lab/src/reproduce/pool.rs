//! Carries out an experiment: the runs that choose learning rates, then the runs of the results, several side by side,
//! each on one thread, so that results do not depend on the number of cores.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use super::experiment::Evaluation;
use super::job::{Measured, Outcome, Row, carry_out, key};
use super::plan::{Entry, Job, Plan};
use march_lm::{Error, Result};

/// A finished run.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The run.
    pub job: Job,
    /// Its outcome.
    pub outcome: Outcome,
    /// Whether anything was trained or measured now.
    pub fresh: bool,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Progress {
    /// A part begins: its name, the number of runs and their tokens.
    Begun(&'static str, usize, f64),
    /// A run was finished.
    Finished(Box<Finished>),
    /// The rate that was chosen for an entry.
    Chosen(String, String, f64),
}

/// A learning rate that was tried: the rate, the validation loss and the validation accuracy.
pub type Tried = (f64, f64, f64);

/// The results of one arm on one course.
#[derive(Clone, Debug)]
pub struct Arm {
    /// The arm.
    pub arm: String,
    /// The course.
    pub course: String,
    /// The chosen rate.
    pub rate: f64,
    /// All rates that were tried; empty if the choice of another arm or course was used, or if there was only one.
    pub tried: Vec<Tried>,
    /// The runs by seed, from 1.
    pub runs: Vec<Outcome>,
}

/// The results of an experiment.
#[derive(Clone, Debug)]
pub struct Results {
    /// The plan.
    pub plan: Plan,
    /// All arms on all their courses.
    pub arms: Vec<Arm>,
}

impl Results {
    /// The values of a row's evaluation by seed, with memory and work: (value, bytes, FLOP per token).
    pub fn values(&self, row: &str, evaluation: &Evaluation) -> Vec<(f64, usize, f64)> {
        let found = self.measured(row, evaluation);
        found.iter().map(|m| (m.value, m.memory_bytes, m.flop_per_token)).collect()
    }

    /// The measurements of a row's evaluation by seed; empty if it does not concern the row.
    pub fn measured(&self, row: &str, evaluation: &Evaluation) -> Vec<&Measured> {
        let experiment = &self.plan.experiment;
        let variant = experiment.variant.iter().find(|variant| variant.name == row);
        let (arm, policy) = variant.map_or((row, ""), |variant| (&variant.of, &variant.policy));
        let Some(arm) = self.arms.iter().find(|found| found.arm == arm && found.course == evaluation.course)
        else {
            return Vec::new();
        };
        if !evaluation.concerns(row) {
            return Vec::new();
        }
        let key = key(evaluation, &self.plan.scale, policy);
        arm.runs.iter().filter_map(|run| run.find(&key)).collect()
    }
}

/// Carries out all runs that do not exist yet. `None` if `stop` was set in the meantime; what was done is kept.
pub fn carry_out_all(
    plan: &Plan,
    output: &Path,
    workers: usize,
    stop: &AtomicBool,
    watch: &mut dyn FnMut(Progress),
) -> Result<Option<Results>> {
    let sweep = plan.sweep()?;
    watch(Progress::Begun("choosing learning rates", sweep.len(), sweep.iter().map(Job::tokens).sum()));
    let Some(swept) = together(&sweep, plan, false, output, workers, stop, watch)? else { return Ok(None) };
    let mut chosen: Vec<(&Entry, f64, Vec<Tried>)> = Vec::new();
    for entry in &plan.entries {
        let (rate, tried) = choose(entry, &swept);
        chosen.push((entry, rate, tried));
    }
    let rate_of = |entry: &Entry| {
        let wanted = entry.rate_of.clone().unwrap_or_else(|| (entry.arm.clone(), entry.course.clone()));
        let found = chosen.iter().find(|(other, ..)| (&other.arm, &other.course) == (&wanted.0, &wanted.1));
        found.map_or(entry.rates[0], |found| found.1)
    };
    let mut jobs = Vec::new();
    for (entry, ..) in &chosen {
        let rate = rate_of(entry);
        watch(Progress::Chosen(entry.arm.clone(), entry.course.clone(), rate));
        jobs.extend(plan.results(entry, rate)?);
    }
    // Seed by seed, so that an interrupted experiment has some seeds of every arm.
    jobs.sort_by_key(|job| job.seed);
    watch(Progress::Begun("training with fresh seeds", jobs.len(), jobs.iter().map(Job::tokens).sum()));
    let Some(done) = together(&jobs, plan, true, output, workers, stop, watch)? else { return Ok(None) };
    let arms = chosen.iter().map(|(entry, _, tried)| {
        let own = done.iter().filter(|run| run.job.arm == entry.arm && run.job.course == entry.course);
        Arm {
            arm: entry.arm.clone(),
            course: entry.course.clone(),
            rate: rate_of(entry),
            tried: tried.clone(),
            runs: own.map(|run| run.outcome.clone()).collect(),
        }
    });
    let arms = arms.collect();
    Ok(Some(Results { plan: plan.clone(), arms }))
}

/// The rate with the lowest validation loss, and all that were tried.
fn choose(entry: &Entry, swept: &[Finished]) -> (f64, Vec<Tried>) {
    let own = swept.iter().filter(|run| run.job.arm == entry.arm && run.job.course == entry.course);
    let tried: Vec<Tried> =
        own.map(|run| (run.job.rate, run.outcome.validation_loss, run.outcome.validation_accuracy)).collect();
    let best = tried.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    (best.map_or(entry.rates[0], |best| best.0), tried)
}

/// Carries out runs on several threads; in the order of `jobs`. `None` if `stop` was set.
fn together(
    jobs: &[Job],
    plan: &Plan,
    measure: bool,
    output: &Path,
    workers: usize,
    stop: &AtomicBool,
    watch: &mut dyn FnMut(Progress),
) -> Result<Option<Vec<Finished>>> {
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let (send, receive) = channel();
    std::thread::scope(|scope| {
        for _ in 0..workers.clamp(1, jobs.len().max(1)) {
            let (send, next, failed) = (send.clone(), &next, &failed);
            scope.spawn(move || work(jobs, next, plan, measure, output, stop, failed, &send));
        }
        drop(send);
        let mut done: Vec<Option<Finished>> = vec![None; jobs.len()];
        let mut error = None;
        for (number, outcome) in receive {
            match outcome {
                Ok(Some((outcome, fresh))) => {
                    let finished = Finished { job: jobs[number].clone(), outcome, fresh };
                    watch(Progress::Finished(Box::new(finished.clone())));
                    done[number] = Some(finished);
                }
                Ok(None) => {}
                Err(found) => {
                    // The others save and stop.
                    failed.store(true, Ordering::Relaxed);
                    error.get_or_insert(found);
                }
            }
        }
        match error {
            Some(error) => Err(error),
            None => Ok(done.into_iter().collect()),
        }
    })
}

/// Takes one job after the other.
fn work(
    jobs: &[Job],
    next: &AtomicUsize,
    plan: &Plan,
    measure: bool,
    output: &Path,
    stop: &AtomicBool,
    failed: &AtomicBool,
    send: &Sender<(usize, Result<Option<(Outcome, bool)>>)>,
) {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(job) = jobs.get(number) else { return };
        if stop.load(Ordering::Relaxed) || failed.load(Ordering::Relaxed) {
            return;
        }
        let rows = if measure { rows_of(plan, job) } else { Vec::new() };
        let place = |error: Error| {
            let message = format!("{} on {}, rate {}, seed {}", job.arm, job.course, job.rate, job.seed);
            match error {
                Error::Request(why) => Error::Request(format!("{message}: {why}")),
                Error::Diverged(why) => Error::Diverged(format!("{message}: {why}")),
                other => other,
            }
        };
        let outcome = match carry_out(job, &rows, &plan.scale, output, stop) {
            // A rate that is too high is a result of the sweep.
            Err(Error::Diverged(_)) if !measure => Ok(Some((Outcome::diverged(), true))),
            outcome => outcome.map_err(place),
        };
        if send.send((number, outcome)).is_err() {
            return;
        }
    }
}

/// What is measured on a run: the arm itself and its variants.
fn rows_of<'a>(plan: &'a Plan, job: &Job) -> Vec<Row<'a>> {
    let experiment = &plan.experiment;
    let rows = experiment.rows().into_iter().filter_map(|(name, variant)| {
        let (arm, policy) = variant.map_or((name, ""), |variant| (&variant.of, &variant.policy));
        let evaluations =
            experiment.evaluations_of(&job.course).filter(|evaluation| evaluation.concerns(name)).collect();
        (arm == job.arm).then_some(Row { policy, evaluations })
    });
    rows.collect()
}

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
pub type TriedRate = (f64, f64, f64);

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
    pub tried: Vec<TriedRate>,
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
    let mut entries = plan.entries.clone();
    let mut begun = 0;
    let swept = loop {
        let sweep = plan.sweep(&entries)?;
        // Those of the last round are not repeated.
        let added = sweep.len() - begun;
        let tokens =
            sweep.iter().map(Job::own_tokens).sum::<f64>() * added as f64 / sweep.len().max(1) as f64;
        watch(Progress::Begun("choosing learning rates", added, tokens));
        begun = sweep.len();
        let Some(swept) = together(&sweep, plan, false, output, workers, stop, watch)? else {
            return Ok(None);
        };
        let extend = |entry: &mut Entry| {
            let (best, _) = choose(entry, &swept);
            entry.extend(best)
        };
        // All entries, not only the first that is extended.
        if entries.iter_mut().map(extend).filter(|extended| *extended).count() == 0 {
            break swept;
        }
    };
    let chosen: Vec<(&Entry, (f64, Vec<TriedRate>))> =
        entries.iter().map(|entry| (entry, choose(entry, &swept))).collect();
    let mut arms = Vec::new();
    let mut jobs = Vec::new();
    for (entry, (_, tried)) in &chosen {
        let (arm, course) = entry.rate_of.as_ref().map_or((&entry.arm, &entry.course), |of| (&of.0, &of.1));
        let found = chosen.iter().find(|(other, _)| (&other.arm, &other.course) == (arm, course));
        let rate = found.map_or(entry.rates[0], |(_, (rate, _))| *rate);
        let (arm, course) = (entry.arm.clone(), entry.course.clone());
        watch(Progress::Chosen(arm.clone(), course.clone(), rate));
        jobs.extend(plan.results(entry, rate)?);
        arms.push(Arm { arm, course, rate, tried: tried.clone(), runs: Vec::new() });
    }
    // Seed by seed, so that an interrupted experiment has some seeds of every arm.
    jobs.sort_by_key(|job| job.seed);
    watch(Progress::Begun("training with fresh seeds", jobs.len(), jobs.iter().map(Job::own_tokens).sum()));
    let Some(done) = together(&jobs, plan, true, output, workers, stop, watch)? else { return Ok(None) };
    for arm in &mut arms {
        let own = done.iter().filter(|run| run.job.arm == arm.arm && run.job.course == arm.course);
        arm.runs = own.map(|run| run.outcome.clone()).collect();
    }
    Ok(Some(Results { plan: plan.clone(), arms }))
}

/// The rate with the lowest mean validation loss, and all that were tried.
fn choose(entry: &Entry, swept: &[Finished]) -> (f64, Vec<TriedRate>) {
    let own = swept.iter().filter(|run| run.job.arm == entry.arm && run.job.course == entry.course);
    let mut rates: Vec<f64> = own.clone().map(|run| run.job.rate).collect();
    rates.sort_by(f64::total_cmp);
    rates.dedup();
    let mean = |rate: f64, of: fn(&Outcome) -> f64| {
        let seeds: Vec<f64> =
            own.clone().filter(|run| run.job.rate == rate).map(|run| of(&run.outcome)).collect();
        // Divided first: a diverged run counts as the largest number.
        seeds.iter().map(|value| value / seeds.len() as f64).sum::<f64>()
    };
    let one = |&rate: &f64| {
        (
            rate,
            mean(rate, |outcome| outcome.validation_loss),
            mean(rate, |outcome| outcome.validation_accuracy),
        )
    };
    let tried: Vec<TriedRate> = rates.iter().map(one).collect();
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
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let carry_out = |job: &Job| {
        let rows = if measure { rows_of(plan, job) } else { Vec::new() };
        let place = || format!("{} on {}, rate {}, seed {}", job.arm, job.course, job.rate, job.seed);
        carry_out(job, &rows, &plan.scale, output, stop).or_else(|error| match error {
            // A rate that is too high is a result of the sweep.
            Error::Diverged(_) if !measure => Ok(Some((Outcome::diverged(), true))),
            Error::Diverged(why) => Err(Error::Diverged(format!("{}: {why}", place()))),
            Error::Request(why) => Err(Error::Request(format!("{}: {why}", place()))),
            other => Err(other),
        })
    };
    // Takes one job after the other.
    let work = |send: Sender<_>| {
        let numbers = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        for (number, job) in numbers.map_while(|number| Some((number, jobs.get(number)?))) {
            let stopped = stop.load(Ordering::Relaxed) || failed.load(Ordering::Relaxed);
            if stopped || send.send((number, carry_out(job))).is_err() {
                return;
            }
        }
    };
    let (send, receive) = channel();
    std::thread::scope(|scope| {
        for _ in 0..workers.clamp(1, jobs.len().max(1)) {
            let (send, work) = (send.clone(), &work);
            scope.spawn(move || work(send));
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
        error.map_or_else(|| Ok(done.into_iter().collect()), Err)
    })
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

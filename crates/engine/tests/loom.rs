//! Models of the thread pool: loom runs each of them with every order of the threads' steps, and with every value that the
//! memory orderings allow an atomic load to return (`tests/sanitizers.sh`).
//!
//! A job touches cells that loom watches, without any synchronization of its own. An access that the pool does not order
//! before or after all others is therefore an error, and so is a worker that is in a job when `run` has returned.

#![cfg(loom)]
#![allow(unsafe_code)]

#[allow(dead_code)]
#[path = "../src/team.rs"]
mod team;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread::{spawn, yield_now};
use team::Team;

/// Checks `model` with at most `preemptions` switches away from a thread that could have gone on; all if `None`.
fn check(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 10_000;
    builder.check(model);
}

/// What the jobs of one region touch: a counter for each task, and which task is next.
struct Tasks {
    done: Vec<UnsafeCell<usize>>,
    next: AtomicUsize,
}

// SAFETY: loom reports accesses to a cell at the same time.
unsafe impl Sync for Tasks {}

impl Tasks {
    fn new(count: usize) -> Self {
        Self { done: (0..count).map(|_| UnsafeCell::new(0)).collect(), next: AtomicUsize::new(0) }
    }

    /// The job: claims tasks one by one, as the engine does, and returns how many it got.
    fn claim(&self) -> usize {
        let mut claimed = 0;
        while let Some(task) = self.done.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            // SAFETY: loom reports an access at the same time.
            task.with_mut(|times| unsafe { *times += 1 });
            claimed += 1;
        }
        claimed
    }

    /// After the region: every task ran once, and no thread touches them any more.
    fn finish(self) {
        for task in &self.done {
            // SAFETY: loom reports an access at the same time.
            assert_eq!(task.with_mut(|times| unsafe { std::mem::replace(&mut *times, usize::MAX) }), 1);
        }
    }
}

fn run_tasks(team: &Team, count: usize) {
    let tasks = Tasks::new(count);
    team.run(&|| _ = tasks.claim());
    tasks.finish();
}

#[test]
fn shutdown() {
    check(None, || drop(Team::new(2).unwrap()));
    check(Some(3), || drop(Team::new(3).unwrap()));
}

#[test]
fn every_task_runs_once() {
    check(None, || run_tasks(&Team::new(2).unwrap(), 2));
}

#[test]
fn two_workers() {
    check(Some(2), || run_tasks(&Team::new(3).unwrap(), 2));
}

/// The second region must not be entered with the job of the first.
#[test]
fn regions_in_a_row() {
    check(Some(3), || {
        let team = Team::new(2).unwrap();
        run_tasks(&team, 2);
        run_tasks(&team, 1);
    });
}

/// The caller waits for the worker inside the second region, whether or not the worker was in the first: a worker that is
/// not woken, or that passes over an open region, is an error.
#[test]
fn workers_take_part() {
    check(Some(3), || {
        let team = Team::new(2).unwrap();
        run_tasks(&team, 1);
        let inside = AtomicUsize::new(0);
        team.run(&|| {
            inside.fetch_add(1, Ordering::Relaxed);
            while inside.load(Ordering::Relaxed) < 2 {
                yield_now();
            }
        });
    });
}

#[test]
fn a_region_inside_a_region() {
    check(Some(3), || {
        let team = Team::new(2).unwrap();
        let tasks = Tasks::new(2);
        team.run(&|| {
            run_tasks(&team, 1);
            tasks.claim();
        });
        tasks.finish();
    });
}

#[test]
fn callers_side_by_side() {
    check(Some(2), || {
        let team = Arc::new(Team::new(2).unwrap());
        let other = {
            let team = Arc::clone(&team);
            spawn(move || run_tasks(&team, 1))
        };
        run_tasks(&team, 1);
        other.join().unwrap();
    });
}

/// Whichever thread panics, the caller gets the panic after all threads have left the region, and the next region runs.
#[test]
fn a_panic_reaches_the_caller() {
    check(Some(3), || {
        let team = Team::new(2).unwrap();
        let tasks = Tasks::new(1);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            team.run(&|| {
                if tasks.claim() > 0 {
                    resume_unwind(Box::new("as asked")); // does not print a message for each order
                }
            });
        }));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"as asked"));
        tasks.finish();
        run_tasks(&team, 1);
    });
}

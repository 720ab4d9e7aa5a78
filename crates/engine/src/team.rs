//! The engine's threads. A parallel region is often shorter than it takes to wake a sleeping thread, so workers
//! wait for the next region awake for a millisecond before they sleep; the calling thread works along.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker waits awake.
const AWAKE: Duration = Duration::from_millis(1);

type Job = *const (dyn Fn() + Sync);

/// What the caller and the workers share.
struct Shared {
    /// Counts regions; a worker that sees a new number runs the job.
    region: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    /// Workers that have not finished the job.
    running: AtomicUsize,
    stop: AtomicBool,
    asleep: Mutex<usize>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written by the caller only while no worker runs (`running` is 0), and read by workers only
// after the region's number, which is published after it.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// A caller and its workers.
pub(crate) struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller whose region is running.
    busy: Mutex<()>,
}

thread_local! {
    /// Whether this thread is inside a region: regions do not nest.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Team {
    /// A team of `threads`, the caller included.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            region: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            running: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            asleep: Mutex::new(0),
            wake: Condvar::new(),
            panic: Mutex::new(None),
        });
        let mut team = Self { shared, workers: Vec::new(), busy: Mutex::new(()) };
        for i in 1..threads {
            let shared = Arc::clone(&team.shared);
            let worker =
                std::thread::Builder::new().name(format!("march-{i}")).spawn(move || work(&shared))?;
            team.workers.push(worker);
        }
        Ok(team)
    }

    /// Runs `job` on every thread of the team at once and returns when all are done. Inside a region, or while
    /// another caller's region runs, the calling thread runs it alone.
    pub(crate) fn run(&self, job: &(dyn Fn() + Sync)) {
        let alone = self.workers.is_empty() || INSIDE.get();
        let busy = match self.busy.try_lock() {
            _ if alone => None,
            Ok(guard) => Some(guard),
            // A region panicked; its workers are done all the same.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let Some(_busy) = busy else {
            return job();
        };
        let shared = &*self.shared;
        // SAFETY: no worker runs, so nobody reads the job. The pointer's lifetime is cut off, but every worker
        // is done with it before this function returns, even when the job panics.
        unsafe {
            let job = std::mem::transmute::<*const (dyn Fn() + Sync + '_), Job>(job);
            *shared.job.get() = Some(job);
        }
        shared.running.store(self.workers.len(), Ordering::Relaxed);
        shared.region.fetch_add(1, Ordering::SeqCst);
        if *shared.asleep.lock().unwrap_or_else(PoisonError::into_inner) > 0 {
            shared.wake.notify_all();
        }
        INSIDE.set(true);
        let mine = catch_unwind(AssertUnwindSafe(job));
        INSIDE.set(false);
        let mut spins = 0u32;
        while shared.running.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < 1 << 14 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let theirs = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = mine.err().or(theirs) {
            resume_unwind(panic);
        }
    }
}

fn work(shared: &Shared) {
    let mut seen = 0;
    INSIDE.set(true);
    loop {
        let mut since = None;
        let mut spins = 0u32;
        while shared.region.load(Ordering::Acquire) == seen {
            if shared.stop.load(Ordering::Relaxed) {
                return;
            }
            spins += 1;
            if !spins.is_multiple_of(256) {
                std::hint::spin_loop();
            } else if since.get_or_insert_with(Instant::now).elapsed() > AWAKE {
                let mut asleep = shared.asleep.lock().unwrap_or_else(PoisonError::into_inner);
                *asleep += 1;
                while shared.region.load(Ordering::SeqCst) == seen && !shared.stop.load(Ordering::Relaxed) {
                    asleep = shared.wake.wait(asleep).unwrap_or_else(PoisonError::into_inner);
                }
                *asleep -= 1;
            }
        }
        seen = seen.wrapping_add(1);
        // SAFETY: the region's number was published after the job, and the caller keeps the job alive until
        // `running` is 0.
        let job = unsafe { (*shared.job.get()).map(|job| &*job) };
        if let Some(job) = job
            && let Err(panic) = catch_unwind(AssertUnwindSafe(job))
        {
            *shared.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        shared.running.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _asleep = self.shared.asleep.lock().unwrap_or_else(PoisonError::into_inner);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker's panic has already reached the caller of its region.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_every_region() {
        let team = Team::new(3).unwrap();
        let count = AtomicUsize::new(0);
        for round in 0..2000 {
            team.run(&|| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            if round % 700 == 0 {
                std::thread::sleep(2 * AWAKE); // the workers sleep and are woken
            }
        }
        assert_eq!(count.into_inner(), 3 * 2000);
    }

    #[test]
    fn regions_inside_regions_and_callers_side_by_side() {
        let team = Team::new(2).unwrap();
        let count = AtomicUsize::new(0);
        let add = || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        team.run(&|| team.run(&add));
        assert_eq!(count.load(Ordering::Relaxed), 2);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|_| team.run(&add)));
            }
        });
        assert!(count.into_inner() >= 402);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(2).unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| team.run(&|| panic!("as asked"))));
        assert!(panicked.is_err());
        let count = AtomicUsize::new(0);
        team.run(&|| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 2);
    }
}

//! Thread pool of the engine.
//!
//! A parallel region is often shorter than the time it takes to wake a sleeping thread. Workers therefore spin for
//! a millisecond after a region before they sleep, and the calling thread takes part in the work. When the caller
//! runs out of work, it closes the region and waits only for workers that have entered it. On a busy machine, where
//! a worker may not be scheduled for milliseconds, the caller thus does the work alone instead of waiting. So does the
//! caller in a forked process, which has no workers.
#![allow(unsafe_code)]

#[path = "team/fork.rs"] // for the programs of tests/ that include this file
mod fork;
#[path = "team/sync.rs"]
mod sync;

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sync::{
    Arc, AtomicBool, AtomicU64, Builder, Condvar, Instant, JoinHandle, LOOKS, Mutex, UnsafeCell, spin_loop,
    yield_now,
};

/// How long an idle worker spins before it sleeps.
const AWAKE: Duration = Duration::from_millis(1);

type Job = *const (dyn Fn() + Sync);

/// State of a parallel region in one word: sequence number (upper 32 bits), an open flag, and the number of workers
/// inside.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Region(u64);

impl Region {
    const OPEN: u64 = 1 << 31;

    fn number(self) -> u64 {
        self.0 >> 32
    }
    fn is_open(self) -> bool {
        self.0 & Self::OPEN != 0
    }
    fn workers(self) -> u64 {
        self.0 & (Self::OPEN - 1)
    }
    /// The next region: open, with no workers inside.
    fn next(self) -> Self {
        Self((self.number().wrapping_add(1) << 32) | Self::OPEN)
    }
}

/// A value on cache lines of its own, to avoid false sharing: spinning workers read the region state continuously.
#[repr(align(128))]
pub(crate) struct CacheAligned<T>(pub T);

impl<T> std::ops::Deref for CacheAligned<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// State shared by the caller and the workers.
struct Shared {
    /// Current region; see [`Region`].
    region: CacheAligned<AtomicU64>,
    job: CacheAligned<UnsafeCell<Option<Job>>>,
    stop: CacheAligned<AtomicBool>,
    asleep: CacheAligned<Mutex<usize>>,
    wake: Condvar,
    panic: CacheAligned<Mutex<Option<Box<dyn Any + Send>>>>,
}

// SAFETY: the caller writes `job` only while the region is closed and no worker is inside. Workers read it only
// inside a region, which is opened after the write with release ordering.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// A calling thread and its workers.
pub(crate) struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Locked by the caller whose region is running.
    busy: Mutex<()>,
    /// The number of forks when the workers were started.
    forks: u64,
}

sync::local! {
    /// Whether this thread is inside a region; regions do not nest.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Team {
    /// Creates a team of `threads` threads, including the caller.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            region: CacheAligned(AtomicU64::new(0)),
            job: CacheAligned(UnsafeCell::new(None)),
            stop: CacheAligned(AtomicBool::new(false)),
            asleep: CacheAligned(Mutex::new(0)),
            wake: Condvar::new(),
            panic: CacheAligned(Mutex::new(None)),
        });
        fork::count_forks();
        let mut team = Self { shared, workers: Vec::new(), busy: Mutex::new(()), forks: fork::forks() };
        for i in 1..threads {
            let shared = Arc::clone(&team.shared);
            let worker = Builder::new().name(format!("march-{i}")).spawn(move || work(&shared))?;
            team.workers.push(worker);
        }
        Ok(team)
    }

    /// Whether this process was forked from the one that has the workers.
    fn is_forked(&self) -> bool {
        fork::forks() != self.forks
    }

    /// Runs `job` on the calling thread and on all workers that enter before the caller is done, and returns when
    /// all of them are done. If called inside a region, while another caller's region runs, or in a forked process, only
    /// the calling thread runs it.
    pub(crate) fn run(&self, job: &(dyn Fn() + Sync)) {
        let alone = self.workers.is_empty() || self.is_forked() || INSIDE.with(Cell::get);
        // Never poisoned: it is released before a panic goes on.
        let busy = if alone { None } else { self.busy.try_lock().ok() };
        let Some(busy) = busy else {
            return job();
        };
        let shared = &*self.shared;
        // SAFETY: no worker is inside a region, so none reads the job. The transmute extends the pointer's
        // lifetime, but every worker is done with it before this function returns, even if the job panics.
        shared.job.with_mut(|cell| unsafe {
            *cell = Some(std::mem::transmute::<*const (dyn Fn() + Sync + '_), Job>(job));
        });
        let next = Region(shared.region.load(Ordering::Relaxed)).next();
        shared.region.store(next.0, Ordering::SeqCst);
        if *shared.asleep.lock().unwrap_or_else(PoisonError::into_inner) > 0 {
            shared.wake.notify_all();
        }
        INSIDE.with(|inside| inside.set(true));
        let mine = catch_unwind(AssertUnwindSafe(job));
        INSIDE.with(|inside| inside.set(false));
        let mut spins = 0u32;
        shared.region.fetch_and(!Region::OPEN, Ordering::Relaxed);
        while Region(shared.region.load(Ordering::Acquire)).workers() > 0 {
            spins += 1;
            if spins < 1 << 14 { spin_loop() } else { yield_now() }
        }
        let theirs = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(busy);
        if let Some(panic) = mine.err().or(theirs) {
            resume_unwind(panic);
        }
    }
}

fn work(shared: &Shared) {
    let mut seen = 0;
    INSIDE.with(|inside| inside.set(true));
    loop {
        let mut since = None;
        let mut spins = 0u32;
        while Region(shared.region.load(Ordering::Acquire)).number() == seen {
            if shared.stop.load(Ordering::Relaxed) {
                return;
            }
            spins += 1;
            if !spins.is_multiple_of(LOOKS) {
                spin_loop();
            } else if since.get_or_insert_with(Instant::now).elapsed() > AWAKE {
                let mut asleep = shared.asleep.lock().unwrap_or_else(PoisonError::into_inner);
                *asleep += 1;
                while Region(shared.region.load(Ordering::SeqCst)).number() == seen
                    && !shared.stop.load(Ordering::Relaxed)
                {
                    asleep = shared.wake.wait(asleep).unwrap_or_else(PoisonError::into_inner);
                }
                *asleep -= 1;
            }
        }
        let region = enter(shared);
        seen = region.number();
        if !region.is_open() {
            continue;
        }
        // SAFETY: the region was opened after the job was written, and the caller keeps the job alive and unchanged
        // while a worker is inside.
        let job = shared.job.with(|cell| unsafe { (*cell).map(|job| &*job) });
        if let Some(job) = job
            && let Err(panic) = catch_unwind(AssertUnwindSafe(job))
        {
            *shared.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        shared.region.fetch_sub(1, Ordering::Release);
    }
}

/// Enters the region if it is open, and returns it; if it is closed, the worker is not inside.
fn enter(shared: &Shared) -> Region {
    let mut region = Region(shared.region.load(Ordering::Relaxed));
    while region.is_open() {
        match shared.region.compare_exchange_weak(
            region.0,
            region.0 + 1,
            Ordering::Acquire,
            Ordering::Relaxed,
        ) {
            Ok(_) => break,
            Err(now) => region = Region(now),
        }
    }
    region
}

impl Drop for Team {
    fn drop(&mut self) {
        if self.is_forked() {
            // A thread that does not exist would never be joined.
            self.workers.drain(..).for_each(std::mem::forget);
            return;
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _asleep = self.shared.asleep.lock().unwrap_or_else(PoisonError::into_inner);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A panic in a job was already propagated to the caller of its region.
            let _ = worker.join();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Runs `count` tasks that threads claim one by one, as the engine does, and returns how often each ran.
    fn tasks(team: &Team, count: usize) -> Vec<usize> {
        let done: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
        let next = AtomicUsize::new(0);
        team.run(&|| {
            while let Some(task) = done.get(next.fetch_add(1, Ordering::Relaxed)) {
                task.fetch_add(1, Ordering::Relaxed);
            }
        });
        done.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_task_runs_once() {
        let team = Team::new(3).unwrap();
        for round in 0..2000 {
            assert!(tasks(&team, 1 + round % 7).iter().all(|&times| times == 1));
            if round % 700 == 0 {
                std::thread::sleep(2 * AWAKE); // let the workers fall asleep, so that they must be woken
            }
        }
    }

    /// A worker must take part: the caller waits for it inside the region.
    #[test]
    fn workers_take_part() {
        let team = Team::new(2).unwrap();
        let inside = AtomicUsize::new(0);
        team.run(&|| {
            inside.fetch_add(1, Ordering::SeqCst);
            while inside.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
        });
        assert_eq!(inside.into_inner(), 2);
    }

    #[test]
    fn regions_inside_regions_and_callers_side_by_side() {
        let team = Team::new(2).unwrap();
        let count = AtomicUsize::new(0);
        team.run(&|| {
            assert!(tasks(&team, 5).iter().all(|&times| times == 1));
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert!((1..=2).contains(&count.into_inner()));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    (0..100).for_each(|_| assert!(tasks(&team, 9).iter().all(|&times| times == 1)));
                });
            }
        });
    }

    /// A child has no workers to wait for: it computes, and ends the team, alone.
    #[test]
    #[cfg(unix)]
    fn a_forked_process_works_alone() {
        let team = Team::new(3).unwrap();
        assert!(tasks(&team, 9).iter().all(|&times| times == 1));
        // SAFETY: the child only computes, and ends without running what the parent's threads have left.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let right = tasks(&team, 9).iter().all(|&times| times == 1);
            drop(team);
            // SAFETY: it ends the process at once.
            unsafe { libc::_exit(i32::from(!right)) };
        }
        let mut status = -1;
        for _ in 0..600 {
            // SAFETY: waits for the child that was made above.
            if unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == child {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        if status != 0 {
            // SAFETY: the child was made above and has not ended.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        assert_eq!(status, 0, "the child hung, or computed something else");
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(2).unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| team.run(&|| panic!("as asked"))));
        assert!(panicked.is_err());
        assert!(tasks(&team, 9).iter().all(|&times| times == 1));
    }
}

//! Processes started by an MPI launcher.
//!
//! Only the training thread calls MPI. Gradients are collected in buckets; a full bucket is sent as a non-blocking sum,
//! and every later hand-over lets MPI make progress on it. Sums that are unfinished when the backward pass ends are
//! waited for.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ::mpi::collective::SystemOperation;
use ::mpi::environment::{Threading, Universe};
use ::mpi::request::{LocalScope, Request, scope};
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::*;

use super::{HandOver, Overlap, Ranks};
use crate::error::{Error, Result};

/// Prints a line to standard error; if that is closed, the line is lost and the job continues.
macro_rules! aside {
    ($($text:tt)*) => { drop(writeln!(std::io::stderr(), $($text)*)) };
}

/// Size of a bucket in numbers (1 MiB).
const BUCKET: usize = 1 << 18;
/// How long a process waits for the others: one of them may be writing a checkpoint.
const PATIENCE: Duration = Duration::from_secs(1800);

/// This process's membership in a job. A process that leaves without [`Job::finish`] or [`Job::abort`] waits for the
/// others.
pub struct Job {
    universe: Universe,
    /// Set when the process is asked to stop.
    asked: &'static AtomicBool,
}

impl Job {
    /// Joins the job; `asked` is set when this process is asked to stop.
    pub fn join(asked: &'static AtomicBool) -> Result<Self> {
        let Some((universe, threading)) = ::mpi::initialize_with_threading(Threading::Funneled) else {
            return Err(Error::Request("MPI is already running in this process".into()));
        };
        if threading < Threading::Funneled {
            let message =
                "this MPI library does not allow a process with threads; use one with thread support";
            return Err(Error::Request(message.into()));
        }
        Ok(Self { universe, asked })
    }

    /// All processes of the job.
    pub fn ranks(&self) -> Mpi {
        Mpi { world: self.universe.world(), asked: self.asked, sent: Vec::new(), summed: Vec::new() }
    }

    /// How many of the processes run on this machine.
    pub fn on_this_machine(&self) -> usize {
        let world = self.universe.world();
        world.split_shared(world.rank()).size() as usize
    }

    /// Leaves the job once all processes do.
    pub fn finish(self) {}

    /// Terminates all processes of the job.
    pub fn abort(self) -> ! {
        self.universe.world().abort(1)
    }
}

/// All processes of a job. The job must outlive this value.
pub struct Mpi {
    world: SimpleCommunicator,
    asked: &'static AtomicBool,
    sent: Vec<f32>,
    summed: Vec<f32>,
}

/// Starts the sum of a bucket.
fn send<'a, 's>(
    world: &SimpleCommunicator,
    scope: &'s LocalScope<'a>,
    sent: &'a [f32],
    summed: &'a mut [f32],
) -> Request<'a, [f32], &'s LocalScope<'a>> {
    world.immediate_all_reduce_into(scope, sent, summed, SystemOperation::sum())
}

/// Waits for a sum. A timeout ends the job, because buffers that MPI still holds cannot be freed.
fn wait<'a, D: ?Sized>(
    world: &SimpleCommunicator,
    asked: &AtomicBool,
    mut request: Request<'a, D, &LocalScope<'a>>,
) {
    let (began, mut said) = (Instant::now(), false);
    loop {
        request = match request.test() {
            Ok(_) => return,
            Err(request) => request,
        };
        let waited = began.elapsed();
        if asked.load(Ordering::Relaxed) && waited > Duration::from_millis(500) && !said {
            said = true;
            aside!(
                "rank {}: stop requested, but the other ranks do not answer: one of them may have died. \
                 Nothing is lost: the newest checkpoint is complete; start the job again with --resume",
                world.rank()
            );
        }
        if waited > PATIENCE {
            aside!(
                "rank {}: no answer from the other ranks for {} minutes; the job ends. Start it again with --resume",
                world.rank(),
                PATIENCE.as_secs() / 60
            );
            world.abort(1);
        }
        if waited > Duration::from_millis(1) {
            std::thread::yield_now();
        }
    }
}

impl Ranks for Mpi {
    fn rank(&self) -> usize {
        self.world.rank() as usize
    }

    fn count(&self) -> usize {
        self.world.size() as usize
    }

    fn sum(&mut self, values: &mut [f64]) -> Result<()> {
        let sent = values.to_vec();
        scope(|scope| {
            let sum = SystemOperation::sum();
            wait(
                &self.world,
                self.asked,
                self.world.immediate_all_reduce_into(scope, &sent[..], values, sum),
            );
        });
        Ok(())
    }

    fn sum_during(
        &mut self,
        numbers: usize,
        backward: &mut dyn FnMut(&mut HandOver<'_>) -> Result<()>,
    ) -> Result<(&[f32], Overlap)> {
        let (world, asked) = (&self.world, self.asked);
        self.sent.resize(numbers, 0.0);
        self.summed.resize(numbers, 0.0);
        let mut total = 0;
        let mut overlap = Overlap::default();
        scope(|scope| {
            let mut buckets = self.sent.chunks_mut(BUCKET).zip(self.summed.chunks_mut(BUCKET));
            let mut bucket = buckets.next();
            let mut filled = 0;
            let mut on_their_way = VecDeque::new();
            let mut first = None;
            let result = backward(&mut |mut part| {
                total += part.len();
                while let Some((sent, _)) = &mut bucket
                    && !part.is_empty()
                {
                    let count = part.len().min(sent.len() - filled);
                    sent[filled..filled + count].copy_from_slice(&part[..count]);
                    filled += count;
                    part = &part[count..];
                    if filled == sent.len()
                        && let Some((sent, summed)) = bucket.take()
                    {
                        first.get_or_insert_with(Instant::now);
                        on_their_way.push_back(send(world, scope, sent, summed));
                        (bucket, filled) = (buckets.next(), 0);
                    }
                }
                // MPI makes progress only while it is called.
                while let Some(request) = on_their_way.pop_front() {
                    if let Err(request) = Request::test(request) {
                        on_their_way.push_front(request);
                        break;
                    }
                }
            });
            if let Err(error) = result {
                aside!("rank {}: {error}", world.rank());
                world.abort(1);
            }
            let ended = Instant::now();
            if let Some((sent, summed)) = bucket
                && filled > 0
            {
                on_their_way.push_back(send(world, scope, &sent[..filled], &mut summed[..filled]));
            }
            on_their_way.into_iter().for_each(|request| wait(world, asked, request));
            overlap.waiting = ended.elapsed().as_secs_f64();
            overlap.sending = first.unwrap_or(ended).elapsed().as_secs_f64();
        });
        match self.summed.get(..total) {
            Some(summed) => Ok((summed, overlap)),
            None => {
                let message = format!("got {total} numbers, expected at most {numbers}");
                Err(Error::Request(message))
            }
        }
    }
}

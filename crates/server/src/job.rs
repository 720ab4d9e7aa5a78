//! Jobs: what a request wants of the model's thread, and what the thread tells about it.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use march_lm::anchors::{Anchor, Policy};
use march_lm::generate::{Limits, Sampling, StopReason};
use march_lm::model::MeanRouting;
use tokio::sync::mpsc::UnboundedSender;

use crate::metrics::Metrics;
use crate::prefix::CachedPrefix;

/// A prompt and what to do with it.
pub struct Job {
    /// The prompt; at least one token.
    pub prompt: Vec<u32>,
    /// Numbers of tokens after which a message ends: later prompts may depart there.
    pub ends: Vec<usize>,
    /// The memory policy.
    pub policy: Policy,
    /// A text that begins like the prompt, if the client continues a conversation.
    pub prefix: Option<CachedPrefix>,
    /// One entry for each text to write; empty to only read the prompt.
    pub choices: Vec<Sampling>,
    /// When a text ends.
    pub limits: Limits,
    /// Whether the log-probabilities of the prompt's tokens are wanted.
    pub score_prompt: bool,
    /// The number of most probable tokens to report with each token, if log-probabilities are wanted.
    pub top: Option<usize>,
    /// Whether the whole text is wanted at the end of each choice.
    pub whole: bool,
    /// Whether it is wanted which anchors each choice read.
    pub recall: bool,
    /// When the request is given up.
    pub deadline: Instant,
    /// Where events are sent; the job is cancelled when the receiver is gone.
    pub events: Events,
}

/// What has happened to a prompt: its number in the request, and the events since the last message.
pub type PromptEvents = (usize, Vec<Event>);

/// Sends the events of a job. Every message wakes a thread that competes with the model's for the processor, so a step
/// sends at most one, and a request whose answer is not streamed gets a single one at its end.
pub struct Events {
    sender: UnboundedSender<PromptEvents>,
    /// The number of the prompt in its request.
    number: usize,
    /// Whether events are sent after every step.
    streamed: bool,
    /// Events that were not sent yet.
    held: Vec<Event>,
}

impl Events {
    /// Events of the prompt with this number.
    pub fn new(sender: UnboundedSender<PromptEvents>, number: usize, streamed: bool) -> Self {
        Self { sender, number, streamed, held: Vec::new() }
    }

    /// Notes an event.
    pub fn add(&mut self, event: Event) {
        self.held.push(event);
    }

    /// Sends what happened, if the answer is streamed or `over`. That the receiver is gone is noticed before the next
    /// step.
    pub fn send(&mut self, over: bool) {
        if (self.streamed || over) && !self.held.is_empty() {
            drop(self.sender.send((self.number, std::mem::take(&mut self.held))));
        }
    }
}

impl Job {
    /// Where the last message of the prompt ends, if the job is a turn of a conversation.
    pub fn departure(&self) -> Option<usize> {
        self.ends.last().copied().filter(|_| self.whole)
    }

    /// Whether nobody waits for the job.
    pub fn is_cancelled(&self) -> bool {
        self.events.sender.is_closed()
    }

    /// Ends the job with a failure.
    pub fn fail(mut self, failure: Failure) {
        self.events.add(Event::Failed(failure));
        self.events.send(true);
    }
}

/// What happens to a job.
#[derive(Debug)]
pub enum Event {
    /// The prompt is read: how many of its tokens came from the cache, and the scores of its tokens from the second on,
    /// if they were requested.
    PromptRead {
        /// Tokens that were not read again.
        cached: usize,
        /// One entry for each token but the first.
        scores: Vec<ScoredToken>,
    },
    /// A token of a choice, or its end.
    Piece {
        /// The choice, from 0.
        choice: usize,
        /// The text that became final, which may be empty.
        text: String,
        /// The token and its log-probability; `None` if the text ended without a new token.
        token: Option<ScoredToken>,
        /// The reason, if the text has ended.
        ended: Option<StopReason>,
    },
    /// A choice has ended, and more was asked about it than its text.
    Finished(Box<FinishedChoice>),
    /// The job failed, and there are no more events.
    Failed(Failure),
}

/// What is left of a choice when it has ended.
pub struct FinishedChoice {
    /// The whole text with its state.
    pub prefix: CachedPrefix,
    /// The prompt up to the end of its last message: the next turn of a conversation departs there if the chat template
    /// writes the answer in another way.
    pub departure: Option<CachedPrefix>,
    /// Whether the state has the bits of any other way to read the text, so that it may be continued.
    pub exact: bool,
    /// Bytes of the state.
    pub bytes: usize,
    /// Which anchors the choice read, if that was asked.
    pub recall: Option<MeanRouting>,
    /// All anchors that were seen, in the order of the text.
    pub anchors: Vec<Anchor>,
}

impl std::fmt::Debug for FinishedChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FinishedChoice").field("tokens", &self.prefix.ids.len()).finish_non_exhaustive()
    }
}

/// Why a job failed.
#[derive(Debug)]
pub enum Failure {
    /// The request was wrong.
    Refused(String),
    /// Its time was over.
    Late,
    /// The server's fault.
    Broken(String),
}

/// A token with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    /// The token.
    pub id: u32,
    /// Its log-probability; meaningless unless log-probabilities were requested.
    pub logprob: f32,
    /// The most probable tokens, the most probable one first; at least one if log-probabilities were requested.
    pub top: Vec<(u32, f32)>,
}

/// Why a job was not accepted.
#[derive(Debug, PartialEq, Eq)]
pub enum QueueRefusal {
    /// Too many requests are waiting.
    Full,
    /// The server is shutting down.
    Closing,
}

/// The jobs that wait for the model's thread.
pub struct Jobs {
    queue: Mutex<Queue>,
    changed: Condvar,
    most: usize,
    metrics: Arc<Metrics>,
}

struct Queue {
    jobs: VecDeque<Job>,
    open: bool,
}

impl Jobs {
    /// A queue for this many jobs.
    pub fn new(most: usize, metrics: Arc<Metrics>) -> Self {
        let queue = Mutex::new(Queue { jobs: VecDeque::new(), open: true });
        Self { queue, changed: Condvar::new(), most, metrics }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // The queue is changed by single calls, each of which leaves it whole.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds jobs that belong together: all of them, or none if the queue is full.
    pub fn add(&self, jobs: Vec<Job>) -> std::result::Result<(), QueueRefusal> {
        let mut queue = self.queue();
        if !queue.open {
            return Err(QueueRefusal::Closing);
        }
        if queue.jobs.len() + jobs.len() > self.most {
            self.drop_cancelled(&mut queue);
        }
        if queue.jobs.len() + jobs.len() > self.most {
            return Err(QueueRefusal::Full);
        }
        queue.jobs.extend(jobs);
        self.changed.notify_one();
        Ok(())
    }

    /// Drops the jobs whose clients went away.
    fn drop_cancelled(&self, queue: &mut Queue) {
        let before = queue.jobs.len();
        queue.jobs.retain(|job| !job.is_cancelled());
        self.metrics.cancelled.fetch_add((before - queue.jobs.len()) as u64, Ordering::Relaxed);
    }

    /// Takes the next job; waits for it for at most `wait`.
    pub fn next(&self, wait: Duration) -> NextJob {
        let mut queue = self.queue();
        if queue.jobs.is_empty() && queue.open && !wait.is_zero() {
            let waited = self.changed.wait_timeout(queue, wait);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.drop_cancelled(&mut queue);
        match queue.jobs.pop_front() {
            Some(job) => NextJob::Job(Box::new(job)),
            None if queue.open => NextJob::Later,
            None => NextJob::Never,
        }
    }

    /// Accepts no more jobs.
    pub fn close(&self) {
        self.queue().open = false;
        self.changed.notify_one();
    }

    /// The number of jobs that wait for a place.
    pub fn waiting(&self) -> usize {
        let mut queue = self.queue();
        self.drop_cancelled(&mut queue);
        queue.jobs.len()
    }
}

/// What the queue has for the model's thread.
pub enum NextJob {
    /// A job.
    Job(Box<Job>),
    /// Nothing yet.
    Later,
    /// Nothing any more.
    Never,
}

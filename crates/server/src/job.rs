//! Jobs: what a request wants of the model's thread, and what the thread tells about it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Instant;

use march::anchors::{Anchor, Policy};
use march::engine::Engine;
use march::generate::{Ended, Limits, Sampling};
use march::model::MeanRouting;
use tokio::sync::mpsc::UnboundedSender;

use crate::prefix::Known;

/// A prompt and what to do with it.
pub struct Job<E: Engine> {
    /// The prompt; at least one token.
    pub prompt: Vec<u32>,
    /// The memory policy.
    pub policy: Policy,
    /// A text that begins like the prompt, if the client continues a conversation.
    pub known: Option<Known<E>>,
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
    pub events: Events<E>,
}

/// What has happened to a prompt: its number in the request, and the events since the last message.
pub type Happened<E> = (usize, Vec<Event<E>>);

/// Sends the events of a job. Every message wakes a thread that competes with the model's for the processor, so a step
/// sends at most one, and a request whose answer is not streamed gets a single one at its end.
pub struct Events<E: Engine> {
    sender: UnboundedSender<Happened<E>>,
    /// The number of the prompt in its request.
    number: usize,
    /// Whether events are sent after every step.
    streamed: bool,
    /// Events that were not sent yet.
    held: Vec<Event<E>>,
}

impl<E: Engine> Events<E> {
    /// Events of the prompt with this number.
    pub fn new(sender: UnboundedSender<Happened<E>>, number: usize, streamed: bool) -> Self {
        Self { sender, number, streamed, held: Vec::new() }
    }

    /// Notes an event.
    pub fn add(&mut self, event: Event<E>) {
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

impl<E: Engine> Job<E> {
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
pub enum Event<E: Engine> {
    /// The prompt is read: how many of its tokens came from the cache, and the scores of its tokens from the second on,
    /// if they were requested.
    Read {
        /// Tokens that were not read again.
        cached: usize,
        /// One entry for each token but the first.
        scores: Vec<Scored>,
    },
    /// A token of a choice, or its end.
    Wrote {
        /// The choice, from 0.
        choice: usize,
        /// The text that became final, which may be empty.
        text: String,
        /// The token and its log-probability; `None` if the text ended without a new token.
        token: Option<Scored>,
        /// The reason, if the text has ended.
        ended: Option<Ended>,
    },
    /// A choice has ended, and more was asked about it than its text.
    Kept(Box<Kept<E>>),
    /// The job failed, and there are no more events.
    Failed(Failure),
}

/// What is left of a choice when it has ended.
pub struct Kept<E: Engine> {
    /// The whole text with its state.
    pub known: Known<E>,
    /// Whether the state has the bits of any other way to read the text, so that it may be continued.
    pub exact: bool,
    /// Bytes of the state.
    pub bytes: usize,
    /// Which anchors the choice read, if that was asked.
    pub recall: Option<MeanRouting>,
    /// All anchors that were seen, in the order of the text.
    pub anchors: Vec<Anchor>,
}

impl<E: Engine> std::fmt::Debug for Kept<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("tokens", &self.known.ids.len()).finish_non_exhaustive()
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
pub struct Scored {
    /// The token.
    pub id: u32,
    /// Its log-probability; meaningless unless log-probabilities were requested.
    pub logprob: f32,
    /// The most probable tokens, the most probable one first; at least one if log-probabilities were requested.
    pub top: Vec<(u32, f32)>,
}

/// Why a job was not accepted.
#[derive(Debug, PartialEq, Eq)]
pub enum Full {
    /// Too many requests are waiting.
    Queue,
    /// The server is shutting down.
    Closing,
}

/// Hands jobs to the model's thread.
pub struct Jobs<E: Engine> {
    sender: SyncSender<Job<E>>,
    waiting: Arc<AtomicUsize>,
    queue: usize,
}

impl<E: Engine> Jobs<E> {
    /// A queue for this many jobs: what adds to it, what takes from it, and the number of jobs in it.
    pub fn new(queue: usize) -> (Self, Receiver<Job<E>>, Arc<AtomicUsize>) {
        // `Jobs::add` keeps to the limit of the queue.
        let (sender, receiver) = sync_channel(queue.max(1));
        let waiting = Arc::new(AtomicUsize::new(0));
        (Self { sender, waiting: Arc::clone(&waiting), queue }, receiver, waiting)
    }

    /// Adds jobs that belong together: all of them, or none if the queue is full.
    pub fn add(&self, jobs: Vec<Job<E>>) -> std::result::Result<(), Full> {
        let count = jobs.len();
        let before = self.waiting.fetch_add(count, Ordering::AcqRel);
        if before + count > self.queue {
            self.waiting.fetch_sub(count, Ordering::AcqRel);
            return Err(Full::Queue);
        }
        for (i, job) in jobs.into_iter().enumerate() {
            if let Err(error) = self.sender.try_send(job) {
                self.waiting.fetch_sub(count - i, Ordering::AcqRel);
                return Err(match error {
                    TrySendError::Full(_) => Full::Queue,
                    TrySendError::Disconnected(_) => Full::Closing,
                });
            }
        }
        Ok(())
    }

    /// The number of jobs that wait for a place.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

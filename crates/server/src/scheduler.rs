//! The model's thread: any number of requests in one step of the model.
//!
//! Requests join and leave between steps. A step holds one token of every text that is being written, and a slice of
//! the prompts that are being read, so that a long prompt does not stop the others: while texts are written, slices are
//! short (`slices`). What a request gets does not depend on what else is in its steps.

use std::collections::VecDeque;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use march_lm::Pipeline;
use march_lm::anchors::Policy;
use march_lm::generate::{GRID, Inference, Sampling, Session, Text};
use march_lm::memory::{BankTag, StateBank};
use march_lm::model::{Part, TraceCell};
use march_lm::{Error, Result};

use crate::choice::Choice;
use crate::job::{Event, Failure, Job, Jobs, NextJob, ScoredToken};
use crate::metrics::Metrics;
use crate::prefix::{CachedPrefix, PrefixCache, PrefixMatch, Reason, goes_back};
use crate::slices::Slices;

/// A model that is ready to run, and what identifies it in files.
pub struct LoadedModel {
    /// The model. The products of its device must be batch-invariant.
    pub pipeline: Pipeline,
    /// Identifies the model and the tokenizer in files.
    pub tag: BankTag,
}

impl Deref for LoadedModel {
    type Target = Pipeline;

    fn deref(&self) -> &Pipeline {
        &self.pipeline
    }
}

/// Prompt tokens per step while no text is being written.
const WIDE_SLICE: usize = 2048;

/// How long an idle model waits before it looks for cancelled requests.
const PAUSE: Duration = Duration::from_millis(200);

/// Bytes of unused buffers, beyond those in use, that a busy model keeps.
const SPARE: usize = 512 << 20;

/// How the model's time and memory are shared.
#[derive(Clone, Debug)]
pub struct SchedulerLimits {
    /// The maximum number of texts in one step.
    pub texts: usize,
    /// The maximum number of requests that wait for a place.
    pub queue: usize,
    /// The most prompt tokens per step while texts are being written.
    pub slice: usize,
    /// Bytes of memory for prefixes of earlier texts.
    pub cache_bytes: usize,
}

/// Runs a model on a thread of its own, until the [`Jobs`] are closed and the last one has ended.
pub fn start(
    loaded: Arc<LoadedModel>,
    limits: SchedulerLimits,
    metrics: Arc<Metrics>,
) -> std::io::Result<(Arc<Jobs>, std::thread::JoinHandle<()>)> {
    let jobs = Arc::new(Jobs::new(limits.queue, Arc::clone(&metrics)));
    let queue = Arc::clone(&jobs);
    let thread = std::thread::Builder::new().name("model".into()).spawn(move || {
        let inference = loaded.inference().clone();
        let wide = inference.call_tokens().min(WIDE_SLICE);
        let any_calls = loaded.model().config().mixer.has_same_bits_in_any_calls();
        Scheduler {
            loaded: &loaded,
            slices: Slices::new(&inference, limits.slice.min(wide), any_calls),
            wide: inference.with_call_tokens(wide),
            cache: PrefixCache::new(limits.cache_bytes),
            any_calls,
            active: VecDeque::new(),
            limits,
            metrics: &metrics,
        }
        .run(&queue);
    })?;
    Ok((jobs, thread))
}

/// A job that has a place.
struct ActiveJob {
    job: Job,
    cached: usize,
    scores: Vec<ScoredToken>,
    /// Whether the state has the bits of any other way to read the prompt, so that other requests may continue from it.
    exact: bool,
    /// The prompt up to the end of its last message, for a conversation.
    departure: Option<CachedPrefix>,
    state: State,
}

enum State {
    /// The prompt is being read to score its tokens: the bank, and how many tokens it has read.
    Scoring(Box<StateBank>, usize),
    /// The prompt is being read. The session has been given its tokens up to the first of these places; the state is kept
    /// at each, and the last is the end.
    Reading(Box<Session>, VecDeque<(usize, Reason)>),
    /// Texts are being written.
    Writing(Vec<Choice>),
}

struct Scheduler<'a> {
    loaded: &'a LoadedModel,
    wide: Inference,
    slices: Slices,
    cache: PrefixCache,
    /// Whether a text has the same bits however it is divided into calls.
    any_calls: bool,
    active: VecDeque<ActiveJob>,
    limits: SchedulerLimits,
    metrics: &'a Metrics,
}

impl Scheduler<'_> {
    fn run(mut self, jobs: &Jobs) {
        let mut open = true;
        while open || !self.active.is_empty() {
            open &= self.admit(jobs);
            self.drop_cancelled();
            self.metrics.active.store(self.texts(), Ordering::Relaxed);
            self.trim();
            if self.active.is_empty() {
                continue;
            }
            let step = catch_unwind(AssertUnwindSafe(|| self.step()));
            let failed = match step {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "the model's thread failed unexpectedly".into(),
            };
            // A bank whose step failed is incomplete, and which one it was is unknown.
            tracing::error!("a step of the model failed: {failed}");
            self.metrics.failed_steps.fetch_add(1, Ordering::Relaxed);
            for active in self.active.drain(..) {
                active.job.fail(Failure::Broken(failed.clone()));
            }
        }
    }

    /// Returns unused buffers to the system when there is nothing to do, or if there are very many. The device keeps as
    /// many of each size as were ever used at once.
    fn trim(&self) {
        let device = self.loaded.device();
        let free = device.free_bytes();
        if free > 0 && (self.active.is_empty() || free > device.live_bytes() + SPARE) {
            device.trim();
        }
    }

    /// Number of texts that take part in steps.
    fn texts(&self) -> usize {
        self.active.iter().map(ActiveJob::texts).sum()
    }

    /// Takes waiting jobs as long as there are places; waits if there is nothing else to do. Returns whether more jobs
    /// can come.
    fn admit(&mut self, jobs: &Jobs) -> bool {
        loop {
            let texts = self.texts();
            if texts >= self.limits.texts {
                return true;
            }
            let wait = if self.active.is_empty() { PAUSE } else { Duration::ZERO };
            let mut job = match jobs.next(wait) {
                NextJob::Job(job) => *job,
                NextJob::Later => return true,
                NextJob::Never => return false,
            };
            match self.begin(&mut job) {
                Ok((cached, departure, state)) => {
                    let scores = Vec::new();
                    self.active.push_back(ActiveJob { job, cached, scores, exact: true, departure, state });
                }
                Err(error) => job.fail(Failure::Refused(error.to_string())),
            }
        }
    }

    /// Finds how much of a prompt is known already: the number of tokens, where its last message ends if that is among
    /// them, and the state to begin with.
    fn begin(&mut self, job: &mut Job) -> Result<(usize, Option<CachedPrefix>, State)> {
        let model = self.loaded.model();
        if job.score_prompt {
            return Ok((0, None, State::Scoring(Box::new(model.bank(job.policy.clone())?), 0)));
        }
        let PrefixMatch { mut text, mut tokens, mut branch } = self.cache.find(&job.prompt, &job.policy);
        if let Some(prefix) = job.prefix.take().filter(|prefix| prefix.text.bank().policy() == &job.policy) {
            let usable = prefix.usable(prefix.common(&job.prompt), job.prompt.len());
            if usable > tokens
                && let Some(own) = prefix.at(usable)
            {
                (text, tokens) = (Some(own), usable);
                branch = branch.filter(|&at| at > usable);
            }
        }
        let text = match text {
            Some(text) => text,
            None => Text::new(model.bank(job.policy.clone())?),
        };
        self.metrics.cached_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        let departure = match job.departure() {
            Some(end) if end == tokens => Some(text.without_logits()),
            Some(end) if end < tokens => {
                let found = self.cache.find(&job.prompt[..=end], &job.policy);
                found.text.filter(|_| found.tokens == end)
            }
            _ => None,
        };
        let departure = departure.map(|text| {
            let ids = job.prompt[..text.tokens()].to_vec();
            CachedPrefix { ids, text }
        });
        let mut session = Box::new(Session::new(text, Sampling::greedy())?);
        session.set_trace(job.recall.then(TraceCell::default));
        let places = self.places(job, tokens, branch, session.text().bank());
        session.push(&job.prompt[tokens..places[0].0]);
        Ok((tokens, departure, State::Reading(session, places)))
    }

    /// Where the state of a prompt is kept while it is read from token `begin` on; the end comes last.
    fn places(
        &self,
        job: &Job,
        begin: usize,
        branch: Option<usize>,
        bank: &StateBank,
    ) -> VecDeque<(usize, Reason)> {
        let end = job.prompt.len();
        // Another text shares the prompt up to the branch: the next such prompt starts from it.
        let mut ends: Vec<usize> = branch.into_iter().collect();
        let mut places = Vec::new();
        // Attention continues from any token.
        if !bank.can_truncate() {
            ends.extend(&job.ends);
            if !goes_back(bank) {
                let distances = self.distances(end, &job.policy);
                places.extend(distances.into_iter().map(|at| (at, Reason::Distance)));
            }
        }
        // A model whose bits depend on where calls end can only continue from the grid.
        if !self.any_calls {
            ends.push(end - 1);
            ends.iter_mut().for_each(|at| *at = *at / GRID * GRID);
        }
        places.extend(ends.into_iter().map(|at| (at, Reason::End)));
        places.retain(|&(at, _)| at > begin && at < end);
        // The end stays, even if all is known.
        places.push((end, Reason::End));
        places.sort_by_key(|&(at, reason)| (at, reason == Reason::Distance));
        places.dedup_by_key(|&mut (at, _)| at);
        places.into()
    }

    /// Where states are kept in a prompt only because the last one is far away.
    fn distances(&self, tokens: usize, policy: &Policy) -> Vec<usize> {
        const FEW: usize = 16 * GRID;
        let model = self.loaded.model();
        // Both are on the grid, where no chunk is open.
        let [once, twice] = [FEW, 2 * FEW].map(|tokens| model.memory_bytes(tokens, policy));
        self.cache.distances(tokens, (2 * once).saturating_sub(twice), (twice - once) / FEW)
    }

    fn drop_cancelled(&mut self) {
        let now = Instant::now();
        let late: Vec<ActiveJob> = {
            let (keep, late) = self.active.drain(..).partition(|active| active.job.deadline > now);
            self.active = keep;
            late.into()
        };
        late.into_iter().for_each(|active| active.job.fail(Failure::Late));
        let before = self.active.len();
        self.active.retain(|active| !active.job.is_cancelled());
        self.metrics.cancelled.fetch_add((before - self.active.len()) as u64, Ordering::Relaxed);
    }

    /// One step: a token of every text that is being written, and slices of prompts.
    fn step(&mut self) -> Result<()> {
        let writing = self.active.iter().any(|active| matches!(active.state, State::Writing(_)));
        let reading = self.active.iter().any(ActiveJob::is_reading);
        let began = Instant::now();
        let (inference, mut room) = match (writing, reading) {
            (true, true) => self.slices.next(),
            _ => (&self.wide, self.wide.call_tokens()),
        };
        let with_prompts = reading && room > 0;
        let mut now: Vec<&mut Session> = Vec::new();
        let mut read = 0;
        let mut scoring: Vec<(&mut ActiveJob, usize)> = Vec::new();
        for active in &mut self.active {
            if let State::Scoring(_, at) = active.state {
                let last = active.job.prompt.len() - 1;
                let slice = inference.call_tokens();
                let count = (slice - at % slice).min(last - at);
                if with_prompts && count <= room {
                    room -= count;
                    read += count;
                    scoring.push((active, count));
                }
                continue;
            }
            match &mut active.state {
                State::Reading(session, _) => {
                    let count = inference.next_tokens(session);
                    if with_prompts && count <= room {
                        room -= count;
                        read += count;
                        now.push(session);
                    }
                }
                State::Writing(choices) => now.extend(choices.iter_mut().map(|choice| &mut choice.session)),
                State::Scoring(..) => {}
            }
        }
        inference.step(&mut now)?;
        drop(now);
        // One token's score is computed in another way than that of several, and must not depend on the other requests.
        let (mut several, mut one): (Vec<_>, Vec<_>) =
            scoring.into_iter().partition(|(active, _)| active.job.top > Some(1));
        score(inference, &mut one)?;
        score(inference, &mut several)?;
        drop((one, several));
        if writing {
            self.slices.record_step_time(began.elapsed(), with_prompts);
        }
        self.metrics.steps.fetch_add(1, Ordering::Relaxed);
        self.metrics.prompt_tokens.fetch_add(read as u64, Ordering::Relaxed);
        self.take_results()
    }

    /// Samples from what the step computed, and moves jobs on.
    fn take_results(&mut self) -> Result<()> {
        let mut still = VecDeque::with_capacity(self.active.len());
        let mut turned = VecDeque::new();
        for active in std::mem::take(&mut self.active) {
            let reading = !matches!(active.state, State::Writing(_));
            match self.advance_job(active)? {
                Some(active) if reading && active.is_reading() => turned.push_back(active),
                Some(active) => still.push_back(active),
                None => {}
            }
        }
        // Prompts take turns: the first was certainly served, and waits behind the others in the next step.
        turned.rotate_left(usize::from(turned.len() > 1));
        still.extend(turned);
        self.active = still;
        Ok(())
    }

    fn advance_job(&mut self, mut active: ActiveJob) -> Result<Option<ActiveJob>> {
        if let State::Reading(session, _) = &active.state
            && let Some(trace) = session.trace()
        {
            trace.lock().unwrap_or_else(std::sync::PoisonError::into_inner).keep_newest()?;
        }
        active.state = match active.state {
            State::Scoring(bank, read) if read + 1 == active.job.prompt.len() => {
                let text = Text::new(*bank).with_recent(&active.job.prompt[..read]);
                let mut session = Box::new(Session::new(text, Sampling::greedy())?);
                session.push(&active.job.prompt[read..]);
                session.set_trace(active.job.recall.then(TraceCell::default));
                // Scoring ends its calls elsewhere than reading does: before the last token.
                active.exact = self.any_calls;
                State::Reading(session, [(active.job.prompt.len(), Reason::End)].into())
            }
            State::Reading(mut session, mut places) if session.is_ready() => {
                let prompt = &active.job.prompt;
                let (read, reason) = places.pop_front().unwrap_or((prompt.len(), Reason::End));
                if active.exact && (self.any_calls || read.is_multiple_of(GRID)) {
                    match read == prompt.len() {
                        true => self.cache.keep(prompt, session.text(), reason),
                        false => {
                            let text = session.text().without_logits();
                            self.cache.keep(&prompt[..read], &text, reason);
                            if active.job.departure() == Some(read) {
                                active.departure = Some(CachedPrefix { ids: prompt[..read].to_vec(), text });
                            }
                        }
                    }
                }
                if let Some(&(next, _)) = places.front() {
                    session.push(&prompt[read..next]);
                    State::Reading(session, places)
                } else {
                    let scores = std::mem::take(&mut active.scores);
                    active.job.events.add(Event::PromptRead { cached: active.cached, scores });
                    State::Writing(Choice::all(&active.job, self.loaded.tokenizer(), &session)?)
                }
            }
            other => other,
        };
        let ActiveJob { job, state, departure, .. } = &mut active;
        let State::Writing(choices) = state else { return Ok(Some(active)) };
        let mut over = Vec::new();
        for (i, choice) in choices.iter_mut().enumerate().filter(|(_, choice)| choice.session.is_ready()) {
            let ended = choice.advance(job, self.loaded.tokenizer())?;
            self.metrics.generated_tokens.fetch_add(1, Ordering::Relaxed);
            over.extend(ended.map(|_| i));
        }
        for i in over.into_iter().rev() {
            let choice = choices.swap_remove(i);
            let prefix = choice.prefix(&job.prompt);
            if self.any_calls {
                self.cache.keep(&prefix.ids, &prefix.text, Reason::End);
            }
            if job.whole || job.recall {
                let finished = Box::new(choice.finish(prefix, departure.take(), self.any_calls));
                job.events.add(Event::Finished(finished));
            }
        }
        self.metrics.cache_bytes.store(self.cache.bytes(), Ordering::Relaxed);
        let over = choices.is_empty();
        job.events.send(over);
        Ok((!over).then_some(active))
    }
}

/// Reads slices of prompts and scores their tokens.
fn score(inference: &Inference, scoring: &mut [(&mut ActiveJob, usize)]) -> Result<()> {
    let top = scoring.iter().filter_map(|(active, _)| active.job.top).max().unwrap_or(1);
    let (mut parts, mut targets) = (Vec::new(), Vec::new());
    for (active, count) in scoring.iter_mut().filter(|(_, count)| *count > 0) {
        let ActiveJob { job, state: State::Scoring(bank, at), .. } = &mut **active else { continue };
        let span = *at..*at + *count;
        targets.extend_from_slice(&job.prompt[span.start + 1..span.end + 1]);
        parts.push(Part::new(&job.prompt[span], bank));
    }
    if parts.is_empty() {
        return Ok(());
    }
    let found = inference.scores(&mut parts, &targets, top)?;
    drop(parts);
    let mut next = 0;
    for (active, count) in scoring {
        let ActiveJob { job, scores, state: State::Scoring(_, at), .. } = &mut **active else { continue };
        let count_top = job.top.unwrap_or(0).max(1);
        for i in next..next + *count {
            if !found.nll[i].is_finite() {
                return Err(Error::Diverged("the model's logits are not finite".into()));
            }
            let top = found.top[i].iter().take(count_top).map(|&(id, nll)| (id, -nll)).collect();
            scores.push(ScoredToken { id: targets[i], logprob: -found.nll[i], top });
        }
        next += *count;
        *at += *count;
    }
    Ok(())
}

impl ActiveJob {
    fn texts(&self) -> usize {
        match &self.state {
            State::Writing(choices) => choices.len(),
            _ => self.job.choices.len().max(1),
        }
    }

    fn is_reading(&self) -> bool {
        !matches!(self.state, State::Writing(_))
    }
}

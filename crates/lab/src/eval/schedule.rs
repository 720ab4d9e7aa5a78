//! Runs any number of requests on a model, many sequences in one call.
//!
//! Requests run from the longest to the shortest, so that memory is largest at the beginning and the sequences of a
//! call have similar lengths. A context is read once; each continuation goes on from a fork of its bank. Generated
//! texts join the batch as others end. What a sequence gets does not depend on what else is in its calls.

use std::ops::ControlFlow;

use march_engine::ops::cross_entropy::IGNORE;

use super::encode::{Encoded, Targets};
use super::request::{Answer, Scored};
use march_lm::anchors::Policy;
use march_lm::generate::{GRID, Inference, Limits, Sampling, Session, Text};
use march_lm::memory::StateBank;
use march_lm::model::Part;
use march_lm::tokenizer::Tokenizer;
use march_lm::{Error, Result};

/// Tokens per call of the model, over all sequences.
const CALL_TOKENS: usize = 2048;

/// Maximum number of sequences in one call.
const SEQUENCES: usize = 64;

/// Bytes of memory that the banks of a batch may take together.
const BANK_BYTES: usize = 512 << 20;

/// What happens while requests run.
pub enum Event {
    /// A call of the model is finished: this many tokens were read in all.
    Read(usize),
    /// A request, by its number, is answered.
    Answered(usize, Answer),
}

/// Receives what happens, and may stop.
pub type EventHandler<'a> = dyn FnMut(Event) -> Result<ControlFlow<()>> + 'a;

/// A model, and how it is asked.
pub struct Scheduler<'a> {
    /// The model, ready to run.
    pub inference: Inference,
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The memory policy.
    pub policy: &'a Policy,
    /// Whether the continuations of one context share the work of reading it.
    pub share_contexts: bool,
    /// The maximum number of sequences in one call.
    pub sequences: usize,
}

impl<'a> Scheduler<'a> {
    /// With shared contexts and large batches.
    pub fn new(inference: Inference, tokenizer: &'a Tokenizer, policy: &'a Policy) -> Self {
        Self { inference, tokenizer, policy, share_contexts: true, sequences: SEQUENCES }
    }

    /// Answers all requests; `take` receives the answers as they come, in any order, and may stop. Returns whether all
    /// were answered.
    pub fn run(&self, requests: &[(usize, Encoded)], take: &mut EventHandler<'_>) -> Result<bool> {
        let mut order: Vec<&(usize, Encoded)> = requests.iter().collect();
        order.sort_by_key(|(number, request)| (std::cmp::Reverse(request.longest()), *number));
        let (generated, scored): (Vec<_>, Vec<_>) =
            order.into_iter().partition(|(_, request)| matches!(request, Encoded::Generate { .. }));
        let mut read = 0;
        Ok(self.score_all(&scored, &mut read, take)?.is_continue()
            && self.generate_all(&generated, &mut read, take)?.is_continue())
    }

    /// The log-likelihoods, as many requests at a time as fit into one call.
    fn score_all(
        &self,
        requests: &[&(usize, Encoded)],
        read: &mut usize,
        take: &mut EventHandler<'_>,
    ) -> Result<ControlFlow<()>> {
        let mut left = requests;
        while !left.is_empty() {
            let (mut tokens, mut count) = (0, 0);
            let rows = self.rows(left[0].1.longest());
            while count < left.len().min(rows)
                && (count == 0 || tokens + left[count].1.tokens() <= CALL_TOKENS)
            {
                tokens += left[count].1.tokens();
                count += 1;
            }
            let (now, later) = left.split_at(count);
            left = later;
            let Some(answers) = self.score(now, read, take)? else { return Ok(ControlFlow::Break(())) };
            for (&&(number, _), answer) in now.iter().zip(answers) {
                if take(Event::Answered(number, answer))?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// The log-likelihoods of some requests: first their contexts, then all continuations. `None` if it was stopped.
    fn score(
        &self,
        requests: &[&(usize, Encoded)],
        read: &mut usize,
        take: &mut EventHandler<'_>,
    ) -> Result<Option<Vec<Answer>>> {
        let mut contexts = Vec::new();
        for (_, request) in requests {
            let shared = match request {
                Encoded::Loglikelihood { context, .. } if self.share_contexts => {
                    &context[..self.cut(context.len() - 1)]
                }
                _ => &[],
            };
            contexts.push(Sequence::new(self.bank()?, Targets::none(shared)));
        }
        if self.read(&mut contexts, read, take)?.is_break() {
            return Ok(None);
        }
        let mut all = Vec::new();
        for ((_, request), context) in requests.iter().zip(contexts) {
            match request {
                Encoded::Loglikelihood { context: ids, continuations } => {
                    let before = &ids[context.inputs.len()..];
                    for continuation in continuations {
                        let bank = context.bank.clone();
                        all.push(Sequence::new(bank, Targets::after(before, continuation)));
                    }
                }
                Encoded::Rolling { text, .. } if text.is_empty() => {
                    all.push(Sequence::new(context.bank, Targets::none(&[])));
                }
                Encoded::Rolling { prefix, text } => {
                    all.push(Sequence::new(context.bank, Targets::after(&[*prefix], text)));
                }
                Encoded::Generate { .. } => unreachable!("texts are generated elsewhere"),
            }
        }
        if self.read(&mut all, read, take)?.is_break() {
            return Ok(None);
        }
        let mut scores = all.into_iter().map(|sequence| sequence.scored);
        let answer = |(_, request): &&(usize, Encoded)| match request {
            Encoded::Loglikelihood { continuations, .. } => {
                Answer::Loglikelihood(scores.by_ref().take(continuations.len()).collect())
            }
            _ => Answer::LoglikelihoodRolling(scores.next().unwrap_or(Scored::NONE)),
        };
        Ok(Some(requests.iter().map(answer).collect()))
    }

    /// Reads all sequences to their ends, at most [`CALL_TOKENS`] tokens and [`Scheduler::sequences`] sequences per
    /// call.
    fn read(
        &self,
        sequences: &mut [Sequence],
        done: &mut usize,
        take: &mut EventHandler<'_>,
    ) -> Result<ControlFlow<()>> {
        loop {
            let mut room = CALL_TOKENS;
            let mut now: Vec<(&mut Sequence, usize)> = Vec::new();
            for sequence in sequences.iter_mut() {
                let left = sequence.inputs.len() - sequence.read;
                let count = if left <= room { left } else { self.cut(sequence.read + room) - sequence.read };
                if count > 0 && now.len() < self.sequences {
                    room -= count;
                    now.push((sequence, count));
                }
            }
            if now.is_empty() {
                return Ok(ControlFlow::Continue(()));
            }
            *done += CALL_TOKENS - room;
            let mut targets = Vec::with_capacity(CALL_TOKENS - room);
            let mut parts = Vec::with_capacity(now.len());
            for (sequence, count) in &mut now {
                let Sequence { bank, inputs, targets: wanted, read, .. } = &mut **sequence;
                targets.extend_from_slice(&wanted[*read..*read + *count]);
                parts.push(Part::new(&inputs[*read..*read + *count], bank));
            }
            if targets.iter().all(|&target| target == IGNORE) {
                self.inference.read(&mut parts)?;
                now.iter_mut().for_each(|(sequence, count)| sequence.read += *count);
            } else {
                let losses = self.inference.losses(&mut parts, &targets)?;
                let mut at = 0;
                for (sequence, count) in now {
                    let span = at..at + count;
                    sequence.note(&losses.nll[span.clone()], &losses.greedy[span])?;
                    at += count;
                }
            }
            if take(Event::Read(*done))?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
    }

    /// The generated texts. As many texts as fit are generated at once; when one ends, the next joins.
    fn generate_all(
        &self,
        requests: &[&(usize, Encoded)],
        read: &mut usize,
        take: &mut EventHandler<'_>,
    ) -> Result<ControlFlow<()>> {
        let mut waiting = requests.iter().peekable();
        let mut active: Vec<GeneratingText> = Vec::new();
        loop {
            let unread: usize = active.iter().map(|writing| writing.session.unread()).sum();
            let mut room = CALL_TOKENS.saturating_sub(unread);
            while let Some((number, Encoded::Generate { prompt, until, max_tokens })) = waiting.peek() {
                let (number, max_tokens) = (*number, *max_tokens);
                let rows = self.rows(prompt.len() + max_tokens);
                if !active.is_empty() && (active.len() >= rows || prompt.len() > room) {
                    break;
                }
                waiting.next();
                let mut session = Session::new(Text::new(self.bank()?), Sampling::greedy())?;
                session.push(prompt);
                session.begin(self.tokenizer, Limits { max_tokens, stop: until.clone() })?;
                active.push(GeneratingText { number, session, text: String::new() });
                room = room.saturating_sub(prompt.len());
            }
            if active.is_empty() {
                return Ok(ControlFlow::Continue(()));
            }
            let mut sessions: Vec<_> = active.iter_mut().map(|writing| &mut writing.session).collect();
            *read += sessions.iter().map(|session| self.inference.next_tokens(session)).sum::<usize>();
            self.inference.step(&mut sessions)?;
            if take(Event::Read(*read))?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            let mut still = Vec::with_capacity(active.len());
            let mut asked = ControlFlow::Continue(());
            for mut writing in active {
                if !writing.session.is_ready() {
                    still.push(writing);
                    continue;
                }
                let wrote = writing.session.advance(self.tokenizer)?;
                writing.text += &wrote.text;
                if wrote.ended.is_none() {
                    still.push(writing);
                } else if take(Event::Answered(writing.number, Answer::GenerateUntil(writing.text)))?
                    .is_break()
                {
                    asked = ControlFlow::Break(());
                }
            }
            if asked.is_break() {
                return Ok(asked);
            }
            active = still;
        }
    }

    /// The last place up to `tokens` at which a sequence may be divided into two calls without changing its bits.
    fn cut(&self, tokens: usize) -> usize {
        let anywhere = self.inference.model().config().mixer.has_same_bits_in_any_calls();
        if anywhere { tokens } else { tokens / GRID * GRID }
    }

    fn bank(&self) -> Result<StateBank> {
        self.inference.model().bank(self.policy.clone())
    }

    /// How many sequences of `tokens` tokens fit into memory together; at least one.
    fn rows(&self, tokens: usize) -> usize {
        let bytes = self.inference.model().memory_bytes(tokens, self.policy).max(1);
        (BANK_BYTES / bytes).clamp(1, self.sequences.max(1))
    }
}

/// A sequence that is being scored.
struct Sequence {
    bank: StateBank,
    inputs: Vec<u32>,
    targets: Vec<u32>,
    /// Number of inputs that were read.
    read: usize,
    scored: Scored,
}

impl Sequence {
    fn new(bank: StateBank, Targets { inputs, targets }: Targets) -> Self {
        Self { bank, inputs, targets, read: 0, scored: Scored::NONE }
    }

    /// Adds the losses of the next inputs.
    fn note(&mut self, nll: &[f32], greedy: &[u32]) -> Result<()> {
        for (nll, greedy) in nll.iter().zip(greedy) {
            let target = self.targets[self.read];
            self.read += 1;
            if target == IGNORE {
                continue;
            }
            if !nll.is_finite() {
                return Err(Error::Diverged(format!(
                    "the model's logits after {} tokens are not finite: its weights are damaged, or their training \
                     diverged; use an earlier checkpoint",
                    self.read
                )));
            }
            self.scored.loglikelihood -= f64::from(*nll);
            self.scored.is_greedy &= *greedy == target;
            self.scored.tokens += 1;
        }
        Ok(())
    }
}

/// A text that is being generated.
struct GeneratingText {
    number: usize,
    session: Session,
    text: String,
}

//! A text that the model is writing for a job.

use std::sync::{Arc, Mutex};

use march_lm::Result;
use march_lm::anchors::Anchor;
use march_lm::generate::{Sampling, Session, StopReason, most_probable};
use march_lm::model::TraceCell;
use march_lm::tokenizer::Tokenizer;

use crate::job::{Event, FinishedChoice, Job, ScoredToken};
use crate::prefix::CachedPrefix;

/// A text that is being written.
pub(crate) struct Choice {
    number: usize,
    pub session: Session,
    /// The tokens of the answer so far.
    ids: Vec<u32>,
    /// Records which anchors are read, if that was asked.
    trace: Option<TraceCell>,
    /// The anchors before the answer.
    anchors: Vec<Anchor>,
}

impl Choice {
    /// Begins the texts of a job whose prompt was read.
    pub fn all(job: &Job, tokenizer: &Tokenizer, read: &Session) -> Result<Vec<Self>> {
        let begin = |(number, &sampling): (usize, &Sampling)| {
            let mut session = Session::new(read.text().clone(), sampling)?;
            session.begin(tokenizer, job.limits.clone())?;
            // Begins with the last token of the prompt, which chose the first token of the answer.
            let trace = read.trace().map(|trace| {
                let read = trace.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                Arc::new(Mutex::new(read.clone()))
            });
            session.set_trace(trace.clone());
            let anchors = read.text().bank().timeline().kept.clone();
            Ok(Self { number, session, ids: Vec::new(), trace, anchors })
        };
        job.choices.iter().enumerate().map(begin).collect()
    }

    /// The whole text. Before a stop string, its last tokens are others than those that were sampled, and unread.
    pub fn prefix(&self, prompt: &[u32]) -> CachedPrefix {
        let text = self.session.text().clone();
        let read = text.tokens() - text.unread().len();
        let mut ids: Vec<u32> = prompt.iter().chain(&self.ids).copied().take(read).collect();
        ids.extend(text.unread());
        CachedPrefix { ids, text }
    }

    /// What is left of the text when it has ended.
    pub fn finish(
        self,
        prefix: CachedPrefix,
        departure: Option<CachedPrefix>,
        exact: bool,
    ) -> FinishedChoice {
        let recall = self.trace.as_ref().map(|trace| {
            // A panic of another thread cannot leave a trace half written: only this one writes to it.
            let trace = trace.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            trace.means()
        });
        let bank = prefix.text.bank();
        let mut anchors = self.anchors;
        anchors.extend(&bank.timeline().kept);
        anchors.sort_by_key(|anchor| anchor.ordinal);
        anchors.dedup_by_key(|anchor| anchor.ordinal);
        let bytes = bank.bytes();
        FinishedChoice { prefix, departure, exact, bytes, recall, anchors }
    }

    /// Samples the next token; returns the reason if the text has ended.
    pub fn advance(&mut self, job: &mut Job, tokenizer: &Tokenizer) -> Result<Option<StopReason>> {
        let logits = job.top.and_then(|_| self.session.logits().map(<[f32]>::to_vec));
        let piece = self.session.advance(tokenizer)?;
        let token = piece.token.map(|id| match (&logits, job.top) {
            (Some(logits), Some(top)) => scored(logits, id, top),
            _ => ScoredToken { id, logprob: 0.0, top: Vec::new() },
        });
        let (mut text, mut ended) = (piece.text, piece.ended);
        // A token that ends a text is not part of it.
        self.ids.extend(piece.token.filter(|_| ended.is_none()));
        if ended.is_none() && self.ids.len() == job.limits.max_tokens {
            // The model need not read the last token.
            let last = self.session.advance(tokenizer)?;
            text += &last.text;
            ended = last.ended;
        }
        job.events.add(Event::Piece { choice: self.number, text, token, ended });
        Ok(ended)
    }
}

/// The log-probabilities of a token and of the most probable ones.
fn scored(logits: &[f32], id: u32, top: usize) -> ScoredToken {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let logprob = |id: u32| (f64::from(logits[id as usize] - largest) - sum.ln()) as f32;
    let top = most_probable(logits, top).map(|id| (id, logprob(id))).collect();
    ScoredToken { id, logprob: logprob(id), top }
}

//! Recall tasks: sequences that state facts and later ask for them.
//!
//! A task is one file and one entry of [`TASKS`]. Its text form is its name and the sizes that differ from the
//! defaults, `mqar:pairs=24:vocabulary=64`. It serves both as a source of training sequences ([`RecallSource`]) and as
//! questions for `march eval`. Example i of a seed is always the same; training examples and questions are drawn from
//! separate streams.

mod diary;
mod mqar;
mod needle;
mod random;
mod sizes;
mod versioned;

use std::sync::Arc;

use march_engine::ops::cross_entropy::IGNORE;

pub use self::random::Random;
pub use self::sizes::{Size, Sizes};
use super::Source;
use super::loader::fingerprint;
use crate::config::choice;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// The seed of the questions, which is the same for all models.
pub const QUESTION_SEED: u64 = 0;

/// The seed of the questions that experiments report. Validation during training, by which learning rates are chosen,
/// uses [`QUESTION_SEED`].
pub const REPORT_SEED: u64 = 1;

/// Token 0 of a task with a language: the end of a text.
const END: u32 = 0;

/// One question of an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// The position of the token after which the answer is expected.
    pub position: usize,
    /// The answer, a token id.
    pub answer: u32,
    /// The position at which the answer was stated.
    pub fact: usize,
}

impl Question {
    /// Number of tokens from the fact to the question.
    pub fn age(&self) -> usize {
        self.position - self.fact
    }
}

/// A sequence and its questions, ordered by position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The questions.
    pub questions: Vec<Question>,
    /// Positions after which training expects the end of the text, although nothing is asked and the text may go on.
    pub ends: Vec<usize>,
}

/// A task of given sizes.
struct Recall {
    length: usize,
    questions: usize,
    answers: usize,
    vocabulary: Vec<String>,
    /// How its texts are written; without it, the tokens' names with spaces between them.
    language: Option<Language>,
    /// Draws a sequence, which may be easier in training.
    draw: Box<dyn Fn(&mut Random, Use) -> Example + Send + Sync>,
}

/// How a task's texts are written and read. Token 0 is their end.
#[derive(Clone, Copy)]
struct Language {
    /// The words that are not tokens and that a reader may ignore.
    ignored: &'static [&'static str],
    /// Writes a text.
    write: fn(&[String], &[u32]) -> String,
    /// The most positions of an example after which training expects the end of the text.
    ends: usize,
}

/// What a sequence is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Training,
    Evaluation,
}

/// A kind of task, independent of its sizes.
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    /// A one-line description of what it asks for.
    pub about: &'static str,
    /// Its sizes with their defaults.
    pub sizes: &'static [Size],
    /// Builds the task with the given sizes; sequences have the requested length, or the shortest possible one.
    build: fn(&Sizes, Option<usize>) -> Result<Recall>,
}

/// All tasks.
pub const TASKS: [&Kind; 4] = [&mqar::KIND, &versioned::KIND, &diary::KIND, &needle::KIND];

/// A task with its sizes.
#[derive(Clone)]
pub struct Task {
    sizes: Sizes,
    recall: Arc<Recall>,
}

impl Task {
    /// Parses `name:size=number:…`; sequences have the requested length, or the shortest possible one.
    pub fn open(text: &str, length: Option<usize>) -> Result<Self> {
        let name = text.split(':').next().unwrap_or_default();
        let Some(kind) = TASKS.iter().find(|kind| kind.name == name) else {
            let choice = choice(name, "the tasks are", TASKS.iter().map(|kind| kind.name));
            return Err(Error::Request(format!("`{name}` is not a task; {choice}")));
        };
        let sizes = Sizes::read(kind, text)?;
        let recall = (kind.build)(&sizes, length)?;
        Ok(Self { sizes, recall: Arc::new(recall) })
    }

    /// The task and all of its sizes in text form.
    pub fn text(&self) -> String {
        self.sizes.to_string()
    }

    /// A one-line description of what it asks for.
    pub fn about(&self) -> &'static str {
        self.sizes.kind().about
    }

    /// The task's name.
    pub fn name(&self) -> &'static str {
        self.sizes.kind().name
    }

    /// T, the number of tokens per sequence.
    pub fn length(&self) -> usize {
        self.recall.length
    }

    /// Questions per sequence; a training sequence may have fewer.
    pub fn questions(&self) -> usize {
        self.recall.questions
    }

    /// The number of possible answers; guessing is right once in that many.
    pub fn answers(&self) -> usize {
        self.recall.answers
    }

    /// The names of the tokens by id, without white space.
    pub fn vocabulary(&self) -> Vec<String> {
        self.recall.vocabulary.clone()
    }

    /// The tokens as a text, which [`Task::tokenizer`] reads as the same tokens.
    pub fn write(&self, tokens: &[u32]) -> String {
        let names = &self.recall.vocabulary;
        match self.recall.language {
            Some(language) => (language.write)(names, tokens),
            None => {
                let words = tokens.iter().filter_map(|&id| names.get(id as usize)).map(String::as_str);
                words.collect::<Vec<_>>().join(" ")
            }
        }
    }

    /// The tokenizer of its texts: each token of the vocabulary is a word or a phrase.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match self.recall.language {
            Some(language) => Tokenizer::phrases(&self.recall.vocabulary, language.ignored),
            None => Tokenizer::words(&self.recall.vocabulary),
        }
    }

    /// Training example i, which may be easier than those of evaluation.
    pub fn lesson(&self, seed: u64, index: u64) -> Example {
        (self.recall.draw)(&mut Random::new(seed, index.wrapping_mul(2)), Use::Training)
    }

    /// Evaluation example i.
    pub fn asked(&self, seed: u64, index: u64) -> Example {
        (self.recall.draw)(&mut Random::new(seed, index.wrapping_mul(2).wrapping_add(1)), Use::Evaluation)
    }
}

/// Training sequences of a task, or the first of its evaluation sequences.
pub struct RecallSource {
    task: Task,
    seed: u64,
    asked: Option<u64>,
}

impl RecallSource {
    /// An endless source of training sequences.
    pub fn lessons(task: Task, seed: u64) -> Self {
        Self { task, seed, asked: None }
    }

    /// The first `count` evaluation sequences, which are the same for every model.
    pub fn asked(task: Task, count: u64) -> Self {
        Self { task, seed: QUESTION_SEED, asked: Some(count) }
    }
}

impl Source for RecallSource {
    fn sequence_length(&self) -> usize {
        self.task.length()
    }

    fn sequences(&self) -> u64 {
        self.asked.unwrap_or(u64::MAX)
    }

    fn targets(&self) -> usize {
        let ends = self.task.recall.language.filter(|_| self.asked.is_none()).map_or(0, |it| it.ends);
        self.task.questions() + ends
    }

    fn sequence(&self, index: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        let example = match self.asked {
            Some(_) => self.task.asked(self.seed, index),
            None => self.task.lesson(self.seed, index),
        };
        let from = targets.len();
        inputs.extend_from_slice(&example.tokens);
        targets.resize(from + example.tokens.len(), IGNORE);
        for question in &example.questions {
            targets[from + question.position] = question.answer;
        }
        if self.asked.is_none() {
            example.ends.iter().for_each(|&position| targets[from + position] = END);
        }
        Ok(())
    }

    fn fingerprint(&self) -> Result<String> {
        let which = match self.asked {
            Some(count) => format!("asked {count}"),
            None => format!("lessons {}", self.seed),
        };
        // Some sequences, so that a change in how they are drawn is detected.
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for index in 0..self.sequences().min(4) {
            self.sequence(index, &mut inputs, &mut targets)?;
        }
        let about = format!("{} {} {which}", self.task.text(), self.task.length());
        Ok(fingerprint(&about, &[&inputs, &targets]))
    }
}

/// The names of a vocabulary: one token, then for each letter so many with a number.
fn named(first: &str, groups: &[(char, usize)]) -> Vec<String> {
    let numbered =
        groups.iter().flat_map(|&(letter, count)| (1..=count).map(move |i| format!("{letter}{i}")));
    std::iter::once(first.to_string()).chain(numbered).collect()
}

/// Rejects a length below the minimum, and uses the minimum if none is given.
fn at_least(kind: &Kind, length: Option<usize>, least: usize) -> Result<usize> {
    match length {
        Some(length) if length < least => Err(Error::Request(format!(
            "`{}` with these sizes needs sequences of {least} tokens or more, not {length}",
            kind.name
        ))),
        length => Ok(length.unwrap_or(least)),
    }
}

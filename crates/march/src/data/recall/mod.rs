//! Recall tasks: sequences that state facts and later ask for them.
//!
//! A task is one file and one entry of [`TASKS`]. It is written as its name and the sizes that differ from the
//! defaults, `mqar:pairs=24:vocabulary=64`, and serves both as a source of training sequences ([`RecallSource`]) and
//! as questions for `march eval`. Example i of a seed is always the same; those to learn from and those to be asked
//! are drawn apart.

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

/// The seed of the questions that all models are asked.
pub const QUESTION_SEED: u64 = 0;

/// One question of an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// The position of the token after which the answer is due.
    pub position: usize,
    /// The answer, a token id.
    pub answer: u32,
    /// The position at which the answer was stated.
    pub fact: usize,
}

impl Question {
    /// Tokens from the fact to the question.
    pub fn age(&self) -> usize {
        self.position - self.fact
    }
}

/// A sequence and its questions, by position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The questions.
    pub questions: Vec<Question>,
}

/// A task of given sizes.
pub trait Recall: Send + Sync {
    /// T, tokens of a sequence.
    fn length(&self) -> usize;

    /// Questions of a sequence; in one to learn from there may be fewer.
    fn questions(&self) -> usize;

    /// How many answers are possible: guessing is right once in so many.
    fn answers(&self) -> usize;

    /// The tokens' names by id, without white space.
    fn vocabulary(&self) -> Vec<String>;

    /// Draws a sequence.
    fn example(&self, random: &mut Random) -> Example;

    /// Draws a sequence to learn from, which may be easier than those that are asked.
    fn lesson(&self, random: &mut Random) -> Example {
        self.example(random)
    }
}

/// What is known of a task before its sizes are.
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    /// What it asks for, in one line.
    pub about: &'static str,
    /// Its sizes with their defaults.
    pub sizes: &'static [Size],
    /// The task of given sizes; its sequences are as long as is asked for, or as short as they can be.
    build: fn(&Sizes, Option<usize>) -> Result<Box<dyn Recall>>,
}

/// All tasks.
pub const TASKS: [&Kind; 3] = [&mqar::KIND, &versioned::KIND, &needle::KIND];

/// A task with its sizes.
#[derive(Clone)]
pub struct Task {
    sizes: Sizes,
    recall: Arc<dyn Recall>,
}

impl Task {
    /// Reads `name:size=number:…`; sequences are as long as is asked for, or as short as they can be.
    pub fn open(text: &str, length: Option<usize>) -> Result<Self> {
        let name = text.split(':').next().unwrap_or_default();
        let Some(kind) = TASKS.iter().find(|kind| kind.name == name) else {
            let choice = choice(name, "the tasks are", TASKS.iter().map(|kind| kind.name));
            return Err(Error::Request(format!("`{name}` is no task; {choice}")));
        };
        let sizes = Sizes::read(kind, text)?;
        let recall = (kind.build)(&sizes, length)?;
        Ok(Self { sizes, recall: recall.into() })
    }

    /// The task and all of its sizes, as they are written.
    pub fn text(&self) -> String {
        self.sizes.to_string()
    }

    /// What it asks for, in one line.
    pub fn about(&self) -> &'static str {
        self.sizes.kind().about
    }

    /// The task's name.
    pub fn name(&self) -> &'static str {
        self.sizes.kind().name
    }

    /// Example i of those to learn from.
    pub fn lesson(&self, seed: u64, index: u64) -> Example {
        self.recall.lesson(&mut Random::new(seed, index.wrapping_mul(2)))
    }

    /// Example i of those to be asked.
    pub fn asked(&self, seed: u64, index: u64) -> Example {
        self.recall.example(&mut Random::new(seed, index.wrapping_mul(2).wrapping_add(1)))
    }
}

impl std::ops::Deref for Task {
    type Target = dyn Recall;

    fn deref(&self) -> &Self::Target {
        self.recall.as_ref()
    }
}

/// Sequences of a task to learn from, or the first of those that are asked.
pub struct RecallSource {
    task: Task,
    seed: u64,
    asked: Option<u64>,
}

impl RecallSource {
    /// Sequences to learn from, without end.
    pub fn lessons(task: Task, seed: u64) -> Self {
        Self { task, seed, asked: None }
    }

    /// The first `count` sequences that every model is asked.
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
        self.task.questions()
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
        Ok(())
    }

    fn fingerprint(&self) -> Result<String> {
        let which = match self.asked {
            Some(count) => format!("asked {count}"),
            None => format!("lessons {}", self.seed),
        };
        // Some sequences, so that a change of how they are drawn is noticed.
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for index in 0..self.sequences().min(4) {
            self.sequence(index, &mut inputs, &mut targets)?;
        }
        let about = format!("{} {} {which}", self.task.text(), self.task.length());
        Ok(fingerprint(&about, &[&inputs, &targets]))
    }
}

/// Refuses a length below the least, and takes the least where none is given.
fn at_least(kind: &Kind, length: Option<usize>, least: usize) -> Result<usize> {
    match length {
        Some(length) if length < least => Err(Error::Request(format!(
            "`{}` with these sizes needs sequences of {least} tokens or more, not {length}",
            kind.name
        ))),
        length => Ok(length.unwrap_or(least)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Every question's answer stands where its fact is said to be, and before it.
    #[test]
    fn answers_stand_where_their_facts_are() {
        for text in [
            "mqar",
            "mqar:pairs=3:vocabulary=10",
            "mqar:pairs=9:fewest=2",
            "versioned",
            "versioned:documents=1:keys=2",
            "needle",
        ] {
            let task = Task::open(text, None).unwrap();
            let names = task.vocabulary();
            for index in 0..50 {
                let example = task.lesson(3, index);
                assert_eq!(example.tokens.len(), task.length(), "{text}");
                assert_eq!(task.asked(3, index).questions.len(), task.questions(), "{text}");
                assert!(example.questions.len() <= task.questions(), "{text}");
                assert!(example.tokens.iter().all(|&id| (id as usize) < names.len()), "{text}");
                for pair in example.questions.windows(2) {
                    assert!(pair[0].position < pair[1].position, "{text}");
                }
                for question in &example.questions {
                    assert!(question.fact < question.position, "{text}");
                    assert_eq!(example.tokens[question.fact], question.answer, "{text}");
                    assert!(names[question.answer as usize].starts_with('v'), "{text}");
                    // The key that is asked stands before its value.
                    assert_eq!(
                        example.tokens[question.fact - 1],
                        example.tokens[question.position],
                        "{text}"
                    );
                }
            }
        }
    }

    #[test]
    fn examples_repeat_and_differ() {
        let task = Task::open("mqar", None).unwrap();
        assert_eq!(task.lesson(1, 5), task.lesson(1, 5));
        assert_ne!(task.lesson(1, 5), task.lesson(2, 5));
        let mut seen = HashMap::new();
        for index in 0..500 {
            for example in [task.lesson(0, index), task.asked(0, index)] {
                assert!(seen.insert(example.tokens, index).is_none(), "example {index} came twice");
            }
        }
    }

    #[test]
    fn longer_sequences_keep_their_questions() {
        for kind in TASKS {
            let least = Task::open(kind.name, None).unwrap().length();
            for length in [least, least + 1, 2 * least + 3] {
                let task = Task::open(kind.name, Some(length)).unwrap();
                let example = task.asked(0, 0);
                assert_eq!((task.length(), example.tokens.len()), (length, length), "{}", kind.name);
            }
            let refused = Task::open(kind.name, Some(least - 1)).err().unwrap().to_string();
            assert!(refused.contains(&least.to_string()), "{refused}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refused = |text: &str| Task::open(text, None).err().unwrap().to_string();
        assert!(refused("mqra").contains("mqar"));
        assert!(refused("mqar:pears=3").contains("pairs"));
        assert!(refused("mqar:pairs=x").contains("whole number"));
        assert!(refused("mqar:pairs").contains("pairs=24"));
        assert!(refused("mqar:pairs=0").contains("at least 1"));
        assert!(refused("mqar:pairs=40:vocabulary=64").contains("31"));
        assert!(refused("versioned:documents=9:values=4").contains('9'));
        assert!(refused("needle:depth=101").contains("100"));
        let task = Task::open("mqar:vocabulary=66", None).unwrap();
        assert_eq!(task.text(), "mqar:pairs=24:fewest=0:vocabulary=66");
    }

    #[test]
    fn targets_are_where_questions_are() {
        let task = Task::open("versioned", None).unwrap();
        let source = RecallSource::asked(task.clone(), 4);
        let (mut inputs, mut targets) = (vec![7], vec![9]);
        source.sequence(2, &mut inputs, &mut targets).unwrap();
        let example = task.asked(QUESTION_SEED, 2);
        assert_eq!(&inputs[1..], &example.tokens);
        assert_eq!(targets[1..].iter().filter(|&&id| id != IGNORE).count(), source.targets());
        assert!(example.questions.iter().all(|question| targets[1 + question.position] == question.answer));
    }
}

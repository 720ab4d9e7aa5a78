//! Recall tasks: sequences that state facts and later ask for them.
//!
//! A task is one file and one entry of [`TASKS`]. Its text form is its name and the sizes that differ from the
//! defaults, `mqar:pairs=24:vocabulary=64`. It serves both as a source of training sequences ([`RecallSource`]) and as
//! questions for `march eval`. Example i of a seed is always the same; training examples and questions are drawn from
//! separate streams.

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

/// The seed of the questions, which is the same for all models.
pub const QUESTION_SEED: u64 = 0;

/// The seed of the questions that experiments report. Validation during training, by which learning rates are chosen,
/// uses [`QUESTION_SEED`].
pub const REPORT_SEED: u64 = 1;

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
}

/// A task of given sizes.
pub trait Recall: Send + Sync {
    /// T, the number of tokens per sequence.
    fn length(&self) -> usize;

    /// Questions per sequence; a training sequence may have fewer.
    fn questions(&self) -> usize;

    /// The number of possible answers; guessing is right once in that many.
    fn answers(&self) -> usize;

    /// The names of the tokens by id, without white space.
    fn vocabulary(&self) -> Vec<String>;

    /// Draws a sequence.
    fn example(&self, random: &mut Random) -> Example;

    /// Draws a training sequence, which may be easier than evaluation sequences.
    fn lesson(&self, random: &mut Random) -> Example {
        self.example(random)
    }
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
    /// Parses `name:size=number:…`; sequences have the requested length, or the shortest possible one.
    pub fn open(text: &str, length: Option<usize>) -> Result<Self> {
        let name = text.split(':').next().unwrap_or_default();
        let Some(kind) = TASKS.iter().find(|kind| kind.name == name) else {
            let choice = choice(name, "the tasks are", TASKS.iter().map(|kind| kind.name));
            return Err(Error::Request(format!("`{name}` is not a task; {choice}")));
        };
        let sizes = Sizes::read(kind, text)?;
        let recall = (kind.build)(&sizes, length)?;
        Ok(Self { sizes, recall: recall.into() })
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

    /// Training example i.
    pub fn lesson(&self, seed: u64, index: u64) -> Example {
        self.recall.lesson(&mut Random::new(seed, index.wrapping_mul(2)))
    }

    /// Evaluation example i.
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
        // Some sequences, so that a change in how they are drawn is detected.
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for index in 0..self.sequences().min(4) {
            self.sequence(index, &mut inputs, &mut targets)?;
        }
        let about = format!("{} {} {which}", self.task.text(), self.task.length());
        Ok(fingerprint(&about, &[&inputs, &targets]))
    }
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Every question's answer is at the position of its fact, and that position is before the question.
    #[test]
    fn answers_stand_where_their_facts_are() {
        for text in [
            "mqar",
            "mqar:pairs=3:vocabulary=10",
            "mqar:pairs=9:fewest=2",
            "versioned",
            "versioned:documents=1:keys=2",
            "versioned:documents=5:names=9:fewest=2",
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
                    // The key that is asked for precedes its value.
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
        assert!(refused("versioned:names=3").contains("4 documents need as many names"));
        assert!(refused("versioned:fewest=5").contains("more than the 4 documents"));
        assert!(refused("needle:depth=101").contains("100"));
        let task = Task::open("mqar:vocabulary=66", None).unwrap();
        assert_eq!(task.text(), "mqar:pairs=24:fewest=0:vocabulary=66");
        // Sizes that were added later do not change the text of a task that does not use them.
        let text = "versioned:documents=4:keys=8:values=32:questions=16";
        assert_eq!(Task::open("versioned", None).unwrap().text(), text);
        let task = Task::open("versioned:names=16", None).unwrap();
        assert_eq!(task.text(), format!("{text}:names=16"));
    }

    /// With `names`, only the name tells which document is asked for; with `fewest`, lessons vary in size.
    #[test]
    fn documents_have_drawn_names() {
        let task = Task::open("versioned:documents=3:keys=2:names=8:fewest=1", None).unwrap();
        let (mut firsts, mut counts) = (vec![0; 8], vec![0; 4]);
        for index in 0..400 {
            let is_name = |id: &&u32| (1..=8).contains(*id);
            let example = task.asked(0, index);
            let names: Vec<u32> = (0..3).map(|document| example.tokens[document * 5]).collect();
            assert!(names.iter().all(|id| is_name(&id)) && names[0] != names[1] && names[1] != names[2]);
            firsts[names[0] as usize - 1] += 1;
            for question in &example.questions {
                let (name, document) = (example.tokens[question.position - 1], question.fact / 5);
                assert_eq!(name, names[document]);
            }
            let lesson = task.lesson(0, index);
            let context = &lesson.tokens[..task.length() - 2 * task.questions()];
            counts[context.iter().filter(is_name).count()] += 1;
        }
        assert!(firsts.iter().all(|&count| count > 25), "{firsts:?}");
        assert!(counts[0] == 0 && counts[1..].iter().all(|&count| count > 90), "{counts:?}");
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

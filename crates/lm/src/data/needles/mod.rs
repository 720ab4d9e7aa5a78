//! Needles in a haystack: the prompts of RULER's retrieval tasks in the words of lm-evaluation-harness, for evaluation
//! and as [lessons](NeedleSource) for training.
//!
//! A prompt is a long text, the haystack, in which some sentences, the needles, each give a value to a key; at its end
//! it asks for the values of one or several keys. [`Needles::fit`] makes prompts of a length for a tokenizer: as long
//! as they can be such that the prompt and [`GENERATED`] tokens of an answer fit into it.
//!
//! Sample i of a task and a seed has the same needles at the same relative depths at all lengths and for all
//! tokenizers, and does not depend on which other tasks are asked. In the harness all tasks draw from one stream.

mod essay;
mod fit;
mod lessons;
mod words;

use sha2::{Digest, Sha256};

pub use self::essay::Essay;
pub use self::fit::{FittedTask, GENERATED};
#[doc(hidden)]
pub use self::fit::{Size, largest};
pub use self::lessons::{LessonOptions, NeedleSource};
pub use self::words::Item;
use self::words::Items;
use super::recall::Random;
use crate::config::choice;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// What needles are hidden in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Haystack {
    /// One line again and again.
    Repeat,
    /// A text ([`Essay`]).
    Essay,
    /// Other needles, one per line.
    Needles,
}

/// A task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needles {
    /// What the needles are hidden in.
    pub haystack: Haystack,
    /// The keys.
    pub key: Item,
    /// The values.
    pub value: Item,
    /// Number of keys that have needles; at least as many as are asked for.
    pub keys: usize,
    /// Number of values, hence of needles, per key.
    pub values: usize,
    /// Number of keys that are asked for.
    pub queries: usize,
}

/// One number of one key in a text. The other tasks are given by how they differ from it.
const NUMBER: Needles = Needles {
    haystack: Haystack::Essay,
    key: Item::Word,
    value: Item::Number,
    keys: 1,
    values: 1,
    queries: 1,
};
const REPEAT: Needles = Needles { haystack: Haystack::Repeat, ..NUMBER };
const UUID: Needles = Needles { value: Item::Uuid, ..NUMBER };
const LINES: Needles = Needles { haystack: Haystack::Needles, ..NUMBER };
const UUID_LINES: Needles = Needles { key: Item::Uuid, value: Item::Uuid, ..LINES };

/// A task with its names.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    /// The name, as in lm-evaluation-harness.
    pub name: &'static str,
    /// The name in the paper, if the paper reports the task.
    pub paper: Option<&'static str>,
    /// One line that says what is hidden.
    pub about: &'static str,
    /// What is hidden.
    pub needles: Needles,
}

/// The tasks of RULER; the paper reports six of them.
pub const TASKS: [Task; 8] = [
    task("niah_single_1", Some("S-NIAH-1"), "a number in a line that repeats", REPEAT),
    task("niah_single_2", Some("S-NIAH-2"), "a number in a text", NUMBER),
    task("niah_single_3", Some("S-NIAH-3"), "a uuid in a text", UUID),
    task(
        "niah_multikey_1",
        Some("MK-NIAH-1"),
        "one of four numbers in a text",
        Needles { keys: 4, ..NUMBER },
    ),
    task("niah_multikey_2", None, "a number in lines with other numbers", LINES),
    task("niah_multikey_3", None, "a uuid in lines with other uuids", UUID_LINES),
    task(
        "niah_multivalue",
        Some("MV-NIAH"),
        "four numbers of a key in a text",
        Needles { values: 4, ..NUMBER },
    ),
    task(
        "niah_multiquery",
        Some("MQ-NIAH"),
        "the numbers of four keys in a text",
        Needles { keys: 4, queries: 4, ..NUMBER },
    ),
];

const fn task(
    name: &'static str,
    paper: Option<&'static str>,
    about: &'static str,
    needles: Needles,
) -> Task {
    Task { name, paper, about, needles }
}

impl Task {
    /// The tasks of a list of names with commas between them.
    pub fn list(names: &str) -> Result<Vec<Self>> {
        let one = |name: &str| {
            let known = TASKS.iter().map(|task| task.name);
            TASKS.iter().find(|task| task.name == name).copied().ok_or_else(|| {
                let choice = choice(name, "the tasks are", known);
                Error::Request(format!("`{name}` is not a needle task; {choice}"))
            })
        };
        names.split(',').map(|name| one(name.trim())).collect()
    }

    /// The names of the paper's tasks, as [`Task::list`] reads them.
    pub fn paper() -> String {
        let names: Vec<&str> =
            TASKS.iter().filter(|task| task.paper.is_some()).map(|task| task.name).collect();
        names.join(",")
    }
}

/// The line of [`Haystack::Repeat`].
const LINE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

/// The depths of needles in a text are drawn from this many, which are equally far apart.
const DEPTHS: usize = 40;

/// One of the depths, in whole percent.
fn depth(index: usize) -> f64 {
    (100.0 * index as f64 / (DEPTHS - 1) as f64).round()
}

/// A needle of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Needle {
    /// The key.
    pub key: String,
    /// The value.
    pub value: String,
    /// How much of the haystack is before it, in percent.
    pub depth: f64,
}

/// A prompt and its answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The prompt, with the beginning of the answer.
    pub prompt: String,
    /// The values that are asked for.
    pub answers: Vec<String>,
    /// The depths in percent at which the answers are, in the order of the answers.
    pub depths: Vec<f64>,
    /// All needles in the order of the text, without those that make up a haystack of needles.
    pub needles: Vec<Needle>,
    /// Number of tokens of the prompt.
    pub tokens: usize,
}

/// What a prompt is made with, apart from its task.
#[derive(Clone, Copy)]
struct Place<'a> {
    tokenizer: &'a Tokenizer,
    essay: &'a Essay,
    /// The sentence of the essay that the haystack begins with.
    first: usize,
}

impl Needles {
    /// The number of needles.
    fn count(&self) -> usize {
        self.keys.max(self.queries) * self.values
    }

    /// Rejects numbers of needles that cannot be drawn.
    fn check(&self) -> Result<()> {
        let sizes = [self.keys, self.values, self.queries];
        if sizes.iter().all(|size| (1..=DEPTHS).contains(size)) && self.count() <= DEPTHS {
            return Ok(());
        }
        let [keys, values, queries] = sizes;
        Err(Error::Request(format!(
            "{keys} keys with {values} values, of which {queries} are asked for, are not possible: \
             there must be 1 to {DEPTHS} needles, and at least one question"
        )))
    }

    /// The stream of random numbers, which depends on the task and the seed.
    fn stream(&self, seed: u64) -> u64 {
        let Self { haystack, key, value, keys, values, queries } = *self;
        let haystack = match haystack {
            Haystack::Repeat => "repeat",
            Haystack::Essay => "essay",
            Haystack::Needles => "needles",
        };
        let (key, value) = (key.plural(), value.plural());
        seed_of(&format!("{haystack} {key} {value} {keys} {values} {queries} {seed}"))
    }

    /// Draws a sample with a haystack of a given size. What does not depend on the size is drawn first, so
    /// that it is the same at all sizes.
    fn draw(&self, place: Place<'_>, units: usize, random: Random) -> Result<Drawn> {
        let Self { key, value, values, queries, .. } = *self;
        let mut items = Items::new(random);
        let keys: Vec<String> = (0..self.keys.max(queries)).map(|_| items.next(key)).collect();
        let owned: Vec<Vec<String>> =
            keys.iter().map(|_| (0..values).map(|_| items.next(value)).collect()).collect();
        let asked = items.random.distinct(queries, keys.len());
        let count = self.count();
        // The order of the needles in the text, as indices of all values.
        let order = items.random.distinct(count, count);
        let places = self.places(place, units, &mut items.random);
        let needles: Vec<Needle> = order
            .iter()
            .zip(&places)
            .map(|(&i, &(_, depth))| {
                let (key, value) = (keys[i / values].clone(), owned[i / values][i % values].clone());
                Needle { key, value, depth }
            })
            .collect();
        let context = self.context(place, units, &needles, &places, &mut items);
        let prompt = self.prompt(&context, &asked.iter().map(|&i| keys[i].as_str()).collect::<Vec<_>>());
        let answers: Vec<String> = asked.iter().flat_map(|&i| owned[i].clone()).collect();
        let depth_of = |answer: &String| {
            needles.iter().find(|needle| needle.value == *answer).map(|needle| needle.depth)
        };
        let depths = answers.iter().filter_map(depth_of).collect();
        let tokens = place.tokenizer.encode(&prompt)?.len();
        Ok(Drawn { prompt, answers, depths, needles, tokens })
    }

    /// Where the needles are, ascending: the index of the sentence or line that each is put before, and its
    /// depth.
    fn places(&self, place: Place<'_>, units: usize, random: &mut Random) -> Vec<(usize, f64)> {
        let count = self.count();
        if self.haystack == Haystack::Essay {
            let mut drawn = random.distinct(count, DEPTHS);
            drawn.sort_unstable();
            let sentences = place.essay.sentences(place.first, units) as f64;
            drawn.into_iter().map(|i| ((sentences * (depth(i) / 100.0)) as usize, depth(i))).collect()
        } else {
            let mut drawn = random.distinct(count, units);
            drawn.sort_unstable();
            drawn.into_iter().map(|i| (i, 100.0 * i as f64 / units as f64)).collect()
        }
    }

    /// The haystack with the needles in it.
    fn context(
        &self,
        place: Place<'_>,
        units: usize,
        needles: &[Needle],
        places: &[(usize, f64)],
        items: &mut Items,
    ) -> String {
        let Self { haystack, key, value, .. } = *self;
        let mut text = String::new();
        let mut needles = places.iter().zip(needles).map(|(&(at, _), needle)| (at, needle)).peekable();
        if haystack == Haystack::Essay {
            // As in the harness, what is between two needles may be empty, and then two spaces follow each
            // other.
            let Place { essay, first, .. } = place;
            let (mut from, end) = (essay.start(first), essay.start(first) + units);
            for (at, needle) in needles {
                let to = if at < essay.sentences(first, units) { essay.start(first + at) } else { end };
                essay.append(from..to, &mut text);
                text = text + " " + &self.sentence(&needle.key, &needle.value) + " ";
                from = to;
            }
            essay.append(from..end, &mut text);
            return text;
        }
        for line in 0..units {
            if let Some((_, needle)) = needles.next_if(|&(at, _)| at == line) {
                text = text + &self.sentence(&needle.key, &needle.value) + "\n";
            }
            if haystack == Haystack::Repeat {
                text += LINE;
            } else {
                let (key, value) = (items.next(key), items.next(value));
                text += &self.sentence(&key, &value);
            }
            text.push('\n');
        }
        text.pop();
        text
    }

    fn sentence(&self, key: &str, value: &str) -> String {
        format!("One of the special magic {} for {key} is: {value}.", self.value.plural())
    }

    /// The whole prompt, with the beginning of the answer.
    fn prompt(&self, context: &str, asked: &[&str]) -> String {
        let query = listed(asked);
        let one = self.queries * self.values == 1;
        let what = if one { self.value.singular() } else { self.value.plural() };
        let (some, are, are_all) = if one { ("A", "is", "is") } else { ("Some", "are", "are all") };
        format!(
            "{some} special magic {what} {are} hidden within the following text. Make sure to memorize it. \
             I will quiz you about the {what} afterwards.\n\
             {context}\n\
             What {are_all} the special magic {what} for {query} mentioned in the provided text? \
             The special magic {what} for {query} mentioned in the provided text {are}"
        )
    }
}

/// The seed of random numbers that depends on a text.
fn seed_of(text: &str) -> u64 {
    Sha256::digest(text).iter().take(8).fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// "a, b, and c"
fn listed(texts: &[&str]) -> String {
    match texts {
        [others @ .., last] if !others.is_empty() => format!("{}, and {last}", others.join(", ")),
        _ => texts.concat(),
    }
}

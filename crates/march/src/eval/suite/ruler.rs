//! Needles in a haystack: the retrieval tasks of RULER in the words of lm-evaluation-harness.
//!
//! A prompt is a long text, the haystack, in which some sentences, the needles, each give a value to a key;
//! at its end it asks for the values of one or several keys. Prompts are made for a tokenizer and a length:
//! as long as they can be such that the prompt and [`GENERATED`] tokens of an answer fit into the length.
//!
//! Sample i of a task and a seed has the same needles at the same relative depths at all lengths and for all
//! tokenizers, and does not depend on which other tasks are asked. In the harness all tasks draw from one
//! stream.

mod essay;
mod words;

use sha2::{Digest, Sha256};

pub use self::essay::Essay;
pub use self::words::Item;
use self::words::Items;
use super::super::request::Request;
use super::metric::Metric;
use super::{Documents, Gold, Sample, Suite};
use crate::data::LONGEST_SEQUENCE;
use crate::data::recall::Random;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// Number of tokens that a model may answer with; they are part of a task's length.
pub const GENERATED: usize = 128;

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

/// The tasks of RULER; the paper reports six of them.
pub(super) const TASKS: &[Suite] = &[
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
) -> Suite {
    Suite {
        name,
        group: if paper.is_some() { "niah" } else { "niah_extra" },
        about,
        metrics: &[Metric::StringMatchAll],
        paper,
        documents: Documents::Needles(needles),
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

/// A prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The prompt as a request, and the answers.
    pub sample: Sample,
    /// The depths in percent at which the answers are, in the order of the answers.
    pub depths: Vec<f64>,
    /// All needles in the order of the text, without those that make up a haystack of needles.
    pub needles: Vec<Needle>,
    /// Number of tokens of the prompt.
    pub tokens: usize,
}

/// A task at one length for one tokenizer.
pub struct Fitted<'a> {
    needles: Needles,
    tokenizer: &'a Tokenizer,
    essay: &'a Essay,
    length: usize,
    stream: u64,
    /// The size of the haystack in words of the text, or in lines.
    units: usize,
    /// Tokens per unit.
    rate: f64,
}

impl Needles {
    /// Finds how large the haystack may be at a length. Fails if one of the first `samples` samples does not
    /// fit even with the smallest haystack, and says at which length all of them do.
    pub fn fit<'a>(
        &self,
        tokenizer: &'a Tokenizer,
        essay: &'a Essay,
        length: usize,
        seed: u64,
        samples: u64,
    ) -> Result<Fitted<'a>> {
        self.check()?;
        if length as u64 > LONGEST_SEQUENCE {
            return Err(Error::Request(format!(
                "a length of {length} tokens is too long; the longest is {LONGEST_SEQUENCE}"
            )));
        }
        let least = self.count();
        let mut fitted = Fitted {
            needles: *self,
            tokenizer,
            essay,
            length,
            stream: self.stream(seed),
            units: least,
            rate: 1.0,
        };
        let budget = length.saturating_sub(GENERATED);
        let smallest = fitted.tokens(least, 0)?;
        // Samples differ by some tokens, never by half of them: they need to be tried only if it is close.
        if smallest.saturating_mul(2) > budget {
            let mut longest = smallest;
            for index in 1..samples {
                longest = longest.max(fitted.tokens(least, index)?);
            }
            if longest > budget {
                return Err(fitted.too_short(longest));
            }
        }
        // Every unit has at least a token, unless the tokenizer knows nothing of the text.
        let lines = Items::most(self.key).min(Items::most(self.value)) - least;
        let most = if self.haystack == Haystack::Needles { lines.min(4 * length) } else { 4 * length };
        let count = |units| fitted.tokens(units, 0);
        let size = largest((least, smallest), most.max(least), budget, count)?;
        if size.units == most {
            return Err(Error::Request(format!(
                "the largest possible haystack has {most} {}, but the tokenizer `{}` makes only {} tokens \
                 of it; ask for a length below {}",
                if self.haystack == Haystack::Essay { "words" } else { "lines" },
                tokenizer.name(),
                size.tokens,
                size.tokens + GENERATED
            )));
        }
        (fitted.units, fitted.rate) = (size.units, size.rate);
        Ok(fitted)
    }

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
        let hash = Sha256::digest(format!("{haystack} {key} {value} {keys} {values} {queries} {seed}"));
        hash.iter().take(8).fold(0, |number, &byte| number << 8 | u64::from(byte))
    }
}

impl Fitted<'_> {
    /// The size of the haystack: words of a text, or lines. A sample with long keys may have fewer.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Draws sample `index`.
    pub fn sample(&self, index: u64) -> Result<Drawn> {
        let least = self.needles.count();
        let mut units = self.units;
        loop {
            let drawn = self.drawn(units, index)?;
            let excess = (drawn.tokens + GENERATED).saturating_sub(self.length);
            if excess == 0 {
                return Ok(drawn);
            }
            if units == least {
                return Err(self.too_short(drawn.tokens));
            }
            let fewer = (excess as f64 / self.rate).ceil() as usize;
            units = units.saturating_sub(fewer.max(1)).max(least);
        }
    }

    fn too_short(&self, tokens: usize) -> Error {
        Error::Request(format!(
            "a length of {} tokens is too short for {} needles in a prompt of the tokenizer `{}`; \
             the smallest length that fits is {}: the prompt and {GENERATED} tokens of an answer",
            self.length,
            self.needles.count(),
            self.tokenizer.name(),
            tokens + GENERATED
        ))
    }

    fn tokens(&self, units: usize, index: u64) -> Result<usize> {
        Ok(self.drawn(units, index)?.tokens)
    }

    /// Draws a sample with a haystack of a given size. What does not depend on the size is drawn first, so
    /// that it is the same at all sizes.
    fn drawn(&self, units: usize, index: u64) -> Result<Drawn> {
        let Needles { key, value, values, queries, .. } = self.needles;
        let mut items = Items::new(Random::new(self.stream, index));
        let keys: Vec<String> = (0..self.needles.keys.max(queries)).map(|_| items.next(key)).collect();
        let owned: Vec<Vec<String>> =
            keys.iter().map(|_| (0..values).map(|_| items.next(value)).collect()).collect();
        let asked = items.random.distinct(queries, keys.len());
        let count = self.needles.count();
        // The order of the needles in the text, as indices of all values.
        let order = items.random.distinct(count, count);
        let places = self.places(units, &mut items.random);
        let needles: Vec<Needle> = order
            .iter()
            .zip(&places)
            .map(|(&i, &(_, depth))| {
                let (key, value) = (keys[i / values].clone(), owned[i / values][i % values].clone());
                Needle { key, value, depth }
            })
            .collect();
        let context = self.context(units, &needles, &places, &mut items);
        let prompt = self.prompt(&context, &asked.iter().map(|&i| keys[i].as_str()).collect::<Vec<_>>());
        let answers: Vec<String> = asked.iter().flat_map(|&i| owned[i].clone()).collect();
        let depth_of = |answer: &String| {
            needles.iter().find(|needle| needle.value == *answer).map(|needle| needle.depth)
        };
        let depths = answers.iter().filter_map(depth_of).collect();
        let tokens = self.tokenizer.encode(&prompt)?.len();
        let request = Request::GenerateUntil { context: prompt, until: Vec::new(), max_tokens: GENERATED };
        let gold = Gold::Texts { answers, classes: Vec::new() };
        Ok(Drawn { sample: Sample { requests: vec![request], gold }, depths, needles, tokens })
    }

    /// Where the needles are, ascending: the index of the sentence or line that each is put before, and its
    /// depth.
    fn places(&self, units: usize, random: &mut Random) -> Vec<(usize, f64)> {
        let count = self.needles.count();
        if self.needles.haystack == Haystack::Essay {
            let mut drawn = random.distinct(count, DEPTHS);
            drawn.sort_unstable();
            let sentences = self.essay.sentences(units) as f64;
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
        units: usize,
        needles: &[Needle],
        places: &[(usize, f64)],
        items: &mut Items,
    ) -> String {
        let Needles { haystack, key, value, .. } = self.needles;
        let mut text = String::new();
        let mut needles = places.iter().zip(needles).map(|(&(at, _), needle)| (at, needle)).peekable();
        if haystack == Haystack::Essay {
            // As in the harness, what is between two needles may be empty, and then two spaces follow each
            // other.
            let mut from = 0;
            for (at, needle) in needles {
                let to = if at < self.essay.sentences(units) { self.essay.start(at) } else { units };
                self.essay.append(from..to, &mut text);
                text = text + " " + &self.sentence(&needle.key, &needle.value) + " ";
                from = to;
            }
            self.essay.append(from..units, &mut text);
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
        format!("One of the special magic {} for {key} is: {value}.", self.needles.value.plural())
    }

    /// The whole prompt, with the beginning of the answer.
    fn prompt(&self, context: &str, asked: &[&str]) -> String {
        let query = match asked {
            [others @ .., last] if !others.is_empty() => format!("{}, and {last}", others.join(", ")),
            _ => asked.concat(),
        };
        let one = self.needles.queries * self.needles.values == 1;
        let what = if one { self.needles.value.singular() } else { self.needles.value.plural() };
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

/// A size of the haystack.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Size {
    units: usize,
    tokens: usize,
    /// Tokens per unit, about.
    rate: f64,
}

/// How many units the first measurement adds, to estimate the tokens per unit.
const FIRST: usize = 64;

/// A size, up to `most` units, whose tokens are just within the budget; `least`, units and tokens, is one
/// that is. Long texts take long to count, so sizes are estimated from those counted before, and the search
/// ends when what is left of the budget is less than a unit or than 1/256.
fn largest(
    least: (usize, usize),
    most: usize,
    budget: usize,
    count: impl Fn(usize) -> Result<usize>,
) -> Result<Size> {
    // Units that fit and units that are too many, if known, with their tokens.
    let mut low = least;
    let mut high: Option<(usize, usize)> = None;
    let mut rate = 1.0;
    let mut step = FIRST;
    loop {
        let end = high.map_or(most, |high| high.0 - 1);
        if low.0 >= end {
            break;
        }
        let units = low.0.saturating_add(step.max(1)).min(end);
        let tokens = count(units)?;
        rate = per_unit(least, (units, tokens));
        if tokens <= budget {
            low = (units, tokens);
        } else {
            high = Some((units, tokens));
        }
        let left = (budget - low.1) as f64;
        if left < rate.max(budget as f64 / 256.0) {
            break;
        }
        step = (left / high.map_or(rate, |high| per_unit(low, high))) as usize;
    }
    Ok(Size { units: low.0, tokens: low.1, rate })
}

/// Tokens per unit between two sizes; more than none even if the larger size has no more tokens.
fn per_unit(from: (usize, usize), to: (usize, usize)) -> f64 {
    (to.1.saturating_sub(from.1) as f64 / to.0.saturating_sub(from.0).max(1) as f64).max(1e-3)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn depths_are_those_of_the_harness() {
        let all: Vec<f64> = (0..DEPTHS).map(depth).collect();
        assert_eq!(all[..8], [0.0, 3.0, 5.0, 8.0, 10.0, 13.0, 15.0, 18.0]);
        assert_eq!(all[32..], [82.0, 85.0, 87.0, 90.0, 92.0, 95.0, 97.0, 100.0]);
    }

    #[test]
    fn sizes_are_found_with_few_counts() {
        // Texts that have more tokens per unit first, or last, and lines of 90 tokens.
        let slow = |units: usize| 90 + units + (units as f64).sqrt() as usize * 7;
        let fast = |units: usize| 90 + units + units * units / 100_000;
        let lines = |units: usize| 120 + 90 * units;
        let texts: [&dyn Fn(usize) -> usize; 3] = [&slow, &fast, &lines];
        for (i, text) in texts.iter().enumerate() {
            for budget in [300, 384, 896, 3968, 32_640, 130_944] {
                let counted = Cell::new(0);
                let count = |units| {
                    counted.set(counted.get() + 1);
                    Ok(text(units))
                };
                let size = largest((1, text(1)), 4 * budget, budget, count).unwrap();
                assert_eq!(size.tokens, text(size.units));
                assert!(size.tokens <= budget);
                let room = (budget - size.tokens) as f64;
                let next = text(size.units + 1);
                assert!(
                    room <= budget as f64 / 256.0 || room < size.rate || next > budget,
                    "{i} {budget} {size:?}"
                );
                assert!(counted.get() <= 8, "{i} {budget}: counted {} times", counted.get());
            }
        }
        // A tokenizer that makes nothing of the text.
        assert_eq!(largest((1, 5), 1000, 100, |_| Ok(5)).unwrap().units, 1000);
        // Nothing more fits.
        assert_eq!(largest((1, 99), 1000, 100, |units| Ok(90 + 9 * units)).unwrap().units, 1);
    }

    #[test]
    fn impossible_tasks_are_refused() {
        let (tokenizer, essay) = (Tokenizer::bytes(), Essay::builtin());
        let refused = |needles: Needles, length| {
            needles
                .fit(&tokenizer, &essay, length, 0, 1)
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default()
        };
        assert!(refused(Needles { keys: 41, ..NUMBER }, 9000).contains("1 to 40 needles"));
        assert!(refused(Needles { keys: usize::MAX, values: 3, ..NUMBER }, 9000).contains("1 to 40 needles"));
        assert!(refused(Needles { queries: 0, ..NUMBER }, 9000).contains("at least one question"));
        assert!(refused(NUMBER, usize::MAX).contains("too long"));
        assert!(refused(NUMBER, 0).contains("the smallest length that fits is"));
        let words = Tokenizer::words(&["a".into()]).unwrap();
        assert!(NUMBER.fit(&words, &essay, 4096, 0, 1).is_err());
    }
}

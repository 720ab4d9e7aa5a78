//! A needle in a haystack: one fact in a long filler text, asked for at the end.
//!
//! Rules, with K keys, V values and F words of filler:
//!
//! - the text is random filler with one fact in it, k v;
//! - depth 0 to 100 is the position of the fact as a percentage of the filler, 0 at the beginning; with `any` depth all
//!   positions are equally likely;
//! - the text ends with `?` and the key; the value is expected right after it.

use super::sizes::ANY;
use super::{Example, Kind, Question, Random, Recall, Size, Sizes, at_least, named};
use crate::error::Result;

pub(super) const KIND: Kind = Kind {
    name: "needle",
    about: "one fact in a long filler text, asked for at the end",
    sizes: &[
        Size::new("keys", "possible keys", 16),
        Size::new("values", "possible values", 16),
        Size::new("filler", "words of the filler", 16),
        Size::new("depth", "the fact's place in percent of the filler, 0 to 100, or any", ANY),
    ],
    build,
};

struct Needle {
    keys: usize,
    values: usize,
    filler: usize,
    depth: Option<usize>,
    length: usize,
}

fn build(sizes: &Sizes, length: Option<usize>) -> Result<Recall> {
    let [keys, values, filler] =
        [sizes.positive("keys")?, sizes.positive("values")?, sizes.positive("filler")?];
    let depth = match sizes.get("depth") {
        ANY => None,
        depth if depth <= 100 => Some(depth),
        depth => {
            return Err(sizes.refuse(format!("the depth is {depth}; it must be a percentage from 0 to 100")));
        }
    };
    let length = at_least(&KIND, length, 4)?;
    let task = Needle { keys, values, filler, depth, length };
    Ok(Recall {
        length,
        questions: 1,
        answers: values,
        vocabulary: named("?", &[('k', keys), ('v', values), ('w', filler)]),
        language: None,
        draw: Box::new(move |random, _| task.example(random)),
    })
}

impl Needle {
    fn example(&self, random: &mut Random) -> Example {
        let words = self.length - 4;
        let at = match self.depth {
            Some(depth) => words * depth / 100,
            None => random.below(words + 1),
        };
        let key = (1 + random.below(self.keys)) as u32;
        let value = (1 + self.keys + random.below(self.values)) as u32;
        let first = 1 + self.keys + self.values;
        let mut tokens: Vec<u32> = (0..words).map(|_| (first + random.below(self.filler)) as u32).collect();
        tokens.splice(at..at, [key, value]);
        tokens.extend([0, key]);
        let question = Question { position: tokens.len() - 1, answer: value, fact: at + 1 };
        Example { tokens, questions: vec![question], ends: Vec::new() }
    }
}

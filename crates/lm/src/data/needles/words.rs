//! What needles are made of: words, numbers and uuids.

use std::collections::HashSet;

use super::super::recall::Random;

/// A key or a value of a needle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// An adjective and a noun, such as `calm-river`.
    Word,
    /// A number of seven digits.
    Number,
    /// A random uuid (version 4).
    Uuid,
}

/// One adjective per line, and one noun per line. RULER takes its words from the lists of the package
/// `wonderwords`; these are our own.
const ADJECTIVES: &str = include_str!("adjectives.txt");
const NOUNS: &str = include_str!("nouns.txt");

impl Item {
    /// The plural, which every needle's sentence uses.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Word => "words",
            Self::Number => "numbers",
            Self::Uuid => "uuids",
        }
    }

    /// The singular, for a question that has one answer.
    pub(super) fn singular(self) -> &'static str {
        match self {
            Self::Word => "word",
            Self::Number => "number",
            Self::Uuid => "uuid",
        }
    }
}

/// Draws items of which no two are the same, so that a key has no value but its own.
pub(super) struct Items {
    pub(super) random: Random,
    adjectives: Vec<&'static str>,
    nouns: Vec<&'static str>,
    drawn: HashSet<String>,
}

impl Items {
    pub(super) fn new(random: Random) -> Self {
        let (adjectives, nouns) = (ADJECTIVES.lines().collect(), NOUNS.lines().collect());
        Self { random, adjectives, nouns, drawn: HashSet::new() }
    }

    /// How many items may be drawn: half of those that there are, because drawing again what was drawn before
    /// takes ever longer as the rest becomes small.
    pub(super) fn most(item: Item) -> usize {
        match item {
            Item::Word => ADJECTIVES.lines().count() * NOUNS.lines().count() / 2,
            Item::Number => 9_000_000 / 2,
            Item::Uuid => usize::MAX,
        }
    }

    /// An item that was not drawn before.
    pub(super) fn next(&mut self, item: Item) -> String {
        loop {
            let text = match item {
                Item::Word => {
                    let adjective = self.adjectives[self.random.below(self.adjectives.len())];
                    format!("{adjective}-{}", self.nouns[self.random.below(self.nouns.len())])
                }
                Item::Number => (1_000_000 + self.random.below(9_000_000)).to_string(),
                Item::Uuid => self.uuid(),
            };
            if self.drawn.insert(text.clone()) {
                return text;
            }
        }
    }

    fn uuid(&mut self) -> String {
        let [a, b, c, d, e, f, g, h] = std::array::from_fn(|_| self.random.below(1 << 16));
        // Four bits give the version, two the variant; all others are random.
        let (d, e) = (0x4000 | d & 0x0fff, 0x8000 | e & 0x3fff);
        format!("{a:04x}{b:04x}-{c:04x}-{d:04x}-{e:04x}-{f:04x}{g:04x}{h:04x}")
    }
}

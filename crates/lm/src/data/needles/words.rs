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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_hold_single_words_once() {
        for list in [ADJECTIVES, NOUNS] {
            let words: Vec<&str> = list.lines().collect();
            assert!(words.len() > 300);
            assert!(words.iter().all(|word| word.len() > 1 && word.bytes().all(|b| b.is_ascii_lowercase())));
            assert!(
                words.windows(2).all(|pair| pair[0] < pair[1]),
                "sorted, without a word that comes twice"
            );
        }
    }

    #[test]
    fn items_have_their_form_and_never_come_twice() {
        let mut items = Items::new(Random::new(1, 2));
        let mut seen = HashSet::new();
        for _ in 0..2000 {
            let number = items.next(Item::Number);
            assert!(number.len() == 7 && !number.starts_with('0') && number.parse::<u32>().is_ok());
            let uuid = items.next(Item::Uuid);
            let sizes: Vec<usize> = uuid.split('-').map(str::len).collect();
            assert_eq!(sizes, [8, 4, 4, 4, 12]);
            assert_eq!(&uuid[14..15], "4");
            assert!("89ab".contains(&uuid[19..20]), "{uuid}");
            let word = items.next(Item::Word);
            assert_eq!(word.split('-').count(), 2);
            assert!(seen.insert(number) && seen.insert(uuid) && seen.insert(word));
        }
    }
}

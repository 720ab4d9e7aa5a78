//! The diary: on each day things are somewhere, and each question asks where a thing was on a named day.
//!
//! ```text
//! 12 May: the key is in the harbour, the lamp in the kitchen, the ring in the mill. That was 12 May.
//! 3 June: the ring is in the garden, the key in the barn, the lamp in the cellar. That was 3 June.
//! Where was the key on 12 May? In the harbour.
//! ```
//!
//! Rules, with D days, F facts a day, N things, P places and Q questions:
//!
//! - a day is its date, then F of the things in random order, each with its place, and its date once more. With `least` a
//!   day has `least` to F facts, uniformly distributed;
//! - the dates are distinct and in random order; the places of a thing on two days differ (P ≥ D);
//! - then come the questions, a thing and the date of a day that mentions it, all different as long as possible, each
//!   with its answer. With `mixed=1`, each question comes after a random one of the days from its own on;
//! - ends of text fill the rest of the length. Training also expects the end of the text after each day and each answer,
//!   although the text goes on, so that in a chat a model writes nothing after a day, and stops after an answer.
//!
//! With `fewest=n`, training sequences have n to D days, uniformly distributed.
//!
//! It is the task `versioned` in English: a state that holds one place per thing knows only where it was last. Every
//! date, thing and place is one token; all other words ("the", "is", "in") and punctuation are not part of the text
//! that the model reads.
//!
//! A date stands at both ends of a day: at the beginning, so that a state can store each fact with its date; at the end,
//! so that an anchor there has just seen it. A question ends with its date for the same reason: the token that has to
//! choose an anchor is the date itself. Without these two, few seeds learn to choose.

use super::{END, Example, Kind, Language, Question, Random, Recall, Size, Sizes, Use, at_least};
use crate::error::Result;

pub(super) const KIND: Kind = Kind {
    name: "diary",
    about: "a diary says where things are on each day; questions ask where a thing was on a named day",
    sizes: &[
        Size::new("days", "days of the diary", 8),
        Size::new("facts", "things that a day mentions", 8),
        Size::new("things", "things that there are", 8),
        Size::new("places", "places that there are", 64),
        Size::new("dates", "dates that a sequence draws from", 64),
        Size::new("questions", "questions of a sequence", 16),
        Size::later("fewest", "days in the easiest training sequences; 0 if all have the same number"),
        Size::later("least", "things that a day mentions at least; 0 if all mention the same number"),
        Size::later("mixed", "1 if questions are asked between the days, 0 if after all of them"),
    ],
    build,
};

const MONTHS: [(&str, usize); 6] =
    [("May", 31), ("June", 30), ("July", 31), ("August", 31), ("September", 30), ("October", 31)];

const THINGS: [&str; 16] = [
    "key", "lamp", "ring", "map", "book", "coat", "knife", "letter", "clock", "cup", "rope", "flute",
    "mirror", "basket", "compass", "umbrella",
];

#[rustfmt::skip] // one line per word otherwise
const PLACES: [&str; 64] = [
    "harbour", "kitchen", "garden", "cellar", "attic", "barn", "library", "station", "mill", "chapel",
    "orchard", "tower", "market", "stable", "bakery", "school", "cottage", "tunnel", "meadow", "forest",
    "boathouse", "greenhouse", "workshop", "inn", "lighthouse", "castle", "vineyard", "quarry", "cabin",
    "museum", "theatre", "palace", "hospital", "church", "pharmacy", "tavern", "dairy", "smithy",
    "gallery", "courtyard", "pantry", "hallway", "nursery", "laundry", "studio", "garage", "shed",
    "cave", "park", "arcade", "hotel", "hostel", "observatory", "monastery", "cloister", "warehouse",
    "factory", "bathhouse", "granary", "brewery", "printshop", "townhall", "pavilion", "crypt",
];

/// Words of a diary or a question that the model does not read.
const IGNORED: [&str; 14] =
    ["the", "is", "in", "was", "where", "what", "about", "on", "and", "at", "a", "it", "that", "please"];

/// Writes days as lines, "12 May: the key is in the harbour, the lamp in the mill. That was 12 May.", and questions as
/// "Where was the key on 12 May? In the harbour."; an end of text is not written.
fn write(names: &[String], tokens: &[u32]) -> String {
    let name = |&id: &u32| names.get(id as usize).map_or("", String::as_str);
    let is_date = |word: &str| word.starts_with(|first: char| first.is_ascii_digit());
    let words: Vec<&str> =
        tokens.iter().map(name).filter(|word| !word.is_empty() && *word != "<eos>").collect();
    let mut text = String::new();
    let mut rest = &words[..];
    while let [first, after @ ..] = rest {
        let (line, left) = match after {
            after if is_date(first) => day(first, after, is_date),
            [date, place, left @ ..] if is_date(date) && PLACES.contains(place) => {
                (format!("Where was the {first} on {date}? In the {place}."), left)
            }
            [date, left @ ..] if is_date(date) => (format!("Where was the {first} on {date}?"), left),
            left if PLACES.contains(first) => (format!("In the {first}."), left),
            left => (format!("The {first}"), left),
        };
        text += &line;
        text.push('\n');
        rest = left;
    }
    text
}

/// A day as a line, and the words after it.
fn day<'a>(date: &str, words: &'a [&'a str], is_date: impl Fn(&str) -> bool) -> (String, &'a [&'a str]) {
    let facts = words.iter().position(|word| is_date(word)).unwrap_or(words.len());
    let (facts, rest) = words.split_at(facts);
    let said = |(i, pair): (usize, &[&str])| match pair {
        [thing, place] => format!("the {thing} {}in the {place}", if i == 0 { "is " } else { "" }),
        rest => format!("the {}", rest.join(" ")),
    };
    let said: Vec<String> = facts.chunks(2).enumerate().map(said).collect();
    let line = format!("{date}: {}.", said.join(", "));
    match rest {
        [end, rest @ ..] if *end == date => (format!("{line} That was {end}."), rest),
        rest => (line, rest),
    }
}

/// "1 May", "2 May", …
fn dates() -> impl Iterator<Item = String> {
    MONTHS.iter().flat_map(|&(month, days)| (1..=days).map(move |day| format!("{day} {month}")))
}

#[derive(Clone, Copy)]
struct Diary {
    facts: usize,
    least: usize,
    things: usize,
    places: usize,
    dates: usize,
    questions: usize,
    mixed: bool,
    length: usize,
}

fn build(sizes: &Sizes, length: Option<usize>) -> Result<Recall> {
    let [days, facts, things, places, dates, questions] =
        ["days", "facts", "things", "places", "dates", "questions"].map(|name| sizes.positive(name));
    let (days, facts, things, places, dates, questions) =
        (days?, facts?, things?, places?, dates?, questions?);
    for (name, count, most) in [
        ("things", things, THINGS.len()),
        ("places", places, PLACES.len()),
        ("dates", dates, MONTHS.iter().map(|month| month.1).sum()),
        ("facts", facts, things),
        ("fewest", sizes.get("fewest"), days),
        ("least", sizes.get("least"), facts),
        ("days", days, dates.min(places)),
    ] {
        if count > most {
            return Err(sizes.refuse(format!("`{name}` is {count}; at most {most} are possible here")));
        }
    }
    let fewest = if sizes.get("fewest") == 0 { days } else { sizes.get("fewest") };
    let least = if sizes.get("least") == 0 { facts } else { sizes.get("least") };
    let shortest = days * (2 + 2 * facts) + 3 * questions;
    let length = at_least(&KIND, length, shortest)?;
    let mixed = sizes.get("mixed") > 0;
    let diary = Diary { facts, least, things, places, dates, questions, mixed, length };
    Ok(Recall {
        length,
        questions,
        answers: places,
        vocabulary: diary.vocabulary(),
        language: Some(Language { ignored: &IGNORED, write, ends: questions + days }),
        draw: Box::new(move |random, purpose| match (purpose, days - fewest) {
            (Use::Evaluation, _) | (_, 0) => diary.with_days(days, random),
            (Use::Training, more) => diary.with_days(fewest + random.below(more + 1), random),
        }),
    })
}

impl Diary {
    fn vocabulary(&self) -> Vec<String> {
        let [things, places] = [&THINGS[..self.things], &PLACES[..self.places]];
        let words = things.iter().chain(places).map(|word| word.to_string());
        std::iter::once("<eos>".to_string()).chain(dates().take(self.dates)).chain(words).collect()
    }

    fn date(&self, number: usize) -> u32 {
        (1 + number) as u32
    }

    fn thing(&self, number: usize) -> u32 {
        (1 + self.dates + number) as u32
    }

    fn place(&self, number: usize) -> u32 {
        (1 + self.dates + self.things + number) as u32
    }

    fn with_days(&self, days: usize, random: &mut Random) -> Example {
        let dates = random.distinct(days, self.dates);
        let places: Vec<Vec<usize>> = (0..self.things).map(|_| random.distinct(days, self.places)).collect();
        let things: Vec<Vec<usize>> = (0..days)
            .map(|_| {
                let more = self.facts - self.least;
                let count = self.facts - if more > 0 { random.below(more + 1) } else { 0 };
                random.distinct(count, self.things)
            })
            .collect();
        // Day and thing of each question, by the day after which it is asked.
        let all: Vec<(usize, usize)> =
            (0..days).flat_map(|day| things[day].iter().map(move |&thing| (day, thing))).collect();
        let mut asked = vec![Vec::new(); days];
        let mut left = self.questions;
        while left > 0 {
            for i in random.distinct(left.min(all.len()), all.len()) {
                let after = if self.mixed { all[i].0 + random.below(days - all[i].0) } else { days - 1 };
                asked[after].push(all[i]);
                left -= 1;
            }
        }
        let (mut tokens, mut ends) = (Vec::with_capacity(self.length), Vec::new());
        let mut questions = Vec::with_capacity(self.questions);
        // The position of the place of each thing on each day.
        let mut facts = vec![vec![0; self.things]; days];
        for day in 0..days {
            tokens.push(self.date(dates[day]));
            for &thing in &things[day] {
                tokens.extend([self.thing(thing), self.place(places[thing][day])]);
                facts[day][thing] = tokens.len() - 1;
            }
            ends.push(tokens.len());
            tokens.push(self.date(dates[day]));
            for &(day, thing) in &asked[day] {
                let fact = facts[day][thing];
                tokens.extend([self.thing(thing), self.date(dates[day])]);
                questions.push(Question { position: tokens.len() - 1, answer: tokens[fact], fact });
                ends.push(tokens.len());
                tokens.push(tokens[fact]);
            }
        }
        tokens.resize(self.length, END);
        Example { tokens, questions, ends }
    }
}

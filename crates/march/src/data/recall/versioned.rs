//! Versioned recall: documents give new values to the same keys, and each question asks for the value of a key in
//! a named document.
//!
//! Rules, with D documents, K keys, V values and Q questions:
//!
//! - document d is its name, then every key with its value in this document, in random order: d k v k v …;
//! - a key's values in two documents differ (V ≥ D);
//! - blanks fill the rest of the length, after the documents;
//! - then come the questions, d k, all different as long as possible; the answer, the value of k in document d, is
//!   expected right after the key and is not part of the text.
//!
//! A state that holds one value per key knows only the last document. A model that knows all values of a key but not
//! which document each belongs to is right once in D.

use super::{Example, Kind, Question, Random, Recall, Size, Sizes, at_least};
use crate::error::Result;

pub(super) const KIND: Kind = Kind {
    name: "versioned",
    about: "documents give new values to the same keys; questions ask for the value in a named one",
    sizes: &[
        Size { name: "documents", about: "versions of every key", default: 4 },
        Size { name: "keys", about: "keys of each document", default: 8 },
        Size { name: "values", about: "possible values", default: 32 },
        Size { name: "questions", about: "questions of a sequence", default: 16 },
    ],
    build,
};

struct Versioned {
    documents: usize,
    keys: usize,
    values: usize,
    questions: usize,
    length: usize,
}

fn build(sizes: &Sizes, length: Option<usize>) -> Result<Box<dyn Recall>> {
    let [documents, keys, values, questions] = [
        sizes.positive("documents")?,
        sizes.positive("keys")?,
        sizes.get("values"),
        sizes.positive("questions")?,
    ];
    if values < documents {
        let message =
            format!("{documents} documents need as many different values of a key; there are {values}");
        return Err(sizes.refuse(message));
    }
    let least = documents * (1 + 2 * keys) + 2 * questions;
    let length = at_least(&KIND, length, least)?;
    Ok(Box::new(Versioned { documents, keys, values, questions, length }))
}

impl Versioned {
    fn document(&self, number: usize) -> u32 {
        (1 + number) as u32
    }

    fn key(&self, number: usize) -> u32 {
        (1 + self.documents + number) as u32
    }

    fn value(&self, number: usize) -> u32 {
        (1 + self.documents + self.keys + number) as u32
    }
}

impl Recall for Versioned {
    fn length(&self) -> usize {
        self.length
    }

    fn questions(&self) -> usize {
        self.questions
    }

    fn answers(&self) -> usize {
        self.values
    }

    fn vocabulary(&self) -> Vec<String> {
        let named = |letter: char, count: usize| (1..=count).map(move |i| format!("{letter}{i}"));
        let blank = std::iter::once("_".to_string());
        blank
            .chain(named('d', self.documents))
            .chain(named('k', self.keys))
            .chain(named('v', self.values))
            .collect()
    }

    fn example(&self, random: &mut Random) -> Example {
        let versions: Vec<Vec<usize>> =
            (0..self.keys).map(|_| random.distinct(self.documents, self.values)).collect();
        let mut tokens = Vec::with_capacity(self.length);
        // The position of the value of each key in each document.
        let mut facts = vec![0; self.documents * self.keys];
        for document in 0..self.documents {
            tokens.push(self.document(document));
            for key in random.distinct(self.keys, self.keys) {
                tokens.extend([self.key(key), self.value(versions[key][document])]);
                facts[document * self.keys + key] = tokens.len() - 1;
            }
        }
        tokens.resize(self.length - 2 * self.questions, 0);
        let mut questions = Vec::with_capacity(self.questions);
        while questions.len() < self.questions {
            let left = self.questions - questions.len();
            for asked in random.distinct(left.min(facts.len()), facts.len()) {
                let (document, key, fact) = (asked / self.keys, asked % self.keys, facts[asked]);
                tokens.extend([self.document(document), self.key(key)]);
                questions.push(Question { position: tokens.len() - 1, answer: tokens[fact], fact });
            }
        }
        Example { tokens, questions }
    }
}

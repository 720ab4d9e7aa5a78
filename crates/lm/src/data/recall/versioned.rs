//! Versioned recall: documents give new values to the same keys, and each question asks for the value of a key in
//! a named document.
//!
//! Rules, with D documents, K keys, V values and Q questions:
//!
//! - document d is its name, then every key with its value in this document, in random order: d k v k v …;
//! - the names are d1 … dD in this order, so that position can stand for the name; with `names=N` each sequence draws
//!   its names from N, in random order, and only the name tells a document;
//! - a key's values in two documents differ (V ≥ D);
//! - blanks fill the rest of the length, after the documents;
//! - then come the questions, d k, all different as long as possible; the answer, the value of k in document d, is
//!   expected right after the key and is not part of the text.
//!
//! With `fewest=n`, training sequences have n to D documents, uniformly distributed, in sequences of the same length.
//!
//! A state that holds one value per key knows only the last document. A model that knows all values of a key but not
//! which document each belongs to is right once in D.

use super::{Example, Kind, Question, Random, Recall, Size, Sizes, Use, at_least, named};
use crate::error::Result;

pub(super) const KIND: Kind = Kind {
    name: "versioned",
    about: "documents give new values to the same keys; questions ask for the value in a named one",
    sizes: &[
        Size::new("documents", "versions of every key", 4),
        Size::new("keys", "keys of each document", 8),
        Size::new("values", "possible values", 32),
        Size::new("questions", "questions of a sequence", 16),
        Size::later("names", "names that a sequence draws from; 0 if the documents are d1, d2, … in order"),
        Size::later("fewest", "documents in the easiest training sequences; 0 if all have the same number"),
    ],
    build,
};

struct Versioned {
    keys: usize,
    values: usize,
    questions: usize,
    /// The number of names to draw from; 0 for names in order.
    names: usize,
    /// The number of names in the vocabulary.
    all_names: usize,
    length: usize,
}

fn build(sizes: &Sizes, length: Option<usize>) -> Result<Recall> {
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
    let names = sizes.get("names");
    if names > 0 && names < documents {
        return Err(sizes.refuse(format!("{documents} documents need as many names; there are {names}")));
    }
    let fewest = match sizes.get("fewest") {
        0 => documents,
        fewest if fewest <= documents => fewest,
        fewest => {
            return Err(sizes.refuse(format!("`fewest` is {fewest}, more than the {documents} documents")));
        }
    };
    let least = documents * (1 + 2 * keys) + 2 * questions;
    let length = at_least(&KIND, length, least)?;
    let all_names = names.max(documents);
    let task = Versioned { keys, values, questions, names, all_names, length };
    Ok(Recall {
        length,
        questions,
        answers: values,
        vocabulary: named("_", &[('d', all_names), ('k', keys), ('v', values)]),
        language: None,
        draw: Box::new(move |random, purpose| match (purpose, documents - fewest) {
            // One fixed number draws nothing, so that sequences without `fewest` are what they always were.
            (Use::Evaluation, _) | (_, 0) => task.with_documents(documents, random),
            (Use::Training, more) => task.with_documents(fewest + random.below(more + 1), random),
        }),
    })
}

impl Versioned {
    fn name(&self, number: usize) -> u32 {
        (1 + number) as u32
    }

    fn key(&self, number: usize) -> u32 {
        (1 + self.all_names + number) as u32
    }

    fn value(&self, number: usize) -> u32 {
        (1 + self.all_names + self.keys + number) as u32
    }

    fn with_documents(&self, documents: usize, random: &mut Random) -> Example {
        let names = match self.names {
            0 => (0..documents).collect(),
            names => random.distinct(documents, names),
        };
        let versions: Vec<Vec<usize>> =
            (0..self.keys).map(|_| random.distinct(documents, self.values)).collect();
        let mut tokens = Vec::with_capacity(self.length);
        // The position of the value of each key in each document.
        let mut facts = vec![0; documents * self.keys];
        for document in 0..documents {
            tokens.push(self.name(names[document]));
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
                tokens.extend([self.name(names[document]), self.key(key)]);
                questions.push(Question { position: tokens.len() - 1, answer: tokens[fact], fact });
            }
        }
        Example { tokens, questions, ends: Vec::new() }
    }
}

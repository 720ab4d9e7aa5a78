//! MQAR, multi-query associative recall: key-value pairs, then every key is asked for once.
//!
//! Rules, with N pairs, a vocabulary of V tokens and sequences of L ≥ 4N tokens:
//!
//! - keys are drawn from ids 1..V/2 and values from ids V/2..V, each without replacement;
//! - the context is k₁ v₁ … k_N v_N;
//! - in the tail after it, the even offsets are slots; the i-th key is asked for at the i-th slot drawn,
//!   without replacement, slot j (from 1) with probability ∝ j^(a − 1), a = 0.01;
//! - a question is the key alone; the answer is expected right after it and is not part of the text;
//! - all other tokens of the tail are random tokens of the whole vocabulary.
//!
//! With `fewest=n`, training sequences have n to N pairs, uniformly distributed, in sequences of the same length.

use super::{Example, Kind, Question, Random, Recall, Size, Sizes, Use, at_least, named};
use crate::error::Result;

pub(super) const KIND: Kind = Kind {
    name: "mqar",
    about: "key-value pairs, then every key is asked for once",
    sizes: &[
        Size::new("pairs", "key-value pairs", 24),
        Size::new("fewest", "pairs in the easiest training sequences; 0 if all have the same number", 0),
        Size::new("vocabulary", "tokens; half are keys, half are values", 64),
    ],
    build,
};

/// The exponent a of the slots' probabilities.
const POWER: f64 = 0.01;

struct Mqar {
    vocabulary: usize,
    length: usize,
}

fn build(sizes: &Sizes, length: Option<usize>) -> Result<Recall> {
    let (pairs, vocabulary) = (sizes.positive("pairs")?, sizes.get("vocabulary"));
    let keys = (vocabulary / 2).saturating_sub(1);
    if pairs > keys {
        let least = 2 * (pairs + 1);
        let message = format!(
            "a vocabulary of {vocabulary} has {keys} keys, too few for {pairs} pairs; it needs {least} tokens"
        );
        return Err(sizes.refuse(message));
    }
    let fewest = match sizes.get("fewest") {
        0 => pairs,
        fewest if fewest <= pairs => fewest,
        fewest => return Err(sizes.refuse(format!("`fewest` is {fewest}, more than the {pairs} pairs"))),
    };
    let length = at_least(&KIND, length, 4 * pairs)?;
    let (task, answers) = (Mqar { vocabulary, length }, vocabulary - vocabulary / 2);
    Ok(Recall {
        length,
        questions: pairs,
        answers,
        vocabulary: named("_", &[('k', keys), ('v', answers)]),
        language: None,
        draw: Box::new(move |random, purpose| match purpose {
            Use::Evaluation => task.with_pairs(pairs, random),
            Use::Training => task.with_pairs(fewest + random.below(pairs - fewest + 1), random),
        }),
    })
}

impl Mqar {
    fn with_pairs(&self, pairs: usize, random: &mut Random) -> Example {
        let half = self.vocabulary / 2;
        let keys = random.distinct(pairs, half - 1);
        let values = random.distinct(pairs, self.vocabulary - half);
        let mut tokens = Vec::with_capacity(self.length);
        for (key, value) in keys.iter().zip(&values) {
            tokens.extend([1 + *key as u32, (half + value) as u32]);
        }
        tokens.extend((2 * pairs..self.length).map(|_| random.below(self.vocabulary) as u32));
        let slots: Vec<f64> =
            (1..=(self.length - 2 * pairs) / 2).map(|slot| (slot as f64).powf(POWER - 1.0)).collect();
        let mut questions = Vec::with_capacity(pairs);
        for (pair, slot) in random.weighted(pairs, &slots).into_iter().enumerate() {
            let (position, fact) = (2 * pairs + 2 * slot, 2 * pair + 1);
            tokens[position] = tokens[fact - 1];
            questions.push(Question { position, answer: tokens[fact], fact });
        }
        questions.sort_by_key(|question| question.position);
        Example { tokens, questions, ends: Vec::new() }
    }
}

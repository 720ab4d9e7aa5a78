//! The metrics of lm-evaluation-harness: the score of one document, and what all documents' scores amount to.
//!
//! Each function follows the harness's rules to the letter, odd ones included, because only then are the numbers
//! comparable with published ones.

use std::collections::{HashMap, HashSet};

use regex::RegexBuilder;
use serde::{Deserialize, Serialize};

use super::Gold;
use super::python::{
    float, float_text, round_to_hundredths, split, strip, without_articles, without_leading_articles,
    without_punctuation,
};
use crate::eval::request::{Answer, Scored};

/// How the answers to a document are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Metric {
    /// Whether the right choice has the highest log-likelihood, or the continuation is the greedy one.
    Acc,
    /// Whether the right choice has the highest log-likelihood per character.
    AccNorm,
    /// LAMBADA's perplexity: per document, not per token.
    Perplexity,
    /// Whether the generated text is one of the answers.
    ExactMatch(Normalisation),
    /// Whether the generated text contains one of the answers, in any case of letters.
    Contains,
    /// DROP: whether the generated text is the answer; see [`drop_score`].
    Em,
    /// DROP: the overlap of words; see [`drop_score`].
    F1,
    /// LongBench: [`f1`] with the nearest of the answers.
    QaF1,
    /// LongBench: [`rouge_l`] with the nearest of the answers.
    Rouge,
    /// LongBench: [`class_match`].
    Classification,
    /// RULER: [`string_match_all`].
    StringMatchAll,
    /// Perplexity of a text per word.
    WordPerplexity,
    /// Perplexity of a text per byte.
    BytePerplexity,
    /// Bits per byte of a text.
    BitsPerByte,
    /// Perplexity of a text per token of the model.
    TokenPerplexity,
}

/// What [`exact_match`] disregards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Normalisation {
    /// Case and punctuation, as `triviaqa`.
    Plain,
    /// Case, punctuation, and articles before a space, as `nq_open`.
    Articles,
}

/// A metric's value for one document.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// The score, or the log-likelihood from which a perplexity is computed.
    pub value: f64,
    /// What the log-likelihood is divided by (words, bytes or tokens); 1 for other metrics.
    pub weight: f64,
}

impl Metric {
    /// The name, as in the harness's results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Acc => "acc",
            Self::AccNorm => "acc_norm",
            Self::Perplexity => "perplexity",
            Self::ExactMatch(_) => "exact_match",
            Self::Contains => "contains",
            Self::Em => "em",
            Self::F1 => "f1",
            Self::QaF1 => "qa_f1_score",
            Self::Rouge => "rouge_score",
            Self::Classification => "classification_score",
            Self::StringMatchAll => "string_match_all",
            Self::WordPerplexity => "word_perplexity",
            Self::BytePerplexity => "byte_perplexity",
            Self::BitsPerByte => "bits_per_byte",
            Self::TokenPerplexity => "token_perplexity",
        }
    }

    /// Whether a higher value is better.
    pub fn higher_is_better(self) -> bool {
        !matches!(
            self,
            Self::Perplexity
                | Self::WordPerplexity
                | Self::BytePerplexity
                | Self::BitsPerByte
                | Self::TokenPerplexity
        )
    }

    /// Scores one document. The value is NaN if the metric does not apply to what the answers are compared to.
    pub fn score(self, gold: &Gold, answers: &[Answer]) -> Value {
        let scores: Vec<Scored> = answers.iter().flat_map(|answer| answer.scores()).copied().collect();
        let text = answers.first().map_or("", Answer::text);
        let mut weight = 1.0;
        let value = match (self, gold) {
            (Self::Acc, Gold::Greedy) => yes(scores.first().is_some_and(|score| score.is_greedy)),
            (Self::Perplexity, Gold::Greedy) => scores.first().map_or(f64::NAN, |score| score.loglikelihood),
            (Self::Acc, Gold::Choice { index, .. }) => {
                yes(best(scores.iter().map(|score| score.loglikelihood)) == Some(*index))
            }
            (Self::AccNorm, Gold::Choice { index, lengths }) => {
                let scores = scores.iter().zip(lengths);
                yes(best(scores.map(|(score, &length)| score.loglikelihood / length as f64)) == Some(*index))
            }
            (Self::ExactMatch(normalisation), Gold::Texts { answers, .. }) => {
                yes(answers.iter().any(|answer| exact_match(strip(text), answer, normalisation)))
            }
            (Self::Contains, Gold::Texts { answers, .. }) => {
                yes(answers.iter().any(|answer| contains(text, answer)))
            }
            (Self::QaF1, Gold::Texts { answers, .. }) => {
                highest(answers.iter().map(|answer| f1(strip(text), answer)))
            }
            (Self::Rouge, Gold::Texts { answers, .. }) => {
                highest(answers.iter().map(|answer| rouge_l(strip(text), answer)))
            }
            (Self::Classification, Gold::Texts { answers, classes }) => {
                highest(answers.iter().map(|answer| class_match(strip(text), answer, classes)))
            }
            (Self::StringMatchAll, Gold::Texts { answers, .. }) => string_match_all(text, answers),
            // An answer whose first span is blank counts nothing.
            (Self::Em | Self::F1, Gold::Spans(answers)) => {
                let answers =
                    answers.iter().filter(|spans| spans.first().is_some_and(|s| !strip(s).is_empty()));
                let scores = answers.map(|spans| drop_score(&[text], spans));
                highest(scores.map(|(em, f1)| if self == Self::Em { em } else { f1 }))
            }
            (
                Self::WordPerplexity | Self::BytePerplexity | Self::BitsPerByte | Self::TokenPerplexity,
                Gold::Sizes { words, bytes },
            ) => {
                let tokens = scores.iter().map(|score| score.tokens).sum();
                weight = match self {
                    Self::WordPerplexity => *words,
                    Self::TokenPerplexity => tokens,
                    _ => *bytes,
                } as f64;
                scores.iter().map(|score| score.loglikelihood).sum()
            }
            _ => f64::NAN,
        };
        Value { value, weight }
    }

    /// What the values of all documents amount to; NaN without documents.
    pub fn aggregate(self, values: &[Value]) -> f64 {
        let mean = mean(values);
        match self {
            Self::Perplexity | Self::WordPerplexity | Self::BytePerplexity | Self::TokenPerplexity => {
                (-mean).exp()
            }
            Self::BitsPerByte => -mean / std::f64::consts::LN_2,
            _ => mean,
        }
    }

    /// The standard error of [`Metric::aggregate`]. There is none with fewer than two documents, nor for the
    /// perplexities of texts, whose documents have different weights. The harness gives none for `contains` and
    /// RULER either, and for LAMBADA's perplexity it resamples; here the error is propagated: d exp(−m) = exp(−m) dm.
    pub fn standard_error(self, values: &[Value]) -> Option<f64> {
        if values.len() < 2 || !self.higher_is_better() && self != Self::Perplexity {
            return None;
        }
        let (mean, count) = (mean(values), values.len() as f64);
        let squares: f64 = values.iter().map(|value| (value.value - mean).powi(2)).sum();
        let error = (squares / (count - 1.0)).sqrt() / count.sqrt();
        Some(if self == Self::Perplexity { error * (-mean).exp() } else { error })
    }
}

/// The sum of the values over the sum of the weights.
fn mean(values: &[Value]) -> f64 {
    values.iter().map(|value| value.value).sum::<f64>() / values.iter().map(|value| value.weight).sum::<f64>()
}

fn yes(condition: bool) -> f64 {
    f64::from(u8::from(condition))
}

/// The highest of the scores, at least 0.
fn highest(scores: impl Iterator<Item = f64>) -> f64 {
    scores.fold(0.0, f64::max)
}

/// The index of the highest value, the first if several are equal. NaN is never the highest.
fn best(values: impl Iterator<Item = f64>) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for (index, value) in values.enumerate() {
        if !value.is_nan() && best.is_none_or(|(_, highest)| value > highest) {
            best = Some((index, value));
        }
    }
    best.map(|(index, _)| index)
}

/// Whether a text equals an answer, apart from what the normalisation disregards. Articles go first, while their
/// case is known.
pub fn exact_match(prediction: &str, answer: &str, normalisation: Normalisation) -> bool {
    let normal = |text: &str| {
        let text = match normalisation {
            Normalisation::Plain => text.to_string(),
            Normalisation::Articles => without_leading_articles(text),
        };
        without_punctuation(&text.to_lowercase())
    };
    normal(prediction) == normal(answer)
}

/// Whether a text contains an answer, in any case of letters. Every text contains an empty answer.
pub fn contains(prediction: &str, answer: &str) -> bool {
    // Python's matching regards the two Turkish letters as an i.
    let latin = |text: &str| text.replace(['İ', 'ı'], "i");
    let (prediction, answer) = (latin(prediction), latin(answer));
    match RegexBuilder::new(&regex::escape(&answer)).case_insensitive(true).build() {
        Ok(regex) => regex.is_match(&prediction),
        // The answer is too long for a regular expression.
        Err(_) => prediction.to_lowercase().contains(&answer.to_lowercase()),
    }
}

/// The F1 of LongBench: the harmonic mean of precision and recall of words, counting repetitions, after removing
/// case, punctuation and articles.
pub fn f1(prediction: &str, answer: &str) -> f64 {
    let normal = |text: &str| without_articles(&without_punctuation(&text.to_lowercase()));
    let (prediction, answer) = (normal(prediction), normal(answer));
    let (prediction, answer): (Vec<&str>, Vec<&str>) =
        (split(&prediction).collect(), split(&answer).collect());
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for &word in &answer {
        *counts.entry(word).or_default() += 1;
    }
    let mut common = 0;
    for word in &prediction {
        if let Some(count) = counts.get_mut(word)
            && *count > 0
        {
            *count -= 1;
            common += 1;
        }
    }
    if common == 0 {
        return 0.0;
    }
    let precision = common as f64 / prediction.len() as f64;
    let recall = common as f64 / answer.len() as f64;
    2.0 * precision * recall / (precision + recall)
}

/// ROUGE-L of a summary, as the package `rouge` 1.0.1 computes it: sentences end at full stops, words at spaces, and
/// sets of words are counted. For each pair of sentences the words of one longest common subsequence are marked; the
/// F1 is that of all marked words. The package fails on sentences of about a thousand words, which then score 0 in
/// the harness; here they are scored like others.
pub fn rouge_l(prediction: &str, answer: &str) -> f64 {
    let (prediction, answer) = (sentences(prediction), sentences(answer));
    if prediction.is_empty() || answer.is_empty() {
        return 0.0;
    }
    let mut common = HashSet::new();
    for answer in &answer {
        for prediction in &prediction {
            common.extend(common_subsequence(answer, prediction));
        }
    }
    let unique = |text: &[Vec<&str>]| text.iter().flatten().collect::<HashSet<_>>().len() as f64;
    let precision = common.len() as f64 / unique(&prediction);
    let recall = common.len() as f64 / unique(&answer);
    2.0 * (precision * recall / (precision + recall + 1e-8))
}

/// The sentences of a text as words. A sentence of white space only has one empty word.
fn sentences(text: &str) -> Vec<Vec<&str>> {
    let words = |sentence| {
        let words: Vec<&str> = split(sentence).collect();
        if words.is_empty() { vec![""] } else { words }
    };
    text.split('.').filter(|sentence| !sentence.is_empty()).map(words).collect()
}

/// The words of a longest common subsequence. Of several it is the one that is found from the end by shortening `y`
/// unless shortening `x` alone keeps the length.
fn common_subsequence<'t>(x: &[&'t str], y: &[&'t str]) -> Vec<&'t str> {
    let width = y.len() + 1;
    let mut lengths = vec![0u32; (x.len() + 1) * width];
    for i in 1..=x.len() {
        for j in 1..=y.len() {
            lengths[i * width + j] = if x[i - 1] == y[j - 1] {
                lengths[(i - 1) * width + j - 1] + 1
            } else {
                lengths[(i - 1) * width + j].max(lengths[i * width + j - 1])
            };
        }
    }
    let (mut i, mut j) = (x.len(), y.len());
    let mut words = Vec::new();
    while i > 0 && j > 0 {
        if x[i - 1] == y[j - 1] {
            words.push(x[i - 1]);
            (i, j) = (i - 1, j - 1);
        } else if lengths[(i - 1) * width + j] > lengths[i * width + j - 1] {
            i -= 1;
        } else {
            j -= 1;
        }
    }
    words
}

/// The classification score of LongBench: 1 / the number of classes that the text names, if the right one is among
/// them. A class whose name is part of the right one's does not count, except that the class after a removed one is
/// not examined: the harness removes from the list that it walks through.
pub fn class_match(prediction: &str, answer: &str, classes: &[String]) -> f64 {
    let mut named: Vec<&str> =
        classes.iter().map(String::as_str).filter(|&class| prediction.contains(class)).collect();
    let mut position = 0;
    while let Some(&class) = named.get(position) {
        if answer.contains(class) && class != answer {
            let first = named.iter().position(|&other| other == class).unwrap_or(position);
            named.remove(first);
        }
        position += 1;
    }
    if named.contains(&answer) { 1.0 / named.len() as f64 } else { 0.0 }
}

/// The score of RULER: the fraction of the answers that the text contains, in lower case. Control characters in the
/// text count as line breaks.
pub fn string_match_all(prediction: &str, answers: &[String]) -> f64 {
    let prediction: String = strip(prediction).chars().map(|c| if c < '\x20' { '\n' } else { c }).collect();
    let prediction = strip(&prediction).to_lowercase();
    let found = answers.iter().filter(|answer| prediction.contains(&answer.to_lowercase())).count();
    if answers.is_empty() { 0.0 } else { found as f64 / answers.len() as f64 }
}

/// Exact match and F1 of DROP for spans and one answer's spans. The match needs the same set of normalised spans and
/// as many. The F1 of two spans compares sets of words and is 0 if the answer's span has numbers and none of them is
/// in the other; the spans are paired so that the sum is highest, and the mean is rounded to hundredths.
pub fn drop_score(prediction: &[impl AsRef<str>], answer: &[impl AsRef<str>]) -> (f64, f64) {
    let prediction: Vec<String> = prediction.iter().map(|span| drop_normal(span.as_ref())).collect();
    let answer: Vec<String> = answer.iter().map(|span| drop_normal(span.as_ref())).collect();
    let sets = (prediction.iter().collect::<HashSet<_>>(), answer.iter().collect::<HashSet<_>>());
    let em = yes(sets.0 == sets.1 && prediction.len() == answer.len());
    let bags = |spans: &[String]| -> Vec<HashSet<String>> {
        spans.iter().map(|span| split(span).map(String::from).collect()).collect()
    };
    let (prediction, answer) = (bags(&prediction), bags(&answer));
    let scores: Vec<Vec<f64>> = answer
        .iter()
        .map(|answer| prediction.iter().map(|prediction| drop_f1(prediction, answer)).collect())
        .collect();
    let spans = prediction.len().max(answer.len()).max(1) as f64;
    (em, round_to_hundredths(best_assignment(&scores) / spans))
}

/// The words of a span in lower case, without punctuation and articles, and numbers in one form.
pub fn drop_normal(span: &str) -> String {
    let words = span.split([' ', '-']).map(|word| {
        let word = word.to_lowercase();
        let word = if float(&word).is_some() { word } else { without_punctuation(&word) };
        let word = float(&word).map_or(word, float_text);
        split(&without_articles(&word)).collect::<Vec<_>>().join(" ")
    });
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

fn drop_f1(prediction: &HashSet<String>, answer: &HashSet<String>) -> f64 {
    let mut numbers = answer.iter().filter(|word| float(word).is_some()).peekable();
    if numbers.peek().is_some() && !numbers.any(|number| prediction.contains(number)) {
        return 0.0;
    }
    let common = prediction.intersection(answer).count() as f64;
    let share = |bag: &HashSet<String>| if bag.is_empty() { 1.0 } else { common / bag.len() as f64 };
    let (precision, recall) = (share(prediction), share(answer));
    if precision == 0.0 && recall == 0.0 { 0.0 } else { 2.0 * precision * recall / (precision + recall) }
}

/// The highest sum of entries of which no two share a row or a column (the Hungarian method: one row after the other
/// is added along the cheapest path of exchanges, under potentials that keep all costs non-negative).
pub fn best_assignment(scores: &[Vec<f64>]) -> f64 {
    let (mut rows, mut columns) = (scores.len(), scores.first().map_or(0, Vec::len));
    let transposed = rows > columns;
    if transposed {
        (rows, columns) = (columns, rows);
    }
    // Rows and columns count from 1; column 0 holds the row that is being added.
    let score = |i: usize, j: usize| if transposed { scores[j - 1][i - 1] } else { scores[i - 1][j - 1] };
    let (mut row_potential, mut column_potential) = (vec![0.0; rows + 1], vec![0.0; columns + 1]);
    let mut row_of = vec![0; columns + 1];
    for row in 1..=rows {
        let (mut cheapest, mut from) = (vec![f64::INFINITY; columns + 1], vec![0; columns + 1]);
        let mut visited = vec![false; columns + 1];
        row_of[0] = row;
        let mut column = 0;
        while row_of[column] != 0 {
            visited[column] = true;
            let i = row_of[column];
            let (mut step, mut next) = (f64::INFINITY, 0);
            for j in 1..=columns {
                if !visited[j] {
                    let cost = -score(i, j) - row_potential[i] - column_potential[j];
                    if cost < cheapest[j] {
                        (cheapest[j], from[j]) = (cost, column);
                    }
                    if cheapest[j] < step {
                        (step, next) = (cheapest[j], j);
                    }
                }
            }
            for j in 0..=columns {
                if visited[j] {
                    row_potential[row_of[j]] += step;
                    column_potential[j] -= step;
                } else {
                    cheapest[j] -= step;
                }
            }
            column = next;
        }
        while column != 0 {
            row_of[column] = row_of[from[column]];
            column = from[column];
        }
    }
    (1..=columns).filter(|&j| row_of[j] != 0).map(|j| score(row_of[j], j)).sum()
}

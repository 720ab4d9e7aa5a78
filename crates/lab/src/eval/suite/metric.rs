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
fn drop_normal(span: &str) -> String {
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
fn best_assignment(scores: &[Vec<f64>]) -> f64 {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| text.to_string()).collect()
    }

    fn texts(answers: &[&str]) -> Gold {
        Gold::Texts { answers: strings(answers), classes: Vec::new() }
    }

    fn written(text: &str) -> [Answer; 1] {
        [Answer::GenerateUntil(text.into())]
    }

    fn scored(loglikelihoods: &[f64]) -> Answer {
        let score = |&loglikelihood| Scored { loglikelihood, is_greedy: false, tokens: 2 };
        Answer::Loglikelihood(loglikelihoods.iter().map(score).collect())
    }

    fn values(values: &[f64]) -> Vec<Value> {
        values.iter().map(|&value| Value { value, weight: 1.0 }).collect()
    }

    // The expected values of the tests were computed by lm-evaluation-harness 0.4.13.

    #[test]
    fn rouge_is_that_of_the_package() {
        let cases = [
            ("the cat sat on the mat. it ran", "the cat ran. it sat", 0.8333333284722222),
            ("", "a", 0.0),
            ("a", "", 0.0),
            ("a", ". .", 0.0),
            (" . a", "b. ", 0.4999999950000001),
            ("x", "x", 0.999999995),
            ("a b c d", "d c b a", 0.24999999500000009),
            ("a b a b a", "b a b a b", 0.999999995),
            ("naïve café. 中 文", "café 中. naïve", 0.8571428522448981),
            ("...", "a", 0.0),
            ("A b", "a b", 0.4999999950000001),
            ("the cat the cat the cat", "the cat", 0.999999995),
            ("a  b\tc.d e", "a b c. d e f", 0.9090909041322315),
            ("1.5 metres", "1.5 metres tall", 0.8571428522448981),
            ("b c a d e b. a c", "a b c d. e a b c", 0.7999999950000002),
        ];
        for (prediction, answer, expected) in cases {
            assert_eq!(rouge_l(prediction, answer), expected, "{prediction:?} {answer:?}");
        }
        // The package overflows its stack here.
        assert_eq!(rouge_l(&"word ".repeat(3000), &"word ".repeat(2000)), 0.999999995);
        assert_eq!(Metric::Rouge.score(&texts(&["b", "a b"]), &written(" a b\n")).value, 0.999999995);
    }

    #[test]
    fn f1_counts_words_without_articles_and_punctuation() {
        let cases = [
            ("The big-cat!", "a bigcat", 1.0),
            ("no no yes", "no yes", 0.8),
            ("", "x", 0.0),
            ("the", "a", 0.0),
            ("Ünïcode Straße", "straße, ünïcode", 1.0),
            ("a b b c", "b c c d", 0.5714285714285715),
            ("yes no no", "no no no", 0.6666666666666666),
        ];
        for (prediction, answer, expected) in cases {
            assert_eq!(f1(prediction, answer), expected, "{prediction:?} {answer:?}");
        }
        assert_eq!(Metric::QaF1.score(&texts(&["x", "no yes", "yes"]), &written("no no yes")).value, 0.8);
        assert_eq!(Metric::QaF1.score(&texts(&[]), &written("x")).value, 0.0);
    }

    #[test]
    fn classes_are_removed_while_they_are_examined() {
        let classes =
            ["Abbreviation", "Expression abbreviated", "Other", "Other location", "location", "Date"];
        let cases = [
            ("Abbreviation Expression abbreviated", "Expression abbreviated", 0.5),
            ("Other location", "Other location", 1.0),
            ("Other location", "location", 1.0 / 3.0),
            ("Date", "Date", 1.0),
            ("Date Other", "Date", 0.5),
            ("", "Date", 0.0),
            ("other", "Other", 0.0),
            ("Other location Date", "Other location", 0.5),
        ];
        for (prediction, answer, expected) in cases {
            assert_eq!(
                class_match(prediction, answer, &strings(&classes)),
                expected,
                "{prediction:?} {answer:?}"
            );
        }
        // `b` follows the removed `a` and is skipped, so that it counts.
        assert_eq!(class_match("a b ab", "ab", &strings(&["a", "b", "ab"])), 0.5);
        let gold = Gold::Texts { answers: strings(&["x", "Date"]), classes: strings(&classes) };
        assert_eq!(Metric::Classification.score(&gold, &written(" Date")).value, 1.0);
    }

    #[test]
    fn drop_compares_spans() {
        let normal = [
            ("The 12-Yard run, 3.50", "12.0 yard run 3.5"),
            ("1,000 men", "1000.0 men"),
            ("$5", "5.0"),
            ("a-the b", "b"),
            ("nan inf INFINITY", "nan inf inf"),
            ("1_000", "1000.0"),
            ("1e5 1e20", "100000.0 1e+20"),
            ("O'Neil's", "oneils"),
            ("5%", "5.0"),
            ("an\napple\tthe pie", "apple pie"),
            ("٣ men", "3.0 men"),
            ("½", "½"),
            (".5 -3", "0.5 3.0"),
        ];
        for (span, expected) in normal {
            assert_eq!(drop_normal(span), expected, "{span:?}");
        }
        let cases: [(&[&str], &[&str], (f64, f64)); 13] = [
            (&["12 yards"], &["12"], (0.0, 0.67)),
            (&["12"], &["12 yards"], (0.0, 0.67)),
            (&["red"], &["red", "blue"], (0.0, 0.5)),
            (&["the red"], &["Red"], (1.0, 1.0)),
            (&[""], &["x"], (0.0, 0.0)),
            (&[""], &["the"], (1.0, 1.0)),
            (&["5.0"], &["5"], (1.0, 1.0)),
            (&["Tom Brady threw"], &["Tom Brady"], (0.0, 0.8)),
            (&["a b", "c d"], &["c d", "a b"], (1.0, 1.0)),
            (&["x y", "x"], &["x", "x y z", "w"], (0.0, 0.6)),
            (&["a b c"], &["b c d", "a b x y", "q"], (0.0, 0.27)),
            (&["1 2"], &["2 3"], (0.0, 0.5)),
            (&["one two three", "two"], &["two three", "one"], (0.0, 0.58)),
        ];
        for (prediction, answer, expected) in cases {
            assert_eq!(drop_score(prediction, answer), expected, "{prediction:?} {answer:?}");
        }
        let gold = Gold::Spans(vec![strings(&["", "x"]), strings(&["red"]), strings(&["x y z"])]);
        assert_eq!(Metric::Em.score(&gold, &written("x")).value, 0.0);
        assert_eq!(Metric::F1.score(&gold, &written("x")).value, 0.5);
    }

    #[test]
    fn the_best_assignment_is_that_of_all_permutations() {
        fn brute(scores: &[Vec<f64>], row: usize, used: &mut Vec<bool>) -> f64 {
            let Some(entries) = scores.get(row) else { return 0.0 };
            let mut highest = brute(scores, row + 1, used);
            for (column, entry) in entries.iter().enumerate() {
                if !used[column] {
                    used[column] = true;
                    highest = highest.max(entry + brute(scores, row + 1, used));
                    used[column] = false;
                }
            }
            highest
        }
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 60) as f64 / 15.0
        };
        for (rows, columns) in [(1, 1), (1, 5), (5, 1), (2, 3), (3, 2), (4, 4), (4, 5), (5, 4)] {
            for _ in 0..20 {
                let scores: Vec<Vec<f64>> =
                    (0..rows).map(|_| (0..columns).map(|_| next()).collect()).collect();
                let expected = brute(&scores, 0, &mut vec![false; columns]);
                assert!((best_assignment(&scores) - expected).abs() < 1e-12, "{scores:?}");
            }
        }
        assert_eq!(best_assignment(&[]), 0.0);
    }

    #[test]
    fn exact_matches() {
        for normalisation in [Normalisation::Plain, Normalisation::Articles] {
            for (prediction, answer, expected) in [
                ("The Beatles!", "the beatles", true),
                ("A.B", "ab", true),
                ("x ", "x", false),
                ("É", "é", true),
                ("", "!", true),
                ("", "x", false),
            ] {
                assert_eq!(exact_match(prediction, answer, normalisation), expected, "{prediction:?}");
            }
        }
        assert!(exact_match("end of the line", "End of line", Normalisation::Articles));
        assert!(!exact_match("end of the line", "End of line", Normalisation::Plain));
        let metric = Metric::ExactMatch(Normalisation::Plain);
        assert_eq!(metric.score(&texts(&["x", "Shakespeare"]), &written(" shakespeare ")).value, 1.0);
    }

    #[test]
    fn containment_ignores_case() {
        for (prediction, answer, expected) in [
            ("It is PARIS.", "paris", true),
            ("STRASSE", "straße", false),
            ("straẞe", "straße", true),
            ("İstanbul", "istanbul", true),
            ("ıI", "iı", true),
            ("ſ", "S", true),
            ("\u{212a}", "k", true),
            ("a+b", "A+B", true),
            ("ab", "a.b", false),
            ("x", "", true),
            ("ΣΑΣ", "σας", true),
            ("", "x", false),
        ] {
            assert_eq!(contains(prediction, answer), expected, "{prediction:?} {answer:?}");
        }
        let long = "Word ".repeat(100_000);
        assert!(contains(&long, &long.to_lowercase()));
        assert_eq!(Metric::Contains.score(&texts(&["y", "X"]), &written("axb")).value, 1.0);
    }

    #[test]
    fn all_strings_match() {
        let answers = strings(&["123", "ABC", "x\ny"]);
        assert_eq!(string_match_all(" abc\u{0}123 ", &answers), 2.0 / 3.0);
        assert_eq!(string_match_all("x\u{1}y", &answers), 1.0 / 3.0);
        assert_eq!(string_match_all("", &answers), 0.0);
        assert_eq!(string_match_all("x", &[]), 0.0);
        assert_eq!(Metric::StringMatchAll.score(&texts(&["7", "8"]), &written("8")).value, 0.5);
    }

    #[test]
    fn choices_are_compared_by_likelihood_and_per_character() {
        let gold = |index| Gold::Choice { index, lengths: vec![1, 10, 2] };
        let answer = [scored(&[-1.0, -2.0, -1.0])];
        // The first of equal ones wins.
        assert_eq!([0, 1, 2].map(|i| Metric::Acc.score(&gold(i), &answer).value), [1.0, 0.0, 0.0]);
        assert_eq!([0, 1, 2].map(|i| Metric::AccNorm.score(&gold(i), &answer).value), [0.0, 1.0, 0.0]);
        let apart = [scored(&[-3.0]), scored(&[-2.0])];
        assert_eq!(Metric::Acc.score(&gold(1), &apart).value, 1.0);
        let nan = [scored(&[f64::NAN, -5.0, f64::NEG_INFINITY])];
        assert_eq!(Metric::Acc.score(&gold(1), &nan).value, 1.0);
        assert_eq!(Metric::Acc.score(&gold(0), &[scored(&[f64::NAN])]).value, 0.0);
        assert_eq!(Metric::Acc.score(&gold(0), &[]).value, 0.0);
        let empty = Gold::Choice { index: 1, lengths: vec![0, 4] };
        assert_eq!(Metric::AccNorm.score(&empty, &[scored(&[-1.0, -9.0])]).value, 1.0);
    }

    #[test]
    fn means_and_their_errors() {
        let accuracy = values(&[1.0, 0.0, 1.0, 1.0]);
        assert_eq!(Metric::Acc.aggregate(&accuracy), 0.75);
        assert_eq!(Metric::Acc.standard_error(&accuracy), Some(0.25));
        assert_eq!(Metric::Acc.standard_error(&accuracy[..1]), None);
        assert!(Metric::Acc.aggregate(&[]).is_nan());
        let greedy =
            |loglikelihood| Answer::Loglikelihood(vec![Scored { loglikelihood, is_greedy: true, tokens: 1 }]);
        let lambada = [-1.0, -2.0, -3.0].map(|x| Metric::Perplexity.score(&Gold::Greedy, &[greedy(x)]));
        assert_eq!(Metric::Acc.score(&Gold::Greedy, &[greedy(-1.0)]).value, 1.0);
        assert_eq!(Metric::Perplexity.aggregate(&lambada), 2f64.exp());
        let error = Metric::Perplexity.standard_error(&lambada).unwrap();
        assert!((error - 2f64.exp() / 3f64.sqrt()).abs() < 1e-12);
        assert!(!Metric::Perplexity.higher_is_better() && Metric::Acc.higher_is_better());
    }

    #[test]
    fn perplexities_of_texts_are_weighted() {
        let answer = |loglikelihood, tokens| {
            [Answer::LoglikelihoodRolling(Scored { loglikelihood, is_greedy: false, tokens })]
        };
        let documents = [
            (Gold::Sizes { words: 2, bytes: 10 }, answer(-4.0, 4)),
            (Gold::Sizes { words: 6, bytes: 30 }, answer(-12.0, 4)),
        ];
        let total = |metric: Metric| {
            let values: Vec<Value> =
                documents.iter().map(|(gold, answer)| metric.score(gold, answer)).collect();
            assert_eq!(metric.standard_error(&values), None);
            metric.aggregate(&values)
        };
        assert_eq!(total(Metric::WordPerplexity), 2f64.exp());
        assert_eq!(total(Metric::BytePerplexity), 0.4f64.exp());
        assert_eq!(total(Metric::TokenPerplexity), 2f64.exp());
        assert_eq!(total(Metric::BitsPerByte), 0.4 / std::f64::consts::LN_2);
        assert!(Metric::Acc.score(&documents[0].0, &documents[0].1).value.is_nan());
    }
}

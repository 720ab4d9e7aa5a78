//! Text operations with the exact results of Python's, which the published scores were computed with.

use std::sync::LazyLock;

use regex::{Captures, Regex};

/// `str.isspace`: Unicode white space and the four separators of ASCII.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// `str.split()`: the words between white space.
pub fn split(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// `str.strip()`.
pub fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `len(re.split(r"\s+", text))`: a text that begins or ends with white space has an empty word there.
pub fn count_words(text: &str) -> usize {
    let mut runs = 0;
    let mut inside = false;
    for c in text.chars() {
        runs += usize::from(is_space(c) && !inside);
        inside = is_space(c);
    }
    runs + 1
}

/// Removes `string.punctuation`, which is the punctuation of ASCII.
pub fn without_punctuation(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_punctuation()).collect()
}

/// `re.sub(r"\b(a|an|the)\b", " ", text)`. Python's words are letters, numbers and `_`; the `\b` of the regex crate
/// also counts combining marks, so that words are matched as a whole here.
pub fn without_articles(text: &str) -> String {
    static WORD: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[\p{L}\p{N}_]+").ok());
    replace(&WORD, text, |word| matches!(word, "a" | "an" | "the").then_some(" "))
}

/// `re.sub(r"\b(?:The |the |An |A |The |a |an )", "", text)`, the articles that `nq_open` removes.
pub fn without_leading_articles(text: &str) -> String {
    static WORD: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[\p{L}\p{N}_]+ ?").ok());
    replace(&WORD, text, |word| matches!(word, "The " | "the " | "An " | "A " | "a " | "an ").then_some(""))
}

/// Replaces the matches for which `by` has a replacement.
fn replace(regex: &Option<Regex>, text: &str, by: impl Fn(&str) -> Option<&'static str>) -> String {
    let Some(regex) = regex else { return text.into() };
    regex
        .replace_all(text, |found: &Captures<'_>| by(&found[0]).unwrap_or(&found[0]).to_string())
        .into_owned()
}

/// `str.capitalize()`.
pub fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let Some(first) = characters.next() else { return String::new() };
    // The title case of a letter that becomes several, as ß, has only the first of them in upper case.
    let mut upper = first.to_uppercase();
    let head: String = upper.next().into_iter().chain(upper.flat_map(char::to_lowercase)).collect();
    head + &characters.as_str().to_lowercase()
}

/// `float(text)`: the decimal digits of any script, with single underscores between digits. Unlike `str.strip()` it
/// keeps the separators of ASCII, so that a text with one is no number.
pub fn float(text: &str) -> Option<f64> {
    let digits: Vec<char> = text.trim().chars().map(|c| decimal(c).unwrap_or(c)).collect();
    let digit = |i: usize| digits.get(i).is_some_and(char::is_ascii_digit);
    let mut plain = String::with_capacity(digits.len());
    for (i, &c) in digits.iter().enumerate() {
        if c != '_' {
            plain.push(c);
        } else if i == 0 || !digit(i - 1) || !digit(i + 1) {
            return None;
        }
    }
    plain.parse().ok()
}

/// The ASCII digit of a decimal digit of another script. Unicode has the ten digits of a script in a row.
fn decimal(c: char) -> Option<char> {
    static DIGIT: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"^\p{Nd}$").ok());
    let is_digit = |c: char| match &*DIGIT {
        Some(regex) => regex.is_match(c.encode_utf8(&mut [0; 4])),
        None => c.is_ascii_digit(),
    };
    if c.is_ascii() || !is_digit(c) {
        return None;
    }
    let before = (0..u32::from(c)).rev().map_while(char::from_u32).take_while(|&c| is_digit(c)).count();
    char::from_digit((before % 10) as u32, 10)
}

/// `str(number)`: the shortest digits that give the number again.
pub fn float_text(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    let text = format!("{number:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

/// `numpy.round(number, 2)`.
pub fn round_to_hundredths(number: f64) -> f64 {
    (number * 100.0).round_ties_even() / 100.0
}

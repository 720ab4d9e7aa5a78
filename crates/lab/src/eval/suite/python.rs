//! Text operations with the exact results of Python's, which the published scores were computed with.

use std::sync::LazyLock;

use regex::{Captures, Regex};

/// `str.isspace`: Unicode white space and the four separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// `str.split()`: the words between white space.
pub(super) fn split(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// `str.strip()`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `len(re.split(r"\s+", text))`: a text that begins or ends with white space has an empty word there.
pub(super) fn count_words(text: &str) -> usize {
    let mut runs = 0;
    let mut inside = false;
    for c in text.chars() {
        runs += usize::from(is_space(c) && !inside);
        inside = is_space(c);
    }
    runs + 1
}

/// Removes `string.punctuation`, which is the punctuation of ASCII.
pub(super) fn without_punctuation(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_punctuation()).collect()
}

/// `re.sub(r"\b(a|an|the)\b", " ", text)`. Python's words are letters, numbers and `_`; the `\b` of the regex crate
/// also counts combining marks, so that words are matched as a whole here.
pub(super) fn without_articles(text: &str) -> String {
    static WORD: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[\p{L}\p{N}_]+").ok());
    replace(&WORD, text, |word| matches!(word, "a" | "an" | "the").then_some(" "))
}

/// `re.sub(r"\b(?:The |the |An |A |The |a |an )", "", text)`, the articles that `nq_open` removes.
pub(super) fn without_leading_articles(text: &str) -> String {
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
pub(super) fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let Some(first) = characters.next() else { return String::new() };
    // The title case of a letter that becomes several, as ß, has only the first of them in upper case.
    let mut upper = first.to_uppercase();
    let head: String = upper.next().into_iter().chain(upper.flat_map(char::to_lowercase)).collect();
    head + &characters.as_str().to_lowercase()
}

/// `float(text)`: the decimal digits of any script, with single underscores between digits. Unlike `str.strip()` it
/// keeps the separators of ASCII, so that a text with one is no number.
pub(super) fn float(text: &str) -> Option<f64> {
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
pub(super) fn float_text(number: f64) -> String {
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
pub(super) fn round_to_hundredths(number: f64) -> f64 {
    (number * 100.0).round_ties_even() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_at_every_white_space() {
        assert_eq!(
            split(" a\u{1c}b\u{3000}c\u{a0}\r\nd\u{200b} ").collect::<Vec<_>>(),
            ["a", "b", "c", "d\u{200b}"]
        );
        assert_eq!(strip("\u{1f} a b\u{2028}"), "a b");
        for (text, words) in [("", 1), (" ", 2), ("a", 1), ("a b", 2), (" a  b\n", 4)] {
            assert_eq!(count_words(text), words, "{text:?}");
        }
    }

    #[test]
    fn articles_are_whole_words() {
        assert_eq!(without_articles("the theatre, a_an an-a then"), "  theatre, a_an  -  then");
        // A combining mark is no part of a word, a letter of another script is.
        assert_eq!(without_articles("a\u{301} aß 中a a中"), " \u{301} aß 中a a中");
        assert_eq!(without_leading_articles("The the AN An a banana the"), "AN banana the");
        assert_eq!(without_leading_articles("sofa the\u{a0}x"), "sofa the\u{a0}x");
    }

    #[test]
    fn numbers_are_read_and_written_like_python() {
        let read: [(&str, Option<&str>); 24] = [
            ("12", Some("12.0")),
            ("3.50", Some("3.5")),
            (" .5\n", Some("0.5")),
            ("5.", Some("5.0")),
            ("1_000", Some("1000.0")),
            ("1__0", None),
            ("_1", None),
            ("1_", None),
            ("1_.5", None),
            ("1,000", None),
            ("nan", Some("nan")),
            ("-nan", Some("nan")),
            ("inf", Some("inf")),
            ("-Infinity", Some("-inf")),
            ("1e5", Some("100000.0")),
            ("1e16", Some("1e+16")),
            ("123456789012345678", Some("1.2345678901234568e+17")),
            ("0.0001", Some("0.0001")),
            ("0.00001", Some("1e-05")),
            ("1.5e-7", Some("1.5e-07")),
            ("-0", Some("-0.0")),
            ("٣٫5", None),
            ("١٢𝟗", Some("129.0")),
            ("", None),
        ];
        for (text, expected) in read {
            assert_eq!(float(text).map(float_text).as_deref(), expected, "{text:?}");
        }
        for text in [".", "e5", "0x10", "1e", "infin", "½", "²", "\u{1c}3"] {
            assert_eq!(float(text), None, "{text:?}");
        }
    }

    #[test]
    fn capitals() {
        for (text, expected) in
            [("", ""), ("hELLO World", "Hello world"), ("ßA", "Ssa"), ("éA", "Éa"), (" A", " a")]
        {
            assert_eq!(capitalize(text), expected);
        }
    }
}

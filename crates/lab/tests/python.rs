//! Text operations as in Python.

use march_lab::eval::suite::python::{
    capitalize, count_words, float, float_text, split, strip, without_articles, without_leading_articles,
};

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

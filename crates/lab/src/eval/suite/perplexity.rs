//! Texts that are scored as a whole.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

use super::field::text;
use super::metric::Metric;
use super::python::count_words;
use super::source::DataSet;
use super::{Documents, Gold, Sample, Suite};
use crate::eval::request::Request;

const METRICS: &[Metric] =
    &[Metric::WordPerplexity, Metric::BytePerplexity, Metric::BitsPerByte, Metric::TokenPerplexity];

pub(super) const TASKS: &[Suite] = &[
    Suite {
        name: "perplexity",
        group: "text",
        about: "a text of your own, scored as a whole",
        metrics: METRICS,
        paper: None,
        documents: Documents::Text,
    },
    Suite::of_files(
        "text",
        "wikitext",
        None,
        "articles of Wikipedia, scored as a whole",
        METRICS,
        wikitext,
        DataSet::new("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test", &[]),
    ),
];

impl Sample {
    /// A text that is scored as a whole. Words are what white space separates.
    pub fn of_text(text: &str) -> Self {
        Self {
            requests: vec![Request::LoglikelihoodRolling { text: text.into() }],
            gold: Gold::Sizes { words: count_words(text), bytes: text.len() },
        }
    }
}

/// The text is put together again from the tokens of WikiText; the sizes are those of the tokens.
fn wikitext(document: &Value) -> Result<Sample, String> {
    let page = text(document, "page")?;
    Ok(Sample { requests: Sample::of_text(&joined(page)).requests, gold: Sample::of_text(page).gold })
}

/// What is replaced, in order: first these,
#[rustfmt::skip]
const SEPARATORS: [(&str, &str); 10] = [
    ("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" : ", ": "),
    (" ; ", "; "), (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", "),
];

/// then white space inside these pairs,
const PAIRS: [(&str, &str); 5] = [
    (r"\([\s\x1c-\x1f]*([^\)]*?)[\s\x1c-\x1f]*\)", "($1)"),
    (r"\[[\s\x1c-\x1f]*([^\]]*?)[\s\x1c-\x1f]*\]", "[$1]"),
    (r"\{[\s\x1c-\x1f]*([^}]*?)[\s\x1c-\x1f]*\}", "{$1}"),
    (r#""[\s\x1c-\x1f]*([^"]*?)[\s\x1c-\x1f]*""#, "\"$1\""),
    (r"'[\s\x1c-\x1f]*([^']*?)[\s\x1c-\x1f]*'", "'$1'"),
];

/// then these.
#[rustfmt::skip]
const REST: [(&str, &str); 8] = [
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"),
    (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
];

/// Undoes the separation of punctuation in WikiText.
fn joined(page: &str) -> String {
    static REGEXES: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
        PAIRS.iter().filter_map(|&(pattern, by)| Some((Regex::new(pattern).ok()?, by))).collect()
    });
    let replaced = |text: String, pairs: &[(&str, &str)]| {
        pairs.iter().fold(text, |text, (from, to)| text.replace(from, to))
    };
    let text = replaced(page.to_string(), &SEPARATORS);
    let text = REGEXES.iter().fold(text, |text, (regex, by)| regex.replace_all(&text, *by).into_owned());
    replaced(text, &REST)
}

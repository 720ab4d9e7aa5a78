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

pub(super) const TASKS: &[Suite] = &[
    Suite {
        name: "perplexity",
        group: "text",
        about: "a text of your own, scored as a whole",
        metrics: &[
            Metric::WordPerplexity,
            Metric::BytePerplexity,
            Metric::BitsPerByte,
            Metric::TokenPerplexity,
        ],
        paper: None,
        documents: Documents::Text,
    },
    Suite {
        name: "wikitext",
        group: "text",
        about: "articles of Wikipedia, scored as a whole",
        metrics: &[
            Metric::WordPerplexity,
            Metric::BytePerplexity,
            Metric::BitsPerByte,
            Metric::TokenPerplexity,
        ],
        paper: None,
        documents: Documents::Files {
            set: DataSet {
                hub: "EleutherAI/wikitext_document_level",
                config: "wikitext-2-raw-v1",
                split: "test",
                files: &[],
            },
            sample: wikitext,
        },
    },
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
const SEPARATORS: [(&str, &str); 10] = [
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
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
const REST: [(&str, &str); 8] = [
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
];

/// Undoes the separation of punctuation in WikiText.
fn joined(page: &str) -> String {
    static REGEXES: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
        PAIRS.iter().filter_map(|&(pattern, by)| Some((Regex::new(pattern).ok()?, by))).collect()
    });
    let mut text = page.to_string();
    for (from, to) in SEPARATORS {
        text = text.replace(from, to);
    }
    for (regex, by) in &*REGEXES {
        text = regex.replace_all(&text, *by).into_owned();
    }
    for (from, to) in REST {
        text = text.replace(from, to);
    }
    text
}

//! The evaluation suites: tasks whose documents come from local files ([`source`]) or are generated ([`ruler`]).
//!
//! A task is one entry of a file's `TASKS`: how a document becomes requests, and which metrics score the answers.

mod commonsense;
mod field;
mod longbench;
pub mod metric;
mod perplexity;
pub mod python;
mod retrieval;
pub mod ruler;
pub mod source;

use serde_json::Value;

use super::request::{Answer, Request};
use march_lm::Error;
use march_lm::config::nearest;
use march_lm::data::needles::Needles;
use march_lm::data::recall::TASKS;
use metric::Metric;
use source::DataSet;

/// A task.
pub struct Suite {
    /// The name, as in lm-evaluation-harness.
    pub name: &'static str,
    /// The group: `commonsense`, `retrieval`, `retrieval_cloze`, `longbench`, `niah` or `text`.
    pub group: &'static str,
    /// One line for `march eval tasks`.
    pub about: &'static str,
    /// The metrics; the first is the one that the paper reports.
    pub metrics: &'static [Metric],
    /// The column of the paper's tables, if the paper reports the task.
    pub paper: Option<&'static str>,
    /// Where the documents come from.
    pub documents: Documents,
}

/// Where a task's documents come from.
pub enum Documents {
    /// Local files of a data set.
    Files {
        /// The data set.
        set: DataSet,
        /// Converts one document, or says what is wrong with it.
        sample: fn(&Value) -> Result<Sample, String>,
    },
    /// Generated for a length and a tokenizer.
    Needles(Needles),
    /// The text file that `--text` names.
    Text,
}

/// One document as requests, with what its answers are compared to.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The requests, in order.
    pub requests: Vec<Request>,
    /// What the answers are compared to.
    pub gold: Gold,
}

impl Sample {
    /// A prompt to continue up to one of `until`.
    fn generated(context: String, until: &[&str], max_tokens: usize, gold: Gold) -> Self {
        let until = until.iter().map(|text| text.to_string()).collect();
        Self { requests: vec![Request::GenerateUntil { context, until, max_tokens }], gold }
    }
}

/// What answers are compared to.
#[derive(Clone, Debug, PartialEq)]
pub enum Gold {
    /// The continuation must be what greedy decoding gives (LAMBADA).
    Greedy,
    /// One of several choices: continuations of one context, or one continuation of several contexts.
    Choice {
        /// The index of the right one.
        index: usize,
        /// Length of each choice in characters, without the delimiter.
        lengths: Vec<usize>,
    },
    /// Texts, any of which is right; `classes` are all labels of a classification.
    Texts {
        /// The references.
        answers: Vec<String>,
        /// All class names; empty unless the task is a classification.
        classes: Vec<String>,
    },
    /// DROP: each reference is a list of spans.
    Spans(Vec<Vec<String>>),
    /// Sizes of a text that is scored as a whole.
    Sizes {
        /// Number of words.
        words: usize,
        /// Number of bytes.
        bytes: usize,
    },
}

impl Suite {
    /// A task whose documents are files of a data set.
    const fn of_files(
        group: &'static str,
        name: &'static str,
        paper: Option<&'static str>,
        about: &'static str,
        metrics: &'static [Metric],
        sample: fn(&Value) -> Result<Sample, String>,
        set: DataSet,
    ) -> Self {
        Self { name, group, about, metrics, paper, documents: Documents::Files { set, sample } }
    }

    /// The metrics' values for one document, in their order.
    pub fn score(&self, gold: &Gold, answers: &[Answer]) -> Vec<metric::Value> {
        self.metrics.iter().map(|metric| metric.score(gold, answers)).collect()
    }
}

/// All tasks, in the order of the paper's tables.
pub fn suites() -> impl Iterator<Item = &'static Suite> {
    [commonsense::TASKS, retrieval::TASKS, longbench::TASKS, ruler::TASKS, perplexity::TASKS]
        .into_iter()
        .flatten()
}

/// The error for a name that is neither a task, a recall task, nor a group.
pub fn unknown_task(name: &str) -> Error {
    let recall = TASKS.iter().map(|task| task.name);
    let groups = GROUPS.iter().map(|(name, _)| *name);
    let names: Vec<&str> = suites().map(|suite| suite.name).chain(recall).chain(groups).collect();
    let near = nearest(name, names).map(|near| format!("did you mean `{near}`? "));
    let near = near.unwrap_or_default();
    Error::Request(format!("`{name}` is not a task; {near}`march eval tasks` lists all tasks and groups"))
}

/// The names of the groups with what they hold.
pub const GROUPS: [(&str, &str); 8] = [
    ("commonsense", "the paper's eight commonsense tasks"),
    ("retrieval", "the paper's six retrieval tasks"),
    ("retrieval_cloze", "TriviaQA, DROP and NQ as cloze with context"),
    ("longbench", "the paper's twelve LongBench tasks"),
    ("niah", "the paper's six needle-in-a-haystack tasks"),
    ("niah_extra", "the other two needle tasks of RULER"),
    ("text", "perplexity of texts"),
    ("paper", "commonsense, retrieval, longbench and niah"),
];

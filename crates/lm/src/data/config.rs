//! `[data]`: the source of tokens.

use serde::{Deserialize, Serialize};

use super::{needles, recall};
use crate::config::{Contradiction, within};
use crate::error::{Error, Result};
use crate::tokenizer::BYTES;

/// Longer sequences are mistakes: no machine has the memory for them.
pub(crate) const LONGEST_SEQUENCE: u64 = 1 << 24;

/// The share of plain text among needle lessons, unless `text_share` is set.
pub(super) const TEXT_SHARE: f64 = 0.25;

/// The kind of data that a model is trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataKind {
    /// The built-in text.
    #[default]
    Builtin,
    /// A folder written by `march data prepare`.
    Shards,
    /// A recall task, which generates its own sequences.
    Recall,
    /// Needle prompts with their answers, and plain text.
    Needles,
    /// A JSON file of explicit batches.
    Batches,
}

impl DataKind {
    /// The name in configuration files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Builtin => "builtin",
            Self::Shards => "shards",
            Self::Recall => "recall",
            Self::Needles => "needles",
            Self::Batches => "batches",
        }
    }

    /// Whether the sequences are parts of a text, which can be shuffled and continued. Batches must be taken in order;
    /// a task's sequences are already random.
    pub fn is_text(self) -> bool {
        matches!(self, Self::Builtin | Self::Shards)
    }

    /// Whether the ids come from a tokenizer. Those in a file of batches do not.
    pub fn has_tokenizer(self) -> bool {
        self != Self::Batches
    }
}

/// `[data]`: the source of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DataConfig {
    /// The kind of data: `builtin`, `shards`, `recall`, `needles` or `batches`.
    pub kind: DataKind,
    /// For `recall`, the task and its sizes, such as `mqar:pairs=24`; for `needles`, the tasks with commas between them
    /// (default: the paper's six).
    pub task: Option<String>,
    /// For `needles`, the share of sequences that are plain text (default 0.25).
    pub text_share: Option<f64>,
    /// The folder or file.
    pub path: Option<String>,
    /// A folder of shards to validate on; without one, the last part of the training text is held out.
    pub validation: Option<String>,
    /// The fraction of the text that is held out.
    pub validation_fraction: f64,
    /// `bytes`, or a tokenizer.json: used for the built-in text, needles and samples, and stored with the checkpoint.
    pub tokenizer: String,
    /// T, the number of tokens per sequence.
    pub sequence_length: usize,
    /// Whether sequences are in random order, different in each epoch; otherwise in the order of the text.
    pub shuffle: bool,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            kind: DataKind::Builtin,
            task: None,
            text_share: None,
            path: None,
            validation: None,
            validation_fraction: 0.1,
            tokenizer: "bytes".into(),
            sequence_length: 2048,
            shuffle: true,
        }
    }
}

impl DataConfig {
    /// Makes the paths independent of the working directory.
    pub fn make_absolute(&mut self) -> Result<()> {
        let tokenizer = (self.tokenizer != BYTES).then_some(&mut self.tokenizer);
        for path in self.path.iter_mut().chain(&mut self.validation).chain(tokenizer) {
            let absolute = std::path::absolute(&path).map_err(Error::io(path.as_ref(), "find"))?;
            *path = absolute.to_string_lossy().into_owned();
        }
        Ok(())
    }

    /// Fills in the defaults that depend on the kind.
    pub fn complete(&mut self) {
        if self.kind == DataKind::Needles {
            self.task.get_or_insert_with(needles::Task::paper);
            self.text_share.get_or_insert(TEXT_SHARE);
        }
    }

    /// Rejects invalid values.
    pub fn check(&self) -> std::result::Result<(), Contradiction> {
        within("sequence_length", self.sequence_length as u64, 1..=LONGEST_SEQUENCE)?;
        let missing = |kind: &str, what: &str, example: &str| {
            Err((
                "path",
                format!(
                    "is missing in [data]: `kind = \"{kind}\"` needs {what}; set it with `--set data.path={example}`, or \
                 with `path = \"{example}\"` in a file"
                ),
            ))
        };
        let needless = |what: &str| Err(("path", format!("is set, but {what}")));
        let not_valid = |error: Error| ("task", format!("is not valid: {error}"));
        match (self.kind, &self.path, &self.task) {
            (DataKind::Builtin, Some(_), _) => {
                return needless("the built-in text needs none; remove it or set `kind`");
            }
            (DataKind::Shards, None, _) => {
                return missing("shards", "the folder that `march data prepare` wrote", "DIR");
            }
            (DataKind::Batches, None, _) => return missing("batches", "a JSON file of batches", "FILE"),
            (DataKind::Recall, _, None) => {
                return Err(("task", "is missing; `kind = \"recall\"` needs it, such as `mqar`".into()));
            }
            (DataKind::Recall, Some(_), _) => {
                return needless("a task makes its own sequences; remove it");
            }
            (DataKind::Recall, None, Some(task)) => {
                recall::Task::open(task, Some(self.sequence_length)).map_err(not_valid)?;
            }
            (DataKind::Needles, Some(_), _) => return needless("lessons with needles need none; remove it"),
            (DataKind::Needles, None, Some(tasks)) => {
                needles::Task::list(tasks).map_err(not_valid)?;
            }
            (_, _, Some(_)) => {
                let message = "is set, but only `kind = \"recall\"` and `kind = \"needles\"` have one; remove it or set `kind`";
                return Err(("task", message.into()));
            }
            _ => {}
        }
        match self.text_share {
            Some(_) if self.kind != DataKind::Needles => {
                let message = "is set, but only `kind = \"needles\"` has one; remove it or set `kind`";
                return Err(("text_share", message.into()));
            }
            Some(share) if !(0.0..=1.0).contains(&share) => {
                return Err(("text_share", format!("is {share}; it must be a fraction from 0 to 1")));
            }
            _ => {}
        }
        if !(0.0..1.0).contains(&self.validation_fraction) {
            let message = format!("is {}; it must be at least 0 and below 1", self.validation_fraction);
            return Err(("validation_fraction", message));
        }
        Ok(())
    }
}

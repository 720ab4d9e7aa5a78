//! `[data]`: the source of tokens.

use serde::{Deserialize, Serialize};

use super::recall::Task;
use crate::config::{Contradiction, within};
use crate::error::{Error, Result};
use crate::tokenizer::BYTES;

/// Longer sequences are mistakes: no machine has the memory for them.
pub(crate) const LONGEST_SEQUENCE: u64 = 1 << 24;

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
    /// The kind of data: `builtin`, `shards`, `recall` or `batches`.
    pub kind: DataKind,
    /// The task and its sizes, such as `mqar:pairs=24`, for `recall`.
    pub task: Option<String>,
    /// The folder or file.
    pub path: Option<String>,
    /// A folder of shards to validate on; without one, the last part of the training text is held out.
    pub validation: Option<String>,
    /// The fraction of the text that is held out.
    pub validation_fraction: f64,
    /// `bytes`, or a tokenizer.json: used for the built-in text and for samples, and stored with the checkpoint.
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

    /// Rejects invalid values.
    pub fn check(&self) -> std::result::Result<(), Contradiction> {
        within("sequence_length", self.sequence_length as u64, 1..=LONGEST_SEQUENCE)?;
        match (self.kind, &self.path) {
            (DataKind::Builtin, Some(_)) => {
                let message = "is set, but the built-in text needs none; remove it or set `kind`";
                return Err(("path", message.into()));
            }
            (DataKind::Shards | DataKind::Batches, None) => {
                return Err(("path", format!("is missing; `kind = \"{}\"` needs it", self.kind.name())));
            }
            (DataKind::Recall, path) => {
                let Some(task) = &self.task else {
                    return Err(("task", "is missing; `kind = \"recall\"` needs it, such as `mqar`".into()));
                };
                if path.is_some() {
                    return Err(("path", "is set, but a task makes its own sequences; remove it".into()));
                }
                let opened = Task::open(task, Some(self.sequence_length));
                opened.map_err(|error| ("task", format!("is not valid: {error}")))?;
            }
            (DataKind::Builtin, None) | (DataKind::Shards | DataKind::Batches, Some(_)) => {}
        }
        if self.task.is_some() && self.kind != DataKind::Recall {
            let message = "is set, but only `kind = \"recall\"` has one; remove it or set `kind`";
            return Err(("task", message.into()));
        }
        if !(0.0..1.0).contains(&self.validation_fraction) {
            let message = format!("is {}; it must be at least 0 and below 1", self.validation_fraction);
            return Err(("validation_fraction", message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_refused() {
        let refused = |config: DataConfig| config.check().unwrap_err().0;
        let good = DataConfig::default();
        assert!(good.check().is_ok());
        assert_eq!(refused(DataConfig { kind: DataKind::Shards, ..good.clone() }), "path");
        assert_eq!(refused(DataConfig { kind: DataKind::Batches, ..good.clone() }), "path");
        assert_eq!(refused(DataConfig { path: Some("here".into()), ..good.clone() }), "path");
        assert_eq!(refused(DataConfig { kind: DataKind::Recall, ..good.clone() }), "task");
        assert_eq!(refused(DataConfig { task: Some("mqar".into()), ..good.clone() }), "task");
        for sequence_length in [0, (1 << 24) + 1, usize::MAX] {
            let task = Some("mqar".to_string());
            let recall = DataConfig { kind: DataKind::Recall, task, sequence_length, ..good.clone() };
            assert_eq!(refused(recall), "sequence_length");
        }
    }
}

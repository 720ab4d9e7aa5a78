//! What a run learns from, by `[data] kind`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{DataConfig, TrainConfig};
use crate::data::recall::{RecallSource, Task};
use crate::data::{BatchFile, ShardSource, Shards, Source, TextSource, builtin, split};
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// What a run learns from, validates on and reads.
pub(super) struct Sources {
    pub training: Box<dyn Source>,
    pub validation: Option<Box<dyn Source>>,
    pub tokenizer: Tokenizer,
}

impl Sources {
    /// Opens what `[data]` names; `train` has the seed and how much is validated on.
    pub fn open(keys: &DataConfig, train: &TrainConfig) -> Result<Self> {
        let length = keys.sequence_length;
        let path = PathBuf::from(keys.path.clone().unwrap_or_default());
        match keys.kind.as_str() {
            "batches" => {
                let file = BatchFile::open(&path)?;
                if file.sequence_length() != length {
                    let found = file.sequence_length();
                    let message = format!(
                        "has rows of {found} tokens and the next one, but `sequence_length` of [data] is {length}; \
                         set it to {found}"
                    );
                    return Err(Error::file(&path, message));
                }
                let tokenizer = Tokenizer::load(&keys.tokenizer)?;
                Ok(Self { training: Box::new(file), validation: None, tokenizer })
            }
            "recall" => {
                let task = Task::open(keys.task.as_deref().unwrap_or_default(), Some(length))?;
                let tokenizer = Tokenizer::words(&task.vocabulary())?;
                let asked = RecallSource::asked(task.clone(), train.validation_sequences.max(1) as u64);
                let training = Box::new(RecallSource::lessons(task, train.seed));
                Ok(Self { training, validation: Some(Box::new(asked)), tokenizer })
            }
            "shards" => {
                let shards = Arc::new(Shards::open(&path)?);
                let tokenizer = shards.tokenizer()?;
                let (training, held_back) = match &keys.validation {
                    Some(_) => (0..shards.tokens(), 0..0),
                    None => split(shards.tokens(), keys.validation_fraction)?,
                };
                let validation: Option<Box<dyn Source>> = match &keys.validation {
                    Some(folder) => {
                        let other = Shards::open(Path::new(folder))?;
                        if other.meta().tokenizer_hash != shards.meta().tokenizer_hash {
                            let message = "was made with another tokenizer than the training shards";
                            return Err(Error::file(Path::new(folder), message));
                        }
                        Some(Box::new(ShardSource::new(Arc::new(other), length)?))
                    }
                    None if held_back.is_empty() => None,
                    None => Some(Box::new(ShardSource::part(Arc::clone(&shards), held_back, length)?)),
                };
                let training = Box::new(ShardSource::part(shards, training, length)?);
                Ok(Self { training, validation, tokenizer })
            }
            _ => {
                let tokenizer = Tokenizer::load(&keys.tokenizer)?;
                let mut tokens = tokenizer.encode(builtin())?;
                let (training, _) = split(tokens.len() as u64, keys.validation_fraction)?;
                let held_back = tokens.split_off(training.end as usize);
                let validation: Option<Box<dyn Source>> = match held_back.is_empty() {
                    true => None,
                    false => Some(Box::new(TextSource::new(held_back, length)?)),
                };
                Ok(Self { training: Box::new(TextSource::new(tokens, length)?), validation, tokenizer })
            }
        }
    }
}

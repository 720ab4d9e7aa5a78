//! The data of a run, selected by `[data] kind`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::config::TEXT_SHARE;
use super::needles::{self, LessonOptions, NeedleSource};
use super::recall::{RecallSource, Task};
use super::{BatchFile, DataConfig, DataKind, ShardSource, Shards, Source, TextSource, builtin, split};
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// What a run trains on, what it validates on, and its tokenizer.
pub struct Sources {
    /// The training sequences.
    pub training: Box<dyn Source>,
    /// The sequences for validation, if there are any.
    pub validation: Option<Box<dyn Source>>,
    /// The tokenizer of both.
    pub tokenizer: Tokenizer,
}

impl Sources {
    /// Opens what `[data]` names. A task draws its training sequences with `seed`, and has `validation_sequences`
    /// sequences for validation.
    pub fn open(config: &DataConfig, seed: u64, validation_sequences: usize) -> Result<Self> {
        let length = config.sequence_length;
        let path = PathBuf::from(config.path.clone().unwrap_or_default());
        match config.kind {
            DataKind::Batches => {
                let file = BatchFile::open(&path)?;
                if file.sequence_length() != length {
                    let found = file.sequence_length();
                    let message = format!(
                        "has rows of {found} tokens and the next one, but `sequence_length` of [data] is {length}; \
                         set it to {found}"
                    );
                    return Err(Error::file(&path, message));
                }
                let tokenizer = Tokenizer::load(&config.tokenizer)?;
                Ok(Self { training: Box::new(file), validation: None, tokenizer })
            }
            DataKind::Recall => {
                let task = Task::open(config.task.as_deref().unwrap_or_default(), Some(length))?;
                let tokenizer = task.tokenizer()?;
                let asked = RecallSource::asked(task.clone(), validation_sequences.max(1) as u64);
                let training = Box::new(RecallSource::lessons(task, seed));
                Ok(Self { training, validation: Some(Box::new(asked)), tokenizer })
            }
            DataKind::Needles => {
                let tokenizer = Tokenizer::load(&config.tokenizer)?;
                let options = LessonOptions {
                    tasks: needles::Task::list(config.task.as_deref().unwrap_or(&needles::Task::paper()))?,
                    sequence_length: length,
                    text_share: config.text_share.unwrap_or(TEXT_SHARE),
                    validation_fraction: config.validation_fraction,
                };
                let count = validation_sequences.max(1) as u64;
                let held_out = NeedleSource::held_out(options.clone(), tokenizer.clone(), count)?;
                let training = Box::new(NeedleSource::lessons(options, tokenizer.clone(), seed)?);
                Ok(Self { training, validation: Some(Box::new(held_out)), tokenizer })
            }
            DataKind::Shards => {
                let shards = Arc::new(Shards::open(&path)?);
                let tokenizer = shards.tokenizer()?;
                let (training, held_back) = match &config.validation {
                    Some(_) => (0..shards.tokens(), 0..0),
                    None => split(shards.tokens(), config.validation_fraction)?,
                };
                let validation: Option<Box<dyn Source>> = match &config.validation {
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
            DataKind::Builtin => {
                let tokenizer = Tokenizer::load(&config.tokenizer)?;
                let mut tokens = tokenizer.encode(builtin())?;
                let (training, _) = split(tokens.len() as u64, config.validation_fraction)?;
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

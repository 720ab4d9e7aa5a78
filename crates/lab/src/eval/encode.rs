//! Requests as token ids, split exactly as lm-evaluation-harness splits them.

use march_engine::ops::cross_entropy::IGNORE;

use super::request::Request;
use march_lm::tokenizer::Tokenizer;
use march_lm::{Error, Result};

/// A request in token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoded {
    /// One context and its continuations.
    Loglikelihood {
        /// The context, at least one token.
        context: Vec<u32>,
        /// The continuations, at least one token each.
        continuations: Vec<Vec<u32>>,
    },
    /// A text that is scored as a whole, after a token that stands for its beginning.
    Rolling {
        /// The token before the text.
        prefix: u32,
        /// The text.
        text: Vec<u32>,
    },
    /// A prompt to continue.
    Generate {
        /// The prompt, at least one token.
        prompt: Vec<u32>,
        /// Stop strings.
        until: Vec<String>,
        /// The maximum number of tokens.
        max_tokens: usize,
    },
}

impl Encoded {
    /// Encodes a request for a model of `vocabulary` ids.
    pub fn new(request: &Request, tokenizer: &Tokenizer, vocabulary: usize) -> Result<Self> {
        let ids = |text: &str| encode(tokenizer, text, vocabulary);
        match request {
            Request::Loglikelihood { context, continuations } => {
                if continuations.is_empty() {
                    return Err(Error::Request("there are no continuations to score".into()));
                }
                // Spaces at the end of the context belong to the first word of the continuation.
                let trimmed = context.trim_end();
                let spaces = &context[trimmed.len()..];
                let start = if trimmed.is_empty() { vec![prefix(tokenizer)?] } else { ids(trimmed)? };
                let one = |continuation: &String| {
                    let continuation = format!("{spaces}{continuation}");
                    // The whole text is encoded at once, because a token may depend on what precedes it.
                    let whole = ids(&format!("{trimmed}{continuation}"))?;
                    let before = if trimmed.is_empty() { 0 } else { start.len() };
                    let rest = whole.get(before..).unwrap_or_default().to_vec();
                    if rest.is_empty() {
                        let message = format!("the continuation `{continuation}` has no token of its own");
                        return Err(Error::Request(message));
                    }
                    Ok(rest)
                };
                let continuations = continuations.iter().map(one).collect::<Result<Vec<_>>>()?;
                Ok(Self::Loglikelihood { context: start, continuations })
            }
            Request::LoglikelihoodRolling { text } => {
                Ok(Self::Rolling { prefix: prefix(tokenizer)?, text: ids(text)? })
            }
            Request::GenerateUntil { context, until, max_tokens } => {
                let mut prompt = ids(context)?;
                if prompt.is_empty() {
                    prompt.push(prefix(tokenizer)?);
                }
                let until = until.iter().filter(|stop| !stop.is_empty()).cloned().collect();
                Ok(Self::Generate { prompt, until, max_tokens: *max_tokens })
            }
        }
    }

    /// The number of tokens that a model reads for it, if contexts are shared.
    pub fn tokens(&self) -> usize {
        match self {
            Self::Loglikelihood { context, continuations } => {
                context.len() + continuations.iter().map(Vec::len).sum::<usize>()
            }
            Self::Rolling { text, .. } => text.len(),
            Self::Generate { prompt, max_tokens, .. } => prompt.len() + max_tokens,
        }
    }

    /// The length of the longest sequence that it makes.
    pub fn longest(&self) -> usize {
        match self {
            Self::Loglikelihood { context, continuations } => {
                context.len() + continuations.iter().map(Vec::len).max().unwrap_or(0)
            }
            _ => self.tokens(),
        }
    }
}

/// Inputs and the token that each of them predicts; [`IGNORE`] where the prediction is not scored.
pub(super) struct Targets {
    pub inputs: Vec<u32>,
    pub targets: Vec<u32>,
}

impl Targets {
    /// A continuation after `before`, whose last token predicts the first of the continuation.
    pub(super) fn after(before: &[u32], continuation: &[u32]) -> Self {
        let mut inputs = before.to_vec();
        inputs.extend_from_slice(&continuation[..continuation.len() - 1]);
        let mut targets = vec![IGNORE; before.len() - 1];
        targets.extend_from_slice(continuation);
        Self { inputs, targets }
    }

    /// Tokens that are only read.
    pub(super) fn none(inputs: &[u32]) -> Self {
        Self { inputs: inputs.to_vec(), targets: vec![IGNORE; inputs.len()] }
    }
}

fn encode(tokenizer: &Tokenizer, text: &str, vocabulary: usize) -> Result<Vec<u32>> {
    let ids = tokenizer.encode(text)?;
    match ids.iter().find(|&&id| id as usize >= vocabulary) {
        None => Ok(ids),
        Some(id) => Err(Error::Request(format!(
            "the tokenizer `{}` gives token {id}, but the model's vocabulary has {vocabulary} ids: the tokenizer does \
             not fit the model",
            tokenizer.name()
        ))),
    }
}

/// The token that stands for the beginning of a text.
fn prefix(tokenizer: &Tokenizer) -> Result<u32> {
    tokenizer.end_of_text().ok_or_else(|| {
        Error::Request(format!(
            "an empty context needs a token for the beginning of a text, and the tokenizer `{}` has no end-of-text \
             token",
            tokenizer.name()
        ))
    })
}

//! What an evaluation asks a model, in text, and what the model answers: the three kinds of request of
//! lm-evaluation-harness.

use serde::{Deserialize, Serialize};

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// ln p of each continuation of one context.
    Loglikelihood {
        /// What precedes every continuation; may be empty.
        context: String,
        /// The continuations, each with its leading space.
        continuations: Vec<String>,
    },
    /// ln p of a whole text.
    LoglikelihoodRolling {
        /// The text.
        text: String,
    },
    /// The text that greedy decoding continues a prompt with.
    GenerateUntil {
        /// The prompt.
        context: String,
        /// The text ends before the first of these.
        #[serde(default)]
        until: Vec<String>,
        /// The maximum number of tokens.
        #[serde(default = "default_max_tokens")]
        max_tokens: usize,
    },
}

/// The harness's default.
fn default_max_tokens() -> usize {
    256
}

/// The score of one continuation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    /// Σ ln p of its tokens.
    pub loglikelihood: f64,
    /// Whether each of its tokens was the most probable one.
    pub is_greedy: bool,
    /// Number of tokens.
    pub tokens: usize,
}

impl Scored {
    /// The score of nothing.
    pub const NONE: Self = Self { loglikelihood: 0.0, is_greedy: true, tokens: 0 };
}

/// The answer to one [`Request`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// One score per continuation.
    Loglikelihood(Vec<Scored>),
    /// The score of the text.
    LoglikelihoodRolling(Scored),
    /// The generated text, without the prompt and without the stop string.
    GenerateUntil(String),
}

impl Answer {
    /// The scores of the continuations; empty for other kinds.
    pub fn scores(&self) -> &[Scored] {
        match self {
            Self::Loglikelihood(scores) => scores,
            Self::LoglikelihoodRolling(score) => std::slice::from_ref(score),
            Self::GenerateUntil(_) => &[],
        }
    }

    /// The generated text; empty for other kinds.
    pub fn text(&self) -> &str {
        if let Self::GenerateUntil(text) = self { text } else { "" }
    }
}

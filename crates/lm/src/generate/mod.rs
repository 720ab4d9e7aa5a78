//! Text generation: one token at a time, each sampled from the model's probabilities.
//!
//! A [`Session`] is one text with everything needed to continue it: bank, sampling, random numbers, and pending output.
//! [`Inference`] is a model that is ready to run: its [`Inference::step`] reads the next tokens of any number of
//! sessions in one call. A [`Generator`] combines the two for one text.

mod generator;
mod inference;
mod sampling;
mod session;
mod stream;

pub use generator::Generator;
pub use inference::{Inference, Scores, most_probable};
pub use sampling::Sampling;
pub use session::{GeneratedPiece, GenerationSummary, Limits, Session, StopReason, Text};
pub use stream::{Stops, TextStream};

/// The maximum number of prompt tokens per call of the model.
pub const PIECE_TOKENS: usize = 2048;

/// Calls end at multiples of this number, where the mixers' chunks end.
pub const GRID: usize = 64;

/// Prompt tokens per call of a model with `parameters` parameters: few enough that a call of a large model takes about
/// a second. The number depends on the model alone, so that the same text is always read in the same calls.
pub fn call_tokens(parameters: usize) -> usize {
    const PRODUCTS: f64 = 1e11;
    let tokens = (PRODUCTS / parameters.max(1) as f64) as usize;
    tokens.clamp(GRID, PIECE_TOKENS) / GRID * GRID
}

/// The number of last tokens that decoding the next one may depend on.
const CONTEXT_TOKENS: usize = 8;

/// The number of last tokens that are remembered whatever the penalty window, because a saved text may be continued
/// with another window.
const REMEMBERED_TOKENS: usize = 256;

//! Text from a model: one token after the other, each drawn from the model's probabilities.
//!
//! A [`Session`] is one text with everything that continuing it needs: bank, sampling, random numbers, and what is being
//! written. [`Inference`] is a model that runs: its [`Inference::step`] reads the next tokens of any number of sessions
//! in one call. A [`Generator`] is the two together for one text.

mod generator;
mod inference;
mod sampling;
mod session;
mod stream;

pub use generator::{Generator, continue_text};
pub use inference::Inference;
pub use sampling::Sampling;
pub use session::{Ended, Limits, Session, Text, Written, Wrote};
pub use stream::{Stops, TextStream};

/// The most tokens of a prompt that one call of the model reads.
pub const PIECE_TOKENS: usize = 2048;

/// Calls end on multiples of this, where the mixers' chunks end.
const GRID: usize = 64;

/// Tokens of a prompt that one call of a model with so many parameters reads: few enough that a call of a large model
/// takes about a second. It depends on the model alone, so that the same text is always read in the same calls.
pub fn call_tokens(parameters: usize) -> usize {
    const PRODUCTS: f64 = 1e11;
    let tokens = (PRODUCTS / parameters.max(1) as f64) as usize;
    tokens.clamp(GRID, PIECE_TOKENS) / GRID * GRID
}

/// The last tokens of a text that decoding the next one may depend on.
const CONTEXT_TOKENS: usize = 8;

/// The last tokens of a text that are remembered whatever the penalty's window: a text that is saved may go on with
/// another one.
const REMEMBERED_TOKENS: usize = 256;

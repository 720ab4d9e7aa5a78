//! Serves a model over HTTP with OpenAI's interface.
//!
//! [`serve`] answers requests on a few asynchronous threads; the model runs on a thread of its own (`scheduler`),
//! many requests in one step, and continues from the states of earlier texts that begin alike (`prefix`). `request`
//! reads what a client asks for and refuses by name what is not supported; `answer` writes what it gets.

mod answer;
mod chat;
mod error;
mod http;
mod metrics;
mod prefix;
mod request;
mod scheduler;

pub use http::{Options, serve};
pub use request::Allowed;
pub use scheduler::{Loaded, Share};

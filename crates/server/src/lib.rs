//! Serves a model over HTTP with OpenAI's interface.
//!
//! [`serve`] answers requests on a few asynchronous threads; the model runs on a thread of its own (`scheduler`),
//! many requests in one step, and continues from the states of earlier texts that begin alike (`prefix`). `request`
//! reads what a client asks for and refuses by name what is not supported; `answer` writes what it gets. Conversations
//! that a client continues by name are kept by `sessions`; `recall` says what an answer read of them; `page` is a chat
//! in the browser.

mod answer;
mod chat;
mod error;
mod http;
mod metrics;
mod page;
mod prefix;
mod recall;
mod request;
mod scheduler;
mod sessions;
mod slices;

pub use http::{Options, serve};
pub use request::Allowed;
pub use scheduler::{Loaded, Share};

//! Serves a model over HTTP with OpenAI's interface.
//!
//! [`serve`] answers requests on a few asynchronous threads (`connection`) from those who may ask (`access`); the model runs on a thread of its own (`scheduler`), many
//! requests (`job`, `choice`) in one step, and continues from the states of earlier texts that begin alike (`prefix`).
//! `request` reads what a client asks for (`body`) and refuses by name what is not supported; `respond` gives it to the model,
//! and `answer` writes what the client gets. Conversations that a client continues by name are kept by `sessions`, on
//! disk by `record`; `recall` says what an answer read of them; `page` is a chat in the browser. `chat` writes prompts by the model's template, and `parts` tells reasoning and calls of tools
//! in an answer from its content.

mod access;
mod answer;
mod body;
mod chat;
mod choice;
mod connection;
mod error;
mod http;
mod job;
mod metrics;
mod page;
mod parts;
mod prefix;
mod recall;
mod record;
mod request;
mod respond;
mod scheduler;
mod sessions;
mod slices;
#[cfg(test)]
mod tests;

pub use access::{Access, Origin};
pub use chat::{Asked, Template};
pub use connection::ConnectionLimits;
pub use http::{Options, serve};
pub use parts::{Part, ReplyForm, Splitter};
pub use prefix::{CachedPrefix, PrefixCache, PrefixMatch, Reason};
pub use record::Message;
pub use request::RequestLimits;
pub use scheduler::SchedulerLimits;

//! One file per command.

mod bank;
pub mod chat;
pub mod data;
pub mod demo;
mod demo_learn;
mod demo_table;
pub mod doctor;
#[cfg(feature = "gpu")]
mod doctor_dispatches;
#[cfg(feature = "gpu")]
mod doctor_gpu;
pub mod eval;
mod eval_policies;
mod eval_requests;
mod eval_suites;
pub mod generate;
pub mod init;
pub mod inspect;
mod inspect_bank;
mod inspect_policies;
mod inspect_precision;
pub mod inspect_routing;
pub mod inspect_training;
pub mod logits;
mod open;
mod policy;
mod prompt;
pub mod report;
pub mod reproduce;
mod reproduce_efficiency;
#[cfg(feature = "serve")]
pub mod serve;
pub mod train;
mod train_text;
mod writing;

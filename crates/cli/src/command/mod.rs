//! One file a verb.

#[allow(clippy::print_stdout, clippy::print_stderr)]
mod bank;
#[allow(clippy::print_stdout, clippy::print_stderr)]
pub mod chat;
pub mod data;
pub mod demo;
mod demo_sweep;
mod demo_table;
pub mod doctor;
pub mod eval;
mod eval_policies;
#[allow(clippy::print_stdout, clippy::print_stderr)]
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
pub mod report;
pub mod train;
#[allow(clippy::print_stdout, clippy::print_stderr)]
mod writing;

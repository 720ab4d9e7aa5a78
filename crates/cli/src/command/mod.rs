//! One file a verb.

pub mod data;
pub mod doctor;
pub mod init;
pub mod inspect;
mod inspect_bank;
pub mod inspect_training;
pub mod logits;
mod policy;
pub mod report;
pub mod train;

//! One file a verb.

pub mod data;
pub mod doctor;
pub mod init;
pub mod inspect;
pub mod inspect_training;
pub mod logits;
mod policy;
pub mod report;
pub mod train;

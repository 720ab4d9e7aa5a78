//! One file a verb.

pub mod doctor;

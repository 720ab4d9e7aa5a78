//! What one does with models to learn about them: evaluation suites, experiments, and pages that show the results.
//!
//! A module imports only from the modules before it, in the order of the tree in README: [`corpus`] fetches texts;
//! [`eval`] asks and scores; [`reproduce`] repeats the paper's experiments in small; [`report`] renders pages.

pub mod corpus;
pub mod eval;
pub mod report;
pub mod reproduce;

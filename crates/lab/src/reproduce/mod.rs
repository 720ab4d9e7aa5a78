//! Experiments: the paper's tables and figures at a size that an ordinary computer can carry.
//!
//! An [`Experiment`] is a file of `configs/reproduce/`. A [`Plan`] lists its training runs; [`carry_out_all`] trains and
//! measures what does not exist yet, and returns [`Results`]; `report` turns them into pages. [`efficiency`] measures
//! speed and trains nothing.

pub mod efficiency;
mod experiment;
mod job;
mod measure;
mod passages;
mod plan;
mod pool;
mod statistics;

pub use experiment::{
    EFFICIENCY, Evaluation, Experiment, FigureSpec, PaperExperiment, PlotSpec, Published, Quantity, Release,
    Size, Success, Sweep, Variant, names,
};
pub use job::{Group, Measured, Outcome, PERMUTED, checkpoint, key};
pub use passages::{Copy, GROUPS, Grouping, Passage, REPETITIONS, copies, passages};
pub use plan::{Corpus, Entry, Job, Plan, Scale, plain_name};
pub use pool::{Arm, Finished, Progress, Results, carry_out_all};
pub use statistics::{Count, Mean, fisher, holm, paired_t};

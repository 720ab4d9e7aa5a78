//! Evaluation of a model under a memory policy.
//!
//! - Recall: synthetic sequences with questions, scored token by token ([`evaluate_recall`]).
//! - [`suite`]: the tasks of the paper. A document becomes [`Request`]s in text, [`Encoded`] in token ids; a
//!   [`Scheduler`] answers them in batches; the task's metrics score the answers. [`evaluate`] runs whole tasks and
//!   records every document in a [`Journal`] as it is answered, so that an interrupted run resumes.
//! - [`Measure`]: the cost and benefit of a memory policy on a text.

mod encode;
mod file;
mod journal;
mod measure;
mod paired;
mod recall;
mod request;
mod results;
mod run;
mod schedule;
pub mod suite;

pub use encode::Encoded;
pub use file::{AgeReport, PairedComparison, Report, TaskReport, compare, is_report};
pub use journal::{Entry, Journal};
pub use measure::{Measure, Measured};
pub use paired::{Difference, Resamples, paired_bootstrap};
pub use recall::Answer as RecallAnswer;
pub use recall::{Age, Answers, Reader, RecallOptions, Share, evaluate_recall};
pub use request::{Answer, Request, Scored};
pub use results::{MetricResult, Results, SampleRecord, TaskResult, is_results};
pub use run::{Document, Job, NEEDLE_DOCUMENTS, Outcome, Sources, documents, evaluate};
pub use schedule::{Event, EventHandler, Scheduler};

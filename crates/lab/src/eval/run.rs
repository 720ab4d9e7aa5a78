//! From a task's name to its result: documents, requests, answers, metrics.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use super::encode::Encoded;
use super::journal::{Entry, Journal};
use super::request::Answer;
use super::results::{MetricResult, SampleRecord, TaskResult, label};
use super::schedule::{Event, Scheduler};
use super::suite::source;
use super::suite::{Documents, Gold, Sample, Suite};
use march_lm::data::needles::Essay;
use march_lm::data::recall::QUESTION_SEED;
use march_lm::tokenizer::Tokenizer;
use march_lm::train::machine_memory;
use march_lm::{Error, Result};

/// Where documents come from, and how many are used.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The folder of the data sets.
    pub data_root: Option<PathBuf>,
    /// The text of the task `perplexity`.
    pub text: Option<PathBuf>,
    /// The text between needles; `None` for the built-in one.
    pub haystack: Option<PathBuf>,
    /// Use only the first documents of each task.
    pub limit: Option<usize>,
    /// Skip and count invalid documents instead of failing.
    pub skip_bad: bool,
}

/// One document of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// Its number, from 0.
    pub index: usize,
    /// Where it comes from, for messages.
    pub place: String,
    /// Its requests and what is right.
    pub sample: Sample,
    /// For needles: the depth of the first one, in percent.
    pub depth: Option<f64>,
}

/// A task at a length, with its documents.
pub struct Job {
    /// The task.
    pub suite: &'static Suite,
    /// The length, for tasks that are generated for one.
    pub length: Option<usize>,
    /// The documents.
    pub documents: Vec<Document>,
    /// Number of invalid documents that were skipped.
    pub skipped: usize,
}

impl Job {
    /// The task with its length.
    pub fn label(&self) -> String {
        label(self.suite.name, self.length)
    }
}

/// How many documents a needle task has if no limit is given.
pub const NEEDLE_DOCUMENTS: usize = 500;

/// Reads or generates the documents of a task; `length` is for tasks that are generated for one.
pub fn documents(
    suite: &'static Suite,
    length: Option<usize>,
    sources: &Sources,
    tokenizer: &Tokenizer,
) -> Result<Job> {
    let refuse = |what: String| Err(Error::Request(format!("the task {} {what}", suite.name)));
    let limit = sources.limit.unwrap_or(usize::MAX);
    let mut job = Job { suite, length: None, documents: Vec::new(), skipped: 0 };
    match &suite.documents {
        Documents::Files { set, sample } => {
            let Some(root) = &sources.data_root else {
                return refuse(format!(
                    "needs the data set {}: name the folder that holds it with --data-root",
                    set.hub
                ));
            };
            let files = set.find(root)?;
            for (place, value) in source::documents(&files) {
                if job.documents.len() == limit {
                    break;
                }
                let index = job.documents.len() + job.skipped;
                let read = value.and_then(|value| {
                    sample(&value)
                        .map_err(|what| Error::file(&place.file, format!("{}: {what}", place.line_text())))
                });
                match read {
                    Ok(sample) => {
                        let place = format!("{}, {}", place.file.display(), place.line_text());
                        job.documents.push(Document { index, place, sample, depth: None });
                    }
                    Err(_) if sources.skip_bad => job.skipped += 1,
                    Err(error) => return Err(with_advice(error)),
                }
            }
        }
        Documents::Needles(needles) => {
            let length = length.unwrap_or(4096);
            job.length = Some(length);
            let essay = match &sources.haystack {
                None => Essay::new(march_lm::data::builtin())?,
                Some(path) => Essay::new(&text_of(path)?)?,
            };
            let count = limit.min(NEEDLE_DOCUMENTS) as u64;
            let fitted = needles.fit(tokenizer, &essay, length, QUESTION_SEED, count)?;
            for index in 0..count {
                let drawn = fitted.sample(index)?;
                let depth = drawn.depths.first().copied();
                let place = format!("{} at {length} tokens, sample {index}", suite.name);
                let sample = Sample::of_needles(drawn);
                job.documents.push(Document { index: index as usize, place, sample, depth });
            }
        }
        Documents::Text => {
            let Some(path) = &sources.text else {
                return refuse("needs a text: name it with --text FILE".into());
            };
            let text = text_of(path)?;
            if text.is_empty() {
                return Err(Error::file(path, "is empty; there is nothing to score"));
            }
            let sample = Sample::of_text(&text);
            job.documents.push(Document { index: 0, place: path.display().to_string(), sample, depth: None });
        }
    }
    if job.documents.is_empty() {
        let skipped =
            if job.skipped > 0 { format!(" ({} were invalid)", job.skipped) } else { String::new() };
        return refuse(format!("has no documents{skipped}"));
    }
    Ok(job)
}

/// A document that cannot be used, with what to do about it.
fn with_advice(error: Error) -> Error {
    match error {
        Error::File { path, message } => Error::File {
            path,
            message: format!("{message}; fix it, or skip such documents with --skip-bad"),
        },
        other => other,
    }
}

fn text_of(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(Error::io(path, "read"))?;
    String::from_utf8(bytes).map_err(|_| Error::file(path, "is not UTF-8"))
}

/// What became of a task.
pub enum Outcome {
    /// All documents were answered.
    Done(Box<TaskResult>),
    /// The caller stopped it.
    Stopped,
}

/// Answers all documents of a task. Documents that the journal has are not asked again; the others are recorded in it.
/// After each call of the model `watch` receives the numbers of tokens done and in all, and may stop.
pub fn evaluate(
    scheduler: &Scheduler<'_>,
    mut job: Job,
    sources: &Sources,
    mut journal: Option<&mut Journal>,
    keep_samples: bool,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Outcome> {
    let task = job.label();
    let vocabulary = scheduler.inference.model().config().vocab_size;
    let mut answers: Vec<Vec<Option<Answer>>> = Vec::new();
    let mut requests = Vec::new();
    let mut owners = Vec::new();
    let mut fit = Vec::new();
    for document in std::mem::take(&mut job.documents) {
        let encode = |request| Encoded::new(request, scheduler.tokenizer, vocabulary);
        let encoded = document.sample.requests.iter().map(encode).collect::<Result<Vec<_>>>();
        let encoded = match encoded.and_then(|encoded| room(scheduler, &encoded).map(|()| encoded)) {
            Ok(encoded) => encoded,
            Err(_) if sources.skip_bad => {
                job.skipped += 1;
                continue;
            }
            Err(error) => return Err(Error::Request(format!("{}: {error}", document.place))),
        };
        let known = match &journal {
            Some(journal) => journal.answers(&task, document.index, &document.sample.requests)?,
            None => None,
        };
        if let Some(known) = known {
            answers.push(known.iter().cloned().map(Some).collect());
        } else {
            answers.push(vec![None; encoded.len()]);
            for (part, encoded) in encoded.into_iter().enumerate() {
                owners.push((fit.len(), part));
                requests.push((requests.len(), encoded));
            }
        }
        fit.push(document);
    }
    let total: usize = requests.iter().map(|(_, request)| request.tokens()).sum();
    let finished = scheduler.run(&requests, &mut |event| {
        let (number, answer) = match event {
            Event::Read(tokens) => return Ok(watch(tokens.min(total), total)),
            Event::Answered(number, answer) => (number, answer),
        };
        let (document, part) = owners[number];
        let all = &mut answers[document];
        all[part] = Some(answer);
        if let (true, Some(journal)) = (all.iter().all(Option::is_some), journal.as_deref_mut()) {
            let Document { index, sample, .. } = &fit[document];
            let answers = all.iter().flatten().cloned().collect();
            journal.record(Entry::new(&task, *index, &sample.requests, answers))?;
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let answers: Vec<Vec<Answer>> =
        answers.into_iter().map(|all| all.into_iter().flatten().collect()).collect();
    let whole =
        |(document, answers): (&Document, &Vec<Answer>)| document.sample.requests.len() == answers.len();
    if !finished && !fit.iter().zip(&answers).all(whole) {
        return Ok(Outcome::Stopped);
    }
    Ok(Outcome::Done(Box::new(summary(&job, &fit, &answers, keep_samples))))
}

/// Rejects a request whose sequence the machine cannot hold: only attention's memory grows with every token.
fn room(scheduler: &Scheduler<'_>, requests: &[Encoded]) -> Result<()> {
    let longest = requests.iter().map(Encoded::longest).max().unwrap_or(0);
    let needed = scheduler.inference.model().memory_bytes(longest, scheduler.policy);
    match machine_memory() {
        Some([machine, _]) if needed > machine => Err(Error::Request(format!(
            "a sequence of {longest} tokens takes about {:.1} GiB of memory, but the machine has {:.1} GiB; shorten it, \
             or limit the memory (--retention)",
            needed as f64 / 2f64.powi(30),
            machine as f64 / 2f64.powi(30)
        ))),
        _ => Ok(()),
    }
}

fn summary(job: &Job, documents: &[Document], answers: &[Vec<Answer>], keep_samples: bool) -> TaskResult {
    let suite = job.suite;
    let scores: Vec<_> = documents
        .iter()
        .zip(answers)
        .map(|(document, answers)| suite.score(&document.sample.gold, answers))
        .collect();
    let metrics = suite.metrics.iter().enumerate().map(|(i, metric)| {
        let values: Vec<_> = scores.iter().map(|scores| scores[i]).collect();
        MetricResult {
            metric: metric.name().into(),
            value: metric.aggregate(&values),
            standard_error: metric.standard_error(&values),
            values,
        }
    });
    let sample = |(i, document): (usize, &Document)| SampleRecord {
        index: document.index,
        requests: document.sample.requests.clone(),
        answers: answers[i].clone(),
        target: target(&document.sample.gold),
        scores: suite.metrics.iter().zip(&scores[i]).map(|(m, v)| (m.name().to_string(), v.value)).collect(),
    };
    TaskResult {
        task: suite.name.into(),
        length: job.length,
        documents: documents.len(),
        skipped: job.skipped,
        metrics: metrics.collect(),
        indices: documents.iter().map(|document| document.index).collect(),
        depths: documents.iter().filter_map(|document| document.depth).collect(),
        samples: if keep_samples { documents.iter().enumerate().map(sample).collect() } else { Vec::new() },
    }
}

/// What is right, as JSON.
fn target(gold: &Gold) -> Json {
    match gold {
        Gold::Greedy => Json::Null,
        Gold::Choice { index, .. } => json!(index),
        Gold::Texts { answers, .. } => json!(answers),
        Gold::Spans(spans) => json!(spans),
        Gold::Sizes { words, bytes } => json!({ "words": words, "bytes": bytes }),
    }
}

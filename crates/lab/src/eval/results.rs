//! The results of the suites as a JSON file, and in the schema of lm-evaluation-harness.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};

use super::paired::{Difference, paired_bootstrap};
use super::request::{Answer, Request};
use super::suite::metric::{Metric, Value};
use super::suite::{Suite, suites};
use march_lm::anchors::Policy;
use march_lm::disk;
use march_lm::{Error, Result};

/// Raised when a file's meaning changes.
const FORMAT: u32 = 1;

/// What to do about a damaged file.
pub(super) const ADVICE: &str = "restore it from a copy, or run `march eval` again";

/// The results of a model on some tasks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// The version of the file's format.
    pub march_eval_results: u32,
    /// The checkpoint, as named by the user.
    pub model: String,
    /// The model's type.
    pub model_type: String,
    /// The number of parameters.
    pub parameters: usize,
    /// The precision of its weights.
    pub weights: String,
    /// The memory policy.
    pub policy: Policy,
    /// The tokenizer's name.
    pub tokenizer: String,
    /// Seconds that the run took; of a resumed run, since it was resumed.
    pub seconds: f64,
    /// The tasks.
    pub tasks: Vec<TaskResult>,
}

/// The results of one task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskResult {
    /// The task's name.
    pub task: String,
    /// The length in tokens, for tasks that are generated for one.
    pub length: Option<usize>,
    /// Number of documents.
    pub documents: usize,
    /// Number of invalid documents that were skipped.
    pub skipped: usize,
    /// The metrics, the paper's first.
    pub metrics: Vec<MetricResult>,
    /// The numbers of the documents, in the order of the metrics' values.
    pub indices: Vec<usize>,
    /// For needles: the depth of each document's first needle, in percent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depths: Vec<f64>,
    /// A record for each document, if asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<SampleRecord>,
}

/// One metric of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricResult {
    /// The metric's name.
    pub metric: String,
    /// Over all documents.
    pub value: f64,
    /// The standard error; `None` if it is not defined.
    pub standard_error: Option<f64>,
    /// By document.
    pub values: Vec<Value>,
}

/// Everything about one document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleRecord {
    /// The number of the document.
    pub index: usize,
    /// What was asked.
    pub requests: Vec<Request>,
    /// What was answered.
    pub answers: Vec<Answer>,
    /// What the answers were compared to.
    pub target: Json,
    /// The metrics' values.
    pub scores: BTreeMap<String, f64>,
}

impl TaskResult {
    /// The task with its length, as in `niah_single_1@4096`.
    pub fn label(&self) -> String {
        label(&self.task, self.length)
    }

    /// The registered task; `None` if this program has no such task.
    pub fn suite(&self) -> Option<&'static Suite> {
        suites().find(|suite| suite.name == self.task)
    }

    /// One of its metrics; `None` if the registered task has no such metric.
    fn metric(&self, name: &str) -> Option<&'static Metric> {
        self.suite()?.metrics.iter().find(|metric| metric.name() == name)
    }
}

/// A task with its length.
pub(super) fn label(task: &str, length: Option<usize>) -> String {
    length.map_or(task.to_string(), |length| format!("{task}@{length}"))
}

impl Results {
    /// Results without tasks.
    pub fn new(
        model: String,
        model_type: &str,
        parameters: usize,
        weights: String,
        policy: Policy,
        tokenizer: &str,
    ) -> Self {
        Self {
            march_eval_results: FORMAT,
            model,
            model_type: model_type.into(),
            parameters,
            weights,
            policy,
            tokenizer: tokenizer.into(),
            seconds: 0.0,
            tasks: Vec::new(),
        }
    }

    /// Writes the file, atomically replacing an existing one.
    pub fn write(&self, path: &Path) -> Result<()> {
        write(path, &serde_json::to_value(self).map_err(|error| Error::file(path, error.to_string()))?)
    }

    /// Writes the file in the schema of lm-evaluation-harness; `date` is the time of the run in seconds since 1970.
    pub fn write_lm_eval(&self, path: &Path, date: u64) -> Result<()> {
        write(path, &self.lm_eval(date))
    }

    /// Reads a file that [`Results::write`] wrote.
    pub fn read(path: &Path) -> Result<Self> {
        let (text, sealed) = disk::read_sealed(path, ADVICE)?;
        let foreign = |why: String| {
            Error::file(path, format!("is not a file of results (`march eval --output` writes them): {why}"))
        };
        let results: Self = serde_json::from_str(&text).map_err(|error| foreign(error.to_string()))?;
        let damaged = |message: String| Error::damaged(path, format!("is damaged: {message}; {ADVICE}"));
        if results.march_eval_results != FORMAT {
            let message = format!("has format {}; this program reads {FORMAT}", results.march_eval_results);
            return Err(Error::file(path, message));
        }
        if !sealed {
            return Err(damaged("it has no checksum".into()));
        }
        for task in &results.tasks {
            let count = task.indices.len();
            if task.documents != count || task.metrics.iter().any(|metric| metric.values.len() != count) {
                return Err(damaged(format!(
                    "the number of documents of {} is not consistent",
                    task.label()
                )));
            }
        }
        Ok(results)
    }

    /// The paired differences B − A on the documents that both files have, for the first metric of each task that both
    /// have.
    pub fn compare<'a>(
        &'a self,
        other: &'a Self,
    ) -> Result<Vec<(&'a TaskResult, usize, [f64; 2], Difference)>> {
        let mut list = Vec::new();
        for a in &self.tasks {
            let Some(b) = other.tasks.iter().find(|b| b.task == a.task && b.length == a.length) else {
                continue;
            };
            let Some(one) = a.metrics.first() else { continue };
            let Some(two) = b.metrics.iter().find(|metric| metric.metric == one.metric) else { continue };
            let Some(metric) = a.metric(&one.metric) else { continue };
            let places: BTreeMap<usize, usize> = b.indices.iter().enumerate().map(|(i, &n)| (n, i)).collect();
            let both: Vec<(usize, usize)> =
                a.indices.iter().enumerate().filter_map(|(i, n)| Some((i, *places.get(n)?))).collect();
            if both.len() < 2 {
                continue;
            }
            let statistic = |documents: &[usize]| {
                let (before, after): (Vec<Value>, Vec<Value>) =
                    documents.iter().map(|&i| (one.values[both[i].0], two.values[both[i].1])).unzip();
                [metric.aggregate(&before), metric.aggregate(&after)]
            };
            let all: Vec<usize> = (0..both.len()).collect();
            list.push((a, both.len(), statistic(&all), paired_bootstrap(both.len(), statistic)));
        }
        if list.is_empty() {
            let names =
                |results: &Self| results.tasks.iter().map(TaskResult::label).collect::<Vec<_>>().join(", ");
            return Err(Error::Request(format!(
                "the two files have no task in common with at least two documents: one has {}, the other {}",
                names(self),
                names(other)
            )));
        }
        Ok(list)
    }

    /// The harness's schema.
    fn lm_eval(&self, date: u64) -> Json {
        let mut results = Map::new();
        let mut parts: [Map<String, Json>; 5] = Default::default();
        for task in &self.tasks {
            let mut one = Map::new();
            let mut better = Map::new();
            one.insert("alias".into(), json!(task.label()));
            for metric in &task.metrics {
                let name = task.length.map_or(metric.metric.clone(), |length| length.to_string());
                let error = metric.standard_error.map_or(json!("N/A"), |error| json!(error));
                one.insert(format!("{name},none"), json!(metric.value));
                one.insert(format!("{name}_stderr,none"), error);
                let known = task.metric(&metric.metric);
                better.insert(name, json!(known.is_none_or(|metric| metric.higher_is_better())));
            }
            let entries: [Json; 5] = [
                json!({ "task": task.task, "output_type": "march", "num_fewshot": 0 }),
                json!("march"),
                json!(0),
                Json::Object(better),
                json!({ "original": task.documents + task.skipped, "effective": task.documents }),
            ];
            let key = task.label();
            parts.iter_mut().zip(entries).for_each(|(part, entry)| drop(part.insert(key.clone(), entry)));
            results.insert(key, Json::Object(one));
        }
        let [configs, versions, shots, better, samples] = parts;
        json!({
            "results": results,
            "group_subtasks": {},
            "configs": configs,
            "versions": versions,
            "n-shot": shots,
            "higher_is_better": better,
            "n-samples": samples,
            "config": {
                "model": "march",
                "model_args": { "model": self.model, "weights": self.weights, "policy": self.policy },
                "model_num_parameters": self.parameters,
                "batch_size": null,
                "device": "cpu",
                "limit": null,
                "bootstrap_iters": 0,
                "gen_kwargs": null,
                "random_seed": 0,
            },
            "git_hash": null,
            "date": date,
            "model_source": "march",
            "model_name": self.model,
            "model_name_sanitized": self.model.replace(['/', '\\', ':', ' '], "__"),
            "system_instruction": null,
            "chat_template": null,
            "start_time": date,
            "end_time": date as f64 + self.seconds,
            "total_evaluation_time_seconds": self.seconds.to_string(),
        })
    }
}

/// Writes a file of JSON with its checksum, atomically replacing an existing one.
pub(super) fn write(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Error::file(path, error.to_string()))?;
    disk::replace(path, disk::seal(&(text + "\n")).as_bytes())
}

/// Whether a text was written by [`Results::write`] or [`Results::write_lm_eval`].
pub fn is_results(text: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Json>(text) else { return false };
    let ours = value["march_eval_results"].is_u64() || value["model_source"] == "march";
    ours && disk::unseal(text) == disk::Seal::Sealed
}

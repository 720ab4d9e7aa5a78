//! `march eval` on the suites: the paper's tasks, a table as in the paper, results that grow and resume.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::bail;
use clap::{Args, ValueEnum};
use march_lab::eval::suite::{Documents, GROUPS, Suite, suites, unknown_task};
use march_lab::eval::{
    Job, Journal, Outcome, Results, Scheduler, Sources, TaskResult, documents, evaluate, is_results,
};
use march_lab::report::Heat;

use super::open::{ModelArgs, OpenedModel};
use crate::display::out::{note, say};
use crate::display::{Progress, thousands};
use crate::interrupt;
use crate::output::{Kind, Output};

/// Where the suites' data come from, and in which form results are written.
#[derive(Args)]
pub struct SuiteArgs {
    /// The folder that holds the data sets, each as Hugging Face ships it (ORG/NAME/…, jsonl, json or parquet)
    #[arg(long, value_name = "DIR")]
    data_root: Option<PathBuf>,
    /// The text of the task `perplexity`
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The text between the needles of niah_* tasks [default: a built-in public-domain book]
    #[arg(long, value_name = "FILE")]
    haystack: Option<PathBuf>,
    /// Skip documents that are invalid or do not fit, and count them, instead of stopping at the first
    #[arg(long)]
    skip_bad: bool,
    /// The schema of --output: `march`, or `lm-eval` for that of lm-evaluation-harness
    #[arg(long, value_name = "SCHEMA", default_value = "march")]
    format: Format,
    /// Draw the accuracy of niah_* tasks by depth and length
    #[arg(long, value_name = "FILE.svg")]
    heat_map: Option<PathBuf>,
}

/// The schema of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Ours: every document's values, for `march eval compare`.
    March,
    /// That of lm-evaluation-harness.
    LmEval,
}

/// The suite tasks and the recall tasks of a list of tasks and groups.
pub fn split(names: &[String]) -> anyhow::Result<(Vec<&'static Suite>, Vec<String>)> {
    let (mut chosen, mut recall): (Vec<&'static Suite>, Vec<String>) = Default::default();
    for name in names {
        let before = chosen.len();
        let whole = name == "paper";
        let in_paper = |suite: &&Suite| suite.paper.is_some();
        let own = |suite: &&Suite| suite.name == name || suite.group == name;
        for suite in suites().filter(|suite| if whole { in_paper(suite) } else { own(suite) }) {
            if !chosen.iter().any(|other| other.name == suite.name) {
                chosen.push(suite);
            }
        }
        if chosen.len() == before && !suites().any(|suite| own(&suite)) {
            match name.as_str() {
                "recall" => {
                    recall.extend(march_lm::data::recall::TASKS.iter().map(|task| task.name.to_string()))
                }
                _ => {
                    let kind = name.split(':').next().unwrap_or_default();
                    if !march_lm::data::recall::TASKS.iter().any(|task| task.name == kind) {
                        return Err(unknown_task(kind).into());
                    }
                    recall.push(name.clone());
                }
            }
        }
    }
    Ok((chosen, recall))
}

impl SuiteArgs {
    /// Rejects these flags for recall tasks.
    pub fn refuse(&self) -> anyhow::Result<()> {
        let Self { data_root, text, haystack, skip_bad, format, heat_map } = self;
        let given = [
            ("--data-root", data_root.is_some()),
            ("--text", text.is_some()),
            ("--haystack", haystack.is_some()),
            ("--skip-bad", *skip_bad),
            ("--format", *format != Format::March),
            ("--heat-map", heat_map.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((flag, _)) => bail!("{flag} is not for recall tasks"),
            None => Ok(()),
        }
    }

    /// Evaluates tasks.
    pub fn run(
        &self,
        model: &ModelArgs,
        tasks: &[&'static Suite],
        lengths: &[usize],
        limit: Option<u64>,
        keep_samples: bool,
        output: Option<&Path>,
    ) -> anyhow::Result<()> {
        if keep_samples && output.is_none() {
            bail!(
                "--samples writes a record of each document to --output; name a file with --output FILE.json"
            );
        }
        if keep_samples && self.format == Format::LmEval {
            bail!("--format lm-eval has no place for the records of --samples; use one of the two");
        }
        let needles = |suite: &&Suite| matches!(suite.documents, Documents::Needles(_));
        if !lengths.is_empty() && !tasks.iter().any(needles) {
            bail!(
                "--lengths is for niah_* and recall tasks; {} has documents of its own lengths",
                tasks[0].name
            );
        }
        if self.heat_map.is_some() && !tasks.iter().any(needles) {
            bail!("--heat-map is for niah_* tasks");
        }
        let mut inputs = model.inputs();
        inputs.extend(
            [&self.data_root, &self.text, &self.haystack].into_iter().flatten().map(PathBuf::as_path),
        );
        let output = Output::check_some(output, Kind::Results, &inputs)?;
        let heat_map = Output::check_some(self.heat_map.as_deref(), Kind::Picture, &inputs)?;
        let opened = model.open()?;
        let sources = Sources {
            data_root: self.data_root.clone(),
            text: self.text.clone(),
            haystack: self.haystack.clone(),
            limit: limit.map(|limit| limit as usize),
            skip_bad: self.skip_bad,
        };
        let default = [4096];
        let lengths = if lengths.is_empty() { &default[..] } else { lengths };
        let mut jobs = Vec::new();
        for &suite in tasks {
            let own: Vec<Option<usize>> = match needles(&suite) {
                true => lengths.iter().copied().map(Some).collect(),
                false => vec![None],
            };
            for length in own {
                jobs.push(documents(suite, length, &sources, opened.tokenizer())?);
            }
        }
        self.answer(model, &opened, jobs, &sources, keep_samples, output.as_ref(), heat_map.as_ref())
    }

    fn answer(
        &self,
        args: &ModelArgs,
        opened: &OpenedModel,
        jobs: Vec<Job>,
        sources: &Sources,
        keep_samples: bool,
        output: Option<&Output>,
        heat_map: Option<&Output>,
    ) -> anyhow::Result<()> {
        let (model, tokenizer, policy) = (opened.model(), opened.tokenizer(), opened.policy());
        let model_type = model.config().mixer.model_type();
        let mut results = Results::new(
            args.model.display().to_string(),
            model_type,
            model.parameter_count(),
            opened.weights().to_string(),
            policy.clone(),
            tokenizer.name(),
        );
        say!("{}: {model_type}, {} parameters", results.model, thousands(results.parameters));
        let mut journal = match output {
            Some(output) => {
                let asked_of = format!(
                    "model {}, tokenizer {}, policy {policy:?}",
                    &opened.fingerprint()?,
                    &tokenizer.hash()[..16]
                );
                Some(Journal::open(&Journal::path_of(output.path()), &asked_of)?)
            }
            None => None,
        };
        if let Some(journal) = journal.as_ref().filter(|journal| !journal.is_empty()) {
            note!("resuming: {} documents were answered before", thousands(journal.len()));
        }
        interrupt::listen("stopping after these documents")?;
        let scheduler = Scheduler::new(opened.inference().clone(), tokenizer, policy);
        let (started, date) = (Instant::now(), SystemTime::now());
        let width = jobs.iter().map(|job| job.label().len()).max().unwrap_or(0).max(18);
        say!("\n{:<width$} {:>9}  metrics (± standard error)", "task", "documents");
        for job in jobs {
            let label = job.label();
            let mut progress: Option<Progress> = None;
            let outcome =
                evaluate(&scheduler, job, sources, journal.as_mut(), keep_samples, &mut |done, total| {
                    progress.get_or_insert_with(|| Progress::new("read", "tokens", total)).at(done);
                    if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                })?;
            progress.map(Progress::finish);
            let Outcome::Done(result) = outcome else {
                match output {
                    Some(_) => note!("{label}: stopped; run the same command again to resume"),
                    None => note!("{label}: stopped; with --output FILE.json, the same command would resume"),
                }
                interrupt::leave();
            };
            show(&result, width);
            results.tasks.push(*result);
        }
        tables(&results);
        if let Some(heat_map) = heat_map {
            heat_map.write(heat(&results).as_bytes())?;
            say!("\n{}", heat_map.path().display());
        }
        results.seconds = started.elapsed().as_secs_f64();
        if let Some(output) = output {
            match self.format {
                Format::March => results.write(output.path())?,
                Format::LmEval => {
                    let date = date.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                    results.write_lm_eval(output.path(), date)?;
                }
            }
            if let Some(journal) = journal {
                journal.remove()?;
            }
            say!("\n{}", output.path().display());
        }
        Ok(())
    }
}

/// One line per task.
fn show(result: &TaskResult, width: usize) {
    let metric = |metric: &march_lab::eval::MetricResult| {
        let error = metric.standard_error.map_or(String::new(), |error| format!(" ± {error:.4}"));
        format!("{} {:.4}{error}", metric.metric, metric.value)
    };
    let metrics: Vec<String> = result.metrics.iter().map(metric).collect();
    let skipped = match result.skipped {
        0 => String::new(),
        count => format!("  ({} skipped)", thousands(count)),
    };
    let label = result.label();
    say!("{label:<width$} {:>9}  {}{skipped}", thousands(result.documents), metrics.join("   "));
}

/// The paper's tables: a column per task, in percent, and the average over the tasks that were run.
fn tables(results: &Results) {
    for (group, _) in GROUPS.iter().filter(|(group, _)| *group != "paper") {
        let of_group: Vec<&TaskResult> = results
            .tasks
            .iter()
            .filter(|task| task.suite().is_some_and(|suite| suite.group == *group && suite.paper.is_some()))
            .collect();
        if of_group.is_empty() {
            continue;
        }
        let mut lengths: Vec<Option<usize>> = of_group.iter().map(|task| task.length).collect();
        lengths.dedup();
        lengths.sort_unstable();
        lengths.dedup();
        for length in lengths {
            let columns: Vec<(&str, f64)> = of_group
                .iter()
                .filter(|task| task.length == length)
                .filter_map(|task| Some((task.suite()?.paper?, 100.0 * task.metrics.first()?.value)))
                .collect();
            let average = columns.iter().map(|(_, value)| value).sum::<f64>() / columns.len() as f64;
            let at = length.map_or(String::new(), |length| format!(", {} tokens", thousands(length)));
            say!("\n{group}{at}, in percent");
            let cells = columns.iter().copied().chain([("Avg.", average)]);
            let (heads, values): (String, String) = cells
                .map(|(name, value)| {
                    let width = name.chars().count().max(5);
                    (format!("  {name:>width$}"), format!("  {value:>width$.1}"))
                })
                .unzip();
            say!("{heads}\n{values}");
        }
    }
}

/// Accuracy by depth and length, over all needle tasks.
fn heat(results: &Results) -> String {
    const ROWS: usize = 10;
    let mut lengths: Vec<usize> = results.tasks.iter().filter_map(|task| task.length).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let mut sums = vec![(0.0, 0usize); ROWS * lengths.len()];
    for task in &results.tasks {
        let Some(column) = task.length.and_then(|length| lengths.iter().position(|&other| other == length))
        else {
            continue;
        };
        let values = task.metrics.first().map(|metric| metric.values.as_slice()).unwrap_or_default();
        for (depth, value) in task.depths.iter().zip(values) {
            let row = ((depth / 100.0 * ROWS as f64) as usize).min(ROWS - 1);
            let cell = &mut sums[row * lengths.len() + column];
            *cell = (cell.0 + value.value, cell.1 + 1);
        }
    }
    let cells: Vec<Option<f64>> =
        sums.iter().map(|&(sum, count)| (count > 0).then(|| sum / count as f64)).collect();
    let depths: Vec<String> = (0..ROWS).map(|row| format!("{} %", row * 100 / ROWS)).collect();
    let title = format!("Needles found by {}", results.model);
    Heat { title: &title, lengths: &lengths, depths: &depths, cells: &cells }.svg()
}

/// Whether a file has results of the suites.
pub fn is_suite_file(path: &Path) -> bool {
    std::fs::read_to_string(path).is_ok_and(|text| is_results(&text))
}

/// Prints the paired differences of two files.
pub fn compare(a: &Path, b: &Path) -> anyhow::Result<()> {
    let (one, two) = (Results::read(a)?, Results::read(b)?);
    for (name, results) in [("A", &one), ("B", &two)] {
        say!("{name}: {}, {}, weights {}", results.model, results.model_type, results.weights);
    }
    let compared = one.compare(&two)?;
    let width = compared.iter().map(|(task, ..)| task.label().len()).max().unwrap_or(0).max(4);
    say!(
        "\n{:<width$} {:>9} {:>20} {:>10} {:>10} {:>10} {:>22}",
        "task",
        "documents",
        "metric",
        "A",
        "B",
        "B - A",
        "95 % interval"
    );
    for (task, documents, [before, after], difference) in compared {
        let [low, high] = difference.interval;
        say!(
            "{:<width$} {:>9} {:>20} {before:>10.4} {after:>10.4} {:>+10.4} {:>22}",
            task.label(),
            thousands(documents),
            task.metrics[0].metric,
            difference.value,
            format!("{low:+.4} to {high:+.4}")
        );
    }
    Ok(())
}

/// Prints the tasks of the suites.
pub fn list_suites() {
    say!("Groups:");
    for (name, about) in GROUPS {
        say!("  {name:<18} {about}");
    }
    say!("  {:<18} the synthetic recall tasks below", "recall");
    let mut group = "";
    for suite in suites() {
        if suite.group != group {
            group = suite.group;
            say!("\n{group}");
        }
        let metrics: Vec<&str> = suite.metrics.iter().map(|metric| metric.name()).collect();
        let source = match &suite.documents {
            Documents::Files { set, .. } => format!("{}, split {}", set.hub, set.split),
            Documents::Needles(_) => "generated".into(),
            Documents::Text => "--text FILE".into(),
        };
        let paper = suite.paper.map_or(String::new(), |column| format!(" [{column}]"));
        say!("  {:<24} {}{paper}", suite.name, suite.about);
        say!("  {:<24} {}; data: {source}", "", metrics.join(", "));
    }
}

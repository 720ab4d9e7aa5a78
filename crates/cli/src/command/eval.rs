//! `march eval`: what a model knows and recalls, under any memory policy.

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::bail;
use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};
use march_lab::eval::{Reader, RecallOptions, Report, TaskReport, compare, evaluate_recall};
use march_lm::data::recall::{QUESTION_SEED, TASKS, Task};

use super::eval_policies::EvalPolicies;
use super::eval_requests::EvalRequests;
use super::eval_suites::{SuiteArgs, is_suite_file, list_suites};
use super::open::ModelArgs;
use crate::display::out::say;
use crate::display::{Progress, bytes, thousands};
use crate::output::{Kind, Output};
use crate::{interrupt, number};

/// Evaluate a model on the paper's suites and on recall tasks, or compare two results.
#[derive(Args)]
#[command(
    args_conflicts_with_subcommands = true,
    arg_required_else_help = true,
    after_help = "Examples:
  march eval --model runs/demo/march --tasks mqar:pairs=16
  march eval --model DIR --tasks commonsense --data-root data --output results.json
  march eval --model DIR --tasks niah --lengths 4096,8192 --limit 50 --heat-map needles.svg
  march eval --model DIR --tasks perplexity --text book.txt
  march eval compare a.json b.json
  march eval tasks

`march eval tasks` lists the tasks, the groups, and where their data come from; nothing is downloaded. A recall task is
given as its name and the sizes that differ from its defaults, separated by colons. With --output, every answered
document is recorded at once: after an interruption the same command resumes."
)]
pub struct Eval {
    #[command(subcommand)]
    command: Option<EvalCommand>,
    #[command(flatten)]
    args: OptionalEvalArgs,
}

#[derive(Subcommand)]
enum EvalCommand {
    Compare(Compare),
    Policies(Box<EvalPolicies>),
    Requests(Box<EvalRequests>),
    /// List the tasks, their metrics, and where their data come from
    Tasks,
}

/// The evaluation arguments, if no subcommand is given.
struct OptionalEvalArgs(Option<EvalArgs>);

impl Args for OptionalEvalArgs {
    fn augment_args(command: Command) -> Command {
        EvalArgs::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        EvalArgs::augment_args_for_update(command)
    }
}

impl FromArgMatches for OptionalEvalArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(matches.contains_id("tasks").then(|| EvalArgs::from_arg_matches(matches)).transpose()?))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[derive(Args)]
struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tasks: TaskArgs,
    /// Use only the first N documents of each task; for recall tasks, N sequences [default: all documents, 500 samples
    /// of a needle task, 256 sequences of a recall task]
    #[arg(long, value_name = "N", value_parser = number::count::<u64>)]
    limit: Option<u64>,
    /// Also write a record of each document to --output: requests, answers, target, scores. With a number, the same as
    /// --limit N
    #[arg(long, value_name = "N", num_args = 0..=1, value_parser = number::count::<u64>)]
    samples: Option<Option<u64>>,
    /// Recall tasks: read one token at a time, as generation does, instead of whole sequences
    #[arg(long)]
    decode: bool,
    /// Write all results to this file. While the command runs, answers are recorded in FILE.json.journal
    #[arg(long, value_name = "FILE.json")]
    output: Option<PathBuf>,
    #[command(flatten)]
    suites: SuiteArgs,
}

/// The tasks and their lengths.
#[derive(Args)]
pub struct TaskArgs {
    /// The tasks or groups of tasks, separated by commas, such as piqa,longbench or mqar:pairs=16,needle
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true)]
    pub tasks: Vec<String>,
    /// Lengths in tokens, separated by commas [default: 4096 for niah_* tasks; for recall tasks, the shortest possible]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = number::length)]
    pub lengths: Vec<usize>,
}

/// What to ask: every task at every length.
#[derive(Args)]
pub struct Questions {
    #[command(flatten)]
    tasks: TaskArgs,
    /// Number of sequences for each task and length
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = number::count::<u64>)]
    pub samples: u64,
}

impl Questions {
    /// The tasks, each at every length.
    pub fn open(&self) -> anyhow::Result<Vec<Task>> {
        recall_tasks(&self.tasks.tasks, &self.tasks.lengths)
    }
}

/// Recall tasks, each at every length.
fn recall_tasks(tasks: &[String], lengths: &[usize]) -> anyhow::Result<Vec<Task>> {
    let lengths: Vec<Option<usize>> = match lengths {
        [] => vec![None],
        lengths => lengths.iter().copied().map(Some).collect(),
    };
    let all = tasks.iter().flat_map(|task| lengths.iter().map(move |length| (task, *length)));
    all.map(|(task, length)| Ok(Task::open(task, length)?)).collect()
}

/// The paired difference of two results, with its 95 % confidence interval.
#[derive(Args)]
#[command(after_help = "\
Both files come from `march eval --output`. The comparison is paired: B - A on the same documents. For the suites the
interval is a bootstrap over documents (10,000 resamples, fixed seed); for recall tasks it uses Student's t distribution
over sequences.")]
struct Compare {
    /// The first results
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// The second results
    #[arg(value_name = "B.json")]
    b: PathBuf,
}

impl Eval {
    /// Evaluates, compares or lists.
    pub fn run(self) -> anyhow::Result<()> {
        match (self.command, self.args.0) {
            (Some(EvalCommand::Compare(files)), _) => files.run(),
            (Some(EvalCommand::Policies(policies)), _) => policies.run(),
            (Some(EvalCommand::Requests(requests)), _) => requests.run(),
            (Some(EvalCommand::Tasks), _) => list(),
            (None, Some(args)) => args.run(),
            (None, None) => bail!(
                "give tasks, and a model unless it is the newest run: march eval --model DIR --tasks mqar"
            ),
        }
    }
}

impl EvalArgs {
    fn run(mut self) -> anyhow::Result<()> {
        self.model.choose()?;
        let limit = match (self.limit, self.samples) {
            (Some(_), Some(Some(_))) => bail!("--limit and --samples both give a number; use --limit N"),
            (limit, samples) => limit.or(samples.flatten()),
        };
        let (suites, recall) = super::eval_suites::split(&self.tasks.tasks)?;
        if suites.is_empty() {
            self.suites.refuse()?;
            return self.recall(&recall, limit.unwrap_or(256));
        }
        if !recall.is_empty() {
            bail!(
                "{} is a recall task and {} is not; evaluate recall tasks in a command of their own",
                recall[0],
                suites[0].name
            );
        }
        if self.decode {
            bail!("--decode is for recall tasks");
        }
        let keep = self.samples == Some(None);
        self.suites.run(&self.model, &suites, &self.tasks.lengths, limit, keep, self.output.as_deref())
    }

    /// Evaluates recall tasks.
    fn recall(&self, tasks: &[String], samples: u64) -> anyhow::Result<()> {
        if self.samples == Some(None) {
            bail!(
                "--samples without a number is for the suites; the results of recall tasks always have every answer"
            );
        }
        let tasks = recall_tasks(tasks, &self.tasks.lengths)?;
        let output = Output::check_some(self.output.as_deref(), Kind::Results, &self.model.inputs())?;
        let opened = self.model.open()?;
        let (model, policy) = (opened.model(), opened.policy());
        let model_type = model.config().mixer.model_type();
        let name = self.model.model.display().to_string();
        let weights = opened.weights().to_string();
        let parameters = model.parameter_count();
        let mut report = Report::new(name, model_type, parameters, weights, policy.clone(), self.decode);
        say!("{}: {model_type}, {} parameters", report.model, thousands(parameters));
        say!("{}\n", about(&report));
        let reader = Reader {
            model,
            parameters: opened.inference().parameters(),
            tokenizer: opened.tokenizer(),
            policy,
        };
        interrupt::listen("stopping after these sequences")?;
        let width = tasks.iter().map(|task| task.text().len()).max().unwrap_or(0).max(24);
        heading(width);
        for task in &tasks {
            let mut progress = Progress::new("evaluated", "sequences", samples as usize);
            let options = RecallOptions { samples, decode: self.decode, seed: QUESTION_SEED };
            let answers = evaluate_recall(&reader, task, options, &mut |done| {
                progress.at(done as usize);
                if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            progress.finish();
            let result = TaskReport::new(task, &answers);
            show(&result, width);
            report.results.push(result);
            if interrupt::asked() {
                break;
            }
        }
        if let Some(output) = &output {
            report.write(output.path())?;
            say!("\n{}", output.path().display());
        }
        if interrupt::asked() {
            interrupt::leave();
        }
        Ok(())
    }
}

/// A one-line description of how the model is run.
fn about(report: &Report) -> String {
    let read = if report.read == "decode" { "one token at a time" } else { "whole sequences" };
    let policy = &report.policy;
    let memory = policy.interval.map(|interval| {
        let routing = policy.top_k.map_or("dense".into(), |k| format!("top-{k}"));
        format!(
            "; interval {interval}, {routing} routing, retention {}, placement {}, storage {}",
            policy.retention, policy.placement, policy.storage
        )
    });
    format!("{read}, weights {}{}", report.weights, memory.unwrap_or_default())
}

fn heading(width: usize) {
    say!(
        "{:<width$} {:>7} {:>8} {:>16} {:>8} {:>10} {:>10}",
        "task",
        "length",
        "samples",
        "accuracy",
        "chance",
        "memory",
        "tokens/s"
    );
}

fn show(result: &TaskReport, width: usize) {
    say!(
        "{:<width$} {:>7} {:>8} {:>16} {:>8} {:>10} {:>10}",
        result.task,
        thousands(result.length),
        thousands(result.samples),
        percent(result.accuracy, result.standard_error),
        format!("{:.1} %", 100.0 * result.chance),
        bytes(result.memory_bytes),
        thousands(result.tokens_per_second as usize)
    );
    for age in &result.by_age {
        let label = format!("  age {} to {}", thousands(age.from), thousands(age.to - 1));
        let accuracy = percent(age.accuracy, age.standard_error);
        say!("{label:<width$} {:>7} {:>8} {accuracy:>16}", "", "");
    }
}

/// A percentage and its standard error, which a single sequence does not have.
pub fn percent(share: f64, error: Option<f64>) -> String {
    let error = error.map_or("–".into(), |error| format!("{:.1}", 100.0 * error));
    format!("{:.1} ± {error} %", 100.0 * share)
}

impl Compare {
    fn run(self) -> anyhow::Result<()> {
        if is_suite_file(&self.a) || is_suite_file(&self.b) {
            return super::eval_suites::compare(&self.a, &self.b);
        }
        let (a, b) = (Report::read(&self.a)?, Report::read(&self.b)?);
        for (name, report) in [("A", &a), ("B", &b)] {
            say!("{name}: {}, {}; {}", report.model, report.model_type, about(report));
        }
        let compared = compare(&a, &b)?;
        let width = compared.iter().map(|one| one.task.len()).max().unwrap_or(0);
        say!(
            "\n{:<width$} {:>7} {:>8} {:>8} {:>8} {:>10} {:>20}",
            "task",
            "length",
            "samples",
            "A",
            "B",
            "B - A",
            "95 % interval"
        );
        for one in compared {
            let [low, high] = one.interval;
            say!(
                "{:<width$} {:>7} {:>8} {:>7.1}% {:>7.1}% {:>+9.1}% {:>20}",
                one.task,
                thousands(one.length),
                thousands(one.samples),
                100.0 * one.accuracy[0],
                100.0 * one.accuracy[1],
                100.0 * one.difference,
                format!("{:+.1} to {:+.1} %", 100.0 * low, 100.0 * high)
            );
        }
        Ok(())
    }
}

fn list() -> anyhow::Result<()> {
    list_suites();
    say!("\nRecall tasks, group `recall` (a name and the sizes that differ, such as mqar:pairs=16):");
    for kind in TASKS {
        say!("{:<12} {}", kind.name, kind.about);
        for size in kind.sizes {
            let default = if size.default == usize::MAX { "any".into() } else { size.default.to_string() };
            say!("  {:<12} {} [{default}]", size.name, size.about);
        }
    }
    Ok(())
}

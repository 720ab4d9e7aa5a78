//! `march eval policies`: how much the same models recall under several memory policies, and in how many bytes.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use march::anchors::{Policy, Retention, Storage};
use march::data::recall::Task;
use march::eval::{Asking, Reader, ask};
use march::report::recall::{Point, recall_by_bytes};

use super::open::{ModelArgs, Opened};
use crate::display::out::say;
use crate::display::{Progress, bytes, thousands};
use crate::output::{Kind, Output};
use crate::{interrupt, number};

/// Recall by memory policy: the same models and questions, a row for each policy.
#[derive(Args)]
#[command(after_help = "Example:
  march eval policies --model runs/a/march --also runs/b/march,runs/c/march --tasks mqar:pairs=24 --plot recall.svg

With several models, such as one configuration trained with several seeds, a row has the mean of their accuracies and
its standard error between the models.")]
pub struct EvalPolicies {
    #[command(flatten)]
    model: ModelArgs,
    /// Other checkpoints or runs of the same configuration, separated by commas
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    also: Vec<PathBuf>,
    /// The task
    #[arg(long, value_name = "TASK")]
    tasks: String,
    /// The length of sequences [default: the shortest that the task can have]
    #[arg(long, value_name = "N", value_parser = number::length)]
    lengths: Option<usize>,
    /// Sequences
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = number::count::<u64>)]
    samples: u64,
    /// What differs from the checkpoint's own policy, of interval=N, top-k=K|dense, retention=RULE, placement=RULE and
    /// storage=TYPE; as often as wanted [default: a list that varies each setting]
    #[arg(long, value_name = "SETTINGS")]
    policy: Vec<String>,
    /// Write a plot of recall against bytes to this file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

impl EvalPolicies {
    /// Prints a row for each policy, in Markdown.
    pub fn run(self) -> anyhow::Result<()> {
        let task = Task::open(&self.tasks, self.lengths)?;
        let inputs: Vec<&Path> =
            self.model.inputs().into_iter().chain(self.also.iter().map(PathBuf::as_path)).collect();
        let plot = Output::check_some(self.plot.as_deref(), Kind::Picture, &inputs)?;
        let mut models = vec![self.model.open()?];
        for folder in &self.also {
            models.push(self.model.of(folder).open()?);
        }
        let own = models[0].policy.clone();
        let Some(interval) = own.interval else {
            let kind = models[0].model.config().mixer.model_type();
            bail!("{}: a model of type `{kind}` has no anchors", self.model.model.display());
        };
        let anchor = models[0].model.anchor_bytes(&own);
        let policies = if self.policy.is_empty() {
            built_in(&own, interval, task.length(), anchor)
        } else {
            self.policy.iter().map(|settings| own.with(settings)).collect::<Result<_, _>>()?
        };
        for model in &models {
            policies.iter().try_for_each(|policy| model.model.check_policy(policy))?;
        }
        say!(
            "{}, {} tokens, {} sequences, {} models\n",
            task.text(),
            task.length(),
            self.samples,
            models.len()
        );
        say!("| policy | memory | right answers |\n|---|--:|--:|");
        interrupt::listen("stopping")?;
        let mut points = Vec::new();
        let mut progress =
            Progress::new("asked", "sequences", policies.len() * models.len() * self.samples as usize);
        let mut before = 0;
        for policy in &policies {
            let (mut shares, mut memory) = (Vec::new(), 0);
            for model in &models {
                let (share, bytes) =
                    self.ask(model, policy, &task, &mut |done| progress.at(before + done as usize))?;
                before += self.samples as usize;
                shares.push(share);
                memory += bytes / models.len();
            }
            progress.clear();
            let (mean, error) = mean(&shares);
            let right = match shares.len() {
                1 => format!("{:.1} %", 100.0 * mean),
                _ => format!("{:.1} ± {:.1} %", 100.0 * mean, 100.0 * error),
            };
            say!("| `{policy}` | {} | {right} |", bytes(memory));
            points.push(Point { varied: varied(policy, &own).into(), bytes: memory, accuracy: mean });
        }
        if let Some(plot) = &plot {
            let title = "Recall by memory policy";
            let line = format!("{}, {} tokens; chosen after training", task.name(), thousands(task.length()));
            points.retain(|point| !point.varied.is_empty());
            let svg = recall_by_bytes(title, &line, &points);
            plot.write(svg.as_bytes())?;
            say!("\n{}", plot.path().display());
        }
        Ok(())
    }

    /// One model's share of right answers and its bytes.
    fn ask(
        &self,
        opened: &Opened,
        policy: &Policy,
        task: &Task,
        tell: &mut dyn FnMut(u64),
    ) -> anyhow::Result<(f64, usize)> {
        let reader = Reader {
            engine: &opened.engine,
            model: &opened.model,
            parameters: &opened.parameters,
            tokenizer: &opened.tokenizer,
            policy,
        };
        let asking = Asking { samples: self.samples, decode: false };
        let answers = ask(&reader, task, asking, &mut |done| {
            tell(done);
            if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        if interrupt::asked() {
            interrupt::leave();
        }
        Ok((answers.accuracy().value(), answers.memory_bytes))
    }
}

/// The mean and its standard error.
fn mean(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, if n > 1.0 { (squares / (n - 1.0) / n).sqrt() } else { 0.0 })
}

/// Each setting alone, from little memory to much; adaptive placement beside periodic at the same intervals.
fn built_in(own: &Policy, interval: usize, length: usize, anchor: usize) -> Vec<Policy> {
    let mut settings = vec![String::new()];
    let intervals: Vec<usize> =
        [4, 3, 2].iter().map(|k| k * interval).chain([interval / 2, interval / 4]).collect();
    let fits = |interval: &&usize| **interval > 1 && **interval < length;
    settings.extend(intervals.iter().filter(fits).map(|interval| format!("interval={interval}")));
    for interval in intervals.iter().chain([&interval]).filter(fits) {
        settings.push(format!("interval={interval} placement=adaptive:{}", (interval / 4).max(1)));
    }
    settings.extend([1, 2, 3, 4].map(|n| format!("retention=recent:{n}")));
    settings.extend([1, 2, 3, 4].map(|n| format!("retention=budget:{}", n * anchor)));
    settings.push("retention=fenwick".into());
    settings.extend(["storage=bf16", "storage=int8", "top-k=1", "top-k=2"].map(String::from));
    let mut policies: Vec<Policy> = Vec::new();
    for policy in settings.iter().filter_map(|settings| own.with(settings).ok()) {
        if !policies.contains(&policy) && policy.check().is_ok() {
            policies.push(policy);
        }
    }
    policies
}

/// The line of the plot that a policy belongs to; none for those that are no matter of bytes.
fn varied(policy: &Policy, own: &Policy) -> &'static str {
    let Policy { retention, placement, storage, top_k, .. } = policy;
    match retention {
        _ if top_k != &own.top_k || *retention == Retention::Fenwick => "",
        _ if *storage != Storage::F32 => "",
        Retention::Recent(_) => "the newest N",
        Retention::Budget(_) => "budget",
        _ if *placement != own.placement => "interval, adaptive",
        _ => "interval, periodic",
    }
}

//! `march eval policies`: how much the same models recall under several memory policies, and in how many bytes.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use march_lab::eval::{Reader, RecallOptions, evaluate_recall};
use march_lab::report::recall::{Point, recall_by_bytes};
use march_lm::anchors::{Placement, Policy, Retention};
use march_lm::data::recall::{QUESTION_SEED, Task};

use super::eval::Questions;
use super::open::{ModelArgs, OpenedModel};
use crate::display::out::say;
use crate::display::{Progress, bytes, thousands};
use crate::interrupt;
use crate::output::{Kind, Output};

/// Recall by memory policy: the same models and questions, one table per task and length, one row per policy.
#[derive(Args)]
#[command(after_help = "Example:
  march eval policies --model runs/a/march --also runs/b/march,runs/c/march --tasks mqar:pairs=24 --plot recall.svg

With several models, such as one configuration trained with several seeds, a row has the mean of their accuracies and
its standard error between the models. Tasks and lengths are given as for `march eval`.")]
pub struct EvalPolicies {
    #[command(flatten)]
    model: ModelArgs,
    /// Other checkpoints or runs of the same configuration, separated by commas
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    also: Vec<PathBuf>,
    #[command(flatten)]
    questions: Questions,
    /// Changes to the checkpoint's own policy: any of interval=N, top-k=K|dense, retention=RULE, placement=RULE and
    /// storage=TYPE; may be repeated [default: a list that varies each setting]
    #[arg(long, value_name = "SETTINGS")]
    policy: Vec<String>,
    /// Write a plot of recall by memory size to this file; for a single task and length
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

impl EvalPolicies {
    /// Prints the tables, in Markdown.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.model.choose()?;
        let tasks = self.questions.open()?;
        if self.plot.is_some() && tasks.len() > 1 {
            bail!("--plot shows one task at one length, but {} were given; give one of each", tasks.len());
        }
        let inputs: Vec<&Path> =
            self.model.inputs().into_iter().chain(self.also.iter().map(PathBuf::as_path)).collect();
        let plot = Output::check_some(self.plot.as_deref(), Kind::Picture, &inputs)?;
        let mut models = vec![self.model.open()?];
        for folder in &self.also {
            models.push(self.model.of(folder).open_on(models[0].device().clone())?);
        }
        let own = models[0].policy().clone();
        let Some(interval) = own.interval else {
            let kind = models[0].model().config().mixer.model_type();
            bail!("{}: a model of type `{kind}` has no anchors", self.model.model.display());
        };
        let anchor = models[0].model().anchor_bytes(&own);
        interrupt::listen("stopping")?;
        for (i, task) in tasks.iter().enumerate() {
            let policies = if self.policy.is_empty() {
                built_in(&own, interval, task.length(), anchor)
            } else {
                self.policy.iter().map(|settings| own.with(settings)).collect::<Result<_, _>>()?
            };
            for model in &models {
                policies.iter().try_for_each(|policy| model.model().check_policy(policy))?;
            }
            if i > 0 {
                say!();
            }
            let points = self.table(&models, &policies, task)?;
            if let Some(plot) = &plot {
                let title = "Recall by memory policy";
                let line =
                    format!("{}, {} tokens; chosen after training", task.name(), thousands(task.length()));
                let points: Vec<Point> = policies
                    .iter()
                    .zip(points)
                    .map(|(policy, (bytes, accuracy))| Point {
                        varied: varied(policy, &own).into(),
                        bytes,
                        accuracy,
                    })
                    .filter(|point| !point.varied.is_empty())
                    .collect();
                plot.write(recall_by_bytes(title, &line, &points).as_bytes())?;
                say!("\n{}", plot.path().display());
            }
        }
        Ok(())
    }

    /// Prints the table of one task; returns the bytes and the mean accuracy of each policy.
    fn table(
        &self,
        models: &[OpenedModel],
        policies: &[Policy],
        task: &Task,
    ) -> anyhow::Result<Vec<(usize, f64)>> {
        let samples = self.questions.samples as usize;
        say!("{}, {} tokens, {samples} sequences, {} models\n", task.text(), task.length(), models.len());
        say!("| policy | memory | right answers |\n|---|--:|--:|");
        let mut points = Vec::new();
        let mut progress = Progress::new("evaluated", "sequences", policies.len() * models.len() * samples);
        let mut before = 0;
        for policy in policies {
            let (mut shares, mut memory) = (Vec::new(), 0);
            for model in models {
                let (share, bytes) =
                    self.recall(model, policy, task, &mut |done| progress.at(before + done as usize))?;
                before += samples;
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
            points.push((memory, mean));
        }
        Ok(points)
    }

    /// One model's fraction of correct answers and its bytes.
    fn recall(
        &self,
        opened: &OpenedModel,
        policy: &Policy,
        task: &Task,
        tell: &mut dyn FnMut(u64),
    ) -> anyhow::Result<(f64, usize)> {
        let reader = Reader {
            model: opened.model(),
            parameters: opened.inference().parameters(),
            tokenizer: opened.tokenizer(),
            policy,
        };
        let options = RecallOptions { samples: self.questions.samples, decode: false, seed: QUESTION_SEED };
        let answers = evaluate_recall(&reader, task, options, &mut |done| {
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

/// Each setting alone, from little to much memory; adaptive placement next to periodic at the same intervals.
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

/// The line of the plot that a policy belongs to; empty for policies that have no line.
fn varied(policy: &Policy, own: &Policy) -> &'static str {
    let Policy { retention, placement, storage, top_k, .. } = policy;
    if (storage, top_k) != (&own.storage, &own.top_k) {
        return "";
    }
    match (retention, placement) {
        (_, Placement::Periodic) if *retention == own.retention => "interval, periodic",
        (_, Placement::Adaptive(_)) if *retention == own.retention => "interval, adaptive",
        (Retention::Recent(_), _) => "the newest N",
        (Retention::Budget(_), _) => "budget",
        (Retention::All | Retention::Fenwick, _) => "",
    }
}

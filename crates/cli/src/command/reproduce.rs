//! `march reproduce`: an experiment of the paper at a size that this machine can carry.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use march_lab::corpus;
use march_lab::report::evidence::{Page, Table};
use march_lab::report::experiment;
use march_lab::report::release::release;
use march_lab::reproduce::{
    Corpus, EFFICIENCY, Experiment, Finished, Plan, Progress, Scale, Size, carry_out_all, names,
};
use march_lm::Config;
use march_lm::model::Model;

use super::reproduce_efficiency::{self, Shapes};
use crate::display::lines::duration;
use crate::display::out::{note, say};
use crate::display::{figure, thousands};
use crate::{interrupt, machine, number};

/// Repeat an experiment of the paper in small: train all models with several seeds, measure, and write a report.
#[derive(Args)]
#[command(after_help = "Examples:
  march reproduce                                the experiments, and the question of each
  march reproduce recall --size quick            a few steps of everything, in seconds
  march reproduce recall --plan                  what would run, and how long it would take
  march reproduce recall                         the whole experiment on this machine
  march reproduce recall --size paper            commands and cost of the paper's own experiment

Learning rates are chosen for each model on validation questions, with two seeds of their own; if the best is
the lowest or the highest of the list, further rates are tried, which takes longer than --plan says. Results
come from other questions and fresh seeds. Runs go side by side, one thread each, so that results do not depend on the
number of cores. Ctrl-C saves; the same command resumes. A run that exists in the output folder is not
repeated, also if another experiment trained it. OUTPUT/NAME has report.html, report.md and images/,
and of `text` release/, with trained models as they would be published; OUTPUT/runs has an ordinary run folder for each
model.")]
pub struct Reproduce {
    /// The experiment, or a file like those of configs/reproduce; without one, all are listed
    #[arg(value_name = "EXPERIMENT|FILE.toml")]
    experiment: Option<String>,
    /// `quick`: a few steps, to see that it works; `laptop`: up to an hour on two cores; `paper`: print the commands and
    /// the cost of the paper's own experiment, and start nothing; `paper-shapes`, for `efficiency`: the operations at
    /// the paper's width, which takes more than an hour
    #[arg(long, value_name = "SIZE", default_value = "laptop")]
    size: ExperimentSize,
    /// Seeds per result [default: 5, or those of the experiment; quick: 2]
    #[arg(long, value_name = "N", value_parser = number::seeds)]
    seeds: Option<u64>,
    /// The folder for runs and reports [default: runs/reproduce; quick: runs/reproduce-quick]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Runs side by side [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = number::count::<usize>)]
    workers: Option<usize>,
    /// The corpus for `text`, from `march data corpus` [default: data/corpus; quick: the built-in book]
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    /// Print the plan and start nothing
    #[arg(long)]
    plan: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ExperimentSize {
    Quick,
    Laptop,
    PaperShapes,
    Paper,
}

impl Reproduce {
    /// Plans, trains, measures and reports.
    pub fn run(self) -> anyhow::Result<()> {
        let Some(name) = self.experiment.clone() else { return list() };
        if self.size == ExperimentSize::Paper {
            return paper(&name);
        }
        let (size, shapes) = match self.size {
            ExperimentSize::Quick => (Size::Quick, Shapes::Quick),
            ExperimentSize::PaperShapes => (Size::Laptop, Shapes::Paper),
            _ => (Size::Laptop, Shapes::Laptop),
        };
        let output = self.output.clone().unwrap_or_else(|| match size {
            Size::Quick => "runs/reproduce-quick".into(),
            Size::Laptop => "runs/reproduce".into(),
        });
        if name == EFFICIENCY {
            return reproduce_efficiency::run(shapes, &output, self.plan);
        }
        if shapes == Shapes::Paper {
            bail!("--size paper-shapes is for `{EFFICIENCY}`; {name} has the sizes quick, laptop and paper");
        }
        let experiment = Experiment::open(&name)?;
        let mut scale = Scale::new(size);
        let usual = experiment.seeds.filter(|_| scale.is_full()).unwrap_or(scale.seeds);
        scale.seeds = self.seeds.unwrap_or(usual);
        if experiment.uses_corpus() {
            scale.corpus = Some(self.corpus(size, &output)?);
        } else if self.corpus.is_some() {
            bail!("--corpus is for `text`; {name} makes its own sequences");
        }
        let plan = Plan::new(experiment, scale)?;
        let workers = self.workers.unwrap_or_else(cores);
        introduce(&plan, workers)?;
        if self.plan {
            return Ok(());
        }
        self.carry_out(&plan, &output, workers)
    }

    /// The corpus, which must exist; a quick run makes one of the built-in book.
    fn corpus(&self, size: Size, output: &Path) -> anyhow::Result<Corpus> {
        let folder = match (&self.corpus, size) {
            (Some(folder), _) => folder.clone(),
            (None, Size::Laptop) => "data/corpus".into(),
            (None, Size::Quick) => {
                let folder = output.join("corpus");
                corpus::build_tiny(&folder)?;
                folder
            }
        };
        if !folder.exists() {
            bail!(
                "{}: there is no corpus; `march data corpus --output {0}` makes one in a minute",
                folder.display()
            );
        }
        Ok(Corpus::open(&folder)?)
    }

    fn carry_out(&self, plan: &Plan, output: &Path, workers: usize) -> anyhow::Result<()> {
        let stop = interrupt::listen("saving the runs")?;
        let folder = output.join(&plan.experiment.name);
        fs::create_dir_all(folder.join("images"))
            .with_context(|| format!("{}: could not create", folder.display()))?;
        let began = Instant::now();
        let mut shown = ExperimentProgress::default();
        let results = carry_out_all(plan, output, workers, stop, &mut |progress| shown.show(progress))?;
        let took = time_in_all(&folder, began.elapsed().as_secs_f64())?;
        let Some(results) = results else {
            note!("stopped; the same command resumes. The runs are in {}", output.join("runs").display());
            interrupt::leave();
        };
        let mut command = format!("march reproduce {}", plan.experiment.name);
        if self.size == ExperimentSize::Quick {
            command += " --size quick";
        }
        if let Some(seeds) = self.seeds {
            command += &format!(" --seeds {seeds}");
        }
        let page = experiment::page(&results, facts(&command, &took, workers));
        let printed = ["Results", "Seeds that succeed", "Differences"];
        let shown = page.sections.iter().filter(|section| printed.contains(&section.heading.as_str()));
        shown.clone().flat_map(|section| &section.tables).for_each(print_table);
        say!();
        shown.flat_map(|section| &section.list).for_each(|line| say!("{line}"));
        write(&page, &folder)?;
        for folder in release(&results, output, &command)? {
            say!("model   {}", folder.display());
        }
        Ok(())
    }
}

/// The time of an experiment over all invocations, as its file records it; that of runs that another experiment trained
/// is not in it.
fn time_in_all(folder: &Path, seconds: f64) -> anyhow::Result<String> {
    let file = folder.join("seconds.txt");
    let before = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse::<f64>().ok());
    let all = before.unwrap_or(0.0) + seconds;
    march_lm::disk::replace(&file, format!("{all:.0}\n").as_bytes())?;
    Ok(format!("{}, without runs that other experiments had trained", duration(all)))
}

/// The first table of a page.
pub fn facts(command: &str, took: &str, workers: usize) -> Vec<(String, String)> {
    let facts = [
        ("command", format!("`{command}`")),
        ("date", machine::today()),
        ("program", format!("march {}", env!("CARGO_PKG_VERSION"))),
        ("machine", machine::summary()),
        ("side by side", format!("{workers} runs, one thread each")),
        ("time", took.to_string()),
    ];
    facts.map(|(name, value)| (name.to_string(), value)).to_vec()
}

/// Writes the pages and figures, and prints where they are.
pub fn write(page: &Page, folder: &Path) -> anyhow::Result<()> {
    let images = folder.join("images");
    fs::create_dir_all(&images).with_context(|| format!("{}: could not create", images.display()))?;
    for (name, svg) in page.figures() {
        march_lm::disk::replace(&images.join(format!("{name}.svg")), svg.as_bytes())?;
    }
    march_lm::disk::replace(&folder.join("report.md"), page.markdown("images").as_bytes())?;
    march_lm::disk::replace(&folder.join("report.html"), page.html().as_bytes())?;
    say!(
        "\nreport  {}\n        {}",
        folder.join("report.html").display(),
        folder.join("report.md").display()
    );
    Ok(())
}

/// Prints a table in columns.
pub fn print_table(table: &Table) {
    let cells: Vec<Vec<&str>> = std::iter::once(table.columns.iter().map(String::as_str).collect())
        .chain(table.rows.iter().map(|row| row.iter().map(|cell| cell.text.as_str()).collect()))
        .collect();
    let count = cells.iter().map(Vec::len).max().unwrap_or(0);
    let width = |i: usize| {
        cells.iter().filter_map(|row| row.get(i)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    say!("\n{}", table.caption);
    for row in &cells {
        let columns = (0..count).map(|i| {
            let cell = row.get(i).copied().unwrap_or_default();
            let space = " ".repeat(width(i) - cell.chars().count());
            if i == 0 { format!("{cell}{space}") } else { format!("{space}{cell}") }
        });
        say!("  {}", columns.collect::<Vec<_>>().join("  "));
    }
}

/// Progress lines of an experiment.
#[derive(Default)]
struct ExperimentProgress {
    began: Option<Instant>,
    part: &'static str,
    runs: usize,
    done: usize,
    tokens: f64,
    /// Tokens of the runs that were trained now, and of those that existed.
    fresh: f64,
    old: f64,
    existed: usize,
}

impl ExperimentProgress {
    fn show(&mut self, progress: Progress) {
        match progress {
            Progress::Begun(part, runs, tokens) => {
                (self.part, self.runs, self.tokens) = (part, runs, tokens);
                (self.done, self.fresh, self.old, self.began) = (0, 0.0, 0.0, Some(Instant::now()));
                if runs > 0 {
                    say!("\n{part}: {runs} runs, {:.1} million tokens", tokens / 1e6);
                }
            }
            Progress::Finished(run) => self.finished(&run),
            Progress::Chosen(arm, course, rate) => say!("  rate {rate:<8} {arm}, {course}"),
        }
    }

    fn finished(&mut self, run: &Finished) {
        let Finished { job, outcome, fresh } = run;
        self.done += 1;
        if !fresh {
            self.existed += 1;
            self.old += job.own_tokens();
            return;
        }
        self.fresh += job.own_tokens();
        let seconds = self.began.map_or(0.0, |began| began.elapsed().as_secs_f64());
        let left = seconds * (self.tokens - self.fresh - self.old) / self.fresh.max(1.0);
        say!(
            "[{:>3}/{}] {}, {}, rate {}, seed {}: validation loss {:.3}, {:.1} % right; about {} left",
            self.done,
            self.runs,
            job.arm,
            job.course,
            job.rate,
            job.seed,
            outcome.validation_loss,
            100.0 * outcome.validation_accuracy,
            duration(left)
        );
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Lists the experiments.
fn list() -> anyhow::Result<()> {
    say!("march reproduce EXPERIMENT [--size quick|laptop|paper]\n");
    for name in names() {
        if name == EFFICIENCY {
            say!("{name:<12} {}", reproduce_efficiency::QUESTION);
        } else {
            say!("{name:<12} {}", Experiment::open(name)?.title);
        }
    }
    Ok(())
}

/// Prints the plan.
fn introduce(plan: &Plan, workers: usize) -> anyhow::Result<()> {
    let experiment = &plan.experiment;
    say!("{}\n\n{}\n", experiment.title, experiment.question);
    let sweep = plan.sweep(&plan.entries)?;
    let tokens = plan.tokens()?;
    say!("arms      {}", experiment.arms.join("; "));
    say!("courses   {}", experiment.courses.join("; "));
    say!(
        "runs      {} to choose learning rates, {} for the results ({} seeds at most); {:.1} million tokens in all",
        sweep.len(),
        plan.result_runs(),
        plan.scale.seeds,
        tokens / 1e6
    );
    say!("measured  on {:.1} million tokens in all", plan.measurements()?.0 / 1e6);
    if plan.is_full() {
        let seconds = plan.estimate()? / workers as f64;
        say!("time      about {} with {workers} runs side by side, if none exists", duration(seconds));
    }
    Ok(())
}

/// Prints the commands and the cost of the paper's own experiment.
fn paper(name: &str) -> anyhow::Result<()> {
    let full = match name {
        EFFICIENCY => reproduce_efficiency::full(),
        name => Experiment::open(name)?.full,
    };
    say!("The paper's own experiment. Nothing is started: run these commands yourself, on a cluster.\n");
    let mut total = 0.0;
    for preset in &full.train {
        let config = Config::load(preset)?;
        let model = Model::new(&config.model);
        let policy = config.model.policy().unwrap_or_default();
        let length = config.data.sequence_length;
        let tokens = config.train.steps as f64 * config.train.tokens_per_step as f64;
        let flop = 3.0 * model.work(length, &policy) / length as f64 * tokens;
        total += flop;
        let run = format!("runs/{}", preset.replace('/', "-"));
        say!("# {} parameters, {:.1e} tokens, {flop:.1e} FLOP", thousands(model.parameter_count()), tokens);
        say!("march train {preset} --run {run} --set data.kind=shards --set data.path=SHARDS");
        for command in &full.eval {
            say!("{}", command.replace("MODEL", &run).replace("NAME", &preset.replace('/', "-")));
        }
        say!("");
    }
    if total > 0.0 {
        let days = |rate: f64| figure(total / rate / 86_400.0);
        say!(
            "cost    {total:.1e} FLOP for training: {} days at 100 GFLOP/s (two cores), {} days at 100 TFLOP/s",
            days(1e11),
            days(1e14)
        );
        say!("data    SHARDS: a folder made by `march data prepare` from a corpus of that many tokens");
    }
    Ok(())
}

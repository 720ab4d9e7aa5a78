//! `march demo`: trains a small MARCH and two Gated DeltaNets side by side to answer questions about a diary, and asks
//! all of them about longer diaries than they were trained with.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use march_lab::eval::TaskReport;
use march_lab::report::demo as page;
use march_lm::Config;
use march_lm::data::recall::{QUESTION_SEED, Task};

use super::demo_learn::{
    DAYS, ROWS, STEPS, TrainedModel, TrainingNote, TrainingTask, facts, most_in_training, run_folder, stages,
    task_text,
};
use super::demo_table::{table, verdict};
use super::train::free_folder;
use crate::display::out::say;
use crate::display::{ModelsProgress, lines, thousands};
use crate::output::{Kind, Output};
use crate::{interrupt, number};

/// Train a small MARCH and two Gated DeltaNets to answer questions about a diary, then ask them about longer diaries
/// than they were trained with.
#[derive(Args)]
#[command(after_help = "\
All train on the same sequences, on one thread each, as many at a time as there are cores. \"GDN\" has about as
many parameters as MARCH. \"GDN, equal memory\" has one wide head, so that its state is at least as large as all
that MARCH reads after the longest diary. docs/results/demo.md says how their learning rates were chosen.
The output folder then contains report.html, picture.svg and a run for each model; every other command accepts
their checkpoints. `march reproduce capacity` repeats this with more seeds and models.")]
pub struct Demo {
    /// The folder for all output [default: runs/demo, with a number if that exists]
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,
    /// Train only a few steps: shows what the demo does, but not which model learns
    #[arg(long)]
    quick: bool,
    /// Seed of the initial weights and the sequences
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Number of training steps, divided among three stages [default: 8000; quick: 80]
    #[arg(long, value_name = "N", value_parser = number::count::<u64>)]
    steps: Option<u64>,
}

/// The models: display name; folder in the run and name of the preset.
pub const MODELS: [(&str, &str); 3] = [("MARCH", "march"), ("GDN, equal memory", "gdn-wide"), ("GDN", "gdn")];

impl Demo {
    /// Trains, evaluates and reports.
    pub fn run(self) -> anyhow::Result<()> {
        let began = Instant::now();
        let stop = interrupt::listen("finishing the step, then saving")?;
        let folder = self.run.clone().unwrap_or_else(|| free_folder("demo"));
        let steps = self.steps.unwrap_or(if self.quick { 80 } else { STEPS });
        let each = MODELS.iter().map(|(_, name)| stages(name, self.seed, steps, self.quick));
        let all = each.collect::<anyhow::Result<Vec<_>>>()?;
        // Otherwise the report of another run would be replaced.
        check_free(&folder)?;
        for ((_, name), stages) in MODELS.iter().zip(&all) {
            (0..stages.len()).try_for_each(|stage| check_free(&run_folder(&folder, name, stage)))?;
        }
        let files = Files::check(&folder)?;
        let most = Task::open(&task_text(most_in_training()), None)?;
        introduce(&most, &all[0]);
        let Some(learned) = self.learn(&all, &folder, stop)? else {
            say!("\nstopped; what was learned is saved{}", resumable(&folder, &all));
            interrupt::leave();
        };
        table(&learned);
        let conclusion = verdict(&learned, self.quick);
        say!("\n{conclusion}");
        for asked in learned.iter().filter_map(|model| model.asked.as_ref()).filter(|_| !self.quick) {
            say!("\n{}", asked.sentences().join("\n"));
        }
        self.write(&folder, &files, &most, learned, &all[0], &conclusion)?;
        say!("\ndone in {}", lines::duration(began.elapsed().as_secs_f64()));
        Ok(())
    }

    /// Trains and asks all models, as many at a time as there are cores. `None` if interrupted.
    fn learn(
        &self,
        all: &[Vec<Config>],
        folder: &Path,
        stop: &AtomicBool,
    ) -> anyhow::Result<Option<Vec<TrainedModel>>> {
        let samples = if self.quick { 8 } else { 128 };
        let tasks: Vec<TrainingTask<'_>> = MODELS
            .iter()
            .zip(all)
            .enumerate()
            .map(|(number, ((_, name), stages))| TrainingTask { number, name, stages, folder, samples })
            .collect();
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(tasks.len());
        let mut shown = ModelsProgress::new(MODELS.map(|(name, _)| name).to_vec(), total(&all[0]));
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let (send, receive) = channel();
        // Takes one model after the other, until none is left.
        let work = |send: Sender<(usize, TrainingNote)>| {
            let mut done = Vec::new();
            while !failed.load(Ordering::Relaxed) {
                let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                let learned = task.learn(stop, &send);
                failed.fetch_or(learned.is_err(), Ordering::Relaxed);
                done.push((task.number, learned));
            }
            done
        };
        let done = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers)
                .map(|_| {
                    let (send, work) = (send.clone(), &work);
                    scope.spawn(move || work(send))
                })
                .collect();
            drop(send);
            for (number, note) in receive {
                match note {
                    TrainingNote::Step(step, loss) => shown.step(number, step, loss),
                    TrainingNote::Accuracy(step, accuracy) => shown.evaluated(number, step, accuracy),
                }
            }
            shown.finish();
            let joined = threads.into_iter().map(|thread| thread.join());
            let joined = joined.collect::<Result<Vec<_>, _>>();
            joined.map_err(|_| anyhow!("a training thread ended unexpectedly; this is a bug in march"))
        })?;
        let mut done: Vec<_> = done.into_iter().flatten().collect();
        done.sort_by_key(|(number, _)| *number);
        done.into_iter().map(|(_, learned)| learned).collect()
    }

    /// Writes the page, the picture and an example; prints where they are and what to try next.
    fn write(
        &self,
        folder: &Path,
        files: &Files,
        most: &Task,
        learned: Vec<TrainedModel>,
        stages: &[Config],
        conclusion: &str,
    ) -> anyhow::Result<()> {
        let asked = most.asked(QUESTION_SEED, 0);
        // The example ends with its last question.
        let end = asked.questions.last().map_or(0, |question| question.position + 1);
        let answer = asked.questions.last().map_or(String::new(), |question| most.write(&[question.answer]));
        let answer = format!("the answer is \"{}\"", answer.trim());
        files.example.write(most.write(&asked.tokens[..end]).as_bytes())?;
        let example = files.example.path().display().to_string();
        let next = next_commands(&folder.join("march").display().to_string(), &example, &answer);
        let mut demo = page::Demo {
            title: "Recall: where was a thing on a named day?".into(),
            about: self.about(most, &learned, stages, conclusion),
            chance: 1.0 / most.answers() as f64,
            most_in_training: facts(most_in_training()),
            models: Vec::new(),
            asked: None,
            routing: None,
            next: next.iter().map(|(_, command)| format!("march {command}")).collect(),
        };
        for ((name, _), model) in MODELS.iter().zip(learned) {
            let amount = |(&days, result)| amount(days, result);
            demo.models.push(page::DemoModel {
                name: name.to_string(),
                parameters: model.parameters,
                learning_rate: model.learning_rate,
                seconds: model.seconds,
                by_facts: DAYS.iter().zip(&model.results).map(amount).collect(),
                without: DAYS.iter().zip(&model.without).map(amount).collect(),
                curve: model.curve,
            });
            demo.asked = demo.asked.or(model.asked.map(|asked| asked.sentences()));
            demo.routing = demo.routing.or(model.routing);
        }
        files.report.write(demo.page().as_bytes())?;
        files.picture.write(demo.picture().as_bytes())?;
        let (report, picture) = (files.report.path().display(), files.picture.path().display());
        say!("\nreport   {report}\npicture  {picture}\n\nNext:");
        let program = program();
        for (question, command) in next {
            say!("  # {question}\n  {program} {command}");
        }
        Ok(())
    }

    /// The paragraphs of the page.
    fn about(
        &self,
        most: &Task,
        learned: &[TrainedModel],
        stages: &[Config],
        conclusion: &str,
    ) -> Vec<String> {
        let samples =
            learned.first().and_then(|model| model.results.first()).map_or(0, |result| result.samples);
        vec![
            conclusion.into(),
            format!(
                "The task: {}. A day has {} facts, a sequence {} questions; the answer is one of {}.",
                most.about(),
                facts(1),
                most.questions(),
                most.answers()
            ),
            format!(
                "All models have two layers. MARCH and GDN have about the same number of parameters and two heads of \
                 16 × 16; GDN, equal memory has one head of 144 × 144, so that its state is at least as large as all \
                 that MARCH reads after the longest diary. They were trained for {} steps of {ROWS} sequences in three \
                 stages, with one day, with two, and with 1 to {}; seed {}. \
                 Accuracy falls where a stage begins, because its sequences have more days. MARCH saves its \
                 state every 18 tokens, which is where a day ends: docs/results/demo.md has days of different \
                 lengths as well.",
                thousands(total(stages) as usize),
                most_in_training(),
                self.seed,
            ),
            format!(
                "For each number of facts the models were asked the same {} questions in {} sequences that none had \
                 seen, and read them one token at a time.",
                thousands(samples * most.questions()),
                thousands(samples)
            ),
        ]
    }
}

/// Says what will be done.
fn introduce(most: &Task, stages: &[Config]) {
    say!(
        "The task: {}.\nA day has {} facts, a sequence {} questions; a question has {} possible answers.",
        most.about(),
        facts(1),
        most.questions(),
        most.answers()
    );
    say!(
        "A small MARCH and two Gated DeltaNets (GDN) learn it, {} steps of {ROWS} sequences: with one day, with\n\
         two, then with 1 to {}. Then they are asked about up to {}. The percentage is that of right answers in {} other\n\
         sequences; it falls where the days become more.\n",
        thousands(total(stages) as usize),
        most_in_training(),
        DAYS.iter().max().unwrap_or(&0),
        stages.first().map_or(0, |stage| stage.train.validation_sequences)
    );
}

/// Steps of all stages.
fn total(stages: &[Config]) -> u64 {
    stages.iter().map(|stage| stage.train.steps).sum()
}

/// Questions and the commands, without the program, that answer them.
fn next_commands(run: &str, example: &str, answer: &str) -> [(String, String); 3] {
    let longest = task_text(DAYS[DAYS.len() - 1]);
    [
        (
            "which anchors did each token read?".to_string(),
            format!("inspect routing --model {run} --text {example} --heads"),
        ),
        (
            "what does it recall of 32 days if it saves its state half as often?".to_string(),
            format!("eval --model {run} --tasks {longest} --interval 36 --limit 128"),
        ),
        (
            format!("the example ends with a question; {answer}"),
            format!("generate --model {run} --prompt-file {example} --max-tokens 1 --temperature 0"),
        ),
    ]
}

/// How to finish the first stage that was interrupted.
fn resumable(folder: &Path, all: &[Vec<Config>]) -> String {
    for ((_, name), stages) in MODELS.iter().zip(all) {
        for (number, stage) in stages.iter().enumerate() {
            let run = run_folder(folder, name, number);
            let end = run.join("checkpoints").join(format!("step-{}", stage.train.steps));
            if run.join("run.json").exists() && !end.exists() {
                return format!("; finish this stage with: march train --resume {}", run.display());
            }
        }
    }
    String::new()
}

/// The output files besides the runs.
struct Files {
    example: Output,
    report: Output,
    picture: Output,
}

impl Files {
    /// Creates the folder; rejects one in which a foreign file would be replaced.
    fn check(folder: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("{}: could not create", folder.display()))?;
        let file = |name: &str, kind| Output::check(&folder.join(name), kind, &[]);
        Ok(Self {
            example: file("example.txt", Kind::Text)?,
            report: file("report.html", Kind::Page)?,
            picture: file("picture.svg", Kind::Picture)?,
        })
    }
}

/// Rejects a folder that holds a run.
fn check_free(run: &Path) -> anyhow::Result<()> {
    if ["config.toml", "run.json"].iter().any(|name| run.join(name).exists()) {
        bail!("{}: already holds a run; choose another folder with --run", run.display());
    }
    Ok(())
}

/// The name under which this program was called.
fn program() -> String {
    let called = std::env::args().next().unwrap_or_else(|| "march".into());
    match Path::new(&called).is_absolute() {
        true => "march".into(),
        false => called,
    }
}

fn amount(days: usize, result: &TaskReport) -> page::Amount {
    let asked = (result.samples * result.questions) as u64;
    page::Amount {
        facts: facts(days),
        correct: (result.accuracy * asked as f64).round() as u64,
        asked,
        error: result.standard_error,
        memory_bytes: result.memory_bytes,
        rollback_bytes: result.rollback_bytes.unwrap_or(0),
    }
}

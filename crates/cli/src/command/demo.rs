//! `march demo`: trains a small GDN and a small MARCH on a recall task in parallel, and asks both the same questions.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use march::Config;
use march::anchors::Policy;
use march::checkpoint::Checkpoint;
use march::data::recall::{QUESTION_SEED, Task};
use march::engine::{Cpu, CpuOptions, Precision, Products};
use march::eval::{AgeReport, Asking, Reader, TaskReport, ask};
use march::generate::{Generator, Sampling};
use march::model::{Model, TraceCell};
use march::report::demo as page;
use march::report::routing::Routing;
use march::run::{Event, Run, RunOptions};
use march::tokenizer::Tokenizer;
use march::train::ranks::Alone;

use super::demo_sweep::sweep;
use super::demo_table::{table, verdict};
use super::eval::percent;
use super::train::free_folder;
use crate::display::out::{note, say};
use crate::display::{Pupils, bytes, lines, thousands};
use crate::output::{Kind, Output};
use crate::{interrupt, machine, number};

/// Train a small MARCH and a small Gated DeltaNet on a recall task, ask both the same questions, and show the
/// difference.
#[derive(Args)]
#[command(after_help = "\
The two models have about the same number of parameters and train at the same time, on one thread each, on
the same sequences, each with its own best learning rate (docs/results/demo.md has the sweep). The output
folder then contains report.html, picture.svg and a run for each model; every other command accepts their
checkpoints.")]
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
    /// Number of training steps [default: those of the presets demo/march and demo/gdn]
    #[arg(long, value_name = "N", value_parser = number::count::<u64>)]
    steps: Option<u64>,
    /// Instead, train with each of these learning rates (separated by commas) and several seeds, and print a table
    #[arg(long, value_name = "RATES", value_delimiter = ',', value_parser = number::positive)]
    sweep: Vec<f64>,
    /// Number of seeds in a sweep
    #[arg(long, value_name = "N", default_value_t = 3, requires = "sweep", value_parser = number::seeds)]
    seeds: u64,
}

/// The models: display name; folder in the run and name of the preset.
pub const MODELS: [(&str, &str); 2] = [("MARCH", "march"), ("GDN", "gdn")];

/// A message from a model in training.
pub enum Note {
    Step(u64, f64),
    Asked(u64, f64),
}

/// A trained model.
pub struct Learned {
    pub parameters: usize,
    pub learning_rate: f64,
    pub seconds: f64,
    curve: Vec<(u64, f64)>,
    pub result: TaskReport,
    /// The result with the same weights but without anchors, if the model has any.
    pub without: Option<TaskReport>,
    routing: Option<Routing>,
}

impl Demo {
    /// Trains, evaluates and reports.
    pub fn run(self) -> anyhow::Result<()> {
        let began = Instant::now();
        let stop = interrupt::listen("finishing the step, then saving")?;
        let folder = self.run.clone().unwrap_or_else(|| free_folder("demo"));
        let [(_, march), (_, gdn)] = MODELS;
        let configs = [self.config(march)?, self.config(gdn)?];
        let task = task_of(&configs[0])?;
        if !self.sweep.is_empty() {
            return sweep(&configs, &self.sweep, self.seeds, &folder, &task, stop);
        }
        // Otherwise the report of another run would be replaced.
        check_free(&folder)?;
        MODELS.iter().try_for_each(|(_, name)| check_free(&folder.join(name)))?;
        let files = Files::check(&folder)?;
        let keys = &configs[0].train;
        say!(
            "The task: {}.\n{} tokens, {} questions, {} possible answers.",
            task.about(),
            task.length(),
            task.questions(),
            task.answers()
        );
        say!(
            "A small MARCH and a small Gated DeltaNet (GDN) learn it side by side, {} steps of {} sequences.\n\
             The percentage is that of right answers to the questions in {} other sequences.\n",
            thousands(keys.steps as usize),
            keys.tokens_per_step / task.length(),
            keys.validation_sequences
        );
        let Some(learned) = self.learn(&configs, &folder, &task, stop)? else {
            say!(
                "\nstopped; resume one of them with: march train --resume {}",
                folder.join("march").display()
            );
            interrupt::leave();
        };
        table(&learned);
        verdict(&learned, self.quick);
        self.write(&folder, &files, &task, learned, &configs[0])?;
        say!("\ndone in {}", lines::duration(began.elapsed().as_secs_f64()));
        Ok(())
    }

    fn config(&self, model: &str) -> anyhow::Result<Config> {
        let mut config = Config::load(&format!("demo/{model}"))?;
        config.train.seed = self.seed;
        config.train.steps = self.steps.unwrap_or(config.train.steps);
        if self.quick {
            config.train.steps = self.steps.unwrap_or(40);
            config.train.validate_every = 10;
            config.train.validation_sequences = 16;
        }
        Ok(config)
    }

    /// Trains all models at once, each on its own thread, so that the results do not depend on the machine's number of
    /// cores. `None` if interrupted.
    fn learn(
        &self,
        configs: &[Config; 2],
        folder: &Path,
        task: &Task,
        stop: &AtomicBool,
    ) -> anyhow::Result<Option<Vec<Learned>>> {
        let samples = if self.quick { 32 } else { 512 };
        let (send, receive) = channel();
        let mut shown = Pupils::new(MODELS.map(|(name, _)| name).to_vec(), configs[0].train.steps);
        std::thread::scope(|scope| {
            let threads: Vec<_> = MODELS
                .iter()
                .zip(configs)
                .enumerate()
                .map(|(number, ((_, name), config))| {
                    let (send, run) = (send.clone(), folder.join(name));
                    scope.spawn(move || learn(number, config, &run, task, samples, stop, &send))
                })
                .collect();
            drop(send);
            for (number, note) in receive {
                match note {
                    Note::Step(step, loss) => shown.step(number, step, loss),
                    Note::Asked(step, accuracy) => shown.asked(number, step, accuracy),
                }
            }
            shown.finish();
            let one = |thread: std::thread::ScopedJoinHandle<'_, anyhow::Result<Option<Learned>>>| {
                thread
                    .join()
                    .map_err(|_| anyhow!("a training thread ended unexpectedly; this is a bug in march"))?
            };
            threads.into_iter().map(one).collect()
        })
    }

    /// Writes the page, the picture and an example; prints where they are and what to try next.
    fn write(
        &self,
        folder: &Path,
        files: &Files,
        task: &Task,
        learned: Vec<Learned>,
        config: &Config,
    ) -> anyhow::Result<()> {
        let asked = task.asked(QUESTION_SEED, 0);
        let answer = asked.questions.last().map_or(String::new(), |question| words(task, &[question.answer]));
        files.example.write((words(task, &asked.tokens) + "\n").as_bytes())?;
        let (program, run) = (program(), folder.join("march").display().to_string());
        let task_text = task.text();
        let example = files.example.path().display();
        let next = [
            (
                "which anchors did each token read?".to_string(),
                format!("inspect routing --model {run} --text {example} --heads"),
            ),
            (
                "what does it recall with only the newest anchor?".to_string(),
                format!("eval --model {run} --tasks {task_text} --retention recent:1"),
            ),
            (
                format!("the example ends with a question; the answer is {answer}"),
                format!("generate --model {run} --prompt-file {example} --max-tokens 1 --temperature 0"),
            ),
        ];
        let keys = &config.train;
        let about = vec![
            format!(
                "The task: {}. {} tokens, {} questions; the answer is one of {}.",
                task.about(),
                task.length(),
                task.questions(),
                task.answers()
            ),
            format!(
                "Both models have two layers and about the same number of parameters, and were trained for \
                 {} steps of {} sequences, each with its own best learning rate; seed {}. They were asked \
                 the same {} questions in {} sequences that neither had seen, and read them one token at \
                 a time.",
                thousands(keys.steps as usize),
                keys.tokens_per_step / task.length(),
                self.seed,
                thousands(learned[0].result.samples * task.questions()),
                thousands(learned[0].result.samples)
            ),
        ];
        let mut demo = page::Demo {
            title: "Recall: what did a named document say?".into(),
            about,
            chance: 1.0 / task.answers() as f64,
            models: Vec::new(),
            routing: None,
            next: next.iter().map(|(_, command)| format!("march {command}")).collect(),
        };
        if let Some(without) = learned.iter().find_map(|model| model.without.as_ref()) {
            demo.about.push(format!(
                "With the same weights but no anchors, MARCH answers {} and keeps {}.",
                percent(without.accuracy, without.standard_error),
                bytes(without.memory_bytes)
            ));
        }
        for ((name, _), model) in MODELS.iter().zip(learned) {
            let Learned { parameters, learning_rate, seconds, curve, result, routing, .. } = model;
            demo.routing = demo.routing.or(routing);
            demo.models.push(page::DemoModel {
                name: name.to_string(),
                parameters,
                learning_rate,
                seconds,
                curve,
                accuracy: result.accuracy,
                error: result.standard_error,
                by_age: result.by_age.iter().map(age).collect(),
                memory_bytes: result.memory_bytes,
                tokens_per_second: result.tokens_per_second,
            });
        }
        files.report.write(demo.page().as_bytes())?;
        files.picture.write(demo.picture().as_bytes())?;
        let (report, picture) = (files.report.path().display(), files.picture.path().display());
        say!("\nreport   {report}\npicture  {picture}\n\nNext:");
        for (question, command) in next {
            say!("  # {question}\n  {program} {command}");
        }
        Ok(())
    }
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
pub fn check_free(run: &Path) -> anyhow::Result<()> {
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

fn age(age: &AgeReport) -> page::Age {
    let correct = (age.accuracy * age.asked as f64).round() as u64;
    let error = age.standard_error;
    page::Age { from: age.from, to: age.to - 1, correct, asked: age.asked, error }
}

/// The task that a configuration trains on.
fn task_of(config: &Config) -> anyhow::Result<Task> {
    let text = config.data.task.as_deref().context("the demo's configuration names no task")?;
    Ok(Task::open(text, Some(config.data.sequence_length))?)
}

fn words(task: &Task, tokens: &[u32]) -> String {
    let names = task.vocabulary();
    let words: Vec<&str> =
        tokens.iter().filter_map(|&id| names.get(id as usize)).map(String::as_str).collect();
    words.join(" ")
}

/// Trains one model, saves it, and evaluates the saved one. `None` if `stop` was set in the meantime; the state so far
/// is saved.
pub fn learn(
    number: usize,
    config: &Config,
    folder: &Path,
    task: &Task,
    samples: u64,
    stop: &AtomicBool,
    tell: &Sender<(usize, Note)>,
) -> anyhow::Result<Option<Learned>> {
    let engine =
        Cpu::new(CpuOptions { threads: 1, ..Default::default() }).context("the engine could not start")?;
    let mut run =
        Run::create(&engine, config.clone(), folder, RunOptions::default(), Box::<Alone>::default())?;
    if let Err(error) = machine::session(&engine, 0, 1).record(folder) {
        note!("note          {error}"); // no reason not to train
    }
    let (mut curve, mut saved) = (Vec::new(), None);
    let began = Instant::now();
    let complete = run.train(stop, &mut |event| match event {
        Event::Step(line) => drop(tell.send((number, Note::Step(line.step, line.report.loss)))),
        Event::Validated(step, validation, _) => {
            curve.push((step, validation.accuracy));
            drop(tell.send((number, Note::Asked(step, validation.accuracy))));
        }
        Event::Saved(folder) => saved = Some(folder),
        _ => {}
    })?;
    let seconds = began.elapsed().as_secs_f64();
    let parameters = run.trainer().model().parameter_count();
    drop(run);
    if !complete {
        return Ok(None);
    }
    let saved = saved.context("no checkpoint was written")?;
    // As in `march eval`: decoding is bit-identical to reading the whole sequence.
    let options = CpuOptions { threads: 1, products: Products::BatchInvariant, ..Default::default() };
    let engine = Cpu::new(options).context("the engine could not start")?;
    let checkpoint = Checkpoint::open(&saved)?;
    let (model, parameters_read) = Model::load_in(&engine, &checkpoint, Precision::F32)?;
    let tokenizer = Tokenizer::of_checkpoint(&saved, model.config().vocab_size, None)?;
    let policy = model.policy();
    let reader = Reader {
        engine: &engine,
        model: &model,
        parameters: &parameters_read,
        tokenizer: &tokenizer,
        policy: &policy,
    };
    let asking = Asking { samples, decode: true };
    let stopped = || stop.load(Ordering::Relaxed);
    let watch = |_| if stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let answers = ask(&reader, task, asking, &mut { watch })?;
    let result = TaskReport::new(task, &answers);
    let mut without = None;
    let routing = if policy.interval.is_some() {
        let none = Policy { interval: None, ..policy.clone() };
        let answers = ask(&Reader { policy: &none, ..reader }, task, asking, &mut { watch })?;
        without = Some(TaskReport::new(task, &answers));
        let ids = task.asked(QUESTION_SEED, 0).tokens;
        let trace = TraceCell::default();
        let bank = model.bank(policy.clone())?;
        let generator = Generator::new(&engine, &model, &parameters_read, bank, Sampling::default())?;
        generator.with_trace(&trace).read(&ids, &mut |_| ControlFlow::Continue(()))?;
        let trace = trace.lock().unwrap();
        Some(Routing::new(&engine, &trace, model.config().num_hidden_layers, &tokenizer, &ids)?)
    } else {
        None
    };
    if stopped() {
        return Ok(None);
    }
    let learning_rate = config.train.learning_rate;
    Ok(Some(Learned { parameters, learning_rate, seconds, curve, result, without, routing }))
}

//! One model of `march demo`: trained in stages with more and more days of a diary, then asked.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Instant;

use anyhow::Context;
use march_lab::eval::{Reader, RecallOptions, TaskReport, evaluate_recall};
use march_lab::report::routing::Routing;
use march_lm::Config;
use march_lm::anchors::{Policy, Storage};
use march_lm::checkpoint::Checkpoint;
use march_lm::data::recall::{QUESTION_SEED, Task};
use march_lm::engine::{CpuOptions, Device, Precision, Products};
use march_lm::generate::{Generator, Limits, Sampling};
use march_lm::model::{Model, TraceCell};
use march_lm::run::{Event, Run, RunOptions};
use march_lm::tokenizer::Tokenizer;
use march_lm::train::ranks::SingleProcess;

use crate::display::out::note;
use crate::machine;

/// A stage of the training, as in the course `diary` of configs/reproduce/common.toml.
struct Stage {
    /// The most days of a sequence, and the fewest.
    days: (usize, usize),
    /// The fewest facts of a day.
    least: usize,
    questions: usize,
    steps: u64,
}

/// First single days, so that a model learns to recall a place at all; then two, so that it learns to tell days apart.
/// Without these, few models learn the last stage.
const STAGES: [Stage; 3] = [
    Stage { days: (1, 1), least: 1, questions: 32, steps: 2000 },
    Stage { days: (2, 2), least: FACTS, questions: 16, steps: 3500 },
    Stage { days: (8, 1), least: FACTS, questions: 16, steps: 2500 },
];
/// Steps of all stages together.
pub const STEPS: u64 = STAGES[0].steps + STAGES[1].steps + STAGES[2].steps;
/// Sequences per step.
pub const ROWS: usize = 8;
/// Facts of a day.
const FACTS: usize = 8;
/// The days of the sequences that trained models are asked about.
pub const DAYS: [usize; 5] = [2, 4, 8, 16, 32];

/// The task with this many days, as text.
pub fn task_text(days: usize) -> String {
    text_of(days, 16)
}

fn text_of(days: usize, questions: usize) -> String {
    format!("diary:days={days}:facts={FACTS}:things={FACTS}:places=64:dates=64:questions={questions}")
}

/// The number of facts in this many days.
pub fn facts(days: usize) -> usize {
    days * FACTS
}

/// The most days of a training sequence.
pub fn most_in_training() -> usize {
    STAGES.iter().map(|stage| stage.days.0).max().unwrap_or(0)
}

/// The configurations of a model's stages, which together make about `steps` steps.
pub fn stages(model: &str, seed: u64, steps: u64, quick: bool) -> anyhow::Result<Vec<Config>> {
    let mut before = 0;
    let end = |share: u64| (u128::from(steps) * u128::from(share) / u128::from(STEPS)) as u64;
    let stage = |(number, stage): (usize, &Stage)| {
        let begins = end(before);
        before += stage.steps;
        let mut task = text_of(stage.days.0, stage.questions);
        if stage.days.0 > stage.days.1 {
            task += &format!(":fewest={}", stage.days.1);
        }
        if stage.least < FACTS {
            task += &format!(":least={}", stage.least);
        }
        let length = Task::open(&task, None)?.length();
        let mut config = Config::load(&format!("demo/{model}"))?;
        (config.data.task, config.data.sequence_length) = (Some(task), length);
        let train = &mut config.train;
        train.steps = (end(before) - begins).max(1);
        (train.micro_batch, train.tokens_per_step) = (ROWS, ROWS * length);
        // Stages see different sequences.
        train.seed = seed.wrapping_add(1_000_000 * number as u64);
        train.validate_every = steps.div_ceil(40);
        if quick {
            train.validate_every = train.validate_every.max(5);
            train.validation_sequences = 16;
        }
        Ok(config)
    };
    STAGES.iter().enumerate().map(stage).collect()
}

/// The run folder of a model's stage: the last stage's is that of the model.
pub fn run_folder(all: &Path, name: &str, stage: usize) -> PathBuf {
    match stage + 1 < STAGES.len() {
        true => all.join("stages").join(format!("{name}-{}", stage + 1)),
        false => all.join(name),
    }
}

/// A message from a model in training. Steps are counted over all stages.
pub enum TrainingNote {
    Step(u64, f64),
    Accuracy(u64, f64),
}

/// A trained model.
pub struct TrainedModel {
    pub parameters: usize,
    pub learning_rate: f64,
    pub seconds: f64,
    /// Step and accuracy on the validation sequences of the stage.
    pub curve: Vec<(u64, f64)>,
    /// The results, by [`DAYS`].
    pub results: Vec<TaskReport>,
    /// The results with the same weights but without anchors, if the model has any.
    pub without: Vec<TaskReport>,
    /// The results with the most days and anchors in int8, if the model has any.
    pub int8: Option<TaskReport>,
    pub routing: Option<Routing>,
    /// A question about the longest diary.
    pub asked: Option<AnsweredQuestion>,
}

/// A question that a trained model was asked.
pub struct AnsweredQuestion {
    /// The question, with the model's answer.
    pub answered: String,
    pub right: bool,
    /// The part of the text that was read most, and its weight.
    pub read: (String, f64),
}

impl AnsweredQuestion {
    /// The question with its answer, and what was read.
    pub fn sentences(&self) -> Vec<String> {
        let Self { answered, right, read: (text, weight) } = self;
        let judged = if *right { "right" } else { "wrong" };
        vec![
            format!("One question about the longest diary, and what MARCH answers: {answered} ({judged})"),
            format!("It read this part of the diary most, with a weight of {:.0} %: {text}", 100.0 * weight),
        ]
    }
}

impl TrainedModel {
    /// The result with this many days.
    pub fn result(&self, days: usize) -> Option<&TaskReport> {
        find(&self.results, days)
    }

    /// The result with this many days and no anchors.
    pub fn without(&self, days: usize) -> Option<&TaskReport> {
        find(&self.without, days)
    }
}

fn find(results: &[TaskReport], days: usize) -> Option<&TaskReport> {
    DAYS.iter().position(|&other| other == days).and_then(|at| results.get(at))
}

/// A model to train.
pub struct TrainingTask<'a> {
    /// Its number in messages.
    pub number: usize,
    /// The name of its preset and of its folder.
    pub name: &'a str,
    pub stages: &'a [Config],
    /// The demo's folder.
    pub folder: &'a Path,
    /// Sequences to be asked about, for each number of days.
    pub samples: u64,
}

/// A model after its last stage.
struct TrainingResult {
    parameters: usize,
    seconds: f64,
    curve: Vec<(u64, f64)>,
    checkpoint: PathBuf,
}

impl TrainingTask<'_> {
    /// Trains the model, saves it, and evaluates the saved one. `None` if `stop` was set in the meantime; the state so
    /// far is saved.
    pub fn learn(
        &self,
        stop: &AtomicBool,
        tell: &Sender<(usize, TrainingNote)>,
    ) -> anyhow::Result<Option<TrainedModel>> {
        match self.train(stop, tell)? {
            Some(trained) => self.evaluate(trained, stop),
            None => Ok(None),
        }
    }

    /// Trains all stages, each from the weights of the one before, on one thread: so results do not depend on the
    /// machine's number of cores.
    fn train(
        &self,
        stop: &AtomicBool,
        tell: &Sender<(usize, TrainingNote)>,
    ) -> anyhow::Result<Option<TrainingResult>> {
        let device = Device::cpu(CpuOptions { threads: 1, ..Default::default() })
            .context("the engine could not start")?;
        let began = Instant::now();
        let (mut before, mut parameters, mut curve) = (0, 0, Vec::new());
        let mut checkpoint: Option<PathBuf> = None;
        for (stage, config) in self.stages.iter().enumerate() {
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let folder = run_folder(self.folder, self.name, stage);
            let options = RunOptions { init_from: checkpoint.take(), ..RunOptions::default() };
            let mut run =
                Run::create(&device, config.clone(), &folder, options, Box::<SingleProcess>::default())?;
            if let Err(error) = machine::session(&device, 1, 0, 1).record(&folder) {
                note!("note          {error}"); // no reason not to train
            }
            let send = |note| drop(tell.send((self.number, note)));
            let complete = run.train(stop, &mut |event| match event {
                Event::Step(line) => send(TrainingNote::Step(before + line.step, line.report.loss)),
                Event::Validated(step, validation, _) => {
                    curve.push((before + step, validation.accuracy));
                    send(TrainingNote::Accuracy(before + step, validation.accuracy));
                }
                Event::Saved(folder) => checkpoint = Some(folder),
                _ => {}
            })?;
            if !complete {
                return Ok(None);
            }
            parameters = run.trainer().model().parameter_count();
            before += config.train.steps;
        }
        let checkpoint = checkpoint.context("no checkpoint was written")?;
        Ok(Some(TrainingResult { parameters, seconds: began.elapsed().as_secs_f64(), curve, checkpoint }))
    }

    /// Evaluates a saved model, which reads one token at a time.
    fn evaluate(&self, trained: TrainingResult, stop: &AtomicBool) -> anyhow::Result<Option<TrainedModel>> {
        let TrainingResult { parameters, seconds, curve, checkpoint } = trained;
        // As in `march eval`: decoding is bit-identical to reading the whole sequence.
        let options = CpuOptions { threads: 1, products: Products::BatchInvariant, ..Default::default() };
        let device = Device::cpu(options).context("the engine could not start")?;
        let (model, weights) = Model::load_in(&device, &Checkpoint::open(&checkpoint)?, Precision::F32)?;
        let tokenizer = Tokenizer::of_checkpoint(&checkpoint, model.config().vocab_size, None)?;
        let policy = model.policy();
        let reader = Reader { model: &model, parameters: &weights, tokenizer: &tokenizer, policy: &policy };
        let results = self.results(&reader, &DAYS, stop)?;
        let (mut without, mut int8, mut routing, mut asked) = (Vec::new(), None, None, None);
        if policy.interval.is_some() {
            let none = Policy { interval: None, ..policy.clone() };
            without = self.results(&Reader { policy: &none, ..reader }, &DAYS, stop)?;
            let int8_policy = Policy { storage: Storage::Int8, ..policy.clone() };
            let longest = &DAYS[DAYS.len() - 1..];
            int8 = self.results(&Reader { policy: &int8_policy, ..reader }, longest, stop)?.pop();
            let ids = Task::open(&task_text(most_in_training()), None)?.asked(QUESTION_SEED, 0).tokens;
            routing = Some(read(&reader, &ids)?);
            asked = Some(ask(&reader, &Task::open(&task_text(longest[0]), None)?)?);
        }
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let learning_rate = self.stages.last().map_or(f64::NAN, |stage| stage.train.learning_rate);
        Ok(Some(TrainedModel {
            parameters,
            learning_rate,
            seconds,
            curve,
            results,
            without,
            int8,
            routing,
            asked,
        }))
    }

    /// The results with each of these numbers of days; incomplete if `stop` was set in the meantime.
    fn results(
        &self,
        reader: &Reader<'_>,
        days: &[usize],
        stop: &AtomicBool,
    ) -> anyhow::Result<Vec<TaskReport>> {
        let options = RecallOptions { samples: self.samples, decode: true, seed: QUESTION_SEED };
        let stopped = || stop.load(Ordering::Relaxed);
        let mut watch = |_| if stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let mut results = Vec::new();
        for &days in days {
            if stopped() {
                break;
            }
            let task = Task::open(&task_text(days), None)?;
            results.push(TaskReport::new(&task, &evaluate_recall(reader, &task, options, &mut watch)?));
        }
        Ok(results)
    }
}

/// Which anchors a model reads at each token of a text.
fn read(reader: &Reader<'_>, ids: &[u32]) -> anyhow::Result<Routing> {
    let (_, routing) = generator(reader, ids)?;
    Ok(routing)
}

/// A generator that has read a text, and what it read of the anchors.
fn generator(reader: &Reader<'_>, ids: &[u32]) -> anyhow::Result<(Generator, Routing)> {
    let trace = TraceCell::default();
    let bank = reader.model.bank(reader.policy.clone())?;
    let mut generator =
        Generator::new(reader.model, reader.parameters, bank, Sampling::greedy())?.with_trace(&trace);
    generator.read(ids, &mut |_| ControlFlow::Continue(()))?;
    let layers = reader.model.config().num_hidden_layers;
    let trace = trace.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let routing = Routing::new(&trace, layers, reader.tokenizer, ids)?;
    Ok((generator, routing))
}

/// Asks the first question of a task's first example.
fn ask(reader: &Reader<'_>, task: &Task) -> anyhow::Result<AnsweredQuestion> {
    let example = task.asked(QUESTION_SEED, 0);
    let question = example.questions.first().context("the task asks nothing")?;
    let ids = &example.tokens[..=question.position];
    let (mut generator, routing) = generator(reader, ids)?;
    let mut answer = String::new();
    let limits = Limits { max_tokens: 1, stop: Vec::new() };
    generator.write(reader.tokenizer, &limits, &mut |piece| {
        answer += piece;
        ControlFlow::Continue(())
    })?;
    let answer = reader.tokenizer.encode(&answer)?;
    let thing_and_date = &ids[question.position - 1..];
    let right = answer == [question.answer];
    let written = task.write(&[thing_and_date, &answer].concat());
    let (range, weight) = routing.read_most(question.position).context("no anchor was read")?;
    let read = (task.write(&ids[range]).trim().to_string(), weight);
    Ok(AnsweredQuestion { answered: written.trim().into(), right, read })
}

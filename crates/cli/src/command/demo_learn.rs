//! One model of `march demo`: trained in three stages with more and more documents, then asked.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Instant;

use anyhow::Context;
use march_lab::eval::{Reader, RecallOptions, TaskReport, evaluate_recall};
use march_lab::report::routing::Routing;
use march_lm::Config;
use march_lm::anchors::Policy;
use march_lm::checkpoint::Checkpoint;
use march_lm::data::recall::{QUESTION_SEED, Task};
use march_lm::engine::{CpuOptions, Device, Precision, Products};
use march_lm::generate::{Generator, Sampling};
use march_lm::model::{Model, TraceCell};
use march_lm::run::{Event, Run, RunOptions};
use march_lm::tokenizer::Tokenizer;
use march_lm::train::ranks::SingleProcess;

use crate::display::out::note;
use crate::machine;

/// The stages, as in the course `versioned` of configs/reproduce/common.toml: the documents of a sequence, the size
/// `fewest` of the task, and the share of the steps in 22nds. Without the first stages no model learns the last.
const STAGES: [(usize, usize, u64); 3] = [(2, 0, 15), (4, 0, 3), (8, 2, 4)];
const SHARES: u64 = 22;
/// Steps of all stages together.
pub const STEPS: u64 = 2200;
/// Sequences per step.
pub const ROWS: usize = 16;
/// Facts of a document.
const KEYS: usize = 4;
/// The documents of the sequences that trained models are asked about.
pub const DOCUMENTS: [usize; 5] = [2, 4, 8, 16, 32];

/// The task with this many documents, as text.
pub fn task_text(documents: usize) -> String {
    format!("versioned:documents={documents}:keys={KEYS}:values=32:questions=16:names=32")
}

/// The number of facts in this many documents.
pub fn facts(documents: usize) -> usize {
    documents * KEYS
}

/// The most documents of a training sequence.
pub fn most_in_training() -> usize {
    STAGES.iter().map(|stage| stage.0).max().unwrap_or(0)
}

/// The configurations of a model's stages, which together make about `steps` steps.
pub fn stages(model: &str, seed: u64, steps: u64, quick: bool) -> anyhow::Result<Vec<Config>> {
    let mut shares = 0;
    let end = |shares: u64| (u128::from(steps) * u128::from(shares) / u128::from(SHARES)) as u64;
    let stage = |(number, &(documents, fewest, share)): (usize, &(usize, usize, u64))| {
        let begins = end(shares);
        shares += share;
        let mut task = task_text(documents);
        if fewest > 0 {
            task += &format!(":fewest={fewest}");
        }
        let length = Task::open(&task, None)?.length();
        let mut config = Config::load(&format!("demo/{model}"))?;
        (config.data.task, config.data.sequence_length) = (Some(task), length);
        let train = &mut config.train;
        train.steps = (end(shares) - begins).max(1);
        (train.micro_batch, train.tokens_per_step) = (ROWS, ROWS * length);
        // Stages see different sequences.
        train.seed = seed.wrapping_add(1_000_000 * number as u64);
        train.validate_every = steps.div_ceil(2 * SHARES);
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
    /// The results, by [`DOCUMENTS`].
    pub results: Vec<TaskReport>,
    /// The results with the same weights but without anchors, if the model has any.
    pub without: Vec<TaskReport>,
    pub routing: Option<Routing>,
}

impl TrainedModel {
    /// The result with this many documents.
    pub fn result(&self, documents: usize) -> Option<&TaskReport> {
        find(&self.results, documents)
    }

    /// The result with this many documents and no anchors.
    pub fn without(&self, documents: usize) -> Option<&TaskReport> {
        find(&self.without, documents)
    }
}

fn find(results: &[TaskReport], documents: usize) -> Option<&TaskReport> {
    DOCUMENTS.iter().position(|&other| other == documents).and_then(|at| results.get(at))
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
    /// Sequences to be asked about, for each number of documents.
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
        let results = self.results(&reader, stop)?;
        let (mut without, mut routing) = (Vec::new(), None);
        if policy.interval.is_some() {
            let none = Policy { interval: None, ..policy.clone() };
            without = self.results(&Reader { policy: &none, ..reader }, stop)?;
            let ids = Task::open(&task_text(most_in_training()), None)?.asked(QUESTION_SEED, 0).tokens;
            let trace = TraceCell::default();
            let bank = model.bank(policy.clone())?;
            let generator = Generator::new(&model, &weights, bank, Sampling::default())?;
            generator.with_trace(&trace).read(&ids, &mut |_| ControlFlow::Continue(()))?;
            let trace = trace.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let layers = model.config().num_hidden_layers;
            routing = Some(Routing::new(&trace, layers, &tokenizer, &ids)?);
        }
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let learning_rate = self.stages.last().map_or(f64::NAN, |stage| stage.train.learning_rate);
        Ok(Some(TrainedModel { parameters, learning_rate, seconds, curve, results, without, routing }))
    }

    /// The results with each number of documents; incomplete if `stop` was set in the meantime.
    fn results(&self, reader: &Reader<'_>, stop: &AtomicBool) -> anyhow::Result<Vec<TaskReport>> {
        let options = RecallOptions { samples: self.samples, decode: true, seed: QUESTION_SEED };
        let stopped = || stop.load(Ordering::Relaxed);
        let mut watch = |_| if stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let mut results = Vec::new();
        for documents in DOCUMENTS {
            if stopped() {
                break;
            }
            let task = Task::open(&task_text(documents), None)?;
            results.push(TaskReport::new(&task, &evaluate_recall(reader, &task, options, &mut watch)?));
        }
        Ok(results)
    }
}

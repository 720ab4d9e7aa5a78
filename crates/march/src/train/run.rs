//! A run: the loop around a trainer, and the folder that holds all of it.
//!
//! ```text
//! RUN/config.toml            the whole configuration, defaults filled in
//! RUN/environment.json       the program and machine of each session
//! RUN/metrics.jsonl          a line for each step, validation and sample; what reports are made from
//! RUN/samples.txt            the samples, to read
//! RUN/checkpoints/step-N/    a checkpoint that any command takes, and what going on needs
//! ```

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use march_engine::Engine;
use serde_json::{Value, json};

use super::ranks::Ranks;
use super::sources::Sources;
use super::state::Progress;
use super::{StepReport, Trainer, Validation, machine_memory};
use crate::anchors::Retention;
use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::data::Loader;
use crate::disk;
use crate::error::{Error, Result};
use crate::generate::{Sampling, continue_text};
use crate::model::{Model, Settings};
use crate::tokenizer::Tokenizer;

const CONFIG_FILE: &str = "config.toml";
const METRICS_FILE: &str = "metrics.jsonl";
const SAMPLES_FILE: &str = "samples.txt";
const CHECKPOINTS: &str = "checkpoints";

/// How a run begins.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// First weights from this checkpoint.
    pub init_from: Option<PathBuf>,
    /// Stop after this step, as if interrupted.
    pub stop_at: Option<u64>,
}

/// A step as people see it.
#[derive(Clone, Debug)]
pub struct StepLine {
    /// Steps made.
    pub step: u64,
    /// Steps in all.
    pub steps: u64,
    /// What the step did.
    pub report: StepReport,
    /// Tokens of a second of this step.
    pub tokens_per_second: f64,
    /// Seconds that the remaining steps will take at the pace so far.
    pub seconds_left: f64,
}

/// What happens in a run, as it happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// A step was made.
    Step(StepLine),
    /// What held-back sequences say at a step, and whether the loss is the lowest so far.
    Validated(u64, Validation, bool),
    /// A sample: step, prompt, text.
    Sampled(u64, String, String),
    /// A checkpoint was written.
    Saved(PathBuf),
    /// A checkpoint could not be used, and why; it was set aside.
    SetAside(PathBuf, String),
    /// The run goes on from this checkpoint.
    Resumed(PathBuf),
}

/// A trainer, its data and its folder.
pub struct Run<'e, E: Engine> {
    engine: &'e E,
    config: Config,
    folder: PathBuf,
    trainer: Trainer<'e, E>,
    loader: Loader,
    validation: Option<Loader>,
    tokenizer: Tokenizer,
    progress: Progress,
    options: RunOptions,
}

impl<'e, E: Engine> Run<'e, E> {
    /// Begins a run in a new folder.
    pub fn create(
        engine: &'e E,
        config: Config,
        folder: &Path,
        options: RunOptions,
        ranks: Box<dyn Ranks>,
    ) -> Result<Self> {
        let writes = ranks.rank() == 0;
        if writes && folder.join(CONFIG_FILE).exists() {
            let message = "already holds a run; go on with --resume, or choose another folder";
            return Err(Error::file(folder, message));
        }
        let run = Self::open(engine, config, folder, options, ranks)?;
        if !writes {
            return Ok(run);
        }
        fs::create_dir_all(folder.join(CHECKPOINTS)).map_err(Error::io(folder, "create"))?;
        let path = folder.join(CONFIG_FILE);
        fs::write(&path, run.config.to_toml()).map_err(Error::io(&path, "write"))?;
        Ok(run)
    }

    /// Goes on with a run from its newest checkpoint that is whole; without any, from the beginning. Damaged ones are
    /// set aside and told to `watch`.
    pub fn resume(
        engine: &'e E,
        folder: &Path,
        options: RunOptions,
        ranks: Box<dyn Ranks>,
        watch: &mut dyn FnMut(Event),
    ) -> Result<Self> {
        let path = folder.join(CONFIG_FILE);
        if !path.is_file() {
            let message = "is missing; a run's folder has one (march train makes it)";
            return Err(Error::file(&path, message));
        }
        let config = Config::load(&path.display().to_string())?;
        let mut run = Self::open(engine, config, folder, options, ranks)?;
        if run.trainer.rank().0 == 0 {
            run.restore_newest(watch)?;
            run.forget_later_metrics()?;
        }
        // The others take the checkpoint that number 0 took.
        let mut step = [if run.trainer.rank().0 == 0 { run.trainer.step() as f64 } else { 0.0 }];
        run.trainer.sum(&mut step)?;
        if run.trainer.rank().0 > 0 && step[0] > 0.0 {
            let checkpoint = run.checkpoint(step[0] as u64);
            run.progress = run.trainer.restore(&checkpoint)?;
        }
        run.loader.seek(run.progress.cursor);
        Ok(run)
    }

    /// Takes the newest checkpoint that is whole, and sets damaged ones aside.
    fn restore_newest(&mut self, watch: &mut dyn FnMut(Event)) -> Result<()> {
        for (_, checkpoint) in self.checkpoints()?.into_iter().rev() {
            match self.trainer.restore(&checkpoint) {
                Ok(progress) => {
                    self.progress = progress;
                    watch(Event::Resumed(checkpoint));
                    break;
                }
                Err(error) => {
                    let mut aside = checkpoint.clone().into_os_string();
                    aside.push(format!(".damaged-{}", std::process::id()));
                    fs::rename(&checkpoint, &aside).map_err(Error::io(&checkpoint, "set aside"))?;
                    watch(Event::SetAside(checkpoint, error.to_string()));
                }
            }
        }
        Ok(())
    }

    fn open(
        engine: &'e E,
        config: Config,
        folder: &Path,
        options: RunOptions,
        ranks: Box<dyn Ranks>,
    ) -> Result<Self> {
        let Config { model, memory, data, train } = &config;
        let Sources { training, validation, tokenizer } = Sources::open(data, train)?;
        // Batches are to be taken in their order; a task's sequences are random as they are.
        let shuffle =
            (data.shuffle && !matches!(data.kind.as_str(), "batches" | "recall")).then_some(train.seed);
        let loader = Loader::new(training, shuffle)?;
        let validation = validation.map(|source| Loader::new(source, None)).transpose()?;
        if data.kind != "batches" && tokenizer.vocabulary() > model.vocab_size {
            let message = format!(
                "is {}, but the tokenizer has {} tokens; set it to that or more",
                model.vocab_size,
                tokenizer.vocabulary()
            );
            return Err(Error::config(CONFIG_FILE, "vocab_size", message));
        }
        if let Some([memory, _]) = machine_memory() {
            let count = Model::<E>::new(model).parameter_count();
            // Weights, gradients and two moments.
            if count > memory / 16 {
                let message = format!(
                    "the model has {count} parameters; with gradients and moments they take {:.0} GiB, and the machine \
                     has {:.0} GiB of memory",
                    count as f64 * 16.0 / 2f64.powi(30),
                    memory as f64 / 2f64.powi(30)
                );
                return Err(Error::Request(message));
            }
        }
        let policy = memory.over(model.mixer.policy().unwrap_or_default());
        if let Retention::Budget(_) = policy.retention {
            let message = format!(
                "is `{}`, which layers decide while decoding; train with `all`, `fenwick` or `recent:N`",
                policy.retention
            );
            return Err(Error::config(CONFIG_FILE, "retention", message));
        }
        let (architecture, parameters) = match &options.init_from {
            Some(from) => {
                let checkpoint = Checkpoint::open(from)?;
                let architecture = Model::new(model);
                let loaded = Model::load(engine, &checkpoint)?;
                if loaded.0.layout() != architecture.layout() {
                    let message = "has other parameters than the configuration's model";
                    return Err(Error::file(from, message));
                }
                (architecture, loaded.1)
            }
            None => {
                let architecture = Model::new(model);
                let parameters = architecture.init(engine, train.seed)?;
                (architecture, parameters)
            }
        };
        let settings = Settings { policy, recompute: train.recompute == "on" };
        let trainer =
            Trainer::new(engine, architecture, parameters, settings, train.clone(), data.sequence_length)?
                .with_ranks(ranks)?;
        let progress = Progress::default();
        let folder = folder.to_path_buf();
        Ok(Self { engine, config, folder, trainer, loader, validation, tokenizer, progress, options })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The trainer.
    pub fn trainer(&self) -> &Trainer<'e, E> {
        &self.trainer
    }

    /// The trainer, to be changed.
    pub fn trainer_mut(&mut self) -> &mut Trainer<'e, E> {
        &mut self.trainer
    }

    /// The run's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The lowest validation loss so far and its step.
    pub fn best(&self) -> Option<(u64, f64)> {
        self.progress.best
    }

    /// Makes the remaining steps, or fewer: once `stop` is set the step is finished and saved. Gives whether the run
    /// is complete.
    pub fn train(&mut self, stop: &AtomicBool, watch: &mut dyn FnMut(Event)) -> Result<bool> {
        let keys = self.config.train.clone();
        let path = self.folder.join(METRICS_FILE);
        let writes = self.trainer.rank().0 == 0;
        let metrics = writes.then(|| OpenOptions::new().create(true).append(true).open(&path));
        let mut metrics = metrics.transpose().map_err(Error::io(&path, "open"))?;
        let mut log = |line: Value| -> Result<()> {
            let Some(metrics) = &mut metrics else { return Ok(()) };
            writeln!(metrics, "{line}").map_err(Error::io(&path, "write"))
        };
        let started = (Instant::now(), self.trainer.step());
        let mut saved = (self.trainer.step() > 0).then_some(self.trainer.step());
        let mut first = true;
        loop {
            let step = self.trainer.step();
            let complete = step >= keys.steps;
            let due = |every: u64| complete || (every > 0 && step.is_multiple_of(every));
            // What is due at the step of a checkpoint was done before it was written.
            if !std::mem::replace(&mut first, false) || (step == 0 && complete) {
                if due(keys.validate_every) {
                    self.validate(&mut log, watch)?;
                }
                if due(keys.sample_every) && writes {
                    self.sample(&mut log, watch)?;
                }
            }
            let asked = stop.load(Ordering::Relaxed) || self.options.stop_at.is_some_and(|at| step >= at);
            // All processes stop after the same step.
            let mut any = [f64::from(u8::from(asked))];
            self.trainer.sum(&mut any)?;
            let asked = any[0] > 0.0;
            if step > 0 && saved != Some(step) && (asked || due(keys.save_every)) && writes {
                watch(Event::Saved(self.save()?));
                saved = Some(step);
            }
            if complete || asked {
                return Ok(complete);
            }
            let began = Instant::now();
            let report = self.trainer.advance(&mut self.loader)?;
            let seconds = began.elapsed().as_secs_f64();
            self.progress.cursor = self.loader.cursor();
            self.progress.tokens += report.tokens as u64;
            let step = self.trainer.step();
            let pace = started.0.elapsed().as_secs_f64() / (step - started.1) as f64;
            let tokens_per_second = report.tokens as f64 / seconds;
            let mut line = json!({
                "step": step, "loss": report.loss, "gradient_norm": report.gradient_norm,
                "learning_rate": report.rate, "tokens": self.progress.tokens,
                "tokens_per_second": tokens_per_second.round(),
            });
            if let Some(overlap) = &report.overlap {
                line["summing_hidden"] = json!(overlap.hidden());
            }
            log(line)?;
            let seconds_left = pace * (keys.steps - step) as f64;
            let steps = keys.steps;
            watch(Event::Step(StepLine { step, steps, report, tokens_per_second, seconds_left }));
        }
    }

    fn validate(
        &mut self,
        log: &mut dyn FnMut(Value) -> Result<()>,
        watch: &mut dyn FnMut(Event),
    ) -> Result<()> {
        let Some(loader) = &self.validation else { return Ok(()) };
        let step = self.trainer.step();
        let validation = self.trainer.validate(loader, self.config.train.validation_sequences)?;
        let Validation { loss, accuracy } = validation;
        let lowest = self.progress.best.is_none_or(|(_, best)| loss < best);
        if lowest {
            self.progress.best = Some((step, loss));
        }
        log(json!({ "step": step, "validation_loss": loss, "validation_accuracy": accuracy }))?;
        watch(Event::Validated(step, validation, lowest));
        Ok(())
    }

    fn sample(
        &mut self,
        log: &mut dyn FnMut(Value) -> Result<()>,
        watch: &mut dyn FnMut(Event),
    ) -> Result<()> {
        if matches!(self.config.data.kind.as_str(), "batches" | "recall") {
            return Ok(());
        }
        let (keys, step) = (&self.config.train, self.trainer.step());
        for (i, prompt) in keys.prompts.iter().enumerate() {
            let ids = self.tokenizer.encode(prompt)?;
            if ids.is_empty() {
                continue;
            }
            let seed = keys.seed.wrapping_add(step << 8).wrapping_add(i as u64);
            let sampling = Sampling { temperature: 0.8, seed, ..Sampling::default() };
            let tokens = continue_text(
                self.engine,
                self.trainer.model(),
                self.trainer.parameters(),
                &self.trainer.settings().policy,
                &ids,
                keys.sample_tokens,
                sampling,
            )?;
            let text = self.tokenizer.decode(&tokens)?;
            log(json!({ "step": step, "prompt": prompt, "sample": text }))?;
            append_sample(&self.folder.join(SAMPLES_FILE), step, prompt, &text)?;
            watch(Event::Sampled(step, prompt.clone(), text));
        }
        Ok(())
    }

    /// Writes a checkpoint and lets go of the oldest beyond those that are kept.
    fn save(&mut self) -> Result<PathBuf> {
        let folder = self.checkpoint(self.trainer.step());
        // Ids in a file of batches are not a tokenizer's.
        let tokenizer = (self.config.data.kind != "batches").then(|| self.tokenizer.to_json());
        self.trainer.save(&folder, &self.progress, tokenizer.as_deref())?;
        let all = self.checkpoints()?;
        for (_, old) in all.iter().take(all.len().saturating_sub(self.config.train.keep)) {
            fs::remove_dir_all(old).map_err(Error::io(old, "remove"))?;
        }
        Ok(folder)
    }

    /// Where the checkpoint of a step is.
    fn checkpoint(&self, step: u64) -> PathBuf {
        self.folder.join(CHECKPOINTS).join(format!("step-{step}"))
    }

    /// The checkpoints by step.
    fn checkpoints(&self) -> Result<Vec<(u64, PathBuf)>> {
        let folder = self.folder.join(CHECKPOINTS);
        let mut list = Vec::new();
        for entry in fs::read_dir(&folder).map_err(Error::io(&folder, "read"))? {
            let path = entry.map_err(Error::io(&folder, "read"))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if let Some(step) = name.strip_prefix("step-").and_then(|step| step.parse().ok()) {
                list.push((step, path));
            }
        }
        list.sort();
        Ok(list)
    }

    /// Takes away the lines of steps that will be made again.
    fn forget_later_metrics(&self) -> Result<()> {
        let path = self.folder.join(METRICS_FILE);
        let Ok(text) = fs::read_to_string(&path) else { return Ok(()) };
        let step = self.trainer.step();
        let lines: Vec<(&str, Value)> = text
            .lines()
            .filter_map(|line| Some((line, serde_json::from_str::<Value>(line).ok()?)))
            .filter(|(_, value)| value["step"].as_u64().is_some_and(|at| at <= step))
            .collect();
        let kept: String = lines.iter().flat_map(|(line, _)| [*line, "\n"]).collect();
        disk::replace(&path, kept.as_bytes())?;
        let samples = self.folder.join(SAMPLES_FILE);
        disk::replace(&samples, b"")?;
        for (_, value) in &lines {
            if let (Some(at), Some(prompt), Some(text)) =
                (value["step"].as_u64(), value["prompt"].as_str(), value["sample"].as_str())
            {
                append_sample(&samples, at, prompt, text)?;
            }
        }
        Ok(())
    }
}

fn append_sample(path: &Path, step: u64, prompt: &str, text: &str) -> Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    let write = file.and_then(|mut file| writeln!(file, "== step {step}\n{prompt}{text}\n"));
    write.map_err(Error::io(path, "write"))
}

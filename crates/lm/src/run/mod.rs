//! A run: the training loop (validate, sample, save, step, log), and the folder that holds all of its results.
//!
//! ```text
//! RUN/config.toml            the complete configuration, with defaults filled in
//! RUN/run.json               what the run was started with, compared when it resumes
//! RUN/environment.json       the program and machine of each session
//! RUN/metrics.jsonl          one line per step, validation and sample; the source of reports
//! RUN/metrics-discarded.jsonl    lines of steps that were repeated after a resume
//! RUN/samples.txt            the samples, for reading
//! RUN/data/                  the tokens of a text that was given when the run was started
//! RUN/checkpoints/step-N/    a checkpoint that any command accepts, and what resuming needs
//! ```

mod environment;
mod folder;
mod metrics;
mod record;
mod start;
mod training;
mod upcycle;

use std::path::{Path, PathBuf};

use march_engine::Device;

pub use environment::Session;
use folder::{CONFIG_FILE, Folder};
pub use metrics::{Lines, read_metrics};
use record::Record;
pub use upcycle::Upcycle;

use crate::anchors::Retention;
use crate::checkpoint::verify_folder;
use crate::data::{DataConfig, DataKind, Loader, Sources};
use crate::error::{Error, Result};
use crate::model::{Model, Settings};
use crate::recipe::Config;
use crate::tokenizer::Tokenizer;
use crate::train::ranks::Ranks;
use crate::train::{
    MemoryPlan, Progress, Recompute, StepMemory, StepReport, Trainer, Validation, machine_memory,
    training_bytes,
};

/// The name that errors use for a complete configuration, built from a file, a preset and settings.
const CONFIGURATION: &str = "configuration";

/// The folder of a run that holds the tokens of a text given when the run was started.
pub const DATA_FOLDER: &str = "data";

/// Options for starting or resuming a run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Take the initial weights from this checkpoint. If the configured model extends the checkpoint's, its additions
    /// start such that it computes nearly the same.
    pub init_from: Option<PathBuf>,
    /// The initial bias of the null route in that case, instead of one that depends on the number of anchors.
    pub upcycle_null_bias: Option<f64>,
    /// Stop after this step, as if interrupted.
    pub stop_at: Option<u64>,
    /// Settings that change when a run resumes, each as `section.key=value`.
    pub settings: Vec<String>,
}

/// A completed step, for display.
#[derive(Clone, Debug)]
pub struct StepLine {
    /// Number of completed steps.
    pub step: u64,
    /// Total number of steps.
    pub steps: u64,
    /// The result of the step.
    pub report: StepReport,
    /// Tokens per second in this step.
    pub tokens_per_second: f64,
    /// Estimated seconds for the remaining steps, at the average pace so far.
    pub seconds_left: f64,
}

/// An event during a run.
#[derive(Clone, Debug)]
pub enum Event {
    /// A step was completed.
    Step(StepLine),
    /// The validation at a step, and whether its loss is the lowest so far.
    Validated(u64, Validation, bool),
    /// A sample: step, prompt, text.
    Sampled(u64, String, String),
    /// A checkpoint was written.
    Saved(PathBuf),
    /// A checkpoint could not be used, and why; it was set aside.
    SetAside(PathBuf, String),
    /// The run resumed from this checkpoint.
    Resumed(PathBuf),
}

/// A trainer, its data and its folder.
pub struct Run {
    config: Config,
    folder: Folder,
    trainer: Trainer,
    loader: Loader,
    validation: Option<Loader>,
    tokenizer: Tokenizer,
    progress: Progress,
    /// The contents of `run.json`, in the process that writes.
    record: Option<Record>,
    /// Whether the run resumed from a checkpoint.
    restored: bool,
    options: RunOptions,
}

impl Run {
    /// Opens the data, creates a trainer before its first step, and then opens the folder.
    fn new(
        device: &Device,
        config: Config,
        options: RunOptions,
        ranks: Box<dyn Ranks>,
        folder: impl FnOnce() -> Result<Folder>,
    ) -> Result<Self> {
        let Config { model, data, train } = &config;
        let Sources { training, validation, tokenizer } =
            Sources::open(data, train.seed, train.validation_sequences)?;
        let shuffle = (data.shuffle && data.kind.is_text()).then_some(train.seed);
        let loader = Loader::new(training, shuffle)?;
        let validation = validation.map(|source| Loader::new(source, None)).transpose()?;
        if data.kind.has_tokenizer() && tokenizer.vocabulary() > model.vocab_size {
            let message = format!(
                "is {}, but the tokenizer has {} tokens; set it to that or more",
                model.vocab_size,
                tokenizer.vocabulary()
            );
            return Err(Error::config(CONFIGURATION, "vocab_size", message));
        }
        if let Some([memory, _]) = machine_memory() {
            let needed = training_bytes(&Model::new(model), train.only);
            if needed > memory {
                let gib = |bytes: usize| bytes as f64 / 2f64.powi(30);
                let message = format!(
                    "the model has {} parameters; with the gradients and moments of those that are trained they take \
                     {:.0} GiB, and the machine has {:.0} GiB of memory",
                    Model::new(model).parameter_count(),
                    gib(needed),
                    gib(memory)
                );
                return Err(Error::Request(message));
            }
        }
        let policy = model.policy().unwrap_or_default();
        if let Retention::Budget(_) = policy.retention {
            let message = format!(
                "is `{}`, which each layer decides while decoding; train with `all`, `fenwick` or `recent:N`",
                policy.retention
            );
            return Err(Error::config(CONFIGURATION, "retention", message));
        }
        let (architecture, parameters) = match &options.init_from {
            Some(from) => start::load(device, model, from, train.seed)?,
            None => {
                let architecture = Model::new(model);
                let parameters = architecture.init(device, train.seed)?;
                (architecture, parameters)
            }
        };
        let settings =
            Settings { policy, recompute: train.recompute == Recompute::On, ..Settings::default() };
        let trainer = Trainer::new(architecture, parameters, settings, train.clone(), data.sequence_length)?
            .with_ranks(ranks)?;
        Ok(Self {
            folder: folder()?,
            config,
            trainer,
            loader,
            validation,
            tokenizer,
            progress: Progress::default(),
            record: None,
            restored: false,
            options,
        })
    }

    /// Starts a run in a new folder. Everything that determines its result is in the folder before the first step.
    pub fn create(
        device: &Device,
        mut config: Config,
        folder: &Path,
        options: RunOptions,
        ranks: Box<dyn Ranks>,
    ) -> Result<Self> {
        let writes = ranks.rank() == 0;
        let refuse_run = || {
            let taken = folder.join(CONFIG_FILE).exists() || Record::exists(folder);
            let message = "already holds a run; continue it with --resume, or choose another folder";
            if writes && taken { Err(Error::file(folder, message)) } else { Ok(()) }
        };
        refuse_run()?;
        // Absolute paths, so that a run can be resumed from any working directory.
        config.data.make_absolute()?;
        if let Some(from) = &options.init_from {
            start::adapt(&mut config, from, options.upcycle_null_bias)?;
        }
        let mut run = Self::new(device, config, options, ranks, || Folder::create(folder, writes))?;
        // Another process may have started one in the meantime.
        refuse_run()?;
        if writes {
            match run.folder.checkpoints()?.as_slice() {
                [] => {}
                // Left by a run that was killed before its record was written.
                [(0, _)] => run.folder.prune(0)?,
                _ => {
                    let message = format!("has checkpoints but no `{CONFIG_FILE}`; choose another folder");
                    return Err(Error::file(folder, message));
                }
            }
            let init_from = run.options.init_from.clone();
            if init_from.is_some() {
                run.save()?;
            }
            let (data, validation) = run.fingerprints()?;
            let saved = init_from.is_some();
            let record = Record::new(&run.config, data, validation, init_from, saved);
            record.write(folder)?;
            run.record = Some(record);
        }
        Ok(run)
    }

    /// Resumes a run from its newest valid checkpoint; a run that was stopped before its first checkpoint starts from
    /// the beginning. Damaged checkpoints are set aside and reported to `watch`. Fails if no checkpoint can be used, or
    /// if the configuration or data has changed; then nothing is modified.
    pub fn resume(
        device: &Device,
        folder: &Path,
        options: RunOptions,
        ranks: Box<dyn Ranks>,
        watch: &mut dyn FnMut(Event),
    ) -> Result<Self> {
        let writes = ranks.rank() == 0;
        let own = Folder::open(folder, writes)?;
        let record = Record::read(folder)?;
        let mut config = Record::config(folder, record.as_ref(), &options.settings)?;
        follow_data(&mut config.data, folder);
        config.data.make_absolute()?;
        let mut run = Self::new(device, config, options, ranks, || Ok(own))?;
        let (data, validation) = run.fingerprints()?;
        if let Some(record) = &record {
            record.check_data(&run.config.data, &data, validation.as_deref())?;
        }
        if writes {
            let init_from = record.as_ref().and_then(|record| record.init_from.clone());
            let saved = record.as_ref().and_then(|record| record.saved);
            run.restore_newest(saved.or(init_from.is_some().then_some(true)), watch)?;
            let (made, steps) = (run.trainer.step(), run.config.train.steps);
            if made > steps {
                return Err(Error::Request(format!(
                    "{}: the run is already at step {made}, beyond the requested {steps} steps; give \
                     --steps {made} or more, or start a new run",
                    folder.display()
                )));
            }
            let Progress { metric_lines, pending, .. } = run.progress;
            let lines = run.folder.discard_metrics_after(made, metric_lines, pending)?;
            run.progress.metric_lines = Some(lines);
            let now = Record::new(&run.config, data, validation, init_from, run.restored);
            if record.as_ref() != Some(&now) {
                now.write(folder)?;
            }
            run.record = Some(now);
        }
        // The other processes use the checkpoint that process 0 chose.
        let mut found = [0.0; 2];
        if writes && run.restored {
            found = [1.0, run.trainer.step() as f64];
        }
        run.trainer.sum(&mut found)?;
        if !writes && found[0] > 0.0 {
            let step = found[1] as u64;
            run.progress = run.trainer.restore(&run.folder.checkpoint(step), Some(step))?;
            run.restored = true;
        }
        run.loader.seek(run.progress.cursor);
        Ok(run)
    }

    /// Restores the newest valid checkpoint, and sets aside damaged ones that are newer. `saved` is whether one was
    /// ever written, if known: such a run does not start over.
    fn restore_newest(&mut self, saved: Option<bool>, watch: &mut dyn FnMut(Event)) -> Result<()> {
        let mut damaged: Vec<(PathBuf, Error)> = Vec::new();
        for (step, checkpoint) in self.folder.checkpoints()?.into_iter().rev() {
            match self.trainer.restore(&checkpoint, Some(step)) {
                Ok(progress) => {
                    self.progress = progress;
                    self.restored = true;
                    for (damaged, why) in damaged {
                        self.folder.put_aside(&damaged)?;
                        watch(Event::SetAside(damaged, why.to_string()));
                    }
                    watch(Event::Resumed(checkpoint));
                    return Ok(());
                }
                Err(error) if error.is_damage() => damaged.push((checkpoint, error)),
                // Damage can make a checkpoint look like that of another model. One with correct checksums that cannot
                // be used or read right now may still be the best one.
                Err(error) => match verify_folder(&checkpoint) {
                    Err(damage) if damage.is_damage() => damaged.push((checkpoint, damage)),
                    _ => return Err(error),
                },
            }
        }
        let refuse = |why: String| {
            let remedy = "Nothing was changed. Restore a checkpoint from a copy, or start a new run";
            Err(Error::file(self.folder.path(), format!("no checkpoint can be used: {why}. {remedy}")))
        };
        if !damaged.is_empty() {
            let list: Vec<String> = damaged.iter().map(|(_, why)| format!("\n  {why}")).collect();
            return refuse(list.concat() + "\n");
        }
        let aside = self.folder.set_aside()?;
        if !aside.is_empty() {
            return refuse(format!("all are damaged and were renamed: {}", aside.join(", ")));
        }
        // A run that reached its first checkpoint and has none now has lost its checkpoints. Earlier versions of the
        // program did not record this; their run had reached one if it went past that step.
        let (last, every) = (self.folder.last_logged_step()?, self.config.train.save_every);
        if saved.unwrap_or(every > 0 && last > every) {
            return refuse(format!(
                "there is none, although the run is at step {last} and has written a checkpoint"
            ));
        }
        Ok(())
    }

    /// The fingerprints of the training data and of the validation data.
    fn fingerprints(&self) -> Result<(String, Option<String>)> {
        let of = |loader: &Loader| loader.source().fingerprint();
        let tokenizer = self.tokenizer.hash();
        let data = format!("{} {}", of(&self.loader)?, &tokenizer[..16.min(tokenizer.len())]);
        Ok((data, self.validation.as_ref().map(of).transpose()?))
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The trainer.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// The run's folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Decides how the run uses the memory of its device; see [`Trainer::plan_memory`].
    pub fn plan_memory(
        &mut self,
        cpu: &Device,
        measured: Option<StepMemory>,
        available: Option<usize>,
    ) -> Result<MemoryPlan> {
        self.trainer.plan_memory(cpu, measured, available)
    }

    /// The lowest validation loss so far and its step.
    pub fn best(&self) -> Option<(u64, f64)> {
        self.progress.best
    }
}

/// Finds the tokens in the run's own folder if that has moved.
fn follow_data(data: &mut DataConfig, folder: &Path) {
    let own = folder.join(DATA_FOLDER);
    let was_own = |path: &String| {
        let path = Path::new(path);
        path.file_name().is_some_and(|name| name == DATA_FOLDER) && !path.exists()
    };
    if data.kind == DataKind::Shards && data.path.as_ref().is_some_and(was_own) && own.is_dir() {
        data.path = Some(own.to_string_lossy().into_owned());
    }
}

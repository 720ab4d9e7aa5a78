//! `march train`: trains a model, in a run folder that preserves all work.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use clap::Args;
use march_lm::Config;
use march_lm::checkpoint::Checkpoint;
use march_lm::engine::{Cpu, Device, Products};
use march_lm::model::{Model, Settings};
use march_lm::run::{Event, Run, RunOptions, Session};
use march_lm::train::ranks::{Ranks, SingleProcess};
use march_lm::train::{MemoryPlan, Recompute, StepMemory, machine_memory, training_bytes};

use super::open::newest;
use super::train_text::{NewFolders, Request};
use crate::device::{DeviceArgs, available_memory, gpu};
use crate::display::out::{note, say};
use crate::display::{Dashboard, RunInfo, bytes, lines, thousands};
use crate::{interrupt, job, machine, number};

/// Train a model, or continue a run that was stopped.
#[derive(Args)]
#[command(after_help = "Examples:
  march train configs/tiny/march.toml
  march train book.txt
  march train tiny/gdn --data texts
  march train tiny/gdn --run runs/gdn --set train.steps=100 --set train.learning_rate=1e-3
  march train --resume runs/gdn --dashboard
  march train --resume runs/gdn --steps 2000
  march train tiny/march --init-from runs/gdn
  march train --init-from models/upcycled --data texts --only routing

Without [data], the model is trained on a built-in book. A text is encoded with the tokenizer of the configuration,
which is bytes in the tiny presets, into RUN/data, and its last tenth is held out for validation. Ctrl-C saves a checkpoint of the last finished step,
prints how to resume, and exits with code 130. A checkpoint RUN/checkpoints/step-N is an ordinary model
folder. With --resume, --set can change settings that do not affect the weights, such as train.save_every, and
the paths in [data], if the same data has moved. --steps makes a run longer or shorter: from there on, the
learning rate follows the schedule over the new number of steps.")]
pub struct Train {
    /// A TOML file, the name of a preset, or a text to train tiny/march on
    #[arg(value_name = "FILE|PRESET|TEXT", required_unless_present_any = ["resume", "data"], conflicts_with = "resume")]
    config: Option<String>,
    /// Train on this text (.txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet), on all texts in this folder, or on this folder
    /// of tokens
    #[arg(long, value_name = "FILE|DIR", conflicts_with = "resume")]
    data: Option<PathBuf>,
    /// Override a key; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    settings: Vec<String>,
    /// Total number of steps, same as `--set train.steps=N`; with --resume it makes the run longer or shorter
    #[arg(long, value_name = "N", value_parser = number::count::<u64>)]
    steps: Option<u64>,
    /// The run's folder [default: runs/NAME after the configuration or the text, with a number if that exists]
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    run: Option<PathBuf>,
    /// Continue this run from its newest valid checkpoint
    #[arg(long, value_name = "RUN")]
    resume: Option<PathBuf>,
    /// Start with the weights of this checkpoint, or of the newest checkpoint of this run; a Gated DeltaNet can continue
    /// as MARCH of the same sizes. Without a configuration, the model is that of the checkpoint
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    init_from: Option<PathBuf>,
    /// When a Gated DeltaNet continues as MARCH: the initial bias of the null route, instead of model.null_bias_init
    /// [default: 5 + ln of the number of anchors that the last token of a sequence sees]
    #[arg(long, value_name = "X", requires = "init_from")]
    upcycle_null_bias: Option<f64>,
    /// Train only the parameters that routing adds to the recurrence: the others stay as they are and take no memory for
    /// gradients; same as `--set train.only=routing`
    #[arg(long, value_name = "routing", value_parser = ["routing"], conflicts_with = "resume")]
    only: Option<String>,
    /// Stop after this step and save, as if interrupted
    #[arg(long, value_name = "STEP", value_parser = number::whole::<u64>)]
    stop_at: Option<u64>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Show a full-screen dashboard of curves and numbers instead of lines; q finishes the step, saves and stops
    #[arg(long)]
    dashboard: bool,
}

impl Train {
    /// Trains until all steps are done or the run is interrupted.
    pub fn run(self) -> anyhow::Result<()> {
        let stop = interrupt::listen("saving a checkpoint")?;
        if job::launched() {
            return job::together(stop, |ranks, threads| self.train(ranks, threads, stop));
        }
        self.train(Box::<SingleProcess>::default(), 0, stop)
    }

    fn train(&self, mut ranks: Box<dyn Ranks>, threads: usize, stop: &AtomicBool) -> anyhow::Result<()> {
        let threads = if self.device.threads > 0 { self.device.threads } else { threads };
        let args = DeviceArgs { threads, ..self.device };
        let device = args.open(Products::Fastest)?;
        // The memory of a step is measured on the processor.
        let cpu = match device.backend::<Cpu>() {
            Some(_) => device.clone(),
            None => args.cpu(Products::Fastest)?,
        };
        let mut settings = self.settings.clone();
        settings.extend(self.steps.map(|steps| format!("train.steps={steps}")));
        settings.extend(self.only.iter().map(|only| format!("train.only={only}")));
        let init_from = self.init_from.as_deref().map(newest);
        let options = RunOptions {
            init_from,
            upcycle_null_bias: self.upcycle_null_bias,
            stop_at: self.stop_at,
            settings: settings.clone(),
        };
        let speaks = ranks.rank() == 0;
        let mut past = Vec::new();
        let mut note = |event: Event| {
            if speaks {
                past.push(event.clone());
                lines::show(event);
            }
        };
        let mut measured = None;
        let mut run = match (&self.resume, &self.config) {
            (Some(folder), _) => {
                gpu::self_test(&device)?;
                Run::resume(&device, folder, options, ranks, &mut note)?
            }
            (None, config) => {
                let request = Request::new(config.as_deref(), self.data.as_deref(), &settings)?;
                let mut config = match (config, &options.init_from) {
                    (None, Some(from)) => continued(&request.config, from, &settings)?,
                    _ => Config::load_with(&request.config, &settings)?,
                };
                let folder = self.run.clone().unwrap_or_else(|| free_folder(&request.name));
                // Check before a folder is created that would have to be removed.
                let rows = config.train.tokens_per_step / config.data.sequence_length;
                let rows = ranks.share(rows).len().min(config.train.micro_batch);
                if device == cpu {
                    measured = refuse_beyond_machine(&cpu, &config, rows, ranks.count())?;
                }
                gpu::self_test(&device)?;
                let fresh = request.prepare(&mut config, &folder, &settings, &mut *ranks)?;
                let run = Run::create(&device, config, &folder, options, ranks)?;
                fresh.into_iter().for_each(NewFolders::keep);
                run
            }
        };
        let plan = run.plan_memory(&cpu, measured, available_memory(&device))?;
        introduce(&run, &plan, &device, threads);
        let session = machine::session(&device, threads, run.trainer().step(), run.trainer().rank().1);
        if speaks && let Err(error) = session.record(run.folder()) {
            note!("note          {error}"); // no reason not to train
        }
        let dashboard = (self.dashboard && speaks).then(|| open_dashboard(&run, past)).flatten();
        let complete = run.train(stop, &mut |event| match &dashboard {
            Some(dashboard) => dashboard.show(event),
            None if speaks => lines::show(event),
            None => {}
        });
        drop(dashboard); // the terminal is what it was
        let (folder, device) = (run.folder().display().to_string(), self.device.device.flag());
        match complete {
            _ if !speaks => complete.map(drop).map_err(Into::into),
            Ok(true) => {
                let best = run
                    .best()
                    .map(|(step, loss)| format!(", lowest validation loss {loss:.4} at step {step}"));
                lines::say(&format!("done: {folder}{}", best.unwrap_or_default()));
                lines::say(&format!(
                    "memory        peak {}",
                    machine::peak().map_or("unknown".into(), bytes)
                ));
                Ok(())
            }
            Ok(false) => {
                let step = run.trainer().step();
                lines::say(&format!(
                    "stopped after step {step}; continue: march train --resume {folder}{device}"
                ));
                if interrupt::asked() {
                    // Dropping the run releases the lock on its folder.
                    drop(run);
                    interrupt::leave();
                }
                Ok(())
            }
            Err(error) => {
                note!("continue from the last checkpoint: march train --resume {folder}{device}");
                Err(error.into())
            }
        }
    }
}

/// `runs/<name>`, with a number if that exists.
pub fn free_folder(config: &str) -> PathBuf {
    let stem = config.trim_end_matches(".toml").trim_start_matches("configs/").replace(['/', '\\'], "-");
    let stem = stem.trim_matches(['-', '.']).to_string();
    let first = PathBuf::from("runs").join(&stem);
    let numbered = (2..).map(|n| PathBuf::from("runs").join(format!("{stem}-{n}")));
    std::iter::once(first).chain(numbered).find(|path| !path.exists()).unwrap_or_default()
}

/// The configuration for a checkpoint's own model, on a text that is given on the command line.
fn continued(preset: &str, from: &Path, settings: &[String]) -> anyhow::Result<Config> {
    let checkpoint = Checkpoint::open(from)?;
    let only = settings.iter().any(|setting| setting.replace([' ', '"'], "") == "train.only=routing");
    // Small steps for weights that are good already; new ones may learn faster.
    let rate = if only { 1e-3 } else { 1e-4 };
    let mut all = vec![format!("train.learning_rate={rate}"), "train.micro_batch=1".into()];
    let tokenizer = from.join("tokenizer.json");
    if tokenizer.is_file() {
        all.push(format!("data.tokenizer={}", serde_json::to_string(&tokenizer.to_string_lossy())?));
    }
    all.extend(settings.iter().cloned());
    Ok(Config::with_model(preset, checkpoint.config(), &all)?)
}

/// Rejects a step that takes more memory than the machine has, because the system would kill the process. Does not
/// reject a configuration that will be rejected for another reason.
/// Returns what was measured.
fn refuse_beyond_machine(
    cpu: &Device,
    config: &Config,
    rows: usize,
    processes: usize,
) -> anyhow::Result<Option<StepMemory>> {
    let Some([machine, _]) = machine_memory() else { return Ok(None) };
    if training_bytes(&Model::new(&config.model), config.train.only) > machine {
        return Ok(None);
    }
    let settings = Settings { policy: config.model.policy().unwrap_or_default(), ..Default::default() };
    let (length, only) = (config.data.sequence_length, config.train.only);
    let measured = StepMemory::measure(cpu, &config.model, &settings, length, only);
    let Ok(measured) = measured else { return Ok(None) };
    let memory = measured.of(rows, processes);
    let off = config.train.recompute == Recompute::Off;
    let needed = memory.parameters.saturating_add(if off { memory.activations } else { memory.recomputed });
    if needed <= machine {
        return Ok(Some(measured));
    }
    let advice = match (memory.parameters > machine, off) {
        (true, _) => "use a smaller model",
        (_, true) => "lower train.micro_batch or data.sequence_length, or set train.recompute to auto",
        _ => "lower train.micro_batch or data.sequence_length",
    };
    bail!(
        "a step would take about {} of memory, and the machine has {}; {advice}",
        bytes(needed),
        bytes(machine)
    )
}

/// Prints what is about to happen.
fn introduce(run: &Run, plan: &MemoryPlan, device: &Device, threads: usize) {
    let MemoryPlan { step, available, recompute } = plan;
    let (data, train) = (&run.config().data, &run.config().train);
    let trainer = run.trainer();
    let model = trainer.model();
    let (rank, ranks) = trainer.rank();
    if rank > 0 {
        return;
    }
    say!("run           {}", run.folder().display());
    say!(
        "model         {}, {} parameters",
        model.config().mixer.model_type(),
        thousands(model.parameter_count())
    );
    // An unreadable list of sessions is reported when this one is added to it.
    let before = Session::all(run.folder()).unwrap_or_default().pop().map(|session| session.device);
    if let Some(line) = device_line(&device.to_string(), before.as_deref()) {
        say!("device        {line}");
    }
    let policy = &trainer.settings().policy;
    if *policy != model.config().mixer.policy().unwrap_or_default() {
        say!("anchors       {policy}");
    }
    say!(
        "steps         {} of {} tokens: sequences of {}, {} at once",
        thousands(train.steps as usize),
        thousands(train.tokens_per_step),
        thousands(data.sequence_length),
        train.micro_batch
    );
    say!(
        "memory        about {} per step, {} with activation recomputation ({}); {} available",
        bytes(step.parameters + step.activations),
        bytes(step.parameters + step.recomputed),
        if *recompute { "on" } else { "off" },
        available.map_or("unknown".into(), bytes)
    );
    if ranks > 1 {
        let threads = machine::threads_in_use(threads);
        say!("processes     {ranks} of {threads} threads; memory is per process");
    }
}

/// The name of the processor as a device.
const CPU: &str = "cpu";

/// The device, if it is a GPU or if the run was on another device before.
fn device_line(name: &str, before: Option<&str>) -> Option<String> {
    // Sessions of earlier versions do not name it.
    let before = before.map(|before| if before.is_empty() { CPU } else { before });
    match before.filter(|before| *before != name) {
        Some(before) => {
            Some(format!("{name}; until now the run was on {before}, which may differ in the last digits"))
        }
        None => (name != CPU).then(|| name.into()),
    }
}

/// Opens the dashboard, or prints that there is none.
fn open_dashboard(run: &Run, past: Vec<Event>) -> Option<Dashboard> {
    // A launcher is between its processes and the terminal.
    if job::launched()
        || !std::io::stdout().is_terminal()
        || std::env::var("TERM").is_ok_and(|name| name == "dumb")
    {
        note!("note          no dashboard: the output is not an interactive terminal");
        return None;
    }
    let model = run.trainer().model();
    let about = RunInfo {
        folder: run.folder().to_path_buf(),
        model: model.config().mixer.model_type().to_string(),
        parameters: model.parameter_count(),
        step: run.trainer().step(),
        steps: run.config().train.steps,
    };
    let dashboard = Dashboard::open(about, past);
    dashboard.inspect_err(|error| note!("note          no dashboard: {error}")).ok()
}

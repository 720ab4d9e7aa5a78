//! Training, with the same folder of a run as `march train`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use march_engine::{CpuOptions, Device};
use march_lm::Config;
use march_lm::checkpoint::newest;
use march_lm::run::{Event, Run, RunOptions, read_metrics};
use march_lm::train::machine_memory;
use march_lm::train::ranks::SingleProcess;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;
use serde_json::{Map, Value, json};

use crate::error::{Failure, Result, refuse};
use crate::model::{from_python, to_python};

/// How often Ctrl-C is noticed.
const PAUSE: Duration = Duration::from_millis(50);

/// Trains a model in a folder, as `march train` does, and returns the metrics of the run, a list of dicts.
///
/// `config` is the name of a preset, the path of a TOML file, or a dict with the sections `model`, `memory`, `data` and
/// `train`, or with `extends` and what changes. `settings` are changes of a preset or a file, such as "train.steps=20"; a
/// run that is resumed takes some too. With `resume=True` the
/// run in `folder` goes on, and `config` is left out.
///
/// Each of `callbacks` is called with every event, a dict: `event` is "step", "validated", "sampled", "saved", "set_aside"
/// or "resumed". A callback that returns `False` stops the run. So does Ctrl-C. A run that is stopped is saved first, and
/// resumes as if it had not stopped.
#[pyfunction]
#[pyo3(signature = (config = None, folder = None, *, callbacks = None, settings = None, resume = false,
                    init_from = None, threads = None))]
pub fn train<'py>(
    py: Python<'py>,
    config: Option<&Bound<'py, PyAny>>,
    folder: Option<PathBuf>,
    callbacks: Option<Vec<Py<PyAny>>>,
    settings: Option<Vec<String>>,
    resume: bool,
    init_from: Option<PathBuf>,
    threads: Option<usize>,
) -> Result<Bound<'py, PyAny>> {
    let (callbacks, settings) = (callbacks.unwrap_or_default(), settings.unwrap_or_default());
    let Some(folder) = folder else {
        return Err(PyTypeError::new_err("train needs `folder`, where the run is kept").into());
    };
    let config = match (config, resume) {
        (Some(config), false) => Some(read_config(config, &settings)?),
        (None, true) => None,
        (Some(_), true) => return refuse("a run that is resumed has its configuration; leave `config` out"),
        (None, false) => {
            return refuse("train needs `config`, or resume=True to go on with the run in `folder`");
        }
    };
    let init_from = init_from.as_deref().map(newest);
    let options = RunOptions { init_from, upcycle_null_bias: None, stop_at: None, settings };
    let stop = AtomicBool::new(false);
    let work = |watch: &mut dyn FnMut(Event)| -> march_lm::Result<()> {
        let device = Device::cpu(CpuOptions { threads: threads.unwrap_or(0), ..CpuOptions::default() })?;
        let ranks = Box::<SingleProcess>::default();
        let mut run = match config {
            Some(config) => Run::create(&device, config, &folder, options, ranks)?,
            None => Run::resume(&device, &folder, options, ranks, watch)?,
        };
        run.plan_memory(&device, None, machine_memory().map(|[_, available]| available))?;
        run.train(&stop, watch)?;
        Ok(())
    };
    watched(py, &stop, &callbacks, work)?;
    metrics(py, folder)
}

/// The metrics of a run: one dict for each step, validation and sample.
#[pyfunction]
pub fn metrics(py: Python<'_>, folder: PathBuf) -> Result<Bound<'_, PyAny>> {
    let path = folder.join("metrics.jsonl");
    if !path.exists() && folder.is_dir() {
        return to_python(py, &Value::Array(Vec::new()));
    }
    to_python(py, &Value::Array(read_metrics(&path)?))
}

/// Runs `work` on a thread of its own. This thread calls the callbacks, while `work` waits, and looks for Ctrl-C; either
/// may set `stop`.
fn watched(
    py: Python<'_>,
    stop: &AtomicBool,
    callbacks: &[Py<PyAny>],
    work: impl FnOnce(&mut dyn FnMut(Event)) -> march_lm::Result<()> + Send,
) -> Result<()> {
    let mut raised: Option<PyErr> = None;
    let result = py.detach(|| {
        std::thread::scope(|scope| {
            let (send, events) = sync_channel(0);
            let (answer, answered) = sync_channel::<()>(0);
            let worker = scope.spawn(move || {
                work(&mut |event| {
                    let _ = send.send(event).map(|()| answered.recv());
                })
            });
            loop {
                let event = match events.recv_timeout(PAUSE) {
                    Ok(event) => Some(event),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => break,
                };
                let happened = Python::attach(|py| {
                    let go_on = event.as_ref().map_or(Ok(true), |event| tell(py, callbacks, event));
                    py.check_signals().and(go_on)
                });
                if !matches!(happened, Ok(true)) {
                    stop.store(true, Ordering::Relaxed);
                }
                raised = raised.take().or(happened.err());
                if event.is_some() {
                    let _ = answer.send(());
                }
            }
            worker.join()
        })
    });
    match (raised, result) {
        (Some(error), _) => Err(error.into()),
        (None, Ok(result)) => result.map_err(Failure::from),
        (None, Err(panic)) => std::panic::resume_unwind(panic),
    }
}

/// Calls the callbacks. Returns whether to go on.
fn tell(py: Python<'_>, callbacks: &[Py<PyAny>], event: &Event) -> PyResult<bool> {
    let mut go_on = true;
    for callback in callbacks {
        let answer = callback.call1(py, (to_python(py, &as_json(event))?,))?;
        go_on &= !answer.bind(py).is(pyo3::types::PyBool::new(py, false));
    }
    Ok(go_on)
}

fn as_json(event: &Event) -> Value {
    match event {
        Event::Step(line) => json!({
            "event": "step", "step": line.step, "steps": line.steps, "loss": line.report.loss,
            "gradient_norm": line.report.gradient_norm, "learning_rate": line.report.rate,
            "tokens_per_second": line.tokens_per_second, "seconds_left": line.seconds_left,
        }),
        Event::Validated(step, found, lowest) => json!({
            "event": "validated", "step": step, "validation_loss": found.loss,
            "validation_accuracy": found.accuracy, "lowest": lowest,
        }),
        Event::Sampled(step, prompt, text) => {
            json!({ "event": "sampled", "step": step, "prompt": prompt, "sample": text })
        }
        Event::Saved(path) => json!({ "event": "saved", "path": path }),
        Event::SetAside(path, why) => json!({ "event": "set_aside", "path": path, "why": why }),
        Event::Resumed(path) => json!({ "event": "resumed", "path": path }),
    }
}

/// A configuration from the name of a preset, the path of a file, or a dict.
fn read_config(config: &Bound<'_, PyAny>, settings: &[String]) -> Result<Config> {
    if let Ok(name) = config.cast::<PyString>() {
        return Ok(Config::load_with(name.to_cow()?.as_ref(), settings)?);
    }
    if let Ok(path) = config.extract::<PathBuf>() {
        return Ok(Config::load_with(&path.to_string_lossy(), settings)?);
    }
    if !settings.is_empty() {
        return refuse("`settings` change a preset or a file; change the dict itself");
    }
    let mut sections: Map<String, Value> = from_python(config, "config")?;
    drop_null(&mut sections);
    let text = toml::to_string(&sections).or_else(|error| refuse(format!("`config`: {error}")))?;
    Ok(Config::from_toml(&text, "config", Some(Path::new(".")))?)
}

/// TOML has no null: a key without a value is a key that is not there.
fn drop_null(map: &mut Map<String, Value>) {
    map.retain(|_, value| !value.is_null());
    map.values_mut().filter_map(Value::as_object_mut).for_each(drop_null);
}

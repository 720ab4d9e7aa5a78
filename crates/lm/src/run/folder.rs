//! A run's folder on disk: its owner, its checkpoints, and its metrics.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::metrics::read_metrics;
use crate::disk::{self, Lock, seal};
use crate::error::{Error, Result};

pub(super) const CONFIG_FILE: &str = "config.toml";
const LOCK_FILE: &str = "run.lock";
const METRICS_FILE: &str = "metrics.jsonl";
const DISCARDED_FILE: &str = "metrics-discarded.jsonl";
const SAMPLES_FILE: &str = "samples.txt";
const CHECKPOINTS: &str = "checkpoints";
/// Part of the name of a checkpoint that was found to be damaged.
const DAMAGED: &str = ".damaged-";

/// A run's folder.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// Held by the process that writes.
    _lock: Option<Lock>,
}

impl Folder {
    /// Opens the folder of a new run, creating it if needed. The process that `writes` becomes its only owner.
    pub fn create(path: &Path, writes: bool) -> Result<Self> {
        if !writes {
            return Ok(Self { path: path.into(), _lock: None });
        }
        let checkpoints = path.join(CHECKPOINTS);
        fs::create_dir_all(&checkpoints).map_err(Error::io(&checkpoints, "create"))?;
        Self::open(path, true)
    }

    /// Opens the folder of an existing run. The process that `writes` becomes its only owner, and removes what a dead
    /// process left unfinished.
    pub fn open(path: &Path, writes: bool) -> Result<Self> {
        if !path.is_dir() {
            let wrong = if path.exists() { "is not a folder" } else { "does not exist" };
            let message = format!("{wrong}; a run's folder has a `{CONFIG_FILE}` (march train writes it)");
            return Err(Error::file(path, message));
        }
        let lock = match writes {
            true => match Lock::take(&path.join(LOCK_FILE))? {
                Some(lock) => Some(lock),
                None => {
                    let message =
                        "another process is training this run; wait until it ends, or stop it first";
                    return Err(Error::file(path, message));
                }
            },
            false => None,
        };
        let folder = Self { path: path.into(), _lock: lock };
        if writes {
            folder.remove_partial()?;
        }
        Ok(folder)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn metrics(&self) -> PathBuf {
        self.path.join(METRICS_FILE)
    }

    /// The path of the checkpoint of a step.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.path.join(CHECKPOINTS).join(format!("step-{step}"))
    }

    /// The checkpoints by step, oldest first.
    pub fn checkpoints(&self) -> Result<Vec<(u64, PathBuf)>> {
        let step = |name: &str| name.strip_prefix("step-")?.parse().ok();
        let mut list: Vec<(u64, PathBuf)> =
            self.entries()?.into_iter().filter_map(|(name, path)| Some((step(&name)?, path))).collect();
        list.sort();
        Ok(list)
    }

    /// The names of checkpoints that were renamed because they are damaged.
    pub fn set_aside(&self) -> Result<Vec<String>> {
        Ok(self.entries()?.into_iter().map(|(name, _)| name).filter(|name| name.contains(DAMAGED)).collect())
    }

    /// Renames a damaged checkpoint, so that it is not used but kept.
    pub fn put_aside(&self, checkpoint: &Path) -> Result<()> {
        let named = |number: usize| {
            let mut name = checkpoint.as_os_str().to_owned();
            name.push(format!("{DAMAGED}{number}"));
            PathBuf::from(name)
        };
        let free = (1..).map(named).find(|path| !path.exists()).unwrap_or_default();
        fs::rename(checkpoint, &free).map_err(Error::io(checkpoint, "set aside"))
    }

    /// Removes all but the `keep` newest checkpoints. A process that dies midway leaves no partial checkpoint.
    pub fn prune(&self, keep: usize) -> Result<()> {
        let all = self.checkpoints()?;
        for (step, old) in all.iter().take(all.len().saturating_sub(keep)) {
            let away = old.with_file_name(format!(".step-{step}.partial-removed"));
            fs::rename(old, &away).map_err(Error::io(old, "remove"))?;
            fs::remove_dir_all(&away).map_err(Error::io(&away, "remove"))?;
        }
        Ok(())
    }

    /// Removes unfinished checkpoints.
    fn remove_partial(&self) -> Result<()> {
        for (name, path) in self.entries()? {
            if name.starts_with(".step-") && name.contains(".partial-") {
                fs::remove_dir_all(&path).map_err(Error::io(&path, "remove"))?;
            }
        }
        Ok(())
    }

    /// Names and paths in the folder of checkpoints.
    fn entries(&self) -> Result<Vec<(String, PathBuf)>> {
        let folder = self.path.join(CHECKPOINTS);
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(Error::io(&folder, "read"))?,
        };
        let mut list = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::io(&folder, "read"))?;
            list.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
        Ok(list)
    }

    /// Appends a line to the metrics, with its checksum.
    pub fn log(&self, line: &Value) -> Result<()> {
        append(&self.metrics(), &format!("{}\n", seal(&line.to_string())))
    }

    /// Appends a sample to the readable text file.
    pub fn log_sample(&self, step: u64, prompt: &str, text: &str) -> Result<()> {
        append(&self.path.join(SAMPLES_FILE), &sample(step, prompt, text))
    }

    /// The last step recorded in the metrics.
    pub fn last_logged_step(&self) -> Result<u64> {
        if !self.metrics().exists() {
            return Ok(0);
        }
        let lines = read_metrics(&self.metrics())?;
        Ok(lines.iter().filter_map(|line| line["step"].as_u64()).max().unwrap_or(0))
    }

    /// Removes the metrics of steps after `step`, which will be repeated; they are kept in a separate file. The samples
    /// are rewritten from what is left. Returns the number of remaining lines, and rejects a file whose number of lines
    /// differs from that at the time of the checkpoint. If validation or sampling was still `pending` at that step, its
    /// later lines are removed as well.
    pub fn discard_metrics_after(&self, step: u64, expected: Option<u64>, pending: bool) -> Result<u64> {
        let path = self.metrics();
        let Some(whole) = disk::read_if_present(&path)? else { return Ok(0) };
        let lines = read_metrics(&path)?;
        let (mut kept, mut discarded): (Vec<&Value>, Vec<&Value>) =
            lines.iter().partition(|line| line["step"].as_u64().is_some_and(|at| at <= step));
        if let Some(expected) = expected.filter(|expected| pending && *expected < kept.len() as u64) {
            discarded.splice(0..0, kept.split_off(expected as usize));
        }
        if let Some(expected) = expected.filter(|expected| *expected != kept.len() as u64) {
            let message = format!(
                "has {} lines up to step {step}, but had {expected} when the checkpoint of that step was written: \
                 restore it from a copy, or move it away to continue without what it holds",
                kept.len()
            );
            return Err(Error::damaged(&path, message));
        }
        let text = |lines: &[&Value]| -> String {
            lines.iter().map(|line| format!("{}\n", seal(&line.to_string()))).collect()
        };
        if !discarded.is_empty() {
            append(&self.path.join(DISCARDED_FILE), &text(&discarded))?;
        }
        // Lines of an earlier version of the program get their checksums here.
        let kept_text = text(&kept);
        if kept_text.as_bytes() != whole {
            disk::replace(&path, kept_text.as_bytes())?;
        }
        let samples: String = kept
            .iter()
            .filter_map(|line| {
                Some(sample(line["step"].as_u64()?, line["prompt"].as_str()?, line["sample"].as_str()?))
            })
            .collect();
        disk::replace(&self.path.join(SAMPLES_FILE), samples.as_bytes())?;
        Ok(kept.len() as u64)
    }
}

fn sample(step: u64, prompt: &str, text: &str) -> String {
    format!("== step {step}\n{prompt}{text}\n\n")
}

/// Appends text in a single write, so that a process that dies leaves at most one incomplete line.
fn append(path: &Path, text: &str) -> Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(Error::io(path, "write"))
}

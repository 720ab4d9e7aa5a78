//! `RUN/run.json`: what a run was started with, which is everything that determines its result. It is written before
//! the first step and carries a checksum, so that a run either resumes with the same settings and data or reports what
//! differs.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::folder::CONFIG_FILE;
use crate::data::DataConfig;
use crate::disk::{self, Seal, seal, unseal};
use crate::error::{Error, Result};
use crate::recipe::Config;

const RECORD_FILE: &str = "run.json";
/// Raised when the file's meaning changes.
const FORMAT: u32 = 1;

/// Keys that `--set` may change when a run resumes. Those of `[data]` are paths; the data there must be the same.
const FREE: [&str; 12] = [
    "data.path",
    "data.validation",
    "train.steps",
    "train.micro_batch",
    "train.validate_every",
    "train.validation_sequences",
    "train.sample_every",
    "train.sample_tokens",
    "train.prompts",
    "train.save_every",
    "train.keep",
    "train.recompute",
];

/// What a run was started with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    format: u32,
    /// The complete configuration, as TOML.
    pub config: String,
    /// The fingerprint of the training data.
    pub data: String,
    /// The fingerprint of the validation data.
    pub validation: Option<String>,
    /// The checkpoint that provided the initial weights, as named by the user; these weights are the checkpoint of step
    /// 0.
    pub init_from: Option<PathBuf>,
    /// Whether a checkpoint was ever written; `None` in records of earlier versions.
    #[serde(default)]
    pub saved: Option<bool>,
}

impl Record {
    pub fn new(
        config: &Config,
        data: String,
        validation: Option<String>,
        init_from: Option<PathBuf>,
        saved: bool,
    ) -> Self {
        let saved = Some(saved);
        Self { format: FORMAT, config: config.to_toml(), data, validation, init_from, saved }
    }

    /// Whether a folder has a record.
    pub fn exists(run: &Path) -> bool {
        run.join(RECORD_FILE).exists()
    }

    /// Reads the record of a run; `None` for a run of an earlier version of the program.
    pub fn read(run: &Path) -> Result<Option<Self>> {
        let path = run.join(RECORD_FILE);
        let Some(bytes) = disk::read_if_present(&path)? else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if unseal(&text) != Seal::Sealed {
            let message = format!(
                "is damaged: it does not have the checksum that was written with it; restore it from a copy, or \
                 delete it to continue with `{CONFIG_FILE}` unchecked"
            );
            return Err(Error::damaged(&path, message));
        }
        let record: Self = serde_json::from_str(&text)
            .map_err(|error| Error::file(&path, format!("does not describe a run: {error}")))?;
        if record.format != FORMAT {
            let message = format!("has format {}; this program reads {FORMAT}", record.format);
            return Err(Error::file(&path, message));
        }
        Ok(Some(record))
    }

    /// Writes the record and the configuration. The configuration is removed in between: a missing one is restored from
    /// the record, so a process that dies midway leaves no contradiction.
    pub fn write(&self, run: &Path) -> Result<()> {
        let config = run.join(CONFIG_FILE);
        if Self::read(run)?.is_some_and(|record| record.config != self.config) {
            disk::remove(&config)?;
        }
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        disk::replace(&run.join(RECORD_FILE), seal(&text).as_bytes())?;
        disk::replace(&config, self.config.as_bytes())
    }

    /// The configuration to resume a run with: that of its folder, with `settings` applied. Rejects a folder whose
    /// `config.toml` differs from the one that the run was started with, and settings that cannot be changed.
    pub fn config(run: &Path, record: Option<&Self>, settings: &[String]) -> Result<Config> {
        let path = run.join(CONFIG_FILE);
        for setting in settings {
            let key = setting.split('=').next().unwrap_or_default().trim();
            if !FREE.contains(&key) {
                let message = format!(
                    "cannot change within a run; these can: {}. For other settings start a new run; \
                     --init-from starts it from these weights",
                    FREE.join(", ")
                );
                return Err(Error::config("--set", key, message));
            }
        }
        if let Some(record) = record {
            if !path.exists() {
                disk::replace(&path, record.config.as_bytes())?;
            }
            let found = Config::load(&path.display().to_string()).map_err(|error| {
                let remedy = format!("delete `{CONFIG_FILE}` to have it restored from `{RECORD_FILE}`");
                Error::file(&path, format!("cannot be read; {remedy}. {error}"))
            })?;
            refuse_differences(&path, &record.config, &found.to_toml())?;
        } else if !path.is_file() {
            return Err(Error::file(&path, "is missing; a run's folder has one (march train writes it)"));
        }
        Config::load_with(&path.display().to_string(), settings)
    }

    /// Rejects data that differs from what the run was started with. `config` names training and validation data.
    pub fn check_data(&self, config: &DataConfig, data: &str, validation: Option<&str>) -> Result<()> {
        let learned = config.path.as_deref().unwrap_or(config.kind.name());
        let validated = config.validation.as_deref().unwrap_or(learned);
        for (what, named, then, now) in [
            ("learns from", learned, Some(self.data.as_str()), Some(data)),
            ("is validated on", validated, self.validation.as_deref(), validation),
        ] {
            if then != now {
                return Err(Error::Request(format!(
                    "the data that the run {what} ({named}) has changed since the run started: its \
                     fingerprint is {}, and was {}; restore the data, or start a new run",
                    now.unwrap_or("missing"),
                    then.unwrap_or("missing")
                )));
            }
        }
        Ok(())
    }
}

/// Rejects a configuration that differs from the recorded one, listing the keys that differ.
fn refuse_differences(path: &Path, recorded: &str, found: &str) -> Result<()> {
    if recorded == found {
        return Ok(());
    }
    let (then, now) = (keys(recorded), keys(found));
    let all: std::collections::BTreeSet<&String> = then.keys().chain(now.keys()).collect();
    let value = |value: Option<&String>| value.cloned().unwrap_or("not set".into());
    let changed: Vec<String> = all
        .into_iter()
        .filter(|key| then.get(*key) != now.get(*key))
        .map(|key| {
            format!("`{key}` is {}, and was {} at the start", value(now.get(key)), value(then.get(key)))
        })
        .collect();
    let message = format!(
        "{}: it was edited or damaged. Delete it to have it restored from `{RECORD_FILE}`; to change a setting of a \
         run, use `march train --resume RUN --set KEY=VALUE`",
        changed.join("; ")
    );
    Err(Error::file(path, message))
}

/// Maps `section.key` to its value, as TOML.
fn keys(text: &str) -> std::collections::BTreeMap<String, String> {
    let table: toml::Table = toml::from_str(text).unwrap_or_default();
    let sections = table.into_iter().filter_map(|(section, keys)| match keys {
        toml::Value::Table(keys) => Some((section, keys)),
        _ => None,
    });
    sections
        .flat_map(|(section, keys)| {
            keys.into_iter().map(move |(key, value)| (format!("{section}.{key}"), value.to_string()))
        })
        .collect()
}

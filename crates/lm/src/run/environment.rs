//! Where a run was computed: `RUN/environment.json`, an array with one session for each time the run was started or
//! resumed, one per line, each with its checksum. It is not part of a checkpoint, which depends on the configuration
//! and the data alone.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::disk::{self, Seal};
use crate::error::{Error, Result};

const ENVIRONMENT_FILE: &str = "environment.json";

/// One invocation of the program that worked on a run. Fields that the system does not report are missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Session {
    /// Start time: UTC, RFC 3339.
    pub started: String,
    /// Number of steps completed before.
    pub step: u64,
    /// Name, version and build profile.
    pub program: String,
    /// Features that the program was built with.
    pub features: Vec<String>,
    /// The command's arguments.
    pub arguments: Vec<String>,
    /// The processor's name.
    pub processor: Option<String>,
    /// Its architecture, and the relevant instruction sets.
    pub instructions: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// Number of processes that train together; the other fields describe the first.
    pub processes: usize,
    /// Number of compute threads per process.
    pub threads: usize,
    /// The kernels of the device.
    pub kernels: String,
    /// The device that ran the model: `cpu`, or the name of a GPU; empty in sessions of earlier versions, which only had
    /// the first.
    pub device: String,
    /// The machine's memory in bytes.
    pub memory: Option<u64>,
    /// The operating system.
    pub system: String,
    /// The release of its kernel.
    pub kernel: Option<String>,
}

impl Session {
    /// Appends the session to the run's file. Earlier sessions are unchanged; a file that cannot be read is not
    /// modified.
    pub fn record(&self, run: &Path) -> Result<()> {
        let path = run.join(ENVIRONMENT_FILE);
        let mut lines: Vec<String> = read(&path)?.into_iter().map(|(line, _)| line).collect();
        let session = serde_json::to_string(self).map_err(|error| Error::file(&path, error.to_string()))?;
        lines.push(disk::seal(&session));
        disk::replace(&path, whole(&lines).as_bytes())
    }

    /// All sessions of a run, oldest first; empty if the file is missing.
    pub fn all(run: &Path) -> Result<Vec<Self>> {
        let path = run.join(ENVIRONMENT_FILE);
        read(&path)?.into_iter().map(|(_, value)| understood(&path, serde_json::from_value(value))).collect()
    }
}

/// The text of a file with these lines.
fn whole(lines: &[String]) -> String {
    format!("[\n{}\n]\n", lines.join(",\n"))
}

fn understood<T>(path: &Path, parsed: serde_json::Result<T>) -> Result<T> {
    parsed.map_err(|error| {
        Error::file(path, format!("is not a list of sessions ({error}); move it away to start a new one"))
    })
}

/// Each session as a line with its checksum, and as a value.
fn read(path: &Path) -> Result<Vec<(String, Value)>> {
    let damaged = |what: String| Error::damaged(path, format!("{what}; move it away to start a new one"));
    let Some(bytes) = disk::read_if_present(path)? else { return Ok(Vec::new()) };
    let text = String::from_utf8(bytes).map_err(|_| damaged("is damaged: it is not UTF-8".into()))?;
    let sessions: Vec<Map<String, Value>> = understood(path, serde_json::from_str(&text))?;
    // The brackets of the array are on separate lines.
    let lines = || text.lines().zip(1..).filter(|(line, _)| line.contains('{'));
    if lines().all(|(line, _)| disk::unseal(line) == Seal::Missing) {
        // Written before there were checksums, with arbitrary line breaks. A damaged key name shows up as an unknown
        // key.
        let known = understood(path, serde_json::to_value(Session::default()))?;
        for (number, session) in (1..).zip(&sessions) {
            if let Some(key) = session.keys().find(|key| known.get(key).is_none()) {
                let message =
                    format!("is damaged: session {number} has no checksum and the unknown key `{key}`");
                return Err(damaged(message));
            }
        }
        let line = |session| (disk::seal(&Value::to_string(&session)), session);
        return Ok(sessions.into_iter().map(Value::Object).map(line).collect());
    }
    let mut kept = Vec::new();
    for (line, number) in lines() {
        let line = line.strip_suffix(',').unwrap_or(line);
        match disk::unseal(line) {
            Seal::Sealed => kept.push(line.to_string()),
            Seal::Missing => return Err(damaged(format!("is damaged: line {number} has no checksum"))),
            Seal::Broken => return Err(damaged(format!("is damaged: line {number} has a wrong checksum"))),
        }
    }
    if whole(&kept).trim_end() != text.trim_end() || kept.len() != sessions.len() {
        return Err(damaged("is damaged: it is not one session a line".into()));
    }
    Ok(kept.into_iter().zip(sessions.into_iter().map(Value::Object)).collect())
}

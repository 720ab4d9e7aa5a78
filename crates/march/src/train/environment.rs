//! Where a run was computed: `RUN/environment.json`, an array with a session for each time the run was begun or gone on
//! with. No part of a checkpoint, which depends on the configuration and the data alone.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::disk;
use crate::error::{Error, Result};

const ENVIRONMENT_FILE: &str = "environment.json";

/// One call of the program that worked on a run. What the system does not tell is missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Session {
    /// When it started: UTC, RFC 3339.
    pub started: String,
    /// Steps that had been made before.
    pub step: u64,
    /// Name, version and kind of build.
    pub program: String,
    /// Features that the program was built with.
    pub features: Vec<String>,
    /// The command's arguments.
    pub arguments: Vec<String>,
    /// The processor's name.
    pub processor: Option<String>,
    /// Its architecture, and the instruction sets that matter here.
    pub instructions: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// Processes that train together; the rest is told of the first.
    pub processes: usize,
    /// Threads that compute, of each process.
    pub threads: usize,
    /// The engine's kernels.
    pub kernels: String,
    /// The machine's memory in bytes.
    pub memory: Option<u64>,
    /// The operating system.
    pub system: String,
    /// The release of its kernel.
    pub kernel: Option<String>,
}

impl Session {
    /// Adds the session to its run's file. Earlier ones are kept as they are.
    pub fn record(&self, run: &Path) -> Result<()> {
        let path = run.join(ENVIRONMENT_FILE);
        let mut sessions: Vec<Value> = read(&path)?;
        let session = serde_json::to_value(self).map_err(|error| Error::file(&path, error.to_string()))?;
        sessions.push(session);
        let lines: Vec<String> = sessions.iter().map(Value::to_string).collect();
        disk::replace(&path, format!("[\n{}\n]\n", lines.join(",\n")).as_bytes())
    }

    /// All sessions of a run, oldest first; none where the file is missing.
    pub fn all(run: &Path) -> Result<Vec<Self>> {
        read(&run.join(ENVIRONMENT_FILE))
    }
}

fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Vec<T>> {
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).map_err(|error| {
            Error::file(path, format!("is not a list of sessions ({error}); move it away to begin a new one"))
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Error::io(path, "read")(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_added() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(Session::all(run.path()).unwrap(), []);
        let first = Session { program: "march 1".into(), kernel: None, ..Default::default() };
        first.record(run.path()).unwrap();
        // A key of another version is kept.
        let path = run.path().join(ENVIRONMENT_FILE);
        let text = fs::read_to_string(&path).unwrap().replace("{\"started\"", "{\"later\":1,\"started\"");
        fs::write(&path, text).unwrap();
        let second = Session { step: 7, ..first.clone() };
        second.record(run.path()).unwrap();
        assert_eq!(Session::all(run.path()).unwrap(), [first.clone(), second]);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("\"later\":1") && text.lines().count() == 4, "{text}");
        // Nothing is written over a file that is something else.
        fs::write(&path, "{}").unwrap();
        assert!(first.record(run.path()).unwrap_err().to_string().contains("environment.json"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "{}");
    }
}

//! A run's metrics while the run continues.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::Metrics;
use march_lm::run::Lines;
use march_lm::{Error, Result};

/// The contents of `metrics.jsonl`, read once and then updated with what was appended.
pub struct Follow {
    path: PathBuf,
    /// Number of bytes of complete lines consumed.
    taken: u64,
    lines: Lines,
    metrics: Metrics,
}

impl Follow {
    /// Starts before anything is read; the file need not exist yet.
    pub fn new(run: &Path) -> Self {
        let (lines, metrics) = (Lines::default(), Metrics::default());
        Self { path: run.join("metrics.jsonl"), taken: 0, lines, metrics }
    }

    /// The metrics read so far.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Reads the complete lines that were appended; returns whether there were any. If one of them is damaged, none is
    /// taken.
    pub fn read_on(&mut self) -> Result<bool> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(Error::io(&self.path, "read")(error)),
        };
        let mut added = Vec::new();
        let read = file.seek(SeekFrom::Start(self.taken)).and_then(|_| file.read_to_end(&mut added));
        read.map_err(Error::io(&self.path, "read"))?;
        let (values, whole) = self.lines.read(&self.path, &added)?;
        values.iter().for_each(|value| self.metrics.take(value));
        self.taken += whole as u64;
        Ok(whole > 0)
    }
}

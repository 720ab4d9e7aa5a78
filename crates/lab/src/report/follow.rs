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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use march_lm::disk::seal;

    #[test]
    fn only_what_was_added_is_read() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join("metrics.jsonl");
        let mut follow = Follow::new(run.path());
        assert!(!follow.read_on().unwrap());
        let line = |text: &str| seal(text) + "\n";
        let (first, second) = (line("{\"step\":1,\"loss\":3.5}"), line("{\"step\":2,\"loss\":2.5}"));
        let mut text = first.clone() + &second[..15];
        fs::write(&path, &text).unwrap();
        assert!(follow.read_on().unwrap());
        assert_eq!(follow.metrics().loss, [(1.0, 3.5)]);
        assert!(!follow.read_on().unwrap());
        text = first + &second + &line("{\"step\":2,\"validation_loss\":2.75}");
        fs::write(&path, &text).unwrap();
        assert!(follow.read_on().unwrap());
        assert_eq!(follow.metrics().loss, [(1.0, 3.5), (2.0, 2.5)]);
        assert_eq!(follow.metrics().validation, [(2.0, 2.75)]);
        // A damaged line is reported each time, and nothing is consumed twice.
        fs::write(&path, text + &second + &second.replace("2.5", "2.6")).unwrap();
        for _ in 0..2 {
            assert!(follow.read_on().unwrap_err().to_string().contains("line 5 is damaged"));
            assert_eq!(follow.metrics().loss.len(), 2);
        }
    }
}

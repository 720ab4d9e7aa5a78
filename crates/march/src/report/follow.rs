//! A run's metrics while the run goes on.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::Metrics;
use crate::error::{Error, Result};

/// What `metrics.jsonl` says, read once and then only what was added to it.
pub struct Follow {
    path: PathBuf,
    /// Bytes of whole lines that were taken.
    taken: u64,
    metrics: Metrics,
}

impl Follow {
    /// Before anything is read; the file need not exist yet.
    pub fn new(run: &Path) -> Self {
        Self { path: run.join("metrics.jsonl"), taken: 0, metrics: Metrics::default() }
    }

    /// What was read so far.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Takes the whole lines that were added, and gives whether there were any. A line that is not JSON is passed over.
    pub fn read_on(&mut self) -> Result<bool> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(Error::io(&self.path, "read")(error)),
        };
        let mut added = Vec::new();
        let read = file.seek(SeekFrom::Start(self.taken)).and_then(|_| file.read_to_end(&mut added));
        read.map_err(Error::io(&self.path, "read"))?;
        let whole = added.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        for line in added[..whole].split(|&byte| byte == b'\n') {
            if let Ok(value) = serde_json::from_slice(line) {
                self.metrics.take(&value);
            }
        }
        self.taken += whole as u64;
        Ok(whole > 0)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_what_was_added_is_read() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join("metrics.jsonl");
        let mut follow = Follow::new(run.path());
        assert!(!follow.read_on().unwrap());
        let mut text = String::from("{\"step\":1,\"loss\":3.5}\nnonsense\n{\"step\":2,\"lo");
        fs::write(&path, &text).unwrap();
        assert!(follow.read_on().unwrap());
        assert_eq!(follow.metrics().loss, [(1.0, 3.5)]);
        assert!(!follow.read_on().unwrap());
        text += "ss\":2.5}\n{\"step\":2,\"validation_loss\":2.75}\n";
        fs::write(&path, &text).unwrap();
        assert!(follow.read_on().unwrap());
        assert_eq!(follow.metrics().loss, [(1.0, 3.5), (2.0, 2.5)]);
        assert_eq!(follow.metrics().validation, [(2.0, 2.75)]);
    }
}

//! Whether a GPU computes what it should: every operation, on random and extreme inputs, what the reference computes; and
//! small models of every kind, what is known of them. `march doctor --device gpu` shows all of it, and
//! `march train --device gpu` refuses a device that fails.
//!
//! The test takes longer than the start of a run should, so a file in the user's cache folder notes the device that
//! passed: its name, place and driver, and the program. A change of any of them asks for a new test. Only success is
//! noted: a device that failed is tested again.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use anyhow::bail;
use march_gpu::Gpu;
use march_gpu::doctor::{self, Line};
use march_lm::disk;
use march_lm::engine::{Device, checksum};

use crate::display::out::note;
use crate::golden::{Check, Example};

/// A model on a device.
pub struct ModelTest {
    /// Its name.
    pub model: &'static str,
    /// What was compared, or why it could not be.
    pub checks: march_lm::Result<Vec<Check>>,
}

impl ModelTest {
    /// What is wrong.
    pub fn failures(&self) -> Vec<String> {
        match &self.checks {
            Ok(checks) => checks.iter().filter_map(Check::failure).collect(),
            Err(error) => vec![format!("{}: {error}", self.model)],
        }
    }
}

/// A result of the test, as soon as it is known.
pub enum TestResult<'a> {
    /// An operation.
    Operation(&'a Line),
    /// A model.
    Model(&'a ModelTest),
}

/// All results of the test.
pub struct DeviceTest {
    /// The operations.
    pub operations: Vec<Line>,
    /// The models.
    pub models: Vec<ModelTest>,
}

impl DeviceTest {
    /// Tests the operations of a device, and models on it.
    pub fn run(device: &Device, show: &mut dyn FnMut(TestResult<'_>)) -> anyhow::Result<Self> {
        let operations = doctor::operations(device, &mut |line| show(TestResult::Operation(line)))?;
        let mut models = Vec::new();
        for example in Example::all()? {
            let tested = ModelTest { model: example.name, checks: example.checks(device) };
            show(TestResult::Model(&tested));
            models.push(tested);
        }
        Ok(Self { operations, models })
    }

    /// What is wrong; nothing if the device passed.
    pub fn failures(&self) -> Vec<String> {
        let failed = self.operations.iter().filter(|line| !line.passed);
        let mut list: Vec<String> = failed.map(|line| format!("{}: {}", line.operation, line.note)).collect();
        list.extend(self.models.iter().flat_map(ModelTest::failures));
        list
    }
}

/// Fails unless the device passes, or is noted to have passed.
pub fn require(device: &Device, gpu: &Gpu) -> anyhow::Result<()> {
    let passed = PassedRecord::of(gpu);
    if passed.as_ref().is_some_and(PassedRecord::is_noted) {
        return Ok(());
    }
    note!("note          testing {device} before its first training");
    let test = DeviceTest::run(device, &mut |_| {})?;
    accept(&device.to_string(), &test)?;
    if let Some(passed) = passed {
        passed.note();
    }
    Ok(())
}

pub fn accept(device: &str, test: &DeviceTest) -> anyhow::Result<()> {
    let failures = test.failures();
    let Some(first) = failures.first() else { return Ok(()) };
    let more = if failures.len() > 1 { format!(" (and {} more)", failures.len() - 1) } else { String::new() };
    bail!(
        "{device} does not compute what it should, so it is not used for training: {first}{more}; \
         `march doctor --device gpu` shows every operation"
    );
}

/// The file that notes that a device passed.
pub struct PassedRecord {
    path: PathBuf,
    text: String,
}

impl PassedRecord {
    /// The file for this device, driver and program; nothing if the system has no cache folder.
    pub fn of(gpu: &Gpu) -> Option<Self> {
        Some(Self::within(cache()?, gpu.identity(), &program()))
    }

    pub fn within(cache: PathBuf, device: &str, program: &str) -> Self {
        let path = cache.join("march").join(format!("gpu-{:016x}.txt", checksum(device.as_bytes())));
        Self { path, text: format!("passed `march doctor --device gpu`\n{device}\n{program}\n") }
    }

    pub fn is_noted(&self) -> bool {
        fs::read_to_string(&self.path).is_ok_and(|text| text == self.text)
    }

    /// Notes that the device passed. If that fails, the device will be tested again.
    pub fn note(&self) {
        if let Some(folder) = self.path.parent() {
            let _ = fs::create_dir_all(folder);
        }
        let _ = disk::replace(&self.path, self.text.as_bytes());
    }

    /// Removes the note, because the device failed.
    pub fn forget(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The user's cache folder.
fn cache() -> Option<PathBuf> {
    let folder = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let usual = || {
        if cfg!(windows) {
            folder("LOCALAPPDATA")
        } else {
            let below = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
            folder("HOME").map(|home| home.join(below))
        }
    };
    folder("XDG_CACHE_HOME").or_else(usual)
}

/// The version of the program, and the size and time of its file, which change with every build.
fn program() -> String {
    let file = env::current_exe().and_then(fs::metadata);
    let built = file.and_then(|file| {
        let time = file.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(format!(", {} bytes of {}.{:09}", file.len(), time.as_secs(), time.subsec_nanos()))
    });
    format!("march {}{}", env!("CARGO_PKG_VERSION"), built.unwrap_or_default())
}

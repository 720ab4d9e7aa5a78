//! Broken configurations and run folders: an error or a run, never a panic.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use march_lm::Config;
use march_lm::engine::{CpuOptions, Device};
use march_lm::model::ModelConfig;
use march_lm::run::{Run, RunOptions};
use march_lm::train::ranks::SingleProcess;

use crate::common::damage::damaged;

#[test]
fn configurations() {
    for (seed, preset) in Config::presets().enumerate() {
        let config = Config::load(preset).unwrap();
        let text = config.to_toml();
        let (mut read, mut refused) = (0, 0);
        damaged(text.as_bytes(), seed as u64 + 1, 300, |bytes| {
            let Ok(text) = std::str::from_utf8(bytes) else { return };
            match Config::from_toml(text, "a file", None) {
                Ok(config) => {
                    read += 1;
                    // What was read can be written and read again.
                    let again = Config::from_toml(&config.to_toml(), "written", None).unwrap();
                    assert_eq!(again.to_toml(), config.to_toml());
                }
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().contains("a file"), "{error}");
                }
            }
        });
        assert!(read > 0 && refused > 50, "{preset}: {read} read, {refused} refused");
        let json = config.model.to_json();
        damaged(json.as_bytes(), seed as u64 + 100, 300, |bytes| {
            if let Ok(text) = std::str::from_utf8(bytes) {
                let _ = ModelConfig::from_json(text, "a file");
            }
        });
    }
}

/// Every file of a folder and those in it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut list = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { list.extend(files(&path)) } else { list.push(path) }
    }
    list.sort();
    list
}

fn copy(from: &Path, to: &Path) {
    for file in files(from) {
        let target = to.join(file.strip_prefix(from).unwrap());
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(&file, &target).unwrap();
    }
}

/// Each file of a run damaged in many ways: the run goes on from what is whole, or says what is wrong.
#[test]
fn runs() {
    let folder = tempfile::tempdir().unwrap();
    let device = Device::cpu(CpuOptions { threads: 1, ..Default::default() }).unwrap();
    let text = "extends = \"tiny/march\"\n[model]\nhidden_size = 16\nnum_hidden_layers = 2\nintermediate_size = 24\n\
                num_heads = 2\nhead_dim = 4\nanchor_interval = 8\nrouting_dim = 4\n\
                [data]\nsequence_length = 32\n[train]\nsteps = 4\ntokens_per_step = 64\nmicro_batch = 2\n\
                validate_every = 2\nvalidation_sequences = 2\nsample_every = 2\nsample_tokens = 3\nsave_every = 1\n";
    let config = Config::from_toml(text, "a test", None).unwrap();
    let whole = folder.path().join("whole");
    let never = AtomicBool::new(false);
    let options = RunOptions { stop_at: Some(3), ..Default::default() };
    let mut run = Run::create(&device, config, &whole, options, Box::<SingleProcess>::default()).unwrap();
    assert!(!run.train(&never, &mut |_| {}).unwrap());
    drop(run);
    let (mut resumed, mut refused) = (0, 0);
    for (seed, file) in files(&whole).iter().enumerate() {
        let name = file.strip_prefix(&whole).unwrap();
        let mut count = 0;
        damaged(&fs::read(file).unwrap(), seed as u64 + 7, 25, |bytes| {
            count += 1;
            let damaged = folder.path().join(format!("damaged-{seed}-{count}"));
            copy(&whole, &damaged);
            fs::write(damaged.join(name), bytes).unwrap();
            let options = RunOptions { stop_at: Some(3), ..Default::default() };
            match Run::resume(&device, &damaged, options, Box::<SingleProcess>::default(), &mut |_| {}) {
                Ok(mut run) => {
                    resumed += 1;
                    let _ = run.train(&never, &mut |_| {});
                }
                Err(error) => {
                    refused += 1;
                    assert!(!error.to_string().is_empty());
                }
            }
            fs::remove_dir_all(&damaged).unwrap();
        });
    }
    assert!(resumed > 50 && refused > 5, "{resumed} resumed, {refused} refused");
}

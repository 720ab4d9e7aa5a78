//! The report of a damaged run folder: an error or a page, never a panic.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use march_lab::report::render;
use march_lm::Config;
use march_lm::engine::{CpuOptions, Device};
use march_lm::run::{Run, RunOptions};
use march_lm::train::ranks::SingleProcess;

use crate::common::damage::damaged;

/// The files of a folder, not those of the folders in it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut list: Vec<PathBuf> = paths.filter(|path| path.is_file()).collect();
    list.sort();
    list
}

#[test]
fn reports() {
    let folder = tempfile::tempdir().unwrap();
    let device = Device::cpu(CpuOptions { threads: 1, ..Default::default() }).unwrap();
    let text = "extends = \"tiny/march\"\n[model]\nhidden_size = 16\nnum_hidden_layers = 2\nintermediate_size = 24\n\
                num_heads = 2\nhead_dim = 4\nanchor_interval = 8\nrouting_dim = 4\n\
                [data]\nsequence_length = 32\n[train]\nsteps = 4\ntokens_per_step = 64\nmicro_batch = 2\n\
                validate_every = 2\nvalidation_sequences = 2\nsample_every = 2\nsample_tokens = 3\nsave_every = 4\n";
    let config = Config::from_toml(text, "a test", None).unwrap();
    let whole = folder.path().join("run");
    let options = RunOptions::default();
    let mut run = Run::create(&device, config, &whole, options, Box::<SingleProcess>::default()).unwrap();
    assert!(run.train(&AtomicBool::new(false), &mut |_| {}).unwrap());
    drop(run);
    assert!(render(&whole).is_ok());
    let (mut rendered, mut refused) = (0, 0);
    for (seed, file) in files(&whole).iter().enumerate() {
        let bytes = fs::read(file).unwrap();
        damaged(&bytes, seed as u64 + 7, 25, |bytes| {
            fs::write(file, bytes).unwrap();
            match render(&whole) {
                Ok(_) => rendered += 1,
                Err(error) => {
                    refused += 1;
                    assert!(!error.to_string().is_empty());
                }
            }
        });
        fs::write(file, bytes).unwrap();
    }
    assert!(rendered > 5 && refused > 5, "{rendered} rendered, {refused} refused");
}

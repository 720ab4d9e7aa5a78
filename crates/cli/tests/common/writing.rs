//! A model that generates text, and commands with data on standard input.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::{ok, text};

/// A model that has learned to write letters.
pub fn trained(folder: &Path) -> PathBuf {
    let config = "extends = \"tiny/march\"\n[model]\nhidden_size = 16\nnum_hidden_layers = 2\n\
         intermediate_size = 24\nnum_heads = 2\nhead_dim = 4\nanchor_interval = 24\nrouting_dim = 4\n\
         [data]\nsequence_length = 64\n[train]\nsteps = 60\ntokens_per_step = 256\nmicro_batch = 4\n\
         learning_rate = 1e-2\nvalidate_every = 60\nvalidation_sequences = 1\nsave_every = 60\n";
    let (file, run) = (folder.join("small.toml"), folder.join("run"));
    fs::write(&file, config).unwrap();
    ok(&["train", text(&file), "--run", text(&run), "--threads", "1"]);
    run.join("checkpoints/step-60")
}

pub fn start(arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_march"))
        .args(arguments)
        .args(["--threads", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Standard output and standard error of a command that must succeed, with `input` on standard input.
pub fn with_input(arguments: &[&str], input: &str) -> (String, String) {
    let mut child = start(arguments);
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "march {arguments:?}: {errors}");
    (String::from_utf8(out.stdout).unwrap(), errors)
}

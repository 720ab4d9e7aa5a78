//! Running the `march` command as a user does.

#![allow(dead_code)] // Each test file uses a part of it.

use std::path::Path;
use std::process::{Command, Output};

fn march(arguments: &[&str]) -> Output {
    // Somebody's backtraces must not change what an error says.
    Command::new(env!("CARGO_BIN_EXE_march")).args(arguments).env("RUST_BACKTRACE", "1").output().unwrap()
}

/// What a command that must succeed prints, and then says on the side.
pub fn ok(arguments: &[&str]) -> String {
    let out = march(arguments);
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "march {arguments:?}: {errors}");
    String::from_utf8(out.stdout).unwrap() + &errors
}

/// What a command that must fail says.
pub fn refused(arguments: &[&str]) -> String {
    let out = march(arguments);
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success(), "march {arguments:?} should have failed");
    assert!(!errors.contains("panicked") && !errors.contains("backtrace"), "{errors}");
    errors
}

/// A short text.
pub const BOOK: &str = "One checkpoint, any memory policy. A text can be read again, and again, and again.\n";

/// Three steps of a small model on a task of 4 pairs in 16 tokens, with an anchor every 4 where there are any.
pub fn few_steps<'a>(preset: &'a str, run: &'a str) -> Vec<&'a str> {
    let mut arguments = vec!["train", preset, "--run", run, "--threads", "1"];
    for setting in [
        "data.task=mqar:pairs=4:vocabulary=64",
        "model.vocab_size=64",
        "data.sequence_length=16",
        "train.tokens_per_step=128",
        "train.micro_batch=8",
        "train.steps=3",
        "train.validate_every=2",
    ] {
        arguments.extend(["--set", setting]);
    }
    if preset.ends_with("/march") {
        arguments.extend(["--set", "model.anchor_interval=4"]);
    }
    arguments
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

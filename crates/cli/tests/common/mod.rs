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

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

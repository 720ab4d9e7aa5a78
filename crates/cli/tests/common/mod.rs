//! Running the `march` command as a user does.

pub mod writing;

use std::path::Path;
use std::process::{Command, Output};

fn march(arguments: &[&str]) -> Output {
    // The user's backtrace settings must not change error messages.
    Command::new(env!("CARGO_BIN_EXE_march")).args(arguments).env("RUST_BACKTRACE", "1").output().unwrap()
}

/// Standard output, then standard error, of a command that must succeed.
pub fn ok(arguments: &[&str]) -> String {
    let out = march(arguments);
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "march {arguments:?}: {errors}");
    String::from_utf8(out.stdout).unwrap() + &errors
}

/// The error message of a command that must fail.
pub fn refused(arguments: &[&str]) -> String {
    let out = march(arguments);
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success(), "march {arguments:?} should have failed");
    assert!(!errors.contains("panicked") && !errors.contains("backtrace"), "{errors}");
    errors
}

/// The command run as an unprivileged user: `nobody`, if the tests run as root. All of `folder` is made
/// accessible to that user; files keep their modes.
#[cfg(unix)]
pub fn as_nobody(folder: &Path, arguments: &[&str]) -> Command {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    fn open(path: &Path) {
        if path.is_dir() {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
            std::fs::read_dir(path).unwrap().for_each(|entry| open(&entry.unwrap().path()));
        }
    }
    open(folder);
    // The program itself may be in a folder that `nobody` cannot access. Another process copies it: a process that a
    // test beside this one starts would inherit a file open for writing, and what is open for writing cannot be run.
    let program = folder.join("march");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_march")).arg(&program).status().unwrap().success());
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder).stdin(std::process::Stdio::null());
    if Command::new("id").arg("-u").output().unwrap().stdout == b"0\n" {
        command.uid(65534).gid(65534);
    }
    command
}

/// A short text.
pub const BOOK: &str = "One checkpoint, any memory policy. A text can be read again, and again, and again.\n";

/// Three steps of a small model on a task of 4 pairs in 16 tokens, with an anchor every 4 tokens if it has
/// anchors.
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

//! Damages every kind of file that `march` writes, at random places, and runs the commands that read it. Whatever is
//! damaged, a command must refuse it, or give the very result that it gives without the damage; it must not crash, and
//! a refusal must leave every file as it was.
//!
//! `cargo test --release -p march-cli --test faults -- --tries 300 --markdown` prints the tables of
//! `docs/reliability.md`: by file, and by kind of fault. Without arguments a few tries of each kind are made.

#![allow(missing_docs)] // A test.

mod fault;
mod kinds;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use fault::{Fault, Random};

/// Tries of each file without an argument.
const FEW: usize = 8;

/// A kind of file: where it lies in a folder that was made once, and what reads it.
pub struct Kind {
    pub name: &'static str,
    /// The folder that is copied for each try.
    pub folder: PathBuf,
    /// The file in it.
    pub file: PathBuf,
    /// Runs the commands that read the file in a copy of the folder; gives what the user gets.
    pub read: fn(&Path) -> Outcome,
    /// What the user gets without damage.
    pub expected: Vec<u8>,
}

/// What commands came to.
pub enum Outcome {
    /// All succeeded, with this result.
    Done(Vec<u8>),
    /// One refused.
    Refused,
    /// One crashed: a panic or a signal.
    Crashed(String),
}

#[derive(Default)]
struct Count {
    refused: usize,
    unharmed: usize,
    wrong: usize,
    lost: usize,
    crashed: usize,
}

impl Count {
    fn add(&mut self, other: &Self) {
        self.refused += other.refused;
        self.unharmed += other.unharmed;
        self.wrong += other.wrong;
        self.lost += other.lost;
        self.crashed += other.crashed;
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1)
    };
    let tries = value("--tries").and_then(|tries| tries.parse().ok()).unwrap_or(FEW);
    let only = value("--only").cloned().unwrap_or_default();
    let seed = value("--seed").and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let markdown = arguments.iter().any(|argument| argument == "--markdown");

    let base = std::env::temp_dir().join(format!("march-faults-{}", std::process::id()));
    fs::create_dir_all(&base).unwrap();
    let kinds: Vec<Kind> =
        kinds::all(&base).into_iter().filter(|kind| kind.name.contains(only.as_str())).collect();
    let next = AtomicUsize::new(0);
    let counts: Vec<Mutex<Count>> = kinds.iter().map(|_| Mutex::default()).collect();
    let faults: Vec<Mutex<Count>> = Fault::ALL.iter().map(|_| Mutex::default()).collect();
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let (next, kinds, counts, faults, base) = (&next, &kinds, &counts, &faults, &base);
            scope.spawn(move || {
                let place = base.join(format!("try-{worker}"));
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(kind) = kinds.get(at / tries) else { return };
                    let random = Random::new(seed + at as u64);
                    let (fault, found) = attempt(kind, &place, random);
                    counts[at / tries].lock().unwrap().add(&found);
                    // Kinds of faults are listed in the order of their declaration.
                    faults[fault as usize].lock().unwrap().add(&found);
                }
            });
        }
    });
    let _ = fs::remove_dir_all(&base);

    let files: Vec<&str> = kinds.iter().map(|kind| kind.name).collect();
    let failed = table("file", &files, &counts, markdown);
    println!();
    table("fault", &Fault::ALL.map(Fault::name), &faults, markdown);
    println!("\n{} passed, {failed} failed", kinds.len() * tries - failed);
    if failed == 0 && !kinds.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints what was counted by file or by fault; gives how many tries failed.
fn table(of: &str, names: &[&str], counts: &[Mutex<Count>], markdown: bool) -> usize {
    if markdown {
        println!(
            "| {of} | tries | refused | same result | wrong | lost | crashed |\n|---|---|---|---|---|---|---|"
        );
    }
    let mut failed = 0;
    for (name, count) in names.iter().zip(counts) {
        let Count { refused, unharmed, wrong, lost, crashed } = &*count.lock().unwrap();
        let tries = refused + unharmed + wrong + lost + crashed;
        failed += wrong + lost + crashed;
        if markdown {
            println!("| {name} | {tries} | {refused} | {unharmed} | {wrong} | {lost} | {crashed} |");
        } else {
            println!(
                "{name:<40} {tries} tries: {refused} refused, {unharmed} same result, {wrong} wrong, {lost} lost, \
                 {crashed} crashed"
            );
        }
    }
    failed
}

/// One file damaged once: the kind of damage, and a count of the one outcome.
fn attempt(kind: &Kind, place: &Path, mut random: Random) -> (Fault, Count) {
    let mut count = Count::default();
    let _ = fs::remove_dir_all(place);
    copy(&kind.folder, place);
    let file = place.join(&kind.file);
    let sound = fs::read(&file).unwrap();
    let (damaged, fault, what) = fault::damage(&sound, &mut random);
    if damaged == sound {
        count.unharmed += 1;
        return (fault, count);
    }
    fs::write(&file, &damaged).unwrap();
    let before = snapshot(place);
    match (kind.read)(place) {
        Outcome::Done(result) if result == kind.expected => count.unharmed += 1,
        Outcome::Done(_) => {
            count.wrong += 1;
            println!("WRONG: {}, {what}", kind.name);
        }
        Outcome::Crashed(how) => {
            count.crashed += 1;
            println!("CRASHED: {}, {what}: {how}", kind.name);
        }
        Outcome::Refused => {
            let after = snapshot(place);
            let lost: Vec<_> =
                before.iter().filter(|file| !after.contains(file)).map(|file| &file.0).collect();
            if lost.is_empty() {
                count.refused += 1;
            } else {
                count.lost += 1;
                println!("LOST: {}, {what}: {lost:?}", kind.name);
            }
        }
    }
    (fault, count)
}

/// Every file below a folder and its contents.
fn snapshot(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut list = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            list.extend(snapshot(&path))
        } else {
            list.push((path.clone(), fs::read(&path).unwrap()))
        }
    }
    list.sort();
    list
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// Runs `march`; gives what it printed.
pub fn march(folder: &Path, arguments: &[&str]) -> Result<Vec<u8>, Outcome> {
    let out = Command::new(env!("CARGO_BIN_EXE_march")).args(arguments).current_dir(folder).output().unwrap();
    match out.status.code() {
        Some(0) => Ok(out.stdout),
        Some(101) | None => {
            Err(Outcome::Crashed(format!("{arguments:?}: {}", String::from_utf8_lossy(&out.stderr))))
        }
        Some(_) => Err(Outcome::Refused),
    }
}

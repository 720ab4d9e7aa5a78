//! `march reproduce`: every experiment in its quick form, and what the command promises about runs that exist.

use std::path::Path;
use std::process::{Command, Output};

fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
    // PyTorch would take longer than everything else; `false` is a program that is not Python.
    command.env("PEERS_PYTHON", "false");
    command.current_dir(folder).arg("reproduce").args(arguments).output().unwrap()
}

fn ok(folder: &Path, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn refused(folder: &Path, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    assert!(!output.status.success(), "{arguments:?} was not refused");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The pages of an experiment, and its figures.
fn check(folder: &Path, name: &str) {
    let folder = folder.join("runs/reproduce-quick").join(name);
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let (html, markdown) = (read("report.html"), read("report.md"));
    assert!(
        html.starts_with("<!doctype html>") && html.contains("<svg") && !html.contains("http:"),
        "{name}"
    );
    assert!(!html.contains("NaN") && !markdown.contains("NaN"), "{name}");
    assert!(markdown.starts_with("# ") && markdown.contains("--size quick"), "{name}");
    let images = markdown.matches("](images/").count();
    let files = std::fs::read_dir(folder.join("images")).unwrap().count();
    assert!(images > 0 && images == files, "{name}: {images} images in the page, {files} files");
}

macro_rules! quick {
    ($($test:ident $name:literal,)*) => {
        $(#[test] fn $test() {
            let folder = tempfile::tempdir().unwrap();
            ok(folder.path(), &[$name, "--size", "quick"]);
            check(folder.path(), $name);
        })*
        const ALL: &[&str] = &[$($name),*];
    };
}

quick! {
    recall "recall",
    mqar "mqar",
    capacity "capacity",
    frontier "frontier",
    length "length",
    interval "interval",
    routing "routing",
    placement "placement",
    upcycle "upcycle",
    efficiency "efficiency",
}

/// A quick run makes a corpus of the built-in book; a run that exists is not repeated, and its numbers stay.
#[test]
fn text_on_the_built_in_book() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let arguments = ["text", "--size", "quick", "--seeds", "1"];
    let first = ok(folder, &arguments);
    check(folder, "text");
    let second = ok(folder, &arguments);
    let results = |text: &str| text[text.find("\ncrates:").unwrap()..].to_string();
    assert_eq!(results(&first), results(&second));
    assert!(first.contains("[  1/") && !second.contains("[  1/"), "{second}");
    let refused_here = refused(folder, &["recall", "--size", "quick", "--corpus", "here"]);
    assert!(refused_here.contains("--corpus is for `text`"), "{refused_here}");
    let missing = refused(folder, &["text"]);
    assert!(missing.contains("march data corpus"), "{missing}");
    let shapes = refused(folder, &["recall", "--size", "paper-shapes"]);
    assert!(shapes.contains("for `efficiency`"), "{shapes}");
}

/// A damaged file of measurements is named, not used.
#[test]
fn damaged_measurements_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    ok(folder, &["placement", "--size", "quick", "--seeds", "1"]);
    let measured = folder.join("runs/reproduce-quick/measured");
    let file = std::fs::read_dir(&measured).unwrap().next().unwrap().unwrap().path();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(
        &file,
        text.replacen("\"value\": 0", "\"value\": 1", 1).replacen("parameters", "parameterz", 1),
    )
    .unwrap();
    let refused = refused(folder, &["placement", "--size", "quick", "--seeds", "1"]);
    assert!(refused.contains("is damaged") && refused.contains("delete it"), "{refused}");
    std::fs::remove_file(&file).unwrap();
    ok(folder, &["placement", "--size", "quick", "--seeds", "1"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text, "a repeated run gives the same bytes");
}

#[test]
fn plans_and_the_paper_start_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let list = ok(folder, &[]);
    for name in ALL.iter().chain(&["text"]) {
        assert!(list.contains(name), "{list}");
        let paper = ok(folder, &[name, "--size", "paper"]);
        assert!(paper.contains("Nothing is started"), "{paper}");
    }
    let paper = ok(folder, &["recall", "--size", "paper"]);
    assert!(paper.contains("march train paper/march") && paper.contains("FLOP"), "{paper}");
    let plan = ok(folder, &["capacity", "--plan"]);
    assert!(plan.contains("million tokens") && plan.contains("time "), "{plan}");
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0);
    let refused = refused(folder, &["capasity"]);
    assert!(refused.contains("is not an experiment") && refused.contains("capacity"), "{refused}");
}

//! `march reproduce`: every experiment in its quick form, and what the command promises about runs that exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
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
    check_release(folder, &arguments);
    let refused_here = refused(folder, &["recall", "--size", "quick", "--corpus", "here"]);
    assert!(refused_here.contains("--corpus is for `text`"), "{refused_here}");
    let missing = refused(folder, &["text"]);
    assert!(missing.contains("march data corpus"), "{missing}");
    let shapes = refused(folder, &["recall", "--size", "paper-shapes"]);
    assert!(shapes.contains("for `efficiency`"), "{shapes}");
}

/// The release folders of a quick run are complete, and have the trained weights in bf16.
fn check_release(folder: &Path, arguments: &[&str]) {
    let output = folder.join("runs/reproduce-quick");
    let released = output.join("text/release");
    for name in ["march", "gdn"] {
        let model = released.join(name);
        let files: Vec<_> = std::fs::read_dir(&model).unwrap().map(|file| file.unwrap()).collect();
        let bytes: u64 = files.iter().map(|file| file.metadata().unwrap().len()).sum();
        assert!(bytes < 12_000_000, "{name}: {bytes} bytes");
        let read = |file: &str| std::fs::read_to_string(model.join(file)).unwrap();
        let index: serde_json::Value = serde_json::from_str(&read("model.safetensors.index.json")).unwrap();
        let shards: BTreeSet<&str> =
            index["weight_map"].as_object().unwrap().values().map(|file| file.as_str().unwrap()).collect();
        let found =
            files.iter().filter(|file| file.path().extension().is_some_and(|end| end == "safetensors"));
        assert!(shards.len() > 1 && shards.len() == found.count(), "{name}: {shards:?}");
        assert!(shards.iter().all(|shard| model.join(shard).is_file()), "{name}: {shards:?}");
        assert!(
            read("tokenizer.json").contains("vocab") && read("report.html").starts_with("<!doctype html>")
        );
        let card = read("README.md");
        for part in
            ["a quick run", "march reproduce text --size quick --seeds 1", "| 4,096 tokens |", "MPL-2.0"]
        {
            assert!(card.contains(part), "{name}: {part}: {card}");
        }
        let here = folder.to_str().unwrap();
        assert!(!card.contains(here) && !read("report.html").contains(here), "{name}");
    }
    // Rounding the trained weights while they are loaded gives the same.
    let mut runs = std::fs::read_dir(output.join("runs")).unwrap().map(|run| run.unwrap().path());
    let of_march = |run: &PathBuf| run.to_str().unwrap().contains("/crates-stage-1-march-");
    let run = runs.find(of_march).unwrap();
    std::fs::write(folder.join("tokens.json"), "[1, 2, 3, 200, 5]").unwrap();
    let logits = |model: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
        command.current_dir(folder).args(["logits", "--tokens", "tokens.json", "--weights", "bf16"]);
        let output = command.args(["--output", "logits.safetensors", "--model"]).arg(model).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read(folder.join("logits.safetensors")).unwrap()
    };
    let kept = logits(&released.join("march"));
    assert!(kept == logits(&run), "the release has other weights than the run");
    // Without the trained model nothing can be written, and what is there stays.
    std::fs::remove_dir_all(run.join("checkpoints")).unwrap();
    let missing = refused(folder, arguments);
    assert!(missing.contains("is missing"), "{missing}");
    assert!(kept == logits(&released.join("march")));
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

/// Measurements that came without the runs are kept, and a further question trains the run again.
#[test]
fn measurements_without_runs_are_used() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ask = |length: usize| {
        format!(
            "[[ask]]\ncourse = \"needle\"\nname = \"{length} tokens\"\nx = {length}\ntask = \"needle\"\nlength = {length}\nsamples = 8\n"
        )
    };
    let head = "title = \"Mine\"\nquestion = \"How long?\"\npaper = \"nothing\"\ncourses = [\"needle\"]\narms = [\"GDN\"]\nscaled = [\"All.\"]\n";
    let plot = "[[figure]]\nname = \"length\"\ntitle = \"Length\"\nplot = [{ title = \"Right\", course = \"needle\", x = \"ask\", label = \"tokens\" }]\n";
    let arguments = ["mine.toml", "--size", "quick", "--seeds", "1"];
    let write =
        |asks: String| std::fs::write(folder.join("mine.toml"), format!("{head}{asks}{plot}")).unwrap();
    // All files of measurements, without the line of the checksum.
    let measured = || -> Vec<serde_json::Value> {
        let files = std::fs::read_dir(folder.join("runs/reproduce-quick/measured")).unwrap();
        let texts = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
        texts.map(|text| serde_json::from_str(text.lines().next().unwrap()).unwrap()).collect()
    };
    write(ask(32));
    ok(folder, &arguments);
    let runs = folder.join("runs/reproduce-quick/runs");
    std::fs::remove_dir_all(&runs).unwrap();
    ok(folder, &arguments);
    assert!(!runs.exists(), "a run was trained again for measurements that exist");
    let before = measured();
    write(ask(32) + &ask(64));
    ok(folder, &arguments);
    let mut after = measured();
    let asked = after[0]["measured"].as_array_mut().unwrap();
    assert_eq!(asked.len(), 2);
    asked.pop();
    assert_eq!(after[0]["measured"], before[0]["measured"]);
    assert_eq!(after[0]["curve"], before[0]["curve"]);
    assert!(before[0]["validation_loss"].as_f64().unwrap() > 0.0);
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

//! Standard output that is closed or full, files that cannot be written, and outputs that would overwrite
//! something.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{BOOK, few_steps};

/// A folder with a model, a run, texts and results, in which commands run.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        place.write("book.txt", BOOK);
        place.write("tokens.json", "[1, 2, 3]");
        place.ok(&["init", "--config", "tiny/march", "--output", "model"]);
        place.ok(&few_steps("demo/march", "run"));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    fn march(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
        command.current_dir(&self.folder).args(arguments).stdin(Stdio::null());
        command
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let out = self.march(arguments).output().unwrap();
        assert!(out.status.success(), "{arguments:?}: {}", errors(&out));
        String::from_utf8(out.stdout).unwrap()
    }

    fn refused(&self, arguments: &[&str]) -> String {
        let out = self.march(arguments).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{arguments:?}: {}", errors(&out));
        errors(&out)
    }
}

fn errors(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// A pipe that nobody reads.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

const TASK: &str = "mqar:pairs=4";

/// Commands that print, with the files that they write; `out` is a folder for these files.
fn printing(out: &str) -> Vec<(Vec<String>, Vec<String>)> {
    let all = [
        "--help |",
        "--version |",
        "eval --help |",
        "doctor --threads 1 |",
        "doctor --threads 1 --json |",
        "init --config tiny/gdn --output OUT/new | OUT/new/model.safetensors",
        "inspect model tiny/march |",
        "inspect model --list |",
        "inspect bank bank.safetensors |",
        "inspect training tiny/march |",
        "inspect training tiny/march --json |",
        "inspect precision --model model --text book.txt --threads 1 |",
        "inspect policies --model model --lengths 40 --decode 0 --policy top-k=4 --output OUT/p.json --threads 1 | OUT/p.json",
        "inspect routing --model model --text book.txt --interval 16 --html OUT/r.html --threads 1 | OUT/r.html",
        "eval tasks |",
        "eval --model run --tasks TASK --samples 3 --output OUT/e.json --threads 1 | OUT/e.json",
        "eval compare a.json a.json |",
        "eval policies --model run --tasks TASK --samples 3 --policy top-k=1 --plot OUT/p.svg --threads 1 | OUT/p.svg",
        "logits --model model --tokens tokens.json --output OUT/l.safetensors --threads 1 | OUT/l.safetensors",
        "report run --output OUT/report.html | OUT/report.html",
        "data prepare --tokenizer bytes --output OUT/tokens book.txt | OUT/tokens/meta.json",
        "data train-tokenizer --vocab-size 260 --output OUT/tokenizer.json book.txt | OUT/tokenizer.json",
        "demo --quick --steps 2 --run OUT/demo | OUT/demo/report.html OUT/demo/picture.svg OUT/demo/example.txt",
        "train tiny/gdn --run OUT/train --stop-at 1 --threads 1 SMALL | OUT/train/checkpoints/step-1/config.json",
    ];
    let small = "--set train.tokens_per_step=64 --set data.sequence_length=32 --set train.micro_batch=1 \
                 --set train.validation_sequences=1";
    let words = |text: &str| text.split_whitespace().map(String::from).collect::<Vec<_>>();
    all.iter()
        .map(|line| line.replace("OUT", out).replace("TASK", TASK).replace("SMALL", small))
        .map(|line| line.split_once('|').map(|(command, files)| (words(command), words(files))).unwrap())
        .collect()
}

fn place_with_inputs() -> Place {
    let place = Place::new();
    place.ok(&["eval", "--model", "run", "--tasks", TASK, "--samples", "3", "--output", "a.json"]);
    let generate = ["generate", "--model", "model", "--prompt", "a", "--max-tokens", "1"];
    place.ok(&[&generate[..], &["--save-bank", "bank.safetensors"]].concat());
    place
}

#[test]
fn a_closed_pipe_ends_quietly_and_a_full_disk_is_an_error() {
    let place = place_with_inputs();
    for (folder, code) in [("closed", 0), ("full", 1)] {
        fs::create_dir(place.path(folder)).unwrap();
        for (command, files) in printing(folder) {
            let arguments: Vec<&str> = command.iter().map(String::as_str).collect();
            let stdout = if folder == "closed" { closed() } else { full() };
            let out = place.march(&arguments).stdout(stdout).stderr(Stdio::piped()).output().unwrap();
            let said = errors(&out);
            assert_eq!(out.status.code(), Some(code), "{command:?}: {said}");
            assert!(!said.contains("panicked"), "{command:?}: {said}");
            let full = "error: standard output: could not write: No space left on device";
            assert_eq!(said.contains(full), code == 1, "{command:?}: {said}");
            // The work was done.
            for file in files {
                assert!(place.path(&file).metadata().is_ok_and(|file| file.len() > 0), "{command:?}: {file}");
            }
        }
    }
}

#[test]
fn standard_error_may_be_closed_or_full() {
    let place = Place::new();
    let eval = ["eval", "--model", "run", "--tasks", TASK, "--samples", "3"];
    let learn = ["data", "train-tokenizer", "--vocab-size", "9999", "--output", "t.json", "book.txt"];
    for (arguments, code) in [
        (&eval[..], 0),
        (&learn, 0),
        (&["inspect", "model", "absent"], 1),
        (&["inspect", "model", "--no-such-flag"], 2),
        (&[], 2),
    ] {
        for stderr in [closed(), full()] {
            let out = place.march(arguments).stdout(Stdio::piped()).stderr(stderr).output().unwrap();
            assert_eq!(out.status.code(), Some(code), "{arguments:?}");
        }
    }
}

/// An output that is an input, or part of one, is rejected, and nothing is changed.
#[test]
fn no_output_is_an_input() {
    let place = Place::new();
    let model = place.path("model/model.safetensors");
    symlink(&model, place.path("linked.safetensors")).unwrap();
    fs::hard_link(&model, place.path("same.safetensors")).unwrap();
    symlink(place.path("model"), place.path("again")).unwrap();
    fs::hard_link(place.path("book.txt"), place.path("copy.txt")).unwrap();
    let before = [place.read("model/model.safetensors"), place.read("book.txt"), place.read("tokens.json")];
    let logits = |output: &str| {
        place.refused(&["logits", "--model", "model", "--tokens", "tokens.json", "--output", output])
    };
    for output in [
        "model/model.safetensors",
        "again/model.safetensors",
        "linked.safetensors",
        "model/model-00001-of-00002.safetensors",
        "model/config.json",
    ] {
        assert!(logits(output).contains("is a file of the input model"), "{output}");
    }
    assert!(logits("same.safetensors").contains("does not contain logits"));
    assert!(logits("tokens.json").contains("is also an input"));
    let learn = |output: &str, text: &str| {
        place.refused(&["data", "train-tokenizer", "--vocab-size", "260", "--output", output, text])
    };
    assert!(learn("book.txt", "book.txt").contains("is also an input"));
    assert!(learn("copy.txt", "book.txt").contains("is also an input"));
    let eval = ["eval", "--model", "run", "--tasks", TASK, "--output"];
    for file in ["run/config.toml", "run/metrics.jsonl", "run/checkpoints/step-3/config.json"] {
        assert!(
            place.refused(&[&eval[..], &[file]].concat()).contains("is a file of the input run"),
            "{file}"
        );
    }
    let policies = ["eval", "policies", "--model", "model", "--also", "run", "--tasks", TASK, "--plot"];
    assert!(
        place.refused(&[&policies[..], &["run/samples.txt"]].concat()).contains("is a file of the input run")
    );
    let routing = ["inspect", "routing", "--model", "model", "--text", "book.txt", "--html", "copy.txt"];
    assert!(place.refused(&routing).contains("is also an input"));
    let policies = ["inspect", "policies", "--model", "model", "--text", "book.txt", "--output"];
    assert!(place.refused(&[&policies[..], &["book.txt"]].concat()).contains("is also an input"));
    let report = ["report", "run", "--output", "run/config.toml"];
    assert!(place.refused(&report).contains("is a file of the input run"));
    // A text that is one of the shards by another name.
    let prepare = |file: &str| {
        ["data", "prepare", "--tokenizer", "bytes", "--force", "--output", "tokens", file].map(String::from)
    };
    let run = |words: [String; 8]| place.march(&words.each_ref().map(String::as_str)).output().unwrap();
    assert!(run(prepare("book.txt")).status.success());
    fs::hard_link(place.path("tokens/tokens-00000.bin"), place.path("shard.txt")).unwrap();
    let out = run(prepare("shard.txt"));
    assert!(!out.status.success() && errors(&out).contains("is also an input"), "{}", errors(&out));
    assert!(place.path("tokens/meta.json").exists());
    let after = [place.read("model/model.safetensors"), place.read("book.txt"), place.read("tokens.json")];
    assert!(before == after);
}

/// `--output texts/*.txt` without a value for `--output`, and similar mistakes.
#[test]
fn a_file_of_another_kind_is_not_replaced() {
    let place = Place::new();
    fs::create_dir(place.path("texts")).unwrap();
    for name in ["texts/a.txt", "texts/b.txt"] {
        place.write(name, BOOK);
    }
    let learn = ["data", "train-tokenizer", "--vocab-size", "260", "--output"];
    let said = place.refused(&[&learn[..], &["texts/a.txt", "texts/b.txt"]].concat());
    assert!(said.contains("texts/a.txt: exists and is not a tokenizer.json"), "{said}");
    assert!(place.read("texts/a.txt") == BOOK.as_bytes());
    let model = ["--model", "model", "--threads", "1"];
    let asked = ["--model", "run", "--tasks", TASK, "--samples", "2", "--threads", "1"];
    let text = ["--text", "book.txt", "--interval", "16"];
    let lengths = ["--lengths", "40", "--decode", "0", "--policy", ""];
    let commands: [(&str, Vec<&str>); 7] = [
        ("tokenizer.json", [&learn[..4], &["book.txt", "--output"]].concat()),
        ("l.safetensors", [&["logits", "--tokens", "tokens.json"], &model[..], &["--output"]].concat()),
        ("e.json", [&["eval"], &asked[..], &["--output"]].concat()),
        ("p.svg", [&["eval", "policies", "--policy", "top-k=1"], &asked[..], &["--plot"]].concat()),
        ("p.json", [&["inspect", "policies"], &model[..], &lengths, &["--output"]].concat()),
        ("r.html", [&["inspect", "routing"], &model[..], &text, &["--html"]].concat()),
        ("report.html", vec!["report", "run", "--output"]),
    ];
    for (name, command) in &commands {
        place.ok(&[&command[..], &[name]].concat());
    }
    fs::copy(place.path("model/model.safetensors"), place.path("weights")).unwrap();
    // It contains the logits from which its text continues.
    let write = ["generate", "--prompt", "a", "--max-tokens", "1", "--save-bank", "bank"];
    place.ok(&[&write[..], &model].concat());
    let pages = |a: &str, b: &str| [a, b].iter().all(|name| name.ends_with(".html"));
    for (name, command) in &commands {
        let command = |output| [&command[..], &[output]].concat();
        // A file of the same kind is replaced; its mode and link are kept.
        fs::set_permissions(place.path(name), fs::Permissions::from_mode(0o600)).unwrap();
        symlink(name, place.path("link")).unwrap();
        place.ok(&command("link"));
        assert!(place.path("link").is_symlink(), "{name}");
        assert_eq!(place.path(name).metadata().unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        fs::remove_file(place.path("link")).unwrap();
        // So is an empty file.
        place.write("empty", "");
        place.ok(&command("empty"));
        place.write("notes.txt", "my notes");
        place.write("notes.json", "{\"model\": \"x\"}");
        place.write("mine.json", "{\"model\": {\"name\": \"mine\"}}");
        place.write("results.json", "{\"format\": 3, \"results\": []}");
        place.write("typed.json", "{\"format\": 2, \"model_type\": \"march\", \"results\": []}");
        place.write("notes.html", "<!doctype html>\n<html><body>mine</body></html>\n");
        let others = commands.iter().map(|(other, _)| *other).filter(|o| o != name && !pages(o, name));
        let texts = ["notes.txt", "notes.json", "mine.json", "results.json", "typed.json", "notes.html"];
        for other in others.chain(texts).chain(["weights", "bank"]) {
            let before = place.read(other);
            let said = place.refused(&command(other));
            assert!(said.contains(&format!("{other}: exists and ")), "{name} over {other}: {said}");
            assert!(place.read(other) == before, "{name} over {other}");
        }
    }
}

/// A path that cannot be written is rejected before anything else is checked.
#[test]
fn outputs_are_checked_before_the_work() {
    let place = Place::new();
    fs::create_dir(place.path("folder")).unwrap();
    symlink("nowhere", place.path("dangling")).unwrap();
    assert!(Command::new("mkfifo").arg(place.path("pipe")).status().unwrap().success());
    let (absent, task) = (["--model", "absent"], ["--tasks", TASK]);
    let commands: [Vec<&str>; 6] = [
        [&["logits", "--tokens", "tokens.json"], &absent[..], &["--output"]].concat(),
        [&["eval"], &absent[..], &task, &["--output"]].concat(),
        [&["eval", "policies"], &absent[..], &task, &["--plot"]].concat(),
        [&["inspect", "policies"], &absent[..], &["--output"]].concat(),
        [&["inspect", "routing", "--text", "absent.txt"], &absent[..], &["--html"]].concat(),
        ["data", "train-tokenizer", "--vocab-size", "260", "absent.txt", "--output"].to_vec(),
    ];
    for command in &commands {
        for (output, part) in [
            ("no/such/x", "the folder no/such does not exist; create it first"),
            ("folder", "is a folder"),
            ("new/", "is a folder"),
            ("dangling", "could not follow the link"),
            ("pipe", "is a device or a pipe"),
            ("/proc/x", "could not be written"),
        ] {
            let said = place.refused(&[&command[..], &[output]].concat());
            assert!(said.contains(part) && said.contains(output), "{command:?} {output}: {said}");
        }
    }
    place.write("file", "x");
    let prepare = ["data", "prepare", "--tokenizer", "bytes", "--output", "file", "book.txt"];
    assert!(place.refused(&prepare).contains("is a file; name a folder"));
    fs::create_dir(place.path("other")).unwrap();
    place.write("other/config.json", "{}");
    let prepare = ["data", "prepare", "--tokenizer", "bytes", "--force", "--output", "other", "book.txt"];
    assert!(place.refused(&prepare).contains("belongs to a model"));
    fs::create_dir(place.path("mine")).unwrap();
    place.write("mine/example.txt", "mine");
    let said = place.refused(&["demo", "--quick", "--run", "mine"]);
    assert!(said.contains("mine/example.txt: exists and may not be from this program"), "{said}");
    assert!(!place.path("mine/march").exists());
    // The folder of another run, whose report would be overwritten.
    place.ok(&["report", "run"]);
    let page = place.read("run/report.html");
    fs::copy(place.path("run/config.toml"), place.path("config.toml")).unwrap();
    for _ in 0..2 {
        let said = place.refused(&["demo", "--quick", "--steps", "2", "--run", "run"]);
        assert!(said.contains("run: already holds a run"), "{said}");
        assert!(place.read("run/report.html") == page && !place.path("run/march").exists());
        // Its record alone identifies it as a run.
        let _ = fs::remove_file(place.path("run/config.toml"));
    }
}

/// The checksum file next to a tokenizer is kept when tokens are written to the same folder.
#[test]
fn tokens_beside_their_tokenizer_keep_its_checksum() {
    let place = Place { folder: tempfile::tempdir().unwrap() };
    place.write("book.txt", BOOK);
    fs::create_dir(place.path("tokens")).unwrap();
    let tokenizer = "tokens/tokenizer.json";
    place.ok(&["data", "train-tokenizer", "--vocab-size", "260", "--output", tokenizer, "book.txt"]);
    let before = [place.read(tokenizer), place.read("tokens/tokenizer.json.sha256")];
    for force in [&[][..], &["--force"]] {
        let prepare = ["data", "prepare", "--tokenizer", tokenizer, "--output", "tokens", "book.txt"];
        place.ok(&[&prepare[..], force].concat());
        assert!([place.read(tokenizer), place.read("tokens/tokenizer.json.sha256")] == before);
    }
}

/// On a full disk, the output is missing or is the previous file.
#[test]
fn a_full_disk_leaves_no_empty_file() {
    let place = Place::new();
    // No file can grow beyond 0 bytes.
    let limited = |arguments: &[&str]| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_march")]);
        shell.args(arguments).current_dir(&place.folder).output().unwrap()
    };
    let left = || {
        let names = fs::read_dir(&place.folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let model = ["--model", "model", "--threads", "1"];
    let asked = ["--model", "run", "--tasks", TASK, "--samples", "2", "--threads", "1"];
    let text = ["--text", "book.txt", "--interval", "16"];
    let before = left();
    for command in [
        [&["inspect", "routing"], &model[..], &text, &["--html", "x.html"]].concat(),
        [&["eval", "policies", "--policy", "top-k=1"], &asked[..], &["--plot", "x.svg"]].concat(),
        [&["eval"], &asked[..], &["--output", "x.json"]].concat(),
        [&["logits", "--tokens", "tokens.json"], &model[..], &["--output", "x.safetensors"]].concat(),
        vec!["report", "run", "--output", "x.html"],
        vec!["data", "train-tokenizer", "--vocab-size", "260", "--output", "x.json", "book.txt"],
    ] {
        let out = limited(&command);
        assert_eq!(out.status.code(), Some(1), "{command:?}: {}", errors(&out));
        assert!(errors(&out).contains("x."), "{command:?}: {}", errors(&out));
        assert_eq!(left(), before, "{command:?}");
    }
    place.ok(&["report", "run"]);
    let page = place.read("run/report.html");
    assert!(!limited(&["report", "run"]).status.success());
    assert!(place.read("run/report.html") == page && is_page(&place.path("run/report.html")));
}

fn is_page(path: &Path) -> bool {
    march_lab::report::is_page(&fs::read(path).unwrap())
}

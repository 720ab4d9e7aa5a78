//! `march data` as a user runs it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn march() -> Command {
    Command::new(env!("CARGO_BIN_EXE_march"))
}

fn ok(out: &Output) -> String {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout.clone()).unwrap()
}

/// The error message of a command that must fail.
fn refused(out: &Output) -> String {
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success(), "it should have failed");
    assert!(!errors.contains("panicked"), "{errors}");
    errors
}

/// Every file of a folder by its name.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_string(), std::fs::read(&path).unwrap()))
        .collect()
}

fn meta(folder: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(folder.join("meta.json")).unwrap()).unwrap()
}

/// The commands in `docs/data.md` produce the `meta.json` shown there.
#[cfg(unix)]
#[test]
fn the_page_is_true() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/data.md");
    let page = std::fs::read_to_string(page).unwrap();
    let block = |kind: &str| {
        let (_, rest) = page.split_once(&format!("```{kind}\n")).unwrap();
        rest.split_once("```").unwrap().0.to_string()
    };
    let folder = tempfile::tempdir().unwrap();
    let binary = Path::new(env!("CARGO_BIN_EXE_march")).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    let script =
        Command::new("sh").args(["-ec", &block("sh")]).current_dir(&folder).env("PATH", path).output();
    let said = ok(&script.unwrap());
    assert!(said.contains("tokens-bytes: 72 tokens in 2 documents, 1 shard"), "{said}");
    let hash = meta(&folder.path().join("tokens-bytes"))["tokenizer_hash"].as_str().unwrap().to_string();
    let shown: serde_json::Value = serde_json::from_str(&block("json").replace("4ac42338…", &hash)).unwrap();
    assert!(hash.starts_with("4ac42338"));
    assert_eq!(meta(&folder.path().join("tokens-bytes")), shown);
    assert_eq!(meta(&folder.path().join("tokens-bpe"))["tokenizer"], "tokenizer.json");
}

#[test]
fn mistakes_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| march().args(arguments).current_dir(&folder).output().unwrap();
    std::fs::write(folder.path().join("a.jsonl"), "{\"text\": \"one\"}\n{\"text\": 2}\n").unwrap();
    std::fs::write(folder.path().join("a.csv"), "one").unwrap();
    let prepare = ["data", "prepare", "--tokenizer", "bytes", "--output", "out"];
    let with = |more: &[&'static str]| [&prepare[..], more].concat();
    let said = refused(&run(&with(&["a.jsonl"])));
    assert!(said.contains("a.jsonl: line 2: `text` is a number, not a text"), "{said}");
    let said = ok(&run(&with(&["--skip-bad", "a.jsonl"])));
    assert!(said.contains("4 tokens in 1 document, 1 shard, 8 B, 1 invalid record skipped"), "{said}");
    let said = refused(&run(&with(&["a.jsonl"])));
    assert!(said.contains("already complete") && said.contains("--force"), "{said}");
    for (more, names) in [
        (&["--force", "a.csv"][..], "extension"),
        (&["gone.txt"], "gone.txt: does not exist"),
        (&["--tokenizer", "none.json", "a.jsonl"], "cannot be used multiple times"),
        (&[], "required"),
        (&["--shard-tokens", "0", "a.jsonl"], "from 1 to"),
    ] {
        let said = refused(&run(&with(more)));
        assert!(said.contains(names), "{said}");
    }
    let said = refused(&run(&["data", "prepare", "--tokenizer", "none.json", "--output", "o", "a.jsonl"]));
    assert!(said.contains("none.json: does not exist; a tokenizer is `bytes`"), "{said}");
    let train = ["data", "train-tokenizer", "--output", "t.json"];
    let said = refused(&run(&[&train[..], &["--vocab-size", "100", "a.jsonl"]].concat()));
    assert!(said.contains("257"), "{said}");
    let out = run(&[&train[..], &["--vocab-size", "1000", "--skip-bad", "a.jsonl"]].concat());
    assert!(ok(&out).contains("t.json: 257 ids"));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("warning: the tokenizer has 257 ids, not 1,000"), "{said}");
    assert!(said.contains("needs more text") && said.contains("\n  vocab_size = 257\n"), "{said}");
    // A folder of others, and their `meta.json`, stay as they are.
    std::fs::create_dir(folder.path().join("mine")).unwrap();
    for (name, part) in
        [("notes.md", "other files, such as `notes.md`"), ("meta.json", "is not from `march data")]
    {
        std::fs::write(folder.path().join("mine").join(name), "{\"title\": 1}").unwrap();
        let before = contents(&folder.path().join("mine"));
        for force in [&[][..], &["--force"]] {
            let prepare =
                ["data", "prepare", "--tokenizer", "bytes", "--output", "mine", "--skip-bad", "a.jsonl"];
            let said = refused(&run(&[&prepare[..], force].concat()));
            assert!(said.contains(part) && contents(&folder.path().join("mine")) == before, "{said}");
        }
    }
}

/// A text that takes seconds to prepare, and the command that prepares it.
struct Long {
    folder: tempfile::TempDir,
}

impl Long {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = march_lm::data::builtin();
        let line = |text: &str| serde_json::json!({ "text": text }).to_string() + "\n";
        let lines: String = text.split("\n\n").map(line).collect();
        std::fs::write(folder.path().join("a.jsonl"), lines.repeat(60)).unwrap();
        std::fs::write(folder.path().join("b.txt"), text.repeat(60)).unwrap();
        std::fs::write(folder.path().join("c.txt"), text).unwrap();
        let train = ["data", "train-tokenizer", "--vocab-size", "800", "--output", "t.json", "c.txt"];
        ok(&march().args(train).current_dir(&folder).output().unwrap());
        Self { folder }
    }

    fn command(&self, output: &str) -> Command {
        let mut command = march();
        command.args(["data", "prepare", "--tokenizer", "t.json", "--output", output]);
        command.args(["--threads", "1", "--shard-tokens", "100000", "a.jsonl", "b.txt", "c.txt"]);
        command.current_dir(&self.folder).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Waits until a file exists.
fn wait_for(path: &Path, child: &mut Child) {
    let started = Instant::now();
    while !path.exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before {} was there", path.display());
        assert!(started.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_and_the_same_command_goes_on() {
    let long = Long::new();
    ok(&long.command("whole").output().unwrap());
    let mut child = long.command("out").spawn().unwrap();
    wait_for(&long.path("out/tokens-00003.bin"), &mut child);
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(130), "{said}");
    assert!(
        said.contains("stopped after") && said.contains("run the same command again to resume"),
        "{said}"
    );
    assert!(long.path("out/progress.json").exists() && !long.path("out/meta.json").exists());
    let finished = std::fs::metadata(long.path("out/tokens-00001.bin")).unwrap().modified().unwrap();
    ok(&long.command("out").output().unwrap());
    assert_eq!(contents(&long.path("out")), contents(&long.path("whole")));
    let still = std::fs::metadata(long.path("out/tokens-00001.bin")).unwrap().modified().unwrap();
    assert_eq!(still, finished, "a finished shard is not written again");
}

#[test]
fn a_killed_process_loses_nothing() {
    let long = Long::new();
    ok(&long.command("whole").output().unwrap());
    let mut kills = 0;
    for wait in [3, 60, 150, 40, 220, 300, 90] {
        let mut child = long.command("out").spawn().unwrap();
        wait_for(&long.path("out/progress.json"), &mut child);
        std::thread::sleep(Duration::from_millis(wait));
        // Fails only if the process has already ended.
        let _ = child.kill();
        if !child.wait_with_output().unwrap().status.success() {
            kills += 1;
        }
        if long.path("out/meta.json").exists() {
            break;
        }
    }
    assert!(kills > 1, "it was too fast to be killed");
    if !long.path("out/meta.json").exists() {
        ok(&long.command("out").output().unwrap());
    }
    let mut out = contents(&long.path("out"));
    // In case the last kill happened after `meta.json` was written.
    out.retain(|name, _| name != "prepare.lock" && name != "progress.json");
    assert_eq!(out, contents(&long.path("whole")));
}

//! Training from the command line: the golden losses, and runs that are stopped, killed and damaged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{ok, refused, text};

fn metrics(run: &Path) -> Vec<Value> {
    let lines = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The command reproduces the losses of `training.json`, also if a step consists of two calls.
#[test]
fn golden_losses() {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    for name in ["transformer", "gated_deltanet", "log_linear", "march", "march_topk"] {
        let model = golden.join(name);
        let keys: Value =
            serde_json::from_str(&fs::read_to_string(model.join("config.json")).unwrap()).unwrap();
        let expected: Value =
            serde_json::from_str(&fs::read_to_string(model.join("training.json")).unwrap()).unwrap();
        let mut config = String::from("[model]\n");
        for (key, value) in keys.as_object().unwrap() {
            if key != "hidden_act" && !value.is_null() {
                config += &format!("{key} = {value}\n");
            }
        }
        config += &format!(
            "[data]\nkind = \"batches\"\npath = '{}'\nsequence_length = 64\n",
            text(&model.join("training.json"))
        );
        config +=
            "[train]\nsteps = 6\ntokens_per_step = 128\nlearning_rate = 0.004\nwarmup = 0.5\ndecay = 0\n";
        let file = folder.path().join("golden.toml");
        fs::write(&file, config).unwrap();
        for micro_batch in ["1", "2"] {
            let run = folder.path().join(format!("{name}-{micro_batch}"));
            let set = format!("train.micro_batch={micro_batch}");
            let arguments = ["train", text(&file), "--run", text(&run), "--set", &set, "--init-from"];
            ok(&[&arguments[..], &[text(&model)]].concat());
            let steps: Vec<Value> =
                metrics(&run).into_iter().filter(|line| line.get("loss").is_some()).collect();
            assert_eq!(steps.len(), 6);
            for (step, line) in steps.iter().enumerate() {
                let (got, want) =
                    (line["loss"].as_f64().unwrap(), expected["losses"][step].as_f64().unwrap());
                assert!((got - want).abs() < 1e-4, "{name}, step {step}: {got}, {want} expected");
                let (got, want) = (
                    line["learning_rate"].as_f64().unwrap(),
                    expected["learning_rates"][step].as_f64().unwrap(),
                );
                assert!((got - want).abs() < 1e-12, "{name}, step {step}: rate {got}, {want} expected");
            }
        }
    }
}

/// A configuration that trains in a few seconds.
fn small(folder: &Path, steps: u64) -> PathBuf {
    let path = folder.join("small.toml");
    let config = format!(
        "extends = \"tiny/march\"\n[model]\nhidden_size = 16\nnum_hidden_layers = 2\nintermediate_size = 24\n\
         num_heads = 2\nhead_dim = 4\nanchor_interval = 8\nrouting_dim = 4\n\
         [data]\nsequence_length = 40\n[train]\nsteps = {steps}\ntokens_per_step = 160\nmicro_batch = 2\n\
         validate_every = 7\nvalidation_sequences = 3\nsample_every = 20\nsample_tokens = 5\nsave_every = 10\nkeep = 3\n"
    );
    fs::write(&path, config).unwrap();
    path
}

/// Every file of a folder and its bytes.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut list: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.file_name().unwrap().to_str().unwrap().to_string(), fs::read(&path).unwrap())
        })
        .collect();
    list.sort();
    list
}

fn checkpoint(run: &Path, step: u64) -> PathBuf {
    run.join("checkpoints").join(format!("step-{step}"))
}

/// The metrics without the speed, which varies.
fn comparable(run: &Path) -> Vec<Value> {
    let mut lines = metrics(run);
    for line in &mut lines {
        for key in ["tokens_per_second", "checksum"] {
            line.as_object_mut().unwrap().remove(key);
        }
    }
    lines
}

#[test]
fn stopping_and_going_on_equals_never_stopping() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path(), 60);
    let whole = folder.path().join("whole");
    ok(&["train", text(&config), "--run", text(&whole), "--threads", "1"]);
    let want = contents(&checkpoint(&whole, 60));
    assert_eq!(want.len(), 6);

    // Stopped after step 33 and resumed.
    let run = folder.path().join("stopped");
    let said = ok(&["train", text(&config), "--run", text(&run), "--threads", "1", "--stop-at", "33"]);
    assert!(said.contains(&format!("march train --resume {}", text(&run))), "{said}");
    ok(&["train", "--resume", text(&run), "--threads", "1"]);
    assert!(contents(&checkpoint(&run, 60)) == want, "stopped and resumed");
    assert_eq!(comparable(&run), comparable(&whole));
    let samples = |run: &Path| fs::read_to_string(run.join("samples.txt")).unwrap();
    assert_eq!(samples(&run), samples(&whole));
    let kept: Vec<bool> = [20, 30, 33, 40, 50, 60].iter().map(|&n| checkpoint(&run, n).exists()).collect();
    assert_eq!(kept, [false, false, false, true, true, true]);

    // The newest checkpoint is truncated: the previous one is used, and this is reported.
    let run = folder.path().join("torn");
    ok(&["train", text(&config), "--run", text(&run), "--threads", "1", "--stop-at", "40"]);
    for (step, file) in [(40, "optimizer.safetensors"), (30, "progress.json")] {
        let path = checkpoint(&run, step).join(file);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    }
    let said = ok(&["train", "--resume", text(&run), "--threads", "1"]);
    assert!(said.contains("set aside") && said.contains("step-40") && said.contains("step-20"), "{said}");
    assert!(contents(&checkpoint(&run, 60)) == want, "after damage");
    assert_eq!(comparable(&run), comparable(&whole));
}

#[test]
fn a_killed_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path(), 2000);
    let run = folder.path().join("killed");
    let mut child = Command::new(env!("CARGO_BIN_EXE_march"))
        .args(["train", text(&config), "--run", text(&run), "--threads", "1"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while !checkpoint(&run, 20).exists() && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let said = ok(&["train", "--resume", text(&run), "--threads", "1", "--stop-at", "200"]);
    assert!(said.contains("resumed       from"), "{said}");
    let whole = folder.path().join("whole");
    ok(&["train", text(&config), "--run", text(&whole), "--threads", "1", "--stop-at", "200"]);
    assert!(contents(&checkpoint(&run, 200)) == contents(&checkpoint(&whole, 200)));
    assert_eq!(comparable(&run), comparable(&whole));
}

/// Text files become shards, and a run trains on them; its checkpoint includes the tokenizer.
#[test]
fn shards_are_learned_from() {
    let folder = tempfile::tempdir().unwrap();
    let book = folder.path().join("book.txt");
    let lines: String =
        (0..400).map(|i| format!("line {i} of a small book, {} words\n", i * i % 17)).collect();
    fs::write(&book, lines).unwrap();
    let shards = folder.path().join("shards");
    ok(&["data", "prepare", "--tokenizer", "bytes", "--output", text(&shards), text(&book)]);
    let config = small(folder.path(), 30);
    let run = folder.path().join("run");
    let path = format!("data.path={}", text(&shards));
    let set = ["--set", "data.kind=shards", "--set", &path, "--run", text(&run), "--threads", "1"];
    ok(&[&["train", text(&config), "--stop-at", "11"], &set[..]].concat());
    ok(&["train", "--resume", text(&run), "--threads", "1"]);
    let losses: Vec<f64> = metrics(&run).iter().filter_map(|line| line["loss"].as_f64()).collect();
    assert!(losses.len() == 30 && losses[29] < losses[0] - 0.5, "{losses:?}");
    assert!(metrics(&run).iter().any(|line| line["validation_loss"].as_f64().is_some()));
    assert!(checkpoint(&run, 30).join("tokenizer.json").exists());
    fs::write(shards.join("meta.json"), "{").unwrap();
    assert!(refused(&["train", "--resume", text(&run)]).contains("meta.json"));
}

/// The command in a folder, with its output and errors as one text, and whether it succeeded.
fn march_in(folder: &Path, words: &str) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
    let out = command.args(words.split_whitespace()).current_dir(folder).output().unwrap();
    let said = [out.stdout, out.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    assert!(!said.contains("panicked"), "{words}: {said}");
    (out.status.success(), said)
}

/// A text is trained on at once. Its tokens are in the run's folder, so the run resumes without the text, also elsewhere.
#[test]
fn a_text_is_learned_from_at_once() {
    let keep = tempfile::tempdir().unwrap();
    let folder = keep.path();
    let ok = |words: &str| {
        let (success, said) = march_in(folder, words);
        assert!(success, "{words}: {said}");
        said
    };
    let book: String =
        (0..170).map(|i| format!("line {i} of a small book, {} words\n", i * i % 17)).collect();
    fs::create_dir_all(folder.join("texts/more")).unwrap();
    fs::create_dir(folder.join("none")).unwrap();
    for (name, text) in [
        ("book.txt", book.as_str()),
        ("texts/a.txt", &book),
        ("texts/more/b.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n"),
        ("texts/notes.md", "not a text"),
        ("short.txt", "too short"),
    ] {
        fs::write(folder.join(name), text).unwrap();
    }
    let few = "--steps 2 --set train.tokens_per_step=2048 --set train.micro_batch=1 --set train.validate_every=1 \
               --set train.sample_every=0 --threads 1";
    ok(&format!("train --data book.txt --run whole {few}"));
    let said = ok(&format!("train book.txt --stop-at 1 {few}"));
    assert!(said.contains("data          book.txt: 5,731 tokens (bytes)"), "{said}");
    assert!(said.contains("run           runs/book\n") && said.contains("sequences     of 512"), "{said}");
    let config = fs::read_to_string(folder.join("runs/book/config.toml")).unwrap();
    let tokens = folder.canonicalize().unwrap().join("runs/book/data");
    assert!(config.contains("kind = \"shards\"") && config.contains(text(&tokens)), "{config}");
    fs::remove_file(folder.join("book.txt")).unwrap();
    fs::rename(folder.join("runs/book"), folder.join("moved")).unwrap();
    ok("train --resume moved --threads 1");
    let last = |run: &str| contents(&checkpoint(&folder.join(run), 2));
    assert!(last("moved") == last("whole"));
    assert!(metrics(&folder.join("moved")).iter().any(|line| line["validation_loss"].as_f64().is_some()));

    // The model of a preset on all texts of a folder, and on a folder of tokens, which stays where it is.
    ok(&format!("train tiny/gdn --data texts {few}"));
    let meta = fs::read_to_string(folder.join("runs/tiny-gdn/data/meta.json")).unwrap();
    let meta: Value = serde_json::from_str(&meta).unwrap();
    assert_eq!((&meta["documents"], &meta["tokenizer"]), (&3.into(), &"bytes".into()));
    ok(&format!("train tiny/gdn --data moved/data --run tokens {few}"));
    assert!(!folder.join("tokens/data").exists());

    for (words, part) in [
        ("texts/a.txt --data texts", "both name a text"),
        ("gone.txt", "gone.txt: does not exist"),
        ("texts", "`march train --data texts`"),
        ("moved", "`march train --resume moved`"),
        ("--data texts --set data.kind=recall", "--set data.kind and a text are both given"),
        ("--data none", "none: has no text files"),
        ("--data texts/notes.md", "unknown extension"),
        ("short.txt", "too short: it has 10 tokens"),
        ("demo/march --data texts/a.txt", "`vocab_size` is"),
        ("--data texts --run moved", "already holds a run"),
        ("", "required"),
    ] {
        let (success, said) = march_in(folder, &format!("train {words}"));
        assert!(!success && said.contains(part), "{words}: {said}");
    }
    let mut runs: Vec<_> =
        fs::read_dir(folder.join("runs")).unwrap().map(|e| e.unwrap().file_name()).collect();
    runs.sort();
    assert_eq!(runs, ["tiny-gdn"], "a refused run leaves nothing behind");
}

#[test]
fn recomputing_blocks_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path(), 10);
    let [plain, again] = ["off", "on"].map(|recompute| {
        let run = folder.path().join(recompute);
        let set = format!("train.recompute={recompute}");
        ok(&["train", text(&config), "--run", text(&run), "--threads", "1", "--set", &set]);
        contents(&checkpoint(&run, 10))
    });
    assert!(plain == again);
}

#[test]
fn mistakes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path(), 10);
    let run = folder.path().join("run");
    for (set, part) in [
        ("train.steps=0", "`steps` is 0"),
        ("train.stepps=5", "`steps`"),
        ("train.tokens_per_step=100", "a multiple of `sequence_length`"),
        ("train.schedule=linear", "`wsd`, `cosine` or `constant`"),
        ("data.kind=files", "`builtin`, `shards`, `recall`, `needles` or `batches`"),
        ("data.sequence_length=40000", "multiple"),
        ("data.sequence_length=40000000", "`sequence_length` is 40000000"),
        ("train.tokens_per_step=100000000000", "--set train.tokens_per_step=100000000000: `tokens_per_step`"),
        ("model.vocab_size=100", "`vocab_size` is 100"),
        ("steps=5", "section.key=value"),
        ("train.learning_rate=fast", "it must be a number"),
    ] {
        let errors = refused(&["train", text(&config), "--run", text(&run), "--set", set]);
        assert!(errors.contains(part), "{set}: {errors}");
    }
    assert!(!run.exists());
    assert!(refused(&["train", "--resume", text(&run)]).contains("config.toml"));
    ok(&["train", text(&config), "--run", text(&run)]);
    assert!(refused(&["train", text(&config), "--run", text(&run)]).contains("already holds a run"));
    let other = folder.path().join("other");
    let from = folder.path().join("nowhere");
    let arguments = ["train", text(&config), "--run", text(&other), "--init-from", text(&from)];
    assert!(refused(&arguments).contains("nowhere"));
    // A learning rate at which any model diverges: the run ends with the step and advice, and keeps its
    // checkpoints.
    let wild = folder.path().join("wild");
    let arguments = ["train", text(&config), "--run", text(&wild), "--set", "train.learning_rate=1e30"];
    let errors = refused(&[&arguments[..], &["--set", "train.save_every=1"]].concat());
    assert!(errors.contains("Norms by layer") && errors.contains("learning_rate"), "{errors}");
    assert!(checkpoint(&wild, 1).join("model.safetensors").exists());
}

/// Without a terminal, a note replaces the dashboard, and the lines are printed as usual.
#[test]
fn a_dashboard_needs_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path(), 3);
    let run = folder.path().join("run");
    let said = ok(&["train", text(&config), "--run", text(&run), "--dashboard"]);
    for part in ["no dashboard", "step      3/3 100 %", "validation    step 3", "saved ", "done: "] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains('\u{1b}'), "{said}");
    assert_eq!(said.matches("no dashboard").count(), 1);
}

#[test]
fn sessions_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path(), 6);
    let run = folder.path().join("run");
    ok(&["train", text(&config), "--run", text(&run), "--threads", "1", "--stop-at", "4"]);
    ok(&["train", "--resume", text(&run), "--threads", "1"]);
    let path = run.join("environment.json");
    let sessions: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let sessions = sessions.as_array().unwrap();
    assert_eq!(sessions.len(), 2);
    for session in sessions {
        for key in ["program", "processor", "instructions", "kernels", "memory", "system", "kernel", "cores"]
        {
            assert!(session.get(key).is_some(), "{key}: {session}");
        }
        assert!(session["program"].as_str().unwrap().contains(env!("CARGO_PKG_VERSION")));
        assert!(session["features"].is_array() && session["cores"].as_u64().unwrap() > 0);
        assert_eq!(session["threads"], 1);
        let started = session["started"].as_str().unwrap();
        assert!(started.len() == 20 && started.starts_with("20") && started.ends_with('Z'), "{started}");
    }
    assert_eq!((&sessions[0]["step"], &sessions[1]["step"]), (&Value::from(0), &Value::from(4)));
    assert_eq!(sessions[0]["arguments"][0], "train");
    assert_eq!(sessions[1]["arguments"][1], "--resume");
    ok(&["report", text(&run)]);
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(page.contains("<h2>Machine</h2>") && page.contains("<td>4</td>"), "{page}");
    // A file that was edited does not prevent training, and is kept.
    fs::write(&path, "mine").unwrap();
    assert!(ok(&["train", "--resume", text(&run)]).contains("environment.json"));
    assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
}
